"""The speculation cache: drafts for what a verification may end in, made while it runs.

*Speculative speculative decoding* (Kumar et al. 2026), session by session instead of batch by batch. What was answered
is the trunk; each likely outcome is a branch that shares the trunk's KV up to where they part:

trunk     |<- committed ->|<- the draft that was answered ->|
branch 1  |<----------- shared ----->|next|<- drafted ->|           the draft's first token is accepted, the next is not
branch 2  |<----------- shared -------------------------->|next|<- drafted ->|                          all are accepted

Whole KV blocks are shared by reference, the block where they part is copied, so the branch that wins becomes the
session's trunk as it is and nothing of it is computed again (but, of a head, what it made from its own states).

One branch for an outcome, drawn once, its length set before. Whether it is used depends on what was committed, and how
long it has become by then on time alone, which is the same for any token: it is a draft like any other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, Self, TypeVar

from outrider.drafter_service.engine.draft_sampler import Children
from outrider.drafter_service.engine.draft_tree import DraftTree
from outrider.drafter_service.engine.engine import Ask
from outrider.drafter_service.engine.kv_budget import num_common
from outrider.drafter_service.engine.outcomes import (
    AcceptanceMemory,
    LikelyOutcome,
    Pace,
    Place,
    length_worth_waiting_for,
    likely_outcomes,
)
from outrider.drafter_service.engine.sessions import SessionKey
from outrider.drafter_service.engine.tree_growth import ChainGrowth, Growth, draws_rows
from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE
from outrider.verifier_service.scheduling.kv_cache import BlockPool

AHEAD_ID = -1  # of the asks that nobody has asked yet


def is_watched(ask: Ask) -> bool:
    """Tell whether an ask is for a chain of free tokens: outcomes of others are not prepared for."""
    return not ask.max_nodes and not ask.forced_ids


class WatchedChain(ChainGrowth):
    """A chain in the making that notes at each place what might stand there instead."""

    def __init__(self, ask: Ask, *, num_candidates: int) -> None:
        has_rows = draws_rows(ask)
        super().__init__((), depth=ask.length, has_rows=has_rows)
        self.places: list[Place] = []
        self.num_children = 1 if has_rows else num_candidates
        self._num_candidates = num_candidates

    def grow(self, found: Sequence[Children]) -> None:
        super().grow(found)
        self.places.append(_place_of(found[0], self._num_candidates))

    def stop_at(self, depth: int) -> None:
        """Set the length, whatever has been drawn already; what lies beyond is dropped."""
        self._depth = depth
        if depth < len(self):
            token_ids, probs = self.tree.token_ids[:depth], self.tree.probs[:depth]
            self.tree = DraftTree()
            for index, (token_id, prob) in enumerate(zip(token_ids, probs, strict=True)):
                self.tree.add(index - 1, token_id, prob)
            del self.places[depth:], self._rows[depth:]
        self._follow()


def _place_of(children: Children, num_candidates: int) -> Place:
    row = children.row
    if row is None:
        candidates = tuple(zip(children.token_ids, children.probs, strict=True))
    else:
        chances = (weight / DRAFT_PROB_SCALE for weight in row.weights[:num_candidates])  # likeliest first
        candidates = tuple(zip(row.token_ids, chances, strict=False))
    return Place(children.token_ids[0], children.probs[0], candidates, is_drawn=row is not None)


class ForkableState(Protocol):
    """One session's KV and the draft in the making, as a drafter keeps them."""

    block_table: list[int]
    ask: Ask | None
    growth: Growth | None

    @property
    def num_slots(self) -> int:
        """Count the KV slots in use."""

    def num_slots_after(self, share: int) -> int:
        """Count them once so much of what is pending is computed."""

    @property
    def num_pending(self) -> int:
        """Count what has to be computed before the draft can grow, as far as one forward can."""

    def rest(self) -> None:
        """Have nothing in the making, and keep what can be forked."""

    def fork(self, ask: Ask, num_accepted: int, growth: Growth) -> Self:
        """Start the draft of an ask that goes on from `num_accepted` tokens of this one, whose KV it shares.

        The new state has no blocks yet.
        """


StateT = TypeVar("StateT", bound=ForkableState)


