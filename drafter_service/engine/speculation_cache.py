"""The speculation cache: drafts for what a verification may end in, made while the verification runs.

*Speculative speculative decoding* (Kumar et al. 2026), session by session instead of batch by batch. Two words:

- A *trunk* is the session's state with the draft that was answered, whose verification runs.
- A *branch* is a draft for one outcome of that verification. It shares the trunk's KV up to where they part:

trunk     |<- committed ->|<- the draft that was answered ->|
branch 1  |<----------- shared ----->|next|<- drafted ->|           the draft's first token is accepted, the next is not
branch 2  |<----------- shared -------------------------->|next|<- drafted ->|                          all are accepted

Whole KV blocks are shared by reference, and the block where a branch parts is copied. So the branch of the outcome that
comes true becomes the session's state as it is, and nothing of it is computed again. (Of a head, the pairs that began
from the head's own states are.)

Each outcome has one branch, which is drawn once; its length is set before. Whether the branch is used depends on what
was committed. How long it has become by then depends on time alone, which is the same for any token. So a branch is a
draft like any other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from outrider.drafter_service.engine.draft_sampler import Children
from outrider.drafter_service.engine.draft_tree import DraftTree
from outrider.drafter_service.engine.drafter import Ask, SessionKey
from outrider.drafter_service.engine.kv_budget import num_common
from outrider.drafter_service.engine.outcomes import (
    LikelyOutcome,
    Pace,
    Place,
    acceptance_by_confidence,
    bin_of,
    length_worth_waiting_for,
    likely_outcomes,
)
from outrider.drafter_service.engine.paged_state import ForkableState, Step
from outrider.drafter_service.engine.tree_growth import ChainGrowth, draws_rows
from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE
from outrider.verifier_service.scheduling.kv_cache import BlockPool

AHEAD_ID = -1  # of the asks that nobody has asked yet

StateT = TypeVar("StateT", bound=ForkableState)


def can_branch(ask: Ask) -> bool:
    """Return whether outcomes of an ask's draft can be drafted for: the draft is a chain without forced tokens."""
    return not ask.max_nodes and not ask.forced_ids


class BranchingChain(ChainGrowth):
    """A chain that notes at each place which other tokens might stand there."""

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


@dataclass(slots=True)
class _Trunk(Generic[StateT]):
    """A session whose answered draft is being verified, and the branches for its outcomes."""

    state: StateT  # the session's, computed to the end of `chain` in spare time
    ask: Ask  # that was answered, with the tokens that were committed then
    chain: BranchingChain  # the answered draft, and the place after it once the state is computed to its end
    num_drafted: int  # tokens of the answered draft
    planned: list[LikelyOutcome] | None = None  # outcomes without a branch yet; None: the state is not computed
    branches: dict[tuple[int, ...], StateT] = field(default_factory=dict)  # by the tokens that the outcome commits

    @property
    def num_committed(self) -> int:
        return len(self.ask.token_ids)

    @property
    def is_computed(self) -> bool:
        return len(self.chain) > self.num_drafted

    @property
    def drafted_ids(self) -> list[int]:
        return self.chain.tree.token_ids[: self.num_drafted]

    @property
    def growing(self) -> list[StateT]:
        return [branch for branch in self.branches.values() if not branch.is_complete]


