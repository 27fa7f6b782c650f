"""How others speak to SGLang: TorchRL's and AReaL's code where they are installed, else the same calls written anew.

Sources: torchrl 0.14.1: torchrl.modules.llm.backends.sglang.sglang_server, torchrl.weight_update.llm.sglang_nccl;
areal 1.0.4: areal.engine.sglang_remote; sglang 0.5.23: sglang.lang.backend.runtime_endpoint.
"""

from __future__ import annotations

import time
from typing import Any

import requests

POLL_S = 0.05
try:
    from torchrl.modules.llm.backends.sglang.sglang_server import AsyncSGLang
    from torchrl.weight_update.llm.sglang_nccl import SGLangCollectiveTransport

    HAS_TORCHRL = True
except ImportError:
    HAS_TORCHRL = False

    class AsyncSGLang:  # type: ignore[no-redef]
        """The calls of TorchRL's class of this name."""

        def __init__(self, url: str) -> None:
            self._url = url
            requests.get(f"{url}/health").raise_for_status()
            info = requests.get(f"{url}/server_info").json()
            self._sizes = info["tp_size"], info["dp_size"]
            self.model_path = requests.get(f"{url}/model_info").json()["model_path"]

        @classmethod
        def connect(cls, server_url: str) -> AsyncSGLang:
            return cls(server_url)

        def get_tp_size(self) -> int:
            return int(self._sizes[0])

        def get_dp_size(self) -> int:
            return int(self._sizes[1])

        def generate(self, *, input_ids: list[list[int]], return_logprobs: bool = False, **sampling: Any) -> list[Any]:
            sampling["max_new_tokens"] = sampling.pop("max_tokens")
            return [
                _sent(self._url, "generate", {"input_ids": ids, "sampling_params": sampling, "return_logprob": True})
                for ids in input_ids
            ]

        def flush_cache(self) -> bool:
            return requests.post(f"{self._url}/flush_cache").status_code == 200

    class SGLangCollectiveTransport:  # type: ignore[no-redef]
        """The pause of TorchRL's class of this name; its group is NCCL's alone."""

        def __init__(self, server_url: str, pause_mode: str = "retract", timeout: float = 20.0, **_: Any) -> None:
            self._url, self._mode, self._timeout_s = server_url, pause_mode, timeout

        def _pause_generation_for_update(self, model_id: str) -> None:
            _sent(self._url, "pause_generation", {"mode": self._mode})
            deadline_s = time.monotonic() + self._timeout_s
            while sum(load["num_running_reqs"] for load in requests.get(f"{self._url}/get_load").json()):
                if time.monotonic() > deadline_s:
                    raise RuntimeError("requests are still running")
                time.sleep(POLL_S)

        def _continue_generation_after_update(self, model_id: str) -> None:
            _sent(self._url, "continue_generation", {"torch_empty_cache": True})


def _sent(url: str, path: str, body: dict[str, Any]) -> Any:
    answer = requests.post(f"{url}/{path}", json=body)
    answer.raise_for_status()
    return answer.json()


def areal_bodies(prompt: list[int], folder: str) -> dict[str, dict[str, Any]]:
    """Return what AReaL sends: a generation, a score of the last three tokens, an update while requests run."""
    sampling = {
        "top_p": 1.0,
        "top_k": 100_000_000,
        "max_new_tokens": 8,
        "temperature": 0.0,
        "stop_token_ids": [],
        "ignore_eos": False,
        "skip_special_tokens": False,
        "frequency_penalty": 0.0,
    }
    shared = {"input_ids": prompt, "return_logprob": True, "stream": False}
    score = {"sampling_params": {"max_new_tokens": 1, "temperature": 0.0}, "top_logprobs_num": 0}
    return {
        "generate": {**shared, "image_data": [], "sampling_params": sampling},
        "score": {**shared, **score, "logprob_start_len": len(prompt) - 3 - 1},
        "update": {"model_path": folder, "abort_all_requests": True},
    }


def verl_body(prompt: list[int]) -> dict[str, Any]:
    """Return a body of verl's adapter, which names every field."""
    empty = ("text", "image_data", "token_ids_logprob", "lora_path", "custom_logit_processor", "top_logprobs_num")
    return {
        **dict.fromkeys(empty),
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": 8, "temperature": 0.0},
        "return_logprob": False,
        "logprob_start_len": None,
    }


try:
    from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint

    HAS_SGLANG = True
except ImportError:
    HAS_SGLANG = False

    class RuntimeEndpoint:  # type: ignore[no-redef]
        """The calls of SGLang's own class of this name that have no program around them."""

        def __init__(self, base_url: str) -> None:
            self._url = base_url
            self.model_info = requests.get(f"{base_url}/get_model_info").json()

        def get_model_name(self) -> str:
            return str(self.model_info["model_path"])

        def get_server_info(self) -> dict[str, Any]:
            return dict(requests.get(f"{self._url}/server_info").json())

        def cache_prefix(self, prefix_str: str) -> None:
            _sent(self._url, "generate", {"text": prefix_str, "sampling_params": {"max_new_tokens": 0}})

        def flush_cache(self) -> None:
            requests.post(f"{self._url}/flush_cache").raise_for_status()
