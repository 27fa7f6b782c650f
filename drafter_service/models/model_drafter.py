"""Draft with a causal language model over its own paged KV cache: chains and trees for many sessions at once.

There are no phases. A session's `num_computed` chases committed + drafted tokens; one step is a packed forward in which
one session catches up with a long prefix while others grow their drafts by one level. The chains among these then go on
from level to level where they lie, as open tokens, and are read at their end.

tokens   |<- committed ->|<- stem of the draft ->|
KV       |<- num_computed ->|<- of nodes beyond the stem: for one forward ->|

A draft that has not forked is a stem: its tokens are computed once and keep their KV if they are accepted. Nodes beyond
a fork are computed under a tree mask, in each level's forward again, so that nothing of them outlives it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

import torch

from outrider.drafter_service.engine.ahead_drafter import AheadDrafter
from outrider.drafter_service.engine.draft_batch import Chunk, DraftState, OpenToken, chunk_of, pack, pack_open
from outrider.drafter_service.engine.draft_sampler import ReadBack
from outrider.drafter_service.engine.engine import Ask, DraftResult
from outrider.drafter_service.engine.kv_budget import reserve, share_budget
from outrider.drafter_service.engine.outcomes import Pace
from outrider.drafter_service.engine.sessions import SessionKey
from outrider.drafter_service.engine.speculation_cache import AheadStep, WatchedChain, is_watched
from outrider.drafter_service.engine.tree_growth import (
    DEFAULT_TREES,
    Growing,
    Growth,
    Levels,
    TreeConfig,
    answer_of,
    empty_answer,
    start_growth,
)
from outrider.verifier_service.engine.runners import Runner
from outrider.verifier_service.gpu.transfers import CopyBack
from outrider.verifier_service.messages.draft import DraftNeeds


class ModelDrafter(AheadDrafter[DraftState]):
    """A `Drafter` over a model runner; KV of drafted tokens that the target accepts is kept."""

    def __init__(
        self,
        runner: Runner,
        rng: torch.Generator,
        *,
        vocab_size: int | None = None,
        top_n: int = 32,
        trees: TreeConfig = DEFAULT_TREES,
        first_position: Callable[[Ask], int] | None = None,
        num_ahead_branches: int = 0,
        read_back: ReadBack = CopyBack,
    ) -> None:
        """Draw drafts from the first `vocab_size` ids (the target's vocabulary); None: from all the model has.

        `first_position` says where in the target's sequence an ask's draft begins, which the noise of seeded requests
        depends on; None: after the ask's tokens, which are the target's. While a chain is verified, drafts are made
        for `num_ahead_branches` of its outcomes (see `speculation_cache`); 0: `run_ahead` has nothing to do.
        `read_back` waits for what lies where the runner's logits are.
        """
        super().__init__(
            num_blocks=runner.num_blocks,
            block_size=runner.block_size,
            max_model_len=runner.max_model_len,
            num_ahead_branches=num_ahead_branches,
        )
        self.vocab_size, self.max_model_len = runner.vocab_size, runner.max_model_len
        self.needs = DraftNeeds()
        self._runner = runner
        self._rng = rng
        self._draft_vocab_size = runner.vocab_size if vocab_size is None else vocab_size
        self._top_n = top_n
        self._trees = trees
        self._read_back = read_back
        self._first_position = first_position or (lambda ask: len(ask.token_ids))

    def draft(self, asks: Sequence[Ask], *, max_num_tokens: int) -> list[DraftResult]:
        """Run one packed forward over the asks, and grow the draft of each that has caught up: a tree by one level.

        Where all of them draft chains, these grow to their end, as far as the KV pool has room.

        An ask that does not fit even with the KV pool to itself is answered by what its tree has grown to, or by an
        empty draft.
        """
        states = [self._state_of(ask, max_num_tokens) for ask in asks]
        if complete := [state for state in states if not state.draft.frontier]:  # forced from end to end
            return [self._complete(state) for state in complete]
        num_together = [len(state.nodes) for state in states]
        shares = share_budget([state.num_pending for state in states], max_num_tokens, num_together)
        chunks: list[Chunk] = []
        for index, (state, share) in enumerate(zip(states, shares, strict=True)):
            if share and self._reserve(state, share, asked=states, younger=states[index + 1 :]):
                chunks.append(chunk_of(state, share))
            elif index == 0:
                return [self._give_up(state)]
        go_on = len(chunks) == len(states) and all(chunk.is_whole and chunk.growth.chain_left for chunk in chunks)
        self._execute(chunks, AheadStep(), asked=states if go_on else ())
        return [self._complete(chunk.state) for chunk in chunks if not chunk.growth.frontier]

    def check_integrity(self, keys: Collection[SessionKey]) -> None:
        assert self._states.keys() <= set(keys), "KV of a session that is gone"
        states = list(self._states.values())
        if self._cache is not None:
            self._cache.check_integrity(self._states.values())
            states += self._cache.branches()
        self._pool.check_integrity([state.block_table for state in states])
        for state in states:
            assert len(state.block_table) == self._pool.num_blocks_for(state.num_slots), "blocks without tokens"
            assert state.num_cached <= len(state.tokens), "KV of no tokens"
            assert (state.ask is None) == (state.growth is None), "a draft that nobody asked for"
            assert state.growth is not None or not state.nodes, "nodes without a tree"

    # --- running ahead ---

    def take(self, ask: Ask, pace: Pace | None) -> DraftResult | None:
        """Answer an ask by what was drafted for it in advance, or by nothing where nothing is worth its time.

        None: it is drafted as any other, as far as is worth the time at this pace, from what there is already.
        """
        if self._cache is None or not is_watched(ask):
            return None
        branch = self._cache.take(ask)
        state = self._adopt(ask, branch) if branch is not None else self._state_of(ask, max_num_tokens=ask.length)
        chain = state.draft
        assert isinstance(chain, WatchedChain)
        chain.stop_at(min(ask.length, max(len(chain), self._cache.worth(ask, pace))))
        self._forget_beyond(state, state.num_committed + len(chain))
        return None if chain.frontier else self._complete(state)

    def run_ahead(self, *, max_num_tokens: int) -> int:
        assert self._cache is not None, "this drafter does not run ahead"
        step = self._cache.next_step(max_num_tokens)
        if step.states:
            self._execute([chunk_of(*part) for part in zip(step.states, step.shares, strict=True)], step)
        self._cache.after_step()
        return step.num_tokens

    def _forget_beyond(self, state: DraftState, num_tokens: int) -> None:
        """Cut a draft that was asked for shorter than it is; its last token is always yet to be computed."""
        if num_tokens < len(state.tokens):
            del state.tokens[num_tokens:]
            self._roll_back(state, min(state.num_cached, num_tokens - 1))

    # --- state ---

    def _state_of(self, ask: Ask, max_num_tokens: int) -> DraftState:
        """Return the session's state, rolled back to what its new ask has in common with its KV."""
        state = self._states.setdefault(ask.key, DraftState())
        if state.ask is not None and state.ask.ask_id == ask.ask_id:
            return state
        self.forget_outcomes(ask.key)
        self._states[ask.key] = self._states.pop(ask.key)  # most recently asked
        num_same = state.take(ask)
        state.growth = self._start(ask, max_num_tokens)
        state.follow_growth()
        # the last token is computed (again): its logits are wanted
        self._roll_back(state, min(state.num_cached, num_same, len(state.tokens) - 1))
        return state

    def _start(self, ask: Ask, max_num_tokens: int) -> Growth:
        if self._cache is not None and is_watched(ask):
            return self._cache.start(ask)
        # nodes beside each other are computed in one step
        return start_growth(ask, self._trees, vocab_size=self._draft_vocab_size, max_nodes=max_num_tokens)

    def _roll_back(self, state: DraftState, num_kept: int) -> None:
        state.num_cached = num_kept
        self._pool.trim(state.block_table, num_kept)

    def _reserve(
        self, state: DraftState, share: int, *, asked: Sequence[DraftState], younger: Sequence[DraftState]
    ) -> bool:
        if self._cache is not None:
            self._cache.make_room(self._pool.num_blocks_for(state.num_cached + share) - len(state.block_table))
        return reserve(
            self._pool,
            state,
            state.num_cached + share,
            all_states=self._states.values(),
            asked=asked,
            younger=younger,
            give_up=lambda victim: self._roll_back(victim, 0),
        )

    # --- the step ---

    def _execute(
        self, chunks: Sequence[Chunk], copies: AheadStep[DraftState], asked: Sequence[DraftState] = ()
    ) -> None:
        """Run one forward, and for the chains of the `asked` those that follow; all is read together."""
        batch = pack(chunks, self._pool.block_size)
        batch = replace(batch, copy_sources=copies.copy_sources, copy_targets=copies.copy_targets)
        self.num_forwards += 1
        logits = self._runner.execute(batch)  # [num_frontier_nodes, vocab_size]
        for chunk in chunks:
            self._roll_back(chunk.state, chunk.state.num_cached + chunk.num_tokens)  # the KV of nodes beyond the stem
        whole = [chunk for chunk in chunks if chunk.is_whole]
        levels = Levels(self._rng, vocab_size=self._draft_vocab_size, top_n=self._top_n, read_back=self._read_back)
        growing = [Growing(chunk.ask, chunk.growth, self._first_position(chunk.ask)) for chunk in whole]
        levels.launch(growing, logits)
        states = [chunk.state for chunk in whole]
        num_following = self._num_following(states, asked) if asked else [0] * len(states)
        levels.follow(growing, num_following, partial(self._forward_open, states))
        levels.read()
        for state, num_followed in zip(states, num_following, strict=True):
            state.follow_growth()
            self._roll_back(state, state.num_cached + num_followed)

    def _forward_open(
        self, states: Sequence[DraftState], opened: dict[int, int], numbers: torch.Tensor, num_open: int
    ) -> torch.Tensor:
        """Run one forward of the states' open tokens; see `OpenForward`."""
        tokens: list[OpenToken] = []
        for index, token_id in opened.items():
            place = states[index].num_cached + num_open
            tokens.append(OpenToken(token_id, place, states[index].block_table, place))
        self.num_forwards += 1
        return self._runner.execute(pack_open(tokens, self._pool.block_size), numbers)

    def _complete(self, state: DraftState) -> DraftResult:
        ask, growth = state.ask, state.draft
        assert ask is not None
        state.rest()
        result = answer_of(ask, growth)
        if self._cache is not None and isinstance(growth, WatchedChain):
            self._cache.watch(ask, state, growth)
        return result

    def _give_up(self, state: DraftState) -> DraftResult:
        """Answer an ask whose KV does not fit even when it has the pool to itself.

        A tree stops at whole levels, for want of memory: nothing that was drawn is looked at, so it may be verified.
        """
        ask = state.ask
        assert ask is not None
        self.release(ask.key)
        return self._complete(state) if ask.max_nodes else empty_answer(ask)
