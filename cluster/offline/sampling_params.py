"""Sampling parameters, under vLLM's names and with its defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, get_type_hints

from outrider.cluster.common.errors import InvalidRequest
from outrider.cluster.gateway.structured_format import NamedStructure, openai_structure
from outrider.cluster.gateway.text_codec import check_bad_words
from outrider.verifier_service.messages.draft import require
from outrider.verifier_service.messages.request import (
    AcceptanceRule,
    CommonSampling,
    LogitBias,
    LogprobsMode,
    StructuredOutput,
)
from outrider.verifier_service.messages.request import SamplingParams as EngineSamplingParams
from outrider.verifier_service.messages.structured_output import check_structured, warning_of

MAX_TOKEN_ID = (1 << 31) - 1
ANY_LENGTH = 1 << 31  # of an unknown model
_FIELD = "structured_outputs"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(CommonSampling):
    """The sampling parameters of one prompt. Raises `ValueError` naming the bad field.

    Of those that the engine shares: `temperature` 0 is greedy, `top_k` 0 and -1 are off, with a `seed` tokens are the
    same with any drafter or none, and `choice_index` is of the first of the `n` outputs: seeded ones differ by it.
    """

    n: int = 1  # outputs for each prompt
    logit_bias: Mapping[int, float] | None = None  # by token id
    max_tokens: int | None = 16  # None: up to the model's longest sequence
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None  # texts that the output must not contain
    allowed_token_ids: Sequence[int] | None = None  # no others; None: all
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True  # False: token ids alone, which saves time
    logprobs_mode: str | None = None  # raw_logprobs or processed_logprobs; None: the LLM's
    structured_outputs: Mapping[str, Any] | StructuredOutput | None = None  # {"json" | "regex" | "choice" | …: …}
    # not vLLM's
    rejection_sample_method: str | None = None  # standard, block or typical; None: the LLM's

    def __post_init__(self) -> None:
        for name, (is_kind, expectation) in _kinds().items():
            require(is_kind(getattr(self, name)), name, expectation)
        require(self.n >= 1, "n", "at least 1")
        require(self.top_k >= -1, "top_k", "-1 or 0 (off) or positive")
        self._check_stops()
        words = () if self.bad_words is None else self.bad_words
        is_texts = isinstance(words, Sequence) and not isinstance(words, str) and all(isinstance(w, str) for w in words)
        require(is_texts, "bad_words", "a sequence of texts")
        check_bad_words(words)
        biases = {} if self.logit_bias is None else self.logit_bias
        is_mapping = isinstance(biases, Mapping) and all(
            _is_token_id(id_) and _is_number(bias) for id_, bias in biases.items()
        )
        require(is_mapping, "logit_bias", "a mapping of token ids to numbers")
        for name, kind in (("rejection_sample_method", AcceptanceRule), ("logprobs_mode", LogprobsMode)):
            known, value = [each.value for each in kind], getattr(self, name)
            require(value is None or value in known, name, f"one of {', '.join(known)}, not {value!r}")
        self.for_engine(  # which has more checks
            max_model_len=ANY_LENGTH, acceptance=AcceptanceRule.STANDARD, logprobs_mode=LogprobsMode.RAW
        )

    def _check_stops(self) -> None:
        stop = () if self.stop is None else self.stop
        is_texts = isinstance(stop, str | Sequence) and all(isinstance(text, str) and text for text in stop)
        require(is_texts and stop != "", "stop", "a text or a sequence of them, none of them empty")
        require(self.detokenize or not self.stop_strings, "detokenize", "True where there are stop strings")
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids = () if getattr(self, name) is None else getattr(self, name)
            require(isinstance(ids, Sequence) and all(map(_is_token_id, ids)), name, "a sequence of token ids")
        require(self.allowed_token_ids is None or len(self.allowed_token_ids) > 0, "allowed_token_ids", "not empty")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def for_engine(
        self,
        *,
        max_model_len: int,
        acceptance: AcceptanceRule,
        logprobs_mode: LogprobsMode,
        bad_words: tuple[tuple[int, ...], ...] = (),
    ) -> EngineSamplingParams:
        """Return the engine's parameters of the first output.

        `max_model_len` bounds `max_tokens` if that is None; `acceptance` is the default rule, and `logprobs_mode` that
        of prompts with log probabilities; `bad_words` are token sequences of the field's texts.
        """
        name, has_logprobs = self.rejection_sample_method, (self.logprobs, self.prompt_logprobs) != (None, None)
        default_mode = logprobs_mode if has_logprobs else LogprobsMode.RAW
        return EngineSamplingParams(
            **{each.name: getattr(self, each.name) for each in fields(CommonSampling)} | {"top_k": max(0, self.top_k)},
            max_tokens=max(max_model_len, self.min_tokens) if self.max_tokens is None else self.max_tokens,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            bad_words=bad_words,
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            logit_bias=tuple(LogitBias(token_id=id_, bias=bias) for id_, bias in (self.logit_bias or {}).items()),
            structured=_structured(self.structured_outputs),
            acceptance=acceptance if name is None else AcceptanceRule(name),
            logprobs_mode=default_mode if self.logprobs_mode is None else LogprobsMode(self.logprobs_mode),
        )


@cache
def _kinds() -> dict[str, tuple[Callable[[Any], bool], str]]:
    """Return what the fields of plain types must be."""
    return {name: _KINDS[hint] for name, hint in get_type_hints(SamplingParams).items() if hint in _KINDS}


def _structured(value: Mapping[str, Any] | StructuredOutput | None) -> StructuredOutput | None:
    if value is None or isinstance(value, StructuredOutput):
        return value
    named = _named(value)
    return None if named is None else named.output


def _named(value: Mapping[str, Any]) -> NamedStructure | None:
    try:
        return openai_structure({_FIELD: value})
    except InvalidRequest as error:
        raise ValueError(str(error)) from error


def structure_warnings(value: Mapping[str, Any] | StructuredOutput | None) -> list[str]:
    """Return warnings of constraints that the grammar does not enforce; the engine refuses an invalid structure."""
    if isinstance(value, Mapping):
        named = _named(value)
        return [] if named is None else [_FIELD + text.removeprefix(named.field) for text in named.warnings]
    try:
        names = () if value is None else check_structured(value)
    except ValueError:
        return []
    return [warning_of(_FIELD, names)] if names else []


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_token_id(value: Any) -> bool:
    return _is_whole(value) and 0 <= value <= MAX_TOKEN_ID


_KINDS: Mapping[Any, tuple[Callable[[Any], bool], str]] = {
    int: (_is_whole, "a whole number"),
    int | None: (lambda value: value is None or _is_whole(value), "a whole number or None"),
    float: (_is_number, "a number"),
    bool: (lambda value: isinstance(value, bool), "True or False"),
}
