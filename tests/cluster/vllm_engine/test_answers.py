"""vLLM's outputs in our words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fakes.hosted.vllm_outputs import logprob, output
from outrider.cluster.vllm_engine.answers import answer_of
from outrider.verifier_service.messages.request import (
    DisabledReason,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    SpeculationMetrics,
    TokenLogprobs,
    TokenOrigin,
)


def request(**sampling: Any) -> GenerationRequest:
    return GenerationRequest(request_id="r", prompt_token_ids=(1, 2), sampling=SamplingParams(**sampling))


def test_tokens_of_which_nobody_says_how_they_came_are_plain():
    found = answer_of(request(), output([4, 5, 6], num_cached_tokens=16), is_drafted=True)
    assert (found.request_id, found.token_ids, found.num_cached_tokens) == ("r", (4, 5, 6), 16)
    assert found.origins == (TokenOrigin.PLAIN,) * 3
    assert (found.finish_reason, found.speculation, found.logprobs) == (None, None, None)


@pytest.mark.parametrize(
    ("said", "reason"),
    [("stop", FinishReason.STOP), ("length", FinishReason.LENGTH), ("abort", FinishReason.ABORT)],
)
def test_it_ends_for_the_same_reason(said: str, reason: FinishReason):
    found = answer_of(request(), output([4], said), is_drafted=False)
    assert (found.finish_reason, found.error, found.speculation) == (reason, None, None)


def test_a_reason_that_we_have_not_is_an_error_that_names_it():
    found = answer_of(request(), output([], "repetition"), is_drafted=False)
    assert found.finish_reason is FinishReason.ERROR
    assert found.error is not None
    assert "repetition" in found.error


def test_the_last_output_says_what_drafts_brought():
    counted = SimpleNamespace(histogram=[2, 0, 3], num_draft_tokens=9)  # two drafts brought nothing, three two tokens
    found = answer_of(request(), output([4], "length", spec_decode_metrics=counted), is_drafted=True)
    assert found.speculation == SpeculationMetrics(
        enabled=True, num_drafts=5, num_draft_tokens=9, num_accepted_tokens=6, num_accepted_per_position=[3, 3]
    )
    assert answer_of(request(), output([4], "length"), is_drafted=True).speculation == SpeculationMetrics()


def test_a_request_that_wanted_no_drafts_is_told_so():
    counted = SimpleNamespace(histogram=[0, 0], num_draft_tokens=0)
    said = output([4], "length", spec_decode_metrics=counted)
    found = answer_of(request(num_speculative_tokens=0), said, is_drafted=True)
    assert found.speculation == SpeculationMetrics(disabled_reason=DisabledReason.REQUEST_OPT_OUT)


def test_the_likeliest_are_those_asked_for_whether_the_token_is_among_them_or_not():
    likeliest = {4: logprob(-0.5, 1), 7: logprob(-1.5, 2)}
    unlikely = {9: logprob(-5.0, 40), 4: logprob(-0.1, 1), 8: logprob(-3.0, 2)}
    found = answer_of(request(logprobs=2), output([4, 9], logprobs=[likeliest, unlikely]), is_drafted=False)
    assert found.logprobs == (
        TokenLogprobs(token_id=4, logprob=-0.5, rank=1, top_token_ids=(4, 7), top_logprobs=(-0.5, -1.5)),
        TokenLogprobs(token_id=9, logprob=-5.0, rank=40, top_token_ids=(4, 8), top_logprobs=(-0.1, -3.0)),
    )
    alone = answer_of(request(logprobs=0), output([9], logprobs=[{9: logprob(-5.0, 40)}]), is_drafted=False)
    assert alone.logprobs == (TokenLogprobs(token_id=9, logprob=-5.0, rank=40),)


def test_the_prompts_come_with_the_first_output_alone():
    prompt = [None, {2: logprob(-2.0, 5)}]
    first = output([4], prompt_token_ids=[1, 2], prompt_logprobs=prompt)
    found = answer_of(request(prompt_logprobs=0), first, is_drafted=False)
    assert found.prompt_logprobs == (None, TokenLogprobs(token_id=2, logprob=-2.0, rank=5))
    later = output([5], prompt_token_ids=[1, 2], prompt_logprobs=[])
    assert answer_of(request(prompt_logprobs=0), later, is_drafted=False).prompt_logprobs is None
