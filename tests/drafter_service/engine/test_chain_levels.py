"""Chains as arrays: step by step what drafters grow chain by chain, over random rounds."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from fakes.drafter_play import DRAWN, GREEDY, SEEDED, ask_of, key
from fakes.runner import NoisyRunner
from outrider.drafter_service.engine.chain_levels import ChainBatches
from outrider.drafter_service.engine.drafter import Ask, DraftsChains
from outrider.drafter_service.engine.paged_drafter import PagedDrafter
from outrider.drafter_service.head_drafters.head_runner import HeadRunner
from outrider.drafter_service.heads.dflash import DFlashHead
from outrider.drafter_service.heads.head_layer import DraftHead
from outrider.drafter_service.heads.switched import SwitchedHeads
from outrider.drafter_service.models.dflash_drafter import DFlashModel
from outrider.verifier_service.messages.batch import slots_of
from outrider.verifier_service.messages.draft import Draft, Drafts
from tiny.dflash import KINDS, dflash_head
from tiny.drafters import eagle_drafter, model_drafter, one_pass_drafter, parallel_drafter
from tiny.heads import eagle3_head, states_of

VOCAB_SIZE, MAX_TOKENS, MAX_LENGTH = 13, 40, 5
NUCLEUS = type(DRAWN)(temperature=0.7, top_p=0.8, top_k=5)
SAMPLINGS = (GREEDY, DRAWN, SEEDED, NUCLEUS)


@dataclass
class Side:
    """A drafter, drafting as arrays where it can, or never."""

    drafter: PagedDrafter[Any]
    runner: NoisyRunner | None  # whose batches are compared
    rng: torch.Generator
    as_arrays: bool
    num_at_once: int = 0

    @classmethod
    def of(cls, *, as_arrays: bool, **sizes: int) -> Side:
        runner, rng = NoisyRunner(vocab_size=VOCAB_SIZE, **sizes), torch.Generator().manual_seed(0)
        return cls(model_drafter(runner, rng, vocab_size=VOCAB_SIZE - 1, top_n=4), runner, rng, as_arrays)

    @classmethod
    def of_masks(cls, *, as_arrays: bool, **sizes: int) -> Side:
        runner, rng = NoisyRunner(vocab_size=VOCAB_SIZE, **sizes), torch.Generator().manual_seed(0)
        rules = {"mask_token_id": VOCAB_SIZE - 1, "vocab_size": VOCAB_SIZE - 1, "top_n": 4}
        return cls(parallel_drafter(runner, rng, **rules), runner, rng, as_arrays)

    @classmethod
    def of_block(cls, head: DFlashHead, *, as_arrays: bool) -> Side:
        model = DFlashModel(head, num_blocks=200, block_size=4, max_model_len=64)
        rng = torch.Generator().manual_seed(0)
        return cls(one_pass_drafter(model, rng, top_n=4), None, rng, as_arrays)

    @classmethod
    def of_head(cls, head: DraftHead, *, as_arrays: bool, num_blocks: int) -> Side:
        runner = HeadRunner(SwitchedHeads([head]), num_blocks=num_blocks, block_size=4, max_model_len=64)
        rng = torch.Generator().manual_seed(0)
        return cls(eagle_drafter(runner, rng, top_n=4), None, rng, as_arrays)

    def step(self, asks: list[Ask], budget: int) -> list[Draft]:
        """Answer some of the asks, as an engine does; the drafts in the asks' order."""
        launched = self.drafter.draft_chains(asks, max_num_tokens=budget) if self.as_arrays else None
        if launched is None:
            return self.drafter.draft(asks, max_num_tokens=budget)
        self.num_at_once += 1
        found: dict[int, Draft] = {}
        for rows, chains in launched.read():
            frame = Drafts(
                request_ids=tuple(asks[row].key.request_id for row in rows),
                round_ids=np.array([asks[row].ask_id for row in rows]),
                positions=np.array([len(asks[row].token_ids) for row in rows]),
                **chains.columns_of(range(len(rows))),
            )
            found |= zip(rows, frame.drafts(), strict=True)
        return [found[row] for row in range(len(asks))]

    def take_batches(self) -> list[tuple[list[int], ...]]:
        if self.runner is None:
            return []
        batches, self.runner.batches = self.runner.batches, []
        return [
            (each.token_ids, each.positions, each.query_lengths, each.context_lengths, each.logits_indices)
            for each in batches
        ]


