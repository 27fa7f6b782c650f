"""What a head has computed of a session, and the packed batch of its next pairs.

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

from outrider.drafter_service.engine.drafter import Ask
from outrider.drafter_service.engine.kv_budget import num_common
from outrider.drafter_service.engine.paged_state import ForkableState
from outrider.drafter_service.engine.tree_growth import Growth, nodes_to_compute, stem_length
from outrider.verifier_service.messages.batch import ScheduledBatch, slots_of
from outrider.verifier_service.messages.draft import ROOT
from outrider.verifier_service.messages.tree import is_chain


@dataclass(slots=True)
class HeadState(ForkableState):
    """A session's committed tokens, and the pairs that are computed of them and of the draft."""

    first: int = 0  # pairs before this one are not there: the target no longer had their states
    num_true: int = 0  # pairs [first, num_true) began from the target's states
    num_cached: int = 0  # pairs [first, num_cached) of committed tokens have their KV in the blocks, then …
    num_stem: int = 0  # … those of so many drafted tokens
    tokens: list[int] = field(default_factory=list)  # committed
    num_states: int = 0  # the target's
    feedback: dict[int, torch.Tensor] = field(default_factory=dict)  # [hidden_size] that follows ROOT and each node

    @property
    def num_slots(self) -> int:
        return self.num_cached - self.first + self.num_stem

    def num_slots_after(self, share: int) -> int:
        if self.has_states_to_take:  # pairs that began from own states are computed again, in the same slots
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

    @property
    def num_together(self) -> int:
        return len(self.next_nodes())

    def next_nodes(self) -> list[int]:
        """Return the drafted tokens whose pairs come next, parents first; none while committed pairs are pending.

        The stem's pairs are computed one by one, since each starts from the state that follows the one before. Beyond a
        fork a level is computed at once, with all nodes between it and the stem.
        """
        if self.is_catching_up:
            return []
        tree, frontier = self.draft.tree, self.draft.frontier
        if self.num_stem < min(stem_length(tree), max(frontier) + 1):
            return [self.num_stem]
        return nodes_to_compute(tree, frontier, self.num_stem)

    def begin(self, ask: Ask, growth: Growth | None) -> None:
        """Take an ask up, from the pairs of the target's own states that it has in common with the ask before."""
        assert ask.states is not None
        tokens = list(ask.token_ids)
        num_states = num_usable_states(ask)
        # the last of the target's states is taken in (again): what follows from it is wanted
        num_kept = min(self.num_true, num_common(self.tokens, tokens) - 1, num_states - 1)
        if num_kept <= self.first or is_missing(ask.states, num_kept):
            num_kept = self.first = _num_missing(ask.states)
        self.ask, self.growth, self.tokens, self.num_states, self.feedback = ask, growth, tokens, num_states, {}
        self._keep(num_kept)

    def lose_kv(self) -> None:
        """Begin again; pairs whose states the ask no longer has cannot be computed again."""
        if self.ask is not None and self.ask.states is not None:
            self.first = max(self.first, _num_missing(self.ask.states))
        self._keep(self.first)

    def _keep(self, num_kept: int) -> None:
        """Keep the KV of the pairs before `num_kept`; what was drafted is computed again where it is needed."""
        self.num_true, self.num_cached, self.num_stem = num_kept, num_kept, 0

    def settle(self) -> None:
        self.ask, self.growth, self.feedback, self.num_stem = None, None, {}, 0

    def fork(self, ask: Ask, num_accepted: int, growth: Growth) -> HeadState:
        """As in `ForkableState`; the head's own states stand for the target's, which are not known yet."""
        return HeadState(
            ask=ask,
            growth=growth,
            first=self.first,
            num_true=self.num_true,
            num_cached=self.num_cached + num_accepted,
            tokens=list(ask.token_ids),
            num_states=self.num_states,
            feedback={ROOT: self.feedback[num_accepted - 1 if num_accepted else ROOT]},
        )

    def continues(self, ask: Ask) -> bool:
        """Return whether an ask brings the target's states that follow those taken in, as far as any do."""
        assert ask.states is not None
        return self.num_true >= len(ask.states) or not is_missing(ask.states, self.num_true)

    def adopt(self, ask: Ask) -> None:
        """As in `ForkableState`; the target's states are taken in when there is time."""
        self.ask, self.num_states = ask, num_usable_states(ask)

    def cut(self) -> None:
        self.num_stem = min(self.num_stem, max(0, len(self.draft.tree) - 1))

    def check_integrity(self) -> None:
        assert self.first <= self.num_true <= self.num_cached < len(self.tokens), "pairs without tokens"
        assert self.ask is not None or not (self.num_stem or self.feedback), "remains of a draft"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadChunk:
    """A session's part of one forward: pairs of committed tokens, or of drafted ones."""

    state: HeadState
    num_tokens: int
    nodes: list[int]  # the drafted tokens; none while the session is catching up
    set_index: int  # of the parameters that the pairs are computed with

    @property
    def outlets(self) -> list[int]:
        """Return the nodes whose outputs are read; ROOT: that of the last committed pair."""
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
        """Return the target's states that the pairs start from: [num_tokens, state_size]."""
        states, begin = self.state.asked.states, self.state.next_pair
        assert states is not None
        return states[begin : begin + self.num_tokens]

    @property
    def own_states(self) -> torch.Tensor:
        """Return the head's own states that the pairs start from, beyond the target's: [num_tokens, hidden_size]."""
        state = self.state
        parents = [state.draft.tree.parents[node] for node in self.nodes] or [ROOT]
        return torch.stack([state.feedback[parent] for parent in parents])

    def keep(self) -> None:
        """Count the KV of committed pairs and of the stem as computed; KV of nodes beyond a fork is dropped."""
        state = self.state
        if self.starts_from_target:
            state.num_true += self.num_tokens
            state.num_cached = max(state.num_cached, state.num_true)
        elif not self.nodes:
            state.num_cached += self.num_tokens
        elif self.nodes == [state.num_stem] and state.num_stem < stem_length(state.draft.tree):
            state.num_stem += 1


def num_usable_states(ask: Ask) -> int:
    """Count the target's states that pairs begin from: the last committed token begins none."""
    assert ask.states is not None
    return min(len(ask.states), len(ask.token_ids) - 1)


def is_missing(states: torch.Tensor, index: int) -> bool:
    """Return whether the target no longer had a token's state: [num_states, width]."""
    return bool(states[index, 0].isnan())


def _num_missing(states: torch.Tensor) -> int:
    """Count the first tokens whose states the target no longer had; the last token's is there."""
    return int(states[:, 0].isnan().logical_not().nonzero()[0])


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
