"""Whether a row's bits depend on its company: on how many rows there are, which, where it stands, and on threads.

A case computes any rows of a fixed population, in any order. Every row is computed alone on one thread first; then in
batches of many sizes, made of random runs of neighbours, and compared with itself bit by bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

POPULATION = 600
SPREAD = (63, 64, 65, 127, 128, 129, 200, 256, 511, 512, 600)
RUNS = (1, 1, 2, 5, 18, 40)  # lengths of runs of neighbours
MOST_SHOWN = 6  # ranges of counts

Compute = Callable[[list[int]], torch.Tensor]  # of these rows of the population, in this order: [num_rows, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """In how many batches rows are looked at, and how many rows."""

    counts: Mapping[int, tuple[int, ...]]  # sizes of batches, by number of threads
    population: int = POPULATION  # larger batches have rows twice
    measures_all: bool = True  # also what is promised of nothing


WHOLE = Plan(counts=dict.fromkeys((1, 2, 3), (*range(1, 41), *SPREAD)))
BRIEF = Plan(
    counts={1: (*range(1, 20), 31, 32, 33, 65, 129, 257, 600), 2: (1, 4, 33, 257, 600)},
    population=120,
    measures_all=False,
)
NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One product of one dtype; `is_promised`: the service says that it does not depend on the batch."""

    product: str
    dtype: str
    is_promised: bool
    compute: Compute
    num_rows: int = POPULATION
    counts: Container[int] = range(POPULATION + 1)  # of rows that are measured, where the plan has them


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was seen of a case; `seen` is empty if every row had the same bits in any company."""

    product: str
    dtype: str
    is_promised: bool
    seen: str


def found(case: Case, plan: Plan = WHOLE) -> Finding:
    """Measure a case."""
    if not (plan.measures_all or case.is_promised):
        return Finding(product=case.product, dtype=case.dtype, is_promised=False, seen=NOT_MEASURED)
    num_rows = min(case.num_rows, plan.population)
    with inference(), threads(1):
        alone = torch.stack([bits(case.compute([row]))[0] for row in range(num_rows)])
    probe, draw = num_rows // 2, random.Random(1)
    groups: list[tuple[torch.Tensor, list[int]]] = []  # by the bits of the probe as the first row, on one thread
    different: dict[int, list[int]] = {}  # by number of threads: the counts at which any row had other bits
    measured = {
        number: [count for count in own if count <= case.num_rows and count in case.counts]
        for number, own in plan.counts.items()
    }
    for num_threads, counts in measured.items():
        with inference(), threads(num_threads):
            for count in counts:
                rows = [probe, *runs(count - 1, num_rows, draw)]
                got = bits(case.compute(rows))
                if not torch.equal(got, alone[rows]):
                    different.setdefault(num_threads, []).append(count)
                if num_threads == 1:
                    sort_in(groups, got[0], count)
    seen = described(measured, [own for _, own in groups], different)
    return Finding(product=case.product, dtype=case.dtype, is_promised=case.is_promised, seen=seen)


def bits(rows: torch.Tensor) -> torch.Tensor:
    """Return [num_rows, num_bytes]: zeros of either sign differ, and a NaN equals itself."""
    return rows.contiguous().flatten(1).view(torch.uint8)


def runs(count: int, num_rows: int, draw: random.Random) -> list[int]:
    """Draw `count` rows in runs of neighbours."""
    rows: list[int] = []
    while len(rows) < count:
        length = min(draw.choice(RUNS), count - len(rows), num_rows)
        start = draw.randrange(num_rows - length + 1)
        rows += range(start, start + length)
    return rows


def sort_in(groups: list[tuple[torch.Tensor, list[int]]], own: torch.Tensor, count: int) -> None:
    """Put a count to those that gave the same bits."""
    same = next((counts for seen, counts in groups if torch.equal(seen, own)), None)
    if same is None:
        groups.append((own, [count]))
    else:
        same.append(count)


def described(
    measured: Mapping[int, Sequence[int]], groups: Sequence[list[int]], different: Mapping[int, list[int]]
) -> str:
    """Say how rows depended on their company; empty: not at all. Counts of rows are by number of threads."""
    if not different:
        return ""
    parts = []
    if len(groups) > 1:
        parts.append(f"{len(groups)} groups: {', '.join(ranges(own, measured[1]) for own in groups[:MOST_SHOWN])}")
    if 1 in different:
        parts.append(f"other bits than alone in batches of {ranges(different[1], measured[1])}")
    else:
        number = min(different)
        parts.append(f"only with {number} threads, in batches of {ranges(different[number], measured[number])}")
    return "; ".join(parts)


def ranges(chosen: Sequence[int], counts: Sequence[int]) -> str:
    """Write those of the measured counts that were chosen, neighbours together: "1-32 64"."""
    spans: list[list[int]] = []
    for count in counts:
        if count not in chosen:
            spans.append([])
        elif spans and spans[-1]:
            spans[-1].append(count)
        else:
            spans.append([count])
    texts = [f"{own[0]}-{own[-1]}" if len(own) > 1 else str(own[0]) for own in spans if own]
    return " ".join([*texts[:MOST_SHOWN], *["…"][: len(texts) > MOST_SHOWN]])


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Compute with so many threads within."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    yield
    torch.set_num_threads(before)


def inference() -> torch.inference_mode:
    """Compute as the service does."""
    return torch.inference_mode()
