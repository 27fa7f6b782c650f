"""Draft with a causal language model over its own paged KV cache: chains of tokens for many sessions at once.

There are no phases. A session's `num_computed` chases committed + drafted tokens; one step is one packed forward in
which one session catches up with a long prefix while another draws its next draft token.

tokens   |<- committed ->|<- drafted so far ->|
KV       |<- num_computed ->|                       all computed but the last one: its logits draw the next
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from outrider.drafter_service.draft_sampler import draft_tokens
from outrider.drafter_service.engine import Ask, DraftResult
from outrider.drafter_service.sessions import SessionKey
from outrider.verifier_service.batch import ScheduledBatch
from outrider.verifier_service.drafting import DraftNeeds, SparseRow
from outrider.verifier_service.engine import Runner
from outrider.verifier_service.kv_cache import BlockPool

OLDEST_SHARE = 4  # the oldest ask gets up to 1/4 of the token budget before the others


@dataclass(slots=True)
class _State:
    """One session's KV and the draft in the making."""

    block_table: list[int] = field(default_factory=list)
    cached_ids: list[int] = field(default_factory=list)  # the tokens whose KV is in the blocks
    ask_id: int | None = None
    tokens: list[int] = field(default_factory=list)  # committed, then drafted
    num_committed: int = 0
    rows: list[SparseRow | None] = field(default_factory=list)  # one per drafted token

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - len(self.cached_ids)


class ModelDrafter:
    """A `Drafter` over a model runner; KV of drafted tokens that the target accepts is kept."""

    def __init__(self, runner: Runner, rng: torch.Generator, *, vocab_size: int | None = None, top_n: int = 32) -> None:
        """Draw drafts from the first `vocab_size` ids (the target's vocabulary); None: from all the model has."""
        self._runner = runner
        self._rng = rng
        self._draft_vocab_size = runner.vocab_size if vocab_size is None else vocab_size
        self._top_n = top_n
        self._pool = BlockPool(runner.num_blocks, runner.block_size, enable_prefix_caching=False)
        self._states: dict[SessionKey, _State] = {}  # least recently asked first

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    @property
    def needs(self) -> DraftNeeds:
        return DraftNeeds()

    @property
    def max_model_len(self) -> int:
        return self._runner.max_model_len

    def draft(self, asks: Sequence[Ask], *, max_num_tokens: int) -> list[DraftResult]:
        """Run one packed forward over the asks and draw one token for each that has caught up.

        An ask that does not fit even with the KV pool to itself is answered by an empty draft.
        """
        states = [self._state_of(ask) for ask in asks]
        shares = share_budget([state.num_pending for state in states], max_num_tokens)
        chunks: list[tuple[Ask, _State, int]] = []
        for index, (ask, state, share) in enumerate(zip(asks, states, shares, strict=True)):
            if share and self._reserve(state, share, asked=states, younger=states[index + 1 :]):
                chunks.append((ask, state, share))
            elif index == 0:
                return [self._give_up(ask)]
        self._execute(chunks)
        return [self._complete(ask, state) for ask, state, _ in chunks if _num_drafted(state) == ask.length]

    def release(self, key: SessionKey) -> None:
        state = self._states.pop(key, None)
        if state is not None:
            self._pool.release(state.block_table)

    def check_integrity(self, keys: Collection[SessionKey]) -> None:
        assert self._states.keys() <= set(keys), "KV of a session that is gone"
        self._pool.check_integrity([state.block_table for state in self._states.values()])
        for state in self._states.values():
            assert len(state.block_table) == self._pool.num_blocks_for(len(state.cached_ids)), "blocks without tokens"
            assert state.cached_ids == state.tokens[: len(state.cached_ids)], "KV of other tokens"

    # --- state ---

    def _state_of(self, ask: Ask) -> _State:
        """Return the session's state, rolled back to what its new ask has in common with its KV."""
        state = self._states.setdefault(ask.key, _State())
        if state.ask_id == ask.ask_id:
            return state
        self._states[ask.key] = self._states.pop(ask.key)  # most recently asked
        state.ask_id = ask.ask_id
        state.tokens = list(ask.token_ids)
        state.num_committed = len(state.tokens)
        state.rows = []
        # the last token is computed (again): its logits are wanted
        self._roll_back(state, min(num_common(state.cached_ids, state.tokens), len(state.tokens) - 1))
        return state

    def _roll_back(self, state: _State, num_kept: int) -> None:
        del state.cached_ids[num_kept:]
        num_blocks = self._pool.num_blocks_for(num_kept)
        self._pool.release(state.block_table[num_blocks:])
        del state.block_table[num_blocks:]

    def _reserve(self, state: _State, share: int, *, asked: Sequence[_State], younger: Sequence[_State]) -> bool:
        """Give a session blocks for `share` more tokens, at others' cost if need be; False: it has to wait.

        Those nobody asks for give up their KV first, least recently asked first; then the youngest asks, which are
        not scheduled yet. What is taken is computed again when it is needed.
        """
        needed = self._pool.num_blocks_for(len(state.cached_ids) + share) - len(state.block_table)
        victims = itertools.chain(self._idle(asked), reversed(younger))
        while needed > self._pool.num_free_blocks:
            victim = next(victims, None)
            if victim is None:
                return False
            self._roll_back(victim, 0)
        state.block_table.extend(self._pool.allocate(max(0, needed)))
        return True

    def _idle(self, asked: Sequence[_State]) -> Iterator[_State]:
        in_use = {id(state) for state in asked}
        yield from (state for state in self._states.values() if id(state) not in in_use)

    # --- the step ---

    def _execute(self, chunks: Sequence[tuple[Ask, _State, int]]) -> None:
        batch = _pack([(state, share) for _, state, share in chunks], self._pool.block_size)
        logits = self._runner.execute(batch)  # [num_drawing, vocab_size]
        for _, state, share in chunks:
            begin = len(state.cached_ids)
            state.cached_ids.extend(state.tokens[begin : begin + share])
        drawing = [(ask, state) for ask, state, _ in chunks if state.num_pending == 0]
        if not drawing:
            return
        drawn = draft_tokens(
            logits,
            [ask.sampling for ask, _ in drawing],
            [len(state.tokens) for _, state in drawing],
            self._rng,
            vocab_size=self._draft_vocab_size,
            top_n=self._top_n,
        )
        for (_, state), (token_id, row) in zip(drawing, drawn, strict=True):
            state.tokens.append(token_id)
            state.rows.append(row)

    def _complete(self, ask: Ask, state: _State) -> DraftResult:
        state.ask_id = None
        rows = tuple(row for row in state.rows if row is not None)
        assert len(rows) in (0, len(state.rows)), "a draft is drawn at random at every position or at none"
        return DraftResult(
            key=ask.key,
            ask_id=ask.ask_id,
            token_ids=tuple(state.tokens[state.num_committed :]),
            draft_probs=rows or None,
        )

    def _give_up(self, ask: Ask) -> DraftResult:
        """Answer an ask whose KV does not fit even when it has the pool to itself: there is no draft."""
        self.release(ask.key)
        return DraftResult(key=ask.key, ask_id=ask.ask_id, token_ids=())


