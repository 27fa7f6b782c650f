"""Whole models: a sequence's logits and KV, computed alone in one chunk and in every other way."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.invariance.company import NOT_MEASURED, Finding, bits, threads
from outrider.drafter_service.embedded import target_path
from outrider.verifier_service.messages.batch import ScheduledBatch, slots_of
from outrider.verifier_service.model.batch_invariance import batch_dependent
from outrider.verifier_service.model.config import ModelConfig, Quantization
from outrider.verifier_service.model.runner import ModelRunner
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup
from tiny.models import make_checkpoint

BLOCK_SIZE = 16
LENGTH = 150  # of the sequence that is looked at
OTHERS = (5, 40, 1, 300, 64, 33, 2, 17)  # tokens of its company
CHUNKS = (1, 5, 18, 33, 64)
PREFIX = 6 * BLOCK_SIZE
NUM_NODES = 7  # of a tree's right path

Part = tuple[int, int, int]  # a sequence, and its tokens [start, stop)
Way = Callable[["Play"], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A tiny model of an architecture, or the embedded one."""

    name: str
    family: str | None = "llama"  # None: the embedded target
    has_int8: bool = False  # int8 weights as well
    sizes: dict[str, Any] = field(default_factory=dict)


ODD = {"hidden_size": 72, "head_dim": 24, "num_attention_heads": 3, "num_key_value_heads": 1}
ODD |= {"intermediate_size": 100, "vocab_size": 250}
MEDIUM = {"hidden_size": 576, "head_dim": 64, "num_attention_heads": 9, "num_key_value_heads": 3}
MEDIUM |= {"intermediate_size": 1536, "vocab_size": 4096, "initializer_range": 0.05}
TINY = (
    Kind(name="llama of odd sizes", has_int8=True, sizes=ODD),
    Kind(name="gemma2 of odd sizes", family="gemma2", sizes=ODD),
    Kind(name="granite, residual by 0.22", family="granite", sizes={"residual_multiplier": 0.22, **ODD}),
    Kind(name="qwen3", family="qwen3"),
    Kind(name="olmo2", family="olmo2"),
    Kind(name="qwen2_moe", family="qwen2_moe"),
    Kind(name="llama, gelu", sizes={"hidden_act": "gelu", **ODD}),
    Kind(name="gpt_neox, the library's layers", family="gpt_neox"),
)
MORE = (
    Kind(name="llama"),
    Kind(name="llama of medium size", has_int8=True, sizes=MEDIUM),
    Kind(name="embedded target", family=None, has_int8=True),
    Kind(name="mixtral", family="mixtral"),
    Kind(name="qwen3_moe", family="qwen3_moe"),
    Kind(name="olmoe", family="olmoe"),
)
ROOM = {"max_position_embeddings": 512}