class Rounds:
    """Sessions that come, go on with some of what was drafted, stay away for a while, and end."""

    def __init__(self, seed: int, *, odd: bool, head: DraftHead | None = None) -> None:
        self._rng, self._odd, self._head = random.Random(seed), odd, head
        self._num_missing: dict[str, int] = {}  # of the target's states: the first tokens have none
        self._tokens: dict[str, list[int]] = {}
        self._samplings: dict[str, Any] = {}
        self._drafted: dict[str, tuple[int, ...]] = {}
        self._num_asks = 0

    def asks(self) -> list[Ask]:
        """Ask for some sessions, new ones among them; those asked have committed tokens since."""
        rng = self._rng
        while len(self._tokens) < 8 and rng.random() < 0.6:
            name = str(rng.randrange(1000))
            self._tokens[name] = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(2, 9))]
            self._num_missing[name] = rng.randint(0, len(self._tokens[name]) - 2) if rng.random() < 0.2 else 0
            self._samplings[name] = rng.choice(SAMPLINGS)
        names = [name for name in self._tokens if rng.random() < 0.9]
        for name in names:
            drafted = self._drafted.pop(name, ())
            self._tokens[name] += drafted[: rng.randint(0, len(drafted))]
            if rng.random() < 0.8:
                self._tokens[name].append(rng.randrange(VOCAB_SIZE))
        return [self._ask(name) for name in names if len(self._tokens[name]) < MAX_TOKENS]

    def _ask(self, name: str) -> Ask:
        self._num_asks += 1
        fields: dict[str, Any] = {"length": self._rng.randint(1, MAX_LENGTH)}
        if self._odd and self._rng.random() < 0.04:
            fields |= self._rng.choice([{"max_nodes": 6}, {"forced_ids": (3, 4)}])
        if self._head is not None:
            fields["states"] = states_of(self._tokens[name], self._head, self._num_missing[name])
        return ask_of(
            self._tokens[name], key=key(name), ask_id=self._num_asks, sampling=self._samplings[name], **fields
        )

    def hear(self, draft: Draft) -> None:
        if draft.parents is None:
            self._drafted[draft.request_id] = draft.token_ids

    def ended(self) -> list[str]:
        """Return the sessions that end now."""
        ended = [
            name for name, tokens in self._tokens.items() if len(tokens) >= MAX_TOKENS or self._rng.random() < 0.05
        ]
        for name in ended:
            del self._tokens[name]
            self._drafted.pop(name, None)
        return ended


@pytest.mark.parametrize(
    ("odd", "budget", "num_blocks"), [(False, 256, 200), (True, 256, 200), (True, 24, 200), (False, 256, 40)]
)
@pytest.mark.parametrize("seed", range(3))
def test_chains_as_arrays_are_those_that_grow_one_by_one(seed: int, odd: bool, budget: int, num_blocks: int) -> None:
    arrays, singly = (Side.of(as_arrays=as_arrays, num_blocks=num_blocks) for as_arrays in (True, False))
    require_equal(arrays, singly, Rounds(seed, odd=odd), budget)


@pytest.mark.parametrize(("odd", "num_blocks"), [(False, 200), (True, 40)])
def test_so_are_those_of_a_head(odd: bool, num_blocks: int) -> None:
    head = eagle3_head()
    arrays, singly = (Side.of_head(head, as_arrays=as_arrays, num_blocks=num_blocks) for as_arrays in (True, False))
    require_equal(arrays, singly, Rounds(1, odd=odd, head=head), 256)


