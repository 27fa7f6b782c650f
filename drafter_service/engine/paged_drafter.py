"""The drafter over paged KV: sessions, KV budget, steps and running ahead, whatever model computes the drafts.

There are no phases. In every step each session has a share of the forward: some catch up with their tokens, others
grow their drafts.

    begin     roll the session's KV back to what its new ask has in common with it
    schedule  share the step's tokens, then reserve KV blocks, at the cost of idle and younger sessions if need be
    run       one forward over all shares (`Forward`); drafts whose tokens are all computed grow
    answer    complete drafts; KV of tokens that may be accepted stays
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Generic, Protocol, runtime_checkable

import numpy as np

from outrider.drafter_service.engine.drafter import Ask, ChainsLaunched, SessionKey
from outrider.drafter_service.engine.kv_budget import reserve, share_budget
from outrider.drafter_service.engine.outcomes import Pace
from outrider.drafter_service.engine.paged_state import StateT, Step
from outrider.drafter_service.engine.speculation_cache import SpeculationCache, can_branch
from outrider.drafter_service.engine.tree_growth import Growth, answer_of
from outrider.verifier_service.messages.columns import Int64s
from outrider.verifier_service.messages.counts import GraphCounts
from outrider.verifier_service.messages.draft import Draft, DraftNeeds
from outrider.verifier_service.scheduling.kv_cache import BlockPool

# Of states whose chains have just been given a token, how many tokens more each chain may be given unread.
Follow = Callable[[Sequence[StateT]], list[int]]


class PagedModel(Protocol):
    """What a model over paged KV says of itself."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def needs(self) -> DraftNeeds: ...


class Forward(PagedModel, Protocol[StateT]):
    """What differs between drafters over paged KV: it packs a step into a batch, runs the batch and reads the rows."""

    num_forwards: int  # run so far
    graph_counts: GraphCounts | None  # of its captured steps; None: its runner's are counted elsewhere, or it has none

    def can_draft(self, ask: Ask) -> bool:
        """Return whether the ask has the states that drafting needs."""

    def new_state(self) -> StateT:
        """Return the state of a session of which nothing is computed."""

    def begin(self, state: StateT, ask: Ask, *, max_num_tokens: int, growth: Growth | None) -> None:
        """Take an ask up: start its draft, and roll the state back to what the ask has in common with it.

        A draft level of more than `max_num_tokens` tokens would not fit a step. `growth`: a draft started elsewhere.
        """

    def run(self, step: Step[StateT], follow: Follow[StateT]) -> None:
        """Compute a step, note what is computed in its states, and grow the drafts whose tokens are all computed.

        Chains may grow by as many tokens more as `follow` returns, which has reserved the KV slots for them.
        """


@runtime_checkable
class ChainsForward(Forward[StateT], Protocol[StateT]):
    """One that drafts chains as arrays."""

    def take_tokens(self, states: Sequence[StateT], asks: Sequence[Ask]) -> tuple[int, Int64s] | None:
        """Roll the states back to what their asks have in common with them.

        Return how many tokens are pending in all, and how many slots each state takes until its chain is drafted, int64
        [num_asks]; None: arrays do not do for these. Either way, `begin` may follow instead of `run_chains`.
        """

    def run_chains(self, states: Sequence[StateT], asks: Sequence[Ask], lengths: Int64s) -> ChainsLaunched:
        """Launch all chains to their lengths, int64 [num_asks], for which the KV slots are there."""


