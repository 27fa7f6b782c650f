"""Draft with a head over the target's hidden states: EAGLE-1, EAGLE-3 and MTP, chains and trees.

The head computes pairs (state of token i, token i+1) at position i. Where the target has given its states they are
used, so after each verification the KV of the committed tokens is the target's truth; beyond them the head goes on from
its own states, and the KV of those pairs is scratch that ends with the draft. A session whose first states are gone
(marked by NaN) begins after the gap: its positions stay absolute and its KV holds what there is.

tokens   x0  x1 ... x[n-1]  |<- drafted ->|
states   h0  h1 ... h[n-2]  of the target
pairs    (h0,x1) ... (h[n-2],x[n-1])  (own,drafted) ...      all computed but those of the draft's last tokens
         |<- num_cached --------->|  |<- num_stem ->|<- of nodes beyond a fork: for one forward ->|
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import torch

from outrider.drafter_service.engine import Ask, DraftResult
from outrider.drafter_service.head_runner import HeadRows, HeadRunner
from outrider.drafter_service.kv_budget import num_common, reserve, share_budget
from outrider.drafter_service.sessions import SessionKey
from outrider.drafter_service.tree_growth import (
    DEFAULT_TREES,
    Growing,
    Growth,
    TreeConfig,
    answer_of,
    empty_answer,
    grow_all,
    nodes_to_compute,
    start_growth,
    stem_length,
)
from outrider.verifier_service.batch import ScheduledBatch, slots_of
from outrider.verifier_service.drafting import ROOT, DraftNeeds
from outrider.verifier_service.kv_cache import BlockPool


@dataclass(slots=True)
class _State:
    """One session's KV and the draft in the making."""

    block_table: list[int] = field(default_factory=list)
    first: int = 0  # pairs before this one are not there: the target no longer had their states
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
        return self.num_cached - self.first + self.num_stem

    @property
    def is_catching_up(self) -> bool:
        return self.num_cached < len(self.tokens) - 1

    def next_nodes(self) -> list[int]:
        """Return the drafted tokens whose pairs come next, parents first, once the committed ones are computed.

        The stem goes one by one, since each pair starts from what the one before gives; what forks goes level by level,
        each time with all that lies between it and the stem.
        """
        tree, frontier = self.draft.tree, self.draft.frontier
        if self.num_stem < min(stem_length(tree), max(frontier) + 1):
            return [self.num_stem]
        return nodes_to_compute(tree, frontier, self.num_stem)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """What of a session goes into this step's forward: pairs of committed tokens, or of drafted ones."""

    state: _State
    num_tokens: int
    nodes: list[int]  # the drafted ones; none while it is catching up
    set_index: int  # the parameters they are computed with

    @property
    def outlets(self) -> list[int]:
        """Return the nodes whose outputs are read, ROOT standing for the last committed pair."""
        state = self.state
        if not self.nodes:
            return [ROOT] if state.num_cached + self.num_tokens >= state.num_states else []
        frontier = set(state.draft.frontier)
        return [node for node in self.nodes if node in frontier or len(self.nodes) == 1]

    @property
    def starts_from_target(self) -> bool:
        return not self.nodes and self.state.num_cached < self.state.num_states