class SpeculationCache(Generic[StateT]):
    """Trunks and branches of all sessions; their KV comes out of what the pool has left."""

    def __init__(self, pool: BlockPool, *, num_branches: int, max_model_len: int) -> None:
        """Draft for the `num_branches` likeliest outcomes of a verification."""
        self._pool = pool
        self._num_branches = num_branches
        self._max_model_len = max_model_len
        self._acceptance = acceptance_by_confidence()
        self._trunks: dict[SessionKey, _Trunk[StateT]] = {}  # answered longest ago first

    def start(self, ask: Ask) -> BranchingChain:
        """Start the draft of an ask so that its outcomes can be guessed."""
        return BranchingChain(ask, num_candidates=self._num_branches + 1)

    def expects(self, key: SessionKey) -> bool:
        """Return whether there was time to prepare for a session's next ask."""
        trunk = self._trunks.get(key)
        return trunk is not None and trunk.is_computed

    def add_trunk(self, state: StateT) -> bool:
        """Keep a state whose draft is answered as a trunk; False where the draft can have no branches."""
        ask, chain = state.asked, state.draft
        if not isinstance(chain, BranchingChain) or len(ask.token_ids) + len(chain) + 1 > self._max_model_len:
            return False
        state.ask = replace(ask, ask_id=AHEAD_ID, token_ids=list(ask.token_ids))
        # the target's states are for the trunk's own pairs: a branch would hold them for as long as it lives
        self._trunks[ask.key] = _Trunk(state, replace(state.ask, states=None), chain, len(chain))
        chain.stop_at(len(chain) + 1)
        return True

    def take(self, ask: Ask) -> StateT | None:
        """Return the branch for the outcome that an ask follows, its KV now the caller's; free all other branches."""
        trunk = self._trunks.get(ask.key)
        if trunk is None:
            return None
        new = tuple(ask.token_ids[trunk.num_committed :])
        branch: StateT | None = None
        # whether a branch is used must not depend on what it drew: only what precedes the draft decides
        is_same = ask.token_ids[: trunk.num_committed] == trunk.ask.token_ids and ask.sampling == trunk.ask.sampling
        if is_same and trunk.state.continues(ask):
            self._observe(trunk, new)
            branch = trunk.branches.pop(new, None)
        self.drop(ask.key)
        if branch is not None:
            branch.adopt(ask)
        return branch

    def shorten(self, state: StateT, pace: Pace | None) -> None:
        """Cut a chain to the asked length, and to what is worth drafting while its verifier waits."""
        chain, length = _chain(state), state.asked.length
        worth = length_worth_waiting_for(length, self._acceptance.overall, pace)
        chain.stop_at(min(length, max(len(chain), worth)))
        state.cut()

    def _observe(self, trunk: _Trunk[StateT], new: Sequence[int]) -> None:
        """Note which drafted tokens were right, and the first that was not; those after it are neither.

        A token that the verifier cut off is judged by the token that the target chose in its place, right or wrong.
        """
        if not new:
            return
        drafted_ids, places = trunk.drafted_ids, trunk.chain.places
        num_right = num_common(drafted_ids, list(new))  # lists, as the drafted ones
        for place in places[:num_right]:
            self._acceptance.observe(bin_of(place.confidence), is_accepted=True)
        if num_right < min(len(drafted_ids), len(new)):
            self._acceptance.observe(bin_of(places[num_right].confidence), is_accepted=False)

    def drop(self, key: SessionKey) -> None:
        """Free a session's branches: its state is no trunk any more."""
        trunk = self._trunks.pop(key, None)
        if trunk is None:
            return
        trunk.state.settle()
        self._pool.trim(trunk.state.block_table, trunk.state.num_slots)
        for branch in trunk.branches.values():
            self._pool.release(branch.block_table)

    def make_room(self, num_blocks: int) -> None:
        """Drop trunks until `num_blocks` blocks are free or no trunk is left: whatever was asked for goes first."""
        while self._trunks and self._pool.num_free_blocks < num_blocks:
            self.drop(next(iter(self._trunks)))

    # --- spare time ---

    def has_work(self) -> bool:
        return any(not trunk.is_computed or trunk.planned or trunk.growing for trunk in self._trunks.values())

    def next_step(self, max_num_tokens: int) -> Step[StateT]:
        """Choose what to compute next, sessions that were answered longest ago first; nobody loses KV for it."""
        step: Step[StateT] = Step()
        for key, trunk in list(self._trunks.items()):
            if trunk.is_computed:
                self._take_further(trunk, step, max_num_tokens)
            elif not self._extend(step, trunk.state, max_num_tokens):
                self.drop(key)
        return step

    def after_step(self) -> None:
        """Choose the outcomes to draft for, where a trunk has just been computed to its end."""
        for trunk in self._trunks.values():
            if trunk.is_computed and trunk.planned is None:
                trunk.state.ask = trunk.ask
                *drafted, last = trunk.chain.places
                trunk.planned = likely_outcomes(drafted, last, self._acceptance, self._num_branches)

    def _take_further(self, trunk: _Trunk[StateT], step: Step[StateT], max_num_tokens: int) -> None:
        """Take each branch one token further, then begin new branches."""
        for branch in trunk.growing:
            if not self._extend(step, branch, max_num_tokens):
                _chain(branch).stop_at(len(_chain(branch)))
        while trunk.planned and step.num_tokens < max_num_tokens:
            outcome = trunk.planned.pop(0)
            if not self._begin(step, trunk, outcome):
                trunk.planned.clear()

    def _extend(self, step: Step[StateT], state: StateT, max_num_tokens: int) -> bool:
        """Put a state into a step that has tokens left; False: the pool has no blocks for it."""
        share = min(state.num_pending, max_num_tokens - step.num_tokens)
        if share < 1:
            return True  # another time
        needed = self._pool.num_blocks_for(state.num_slots_after(share)) - len(state.block_table)
        if needed > self._pool.num_free_blocks:
            return False
        state.block_table.extend(self._pool.allocate(max(0, needed)))
        step.add(state, share)
        return True

    def _begin(self, step: Step[StateT], trunk: _Trunk[StateT], outcome: LikelyOutcome) -> bool:
        """Fork a branch for an outcome; False: the pool has no block left for it."""
        if self._pool.num_free_blocks < 1:
            return False
        block_table, block_size = trunk.state.block_table, self._pool.block_size
        committed = (*trunk.drafted_ids[: outcome.num_accepted], outcome.next_token_id)
        tokens = [*trunk.ask.token_ids, *committed]
        length = min(trunk.ask.length, self._max_model_len - len(tokens) + 1)
        ask = replace(trunk.ask, token_ids=tokens, length=length)
        branch = trunk.state.fork(ask, outcome.num_accepted, self.start(ask))
        num_whole = branch.num_slots // block_size
        shared = block_table[:num_whole]
        self._pool.share(shared)
        own = self._pool.allocate(1)
        if branch.num_slots % block_size:
            step.copy_sources.append(block_table[num_whole])
            step.copy_targets += own
        branch.block_table = shared + own
        trunk.branches[committed] = branch
        step.add(branch, branch.num_pending)
        return True

    # --- books ---

    def branches(self) -> Iterator[StateT]:
        for trunk in self._trunks.values():
            yield from trunk.branches.values()

    def check_integrity(self, states: Collection[StateT]) -> None:
        """Raise `AssertionError` where a trunk contradicts itself or outlives its session."""
        known = set(map(id, states))
        for trunk in self._trunks.values():
            assert id(trunk.state) in known, "a trunk of a session that is gone"
            assert trunk.state.growth is trunk.chain, "a trunk whose draft is another"
            assert trunk.is_computed == (trunk.planned is not None), "outcomes of a trunk that is not computed"
            assert trunk.is_computed or not trunk.branches, "branches of a trunk that is not computed"
            assert len(trunk.branches) + len(trunk.planned or ()) <= self._num_branches, "more branches than allowed"
            for committed, branch in trunk.branches.items():
                expected = [*trunk.ask.token_ids, *committed]
                assert branch.asked.token_ids == expected, "a branch of another trunk, or of another outcome"


def _chain(state: ForkableState) -> BranchingChain:
    assert isinstance(state.growth, BranchingChain)
    return state.growth