@dataclass(slots=True)
class _Outlook(Generic[StateT]):
    """What is made of one session while its draft is verified."""

    ask: Ask  # that was answered, with the tokens that were committed then
    trunk: StateT  # with the draft that was the answer
    chain: WatchedChain  # that draft, and the place after it once the trunk has been computed to its end
    num_drafted: int
    planned: list[LikelyOutcome] = field(default_factory=list)  # without a branch yet
    branches: dict[tuple[int, ...], StateT] = field(default_factory=dict)  # by the tokens that the outcome commits

    @property
    def num_committed(self) -> int:
        return len(self.ask.token_ids)

    @property
    def is_trunk_done(self) -> bool:
        return len(self.chain) > self.num_drafted

    @property
    def drafted_ids(self) -> list[int]:
        return self.chain.tree.token_ids[: self.num_drafted]

    @property
    def growing(self) -> list[StateT]:
        return [branch for branch in self.branches.values() if _chain(branch).frontier]


@dataclass(slots=True)
class AheadStep(Generic[StateT]):
    """What one forward in spare time computes: drafts to take further, and KV blocks to copy before."""

    states: list[StateT] = field(default_factory=list)
    shares: list[int] = field(default_factory=list)  # how many of each one's pending tokens
    copy_sources: list[int] = field(default_factory=list)
    copy_targets: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(self.shares)

    def add(self, state: StateT, share: int) -> None:
        self.states.append(state)
        self.shares.append(share)


