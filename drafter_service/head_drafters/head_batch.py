"""What one step of a head computes: drafts in the making, and the packed batch of their next pairs.

tokens   x0  x1 ... x[n-1]  |<- drafted ->|
states   h0  h1 ... h[n-2]  of the target
pairs    (h0,x1) ... (h[n-2],x[n-1])  (own,drafted) ...      all computed but those of the draft's last tokens
         |<- num_true ->|              from the target's states …
         |<- num_cached ------------->|  … or from the head's own, while the target's are not there
                                      |<- num_stem ->|<- of nodes beyond a fork: for one forward ->|

A pair that was computed from an own state is computed again, where it lies, once the target's state is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from outrider.drafter_service.engine.engine import Ask
from outrider.drafter_service.engine.tree_growth import Growth, nodes_to_compute, stem_length
from outrider.verifier_service.messages.batch import ScheduledBatch, slots_of
from outrider.verifier_service.messages.draft import ROOT
from outrider.verifier_service.messages.tree import is_chain


@dataclass(slots=True)
class HeadState:
    """One session's KV and the draft in the making."""

    block_table: list[int] = field(default_factory=list)
    first: int = 0  # pairs before this one are not there: the target no longer had their states
    num_true: int = 0  # pairs [first, num_true) began from the target's states
    num_cached: int = 0  # pairs [first, num_cached) of committed tokens have their KV in the blocks, then …
    num_stem: int = 0  # … those of so many drafted tokens
    tokens: list[int] = field(default_factory=list)  # committed
    num_states: int = 0  # the target's
    ask: Ask | None = None
    growth: Growth | None = None  # of the draft that is asked for
    feedback: dict[int, torch.Tensor] = field(default_factory=dict)  # [hidden_size] that follows ROOT and each node

    @property
    def draft(self) -> Growth:
        assert self.growth is not None, "nothing was asked for"
        return self.growth

    @property
    def num_slots(self) -> int:
        """Count the KV slots in use."""
        return self.num_cached - self.first + self.num_stem

    def num_slots_after(self, share: int) -> int:
        """Count them once so much of what is pending is computed."""
        if self.has_states_to_take:  # some may take the place of what was computed from own states
            return max(self.num_slots, self.num_true - self.first + share)
        return self.num_slots + share

    @property
    def has_states_to_take(self) -> bool:
        return self.num_true < self.num_states

    @property
    def is_catching_up(self) -> bool:
        return self.has_states_to_take or self.num_cached < len(self.tokens) - 1

    @property
    def next_pair(self) -> int:
        """Return the first of the committed tokens' pairs that is to be computed."""
        return self.num_true if self.has_states_to_take else self.num_cached

    @property
    def num_pending(self) -> int:
        if self.is_catching_up:
            return max(1, self.num_states - self.num_true)  # own states come one by one
        return len(self.next_nodes())

    def next_nodes(self) -> list[int]:
        """Return the drafted tokens whose pairs come next, parents first; none while committed ones are missing.

        The stem goes one by one, since each pair starts from what the one before gives; what forks goes level by level,
        each time with all that lies between it and the stem.
        """
        if self.is_catching_up:
            return []
        tree, frontier = self.draft.tree, self.draft.frontier
        if self.num_stem < min(stem_length(tree), max(frontier) + 1):
            return [self.num_stem]
        return nodes_to_compute(tree, frontier, self.num_stem)

    def rest(self) -> None:
        """Have nothing in the making, and keep what can be forked."""
        self.ask, self.growth = None, None

    def fork(self, ask: Ask, num_accepted: int, growth: Growth) -> HeadState:
        """Start the draft of an ask that goes on from `num_accepted` tokens of this one, whose KV it shares.

        What the target's states of those tokens are is not known yet: the head's own stand for them.
        """
        return HeadState(
            first=self.first,
            num_true=self.num_true,
            num_cached=self.num_cached + num_accepted,
            tokens=list(ask.token_ids),
            num_states=self.num_states,
            ask=ask,
            growth=growth,
            feedback={ROOT: self.feedback[num_accepted - 1 if num_accepted else ROOT]},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadChunk:
    """What of a session goes into this step's forward: pairs of committed tokens, or of drafted ones."""

    state: HeadState
    num_tokens: int
    nodes: list[int]  # the drafted ones; none while it is catching up
    set_index: int  # the parameters they are computed with

    @property
    def outlets(self) -> list[int]:
        """Return the nodes whose outputs are read, ROOT standing for the last committed pair."""
        state = self.state
        if not self.nodes:
            is_last = state.next_pair + self.num_tokens >= max(state.num_states, state.num_cached)
            return [ROOT] if is_last else []
        frontier = set(state.draft.frontier)
        return [node for node in self.nodes if node in frontier or len(self.nodes) == 1]

    @property
    def starts_from_target(self) -> bool:
        return not self.nodes and self.state.has_states_to_take

    @property
    def target_states(self) -> torch.Tensor:
        """The target's states that its pairs start from: [num_tokens, state_size]."""
        ask, begin = self.state.ask, self.state.next_pair
        assert ask is not None
        assert ask.states is not None
        return ask.states[begin : begin + self.num_tokens]

    @property
    def own_states(self) -> torch.Tensor:
        """What the pairs of drafted tokens, or of a committed one beyond the target's states, start from."""
        state = self.state
        parents = [state.draft.tree.parents[node] for node in self.nodes] or [ROOT]
        return torch.stack([state.feedback[parent] for parent in parents])

    def keep(self) -> None:
        """Keep the KV of committed pairs and of the stem; that of nodes beyond a fork has served."""
        state = self.state
        if self.starts_from_target:
            state.num_true += self.num_tokens
            state.num_cached = max(state.num_cached, state.num_true)
        elif not self.nodes:
            state.num_cached += self.num_tokens
        elif self.nodes == [state.num_stem] and state.num_stem < stem_length(state.draft.tree):
            state.num_stem += 1


def pack_pairs(chunks: Sequence[HeadChunk], block_size: int) -> ScheduledBatch:
    """Lay the next pairs of each session side by side, those of a tree after what is cached."""
    token_ids: list[int] = []
    positions: list[int] = []
    slot_mapping: list[int] = []
    context_lengths: list[int] = []
    logits_indices: list[int] = []
    tree_parents: list[list[int]] = []
    for chunk in chunks:
        state, tree, base, read = chunk.state, chunk.state.draft.tree, len(token_ids), chunk.outlets
        if chunk.nodes:
            place = {node: index for index, node in enumerate(chunk.nodes)}
            token_ids += [tree.token_ids[node] for node in chunk.nodes]
            positions += [state.num_cached + tree.depths[node] for node in chunk.nodes]
            parents = [place.get(tree.parents[node], ROOT) for node in chunk.nodes]
            tree_parents.append([] if is_chain(parents) else parents)  # for which attention is quicker
            logits_indices += [base + place[node] for node in read]
            begin = state.num_slots
        else:
            token_ids += state.tokens[state.next_pair + 1 : state.next_pair + 1 + chunk.num_tokens]
            positions += range(state.next_pair, state.next_pair + chunk.num_tokens)
            tree_parents.append([])
            logits_indices += [base + chunk.num_tokens - 1 for _ in read]
            begin = state.next_pair - state.first
        slot_mapping += slots_of(state.block_table, range(begin, begin + chunk.num_tokens), block_size)
        context_lengths.append(begin + chunk.num_tokens)
    return ScheduledBatch(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slot_mapping,
        query_lengths=[chunk.num_tokens for chunk in chunks],
        context_lengths=context_lengths,
        block_tables=[list(chunk.state.block_table) for chunk in chunks],
        logits_indices=logits_indices,
        tree_parents=tree_parents,
    )