@pytest.mark.parametrize(
    ("odd", "budget", "num_blocks"), [(False, 256, 200), (True, 256, 200), (True, 24, 200), (False, 256, 40)]
)
def test_so_are_those_of_masks(odd: bool, budget: int, num_blocks: int) -> None:
    arrays, singly = (Side.of_masks(as_arrays=as_arrays, num_blocks=num_blocks) for as_arrays in (True, False))
    require_equal(arrays, singly, Rounds(1, odd=odd), budget)


@pytest.mark.parametrize("kind", ["laws", *KINDS])
def test_so_are_those_of_a_block(kind: str) -> None:
    head = dflash_head() if kind == "laws" else dflash_head(edges=KINDS[kind], sample_from_anchor=kind == "dspark")
    arrays, singly = (Side.of_block(head, as_arrays=as_arrays) for as_arrays in (True, False))
    require_equal(arrays, singly, Rounds(2, odd=False, head=head), 256)


def require_equal(arrays: Side, singly: Side, rounds: Rounds, budget: int) -> None:
    names: set[str] = set()
    num_steps = 0
    for _ in range(24):
        waiting = {ask.ask_id: ask for ask in rounds.asks()}
        names |= {ask.key.request_id for ask in waiting.values()}
        while waiting:
            num_steps += 1
            answers, expected = (side.step(list(waiting.values()), budget) for side in (arrays, singly))
            assert answers == expected
            assert arrays.take_batches() == singly.take_batches()
            for draft in answers:
                rounds.hear(draft)
                del waiting[draft.round_id]
            for side in (arrays, singly):
                side.drafter.check_integrity([key(name) for name in names])
        for name in rounds.ended():
            names.discard(name)
            arrays.drafter.release(key(name))
            singly.drafter.release(key(name))
    assert torch.equal(arrays.rng.get_state(), singly.rng.get_state())
    assert arrays.drafter.num_forwards == singly.drafter.num_forwards
    assert 2 < arrays.num_at_once <= num_steps
    assert singly.num_at_once == 0


def test_what_arrays_are_not_for_is_left_to_the_other_path() -> None:
    side = Side.of(as_arrays=True, num_blocks=4)
    assert isinstance(side.drafter, DraftsChains)
    others = [ask_of([1], key=key(str(index)), length=1) for index in range(3)]
    for unfit in (ask_of([1, 2], max_nodes=3), ask_of([1, 2], forced_ids=(5,)), ask_of([1] * 9, length=9)):
        assert side.drafter.draft_chains([*others, unfit], max_num_tokens=64) is None
    fit = ask_of([1, 2, 3], length=2)
    assert side.drafter.draft_chains([*others, fit], max_num_tokens=5) is None
    assert side.drafter.draft([fit], max_num_tokens=2) == [], "half of its tokens are computed"
    assert side.drafter.draft_chains([*others, fit], max_num_tokens=6) is None
    assert len(side.drafter.draft([fit], max_num_tokens=3)) == 1
    assert side.drafter.draft_chains([*others, replace(fit, ask_id=2)], max_num_tokens=6) is not None


def test_batches_read_and_write_the_blocks_of_their_own_rows() -> None:
    tables = [[7, 3, 9], [5, 1, 2, 8]]
    batches = ChainBatches(tables, np.array([3, 13]), np.array([5, 14]), 6, 4)
    first = batches.first([10, 11, 12])
    assert first.slot_mapping == [*slots_of(tables[0], range(3, 5), 4), *slots_of(tables[1], range(13, 14), 4)]
    assert (first.positions, first.logits_indices) == ([3, 4, 13], [1, 2])
    assert first.block_tables == [[7, 3], [5, 1, 2, 8]]
    later = batches.next(np.array([0]), [-1], 4)
    assert (later.slot_mapping, later.positions) == ([*slots_of(tables[0], range(8, 9), 4)], [8])
    assert (later.context_lengths, later.block_tables) == ([9], [[7, 3, 9]])
