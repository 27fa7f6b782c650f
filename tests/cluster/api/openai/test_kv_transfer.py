"""vLLM's `kv_transfer_params` at the HTTP door: what a proxy between two services sends, and what it gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from fakes.backend import FakeBackend, says
from outrider.cluster.gateway.kv_transfer import KeptOutput
from outrider.verifier_service.messages.handover import KVSource
from outrider.verifier_service.messages.request import GenerationRequest, RequestOutput
from support.stack import Stack

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "the"},
    CHAT: {"messages": [{"role": "user", "content": "the"}]},
}
# as vLLM's own proxies send them
FIRST = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
SECOND = {"do_remote_prefill": True, "remote_host": "10.1.2.3", "remote_port": 4711, "remote_request_id": "g/1/r.d"}


class KeepingBackend(FakeBackend):
    """A backend that keeps the KV of prompts for which that is asked."""

    async def generate(self, request: GenerationRequest, hear: Callable[[RequestOutput], None]) -> None:
        place = KVSource(endpoint="10.1.2.3:4711", request_id=f"g/1/{request.request_id}.d")
        await super().generate(
            request, lambda output: hear(KeptOutput.of(output, place, "v0") if request.hands_over else output)
        )


@pytest.fixture
def backend(tokenizer: Any) -> KeepingBackend:
    return KeepingBackend(lambda _: says(tokenizer, "f"))


async def post(backend: FakeBackend, tokenizer: Any, path: str, body: Mapping[str, Any], **options: Any) -> Any:
    stack = Stack(backend, tokenizer=tokenizer, **{"hands_over": True, **options})
    return await stack.post(path, {**BODIES[path], **body})


@pytest.mark.parametrize("path", BODIES)
async def test_a_proxy_of_vllms_gets_from_the_first_answer_what_it_sends_with_the_second_request(
    path: str, tokenizer: Any, backend: KeepingBackend
):
    first = await post(backend, tokenizer, path, {"max_tokens": 1, "stream": False, "kv_transfer_params": FIRST})
    assert first.status_code == 200, first.text
    params = first.json()["kv_transfer_params"]
    assert first.json()["choices"][0]["finish_reason"] == "length"
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "v0",
        "remote_block_ids": [],
        "remote_host": "10.1.2.3",
        "remote_port": 4711,
        "remote_request_id": f"g/1/{backend.requests[0].request_id}.d",
    }
    second = await post(backend, tokenizer, path, {"max_tokens": 5, "kv_transfer_params": params})
    assert "kv_transfer_params" not in second.json()
    given, taken = backend.requests
    assert (given.hands_over, given.kv_source, given.sampling.max_tokens) == (True, None, 1)
    source = KVSource(endpoint="10.1.2.3:4711", request_id=params["remote_request_id"], draws_anew=True)
    assert (taken.hands_over, taken.kv_source) == (False, source)
    assert given.prompt_token_ids == taken.prompt_token_ids


async def test_the_second_answer_may_be_a_stream_and_keys_of_other_connectors_are_passed_over(
    tokenizer: Any, backend: KeepingBackend
):
    params = {**SECOND, "tp_size": 2, "remote_num_tokens": 7, "transfer_id": "x"}
    answer = await post(backend, tokenizer, CHAT, {"stream": True, "kv_transfer_params": params})
    assert answer.text.endswith("data: [DONE]\n\n")
    assert backend.requests[0].kv_source.endpoint == "10.1.2.3:4711"


@pytest.mark.parametrize("body", [{"prompt": ["the", "fox"]}, {"n": 2}, {"kv_transfer_params": {}}])
async def test_what_cannot_be_said_of_one_prompt_is_a_request_like_any_other(
    body: dict[str, Any], tokenizer: Any, backend: KeepingBackend
):
    for params in (FIRST, SECOND):
        whole = {"max_tokens": 1, "kv_transfer_params": params, **body}
        answer = await post(backend, tokenizer, COMPLETIONS, whole)
        assert "kv_transfer_params" not in answer.json()
    assert not any(request.hands_over or request.kv_source for request in backend.requests)


@pytest.mark.parametrize(
    ("body", "field", "said"),
    [
        ({"kv_transfer_params": FIRST, "max_tokens": 2}, "max_tokens", "max_tokens must be 1 with do_remote_decode"),
        ({"kv_transfer_params": FIRST}, "max_tokens", "max_tokens must be 1"),
        ({"kv_transfer_params": FIRST, "max_tokens": 1, "stream": True}, "stream", "stream must be false"),
        ({"kv_transfer_params": []}, "kv_transfer_params", "dictionary"),
        *(
            ({"kv_transfer_params": {**SECOND, name: value}}, "kv_transfer_params", f"{name} must be ")
            for name, value in (
                ("do_remote_prefill", "yes"),
                ("do_remote_decode", True),
                ("remote_host", None),
                ("remote_host", ""),
                ("remote_host", "h" * 513),
                ("remote_port", None),
                ("remote_port", "4711"),
                ("remote_port", 0),
                ("remote_port", 65536),
                ("remote_port", True),
                ("remote_request_id", None),
                ("remote_request_id", ["r"]),
            )
        ),
    ],
)
async def test_bad_params_are_named(
    body: dict[str, Any], field: str, said: str, tokenizer: Any, backend: KeepingBackend
):
    answer = await post(backend, tokenizer, COMPLETIONS, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert said in error["message"]
    assert backend.requests == []


async def test_vllms_verifiers_hand_nothing_over_here(tokenizer: Any, backend: KeepingBackend):
    body = {"max_tokens": 1, "kv_transfer_params": FIRST}
    answer = await post(backend, tokenizer, COMPLETIONS, body, hands_over=False)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "kv_transfer_params")
