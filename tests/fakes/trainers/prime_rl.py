"""How prime-rl speaks to its servers: its own code where it is installed, else the same calls written anew.

Sources: prime-rl 559b4477, src.prime_rl.utils.client (weights); renderers 0.1.12, renderers.client (generation).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai

READY_MARKER = "NCCL_READY"
MAX_TRIES = 10
try:
    from prime_rl.utils.client import check_health, maybe_check_has_model, prefill_logprobs, update_weights

    IS_GENUINE = True
except ImportError:
    IS_GENUINE = False

    async def _post(client: httpx.AsyncClient, path: str, **kwargs: Any) -> None:
        """Post, and again after an error of the server's or a lost connection: every call may arrive twice."""
        for number in range(1, MAX_TRIES + 1):
            try:
                answer = await client.post(path, **kwargs)
            except httpx.TransportError:
                if number == MAX_TRIES:
                    raise
            else:
                if answer.status_code < 500 or number == MAX_TRIES:
                    answer.raise_for_status()
                    return
            await asyncio.sleep(0.05)

    async def check_health(clients: Sequence[httpx.AsyncClient], timeout: int = 20) -> None:
        async with asyncio.timeout(timeout):
            while not all([(await client.get("/health")).status_code == 200 for client in clients]):
                await asyncio.sleep(0.1)

    async def maybe_check_has_model(clients: Sequence[httpx.AsyncClient], model_name: str) -> None:
        for client in clients:
            models = (await client.get("/v1/models")).json()["data"]
            if model_name not in [model["id"] for model in models]:
                raise ValueError(f"{model_name} is not among the models")

    async def update_weights(
        clients: Sequence[httpx.AsyncClient], weight_dir: Path | None, lora_name: str | None = None, step: int = 0
    ) -> None:
        async def on_all(path: str, **kwargs: Any) -> None:
            await asyncio.gather(*(_post(client, path, **kwargs) for client in clients))

        await on_all("/pause", params={"mode": "keep", "clear_cache": "false"})
        try:
            if weight_dir is not None:
                (weight_dir / READY_MARKER).touch()
            await on_all("/update_weights", json={"weight_dir": None if weight_dir is None else str(weight_dir)})
        finally:
            await on_all("/resume")

    async def prefill_logprobs(client: openai.AsyncOpenAI, model: str, token_ids: list[int]) -> list[float]:
        params = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1}
        body = {"model": model, "token_ids": token_ids, "sampling_params": params}
        answer = await client.post(f"{_root(client)}/inference/v1/generate", cast_to=httpx.Response, body=body)
        entries = answer.json()["prompt_logprobs"]
        return [0.0 if not entry else float(next(iter(entry.values()))["logprob"]) for entry in entries]


def _root(client: openai.AsyncOpenAI) -> str:
    return str(client.base_url).rstrip("/").removesuffix("/v1")


try:
    from renderers.client import generate

    HAS_RENDERERS = True
except ImportError:
    HAS_RENDERERS = False

    async def generate(
        *,
        client: openai.AsyncOpenAI,
        renderer: PlainRenderer,
        messages: list[Any],
        model: str,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        cache_salt: str | None = None,
        extra_headers: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """Generate from token ids; refuse an answer whose log probabilities prove nothing."""
        params = {**sampling_params, "stop_token_ids": renderer.get_stop_token_ids(), "logprobs": 1}
        body = {"model": model, "token_ids": prompt_ids, "sampling_params": {"skip_special_tokens": False, **params}}
        answer = await client.post(
            f"{_root(client)}/inference/v1/generate",
            cast_to=httpx.Response,
            body=body | ({} if cache_salt is None else {"cache_salt": cache_salt}),
            options={"headers": extra_headers or {}},
        )
        data = answer.json()
        choice = data["choices"][0]
        content = choice["logprobs"]["content"]
        if [entry["token"] for entry in content] != [f"token_id:{id_}" for id_ in choice["token_ids"]]:
            raise ValueError("the log probabilities are not those of the tokens")
        if not all(math.isfinite(entry["logprob"]) and entry["logprob"] != -9999.0 for entry in content):
            raise ValueError("a log probability is none")
        return {
            "request_id": data["request_id"],
            "prompt_ids": prompt_ids,
            "completion_ids": choice["token_ids"],
            "completion_logprobs": [entry["logprob"] for entry in content],
            "finish_reason": choice["finish_reason"],
        }


class PlainRenderer:
    """A renderer that is given token ids and leaves the answer as it is."""

    supports_tools = True

    def get_stop_token_ids(self) -> list[int]:
        return []

    def parse_response(self, token_ids: list[int], **_: Any) -> SimpleNamespace:
        return SimpleNamespace(content="", reasoning_content=None, tool_calls=[], reasoning_complete=True)
