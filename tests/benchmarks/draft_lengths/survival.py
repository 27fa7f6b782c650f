"""`make study NAME=survival ARGS="../shared/traces"`: would a learned model foresee acceptance better than today's?

Recorded requests are drafted again, one after another (lab/replay). Before each draft is judged, every arm says how
likely each token is to be accepted after those before it; then it learns what became of the judged ones. Nothing that
an arm sees depends on the draw. *today*: `SurvivalEstimator`, as the engine uses it. *logistic*: an online logistic
regression per drafter on position, claim, outcome of the round before, and recent acceptance of the request. *stacked*:
the same with today's estimate as one more input. The step size is the best of four on the first fifth of the requests;
log loss and Brier score are of the rest. Intervals: 95 %, bootstrapped over requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt

from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import console_of, markdown_table
from outrider.drafter_service.engine.drafter import Ask, Drafter, SessionKey
from outrider.drafter_service.lookup.ngram_drafter import NgramDrafter
from outrider.drafter_service.lookup.suffix_drafter import SuffixConfig, SuffixDrafter
from outrider.lab.replay.traces import GREEDY, NO_BUDGET, Trace, count_accepted, read_traces
from outrider.verifier_service.pricing.survival import LastRound, SurvivalEstimator

Floats = npt.NDArray[np.float64]

PLAIN_WIDTH = 130
LENGTH = 8  # of drafts
STEP_SIZES = (0.02, 0.05, 0.1, 0.2)
MEMORY = 0.9  # of recent acceptance, per judged token
TUNING_SHARE = 0.2
NUM_DRAWS = 1000
NUM_FEATURES = 1 + LENGTH + 2 + len(LastRound) + 2 + 1  # as `_features` lists them; the last: today's estimate
DRAFTERS = ("suffix", "n-gram", "EAGLE, recorded")
ARMS = ("today", "logistic", "stacked")


@dataclass(frozen=True, slots=True)
class Round:
    """One draft: its length, how much of it was accepted, and its claims, if it has any."""

    num_drafted: int
    num_accepted: int
    claims: tuple[float, ...] | None

    @property
    def num_judged(self) -> int:
        return min(self.num_accepted + 1, self.num_drafted)


@dataclass(slots=True)
class _Past:
    """What is known of a request before its next draft."""

    last: LastRound = LastRound.UNDRAFTED
    last_share: float = 0.5  # of the last draft that was accepted
    recent: float = 0.5  # acceptance of recent tokens


@dataclass(slots=True)
class _Logistic:
    """Online logistic regression by Adagrad."""

    step_size: float
    weights: Floats = field(default_factory=lambda: np.zeros(NUM_FEATURES))
    squares: Floats = field(default_factory=lambda: np.full(NUM_FEATURES, 1e-3))

    def rate(self, features: Floats) -> float:
        return 1.0 / (1.0 + math.exp(-float(np.clip(self.weights @ features, -15.0, 15.0))))

    def learn(self, features: Floats, is_accepted: bool) -> None:
        gradient = (self.rate(features) - is_accepted) * features
        self.squares += gradient * gradient
        self.weights -= self.step_size * gradient / np.sqrt(self.squares)


def rounds_of(drafter: Drafter, key: SessionKey, trace: Trace) -> Iterator[Round]:
    """Draft a recorded request through; yield its rounds, empty drafts left out."""
    token_ids, end = list(trace.prompt_ids), len(trace.prompt_ids) + len(trace.generated_ids)
    while len(token_ids) < end:
        ask = Ask(key=key, ask_id=len(token_ids), token_ids=token_ids, sampling=GREEDY, length=LENGTH, max_nodes=0)
        (draft,) = drafter.draft([ask], max_num_tokens=NO_BUDGET)
        begin = len(token_ids) - len(trace.prompt_ids)
        coming = trace.generated_ids[begin : begin + LENGTH + 1]
        num_accepted = count_accepted(draft, coming)
        if draft.token_ids and len(coming) > len(draft.token_ids):
            yield Round(len(draft.token_ids), num_accepted, draft.confidences)
        token_ids += coming[: num_accepted + 1]
    drafter.release(key)


def recorded_rounds(trace: Trace) -> Iterator[Round]:
    """Yield the rounds of the recorded head, which claims nothing."""
    lengths, at = trace.recorded.get("eagle", []), 0
    while at + LENGTH < len(lengths):
        num_accepted = min(lengths[at] - 1, LENGTH)
        yield Round(LENGTH, num_accepted, None)
        at += num_accepted + 1


def _rounds_of_all(traces: Sequence[Trace], name: str) -> Iterator[list[Round]]:
    highest = max(max(*trace.prompt_ids, *trace.generated_ids) for trace in traces)
    drafter: Drafter = NgramDrafter(vocab_size=highest + 1)
    if name == "suffix":
        drafter = SuffixDrafter(vocab_size=highest + 1, config=SuffixConfig())
    for number, trace in enumerate(traces):
        is_recorded = name not in ("suffix", "n-gram")
        key = SessionKey("replay", str(number))
        yield list(recorded_rounds(trace) if is_recorded else rounds_of(drafter, key, trace))


def _features(past: _Past, place: int, claim: float | None, today: float, *, is_stacked: bool) -> Floats:
    values = np.zeros(NUM_FEATURES)
    values[0] = values[1 + place] = 1.0
    if claim is not None:
        values[1 + LENGTH] = _logit(claim)
        values[2 + LENGTH] = 1.0
    values[3 + LENGTH + past.last] = 1.0
    values[-3:] = past.last_share, _logit(past.recent), _logit(today) if is_stacked else 0.0
    return values


def _logit(rate: float) -> float:
    clipped = min(0.99, max(0.01, rate))
    return math.log(clipped / (1.0 - clipped))


def losses(requests: Sequence[Sequence[Round]]) -> dict[str, Floats]:
    """Return each arm's sums per request, [num_requests, 3]: log loss, squared error, judged tokens."""
    names = ["today", *(f"{arm} {size}" for arm in ARMS[1:] for size in STEP_SIZES)]
    sums = {name: np.zeros((len(requests), 3)) for name in names}
    models = {name: _Logistic(float(name.split()[1])) for name in names[1:]}
    estimator = SurvivalEstimator()
    for number, rounds in enumerate(requests):
        past, request_id = _Past(), str(number)
        for one in rounds:
            survivals = [1.0, *estimator.survivals(request_id, "d", one.num_drafted, one.claims)]
            for place in range(one.num_judged):
                is_accepted = place < one.num_accepted
                today = survivals[place + 1] / survivals[place]
                claim = one.claims[place] if one.claims else None
                _add(sums["today"][number], today, is_accepted)
                inputs = {arm: _features(past, place, claim, today, is_stacked=arm == "stacked") for arm in ARMS[1:]}
                for name, model in models.items():
                    features = inputs[name.split()[0]]
                    _add(sums[name][number], model.rate(features), is_accepted)
                    model.learn(features, is_accepted)
            for place in range(one.num_judged):
                past.recent = MEMORY * past.recent + (1.0 - MEMORY) * (place < one.num_accepted)
            past.last = LastRound.of(one.num_drafted, one.num_accepted)
            past.last_share = one.num_accepted / one.num_drafted
            estimator.observe(
                request_id,
                "d",
                num_draft_tokens=one.num_drafted,
                num_accepted_tokens=one.num_accepted,
                confidences=one.claims,
            )
        estimator.forget(request_id)
    return _tuned(sums, round(TUNING_SHARE * len(requests)))


