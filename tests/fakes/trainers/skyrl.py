"""How SkyRL speaks to servers that run already: its own code where it is installed, else the same calls written anew.

Source: skyrl 0.3.0, skyrl.backends.skyrl_train.inference_servers.remote_inference_client.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import aiohttp

try:
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient

    IS_GENUINE = True
except ImportError:
    IS_GENUINE = False

    @dataclass
    class RemoteInferenceClient:  # type: ignore[no-redef]
        """The calls of SkyRL's class of this name."""

        proxy_url: str
        server_urls: list[str]
        data_parallel_size: int
        model_name: str = "default"

        async def __aenter__(self) -> RemoteInferenceClient:
            self._session = aiohttp.ClientSession()
            return self

        async def __aexit__(self, *_: object) -> None:
            await self._session.close()

        async def generate(self, input_batch: dict[str, Any]) -> dict[str, Any]:
            sessions = input_batch.get("session_ids") or [None] * len(input_batch["prompt_token_ids"])
            calls = [
                self._generate_one(prompt, input_batch, session)
                for prompt, session in zip(input_batch["prompt_token_ids"], sessions, strict=True)
            ]
            choices = await asyncio.gather(*calls)
            ids = [choice["token_ids"] for choice in choices]
            return {
                "responses": await self.detokenize(ids),
                "response_ids": ids,
                "stop_reasons": [choice["finish_reason"] for choice in choices],
                "response_logprobs": [
                    choice["logprobs"] and [entry["logprob"] for entry in choice["logprobs"]["content"]]
                    for choice in choices
                ],
            }

        async def _generate_one(self, prompt: list[int], batch: dict[str, Any], session: str | None) -> dict[str, Any]:
            body = {"sampling_params": batch["sampling_params"], "model": self.model_name, "token_ids": prompt}
            salt = batch.get("cache_salt")
            answer = await self._post(
                "/inference/v1/generate",
                body | ({} if salt is None else {"cache_salt": salt}),
                {} if session is None else {"X-Session-ID": session},
            )
            return dict(answer["choices"][0])

        async def sample(self, request_payload: dict[str, Any]) -> dict[str, Any]:
            body = request_payload["json"]
            prompt = [id_ for chunk in body["prompt"]["chunks"] for id_ in chunk["tokens"]]
            params = {
                "n": body["num_samples"],
                "logprobs": 0,
                "output_kind": 2,
                "prompt_logprobs": body["topk_prompt_logprobs"] if body["include_prompt_logprobs"] else None,
                **body["sampling_params"],
            }
            answer = await self._post(
                "/inference/v1/generate", {"sampling_params": params, "model": self.model_name, "token_ids": prompt}
            )
            scored = zip(prompt, answer["prompt_logprobs"], strict=True)
            return {
                "sequences": [{"tokens": choice["token_ids"]} for choice in answer["choices"]],
                "prompt_logprobs": [entry and entry[str(id_)]["logprob"] for id_, entry in scored],
            }

        async def tokenize(self, texts: list[str]) -> list[list[int]]:
            bodies = [{"model": self.model_name, "prompt": text, "add_special_tokens": True} for text in texts]
            return [(await self._post("/tokenize", body))["tokens"] for body in bodies]

        async def detokenize(self, token_ids: list[list[int]]) -> list[str]:
            bodies = [{"model": self.model_name, "tokens": ids} for ids in token_ids]
            return [(await self._post("/detokenize", body))["prompt"] for body in bodies]

        async def finish_session(self, session_id: str) -> None:
            async with self._session.post(f"{self.proxy_url}/finish_session", params={"session_id": session_id}):
                pass  # what a router answers is not looked at

        async def pause(self, mode: str = "keep", clear_cache: bool = False) -> dict[str, Any]:
            params = {"mode": mode, "clear_cache": str(clear_cache).lower()}
            return await self._call_all_servers("/pause", params=params)

        async def resume(self) -> dict[str, Any]:
            return await self._call_all_servers("/resume")

        async def reset_prefix_cache(self, reset_running_requests: bool = False) -> dict[str, Any]:
            return await self._call_all_servers(
                "/reset_prefix_cache", {"reset_running_requests": reset_running_requests}
            )

        async def get_world_size(self) -> tuple[int, int]:
            answers = await self._call_all_servers("/get_world_size", {}, method="GET")
            sizes = [answer["body"]["world_size"] for answer in answers.values()]
            return sum(sizes) // self.data_parallel_size, sizes[0]

        async def start_weight_update(self, is_checkpoint_format: bool = True) -> dict[str, Any]:
            kwargs = {"is_checkpoint_format": is_checkpoint_format}
            return await self._call_all_servers(
                "/collective_rpc", {"method": "skyrl_start_weight_update", "kwargs": kwargs}
            )

        async def _post(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
            async with self._session.post(self.proxy_url + path, json=body, headers=headers) as response:
                return _checked(response, await response.json(content_type=None))

        async def _call_all_servers(
            self,
            path: str,
            body: dict[str, Any] | None = None,
            method: str = "POST",
            params: dict[str, str] | None = None,
        ) -> dict[str, Any]:
            answers = {}
            for url in self.server_urls:
                async with self._session.request(method, url + path, json=body, params=params) as response:
                    # an answer without Content-Length counts as none
                    answer = await response.json() if response.content_length else None
                    answers[url] = {"status": response.status, "body": _checked(response, answer)}
            return answers


def _checked(response: aiohttp.ClientResponse, body: Any) -> Any:
    if response.status >= 400:
        raise aiohttp.ClientResponseError(
            response.request_info, response.history, status=response.status, message=body["error"]["message"]
        )
    return body
