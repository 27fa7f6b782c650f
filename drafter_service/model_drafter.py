"""Draft with a causal language model over its own paged KV cache: chains and trees for many sessions at once.

There are no phases. A session's `num_computed` chases committed + drafted tokens; one step is one packed forward in
which one session catches up with a long prefix while others grow their drafts by one level.

tokens   |<- committed ->|<- stem of the draft ->|
KV       |<- num_computed ->|<- of nodes beyond the stem: for one forward ->|

A draft that has not forked is a stem: its tokens are computed once and keep their KV if they are accepted. Nodes beyond
a fork are computed under a tree mask, in each level's forward again, so that nothing of them outlives it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from outrider.drafter_service.draft_batch import Chunk, DraftState, chunk_of, pack
from outrider.drafter_service.draft_sampler import Children, draft_children
from outrider.drafter_service.draft_tree import DraftTree
from outrider.drafter_service.engine import Ask, DraftResult
from outrider.drafter_service.sessions import SessionKey
from outrider.drafter_service.tree_growth import DEFAULT_TREES, TreeConfig, start_growth
from outrider.verifier_service.drafting import ROOT, DraftNeeds
from outrider.verifier_service.engine import Runner
from outrider.verifier_service.kv_cache import BlockPool

OLDEST_SHARE = 4  # the oldest ask gets up to 1/4 of the token budget before the others


class ModelDrafter:
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
    ) -> None:
        """Draw drafts from the first `vocab_size` ids (the target's vocabulary); None: from all the model has.

        `first_position` says where in the target's sequence an ask's draft begins, which the noise of seeded requests
        depends on; None: after the ask's tokens, which are the target's.
        """
        self._runner = runner
        self._rng = rng
        self._draft_vocab_size = runner.vocab_size if vocab_size is None else vocab_size
        self._top_n = top_n
        self._trees = trees
        self._first_position = first_position or (lambda ask: len(ask.token_ids))
        self._pool = BlockPool(runner.num_blocks, runner.block_size, enable_prefix_caching=False)
        self._states: dict[SessionKey, DraftState] = {}  # least recently asked first

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._runner.max_model_len

    @property
    def needs(self) -> DraftNeeds:
        return DraftNeeds()

    def draft(self, asks: Sequence[Ask], *, max_num_tokens: int) -> list[DraftResult]:
        """Run one packed forward over the asks and grow the draft of each that has caught up by one level.

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
        self._execute(chunks)
        return [self._complete(chunk.state) for chunk in chunks if not chunk.growth.frontier]

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
            assert (state.ask is None) == (state.growth is None), "a draft that nobody asked for"
            assert state.growth is not None or not state.nodes, "nodes without a tree"

    # --- state ---

    def _state_of(self, ask: Ask, max_num_tokens: int) -> DraftState:
        """Return the session's state, rolled back to what its new ask has in common with its KV."""
        state = self._states.setdefault(ask.key, DraftState())
        if state.ask is not None and state.ask.ask_id == ask.ask_id:
            return state
        self._states[ask.key] = self._states.pop(ask.key)  # most recently asked
        state.ask = ask
        state.tokens = list(ask.token_ids)
        state.num_committed = len(state.tokens)
        # nodes beside each other are computed in one step
        state.growth = start_growth(ask, self._trees, vocab_size=self._draft_vocab_size, max_nodes=max_num_tokens)
        state.follow_growth()
        # the last token is computed (again): its logits are wanted
        self._roll_back(state, min(num_common(state.cached_ids, state.tokens), len(state.tokens) - 1))
        return state

    def _roll_back(self, state: DraftState, num_kept: int) -> None:
        del state.cached_ids[num_kept:]
        num_blocks = self._pool.num_blocks_for(num_kept)
        self._pool.release(state.block_table[num_blocks:])
        del state.block_table[num_blocks:]

    def _reserve(
        self, state: DraftState, share: int, *, asked: Sequence[DraftState], younger: Sequence[DraftState]
    ) -> bool:
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

    def _idle(self, asked: Sequence[DraftState]) -> Iterator[DraftState]:
        in_use = {id(state) for state in asked}
        yield from (state for state in self._states.values() if id(state) not in in_use)

    # --- the step ---

    def _execute(self, chunks: Sequence[Chunk]) -> None:
        logits = self._runner.execute(pack(chunks, self._pool.block_size))  # [num_frontier_nodes, vocab_size]
        for chunk in chunks:
            cached_ids = chunk.state.cached_ids
            cached_ids.extend(chunk.state.tokens[len(cached_ids) :][: chunk.num_tokens])
            self._roll_back(chunk.state, len(cached_ids))  # the KV of nodes beyond the stem
        growing = [chunk for chunk in chunks if chunk.is_whole]
        children = iter(self._children(growing, logits))
        for chunk in growing:
            chunk.growth.grow([next(children) for _ in chunk.growth.frontier])
            chunk.state.follow_growth()

    def _children(self, growing: Sequence[Chunk], logits: torch.Tensor) -> list[Children]:
        """Choose children for every node of every frontier, one per row of the logits."""
        wanted = [(chunk, node) for chunk in growing for node in chunk.growth.frontier]
        found: dict[int, Children] = {}
        for is_drawn in (True, False):
            rows = [row for row, (chunk, _) in enumerate(wanted) if chunk.growth.is_drawn == is_drawn]
            if not rows:
                continue
            some = [wanted[row] for row in rows]
            children = draft_children(
                logits if len(rows) == len(wanted) else logits[torch.tensor(rows, device=logits.device)],
                [chunk.ask.sampling for chunk, _ in some],
                [self._first_position(chunk.ask) + _child_depth(chunk.growth.tree, node) for chunk, node in some],
                self._rng,
                vocab_size=self._draft_vocab_size,
                num_children=max(chunk.growth.num_children for chunk, _ in some),
                top_n=self._top_n,
                sampled=is_drawn,
            )
            found |= zip(rows, children, strict=True)
        return [found[row] for row in range(len(wanted))]

    def _complete(self, state: DraftState) -> DraftResult:
        ask, growth = state.ask, state.draft
        assert ask is not None
        state.ask, state.growth, state.nodes = None, None, []
        chosen = growth.chosen()
        return DraftResult(
            key=ask.key,
            ask_id=ask.ask_id,
            token_ids=chosen.token_ids,
            draft_probs=growth.rows() or None,
            parents=chosen.parents if ask.max_nodes else None,
            confidences=chosen.confidences,
        )

    def _give_up(self, state: DraftState) -> DraftResult:
        """Answer an ask whose KV does not fit even when it has the pool to itself.

        A tree stops at whole levels, for want of memory: nothing that was drawn is looked at, so it may be verified.
        """
        ask = state.ask
        assert ask is not None
        self.release(ask.key)
        return self._complete(state) if ask.max_nodes else DraftResult(key=ask.key, ask_id=ask.ask_id, token_ids=())


def _child_depth(tree: DraftTree, node: int) -> int:
    return 0 if node == ROOT else tree.depths[node] + 1


def share_budget(num_pending: Sequence[int], max_num_tokens: int, num_together: Sequence[int] = ()) -> list[int]:
    """Divide a step's tokens among asks (oldest first): shortest first, so that drafting never waits for a prefill.

    The oldest ask gets its part before the others, so that a stream of short ones cannot starve it. The last
    `num_together` tokens of an ask (at most `max_num_tokens`; none: all zero) are computed in one step or not yet.
    """
    together = num_together or [0] * len(num_pending)

    def usable(index: int, share: int) -> int:
        share = min(share, num_pending[index])
        return share if share == num_pending[index] else min(share, num_pending[index] - together[index])

    shares = [0] * len(num_pending)
    shares[0] = usable(0, max(1, max_num_tokens // OLDEST_SHARE)) or num_pending[0]
    budget = max_num_tokens - shares[0]
    for index in sorted(range(len(num_pending)), key=num_pending.__getitem__):
        more = usable(index, shares[index] + budget) - shares[index]
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
