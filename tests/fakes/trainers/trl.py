"""How TRL speaks to vLLM: its own code where it is installed, else the same calls written anew.

Sources: trl 1.16.0: trl.experimental.async_grpo.vllm_client, async_rollout_worker (`completion_body`), and
trl.generation.vllm_client (`GenerationClient`), which needs vLLM to be installed.
"""

from __future__ import annotations

import random
import time
from typing import Any

import requests

try:
    from accelerate import PartialState
    from trl.experimental.async_grpo.vllm_client import VLLMClient

    PartialState()  # TRL's logs want one
    IS_GENUINE = True
except ImportError:
    IS_GENUINE = False

    class VLLMClient:  # type: ignore[no-redef]
        """The calls of TRL's class of this name."""

        def __init__(self, server_url: str, server_timeout: float = 240.0) -> None:
            self._url, self._timeout_s = server_url, server_timeout

        def wait_for_server_ready(self, poll_interval_s: float = 2.0) -> None:
            deadline_s = time.monotonic() + self._timeout_s
            while requests.get(f"{self._url}/health", timeout=5).status_code != 200:
                if time.monotonic() > deadline_s:
                    raise TimeoutError("the server is not ready")
                time.sleep(poll_interval_s)

        def get_max_model_len(self) -> int:
            return int(self._get("/v1/models")["data"][0]["max_model_len"])

        def get_dtype(self) -> str:
            return str(self.get_server_info()["model_config"]["dtype"])

        def get_server_info(self) -> dict[str, Any]:
            return dict(self._get("/server_info", config_format="json")["vllm_config"])

        def get_world_size(self) -> int:
            return int(self._get("/get_world_size")["world_size"])

        def pause(self, timeout: int = 1800) -> None:
            self._post("/pause", timeout, params={"mode": "keep"})

        def resume(self, timeout: int = 1800) -> None:
            self._post("/resume", timeout)

        def init_weight_transfer_engine(self, init_info: dict[str, Any], timeout: int = 1800) -> None:
            self._post("/init_weight_transfer_engine", timeout, json={"init_info": init_info})

        def start_weight_update(self, timeout: int = 1800) -> None:
            self._post("/start_weight_update", timeout, json={"is_checkpoint_format": True})

        def update_weights(self, update_info: dict[str, Any], timeout: int = 1800) -> None:
            self._post("/update_weights", timeout, json={"update_info": update_info})

        def finish_weight_update(self, timeout: int = 1800) -> None:
            self._post("/finish_weight_update", timeout)

        def _get(self, path: str, **params: str) -> Any:
            answer = requests.get(self._url + path, params=params)
            answer.raise_for_status()
            return answer.json()

        def _post(self, path: str, timeout: int, **kwargs: Any) -> None:
            answer = requests.post(self._url + path, timeout=timeout, **kwargs)
            if answer.status_code != 200:
                raise Exception(f"Request failed: {answer.status_code}, {answer.text}")


def completion_body(prompt: list[int], **options: Any) -> dict[str, Any]:
    """Return a body of /v1/completions with all that TRL's rollout worker puts into it."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 16,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "repetition_penalty": 1.0,
        "n": 1,
        "return_token_ids": True,
        "logprobs": 0,
        "seed": random.Random(0).getrandbits(63),
    }
    return body | options


try:
    from trl.generation.vllm_client import VLLMClient as _GenerationClient

    class GenerationClient(_GenerationClient):  # type: ignore[misc]
        """TRL's client without the weight transfer, for which it wants vLLM to be installed."""

        def __init__(self, base_url: str) -> None:
            self.session, self.base_url = requests.Session(), base_url
            self.check_server()
            self.model = self._get(f"{base_url}/v1/models")["data"][0]["id"]

    HAS_GENERATION = True
except ImportError:
    HAS_GENERATION = False

    class GenerationClient:  # type: ignore[no-redef]
        """The calls of TRL's generation client."""

        def __init__(self, base_url: str) -> None:
            self._url = base_url
            self._model = requests.get(f"{base_url}/v1/models").json()["data"][0]["id"]

        def get_server_info(self) -> dict[str, Any]:
            answer = requests.get(f"{self._url}/server_info", params={"config_format": "json"})
            answer.raise_for_status()
            return dict(answer.json()["vllm_config"])

        def generate(self, prompts: list[Any], n: int = 1, logprobs: int | None = 0, **sampling: Any) -> dict[str, Any]:
            fixed = {"model": self._model, "return_token_ids": True, "return_tokens_as_token_ids": True}
            choices = self._choices({**fixed, "prompt": prompts, "n": n, "logprobs": logprobs, **sampling})
            positions = [_positions(choice["logprobs"]) for choice in choices]
            return {
                "prompt_ids": [choice["prompt_token_ids"] for choice in choices[::n]],
                "completion_ids": [choice["token_ids"] for choice in choices],
                "logprobs": [[[value for _, value in entry] for entry in own] for own in positions],
                "logprob_token_ids": [[[id_ for id_, _ in entry] for entry in own] for own in positions],
            }

        def get_sequence_logprobs(
            self, sequences: list[list[int]], prompt_lengths: list[int], top_logprobs: int = 100
        ) -> dict[str, Any]:
            body = {"model": self._model, "prompt": sequences, "max_tokens": 1, "prompt_logprobs": top_logprobs}
            scored = []
            for choice, sequence, start in zip(self._choices(body), sequences, prompt_lengths, strict=True):
                entries = list(zip(sequence, choice["prompt_logprobs"], strict=True))[start:]
                scored.append([[entry[str(id_)]["logprob"]] for id_, entry in entries])
            return {"actual_logprobs": scored}

        def _choices(self, body: dict[str, Any]) -> list[dict[str, Any]]:
            answer = requests.post(f"{self._url}/v1/completions", json=body)
            if answer.status_code != 200:
                raise Exception(f"Request failed: {answer.status_code}, {answer.text}")
            return list(answer.json()["choices"])


def _positions(logprobs: dict[str, Any]) -> list[list[tuple[int, float]]]:
    """Return each position's tokens with their log probabilities, the likeliest first."""
    rows = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    found = [{**(top or {}), token: logprob} for token, logprob, top in rows]
    ranked = [sorted(entry.items(), key=lambda item: -item[1]) for entry in found]
    return [[(int(name.removeprefix("token_id:")), value) for name, value in entry] for entry in ranked]
