"""The rule of the house: are answers the same as plain decoding's? Pure Python; a model is loaded elsewhere, if at all.

The same is: identical. Where a model computes in fewer bits than float32, on a path that is not batch-invariant (a
row's bits depend on the other rows of its batch), an answer may *tip*: leave plain decoding's at a near tie, a place
where its two largest logits, noise added if seeded, differ by at most 2⁻⁷ of the largest |logit|. One in twenty may.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import click

if TYPE_CHECKING:
    from outrider.verifier_service.model.config import ModelConfig

NEAR_TIE = 2.0**-7  # of the largest |logit|
ONE_IN = 20  # answers may tip; of fewer one may
MAX_SHOWN = 4  # differences whose texts are printed


@dataclass(frozen=True, slots=True, kw_only=True)
class Seeded:
    """How an answer was drawn."""

    seed: int
    temperature: float
    biases: tuple[tuple[int, float], ...] = ()  # tokens and what is added to their logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two answers to one prompt, which should be the same: plain decoding's, or what stands for it, and another one."""

    what: str  # for people
    prompt: Sequence[int]
    expected: Sequence[int]
    given: Sequence[int]
    seeded: Seeded | None = None  # None: greedy


class Reference(Protocol):
    """Plain decoding, asked after the fact."""

    may_tip: bool

    def margin(self, token_ids: Sequence[int], seeded: Seeded | None) -> float:
        """Return by how much the likeliest next token leads, as a share of the largest |logit|."""

    def text(self, token_ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where an answer left plain decoding's."""

    what: str
    place: int  # in the answer
    margin: float  # of plain decoding's likeliest token there, as a share of its largest |logit|
    expected: str  # both texts
    given: str

    @property
    def is_near_tie(self) -> bool:
        return self.margin <= NEAR_TIE

    def __str__(self) -> str:
        return (
            f"{self.what}: token {self.place + 1} differs; plain decoding's choice there leads by {self.margin:.2%} of "
            f"the largest logit\nexpected: {self.expected!r}\nhere: {self.given!r}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What became of a number of answers."""

    num_answers: int
    differences: tuple[Difference, ...] = ()
    may_tip: bool = False

    @property
    def num_tipped(self) -> int:
        return sum(each.is_near_tie for each in self.differences)

    @property
    def num_different(self) -> int:
        return len(self.differences) - self.num_tipped

    @property
    def num_identical(self) -> int:
        return self.num_answers - len(self.differences)

    @property
    def holds(self) -> bool:
        """Whether the answers are the same."""
        most = max(1, self.num_answers // ONE_IN) if self.may_tip else 0
        return self.num_different == 0 and self.num_tipped <= most

    def __str__(self) -> str:
        if not self.differences:
            return f"all {self.num_answers} answers are identical"
        of = f"of {self.num_answers} answers"
        tipped = f"{self.num_tipped} {of} tipped at a near tie"
        if not self.num_different:
            return tipped
        return f"{self.num_different} {of} differ" + (f", {tipped}" if self.num_tipped else "")


def first_difference(given: Sequence[object], expected: Sequence[object]) -> int | None:
    """Return where two sequences part; None where they are equal."""
    for place, (one, other) in enumerate(zip(given, expected, strict=False)):
        if one != other:
            return place
    return None if len(given) == len(expected) else min(len(given), len(expected))


def num_identical(given: Sequence[Sequence[object]], expected: Sequence[Sequence[object]]) -> int:
    """Count the answers that are equal, where the rule does not apply: of other engines, of lossy acceptance."""
    return sum(first_difference(one, other) is None for one, other in zip(given, expected, strict=True))


def compare(pairs: Sequence[Pair], load: Callable[[], Reference]) -> Tally:
    """Compare all pairs; the reference is loaded only where two answers differ."""
    places = [(pair, first_difference(pair.given, pair.expected)) for pair in pairs]
    parted = [(pair, place) for pair, place in places if place is not None]
    if not parted:
        return Tally(num_answers=len(pairs))
    reference = load()
    return Tally(
        num_answers=len(pairs),
        differences=tuple(
            Difference(
                what=pair.what,
                place=place,
                margin=reference.margin([*pair.prompt, *pair.expected[:place]], pair.seeded),
                expected=reference.text(pair.expected),
                given=reference.text(pair.given),
            )
            for pair, place in parted
        ),
        may_tip=reference.may_tip,
    )


def plain_decoding(model: ModelConfig) -> Callable[[], Reference]:
    """Return what loads a model's plain decoding when it is first asked for, and keeps it."""

    @functools.cache
    def load() -> Reference:
        from outrider.lab.plain_decoding import PlainDecoding  # imported here: it imports torch

        return PlainDecoding(model)

    return load


def require_same(*tallies: Tally) -> None:
    """Raise `click.ClickException` with both texts and the margin where answers are not the same."""
    if failed := [tally for tally in tallies if not tally.holds]:
        # what may not be at all comes first
        found = sorted((each for tally in failed for each in tally.differences), key=lambda each: -each.margin)
        shown = [str(each) for each in found[:MAX_SHOWN]]
        more = [f"and {len(found) - MAX_SHOWN} more"] if len(found) > MAX_SHOWN else []
        raise click.ClickException("\n\n".join(["; ".join(map(str, failed)), *shown, *more]))
