"""How slime speaks to engines that run already: its own code where it is installed, else the same calls written anew.

Source: slime 624b824a: slime.backends.sglang_utils (sglang_engine, external, server_control),
slime.utils.http_utils, slime.rollout.sglang_rollout and sglang_streaming_rollout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import requests

FLUSH_TRIES = 60
try:
    from slime.backends.sglang_utils.external import get_server_info
    from slime.backends.sglang_utils.server_control import num_requests_from_load
    from slime.backends.sglang_utils.sglang_engine import SGLangEngine

    IS_GENUINE = True
except ImportError:
    IS_GENUINE = False

    def get_server_info(url: str, timeout: float = 30.0) -> dict[str, Any]:
        """Return what an engine says of itself."""
        answer = requests.get(f"{url}/server_info", timeout=timeout)
        answer.raise_for_status()
        return dict(answer.json())

    def num_requests_from_load(load: Any) -> int:
        """Return the number of requests in an answer of /v1/loads."""
        return sum(item["num_running_reqs"] + item["num_waiting_reqs"] for item in load["loads"])

    class SGLangEngine:  # type: ignore[no-redef]
        """The calls of slime's class of this name."""

        def __init__(self, args: argparse.Namespace, rank: int) -> None:
            self.node_rank = rank
            self.server_host, self.server_port = "", 0

        def _url(self, path: str) -> str:
            return f"http://{self.server_host}:{self.server_port}/{path}"

        def _make_request(self, path: str, payload: dict[str, Any]) -> Any:
            answer = requests.post(self._url(path), json=payload)
            answer.raise_for_status()
            return answer.json()

        def health_generate(self, timeout: float = 5.0) -> bool:
            requests.get(self._url("health_generate"), timeout=timeout).raise_for_status()
            return True

        def get_weight_version(self) -> str:
            answer = requests.get(self._url("get_weight_version"))
            answer.raise_for_status()
            return str(answer.json()["weight_version"])

        def pause_generation(self) -> Any:
            answer = requests.post(self._url("pause_generation"), json={})
            answer.raise_for_status()
            return answer

        def continue_generation(self) -> Any:
            answer = requests.post(self._url("continue_generation"), json={})
            answer.raise_for_status()
            return answer

        def flush_cache(self) -> None:
            for _ in range(FLUSH_TRIES):
                if requests.get(self._url("flush_cache")).status_code == 200:
                    return
                time.sleep(1.0)
            raise TimeoutError("the cache is not flushed")

        def init_weights_update_group(self, **fields: Any) -> Any:
            return self._make_request("init_weights_update_group", fields)

        def destroy_weights_update_group(self, group_name: str) -> Any:
            return self._make_request("destroy_weights_update_group", {"group_name": group_name})

        def update_weights_from_distributed(
            self,
            names: list[str],
            dtypes: list[Any],
            shapes: list[Any],
            group_name: str,
            flush_cache: bool = False,
            weight_version: str | None = None,
            load_format: str | None = None,
        ) -> Any:
            named = {"weight_version": weight_version, "load_format": load_format}
            return self._make_request(
                "update_weights_from_distributed",
                {
                    "names": names,
                    "dtypes": [str(dtype).removeprefix("torch.") for dtype in dtypes],
                    "shapes": [list(shape) for shape in shapes],
                    "group_name": group_name,
                    "flush_cache": flush_cache,
                    **{name: value for name, value in named.items() if value is not None},
                },
            )

        def update_weights_from_disk(
            self, model_path: str, load_format: str | None = None, weight_version: str | None = None
        ) -> Any:
            named = {"weight_version": weight_version, "load_format": load_format}
            set_ones = {name: value for name, value in named.items() if value is not None}
            return self._make_request("update_weights_from_disk", {"model_path": model_path, **set_ones})


def engine_at(url: str) -> Any:
    """Return slime's client of an engine that it did not start."""
    place = urlsplit(url)
    engine = SGLangEngine(argparse.Namespace(rollout_external=True), rank=0)
    engine.node_rank, engine.server_host, engine.server_port = 0, place.hostname, place.port
    return engine


def payload(prompt: list[int], **sampling: Any) -> dict[str, Any]:
    """Return a body of /generate with all that slime puts into it."""
    params = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 16,
        "stop": None,
        "stop_token_ids": None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    return {"input_ids": prompt, "sampling_params": params | sampling, "return_logprob": True}


async def post(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> Any:
    """Post once; slime tries 60 times, whatever the error, with a second in between."""
    answer = await client.post(url, json=body)
    answer.raise_for_status()
    return answer.json() if answer.content else ""


async def stream(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a stream."""
    async with client.stream("POST", url, json={**body, "stream": True}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            data = line.removeprefix("data:").strip()
            if line.startswith("data:") and data != "[DONE]":
                yield json.loads(data)


async def abort_until_idle(client: httpx.AsyncClient, url: str, *, interval_s: float = 0.02) -> int:
    """Abort all until the engine has no request left; return how often that was asked. slime waits 3 s in between."""
    for number in range(1, FLUSH_TRIES):
        await post(client, f"{url}/abort_request", {"abort_all": True})
        answer = await client.get(f"{url}/v1/loads?include=core")
        answer.raise_for_status()
        if num_requests_from_load(answer.json()) <= 0:
            return number
        await asyncio.sleep(interval_s)
    raise TimeoutError("requests are left after all were aborted")
