"""vLLM's outputs as our `RequestOutput`s."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.verifier_service.messages.request import (
    DisabledReason,
    FinishReason,
    GenerationRequest,
    RequestOutput,
    SpeculationMetrics,
    TokenLogprobs,
)

_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


def answer_of(request: GenerationRequest, output: Any, *, is_drafted: bool) -> RequestOutput:
    """Convert one of vLLM's `RequestOutput`s, which has the tokens since the last.

    vLLM does not report which tokens were drafted; the last output has the request's counts.
    """
    (choice,) = output.outputs
    reason, sampling = choice.finish_reason, request.sampling
    return RequestOutput(
        request_id=request.request_id,
        token_ids=tuple(choice.token_ids),
        logprobs=_logprobs_of(choice, sampling.logprobs),
        prompt_logprobs=_prompt_logprobs_of(output, sampling.prompt_logprobs),
        num_cached_tokens=output.num_cached_tokens or 0,
        finish_reason=None if reason is None else _FINISH.get(reason, FinishReason.ERROR),
        error=None if reason is None or reason in _FINISH else f"vLLM ended the request: {reason}",
        speculation=None if reason is None else _speculation_of(request, choice, is_drafted=is_drafted),
    )


def _logprobs_of(choice: Any, num_alternatives: int | None) -> tuple[TokenLogprobs, ...] | None:
    if num_alternatives is None:
        return None
    return tuple(
        _token_of(token_id, entries, num_alternatives)
        for token_id, entries in zip(choice.token_ids, choice.logprobs, strict=True)
    )


def _prompt_logprobs_of(output: Any, num_alternatives: int | None) -> tuple[TokenLogprobs | None, ...] | None:
    if num_alternatives is None or not output.prompt_logprobs:  # only the first output has them
        return None
    return tuple(
        None if entries is None else _token_of(token_id, entries, num_alternatives)
        for token_id, entries in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    )


def _token_of(token_id: int, entries: Mapping[int, Any], num_alternatives: int) -> TokenLogprobs:
    """Return a token's entry; in vLLM's, the token may also be among the likeliest."""
    own = entries[token_id]
    likeliest = sorted(entries.items(), key=lambda item: item[1].rank)[:num_alternatives]
    return TokenLogprobs(
        token_id=token_id,
        logprob=own.logprob,
        rank=own.rank,
        top_token_ids=tuple(other_id for other_id, _ in likeliest),
        top_logprobs=tuple(other.logprob for _, other in likeliest),
    )


def _speculation_of(request: GenerationRequest, choice: Any, *, is_drafted: bool) -> SpeculationMetrics | None:
    """Return vLLM's counts of a request; None if it was not drafted."""
    if is_drafted and request.sampling.num_speculative_tokens == 0:
        return SpeculationMetrics(disabled_reason=DisabledReason.REQUEST_OPT_OUT)
    counted = choice.spec_decode_metrics
    if counted is None:
        return SpeculationMetrics() if is_drafted else None
    by_accepted = counted.histogram  # number of verifications, by accepted draft tokens
    return SpeculationMetrics(
        enabled=True,
        num_drafts=sum(by_accepted),
        num_draft_tokens=counted.num_draft_tokens,
        num_accepted_tokens=sum(number * count for number, count in enumerate(by_accepted)),
        num_accepted_per_position=[sum(by_accepted[number:]) for number in range(1, len(by_accepted))],
    )