class SpeculationCache(Generic[StateT]):
    """Outlooks of sessions whose drafts are being verified; KV comes out of what the pool has left."""

    def __init__(self, pool: BlockPool, *, num_branches: int, max_model_len: int) -> None:
        """Prepare `num_branches` outcomes of a verification."""
        self._pool = pool
        self._num_branches = num_branches
        self._max_model_len = max_model_len
        self._memory = AcceptanceMemory()
        self._outlooks: dict[SessionKey, _Outlook[StateT]] = {}  # answered longest ago first

    def start(self, ask: Ask) -> WatchedChain:
        """Start the draft of an ask so that its outcomes can be guessed."""
        return WatchedChain(ask, num_candidates=self._num_branches + 1)

    def worth(self, ask: Ask, pace: Pace | None) -> int:
        """Return how much of an ask to draft while its verifier waits."""
        return length_worth_waiting_for(ask.length, self._memory.overall, pace)

    def expects(self, key: SessionKey) -> bool:
        """Tell whether there was time to prepare for a session's next ask."""
        outlook = self._outlooks.get(key)
        return outlook is not None and outlook.is_trunk_done

    def watch(self, ask: Ask, trunk: StateT, chain: WatchedChain) -> None:
        """Look out for what becomes of an answered draft, where its outcomes leave room for another."""
        num_drafted = len(chain)
        if len(ask.token_ids) + num_drafted + 1 > self._max_model_len:
            return
        ask = replace(ask, ask_id=AHEAD_ID, token_ids=list(ask.token_ids))
        trunk.ask, trunk.growth = ask, chain
        # states are for the trunk's own pairs: here they would be held for as long as the outlook is
        self._outlooks[ask.key] = _Outlook(replace(ask, states=None), trunk, chain, num_drafted)
        chain.stop_at(num_drafted + 1)

    def take(self, ask: Ask) -> StateT | None:
        """Return the branch that was made for what an ask follows, its KV now the caller's; free all others."""
        outlook = self._outlooks.get(ask.key)
        if outlook is None:
            return None
        new = tuple(ask.token_ids[outlook.num_committed :])
        won: StateT | None = None
        if ask.token_ids[: outlook.num_committed] == outlook.ask.token_ids and ask.sampling == outlook.ask.sampling:
            self._observe(outlook, new)
            won = outlook.branches.pop(new, None)
        self.drop(ask.key)
        return won

    def _observe(self, outlook: _Outlook[StateT], new: Sequence[int]) -> None:
        """Note which drafted tokens were right, and the first that was not; those after it are neither.

        What the verifier cut off is judged by the token that the target chose there, right or wrong.
        """
        if not new:
            return
        drafted_ids, places = outlook.drafted_ids, outlook.chain.places
        num_right = num_common(drafted_ids, list(new))  # lists, as the drafted ones
        for place in places[:num_right]:
            self._memory.observe(place.confidence, is_accepted=True)
        if num_right < min(len(drafted_ids), len(new)):
            self._memory.observe(places[num_right].confidence, is_accepted=False)

    def drop(self, key: SessionKey) -> None:
        """Expect nothing of a session any more."""
        outlook = self._outlooks.pop(key, None)
        if outlook is None:
            return
        if outlook.trunk.growth is outlook.chain:
            outlook.trunk.rest()
        for branch in outlook.branches.values():
            self._pool.release(branch.block_table)

    def make_room(self, num_blocks: int) -> None:
        """Give up outlooks until so many blocks are free or none is left: whatever was asked for goes first."""
        while self._outlooks and self._pool.num_free_blocks < num_blocks:
            self.drop(next(iter(self._outlooks)))

    # --- spare time ---

    def has_work(self) -> bool:
        return any(
            not outlook.is_trunk_done or outlook.planned or outlook.growing for outlook in self._outlooks.values()
        )

    def next_step(self, max_num_tokens: int) -> AheadStep[StateT]:
        """Choose what to compute next, sessions that were answered longest ago first; never at others' cost."""
        step: AheadStep[StateT] = AheadStep()
        for key, outlook in list(self._outlooks.items()):
            if outlook.is_trunk_done:
                self._take_further(outlook, step, max_num_tokens)
            elif not self._extend(step, outlook.trunk, max_num_tokens):
                self.drop(key)
        return step

    def after_step(self) -> None:
        """Plan the branches of the trunks that have been computed to their end."""
        for outlook in self._outlooks.values():
            if outlook.is_trunk_done and outlook.trunk.growth is outlook.chain:
                outlook.trunk.rest()
                places = outlook.chain.places
                outlook.planned = likely_outcomes(
                    places[: outlook.num_drafted], places[outlook.num_drafted], self._memory, self._num_branches
                )

    def _take_further(self, outlook: _Outlook[StateT], step: AheadStep[StateT], max_num_tokens: int) -> None:
        """Take each branch one token further, those that are to begin after those that have begun."""
        for branch in outlook.growing:
            if not self._extend(step, branch, max_num_tokens):
                _chain(branch).stop_at(len(_chain(branch)))
        while outlook.planned and step.num_tokens < max_num_tokens:
            outcome = outlook.planned.pop(0)
            if not self._begin(step, outlook, outcome):
                outlook.planned.clear()

    def _extend(self, step: AheadStep[StateT], state: StateT, max_num_tokens: int) -> bool:
        """Put a state into a step where that has room; False where the pool has none for it."""
        share = min(state.num_pending, max_num_tokens - step.num_tokens)
        if share < 1:
            return True  # another time
        needed = self._pool.num_blocks_for(state.num_slots_after(share)) - len(state.block_table)
        if needed > self._pool.num_free_blocks:
            return False
        state.block_table.extend(self._pool.allocate(max(0, needed)))
        step.add(state, share)
        return True

    def _begin(self, step: AheadStep[StateT], outlook: _Outlook[StateT], outcome: LikelyOutcome) -> bool:
        """Fork the trunk for an outcome; False where the pool has no block left for it."""
        if self._pool.num_free_blocks < 1:
            return False
        trunk, block_size = outlook.trunk, self._pool.block_size
        committed = (*outlook.drafted_ids[: outcome.num_accepted], outcome.next_token_id)
        tokens = [*outlook.ask.token_ids, *committed]
        length = min(outlook.ask.length, self._max_model_len - len(tokens) + 1)
        ask = replace(outlook.ask, token_ids=tokens, length=length)
        branch = trunk.fork(ask, outcome.num_accepted, self.start(ask))
        num_whole = branch.num_slots // block_size
        shared = trunk.block_table[:num_whole]
        self._pool.share(shared)
        own = self._pool.allocate(1)
        if branch.num_slots % block_size:
            step.copy_sources.append(trunk.block_table[num_whole])
            step.copy_targets += own
        branch.block_table = shared + own
        outlook.branches[committed] = branch
        step.add(branch, branch.num_pending)
        return True

    # --- books ---

    def branches(self) -> Iterator[StateT]:
        for outlook in self._outlooks.values():
            yield from outlook.branches.values()

    def check_integrity(self, trunks: Collection[StateT]) -> None:
        """Raise `AssertionError` where an outlook contradicts itself or outlives its session."""
        known = set(map(id, trunks))
        for outlook in self._outlooks.values():
            assert id(outlook.trunk) in known, "an outlook of a session that is gone"
            assert outlook.is_trunk_done or not (outlook.branches or outlook.planned), "branches of half a trunk"
            assert (outlook.trunk.growth is None) == outlook.is_trunk_done, "a trunk that is asked for"
            assert len(outlook.branches) + len(outlook.planned) <= self._num_branches, "more branches than allowed"
            for committed, branch in outlook.branches.items():
                assert branch.ask is not None, "a branch for no ask"
                expected = [*outlook.ask.token_ids, *committed]
                assert branch.ask.token_ids == expected, "a branch of another trunk, or of another outcome"


def _chain(branch: ForkableState) -> WatchedChain:
    assert isinstance(branch.growth, WatchedChain)
    return branch.growth
