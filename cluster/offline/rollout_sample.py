"""What a trainer gets of a rollout: a sample's tokens, their log probabilities and the weights that drew them."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.cluster.gateway.choice import WeightSpan
from outrider.cluster.offline.prompt_run import PromptRun
from outrider.verifier_service.messages.request import RequestOutput, SpeculationMetrics


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningSample:
    """A sample as it grows."""

    prompt_index: int
    sample_index: int
    run: PromptRun

    def absorb(self, output: RequestOutput) -> RolloutSample | None:
        """Add a step's tokens; return the sample if it has finished."""
        piece = self.run.absorb(output)
        if piece.finish_reason is None:
            return None
        whole, error = self.run.whole(output.request_id)
        return RolloutSample(
            prompt_index=self.prompt_index,
            sample_index=self.sample_index,
            prompt_token_ids=self.run.prompt_token_ids,
            token_ids=whole.token_ids,
            text=whole.text,
            logprobs=tuple(entry.logprob for entry in whole.logprobs),
            finish_reason=piece.finish_reason,
            error=error,
            weight_versions=tuple(whole.weight_spans),
            metrics=whole.speculation or SpeculationMetrics(),
        )
