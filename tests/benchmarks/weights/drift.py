"""`make study NAME=drift`: traffic changes from one kind of text to another; does a pool that learns follow?

Two services of MODEL one after the other, without a learner and with one, and a third without, the placebo. Each
answers prompts of kind A, then of kind B, drawn by their number, greedily or seeded: all services must say the same
tokens, which is checked on the first answers of each kind. Drafts are pinned (`--speculation always`): the price would
end drafts that do not pay on two cores, and the question is what they become worth. Clients think between two requests,
so that the learner, which runs in the idle class, finds spare time as in a service that is not full.

Gain: tokens per verification in the last quarter of kind B over those in its first tenth. It is reported as none where
it lies within two standard errors.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import httpx

from benchmarks.weights.served_model import Told, in_float32, serving, told
from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import markdown_table
from outrider.lab.report import describe_machine, files, show_page
from outrider.lab.same_tokens import Pair, compare, require_same

PLAIN_WIDTH = 140
POLL_S = 2.0
OFF, ON, PLACEBO = "off", "on", "off again"
NUM_BUCKETS = 12  # of a kind's time
GAIN_SHARE = 0.9
NUM_COMPARED = 8  # first answers of a kind, whose tokens must be the same in all services

NAMES = ("width", "total", "index", "name", "path", "count", "user", "order", "price", "date", "queue", "limit", "key")
VERBS = ("get", "set", "add", "remove", "find", "sort", "merge", "parse", "check", "load", "save", "count", "join")
THINGS = ("river", "bread", "lamp", "bicycle", "market", "engine", "garden", "violin", "storm", "castle", "bridge")
PLACES = ("Rome", "Oslo", "Lima", "Cairo", "Kyoto", "Quito", "Delhi", "Paris", "Accra", "Hanoi", "Turin", "Basel")


def _functions(chance: random.Random) -> str:
    first, second, verb = chance.choice(NAMES), chance.choice(NAMES), chance.choice(VERBS)
    return f'def {verb}_{first}(self, {second}, {chance.choice(NAMES)}=None):\n    """'


def _inserts(chance: random.Random) -> str:
    first, second = chance.sample(NAMES, 2)
    return f"CREATE TABLE {chance.choice(THINGS)} ({first} INT, {second} TEXT);\nINSERT INTO "


def _questions(chance: random.Random) -> str:
    first, second = chance.sample(THINGS, 2)
    return f"Tell me a short story about a {first} and a {second} in {chance.choice(PLACES)}."


def _tables(chance: random.Random) -> str:
    things = ", ".join(chance.sample(THINGS, 4))
    return f"Write SQL that creates a table of {things} with prices in {chance.choice(PLACES)} and inserts ten rows."