def _num_drafted(state: _State) -> int:
    return len(state.tokens) - state.num_committed


def share_budget(num_pending: Sequence[int], max_num_tokens: int) -> list[int]:
    """Divide a step's tokens among asks (oldest first): shortest first, so that drafting never waits for a prefill.

    The oldest ask gets its part before the others, so that a stream of short ones cannot starve it.
    """
    shares = [0] * len(num_pending)
    shares[0] = min(num_pending[0], max(1, max_num_tokens // OLDEST_SHARE))
    budget = max_num_tokens - shares[0]
    for index in sorted(range(len(num_pending)), key=num_pending.__getitem__):
        more = min(num_pending[index] - shares[index], budget)
        shares[index] += more
        budget -= more
    return shares


def num_common(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the common prefix of two lists."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while high - low > 1:  # left[:low] == right[:low], left[:high] != right[:high]
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _pack(chunks: Sequence[tuple[_State, int]], block_size: int) -> ScheduledBatch:
    """Lay the next `share` tokens of each session side by side; logits are wanted where one catches up."""
    token_ids: list[int] = []
    positions: list[int] = []
    slot_mapping: list[int] = []
    logits_indices: list[int] = []
    for state, share in chunks:
        begin = len(state.cached_ids)
        span = range(begin, begin + share)
        token_ids += state.tokens[begin : begin + share]
        positions += span
        slot_mapping += [state.block_table[i // block_size] * block_size + i % block_size for i in span]
        if share == state.num_pending:
            logits_indices.append(len(token_ids) - 1)
    return ScheduledBatch(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slot_mapping,
        query_lengths=[share for _, share in chunks],
        context_lengths=[len(state.cached_ids) + share for state, share in chunks],
        block_tables=[list(state.block_table) for state, _ in chunks],
        logits_indices=logits_indices,
    )
