"""What a request that searches with beams asks for."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

from outrider.verifier_service.messages.draft import Range, check_ranges, require

# what changes the law of tokens, or is read from a prompt's rows: beams follow the model's own law
_NOT_FOLLOWED = (
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "logit_bias", "bad_words"),
    *("allowed_token_ids", "structured", "thought", "prompt_logprobs"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearch:
    """Search the `width` outputs of the highest score, as transformers does; raises `ValueError` naming the field.

    score = sum of the tokens' log probabilities / number of tokens ** length_penalty, an end token included
    """

    width: Annotated[int, Range(1, 1 << 15, text="at least 1")]
    length_penalty: Annotated[float, Range(-10, 10)] = 1.0
    stop: tuple[str, ...] = ()  # a text in whose last character's token a beam ends

    def __post_init__(self) -> None:
        check_ranges(self)


def ends_by_text(sampling: Any) -> bool:
    """Return whether beams end by texts, so that the engine must know those of its tokens."""
    return sampling.beams is not None and bool(sampling.beams.stop)


def check_alone(sampling: Any) -> None:
    """Raise `ValueError` naming a field of a beam search's `SamplingParams` that it would not follow."""
    defaults = {each.name: each.default for each in fields(sampling)}
    for name in _NOT_FOLLOWED:
        require(getattr(sampling, name) == defaults[name], name, "left out with beam search")
    require(sampling.num_speculative_tokens == 0, "num_speculative_tokens", "0 with beam search: beams have no drafts")