Kind = Callable[[random.Random], str]
KINDS: dict[str, tuple[Kind, Kind]] = {"embedded": (_functions, _inserts), "smollm2": (_questions, _tables)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One answer."""

    end_s: float  # since the kind began
    num_tokens: int
    num_accepted: int
    seconds: float
    number: int  # of its prompt
    told: Told

    @property
    def num_verifications(self) -> int:
        return self.num_tokens - self.num_accepted


@dataclass(slots=True)
class Arm:
    """What one service did: answers of both kinds, in the order of their ends, and its learner's states."""

    answers: tuple[list[Answered], list[Answered]] = field(default_factory=lambda: ([], []))
    learner: list[tuple[float, dict[str, Any]]] = field(default_factory=list)  # seconds since kind A began


def tokens_per_verification(answers: Sequence[Answered]) -> float:
    """Return tokens over verifications; NaN without answers."""
    num_verifications = sum(answer.num_verifications for answer in answers)
    return sum(answer.num_tokens for answer in answers) / num_verifications if num_verifications else float("nan")


def buckets(answers: Sequence[Answered], seconds: float, num: int = NUM_BUCKETS) -> list[list[Answered]]:
    """Return answers by the part of a kind's time in which they ended."""
    found: list[list[Answered]] = [[] for _ in range(num)]
    for answer in answers:
        found[min(num - 1, int(answer.end_s / seconds * num))].append(answer)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What a kind's time brought."""

    first: float  # tokens per verification in the first bucket
    last: float  # in the last quarter
    error: float  # standard error of their difference
    reached_s: float | None  # from the kind's begin until 0.9 of the gain; None: no gain

    @property
    def is_real(self) -> bool:
        return self.last - self.first > 2 * self.error


def gain_of(answers: Sequence[Answered], seconds: float) -> Gain:
    """Compare the end of a kind's time with its begin; an answer is a draw."""
    parts = buckets(answers, seconds)
    first, last = parts[0], list(itertools.chain(*parts[-NUM_BUCKETS // 4 :]))
    error = sum(_squared_error(part) for part in (first, last)) ** 0.5
    begin, end = tokens_per_verification(first), tokens_per_verification(last)
    bar = begin + GAIN_SHARE * (end - begin)
    reached = next((place for place, part in enumerate(parts) if tokens_per_verification(part) >= bar), None)
    is_real = end - begin > 2 * error
    reached_s = seconds * (reached + 1) / NUM_BUCKETS if is_real and reached is not None else None
    return Gain(first=begin, last=end, error=error, reached_s=reached_s)


def _squared_error(answers: Sequence[Answered]) -> float:
    each = [tokens_per_verification([answer]) for answer in answers]
    return statistics.variance(each) / len(each) if len(each) > 1 else float("inf")


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("model", type=click.Choice([*KINDS]), default="embedded")
@click.option("--config", "speculative", default='{"method": "draft_model"}', show_default=True, help="As `-sc`.")
@click.option("--learner", default='{"min_samples": 32}', show_default=True, help="As `--learner`, without the folder.")
@click.option("--seconds", type=(float, float), default=(60.0, 240.0), show_default=True, help="Of kinds A and B.")
@click.option("--concurrency", type=click.IntRange(1), default=4, show_default=True)
@click.option(
    "--think", "think_s", default=0.5, show_default=True, help="Seconds between a client's requests, at most."
)
@click.option("--max-tokens", type=click.IntRange(1), default=96, show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
@files("markdown", "plot")
def drift(
    model: str,
    speculative: str,
    learner: str,
    seconds: tuple[float, float],
    concurrency: int,
    think_s: float,
    max_tokens: int,
    temperature: float,
    markdown_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Change the kind of text under a running service, with a learner and without."""
    load = Load(model, seconds, concurrency, think_s, max_tokens, temperature)
    arms: dict[str, Arm] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in (OFF, ON, PLACEBO):
            options = ["-sc", speculative, "--speculation", "always", "--dtype", "float32"]
            if name == ON:
                options += ["--learner", json.dumps(json.loads(learner) | {"folder": f"{folder}/learner"})]
            with serving(model, options, Path(folder) / f"{name}.log") as http:
                arms[name] = load.run(http)
    page = to_page(f"{model}, {speculative}, {learner}", arms, seconds)
    show_page(page, PLAIN_WIDTH, markdown_file)
    if plot_file is not None:
        plot(arms, seconds, plot_file)
    require_same(compare(pairs_of(arms, temperature), in_float32(model)))


@dataclass(frozen=True, slots=True)
class Load:
    """Clients that think: each sends its next prompt a while after it has its answer."""

    model: str
    seconds: tuple[float, float]
    concurrency: int
    think_s: float
    max_tokens: int
    temperature: float

    def run(self, http: httpx.Client) -> Arm:
        """Ask one kind after the other."""
        arm, begin_s, is_over = Arm(), time.monotonic(), threading.Event()

        def watch() -> None:
            while not is_over.wait(POLL_S):
                with contextlib.suppress(httpx.HTTPError):
                    answer = http.get("/v1/learner")
                    if answer.status_code == 200:
                        arm.learner.append((time.monotonic() - begin_s, answer.json()))

        with ThreadPoolExecutor(self.concurrency + 1) as pool:
            watching = pool.submit(watch)
            try:
                for place in (0, 1):
                    numbers = itertools.count()
                    kind_begin_s = time.monotonic()
                    clients = [
                        pool.submit(self._client, http, place, numbers, kind_begin_s, arm.answers[place])
                        for _ in range(self.concurrency)
                    ]
                    for client in clients:
                        client.result()
            finally:
                is_over.set()
            watching.result()
        return arm

    def _client(
        self, http: httpx.Client, place: int, numbers: Iterator[int], begin_s: float, found: list[Answered]
    ) -> None:
        while time.monotonic() - begin_s < self.seconds[place]:
            number = next(numbers)
            asked_s = time.monotonic()
            answer = self._ask(http, place, number)
            now_s = time.monotonic()
            speculation = answer["metrics"]["speculative_decoding"]
            found.append(
                Answered(
                    end_s=now_s - begin_s,
                    num_tokens=answer["usage"]["completion_tokens"],
                    num_accepted=speculation["num_accepted_tokens"],
                    seconds=now_s - asked_s,
                    number=number,
                    told=told(answer),
                )
            )
            time.sleep(random.Random(number).uniform(0.0, self.think_s))

    def _ask(self, http: httpx.Client, place: int, number: int) -> dict[str, Any]:
        prompt = KINDS[self.model][place](random.Random(f"{place} {number}"))
        body: dict[str, Any] = {"max_tokens": self.max_tokens, "temperature": self.temperature, "seed": number}
        body["return_token_ids"] = True
        if self.model == "embedded":
            answer = http.post("/v1/completions", json=body | {"prompt": prompt, "ignore_eos": True})
        else:
            answer = http.post("/v1/chat/completions", json=body | {"messages": [{"role": "user", "content": prompt}]})
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found


def pairs_of(arms: dict[str, Arm], temperature: float) -> list[Pair]:
    """Return the first prompts' answers of both kinds beside those of the arm that does not learn."""
    first = [
        {
            (place, answer.number): answer.told
            for place, answers in enumerate(arm.answers)
            for answer in answers
            if answer.number < NUM_COMPARED
        }
        for arm in arms.values()
    ]
    expected = first[0]
    return [
        answers[place, number].beside(
            expected[place, number],
            f"{name}, kind {'AB'[place]}, prompt {number}",
            {"seed": number, "temperature": temperature},
        )
        for name, answers in zip(arms, first, strict=True)
        for place, number in sorted(expected.keys() & answers.keys())
    ]


def to_page(title: str, arms: dict[str, Arm], seconds: tuple[float, float]) -> str:
    """Return the tables: tokens per verification over time, and what each arm gained and cost."""
    headings = ["s", *(f"{name}: tokens/verification" for name in arms), *(f"{name}: tokens/s" for name in arms)]
    rows = []
    for place, name in enumerate("AB"):
        parts = {arm: buckets(arms[arm].answers[place], seconds[place]) for arm in arms}
        for index in range(NUM_BUCKETS):
            length_s = seconds[place] / NUM_BUCKETS
            lengths = [f"{tokens_per_verification(parts[arm][index]):.3f}" for arm in arms]
            speeds = [f"{sum(a.num_tokens for a in parts[arm][index]) / length_s:.1f}" for arm in arms]
            rows.append((f"{name} {index * length_s:.0f}", *lengths, *speeds))
    gains = []
    for name, arm in arms.items():
        found = gain_of(arm.answers[1], seconds[1])
        reached = "-" if found.reached_s is None else f"{found.reached_s:.0f}"
        said = f"{found.last - found.first:+.3f} ± {2 * found.error:.3f}" + ("" if found.is_real else " (none)")
        gains.append((name, f"{found.first:.3f}", f"{found.last:.3f}", said, reached, *_pace(arm)))
    told_gains = ("", "B begins", "B ends", "gain", "s to 0.9 of it", "A: ms a verification", "B: ms a verification")
    text = [
        f"{describe_machine()}; {title}",
        "",
        *markdown_table(headings, rows, num_left=1),
        "",
        *markdown_table(told_gains, gains, num_left=1),
    ]
    if arms[ON].learner:
        text += ["", "The learner at the end:", "", "```", json.dumps(arms[ON].learner[-1][1], indent=1), "```"]
    return "\n".join(text)


def _pace(arm: Arm) -> tuple[str, str]:
    """Return milliseconds per verification of a request, for each kind: what a slower step shows as."""

    def pace(answers: Sequence[Answered]) -> str:
        rounds = sum(answer.num_verifications for answer in answers)
        return f"{1000 * sum(answer.seconds for answer in answers) / max(1, rounds):.1f}"

    return pace(arm.answers[0]), pace(arm.answers[1])


def plot(arms: dict[str, Arm], seconds: tuple[float, float], path: Path) -> None:
    """Draw tokens per verification over time, and where the learner's serving version changed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, arm in arms.items():
        times, values = [], []
        for place in (0, 1):
            for index, part in enumerate(buckets(arm.answers[place], seconds[place])):
                times.append((seconds[0] if place else 0.0) + (index + 0.5) * seconds[place] / NUM_BUCKETS)
                values.append(tokens_per_verification(part))
        axes.plot(times, values, marker="o", linewidth=3.0 if name == ON else 1.2, label=f"learner {name}")
    axes.axvline(seconds[0], color="grey", linestyle="--")
    for at_s, version in _swaps(arms[ON]):
        axes.axvline(at_s, color="green", alpha=0.4)
        axes.text(at_s, axes.get_ylim()[0], version, rotation=90, fontsize=7)
    axes.set_xlabel("seconds (dashed: kind A ends, kind B begins)")
    axes.set_ylabel("tokens per verification")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png", dpi=110)


def _swaps(arm: Arm) -> Iterator[tuple[float, str]]:
    """Yield when another version began to serve, and its name."""
    before = None
    for at_s, status in arm.learner:
        serving = next(iter(status["data"]), {}).get("serving")
        if before is not None and serving != before:
            yield at_s, str(serving)
        before = serving