class EagleDrafter:
    """A `Drafter` over a head; many sessions in each forward."""

    def __init__(
        self,
        runner: HeadRunner,
        rng: torch.Generator,
        *,
        vocab_size: int | None = None,
        top_n: int = 32,
        trees: TreeConfig = DEFAULT_TREES,
    ) -> None:
        """Draw drafts from the first `vocab_size` ids (the target's vocabulary); None: from all the head has."""
        self._runner = runner
        self._rng = rng
        self._draft_vocab_size = runner.vocab_size if vocab_size is None else vocab_size
        self._top_n, self._trees = top_n, trees
        self._pool = BlockPool(runner.num_blocks, runner.block_size, enable_prefix_caching=False)
        self._states: dict[SessionKey, _State] = {}  # least recently asked first

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._runner.max_model_len

    @property
    def needs(self) -> DraftNeeds:
        return DraftNeeds(taps=self._runner.heads.first.taps)

    def draft(self, asks: Sequence[Ask], *, max_num_tokens: int) -> list[DraftResult]:
        """Run one forward (one for each parameter set in use) and take every draft one token or level further.

        An ask without usable states gets an empty draft; one that does not fit even with the KV pool to itself gets
        what its tree has grown to, or an empty draft.
        """
        if hopeless := [ask for ask in asks if not self._has_states(ask)]:
            return [self._refuse(ask) for ask in hopeless]
        states = [self._state_of(ask, max_num_tokens) for ask in asks]
        if complete := [state for state in states if not state.draft.frontier]:  # forced from end to end
            return [self._complete(state) for state in complete]
        chunks = self._schedule(states, max_num_tokens)
        if not chunks:
            return [self._give_up(states[0])]
        for set_index in sorted({chunk.set_index for chunk in chunks}):
            self._execute([chunk for chunk in chunks if chunk.set_index == set_index], set_index)
        return [self._complete(chunk.state) for chunk in chunks if not chunk.state.draft.frontier]

    def release(self, key: SessionKey) -> None:
        state = self._states.pop(key, None)
        if state is not None:
            self._pool.release(state.block_table)

    def check_integrity(self, keys: Collection[SessionKey]) -> None:
        assert self._states.keys() <= set(keys), "KV of a session that is gone"
        self._pool.check_integrity([state.block_table for state in self._states.values()])
        for state in self._states.values():
            assert len(state.block_table) == self._pool.num_blocks_for(state.num_slots), "blocks without pairs"
            assert state.first <= state.num_cached < len(state.tokens), "pairs without tokens"
            assert (state.ask is None) == (state.growth is None), "a draft that nobody asked for"
            assert state.growth is not None or not (state.num_stem or state.feedback), "remains of a draft"

    # --- state ---

    def _has_states(self, ask: Ask) -> bool:
        """Tell whether the last of the target's states is there, and as wide as the head reads."""
        if ask.states is None or ask.states.shape[1] != self._runner.state_size:
            return False
        num_states = min(len(ask.states), len(ask.token_ids) - 1)
        return num_states >= 1 and not _is_missing(ask.states, num_states - 1)

    def _state_of(self, ask: Ask, max_num_tokens: int) -> _State:
        """Return the session's state, rolled back to the pairs of the target's own states that its new ask shares."""
        state = self._states.setdefault(ask.key, _State())
        if state.ask is not None and state.ask.ask_id == ask.ask_id:
            return state
        self._states[ask.key] = self._states.pop(ask.key)  # most recently asked
        assert ask.states is not None
        tokens = list(ask.token_ids)
        num_states = min(len(ask.states), len(tokens) - 1)
        # the last of the target's states is taken in (again): what follows from it is wanted
        num_kept = min(state.num_cached, state.num_states, num_common(state.tokens, tokens) - 1, num_states - 1)
        if num_kept <= state.first or _is_missing(ask.states, num_kept):
            num_kept = state.first = _num_missing(ask.states)
        state.ask, state.tokens, state.num_states, state.feedback = ask, tokens, num_states, {}
        state.growth = self._start(ask, max_num_tokens)
        self._roll_back(state, num_kept)
        return state

    def _start(self, ask: Ask, max_num_tokens: int) -> Growth:
        """Start a draft; each parameter set has its position, so several of them draft a chain."""
        if ask.max_nodes and len(self._runner.heads) > 1:
            ask = replace(ask, length=min(ask.length, ask.max_nodes), max_nodes=0)
        # nodes beside each other are computed in one step
        return start_growth(ask, self._trees, vocab_size=self._draft_vocab_size, max_nodes=max_num_tokens)

    def _roll_back(self, state: _State, num_kept: int) -> None:
        """Keep the KV of the pairs before `num_kept`; what was drafted is computed again where it is needed."""
        state.num_cached, state.num_stem = num_kept, 0
        self._trim(state)

    def _trim(self, state: _State) -> None:
        self._pool.trim(state.block_table, state.num_slots)

    def _schedule(self, states: Sequence[_State], max_num_tokens: int) -> list[_Chunk]:
        """Share the step's tokens and the KV pool among the sessions; nothing where the oldest does not fit."""
        nodes = [[] if state.is_catching_up else state.next_nodes() for state in states]
        num_drafted = [len(own) for own in nodes]
        num_pending = [
            num_own or max(1, state.num_states - state.num_cached)
            for num_own, state in zip(num_drafted, states, strict=True)
        ]
        shares = share_budget(num_pending, max_num_tokens, num_drafted)
        chunks: list[_Chunk] = []
        for index, (state, share) in enumerate(zip(states, shares, strict=True)):
            if nodes[index] and state.is_catching_up:
                continue  # an older ask has just taken its KV
            if share and self._reserve(state, share, asked=states, younger=states[index + 1 :]):
                chunks.append(self._chunk(state, share, nodes[index]))
            elif index == 0:
                return []
        return chunks

    def _chunk(self, state: _State, share: int, nodes: list[int]) -> _Chunk:
        draft_position = state.draft.tree.depths[nodes[-1]] + 1 if nodes else 0
        set_index = self._runner.heads.set_index(draft_position)
        return _Chunk(state=state, num_tokens=share, nodes=nodes, set_index=set_index)

    def _reserve(self, state: _State, share: int, *, asked: Sequence[_State], younger: Sequence[_State]) -> bool:
        return reserve(
            self._pool,
            state,
            state.num_slots + share,
            all_states=self._states.values(),
            asked=asked,
            younger=younger,
            give_up=lambda victim: self._roll_back(victim, victim.first),
        )

    # --- the step ---

    def _execute(self, chunks: Sequence[_Chunk], set_index: int) -> None:
        outlets = [chunk.outlets for chunk in chunks]
        batch = _pack(chunks, outlets, self._pool.block_size)
        rows = self._runner.execute(batch, self._hidden(chunks), set_index)
        feedback = iter(rows.feedback)
        for chunk, nodes in zip(chunks, outlets, strict=True):
            chunk.state.feedback |= {node: next(feedback) for node in nodes}
            self._keep(chunk)
        self._grow(chunks, outlets, rows)

    def _hidden(self, chunks: Sequence[_Chunk]) -> torch.Tensor:
        """Join the states that the pairs start from: [num_tokens, hidden_size]."""
        given = [_target_states(chunk) for chunk in chunks if chunk.starts_from_target]
        combined = iter(self._runner.combine(torch.cat(given)).split([len(part) for part in given]) if given else ())
        return torch.cat([next(combined) if chunk.starts_from_target else _own_states(chunk) for chunk in chunks])

    def _keep(self, chunk: _Chunk) -> None:
        """Keep the KV of committed pairs and of the stem; that of nodes beyond a fork has served."""
        state = chunk.state
        if not chunk.nodes:
            state.num_cached += chunk.num_tokens
        elif chunk.nodes == [state.num_stem] and state.num_stem < stem_length(state.draft.tree):
            state.num_stem += 1
        self._trim(state)

    def _grow(self, chunks: Sequence[_Chunk], outlets: Sequence[list[int]], rows: HeadRows) -> None:
        """Give children to every frontier that has its outputs."""
        growing: list[_State] = []
        wanted: list[int] = []  # rows
        base = 0
        for chunk, nodes in zip(chunks, outlets, strict=True):
            if nodes == chunk.state.draft.frontier and not chunk.state.is_catching_up:
                growing.append(chunk.state)
                wanted += range(base, base + len(nodes))
            base += len(nodes)
        if growing:
            drafts = [Growing(_ask_of(state), state.draft, len(state.tokens)) for state in growing]
            limits = {"vocab_size": self._draft_vocab_size, "top_n": self._top_n}
            grow_all(drafts, rows.logits[wanted], self._rng, **limits)

    # --- answers ---

    def _complete(self, state: _State) -> DraftResult:
        ask, growth = _ask_of(state), state.draft
        state.ask, state.growth, state.feedback = None, None, {}
        self._roll_back(state, state.num_cached)
        return answer_of(ask, growth)

    def _give_up(self, state: _State) -> DraftResult:
        """Answer an ask whose KV does not fit even when it has the pool to itself.

        A tree stops at whole levels, for want of memory: nothing that was drawn is looked at, so it may be verified.
        """
        ask = _ask_of(state)
        result = self._complete(state) if ask.max_nodes else empty_answer(ask)
        self.release(ask.key)
        return result

    def _refuse(self, ask: Ask) -> DraftResult:
        self.release(ask.key)
        return empty_answer(ask)