class Play:
    """One run of the sequences over blocks of its own; sequence 0 is the one that is looked at."""

    def __init__(self, runner: ModelRunner, seed: int) -> None:
        self.draw = random.Random(seed)
        same = random.Random(0)  # the sequence that is looked at is the same in every run
        self.tokens = [[same.randrange(3, runner.vocab_size) for _ in range(LENGTH)]]
        self.tokens += [[self.draw.randrange(3, runner.vocab_size) for _ in range(length)] for length in OTHERS]
        self.free = self.draw.sample(range(runner.num_blocks), runner.num_blocks)
        self.tables = [self.blocks(len(tokens)) for tokens in self.tokens]
        self.computed = [0] * len(self.tokens)
        self.logits: dict[int, torch.Tensor] = {}  # of sequence 0, by position
        self.slots = slots_of(self.tables[0], range(LENGTH), BLOCK_SIZE)  # of sequence 0's tokens
        self._runner = runner

    def blocks(self, num_tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-num_tokens // BLOCK_SIZE))]

    def step(self, parts: Sequence[Part]) -> None:
        """Compute these parts of the sequences together."""
        places = [(index, place) for index, start, stop in parts for place in range(start, stop)]
        slots = [slots_of(self.tables[index], range(start, stop), BLOCK_SIZE) for index, start, stop in parts]
        batch = ScheduledBatch(
            token_ids=[self.tokens[index][place] for index, place in places],
            positions=[place for _, place in places],
            slot_mapping=[slot for own in slots for slot in own],
            query_lengths=[stop - start for _, start, stop in parts],
            context_lengths=[stop for *_, stop in parts],
            block_tables=[self.tables[index][: -(-stop // BLOCK_SIZE)] for index, _, stop in parts],
            logits_indices=list(range(len(places))),
        )
        self._keep(places, self._runner.execute(batch))

    def verify_tree(self, start: int, others: Sequence[Part]) -> None:
        """Compute sequence 0's tokens [start, start + 1 + NUM_NODES), all but the first in a tree.

        Node 2 i is a wrong token, node 2 i + 1 beside it the right one.
        """
        stop, path = start + 1 + NUM_NODES, range(1, 2 * NUM_NODES, 2)
        parents = [-1 if node < 2 else (node // 2) * 2 - 1 for node in range(2 * NUM_NODES)]
        right = self.tokens[0][start + 1 : stop]
        self.tables[0] += self.blocks(NUM_NODES)
        slots = slots_of(self.tables[0], range(start, start + 1 + len(parents)), BLOCK_SIZE)
        places = [(index, place) for index, first, last in others for place in range(first, last)]
        tree = [(0, start), *((0 if node % 2 else -1, start + 1 + node // 2) for node in range(len(parents)))]
        wrong = [(token + 1) % 200 + 3 for token in right]
        drafted = [token for pair in zip(wrong, right, strict=True) for token in pair]
        context = start + 1 + len(parents)
        batch = ScheduledBatch(
            token_ids=[self.tokens[0][start], *drafted, *(self.tokens[index][place] for index, place in places)],
            positions=[place for _, place in (*tree, *places)],
            slot_mapping=[
                *slots,
                *(s for i, a, b in others for s in slots_of(self.tables[i], range(a, b), BLOCK_SIZE)),
            ],
            query_lengths=[len(tree), *(last - first for _, first, last in others)],
            context_lengths=[context, *(last for *_, last in others)],
            block_tables=[
                self.tables[0][: -(-context // BLOCK_SIZE)],
                *(self.tables[index][: -(-last // BLOCK_SIZE)] for index, _, last in others),
            ],
            logits_indices=list(range(len(tree) + len(places))),
            tree_parents=[parents, *([] for _ in others)],
        )
        self._keep([*tree, *places], self._runner.execute(batch))
        self.slots[start + 1 : stop] = [slots[1 + node] for node in path]

    def _keep(self, places: Sequence[tuple[int, int]], logits: torch.Tensor) -> None:
        self.logits |= {place: row.clone() for (index, place), row in zip(places, logits, strict=True) if index == 0}

    @property
    def kv(self) -> list[torch.Tensor]:
        """Keys and values of sequence 0 in every layer."""
        pool = self._runner.pool
        return [cache[self.slots] for cache in (*pool.keys.values(), *pool.values.values())]


# --- ways ---


def alone(play: Play) -> None:
    play.step([(0, 0, LENGTH)])


def token_by_token(play: Play) -> None:
    for place in range(LENGTH):
        play.step([(0, place, place + 1)])


def in_chunks(play: Play) -> None:
    start = 0
    while start < LENGTH:
        stop = min(LENGTH, start + play.draw.choice(CHUNKS))
        play.step([(0, start, stop)])
        start = stop


def in_company(play: Play) -> None:
    """All sequences in one step, in any order."""
    parts = [(index, 0, len(tokens)) for index, tokens in enumerate(play.tokens)]
    play.step(play.draw.sample(parts, len(parts)))


def in_mixed_steps(play: Play) -> None:
    """Steps of chunks and single tokens of whichever sequences are not done."""
    while any(done < len(tokens) for done, tokens in zip(play.computed, play.tokens, strict=True)):
        parts = []
        for index, tokens in enumerate(play.tokens):
            start = play.computed[index]
            stop = min(start + play.draw.choice(CHUNKS), len(tokens))
            if start < stop and play.draw.random() < 0.8:
                parts.append((index, start, stop))
                play.computed[index] = stop
        if parts:
            play.step(play.draw.sample(parts, len(parts)))


def behind_a_prefix(play: Play) -> None:
    """Another sequence, beside all the others, leaves the first blocks."""
    play.tokens[4][:PREFIX] = play.tokens[0][:PREFIX]
    play.step([(4, 0, 300), (1, 0, 5), (2, 0, 40)])
    shared = play.tables[4][: PREFIX // BLOCK_SIZE]
    play.tables[0][: len(shared)] = shared
    play.slots = slots_of(play.tables[0], range(LENGTH), BLOCK_SIZE)
    play.step([(5, 0, 64), (0, PREFIX, LENGTH)])


def as_a_draft(play: Play) -> None:
    """Decoding one token and verifying four drafted ones, beside others that do."""
    play.step([(0, 0, 20), (2, 0, 20), (4, 0, 20)])
    for start in range(20, LENGTH, 5):
        others = [(4, start, start + 1)] if start >= 40 else [(2, start, start + 5), (4, start, start + 1)]
        play.step([*others, (0, start, start + 5)])
        play.step([(4, start + 1, start + 5)])


def as_trees(play: Play) -> None:
    """The last tokens as the right path of a tree, with others beside it."""
    start = LENGTH - 1 - NUM_NODES
    play.step([(4, 0, 200), (0, 0, start)])
    play.verify_tree(start, [(4, 200, 203), (1, 0, 5)])


WAYS: dict[str, Way] = {
    "again": alone,
    "token by token": token_by_token,
    "in chunks": in_chunks,
    "in company": in_company,
    "in mixed steps": in_mixed_steps,
    "behind a prefix": behind_a_prefix,
    "as drafts": as_a_draft,
    "in a tree": as_trees,
}
WHOLE_WAYS = dict.fromkeys((1, 2, 3), tuple(WAYS))
BRIEF_WAYS = {1: tuple(WAYS), 2: ("in mixed steps",)}


# --- what is seen ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Bits of sequence 0."""

    logits: dict[int, torch.Tensor]  # by position; those of a prefix that another sequence left are not there
    kv: list[torch.Tensor]  # keys and values of every layer: [LENGTH, num_bytes]

    def num_different(self, other: Seen) -> int:
        """Return at how many positions logits or KV have other bits."""
        different = torch.stack([(one != own).any(dim=1) for one, own in zip(self.kv, other.kv, strict=True)]).any(
            dim=0
        )
        for place in self.logits.keys() & other.logits.keys():
            different[place] |= not torch.equal(self.logits[place], other.logits[place])
        return int(different.sum())


def seen_of(runner: ModelRunner, ways: Mapping[int, Sequence[str]]) -> str:
    """Name the ways whose logits or KV have other bits than alone in one chunk on one thread; empty: none.

    `ways`: of `WAYS`, by number of threads.
    """
    with threads(1):
        expected = played(runner, alone, seed=0)
    found: list[str] = []
    for number, names in ways.items():
        with threads(number):
            for seed, name in enumerate(names):
                if num_different := expected.num_different(played(runner, WAYS[name], seed=seed + 1)):
                    found.append(f"{name}, {number} threads: {num_different} of {LENGTH} tokens")
    return "; ".join(found)


def played(runner: ModelRunner, way: Way, seed: int) -> Seen:
    """Compute the sequences in one way."""
    play = Play(runner, seed)
    way(play)
    return Seen(
        logits={place: row.view(torch.int32) for place, row in play.logits.items()},
        kv=[bits(part) for part in play.kv],
    )


def model_findings(*, is_brief: bool) -> Iterator[Finding]:
    """Measure every model in every dtype."""
    for kind in TINY if is_brief else (*TINY, *MORE):
        with tempfile.TemporaryDirectory() as folder:
            if kind.family is not None:
                make_checkpoint(Path(folder), kind.family, **{**ROOM, **kind.sizes})
            path = folder if kind.family is not None else str(target_path())
            choices: list[tuple[str, Quantization | None]] = [("float32", None), ("bfloat16", None)]
            for dtype, quantization in [*choices, *[("bfloat16", "int8")][: kind.has_int8]]:
                runner = load(path, dtype, quantization)
                name = dtype if quantization is None else f"{dtype}, int8 weights"
                is_promised = not batch_dependent(runner.model)
                if is_brief and not is_promised:
                    seen = NOT_MEASURED
                else:
                    seen = seen_of(runner, BRIEF_WAYS if is_brief else WHOLE_WAYS)
                yield Finding(product=f"model: {kind.name}", dtype=name, is_promised=is_promised, seen=seen)


def load(path: str, dtype: str = "float32", quantization: Quantization | None = None) -> ModelRunner:
    num_blocks = 2 * sum(-(-length // BLOCK_SIZE) for length in (LENGTH, *OTHERS))
    config = ModelConfig(
        path=path,
        dtype=dtype,
        quantization=quantization,
        block_size=BLOCK_SIZE,
        num_kv_blocks=num_blocks,
        device="cpu",
        check_logits=False,
    )
    return ModelRunner(config, TensorParallelGroup.single())
