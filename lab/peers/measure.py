"""Run the peers side by side: every repeat asks all of them at every load, in an order that turns."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.lab.peers.process import Answer, PeerError, PeerProcess
from outrider.lab.same_tokens import num_identical

PREFIX = Path(__file__).parent / "prefix.txt"
NUM_PREFIX_TOKENS = 1500
MAX_CHARS_PER_TOKEN = 8  # on the average of a program's text


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Prompts that are asked `concurrency` at a time."""

    name: str
    concurrency: int
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    is_first_token: bool = False  # a prompt alone; warm-up and repeats have one each, which no prefix cache has seen

    @property
    def batches(self) -> list[tuple[tuple[int, ...], ...]]:
        return [self.prompts[i : i + self.concurrency] for i in range(0, len(self.prompts), self.concurrency)]

    def batches_of(self, repeat: int) -> list[tuple[tuple[int, ...], ...]]:
        """Return what a repeat asks; the first batch is the warm-up's."""
        return self.batches[repeat + 1 : repeat + 2] if self.is_first_token else self.batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One peer's answers to one load, once."""

    peer: str
    load: str
    repeat: int
    tokens_per_s: float
    token_ids: list[list[int]]


def prefixed_prompts(
    encode_text: Callable[[str], Sequence[int]], prompts: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """Put one document of `NUM_PREFIX_TOKENS` in front of every prompt."""
    prefix = tuple(encode_text(PREFIX.read_text()))[:NUM_PREFIX_TOKENS]
    return [prefix + prompt for prompt in prompts]


def long_prompts(
    encode_text: Callable[[str], Sequence[int]], lengths: Sequence[int], taken: Collection[int]
) -> list[tuple[int, ...]]:
    """Cut the standard library's sources into prompts of these lengths; raises `ValueError` where they are too short.

    No two begin with the same token, and none with one of `taken`: they have no prefix in common.
    """
    text = "".join(file.read_text("utf-8") for file in sorted(Path(os.__file__).parent.glob("*.py")))
    tokens = encode_text(text[: MAX_CHARS_PER_TOKEN * sum(lengths)])
    prompts: list[tuple[int, ...]] = []
    begins, end = set(taken), 0
    for length in lengths:
        begin = next((i for i in range(end, len(tokens) - length + 1) if tokens[i] not in begins), None)
        if begin is None:
            raise ValueError(f"the standard library's text is too short for {len(lengths)} prompts of their own")
        begins.add(tokens[begin])
        end = begin + length
        prompts.append(tuple(tokens[begin:end]))
    return prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What became of every peer at every load."""

    samples: tuple[Sample, ...]
    failures: dict[tuple[str, str], str]  # (peer, load): why there are no samples of it


def measure(
    peers: Sequence[PeerProcess], loads: Sequence[Load], *, repeats: int, on_run: Callable[[str], None]
) -> Measured:
    """Ask every peer for every load `repeats` times, after one batch each that is not counted.

    A peer that fails a load loses that load's figure; the others go on.
    """
    samples: list[Sample] = []
    failures: dict[tuple[str, str], str] = {}

    def ask(peer: PeerProcess, load: Load, batches: Sequence[Sequence[tuple[int, ...]]]) -> list[Answer]:
        if (peer.name, load.name) in failures:
            return []
        try:
            return [peer.run(batch, load.max_tokens) for batch in batches]
        except PeerError as error:
            failures[peer.name, load.name] = str(error)
            return []

    for peer in peers:
        for load in loads:
            on_run(f"{peer.name}, {load.name}, warm-up")
            ask(peer, load, load.batches[:1])
    for repeat in range(repeats):
        order = [*peers[repeat % len(peers) :], *peers[: repeat % len(peers)]]
        for load in loads:
            for peer in order if repeat % 2 == 0 else reversed(order):
                on_run(f"{peer.name}, {load.name}")
                if answers := ask(peer, load, load.batches_of(repeat)):
                    samples.append(_sample(peer.name, load, repeat, answers))
    kept = tuple(sample for sample in samples if (sample.peer, sample.load) not in failures)
    return Measured(samples=kept, failures=failures)


def _sample(peer: str, load: Load, repeat: int, answers: Sequence[Answer]) -> Sample:
    elapsed_s = sum(answer.elapsed_s for answer in answers)
    token_ids = [tokens for answer in answers for tokens in answer.token_ids]
    return Sample(
        peer=peer,
        load=load.name,
        repeat=repeat,
        tokens_per_s=len(token_ids) * load.max_tokens / elapsed_s,
        token_ids=token_ids,
    )


def median_speed(samples: Sequence[Sample], peer: str, load: str) -> float:
    """Return a peer's tokens per second, the median of its repeats."""
    return statistics.median(s.tokens_per_s for s in samples if (s.peer, s.load) == (peer, load))


def median_first_token_ms(samples: Sequence[Sample], peer: str, load: str) -> float:
    """Return a peer's milliseconds to the one token of a prompt alone, the median of its repeats."""
    return statistics.median(1e3 / s.tokens_per_s for s in samples if (s.peer, s.load) == (peer, load))


def paired_ratio(samples: Sequence[Sample], peer: str, other: str, load: str) -> float:
    """Return the median of one peer's speed over another's of the same repeat: a slow minute slows both."""
    by_repeat = {(s.peer, s.repeat): s.tokens_per_s for s in samples if s.load == load}
    repeats = {repeat for _, repeat in by_repeat}
    return statistics.median(by_repeat[peer, repeat] / by_repeat[other, repeat] for repeat in repeats)


def equal_prompts(samples: Sequence[Sample], peer: str, other: str, load: str) -> float:
    """Return the share of prompts of which both made the same tokens in the first repeat."""
    first = {s.peer: s.token_ids for s in samples if s.load == load and s.repeat == 0}
    return num_identical(first[peer], first[other]) / len(first[peer])
