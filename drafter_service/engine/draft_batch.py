"""What one step of a draft model computes: drafts in the making, and the packed batch of their next level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.drafter_service.engine.engine import Ask
from outrider.drafter_service.engine.kv_budget import num_common
from outrider.drafter_service.engine.tree_growth import Growth, nodes_to_compute, stem_length
from outrider.verifier_service.messages.batch import ScheduledBatch, slot_of, slots_of


@dataclass(slots=True)
class DraftState:
    """One session's KV and the draft in the making."""

    block_table: list[int] = field(default_factory=list)
    num_cached: int = 0  # of the tokens, whose KV is in the blocks
    ask: Ask | None = None  # unanswered
    tokens: list[int] = field(default_factory=list)  # committed, then the draft's stem
    num_committed: int = 0
    source: Sequence[int] = ()  # the session's own list, of which the committed ones are the first
    growth: Growth | None = None  # of the ask
    nodes: list[int] = field(default_factory=list)  # of the draft, beyond its stem, to be computed together

    @property
    def num_slots(self) -> int:
        """Count the KV slots in use."""
        return self.num_cached

    def num_slots_after(self, share: int) -> int:
        """Count them once so much of what is pending is computed."""
        return self.num_slots + share

    @property
    def num_tokens_pending(self) -> int:
        return len(self.tokens) - self.num_cached

    @property
    def num_pending(self) -> int:
        return self.num_tokens_pending + len(self.nodes)

    @property
    def draft(self) -> Growth:
        assert self.growth is not None, "no draft in the making"
        return self.growth

    def take(self, ask: Ask) -> int:
        """Go on from another ask's tokens; return how many they have in common with those that were here.

        A session's own list only grows, so what was committed need not be compared again.
        """
        num_known = self.num_committed if ask.token_ids is self.source else 0
        num_same = num_known + num_common(self.tokens[num_known:], ask.token_ids[num_known:])
        self.tokens[num_same:] = ask.token_ids[num_same:]
        self.ask, self.source, self.num_committed = ask, ask.token_ids, len(self.tokens)
        return num_same

    def rest(self) -> None:
        """Keep the KV alone: nothing is in the making."""
        self.ask, self.growth, self.nodes = None, None, []

    def fork(self, ask: Ask, num_accepted: int, growth: Growth) -> DraftState:
        """Start the draft of an ask that goes on from `num_accepted` tokens of this one, whose KV it shares."""
        return DraftState(
            num_cached=min(self.num_cached, self.num_committed + num_accepted),
            ask=ask,
            tokens=list(ask.token_ids),
            num_committed=len(ask.token_ids),
            growth=growth,
        )

    def follow_growth(self) -> None:
        """Take the draft's stem into the tokens, and note the nodes that are to be computed beside it."""
        tree = self.draft.tree
        if self.draft.is_chain:
            self.tokens.extend(tree.token_ids[len(self.tokens) - self.num_committed :])
            return
        stem = stem_length(tree)
        self.tokens.extend(tree.token_ids[len(self.tokens) - self.num_committed : stem])
        self.nodes = nodes_to_compute(tree, self.draft.frontier, stem)


@dataclass(slots=True)
class Chunk:
    """What a step computes for an ask."""

    ask: Ask
    state: DraftState
    growth: Growth
    num_tokens: int
    nodes: list[int]
    is_whole: bool  # all that is pending: the draft can grow

    @property
    def size(self) -> int:
        return self.num_tokens + len(self.nodes)


def chunk_of(state: DraftState, share: int) -> Chunk:
    assert state.ask is not None
    is_whole = share == state.num_pending
    return Chunk(
        ask=state.ask,
        state=state,
        growth=state.draft,
        num_tokens=min(share, state.num_tokens_pending),
        nodes=state.nodes if is_whole else [],
        is_whole=is_whole,
    )


def pack(chunks: Sequence[Chunk], block_size: int) -> ScheduledBatch:
    """Lay the chunks side by side; logits are wanted of the frontiers of those that catch up."""
    token_ids: list[int] = []
    positions: list[int] = []
    slot_mapping: list[int] = []
    logits_indices: list[int] = []
    tree_parents: list[list[int]] = []
    for chunk in chunks:
        state, tree = chunk.state, chunk.growth.tree
        begin = state.num_cached
        token_ids += state.tokens[begin : begin + chunk.num_tokens]
        positions += range(begin, begin + chunk.num_tokens)
        first_node = len(token_ids)
        place = {node: index for index, node in enumerate(chunk.nodes)}  # -1: the token before them
        token_ids += [tree.token_ids[node] for node in chunk.nodes]
        positions += [state.num_committed + tree.depths[node] for node in chunk.nodes]
        tree_parents.append([place.get(tree.parents[node], -1) for node in chunk.nodes])
        slots = range(begin, begin + chunk.size)
        slot_mapping += slots_of(state.block_table, slots, block_size)
        if chunk.is_whole:
            logits_indices += [first_node + place.get(node, -1) for node in chunk.growth.frontier]
    return ScheduledBatch(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slot_mapping,
        query_lengths=[chunk.size for chunk in chunks],
        context_lengths=[chunk.state.num_cached + chunk.size for chunk in chunks],
        block_tables=[list(chunk.state.block_table) for chunk in chunks],
        logits_indices=logits_indices,
        tree_parents=tree_parents if any(tree_parents) else [],
    )


class OpenToken(NamedTuple):
    """The next token of a chain, which was chosen and not read."""

    token_id: int  # what stands for it
    position: int
    block_table: list[int]
    place: int  # of its KV in the table


def pack_open(tokens: Sequence[OpenToken], block_size: int) -> ScheduledBatch:
    """Lay out one token of each chain, whose logits are wanted."""
    return ScheduledBatch(
        token_ids=[token.token_id for token in tokens],
        positions=[token.position for token in tokens],
        slot_mapping=[slot_of(token.block_table, token.place, block_size) for token in tokens],
        query_lengths=[1] * len(tokens),
        context_lengths=[token.place + 1 for token in tokens],
        block_tables=[token.block_table[: token.place // block_size + 1] for token in tokens],
        logits_indices=list(range(len(tokens))),
    )
