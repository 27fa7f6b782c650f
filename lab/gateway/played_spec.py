"""The spec of a verifier that plays: the engine, its loop and its frames are the real ones, the model is not there.

In a module of its own, so that reading it imports no model code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outrider.verifier_service.engine.verifier_spec import VerifierSpec
from outrider.verifier_service.model.ranks import MainFunction

MAX_MODEL_LEN = 1 << 17  # as agents' histories need


@dataclass(frozen=True, slots=True, kw_only=True)
class OnTime:
    """Every request says these tokens, over and over, until it has as many as it asked for."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scripted:
    """The first request says the first sequence, the next one the next, then from the start again; each then ends.

    Each ends with an end-of-sequence token, which a request with `ignore_eos` gets until it has all its tokens.
    """

    sequences: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not self.sequences:
            raise ValueError("sequences: there are none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request says the sequence of the first of these texts that its prompt has, and then ends, as one of `Scripted`.

    What the order of requests cannot tell: several clients at once, or one that asks of its own accord.
    """

    replies: tuple[tuple[str, tuple[int, ...]], ...]  # every prompt has ""

    def __post_init__(self) -> None:
        if not self.replies or self.replies[-1][0]:
            raise ValueError("replies: the last one is for prompts without the others' texts, under an empty text")

    @property
    def sequences(self) -> tuple[tuple[int, ...], ...]:
        """All that may be said."""
        return tuple(sequence for _, sequence in self.replies)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedSpec:
    """What a played rank is told. Raises `ValueError` naming the field that is out of range."""

    main: ClassVar = MainFunction("outrider.lab.gateway.played_engine:run_played_rank")
    verifier: VerifierSpec
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    says: OnTime | Scripted | Asked
    step_s: float = 0.0  # of a forward, whatever is in it; during it, nothing else is done
    max_model_len: int = MAX_MODEL_LEN

    def __post_init__(self) -> None:
        if not self.step_s >= 0.0:
            raise ValueError("step_s must be at least 0")
        spoken = (self.says.token_ids,) if isinstance(self.says, OnTime) else self.says.sequences
        if not all(spoken):
            raise ValueError("says: a sequence without tokens")
        if any(not 0 <= token_id < self.vocab_size for sequence in spoken for token_id in sequence):
            raise ValueError(f"says: token ids must be in [0, {self.vocab_size})")
        if not isinstance(self.says, OnTime) and not self.eos_token_ids:
            raise ValueError("eos_token_ids: a script ends with one")
