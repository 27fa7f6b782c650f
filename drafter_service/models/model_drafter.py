"""Draft with a causal language model over its own paged KV cache: chains and trees for many sessions at once.

tokens   |<- committed ->|<- stem of the draft ->|
KV       |<- num_cached ->|<- of nodes beyond the stem: for one forward ->|

A draft that has not forked is a stem: its tokens are computed once, and keep their KV if they are accepted. Nodes
beyond a fork are computed under a tree mask, again in each level's forward, and their KV ends with it.

Chains go on from level to level on the device, as placeholders, and are read at their end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from outrider.drafter_service.engine.chain_levels import ChainBatches, ChainLevels, tokens_of
from outrider.drafter_service.engine.drafter import Ask, ChainAnswers, ChainsLaunched
from outrider.drafter_service.engine.kv_budget import num_common
from outrider.drafter_service.engine.paged_drafter import Follow
from outrider.drafter_service.engine.paged_state import ForkableState, Step
from outrider.drafter_service.engine.placeholders import Placeholder, pack_placeholders
from outrider.drafter_service.engine.tree_growth import (
    DraftRules,
    Growing,
    Growth,
    Levels,
    nodes_to_compute,
    start_growth,
    stem_length,
)
from outrider.verifier_service.engine.runners import Runner
from outrider.verifier_service.messages.batch import ScheduledBatch, slots_of
from outrider.verifier_service.messages.columns import Int64s
from outrider.verifier_service.messages.counts import GraphCounts
from outrider.verifier_service.messages.draft import DraftNeeds


@dataclass(slots=True)
class ModelState(ForkableState):
    """A session's tokens, the first of which are computed."""

    num_cached: int = 0  # tokens whose KV is in the blocks
    tokens: list[int] = field(default_factory=list)  # committed, then the draft's stem
    num_committed: int = 0
    source: Sequence[int] = ()  # the session's own list, of which the committed tokens are the first
    nodes: list[int] = field(default_factory=list)  # of the draft, beyond its stem, to be computed together

    @property
    def num_slots(self) -> int:
        return self.num_cached

    def num_slots_after(self, share: int) -> int:
        return self.num_cached + share

    @property
    def num_tokens_pending(self) -> int:
        return len(self.tokens) - self.num_cached

    @property
    def num_pending(self) -> int:
        return self.num_tokens_pending + len(self.nodes)

    @property
    def num_together(self) -> int:
        return len(self.nodes)

    def begin(self, ask: Ask, growth: Growth) -> None:
        """Take an ask up."""
        self.take_tokens(ask.token_ids)
        self.ask, self.growth, self.nodes = ask, growth, []
        self.follow_growth()

    def take_tokens(self, token_ids: Sequence[int]) -> None:
        """Roll back to what the session's tokens have in common with these, and go on with them.

        A session's own list only grows, so what was committed is not compared again.
        """
        num_known = self.num_committed if token_ids is self.source else 0
        new = token_ids[num_known:]
        num_same = num_known + num_common(self.tokens[num_known:], new)
        self.tokens[num_same:] = new[num_same - num_known :]
        self.source, self.num_committed = token_ids, len(self.tokens)
        # the last token is computed (again): its logits are wanted
        self.num_cached = min(self.num_cached, num_same, len(self.tokens) - 1)

    def follow_growth(self) -> None:
        """Append the draft's stem to the tokens, and note the nodes that are to be computed beside it."""
        tree = self.draft.tree
        if self.draft.is_chain:
            self.tokens.extend(tree.token_ids[len(self.tokens) - self.num_committed :])
            return
        stem = stem_length(tree)
        self.tokens.extend(tree.token_ids[len(self.tokens) - self.num_committed : stem])
        self.nodes = nodes_to_compute(tree, self.draft.frontier, stem)

    def lose_kv(self) -> None:
        self.num_cached = 0

    def settle(self) -> None:
        self.ask, self.growth, self.nodes = None, None, []

    def fork(self, ask: Ask, num_accepted: int, growth: Growth) -> ModelState:
        return ModelState(
            ask=ask,
            growth=growth,
            num_cached=min(self.num_cached, self.num_committed + num_accepted),
            tokens=list(ask.token_ids),
            num_committed=len(ask.token_ids),
        )

    def cut(self) -> None:
        num_tokens = self.num_committed + len(self.draft.tree)
        if num_tokens < len(self.tokens):
            del self.tokens[num_tokens:]
            self.num_cached = min(self.num_cached, num_tokens - 1)

    def check_integrity(self) -> None:
        assert self.num_cached <= len(self.tokens), "KV of no tokens"
        assert self.growth is not None or not self.nodes, "nodes without a tree"


