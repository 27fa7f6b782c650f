"""Attention: a query alone, in a chunk with its neighbours, as a node of a tree, and among other sequences."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch

from benchmarks.invariance.company import Case
from benchmarks.invariance.products import CPU, DTYPES, drawn
from outrider.verifier_service.cpu.kernels import load_kernels
from outrider.verifier_service.messages.batch import ScheduledBatch, slots_of
from outrider.verifier_service.model.attention import AttentionOptions, KVPool, LayerShape
from outrider.verifier_service.model.cpu_attention import in_place_or_gathered

BLOCK_SIZE = 16
LENGTHS = (1, 7, 40, 150, 600, 102)  # tokens of the sequences; one is longer than a block of tiles' softmax
MOST_NODES = 6  # of a tree


@dataclass(frozen=True, slots=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"({self.num_heads}:{self.num_kv_heads} by {self.head_dim})"


SMOLLM, LLAMA, ODD = Heads(9, 3, 64), Heads(8, 2, 128), Heads(6, 2, 24)
VARIANTS = {
    "window": AttentionOptions(sliding_window=30),
    "long window": AttentionOptions(sliding_window=550),
    "soft cap": AttentionOptions(softcap=2.0),
    "sinks": AttentionOptions(sinks=torch.linspace(-1, 2, SMOLLM.num_heads)),
}


def attention_cases() -> Iterator[Case]:
    """Yield every shape, and of one every option."""
    for name, dtype in DTYPES.items():
        for heads in (SMOLLM, LLAMA, ODD):
            yield _case(f"attention {heads}", name, Sequences(heads, dtype, AttentionOptions()))
        for variant, options in VARIANTS.items():
            yield _case(f"attention {SMOLLM}, {variant}", name, Sequences(SMOLLM, dtype, options))
        for heads in (SMOLLM, ODD):
            sequences = Sequences(heads, dtype, AttentionOptions(), stored=torch.float8_e4m3fn)
            yield _case(f"attention {heads}, KV in FP8", name, sequences)
        for heads, window in ((SMOLLM, None), (ODD, 30)):
            options = AttentionOptions(sliding_window=window)
            what = f"attention {heads}, chains as trees" + (", window" if window else "")
            yield _case(what, name, Sequences(heads, dtype, options, are_trees=True))


def _case(what: str, name: str, sequences: Sequences) -> Case:
    is_promised = load_kernels(DTYPES[name]) is not None
    return Case(
        product=what, dtype=name, is_promised=is_promised, compute=sequences.attend, num_rows=len(sequences.places)
    )


class Sequences:
    """Sequences over scattered blocks whose keys and values are there; each token's query is a row."""

    def __init__(
        self,
        heads: Heads,
        dtype: torch.dtype,
        options: AttentionOptions,
        *,
        are_trees: bool = False,
        stored: torch.dtype | None = None,
    ) -> None:
        self._options, self._are_trees = options, are_trees
        widths = [-(-length // BLOCK_SIZE) for length in LENGTHS]
        blocks = random.Random(0).sample(range(sum(widths)), sum(widths))
        self._tables = [[blocks.pop() for _ in range(width)] for width in widths]
        self.places = [(index, place) for index, length in enumerate(LENGTHS) for place in range(length)]
        self._slots = [slot for i, n in enumerate(LENGTHS) for slot in slots_of(self._tables[i], range(n), BLOCK_SIZE)]
        shape = LayerShape(num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim, value_dim=heads.head_dim)
        self._pool = KVPool(
            {0: shape}, num_blocks=sum(widths), block_size=BLOCK_SIZE, dtype=dtype, device=CPU, stored=stored
        )
        sizes = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
        fused = drawn(len(self.places), sum(sizes), heads.head_dim, dtype=dtype)
        self._fused, self._sizes = fused, sizes
        _, keys, values = fused.split(sizes, dim=1)
        self._pool.write(0, torch.tensor(self._slots), keys, values)

    def attend(self, rows: list[int]) -> torch.Tensor:
        """Return [num_rows, num_heads, head_dim]; neighbours are a chunk of one sequence."""
        chunks = [self._places(chunk) for chunk in chunks_of(rows, self.places)]
        trees = [[-1, *range(min(MOST_NODES, len(chunk) - 1) - 1)] if len(chunk) > 1 else [] for _, chunk in chunks]
        batch = ScheduledBatch(
            token_ids=[0] * len(rows),
            positions=[place for _, chunk in chunks for place in chunk],
            slot_mapping=[self._slots[row] for row in rows],
            query_lengths=[len(chunk) for _, chunk in chunks],
            context_lengths=[chunk.stop for _, chunk in chunks],
            block_tables=[self._tables[index][: -(-chunk.stop // BLOCK_SIZE)] for index, chunk in chunks],
            logits_indices=[],
            tree_parents=trees if self._are_trees else [],
        )
        parts = self._fused[rows].split(self._sizes, dim=1)
        return in_place_or_gathered(batch, self._pool).attend(0, *parts, self._options)

    def _places(self, chunk: list[int]) -> tuple[int, range]:
        index, first = self.places[chunk[0]]
        return index, range(first, first + len(chunk))


def chunks_of(rows: list[int], places: list[tuple[int, int]]) -> list[list[int]]:
    """Cut rows where the next is not the next token of the same sequence."""
    keyed = groupby(enumerate(rows), key=lambda each: (each[1] - each[0], places[each[1]][0]))
    return [[row for _, row in own] for _, own in keyed]
