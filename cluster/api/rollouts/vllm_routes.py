"""vLLM's and prime-rl's endpoints for trainers: pause, resume, weights from a folder, tokens in and out.

Sources: vllm 0.32, vllm.entrypoints.rl.online.api_router; prime-rl 559b4477, src.prime_rl.utils.client. vLLM's
own weight transfer opens NCCL by a pickled hand-shake: it is refused by name.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from outrider.cluster.api.openai.answer import Answer, GenerationResponse
from outrider.cluster.api.openai.endpoints import read_json
from outrider.cluster.api.openai.format import CompletionFormat
from outrider.cluster.api.openai.protocol import ModelBody, parse_body
from outrider.cluster.api.rollouts.doors import TrainerDoors, lease_of, refusal
from outrider.cluster.api.rollouts.token_generate import TokenAnswer, TokenBody
from outrider.cluster.common.errors import InvalidRequest
from outrider.verifier_service.messages.engine import PauseMode

STEP_FOLDER = re.compile(r"step_(\d+)(?:/|$)")
_INSTEAD = 'POST /update_weights {"weight_dir": FOLDER}, or SGLang\'s /init_weights_update_group'
_PICKLED = f"vLLM's weight transfer begins with a pickled hand-shake; instead: {_INSTEAD}"
REFUSED = {  # endpoints of vLLM that a trainer may call
    "/init_weight_transfer_engine": _PICKLED,
    "/start_weight_update": _PICKLED,
    "/start_draft_weight_update": _PICKLED,
    "/finish_weight_update": _PICKLED,
    "/collective_rpc": f"it names methods of vLLM's workers; instead: {_INSTEAD}",
}


class FolderBody(ModelBody):
    """The body of /update_weights: prime-rl's folder; vLLM's `update_info` is refused."""

    passed_fields: ClassVar[frozenset[str]] = frozenset(("update_info",))
    weight_dir: str | None = None
    weight_version: str | None = None  # ours

    @property
    def version(self) -> str | None:
        """The version, else the step that prime-rl's folder is named for; a call that is repeated has the same."""
        step = STEP_FOLDER.search(self.weight_dir or "")
        return self.weight_version or (step and step[1])


class AbortManyBody(ModelBody):
    request_ids: list[str] | None = None


def add_vllm_routes(app: FastAPI, doors: TrainerDoors) -> None:
    _add_generate(app, doors)
    _add_pauses(app, doors)
    _add_weights(app, doors)


def _add_generate(app: FastAPI, doors: TrainerDoors) -> None:
    @app.post("/inference/v1/generate")
    async def generate(request: Request) -> Response:
        body = parse_body(await read_json(request), TokenBody)
        doors.gateway.check_model_name(body.model)
        answer = Answer(doors.gateway, CompletionFormat(), created=0, include_usage=False, return_token_ids=True)
        answer.requests = [await doors.gateway.parse(body.input(request.headers.get("x-session-id")))]
        return GenerationResponse(TokenAnswer(answer=answer, body=body), stream=bool(body.stream))

    @app.post("/abort_requests")
    @app.post("/inference/v1/abort_requests")
    async def abort(request: Request) -> dict[str, Any]:
        body = parse_body(await read_json(request, empty={}), AbortManyBody)
        if not body.request_ids:
            return {"status": "aborted", "aborted": await doors.every.abort_all()}
        return {"status": "aborted", "aborted": len(await doors.every.abort(body.request_ids))}


def _add_pauses(app: FastAPI, doors: TrainerDoors) -> None:
    fleet = doors.fleet

    @app.post("/pause")
    async def pause(mode: str = "abort", lease_s: str | None = None) -> dict[str, Any]:
        """Pause; `lease_s` is ours. No KV of older weights is found, so `clear_cache` has nothing to do."""
        modes = [item.value for item in PauseMode]
        if mode not in modes:
            raise InvalidRequest(f"mode must be one of {', '.join(modes)}, not {mode!r}", "mode")
        await fleet.pause(PauseMode(mode), lease_of(lease_s))
        return {"status": "paused"}

    @app.post("/resume")
    async def resume() -> dict[str, Any]:
        await fleet.resume()
        return {"status": "resumed"}

    @app.get("/is_paused")
    async def is_paused() -> dict[str, Any]:
        return {"is_paused": (await fleet.state()).is_paused}

    @app.post("/reset_prefix_cache")
    async def reset() -> dict[str, Any]:
        """Empty the prefix caches; "success" is false while requests are here."""
        try:
            await fleet.flush()
        except InvalidRequest:
            return {"success": False}
        return {"success": True}


def _add_weights(app: FastAPI, doors: TrainerDoors) -> None:
    @app.post("/update_weights")
    async def update(request: Request) -> dict[str, Any]:
        body = parse_body(await read_json(request), FolderBody)
        if body.weight_dir is None:
            raise refusal("/update_weights without weight_dir", _PICKLED)
        result = await doors.fleet.update_from_folder(body.weight_dir, body.version)
        return {"status": "ok", "message": "Weights updated", "weight_version": result.weight_version}

    @app.get("/weight_info")
    async def weight_info() -> dict[str, Any]:
        state = await doors.fleet.state()
        return {"weight_version": state.weight_version, "weight_digest": state.weight_digest}

    @app.get("/get_world_size")
    async def world_size() -> dict[str, Any]:
        return {"world_size": await doors.fleet.num_ranks()}

    @app.get("/liveness")
    async def liveness() -> Response:
        is_live = await doors.is_healthy()
        return JSONResponse({"status": "ok" if is_live else "unhealthy"}, status_code=200 if is_live else 503)

    for path, reason in REFUSED.items():
        _add_refusal(app, path, reason)


def _add_refusal(app: FastAPI, path: str, reason: str) -> None:
    @app.post(path)
    async def refuse() -> Response:
        raise refusal(path, reason)
