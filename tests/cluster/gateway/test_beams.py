"""A beam search at the gateway: one request for all choices, whose only output has them."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from fakes.backend import FakeBackend, build_gateway, fake_logprobs
from fakes.engine_bench import make_request
from fakes.played_fleet import EngineVerifier, fleet_of
from outrider.cluster.common import errors
from outrider.cluster.gateway.request_parser import RequestInput
from outrider.verifier_service.messages.beam_search import BeamSearch
from outrider.verifier_service.messages.request import FinishReason, RequestOutput
from support.stack import Stack

ASKED = {"prompt": "the", "n": 2, "use_beam_search": True, "max_tokens": 9}
CHAT = {"messages": [{"role": "user", "content": "the"}], "n": 2, "use_beam_search": True}


class Beams(FakeBackend):
    """Answers with two texts, the likelier first, or with what `ends` says."""

    def __init__(self, tokenizer, ends: FinishReason | None = None) -> None:
        super().__init__(lambda _: [None])
        self._tokenizer, self._ends = tokenizer, ends

    async def generate(self, request, hear) -> None:
        self.requests.append(request)
        output = RequestOutput(request_id=request.request_id, token_ids=(), finish_reason=self._ends, error="no")
        if self._ends is None:
            beams = tuple(self._beam(request, text) for text in ("fox", "dog and"))
            output = dataclasses.replace(output, finish_reason=FinishReason.LENGTH, beams=beams)
        hear(output)

    def _beam(self, request, text: str) -> RequestOutput:
        ids, num_top = tuple(self._tokenizer.encode(text)), request.sampling.logprobs
        logprobs = None if num_top is None else tuple(fake_logprobs(id_, num_top) for id_ in ids)
        return RequestOutput(request_id="", token_ids=ids, logprobs=logprobs, finish_reason=FinishReason.LENGTH)


@pytest.mark.parametrize("stream", [False, True])
async def test_completions_bring_all_beams_of_one_request(tokenizer, stream: bool):
    stack = Stack(Beams(tokenizer), sampling_defaults={"temperature": 0.2, "repetition_penalty": 1.5})
    async with stack.openai() as client:
        options = {name: value for name, value in ASKED.items() if name != "use_beam_search"}
        extra = {"use_beam_search": True, "length_penalty": 2}
        answer = await client.completions.create(
            model="tiny", **options, stream=stream, logprobs=1, stop=["zz"], extra_body=extra
        )
        texts = {0: "", 1: ""}
        for chunk in [each async for each in answer] if stream else [answer]:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    assert texts == {0: "fox", 1: "dog and"}
    (request,) = stack.requests
    sampling = request.sampling
    assert sampling.beams == BeamSearch(width=2, length_penalty=2.0, stop=("zz",))
    assert (sampling.temperature, sampling.num_speculative_tokens, sampling.repetition_penalty) == (0.0, 0, 1.0)
    assert (request.group_id, request.history_key) == (None, ""), "nothing is handed over or remembered"


async def test_a_chat_brings_all_beams_and_their_usage(tokenizer):
    stack = Stack(Beams(tokenizer))
    answer = (await stack.post("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 1})).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["fox", "dog and"]
    num_tokens = len(tokenizer.encode("fox")) + len(tokenizer.encode("dog and"))
    assert answer["usage"]["completion_tokens"] == num_tokens
    assert all(choice["logprobs"]["content"] for choice in answer["choices"])


async def test_a_stop_text_is_cut_from_the_beam_that_ends_in_it(tokenizer):
    answer = (await Stack(Beams(tokenizer)).post("/v1/completions", {**ASKED, "stop": "an"})).json()
    assert [(each["text"], each["finish_reason"]) for each in answer["choices"]] == [
        ("fox", "length"),
        ("dog ", "stop"),
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"min_tokens": 3}, "min_tokens"),
        ({"frequency_penalty": 1.0}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"bad_words": ["fox"]}, "bad_words"),
        ({"structured_outputs": {"regex": "a"}}, "structured"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"use_beam_search": False, "length_penalty": 2}, "length_penalty"),
        ({"n": 0}, "n"),
    ],
)
async def test_what_beams_do_not_follow_is_refused_by_name(tokenizer, fields: dict, param: str):
    stack = Stack(Beams(tokenizer))
    response = await stack.post("/v1/completions", {**ASKED, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert not stack.requests


async def test_a_search_that_fails_fails_the_request(tokenizer):
    response = await Stack(Beams(tokenizer, FinishReason.ERROR)).post("/v1/completions", ASKED)
    assert response.status_code == 500


async def test_a_search_that_is_aborted_aborts_every_choice(tokenizer):
    answer = (await Stack(Beams(tokenizer, FinishReason.ABORT)).post("/v1/completions", ASKED)).json()
    assert [(each["text"], each["finish_reason"]) for each in answer["choices"]] == [("", "abort")] * 2


async def test_an_abort_cancels_the_one_request(tokenizer):
    backend = FakeBackend(lambda _: [None])
    gateway = build_gateway(backend, tokenizer)
    request = await gateway.parse(RequestInput(request_id="r", **ASKED))
    whole = asyncio.create_task(gateway.whole(request))
    await backend.until_waiting(1)
    assert gateway.abort("r") is True
    assert [chunk.finish_reason for chunk in await whole] == [FinishReason.ABORT] * 2
    assert backend.cancelled == ["r"]


# --- verifiers that are lost ---

SEARCH = make_request(max_tokens=10, num_speculative_tokens=0, beams=BeamSearch(width=3))


async def test_a_lost_verifiers_search_begins_again_at_another_one_as_one_request():
    async with fleet_of(EngineVerifier()) as fleet:
        (expected,) = await fleet.generate(SEARCH)
    verifiers = [EngineVerifier(dies_in_step=5), EngineVerifier()]
    async with fleet_of(*verifiers) as fleet:
        (output,) = await fleet.generate(SEARCH)
    assert [beam.token_ids for beam in output.beams] == [beam.token_ids for beam in expected.beams]
    assert len(output.beams) == 3
    assert [len(verifier.requests) for verifier in verifiers] == [1, 1]


async def test_a_search_without_another_verifier_ends_with_an_error_that_says_so():
    async with fleet_of(EngineVerifier(dies_in_step=5), failover_timeout_s=0.3) as fleet:
        with pytest.raises(errors.Unavailable, match="lost its verifier"):
            await fleet.generate(SEARCH)
