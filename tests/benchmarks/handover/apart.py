"""`make study NAME=apart`: prefill and decode on verifiers of their own, beside two that do both, and one alone.

Each arm is a service in processes of its own, one thread for each rank. Streams decode, half of them greedily, half
seeded, while long prompts come at a fixed interval; all arms get the same. What is compared with one verifier: the
tokens of every answer, which must be the same, and what is accepted, by position, in answers so short that they are
drafted in about three rounds: drafts that began on a wrong state would lose there first. `--links` measures something
else: see links.py.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import httpx
import numpy as np

from benchmarks.handover.links import table_of_links
from benchmarks.weights.served_model import Told, in_float32, serving
from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import console_of, markdown_table
from outrider.lab.bench.pairs import describe_machine
from outrider.lab.peers.measure import PROMPTS
from outrider.lab.same_tokens import Pair, compare, num_identical, require_same

PLAIN_WIDTH = 140
ALONE, TOGETHER, APART = "one verifier", "two that do both", "one for prompts, one that decodes"
ARMS: dict[str, tuple[str, ...]] = {
    ALONE: ("--num-verifiers", "1"),
    TOGETHER: ("--num-verifiers", "2"),
    APART: ("--num-verifiers", "1", "--num-prefill-verifiers", "1"),
}
CHARS_PER_TOKEN = 4  # of a long prompt: a guess
SHORT_ANSWER = 8  # tokens: with drafts of four about three rounds
NUM_SHORT = 16
LONG_ANSWER = 8
NUM_SHOWN = 40  # characters of a prompt, where its answers differ
HEADINGS = ("service", "TTFT p50 (s)", "p99", "between outputs p50 (ms)", "p99", "longest", "tokens/s")
CHECKS = ("same tokens", "accepted by position, drafts")


@dataclass(frozen=True, slots=True)
class Ask:
    """A request of the load."""

    body: dict[str, Any]
    is_long: bool
    begins_s: float = 0.0  # after the load


@dataclass(slots=True)
class Answered:
    """What came for one, and when, in seconds after its request."""

    arrivals_s: list[float] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)  # by position of a draft
    num_drafts: int = 0

    @property
    def told(self) -> Told:
        return Told(prompt=self.prompt, token_ids=self.token_ids)


@dataclass(frozen=True, slots=True)
class Figures:
    """One arm, over all rounds."""

    first_s: Sequence[float]  # of the long prompts
    gaps_s: Sequence[float]  # of the streams
    tokens_per_s: float
    bodies: Sequence[dict[str, Any]]  # of all requests
    answers: Sequence[Told]  # to them
    accepted: Sequence[int]

    def row(self, name: str, alone: Figures) -> list[str]:
        num_same = num_identical(*([told.token_ids for told in one.answers] for one in (self, alone)))
        first_s, gaps_ms = np.asarray(self.first_s), 1e3 * np.asarray(self.gaps_s)
        return [
            name,
            *(f"{np.quantile(first_s, share):.2f}" for share in (0.5, 0.99)),
            *(f"{np.quantile(gaps_ms, share):.0f}" for share in (0.5, 0.99, 1.0)),
            f"{self.tokens_per_s:.1f}",
            f"{num_same} of {len(self.answers)}",
            " ".join(map(str, self.accepted)),
        ]

    def pairs(self, name: str, alone: Figures) -> list[Pair]:
        """Return every answer beside that of one verifier."""
        return [
            told.beside(expected, f"{name}: {body['prompt'][:NUM_SHOWN]}", body)
            for body, told, expected in zip(self.bodies, self.answers, alone.answers, strict=True)
        ]


def asks_of(
    texts: Sequence[str], *, streams: int, max_tokens: int, prompts: int, tokens: int, every_s: float
) -> list[Ask]:
    """Return the streams, then the long prompts, none of which begins as another does."""
    laws: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"temperature": 0.8})
    short = [
        Ask({"prompt": texts[place % len(texts)], "max_tokens": max_tokens, "seed": place, **laws[place % 2]}, False)
        for place in range(streams)
    ]
    whole = " ".join(texts)
    text = (whole * (1 + CHARS_PER_TOKEN * tokens // len(whole)))[: CHARS_PER_TOKEN * tokens]
    return short + [
        Ask({"prompt": f"{place}. {text}", "max_tokens": LONG_ANSWER, "temperature": 0}, True, every_s * (place + 0.5))
        for place in range(prompts)
    ]


def answer(http: httpx.Client, body: dict[str, Any]) -> Answered:
    """Stream a completion."""
    found, begin_s = Answered(), time.monotonic()
    asked = {"model": "served", "stream": True, "ignore_eos": True, "return_token_ids": True, **body}
    with http.stream("POST", "/v1/completions", json=asked) as response:
        if response.is_error:
            raise click.ClickException(f"{response.status_code} {response.read().decode()}")
        for line in response.iter_lines():
            payload = line.removeprefix("data:").strip()
            if not payload or payload == "[DONE]" or line.startswith(":"):
                continue
            event = json.loads(payload)
            if "error" in event:
                raise click.ClickException(str(event["error"]))
            found.prompt += event["choices"][0].get("prompt_token_ids") or []
            new = event["choices"][0].get("token_ids") or []
            if new:
                found.arrivals_s.append(time.monotonic() - begin_s)
                found.token_ids += new
            speculation = (event.get("metrics") or {}).get("speculative_decoding")
            if speculation is not None:
                found.accepted, found.num_drafts = speculation["num_accepted_per_position"], speculation["num_drafts"]
    return found


def load(http: httpx.Client, asks: Sequence[Ask], sleep: Callable[[float], None] = time.sleep) -> list[Answered]:
    """Send all requests, each at its time."""

    def one(ask: Ask) -> Answered:
        sleep(ask.begins_s)
        return answer(http, ask.body)

    with ThreadPoolExecutor(len(asks)) as pool:
        return list(pool.map(one, asks))


Round = tuple[float, Sequence[Ask], Sequence[Answered]]  # seconds


def figures_of(rounds: Sequence[Round], short: Sequence[tuple[dict[str, Any], Answered]]) -> Figures:
    """Sum up the rounds, and the short answers that came before."""
    asked = [(ask, found) for _, asks, answers in rounds for ask, found in zip(asks, answers, strict=True)]
    streams = [found for ask, found in asked if not ask.is_long]
    gaps_s = [later - earlier for one in streams for earlier, later in itertools.pairwise(one.arrivals_s)]
    accepted = [sum(counts) for counts in itertools.zip_longest(*(one.accepted for _, one in short), fillvalue=0)]
    return Figures(
        first_s=[found.arrivals_s[0] for ask, found in asked if ask.is_long],
        gaps_s=gaps_s,
        tokens_per_s=statistics.mean(
            sum(len(one.token_ids) for one in answers) / wall_s for wall_s, _, answers in rounds
        ),
        bodies=[*(ask.body for ask, _ in asked), *(body for body, _ in short)],
        answers=[found.told for _, found in (*asked, *short)],
        accepted=[*accepted, sum(one.num_drafts for _, one in short)],
    )


def measure(http: httpx.Client, asks: Sequence[Ask], texts: Sequence[str], repeats: int) -> Figures:
    """Run short answers one after another, then the load so often; prompts of rounds differ in their first word."""
    bodies = [
        {"prompt": f"{place}: {texts[place]}", "max_tokens": SHORT_ANSWER, "temperature": 0}
        for place in range(NUM_SHORT)
    ]
    short = [(body, answer(http, body)) for body in bodies]
    rounds: list[Round] = []
    for repeat in range(repeats):
        own = [Ask({**ask.body, "prompt": f"{repeat} {ask.body['prompt']}"}, ask.is_long, ask.begins_s) for ask in asks]
        begin_s = time.monotonic()
        answers = load(http, own)
        rounds.append((time.monotonic() - begin_s, own, answers))
    return figures_of(rounds, short)


def served_with(arm: str, max_num_batched_tokens: int, further: str) -> list[str]:
    """Return what an arm is served with."""
    common = ("--served-model-name", "served", "--dtype", "float32", "--threads-per-rank", "1", "--seed", "0")
    drafts = ("--speculation", "always", "--num-drafters", "1")
    return [*common, *drafts, *ARMS[arm], "--max-num-batched-tokens", str(max_num_batched_tokens), *further.split()]


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("model", default="smollm2")
@click.option("--num-streams", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--max-tokens", type=click.IntRange(min=2), default=96, show_default=True, help="Of a stream.")
@click.option("--num-prompts", type=click.IntRange(min=1), default=4, show_default=True, help="Long ones, a round.")
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=512, show_default=True, help="About, of each.")
@click.option("--every-s", type=float, default=3.0, show_default=True, help="Between two long prompts.")
@click.option("--max-num-batched-tokens", type=click.IntRange(min=1), default=256, show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--links", is_flag=True, help="Measure KV in frames beside KV over a tensor channel, and nothing else.")
@click.option("--serve-options", default="", help="Further ones of `outrider serve`, for every arm.")
@click.option("--markdown", "markdown_file", type=click.Path(dir_okay=False, writable=True, path_type=Path))
def apart(
    model: str,
    num_streams: int,
    max_tokens: int,
    num_prompts: int,
    prompt_tokens: int,
    every_s: float,
    max_num_batched_tokens: int,
    repeats: int,
    links: bool,
    serve_options: str,
    markdown_file: Path | None,
) -> None:
    """Measure what prefill on a verifier of its own does to streams; fails where a token differs."""
    if links:
        show(f"{describe_machine()}; {repeats} repetitions.", table_of_links(repeats), markdown_file)
        return
    texts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
    asks = asks_of(
        texts,
        streams=num_streams,
        max_tokens=max_tokens,
        prompts=num_prompts,
        tokens=prompt_tokens,
        every_s=every_s,
    )
    found: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ARMS:
            options = served_with(name, max_num_batched_tokens, serve_options)
            with serving(model, options, Path(folder) / "serve.log") as http:
                found[name] = measure(http, asks, texts, repeats)
    rows = [figures.row(name, found[ALONE]) for name, figures in found.items()]
    title = (
        f"{describe_machine()}; {model}, float32, a thread for each rank, steps of at most {max_num_batched_tokens} "
        f"tokens, {num_streams} streams of {max_tokens} tokens, {num_prompts} prompts of about {prompt_tokens} tokens "
        f"each {every_s:g} s, {repeats} rounds."
    )
    show(title, markdown_table((*HEADINGS, *CHECKS), rows, num_left=1), markdown_file)
    pairs = [pair for name, figures in found.items() if name != ALONE for pair in figures.pairs(name, found[ALONE])]
    require_same(compare(pairs, in_float32(model)))


def show(title: str, table: list[str], markdown_file: Path | None) -> None:
    """Print a study's page, and write it to a file if there is one."""
    page = "\n".join([title, "", *table])
    console_of(PLAIN_WIDTH).print(page, highlight=False, markup=False)
    if markdown_file is not None:
        markdown_file.write_text(f"{page}\n")
