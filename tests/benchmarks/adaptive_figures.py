"""Is deciding step by step ever worse than a fixed draft length? The arithmetic and the table, without an engine.

The fixed arm to beat is the best one *at each load*, which nobody knows beforehand. To pick the best of several noisy
figures and compare with that very figure would favour it, so it is picked on one half of the repeats and compared on
the other, with the halves drawn again and again and the second one resampled (bootstrap): the ratio's median and its
95 % interval are over these draws.

No speculation runs twice in every repeat. How far the second one, the placebo, lies from the first is what the machine
does to a ratio of equals.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from outrider.lab.plots import Panel, draw
from outrider.lab.report import Column, Report, Section

OFF, PLACEBO, ADAPTIVE, TABLE = "off", "off again", "adaptive", "table"
NUM_RESAMPLES = 4000
INTERVAL = (2.5, 97.5)  # percentiles
LEAST_OF_BEST, LEAST_OF_OFF = 0.97, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Throughput over another arm's, with its interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What was measured at one concurrency, by arm."""

    concurrency: int
    tokens_per_s: Mapping[str, tuple[float, ...]]  # one figure per repeat
    draft_lengths: Mapping[str, float]  # mean tokens verified per decoding request and step
    best: str  # the fixed arm that was picked most often
    over_best: Ratio
    over_off: Ratio
    placebo: Ratio  # no speculation over itself

    @property
    def is_never_worse(self) -> bool:
        """Whether the intervals allow that adaptive is 0.97 of the best fixed arm and as fast as none."""
        return self.over_best.high >= LEAST_OF_BEST and self.over_off.high >= LEAST_OF_OFF


def compare(
    concurrency: int,
    tokens_per_s: Mapping[str, Sequence[float]],
    draft_lengths: Mapping[str, float],
    *,
    seed: int = 0,
) -> Point:
    """Compare adaptive with the best fixed arm and with none, and none with itself.

    Raises `ValueError` for less than two repeats.
    """
    figures = {name: np.asarray(values) for name, values in tokens_per_s.items()}
    num_repeats = len(figures[ADAPTIVE])
    if num_repeats < 2:
        raise ValueError("repeats must be at least 2: the best fixed arm is picked on one half of them")
    fixed = [name for name in figures if name not in (ADAPTIVE, PLACEBO)]
    rng = np.random.default_rng(seed)
    over_best: list[float] = []
    over_off: list[float] = []
    placebo: list[float] = []
    picked: list[str] = []
    for _ in range(NUM_RESAMPLES):
        order = rng.permutation(num_repeats)
        picking, judging = order[: num_repeats // 2], order[num_repeats // 2 :]
        best = max(fixed, key=lambda name: float(figures[name][picking].mean()))
        drawn = rng.choice(judging, len(judging))
        every = rng.choice(num_repeats, num_repeats)
        off = figures[OFF][every].mean()
        picked.append(best)
        over_best.append(float(figures[ADAPTIVE][drawn].mean() / figures[best][drawn].mean()))
        over_off.append(float(figures[ADAPTIVE][every].mean() / off))
        placebo.append(float(figures[PLACEBO][every].mean() / off))
    return Point(
        concurrency=concurrency,
        tokens_per_s={name: tuple(map(float, values)) for name, values in tokens_per_s.items()},
        draft_lengths=dict(draft_lengths),
        best=statistics.mode(picked),
        over_best=_ratio(over_best),
        over_off=_ratio(over_off),
        placebo=_ratio(placebo),
    )


def _ratio(values: Sequence[float]) -> Ratio:
    low, high = np.percentile(values, INTERVAL)
    return Ratio(median=statistics.median(values), low=float(low), high=float(high))


# --- showing it ---


def report_of(title: str, points: Sequence[Point]) -> Report[Point]:
    """Return the points as they are shown."""

    def speed(name: str) -> Callable[[Point], str]:
        return lambda point: f"{statistics.fmean(point.tokens_per_s[name]):.1f}"

    return Report(
        title=title,
        columns=[
            Column("concurrency", lambda point: str(point.concurrency)),
            *(Column(f"{name} tokens/s", speed(name)) for name in points[0].tokens_per_s),
            Column("adaptive drafts", lambda point: f"{point.draft_lengths[ADAPTIVE]:.2f}"),
            Column("best fixed", lambda point: point.best),
            Column("adaptive / best fixed", lambda point: str(point.over_best)),
            Column("adaptive / off", lambda point: str(point.over_off)),
            Column("off again / off", lambda point: str(point.placebo)),
            Column("held", lambda point: "yes" if point.is_never_worse else "NO"),
        ],
        sections=[Section("", points)],
        heading="Never worse",
        command="make study NAME=adaptive",
        notes=[
            "Speeds are means over the repeats; a ratio is one of means, the median and the 95 % interval of it over "
            f"{NUM_RESAMPLES:,} bootstrap draws: the best fixed arm is picked on one half of the repeats and compared "
            "on the other, so it is not always the one whose mean over all is highest. *adaptive drafts* are draft "
            f"tokens verified per request and step. *held*: the interval allows {LEAST_OF_BEST} of the best fixed arm "
            f"and {LEAST_OF_OFF} of none. *off again*: a second arm of plain decoding, a placebo: how far apart equals "
            "lie."
        ],
        document={"title": title, "points": [dataclasses.asdict(point) for point in points]},
    )


def plot(points: Sequence[Point], path: Path) -> None:
    """Draw every arm's speed over no speculation's, by concurrency, as one PNG."""
    places = range(len(points))  # evenly spaced: loads are powers of two
    gains = {
        name: [statistics.fmean(p.tokens_per_s[name]) / statistics.fmean(p.tokens_per_s[OFF]) for p in points]
        for name in points[0].tokens_per_s
    }
    panel = Panel(
        x="concurrency",
        y="tokens/s over speculation off",
        lines={name: (places, values) for name, values in gains.items()},
        ticks=[str(point.concurrency) for point in points],
        bold=frozenset({ADAPTIVE}),
    )
    draw([panel], path, size=(8, 5))
