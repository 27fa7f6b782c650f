"""What a trainer gets of a rollout: a sample's tokens, their log probabilities and the weights that drew them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.cluster.offline.prompt_run import PromptRun
from outrider.verifier_service.messages.request import RequestOutput, SpeculationMetrics


class WeightSpan(NamedTuple):
    """The weights that drew the tokens `[start, end)` of a sample."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSample:
    """One finished sample of one prompt."""

    prompt_index: int  # in the call's prompts
    sample_index: int  # of the prompt's `n`
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]  # including a stop token
    text: str
    logprobs: tuple[float, ...]  # of each token, finite, by `logprobs_mode`: after temperature and truncation
    finish_reason: str  # stop, length, abort or error
    error: str | None = None  # the engine refused or lost it
    weight_versions: tuple[WeightSpan, ...] = ()  # side by side, over all of `token_ids`
    metrics: SpeculationMetrics = field(default_factory=SpeculationMetrics)

    @property
    def tokens_per_verification(self) -> float:
        """Return the mean number of tokens that a step brought: 1.0 without drafts."""
        return tokens_per_verification(len(self.token_ids), self.metrics.num_accepted_tokens)


def tokens_per_verification(num_tokens: int, num_accepted_tokens: int) -> float:
    """Return the mean number of tokens that a step brought to a request: the accepted ones and one more."""
    num_steps = max(1, num_tokens - num_accepted_tokens)
    return max(1.0, num_tokens / num_steps)


@dataclass(slots=True, kw_only=True)
class RunningSample:
    """A sample as it grows."""

    prompt_index: int
    sample_index: int
    run: PromptRun
    _spans: list[WeightSpan] = field(default_factory=list)

    def absorb(self, output: RequestOutput) -> RolloutSample | None:
        """Add a step's tokens; return the sample if it has finished."""
        self._extend_spans(output.weight_version, len(output.token_ids))
        piece = self.run.absorb(output)
        if piece.finish_reason is None:
            return None
        whole, error = self.run.whole(output.request_id)
        num_tokens = len(whole.tokens)  # fewer than were drawn if a stop string ended the sample
        return RolloutSample(
            prompt_index=self.prompt_index,
            sample_index=self.sample_index,
            prompt_token_ids=self.run.prompt_token_ids,
            token_ids=whole.token_ids,
            text=whole.text,
            logprobs=tuple(token.logprobs.logprob for token in whole.tokens if token.logprobs is not None),
            finish_reason=piece.finish_reason,
            error=error,
            weight_versions=tuple(
                span._replace(end=min(span.end, num_tokens)) for span in self._spans if span.start < num_tokens
            ),
            metrics=whole.speculation or SpeculationMetrics(),
        )

    def _extend_spans(self, version: str, num_tokens: int) -> None:
        if num_tokens == 0:
            return
        start = end = self._spans[-1].end if self._spans else 0
        if self._spans and self._spans[-1].version == version:
            start = self._spans.pop().start
        self._spans.append(WeightSpan(version, start, end + num_tokens))
