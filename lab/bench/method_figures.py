"""What `outrider bench methods` measures and makes of it: speeds, shares of a step, and the bound."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from outrider.cluster.config.service_config import ServiceConfig
from outrider.lab.bench.arms import Clock
from outrider.lab.bench.method_arms import DRAFTING, WAITING, MethodArm, Mode, Steps, Tokens, opened
from outrider.lab.plots import Panel, draw
from outrider.lab.replay.hindsight import Bound, Hindsight
from outrider.lab.replay.machine import Walk
from outrider.lab.report import Machine
from outrider.lab.same_tokens import Pair, Tally, compare, plain_decoding
from outrider.verifier_service.messages.engine import StepTime
from outrider.verifier_service.pricing.cost_model import StepTimeModel

SHARES = {  # the parts of a step that each comes from
    "drafting": (DRAFTING,),
    "waiting": (WAITING,),
    "verification": ("forward",),
    "sampling": ("verify",),
    "host": ("schedule", "messages", "commit", "ask", "outputs"),
}
RECORDED_TOKENS = 48  # of each prompt
MAX_WAVES = 2  # of requests that decode together
HYBRID, TREE = "hybrid", "+tree"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One method at one number of requests."""

    name: str
    num_requests: int
    steps: Mapping[Mode, Steps]

    @property
    def always(self) -> Steps:
        return self.steps[Mode.ALWAYS]

    @property
    def step_s(self) -> float:
        return self.always.seconds.total() / self.always.num_steps

    @property
    def tokens_per_round(self) -> float:
        return self.always.num_tokens / self.always.num_rounds

    def ratio(self, mode: Mode) -> float:
        return self.steps[mode].tokens_per_s / self.steps[Mode.OFF].tokens_per_s

    def share(self, name: str) -> float:
        """Return which share of a drafted step one of `SHARES` takes."""
        return sum(self.always.seconds[part] for part in SHARES[name]) / self.always.seconds.total()


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodsResult:
    """Everything that a page is made of."""

    title: str
    machine: Machine
    rows: tuple[Row, ...]
    walks: tuple[Walk, ...]
    bounds: tuple[Bound, ...]
    tally: Tally


class MeasuredMachine:
    """What steps took here: the profile of the engine's start, as much dearer as steps were than that."""

    def __init__(self, rows: Sequence[Row], step_times: Sequence[StepTime], length: int) -> None:
        self._model, self._length = StepTimeModel.from_points(step_times), length
        self._counts = sorted({row.num_requests for row in rows})
        plain = [[row.steps[Mode.OFF] for row in rows if row.num_requests == count] for count in self._counts]
        self._dearer = [
            statistics.median(one.seconds["forward"] / one.num_steps for one in own) / self._model.t(count)
            for count, own in zip(self._counts, plain, strict=True)
        ]
        self._host_s = [
            statistics.median((one.seconds.total() - one.seconds["forward"]) / one.num_steps for one in own)
            for own in plain
        ]
        self._drafting_s = {
            name: [row.always.seconds[DRAFTING] / row.always.num_steps for row in rows if row.name == name]
            for name in dict.fromkeys(row.name for row in rows)
        }

    def step_s(self, num_rows: int, num_requests: int) -> float:
        return self._model.t(num_rows) * self._at(num_requests, self._dearer) + self._at(num_requests, self._host_s)

    def draft_s(self, method: str, num_requests: int, longest: int) -> float:
        return self._at(num_requests, self._drafting_s[method]) * longest / self._length

    def _at(self, num_requests: int, values: Sequence[float]) -> float:
        return float(np.interp(num_requests, self._counts, values))