def _add(row: Floats, rate: float, is_accepted: bool) -> None:
    clipped = min(0.999, max(0.001, rate))
    row += (-math.log(clipped if is_accepted else 1.0 - clipped), (rate - is_accepted) ** 2, 1.0)


def _tuned(sums: dict[str, Floats], num_tuning: int) -> dict[str, Floats]:
    """Return each arm's sums at its best step size, of the requests that did not choose it."""
    chosen = {}
    for arm in ARMS:
        names = [name for name in sums if name.split()[0] == arm]
        chosen[arm] = sums[min(names, key=lambda name: sums[name][:num_tuning, 0].sum())][num_tuning:]
    return chosen


def less_than_today(own: Floats, today: Floats, column: int) -> tuple[float, float, float]:
    """Return how much less an arm loses per judged token, and its interval, from sums as of `losses`."""
    rng = np.random.default_rng(0)
    counts = today[:, 2]
    gains = today[:, column] - own[:, column]
    draws = rng.integers(0, len(counts), (NUM_DRAWS, len(counts)))
    means = gains[draws].sum(axis=1) / counts[draws].sum(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(gains.sum() / counts.sum()), float(low), float(high)


def rows_of(name: str, traces: Sequence[Trace]) -> list[list[str]]:
    """Return the table's rows of one file."""
    rows = []
    for drafter in DRAFTERS:
        found = losses(list(_rounds_of_all(traces, drafter)))
        for arm, sums in found.items():
            log_loss, brier, count = sums.sum(axis=0)
            gains = [less_than_today(sums, found["today"], column) for column in (0, 1)]
            texts = ["" if arm == "today" else f"{gain:+.4f} ({low:+.4f} … {high:+.4f})" for gain, low, high in gains]
            rows.append(
                [
                    name,
                    drafter,
                    arm,
                    f"{count:.0f}",
                    f"{log_loss / count:.4f}",
                    texts[0],
                    f"{brier / count:.4f}",
                    texts[1],
                ]
            )
    return rows


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("traces_folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--num-requests", type=click.IntRange(min=10), help="The first of each file. Default: all.")
def survival(traces_folder: Path, num_requests: int | None) -> None:
    """Foresee acceptance over recorded requests, by today's estimates and by logistic regressions."""
    rows = []
    for path in sorted(traces_folder.glob("*.jsonl.gz")):
        rows += rows_of(path.name.partition(".")[0], read_traces(path, num_requests))
    heads = ["requests", "drafter", "arm", "tokens", "log loss", "less (95 %)", "Brier", "less (95 %)"]
    console_of(PLAIN_WIDTH).print("\n".join(markdown_table(heads, rows, num_left=3)), highlight=False)
