"""Draft with a head over the target's hidden states: EAGLE-1, EAGLE-3 and MTP, chains and trees.

The head computes pairs (state of token i, token i+1) at position i. Where the target has given its states they are
used, so after each verification the KV of the committed tokens is the target's truth; beyond them the head goes on from
its own states, and the KV of those pairs is scratch that ends with the draft. A session whose first states are gone
(marked by NaN) begins after the gap: its positions stay absolute and its KV holds what there is.

Running ahead, the head's own states stand for those of the tokens that are being verified. What was prepared answers at
once, and the target's states, which come with the ask that it answers, are taken in afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

import torch

from outrider.drafter_service.engine.ahead_drafter import AheadDrafter
from outrider.drafter_service.engine.draft_batch import OpenToken, pack_open
from outrider.drafter_service.engine.draft_sampler import ReadBack, select_rows
from outrider.drafter_service.engine.engine import Ask, DraftResult
from outrider.drafter_service.engine.kv_budget import num_common, reserve, share_budget
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
from outrider.drafter_service.head_drafters.head_batch import HeadChunk, HeadState, pack_pairs
from outrider.drafter_service.head_drafters.head_runner import HeadRows, HeadRunner
from outrider.verifier_service.gpu.transfers import CopyBack
from outrider.verifier_service.messages.draft import ROOT, DraftNeeds


class EagleDrafter(AheadDrafter[HeadState]):
    """A `Drafter` over a head; many sessions in each forward."""

    def __init__(
        self,
        runner: HeadRunner,
        rng: torch.Generator,
        *,
        vocab_size: int | None = None,
        top_n: int = 32,
        trees: TreeConfig = DEFAULT_TREES,
        num_ahead_branches: int = 0,
        read_back: ReadBack = CopyBack,
    ) -> None:
        """Draw drafts from the first `vocab_size` ids (the target's vocabulary); None: from all the head has.

        While a chain is verified, drafts are made for `num_ahead_branches` of its outcomes (see `speculation_cache`).
        `read_back` waits for what lies where the runner's logits are.
        """
        super().__init__(
            num_blocks=runner.num_blocks,
            block_size=runner.block_size,
            max_model_len=runner.max_model_len,
            num_ahead_branches=num_ahead_branches,
        )
        self.vocab_size, self.max_model_len = runner.vocab_size, runner.max_model_len
        self.needs = DraftNeeds(taps=runner.heads.first.taps)
        self.graph_counts = runner.graph_counts
        self._runner = runner
        self._rng = rng
        self._draft_vocab_size = runner.vocab_size if vocab_size is None else vocab_size
        self._top_n, self._trees, self._read_back = top_n, trees, read_back

    def draft(self, asks: Sequence[Ask], *, max_num_tokens: int) -> list[DraftResult]:
        """Run one forward (one for each parameter set in use) and take every draft one token or level further.

        Where all of them draft chains with one parameter set, these grow to their end, as far as the KV pool has room.

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
        go_on = len(chunks) == len(states) and all(state.draft.chain_left for state in states)
        self._execute(chunks, AheadStep(), asked=states if go_on else ())
        return [self._complete(chunk.state) for chunk in chunks if not chunk.state.draft.frontier]

    def check_integrity(self, keys: Collection[SessionKey]) -> None:
        assert self._states.keys() <= set(keys), "KV of a session that is gone"
        states = list(self._states.values())
        if self._cache is not None:
            self._cache.check_integrity(self._states.values())
            states += self._cache.branches()
        self._pool.check_integrity([state.block_table for state in states])
        for state in states:
            assert len(state.block_table) == self._pool.num_blocks_for(state.num_slots), "blocks without pairs"
            assert state.first <= state.num_true <= state.num_cached < len(state.tokens), "pairs without tokens"
            assert (state.ask is None) == (state.growth is None), "a draft that nobody asked for"
            is_over = state.growth is None and self._cache is None  # else its outcomes may go on from it
            assert not (is_over and (state.num_stem or state.feedback)), "remains of a draft"

    # --- running ahead ---

    def take(self, ask: Ask, pace: Pace | None) -> DraftResult | None:
        if self._cache is None or not is_watched(ask) or not self._has_states(ask):
            return None
        # whether it is used must not depend on what was drawn: the states of the tokens before it alone decide
        branch = self._cache.take(ask) if self._continues_states(ask) else None
        state = self._state_of(ask, ask.length) if branch is None else self._adopt(ask, branch)
        chain = state.draft
        assert isinstance(chain, WatchedChain)
        chain.stop_at(min(ask.length, max(len(chain), self._cache.worth(ask, pace))))
        # the last token's pair is always yet to be computed: what follows from it is wanted
        state.num_stem = min(state.num_stem, max(0, len(chain) - 1))
        self._trim(state)
        return None if chain.frontier else self._complete(state)

    def run_ahead(self, *, max_num_tokens: int) -> int:
        assert self._cache is not None, "this drafter does not run ahead"
        step = self._cache.next_step(max_num_tokens)
        chunks = [self._chunk(*part) for part in zip(step.states, step.shares, strict=True)]
        self._execute(chunks, step)
        self._cache.after_step()
        return step.num_tokens

    def _continues_states(self, ask: Ask) -> bool:
        """Tell whether an ask brings the states that follow those its session has taken in, as far as any do."""
        assert ask.states is not None
        num_true = self._states[ask.key].num_true
        return num_true >= len(ask.states) or not _is_missing(ask.states, num_true)

    def _adopt(self, ask: Ask, branch: HeadState) -> HeadState:
        """Let a branch go on as its session's own state, with the target's states yet to be taken in."""
        assert ask.states is not None
        branch.num_states = min(len(ask.states), len(ask.token_ids) - 1)
        return super()._adopt(ask, branch)

    # --- state ---

    def _has_states(self, ask: Ask) -> bool:
        """Tell whether the last of the target's states is there, and as wide as the head reads."""
        if ask.states is None or ask.states.shape[1] != self._runner.state_size:
            return False
        num_states = min(len(ask.states), len(ask.token_ids) - 1)
        return num_states >= 1 and not _is_missing(ask.states, num_states - 1)

    def _state_of(self, ask: Ask, max_num_tokens: int) -> HeadState:
        """Return the session's state, rolled back to the pairs of the target's own states that its new ask shares."""
        state = self._states.setdefault(ask.key, HeadState())
        if state.ask is not None and state.ask.ask_id == ask.ask_id:
            return state
        self.forget_outcomes(ask.key)
        self._states[ask.key] = self._states.pop(ask.key)  # most recently asked
        assert ask.states is not None
        tokens = list(ask.token_ids)
        num_states = min(len(ask.states), len(tokens) - 1)
        # the last of the target's states is taken in (again): what follows from it is wanted
        num_kept = min(state.num_true, num_common(state.tokens, tokens) - 1, num_states - 1)
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
        elif self._cache is not None and is_watched(ask):
            return self._cache.start(ask)
        # nodes beside each other are computed in one step
        return start_growth(ask, self._trees, vocab_size=self._draft_vocab_size, max_nodes=max_num_tokens)

    def _roll_back(self, state: HeadState, num_kept: int) -> None:
        """Keep the KV of the pairs before `num_kept`; what was drafted is computed again where it is needed."""
        state.num_true, state.num_cached, state.num_stem = num_kept, num_kept, 0
        self._trim(state)

    def _trim(self, state: HeadState) -> None:
        self._pool.trim(state.block_table, state.num_slots)

    def _schedule(self, states: Sequence[HeadState], max_num_tokens: int) -> list[HeadChunk]:
        """Share the step's tokens and the KV pool among the sessions; nothing where the oldest does not fit."""
        num_drafted = [len(state.next_nodes()) for state in states]
        shares = share_budget([state.num_pending for state in states], max_num_tokens, num_drafted)
        chunks: list[HeadChunk] = []
        for index, (state, share) in enumerate(zip(states, shares, strict=True)):
            if num_drafted[index] and state.is_catching_up:
                continue  # an older ask has just taken its KV
            if share and self._reserve(state, share, asked=states, younger=states[index + 1 :]):
                chunks.append(self._chunk(state, share))
            elif index == 0:
                return []
        return chunks

    def _chunk(self, state: HeadState, share: int) -> HeadChunk:
        nodes = state.next_nodes()
        draft_position = state.draft.tree.depths[nodes[-1]] + 1 if nodes else 0
        set_index = self._runner.heads.set_index(draft_position)
        return HeadChunk(state=state, num_tokens=share, nodes=nodes, set_index=set_index)

    def _reserve(
        self, state: HeadState, share: int, *, asked: Sequence[HeadState], younger: Sequence[HeadState]
    ) -> bool:
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
            give_up=self._begin_again,
        )

    def _begin_again(self, victim: HeadState) -> None:
        """Take a session's KV; what it kept of states that its ask no longer has cannot be computed again."""
        if victim.ask is not None and victim.ask.states is not None:
            victim.first = max(victim.first, _num_missing(victim.ask.states))
        self._roll_back(victim, victim.first)

    # --- the step ---

    def _execute(
        self, chunks: Sequence[HeadChunk], copies: AheadStep[HeadState], asked: Sequence[HeadState] = ()
    ) -> None:
        """Run one forward for each parameter set in use, `copies` before the first; for chains those that follow.

        All is read together. `asked` are those whose chains go on, and that keep their KV.
        """
        levels = Levels(self._rng, vocab_size=self._draft_vocab_size, top_n=self._top_n, read_back=self._read_back)
        growing: list[HeadState] = []
        for set_index in sorted({chunk.set_index for chunk in chunks}):
            of_set = [chunk for chunk in chunks if chunk.set_index == set_index]
            growing += self._execute_set(of_set, set_index, copies, levels)
            copies = AheadStep()
        if len(growing) == len(asked) and len(self._runner.heads) == 1:
            num_following = self._num_following(growing, asked)
            levels.follow(_drafts_of(growing), num_following, partial(self._forward_open, growing))
        else:
            num_following = [0] * len(growing)
        levels.read()
        for state, num_followed in zip(growing, num_following, strict=True):
            state.num_stem += num_followed
            self._trim(state)

    def _execute_set(
        self, chunks: Sequence[HeadChunk], set_index: int, copies: AheadStep[HeadState], levels: Levels
    ) -> list[HeadState]:
        """Run one forward; return the states whose frontiers have their outputs, and were launched as a level."""
        outlets = [chunk.outlets for chunk in chunks]
        batch = pack_pairs(chunks, self._pool.block_size)
        batch = replace(batch, copy_sources=copies.copy_sources, copy_targets=copies.copy_targets)
        self.num_forwards += 1
        rows = self._runner.execute(batch, self._hidden(chunks), set_index)
        feedback = iter(rows.feedback)
        for chunk, nodes in zip(chunks, outlets, strict=True):
            chunk.state.feedback |= {node: next(feedback) for node in nodes}
            chunk.keep()
            self._trim(chunk.state)
        return self._launch(chunks, outlets, rows, levels)

    def _forward_open(
        self, states: Sequence[HeadState], opened: dict[int, int], numbers: torch.Tensor, num_open: int
    ) -> torch.Tensor:
        """Run one forward of the pairs of the states' open tokens; see `OpenForward`."""
        tokens: list[OpenToken] = []
        hidden: list[torch.Tensor] = []
        nodes = {index: len(states[index].draft.tree) + num_open for index in opened}
        for index, token_id in opened.items():
            state, node = states[index], nodes[index]
            place = state.num_slots + num_open
            tokens.append(OpenToken(token_id, state.num_cached + node, state.block_table, place))
            hidden.append(state.feedback[node - 1 if node else ROOT])
        self.num_forwards += 1
        found = self._runner.execute(pack_open(tokens, self._pool.block_size), torch.stack(hidden), chosen=numbers)
        for (index, node), own in zip(nodes.items(), found.feedback, strict=True):
            states[index].feedback[node] = own
        return found.logits

    def _hidden(self, chunks: Sequence[HeadChunk]) -> torch.Tensor:
        """Join the states that the pairs start from: [num_tokens, hidden_size]."""
        given = [chunk.target_states for chunk in chunks if chunk.starts_from_target]
        combined = iter(self._runner.combine(torch.cat(given)).split([len(part) for part in given]) if given else ())
        return torch.cat([next(combined) if chunk.starts_from_target else chunk.own_states for chunk in chunks])

    def _launch(
        self, chunks: Sequence[HeadChunk], outlets: Sequence[list[int]], rows: HeadRows, levels: Levels
    ) -> list[HeadState]:
        """Choose children for every frontier that has its outputs."""
        growing: list[HeadState] = []
        wanted: list[int] = []  # rows
        base = 0
        for chunk, nodes in zip(chunks, outlets, strict=True):
            if nodes == chunk.state.draft.frontier and not chunk.state.is_catching_up:
                growing.append(chunk.state)
                wanted += range(base, base + len(nodes))
            base += len(nodes)
        if growing:
            levels.launch(_drafts_of(growing), select_rows(rows.logits, wanted))
        return growing

    # --- answers ---

    def _complete(self, state: HeadState) -> DraftResult:
        ask, growth = _ask_of(state), state.draft
        state.rest()
        if self._cache is not None and isinstance(growth, WatchedChain):
            self._cache.watch(ask, state, growth)
        if state.growth is None:  # nothing goes on from it
            state.feedback, state.num_stem = {}, 0
            self._trim(state)
        return answer_of(ask, growth)

    def _give_up(self, state: HeadState) -> DraftResult:
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


def _ask_of(state: HeadState) -> Ask:
    assert state.ask is not None, "nothing was asked for"
    return state.ask


def _drafts_of(states: Sequence[HeadState]) -> list[Growing]:
    return [Growing(_ask_of(state), state.draft, len(state.tokens)) for state in states]


def _is_missing(states: torch.Tensor, index: int) -> bool:
    return bool(states[index, 0].isnan())


def _num_missing(states: torch.Tensor) -> int:
    """Count the first tokens whose states the target no longer had; the last one's is there."""
    return int(states[:, 0].isnan().logical_not().nonzero()[0])