def measure(
    configs: Mapping[str, ServiceConfig],
    prompts: Sequence[tuple[int, ...]],
    *,
    concurrencies: Sequence[int],
    num_steps: int,
    is_far: bool,
    machine: Machine,
    clock: Clock,
    on_run: Callable[[str], None],
) -> MethodsResult:
    """Decode with every method at every number of requests, in turn without drafts and with them."""
    rows: list[Row] = []
    pairs: list[Pair] = []
    recorded: dict[str, list[list[tuple[int, int]]]] = {}
    step_times: tuple[StepTime, ...] = ()
    for name, config in configs.items():
        on_run(f"{name}, recorded")
        with opened(config, clock, is_far=is_far) as arm:
            recorded[name], plain = arm.record(prompts, RECORDED_TOKENS)
            step_times = step_times or arm.step_times
            for count in concurrencies:
                on_run(f"{name}, {count} requests")
                rows.append(_row(name, arm, prompts, count, num_steps, plain, pairs))
        del arm  # the next one's models need the room
    length = next(iter(configs.values())).max_draft_length
    bounds: tuple[Bound, ...] = ()
    if not is_far:
        known = {name: own for name, own in recorded.items() if name != HYBRID}
        hindsight = Hindsight(known, MeasuredMachine(rows, step_times, length), length)
        bounds = tuple(hindsight.bound(count) for count in concurrencies)
    target = next(iter(configs.values())).verifier_spec.model
    return MethodsResult(
        title=f"{len(prompts)} prompts, {num_steps} steps of each mode and batch, drafts of at most {length} tokens, "
        f"made {'in a process of their own' if is_far else 'in the verifier'}",
        machine=machine,
        rows=tuple(rows),
        walks=tuple(Walk.of(name, requests) for name, requests in recorded.items()),
        bounds=bounds,
        tally=compare(pairs, plain_decoding(target)),
    )


def _row(
    name: str,
    arm: MethodArm,
    prompts: Sequence[tuple[int, ...]],
    num_requests: int,
    num_steps: int,
    plain: Tokens,
    pairs: list[Pair],
) -> Row:
    """Decode so many requests at a time until every prompt has been one, or a few times; note tokens in `pairs`."""
    steps = {mode: Steps() for mode in Mode}
    order = itertools.cycle(range(len(prompts)))
    arm.settle(list(itertools.islice(itertools.cycle(prompts), num_requests)))
    for wave in range(min(MAX_WAVES, -(-len(prompts) // num_requests))):
        own = list(itertools.islice(order, num_requests))
        found, tokens = arm.decode([prompts[index] for index in own], num_steps, f"{num_requests}.{wave}")
        for mode, more in found.items():
            steps[mode] = steps[mode].plus(more)
        for place, index in enumerate(own):
            given, expected = tokens[f"{num_requests}.{wave}-{place}"], plain[f"recorded-{index}"]
            num_both = min(len(given), len(expected))
            what = f"{name}, {num_requests} requests, prompt {index + 1}"
            pairs.append(Pair(what=what, prompt=prompts[index], expected=expected[:num_both], given=given[:num_both]))
    return Row(name=name, num_requests=num_requests, steps=steps)


def best_of(rows: Sequence[Row], num_requests: int, mode: Mode) -> str:
    """Say which method was the fastest at so many requests."""
    best = max((row for row in rows if row.num_requests == num_requests), key=lambda row: row.ratio(mode))
    return f"{best.ratio(mode):.2f} ({best.name})"


def plot(result: MethodsResult, path: Path) -> None:
    """Draw speeds with drafts in every step beside the bound, and verification's share, over the requests."""
    counts = list(dict.fromkeys(row.num_requests for row in result.rows))
    by_name = {
        name: [row for row in result.rows if row.name == name]
        for name in dict.fromkeys(row.name for row in result.rows)
    }
    xs, ticks = range(len(counts)), [str(count) for count in counts]
    speeds = {name: (xs, [row.ratio(Mode.ALWAYS) for row in own]) for name, own in by_name.items()}
    priced = f"{HYBRID}, priced"
    if HYBRID in by_name:
        speeds[priced] = (xs, [row.ratio(Mode.PRICED) for row in by_name[HYBRID]])
    if result.bounds:
        speeds["bound"] = (xs, [bound.per_step for bound in result.bounds])
    shares = {name: (xs, [100 * row.share("verification") for row in own]) for name, own in by_name.items()}
    panels = [
        Panel(
            x="requests",
            y="speed ÷ plain",
            lines=speeds,
            ticks=ticks,
            dashed=frozenset({"bound"}),
            bold=frozenset({priced}),
        ),
        Panel(x="requests", y="verification, % of a step", lines=shares, ticks=ticks),
    ]
    draw(panels, path, title=str(result.machine).partition(";")[0], size=(13, 5))
