"""SGLang's native endpoints, which slime, miles, AReaL and others speak to engines that run already.

Source: sglang 0.5.23, srt.entrypoints.http_server; slime 624b824a, slime.backends.sglang_utils.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from outrider import __version__
from outrider.cluster.api.openai.answer import Answer, GenerationResponse
from outrider.cluster.api.openai.endpoints import read_json
from outrider.cluster.api.openai.format import CompletionFormat
from outrider.cluster.api.rollouts.doors import TrainerDoors, lease_of, outcome, refusal
from outrider.cluster.api.rollouts.sglang_answer import SGLangAnswer
from outrider.cluster.api.rollouts.sglang_protocol import (
    AbortBody,
    FolderUpdateBody,
    GenerateBody,
    GroupBody,
    GroupUpdateBody,
    LeaveGroupBody,
    PauseBody,
    parse_sglang,
)
from outrider.cluster.common.errors import InvalidRequest, OutriderError
from outrider.cluster.gateway.request_parser import RequestInput
from outrider.verifier_service.messages.engine import PauseMode

PAUSE_MODES = {"abort": PauseMode.ABORT, "in_place": PauseMode.KEEP, "retract": PauseMode.RETRACT}
HEALTH_TIMEOUT_S = 20.0
_PICKLED = "its tensors are pickled; use /update_weights_from_distributed or /update_weights_from_disk"


def add_sglang_routes(app: FastAPI, doors: TrainerDoors) -> None:
    _add_generate(app, doors)
    _add_generation_control(app, doors)
    _add_weight_routes(app, doors)
    _add_state_routes(app, doors)


def _add_generate(app: FastAPI, doors: TrainerDoors) -> None:
    gateway = doors.gateway

    @app.put("/generate")
    @app.post("/generate")
    async def generate(request: Request) -> Response:
        body = parse_sglang(await read_json(request), GenerateBody)
        gateway.check_model_name(body.model)
        answer = Answer(gateway, CompletionFormat(), created=0, include_usage=False, return_token_ids=True)
        prompts = body.prompts(answer.id, request.headers.get("x-smg-routing-key"))
        answer.requests = [await gateway.parse(prompt.input) for prompt in prompts]
        if len({valid.n for valid in answer.requests}) > 1:
            raise InvalidRequest("sampling_params: n must be the same for all prompts", "sampling_params")
        native = SGLangAnswer(answer=answer, body=body, prompts=prompts, weight_version=doors.fleet.reported_version)
        return GenerationResponse(native, stream=bool(body.stream))

    @app.post("/abort_request")
    async def abort(request: Request) -> Response:
        body = parse_sglang(await read_json(request), AbortBody)
        if body.abort_all:
            await doors.every.abort_all()
        elif body.rid:
            await doors.every.abort([body.rid])
        return Response()

    @app.get("/health_generate")
    async def health_generate() -> Response:
        """Generate one token; a fleet that is paused generates none, and is as healthy as it reports."""
        if not await doors.is_healthy() or not await _generates(doors):
            return Response(status_code=503)
        return Response()


async def _generates(doors: TrainerDoors) -> bool:
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            if (await doors.fleet.state()).is_paused:
                return True
            request = await doors.gateway.parse(RequestInput(prompt=[0], max_tokens=1, store=False))
            async with aclosing(doors.gateway.generate(request)) as chunks:  # type: ignore[type-var]
                async for _ in chunks:
                    pass
    except (OutriderError, TimeoutError):
        return False
    return True


def _add_generation_control(app: FastAPI, doors: TrainerDoors) -> None:
    @app.post("/pause_generation")
    async def pause(request: Request) -> Response:
        body = parse_sglang(await read_json(request, empty={}), PauseBody)
        mode = body.mode or "abort"
        if mode not in PAUSE_MODES:
            raise InvalidRequest(f"mode must be one of {', '.join(PAUSE_MODES)}, not {mode!r}", "mode")
        await doors.fleet.pause(PAUSE_MODES[mode], lease_of(body.lease_s))
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    @app.post("/continue_generation")
    async def resume() -> Response:
        await doors.fleet.resume()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    @app.get("/flush_cache")
    @app.post("/flush_cache")
    async def flush() -> Response:
        await doors.fleet.flush()
        return PlainTextResponse("Cache flushed.\n")


def _add_weight_routes(app: FastAPI, doors: TrainerDoors) -> None:
    fleet = doors.fleet

    @app.post("/init_weights_update_group")
    async def join(request: Request) -> Response:
        body = parse_sglang(await read_json(request), GroupBody)
        fields = ("master_address", "master_port", "rank_offset", "world_size", "group_name", "backend")
        return await outcome("Joining the group", fleet.join_group(**{name: getattr(body, name) for name in fields}))

    @app.post("/destroy_weights_update_group")
    async def leave(request: Request) -> Response:
        body = parse_sglang(await read_json(request), LeaveGroupBody)
        return await outcome("Leaving the group", fleet.leave_group(body.group_name))

    @app.post("/update_weights_from_distributed")
    async def update_from_group(request: Request) -> Response:
        body = parse_sglang(await read_json(request), GroupUpdateBody)
        if body.abort_all_requests:
            await doors.every.abort_all()
        update = fleet.update_from_group(
            names=body.names,
            dtypes=body.dtypes,
            shapes=body.shapes,
            group_name=body.group_name,
            is_flattened=body.is_flattened,
            weight_version=body.weight_version,
        )
        return await outcome("The update", update)

    @app.post("/update_weights_from_disk")
    async def update_from_folder(request: Request) -> Response:
        body = parse_sglang(await read_json(request), FolderUpdateBody)
        if body.abort_all_requests:
            await doors.every.abort_all()
        update = fleet.update_drafters if body.selector == "draft" else fleet.update_from_folder
        return await outcome("The update", update(body.model_path, body.weight_version))

    @app.post("/update_weights_from_tensor")
    async def update_from_tensor() -> Response:
        raise refusal("/update_weights_from_tensor", _PICKLED)


def _add_state_routes(app: FastAPI, doors: TrainerDoors) -> None:
    gateway, fleet = doors.gateway, doors.fleet

    async def version() -> dict[str, Any]:
        state = await fleet.state()
        return {"weight_version": state.weight_version, "weight_digest": state.weight_digest}

    async def model_info() -> dict[str, Any]:
        return {
            "model_path": doors.model_path,
            "served_model_name": gateway.model.name,
            "tokenizer_path": doors.model_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            **await version(),
        }

    async def server_info() -> dict[str, Any]:
        """Return SGLang's fields, and vLLM's: TRL reads them at the same path."""
        return {**await model_info(), **await _parallel_info(doors), "version": __version__, **_vllm_info(doors)}

    for path, answer in (
        ("/get_weight_version", version),
        ("/weight_version", version),
        ("/model_info", model_info),
        ("/get_model_info", model_info),
        ("/server_info", server_info),
        ("/get_server_info", server_info),
    ):
        app.get(path)(answer)

    async def load() -> dict[str, Any]:
        """Return one load for the whole fleet: the gateways together know every request."""
        num_requests = num_waiting = await doors.every.num_running()
        with contextlib.suppress(OutriderError):  # no verifier: all wait
            state = await fleet.state()
            if not state.is_paused:
                num_waiting = max(0, num_requests - state.num_requests)
        return {
            "dp_rank": 0,
            "num_reqs": num_requests,
            "num_running_reqs": num_requests - num_waiting,
            "num_waiting_reqs": num_waiting,
        }

    @app.get("/get_load")
    async def loads_alone() -> list[dict[str, Any]]:
        return [await load()]

    @app.get("/v1/loads")
    async def loads() -> dict[str, Any]:
        now = datetime.datetime.now(datetime.UTC).isoformat()
        about = {"timestamp": now, "version": __version__, "num_accelerators": await fleet.num_ranks()}
        return {**about, "loads": [{"timestamp": now, **await load()}]}


async def _parallel_info(doors: TrainerDoors) -> dict[str, Any]:
    """Return how many ranks there are, as slime counts them: verifiers are data-parallel."""
    return {
        "tp_size": doors.tensor_parallel_size,
        "pp_size": 1,
        "dp_size": len(doors.fleet.verifiers),
        "ep_size": 1,
        "moe_dp_size": 1,
        "num_gpus": await doors.fleet.num_ranks(),
        "dtype": doors.dtype,
        "enable_memory_saver": False,
        "enable_return_routed_experts": False,
        "encoder_only": False,
        "disaggregation_bootstrap_port": None,
    }


def _vllm_info(doors: TrainerDoors) -> dict[str, Any]:
    size = doors.tensor_parallel_size
    parallel = {"tensor_parallel_size": size, "data_parallel_size": len(doors.fleet.verifiers), "world_size": size}
    model = {"model": doors.model_path, "dtype": doors.dtype, "max_model_len": doors.gateway.model.max_model_len}
    config = {"model_config": model, "parallel_config": parallel, "lora_config": None, "weight_transfer_config": None}
    return {"vllm_config": config, "vllm_env": {}, "system_env": {}}