class PagedDrafter(Generic[StateT]):
    """A `Drafter` over a forward, and a `RunsAhead` where it has a speculation cache; many sessions in each forward."""

    def __init__(self, forward: Forward[StateT], *, num_ahead_branches: int = 0) -> None:
        """While a chain is verified, draft for `num_ahead_branches` outcomes (see `speculation_cache`); 0: for none."""
        self.vocab_size, self.max_model_len, self.needs = forward.vocab_size, forward.max_model_len, forward.needs
        self.graph_counts = forward.graph_counts
        self._forward = forward
        self._chains: ChainsForward[StateT] | None = None
        if isinstance(forward, ChainsForward) and not num_ahead_branches:
            self._chains = forward
        self._pool = BlockPool(forward.num_blocks, forward.block_size, enable_prefix_caching=False)
        self._states: dict[SessionKey, StateT] = {}  # least recently asked first
        self._cache: SpeculationCache[Any] | None = None  # of forwards whose states can be forked
        if num_ahead_branches:
            self._cache = SpeculationCache(
                self._pool, num_branches=num_ahead_branches, max_model_len=forward.max_model_len
            )

    @property
    def num_forwards(self) -> int:
        return self._forward.num_forwards

    def draft(self, asks: Sequence[Ask], *, max_num_tokens: int) -> list[Draft]:
        """Run one step over the asks; answer those whose drafts are complete.

        A tree grows by one level. Where all asks are for chains, these grow to their end, as far as the KV pool has
        room. An ask without usable states gets an empty draft. One that does not fit even with the KV pool to itself
        gets what its tree has grown to, or an empty draft.
        """
        if refused := [ask for ask in asks if not self._forward.can_draft(ask)]:
            return [self._refuse(ask) for ask in refused]
        states = [self._state_of(ask, max_num_tokens) for ask in asks]
        if complete := [state for state in states if state.is_complete]:  # every token was forced
            return [self._complete(state) for state in complete]
        step = self._schedule(states, max_num_tokens)
        if not step.states:
            return [self._give_up(states[0])]
        self._run(step, asked=states)
        return [self._complete(state) for state in step.states if state.is_complete]

    def draft_chains(self, asks: Sequence[Ask], *, max_num_tokens: int) -> ChainsLaunched | None:
        """Launch drafts for all asks to the end in one step, as arrays; see `DraftsChains`.

        Only where every ask is for a chain without forced tokens, none is half drafted, and the step has room for all.
        """
        if self._chains is None or any(ask.max_nodes or ask.forced_ids for ask in asks):
            return None
        states = [self._states.get(ask.key) or self._forward.new_state() for ask in asks]
        if any(state.ask is not None for state in states):
            return None
        if (taken := self._chains.take_tokens(states, asks)) is None or taken[0] > max_num_tokens:
            return None
        if not self._reserve_all(states, taken[1]):
            return None
        for ask, state in zip(asks, states, strict=True):
            self._states.pop(ask.key, None)
            self._states[ask.key] = state  # most recently asked
        launched = self._chains.run_chains(states, asks, np.array([ask.length for ask in asks], np.int64))
        # what another step writes into these blocks comes after what reads them here
        self._trim_all(states, np.array([state.num_slots for state in states]))
        return launched

    def release(self, key: SessionKey) -> None:
        self.forget_outcomes(key)
        state = self._states.pop(key, None)
        if state is not None:
            self._pool.release(state.block_table)

    def check_integrity(self, keys: Collection[SessionKey]) -> None:
        assert self._states.keys() <= set(keys), "KV of a session that is gone"
        states = list(self._states.values())
        if self._cache is not None:
            self._cache.check_integrity(self._states.values())
            states += self._cache.branches()
        self._pool.check_integrity([state.block_table for state in states])
        for state in states:
            assert len(state.block_table) == self._pool.num_blocks_for(state.num_slots), "blocks without tokens"
            assert (state.ask is None) == (state.growth is None), "a draft that nobody asked for"
            state.check_integrity()

    # --- sessions ---

    def _state_of(self, ask: Ask, max_num_tokens: int) -> StateT:
        """Return the session's state; where the ask is new, the state takes it up."""
        state = self._states.get(ask.key)
        if state is not None and state.ask is not None and state.ask.ask_id == ask.ask_id:
            return state
        self.forget_outcomes(ask.key)
        state = self._states.pop(ask.key, None) or self._forward.new_state()
        self._states[ask.key] = state  # most recently asked
        growth = self._cache.start(ask) if self._cache is not None and can_branch(ask) else None
        self._forward.begin(state, ask, max_num_tokens=max_num_tokens, growth=growth)
        self._trim(state)
        return state

    def _trim(self, state: StateT) -> None:
        self._pool.trim(state.block_table, state.num_slots)

    # --- the step ---

    def _schedule(self, states: Sequence[StateT], max_num_tokens: int) -> Step[StateT]:
        """Share a step's tokens and the KV pool among sessions, oldest ask first; empty: the oldest does not fit."""
        num_together = [state.num_together for state in states]
        shares = share_budget([state.num_pending for state in states], max_num_tokens, num_together)
        step: Step[StateT] = Step()
        for index, (state, share) in enumerate(zip(states, shares, strict=True)):
            if state.num_together != num_together[index]:
                continue  # an older ask has just taken its KV: the share is of other tokens
            if share and self._reserve(state, share, asked=states, younger=states[index + 1 :]):
                step.add(state, share)
            elif index == 0:
                break
        return step

    def _reserve(self, state: StateT, share: int, *, asked: Sequence[StateT], younger: Sequence[StateT]) -> bool:
        """Give a state the KV blocks for `share` tokens more; False: it has to wait. See `kv_budget.reserve`."""
        num_slots = state.num_slots_after(share)
        if self._cache is not None:
            self._cache.make_room(self._pool.num_blocks_for(num_slots) - len(state.block_table))
        return reserve(
            self._pool,
            state,
            num_slots,
            all_states=self._states.values(),
            asked=asked,
            younger=younger,
            take_kv=self._take_kv,
        )

    def _take_kv(self, victim: StateT) -> None:
        victim.lose_kv()
        self._trim(victim)

    def _reserve_all(self, states: Sequence[StateT], num_slots: Int64s) -> bool:
        """Give each state the KV blocks for its slots, at the cost of idle sessions only; False: they are too few."""
        missing = self._trim_all(states, num_slots)
        num_missing = int(missing.clip(min=0).sum())
        if num_missing > self._pool.num_free_blocks:
            asked = set(map(id, states))
            for state in self._states.values():
                if id(state) not in asked and num_missing > self._pool.num_free_blocks:
                    self._take_kv(state)
        if num_missing > self._pool.num_free_blocks:
            return False
        for row in np.flatnonzero(missing > 0).tolist():
            states[row].block_table += self._pool.allocate(int(missing[row]))
        return True

    def _trim_all(self, states: Sequence[StateT], num_slots: Int64s) -> Int64s:
        """Release each state's blocks beyond its slots; return how many it lacks, int64 [num_states]; < 0: none."""
        missing: Int64s = -(-num_slots // self._pool.block_size) - np.array([len(each.block_table) for each in states])
        for row in np.flatnonzero(missing < 0).tolist():
            self._pool.trim(states[row].block_table, int(num_slots[row]))
        return missing

    def _run(self, step: Step[StateT], asked: Sequence[StateT] = ()) -> None:
        """Run a step. Where all of the `asked` draft chains, the chains grow to their end."""
        self._forward.run(step, partial(self._num_following, asked=asked))
        for state in step.states:
            self._trim(state)  # the KV of nodes beyond a fork served for one forward

    def _num_following(self, states: Sequence[StateT], *, asked: Sequence[StateT]) -> list[int]:
        """Return how many tokens after the next one each state's chain is taken further: all, where there is room."""
        if len(states) != len(asked) or not all(state.draft.chain_left for state in asked):
            return [0] * len(states)
        lefts: list[int] = []
        for state in states:
            left = state.draft.chain_left - 1
            lefts.append(left if left and self._reserve(state, left, asked=asked, younger=()) else 0)
        return lefts

    # --- running ahead ---

    @property
    def runs_ahead(self) -> bool:
        return self._cache is not None

    def expects(self, key: SessionKey) -> bool:
        return self._cache is not None and self._cache.expects(key)

    def take(self, ask: Ask, pace: Pace | None) -> Draft | None:
        """Answer an ask by the branch that was drafted for it, or by nothing where no token is worth its time.

        None: it is drafted as any other, as far as is worth the time at this pace, from what there is already.
        """
        if self._cache is None or not can_branch(ask) or not self._forward.can_draft(ask):
            return None
        state = self._cache.take(ask)
        if state is None:
            state = self._state_of(ask, ask.length)
        else:
            self._pool.release(self._states.pop(ask.key).block_table)
            self._states[ask.key] = state  # most recently asked
        self._cache.shorten(state, pace)
        self._trim(state)
        return self._complete(state) if state.is_complete else None

    def run_ahead(self, *, max_num_tokens: int) -> int:
        assert self._cache is not None, "this drafter does not run ahead"
        step = self._cache.next_step(max_num_tokens)
        if step.states:
            self._run(step)
        self._cache.after_step()
        return step.num_tokens

    def forget_outcomes(self, key: SessionKey) -> None:
        if self._cache is not None:
            self._cache.drop(key)

    def has_spare_work(self) -> bool:
        return self._cache is not None and self._cache.has_work()

    # --- answers ---

    def _complete(self, state: StateT) -> Draft:
        result = answer_of(state.asked, state.draft)
        if self._cache is None or not self._cache.add_trunk(state):
            state.settle()
            self._trim(state)
        return result

    def _give_up(self, state: StateT) -> Draft:
        """Answer an ask whose KV does not fit even when it has the pool to itself.

        A tree stops at whole levels, for want of memory: nothing that was drawn is looked at, so it may be verified.
        """
        ask = state.asked
        result = answer_of(ask, state.draft) if ask.max_nodes else ask.answer()
        self.release(ask.key)
        return result

    def _refuse(self, ask: Ask) -> Draft:
        self.release(ask.key)
        return ask.answer()