def _ask_of(state: _State) -> Ask:
    assert state.ask is not None, "nothing was asked for"
    return state.ask


def _is_missing(states: torch.Tensor, index: int) -> bool:
    return bool(states[index, 0].isnan())


def _num_missing(states: torch.Tensor) -> int:
    """Count the first tokens whose states the target no longer had; the last one's is there."""
    return int(states[:, 0].isnan().logical_not().nonzero()[0])


def _target_states(chunk: _Chunk) -> torch.Tensor:
    states, begin = _ask_of(chunk.state).states, chunk.state.num_cached
    assert states is not None
    return states[begin : begin + chunk.num_tokens]


def _own_states(chunk: _Chunk) -> torch.Tensor:
    """Return what the pairs of drafted tokens, or of a committed one beyond the target's states, start from."""
    state = chunk.state
    parents = [state.draft.tree.parents[node] for node in chunk.nodes] or [ROOT]
    return torch.stack([state.feedback[parent] for parent in parents])


def _pack(chunks: Sequence[_Chunk], outlets: Sequence[list[int]], block_size: int) -> ScheduledBatch:
    """Lay the next pairs of each session side by side, those of a tree after what is cached."""
    token_ids: list[int] = []
    positions: list[int] = []
    slot_mapping: list[int] = []
    logits_indices: list[int] = []
    tree_parents: list[list[int]] = []
    for chunk, read in zip(chunks, outlets, strict=True):
        state, tree, begin, base = chunk.state, chunk.state.draft.tree, chunk.state.num_cached, len(token_ids)
        if chunk.nodes:
            place = {node: index for index, node in enumerate(chunk.nodes)}
            token_ids += [tree.token_ids[node] for node in chunk.nodes]
            positions += [begin + tree.depths[node] for node in chunk.nodes]
            tree_parents.append([place.get(tree.parents[node], ROOT) for node in chunk.nodes])
            logits_indices += [base + place[node] for node in read]
        else:
            token_ids += state.tokens[begin + 1 : begin + 1 + chunk.num_tokens]
            positions += range(begin, begin + chunk.num_tokens)
            tree_parents.append([])
            logits_indices += [base + chunk.num_tokens - 1 for _ in read]
        slots = range(state.num_slots, state.num_slots + chunk.num_tokens)
        slot_mapping += slots_of(state.block_table, slots, block_size)
    return ScheduledBatch(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slot_mapping,
        query_lengths=[chunk.num_tokens for chunk in chunks],
        context_lengths=[chunk.state.num_slots + chunk.num_tokens for chunk in chunks],
        block_tables=[list(chunk.state.block_table) for chunk in chunks],
        logits_indices=logits_indices,
        tree_parents=tree_parents,
    )