class ModelForward:
    """A `Forward` over a model runner."""

    def __init__(
        self, runner: Runner, rules: DraftRules, *, first_position: Callable[[Ask], int] | None = None
    ) -> None:
        """`first_position` says where in the target's sequence an ask's draft begins: seeded noise depends on it.

        None: after the ask's tokens, which are the target's.
        """
        self.num_forwards = 0
        self.graph_counts: GraphCounts | None = None
        self.needs = DraftNeeds()
        self.vocab_size, self.max_model_len = runner.vocab_size, runner.max_model_len
        self.num_blocks, self.block_size = runner.num_blocks, runner.block_size
        self._runner = runner
        self._rules = rules
        self._first_position = first_position or (lambda ask: len(ask.token_ids))

    def can_draft(self, ask: Ask) -> bool:
        return True

    def new_state(self) -> ModelState:
        return ModelState()

    def begin(self, state: ModelState, ask: Ask, *, max_num_tokens: int, growth: Growth | None) -> None:
        if growth is None:  # nodes beside each other are computed in one step
            growth = start_growth(ask, self._rules.trees, vocab_size=self._rules.vocab_size, max_nodes=max_num_tokens)
        state.begin(ask, growth)

    def run(self, step: Step[ModelState], follow: Follow[ModelState]) -> None:
        whole = [state for state, share in step.parts if share == state.num_pending]
        batch = _pack(step, self.block_size)
        for state, share in step.parts:
            state.num_cached += min(share, state.num_tokens_pending)
        self.num_forwards += 1
        logits = self._runner.execute(batch)  # [num_frontier_nodes, vocab_size]
        levels = Levels(self._rules)
        growing = [Growing(state.asked, state.draft, self._first_position(state.asked)) for state in whole]
        levels.launch(growing, logits)
        num_following = follow(whole)
        levels.follow(growing, num_following, partial(self._run_open, whole))
        levels.read()
        for state, num_followed in zip(whole, num_following, strict=True):
            state.follow_growth()
            state.num_cached += num_followed

    def take_tokens(self, states: Sequence[ModelState], asks: Sequence[Ask]) -> tuple[int, Int64s]:
        for state, ask in zip(states, asks, strict=True):
            state.take_tokens(ask.token_ids)
        num_pending = sum(len(state.tokens) - state.num_cached for state in states)
        slots = [len(state.tokens) + ask.length - 1 for state, ask in zip(states, asks, strict=True)]
        return num_pending, np.array(slots, np.int64)

    def run_chains(self, states: Sequence[ModelState], asks: Sequence[Ask], lengths: Int64s) -> ChainsLaunched:
        begins = np.array([state.num_cached for state in states], np.int64)
        ends = np.array([len(state.tokens) for state in states], np.int64)
        tables, num_levels = [state.block_table for state in states], int(lengths.max())
        batches = ChainBatches(tables, begins, ends, num_levels, self.block_size)
        token_ids = [token_id for state in states for token_id in state.tokens[state.num_cached :]]
        positions = np.array([self._first_position(ask) for ask in asks], np.int64)
        levels = ChainLevels([ask.sampling for ask in asks], positions, lengths, self._rules)
        launched = levels.grow(batches, token_ids, lambda batch, numbers, _: self._runner.execute(batch, numbers))
        self.num_forwards += num_levels
        for state, end in zip(states, (ends + lengths - 1).tolist(), strict=True):
            state.num_cached = end

        def read() -> list[ChainAnswers]:
            answers = launched.read()
            for answer in answers:
                for row, drafted in zip(answer.rows, tokens_of(answer.chains), strict=True):
                    states[row].tokens += drafted
            return answers

        return replace(launched, read=read)

    def _run_open(
        self, states: Sequence[ModelState], opened: dict[int, int], numbers: torch.Tensor, num_open: int
    ) -> torch.Tensor:
        """Run one forward of the states' placeholders; see `PlaceholderForward`."""
        tokens: list[Placeholder] = []
        for index, token_id in opened.items():
            place = states[index].num_cached + num_open
            tokens.append(Placeholder(token_id, place, states[index].block_table, place))
        self.num_forwards += 1
        return self._runner.execute(pack_placeholders(tokens, self.block_size), numbers)


def _pack(step: Step[ModelState], block_size: int) -> ScheduledBatch:
    """Lay the shares side by side; logits are wanted of the frontiers of those that catch up."""
    token_ids: list[int] = []
    positions: list[int] = []
    slot_mapping: list[int] = []
    logits_indices: list[int] = []
    tree_parents: list[list[int]] = []
    for state, share in step.parts:
        tree, begin, is_whole = state.draft.tree, state.num_cached, share == state.num_pending
        stop = begin + min(share, state.num_tokens_pending)
        nodes = state.nodes if is_whole else []
        token_ids += state.tokens[begin:stop]
        positions += range(begin, stop)
        first_node = len(token_ids)
        place = {node: index for index, node in enumerate(nodes)}  # -1: the token before them
        token_ids += [tree.token_ids[node] for node in nodes]
        positions += [state.num_committed + tree.depths[node] for node in nodes]
        tree_parents.append([place.get(tree.parents[node], -1) for node in nodes])
        slot_mapping += slots_of(state.block_table, range(begin, begin + share), block_size)
        if is_whole:
            logits_indices += [first_node + place.get(node, -1) for node in state.draft.frontier]
    return ScheduledBatch(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slot_mapping,
        query_lengths=list(step.shares),
        context_lengths=[state.num_cached + share for state, share in step.parts],
        block_tables=[list(state.block_table) for state in step.states],
        logits_indices=logits_indices,
        tree_parents=tree_parents if any(tree_parents) else [],
        copy_sources=step.copy_sources,
        copy_targets=step.copy_targets,
    )
