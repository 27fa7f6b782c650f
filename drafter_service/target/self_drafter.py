"""Let the target draft for itself with part of its layers, or part of its KV: cheaper than verification.

A draft reads the request's own KV in place and writes its own into scratch blocks, which end with the draft:

table    |<- whole blocks: the request's own, or some of them ->|<- scratch ------------------------------>|
tokens   |<- committed and computed ------------------------------- copied | the last one |<- drafted ->|

Early exit shares the KV of the first layers: verification computed the same for committed tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from outrider.drafter_service.engine.drafter import Ask, SessionKey
from outrider.drafter_service.engine.tree_growth import (
    DEFAULT_TREES,
    DraftRules,
    Growing,
    Growth,
    Levels,
    TreeConfig,
    answer_of,
    nodes_to_compute,
    start_growth,
    stem_length,
)
from outrider.drafter_service.target.scratch_blocks import scratch_blocks_per_draft
from outrider.drafter_service.target.target_view import TargetView
from outrider.verifier_service.messages.batch import ScheduledBatch, slots_of
from outrider.verifier_service.messages.draft import ROOT, Draft, DraftNeeds
from outrider.verifier_service.messages.request import Request

# chooses which of a request's whole blocks a draft attends to, in their order
BlockChoice = Callable[[TargetView, Request], list[int]]


@dataclass(slots=True, kw_only=True)
class _Draft:
    """One ask's draft in the making."""

    ask: Ask
    growth: Growth
    block_table: list[int]  # shared blocks, then scratch
    num_prefix_tokens: int  # in the table before the last committed token
    copy: tuple[int, int] | None  # of the request's last, partly filled block
    num_kept: int = 0  # tokens from the last committed one on whose KV stays as it is

    def query(self) -> tuple[list[int], list[int]]:
        """Return the nodes to compute next, -1 for the last committed token, and their parents among them."""
        tree, stem = self.growth.tree, max(0, self.num_kept - 1)
        nodes = nodes_to_compute(tree, [node for node in self.growth.frontier if node != ROOT], stem)
        place = {node: index for index, node in enumerate(nodes)}
        parents = [place.get(tree.parents[node], ROOT) for node in nodes]
        return ([] if self.num_kept else [ROOT]) + nodes, parents


class SelfDrafter:
    """A `Drafter` for the verifier's own process; it keeps nothing between two asks."""

    def __init__(
        self,
        view: TargetView,
        rng: torch.Generator,
        *,
        num_layers: int | None = None,
        choose_blocks: BlockChoice | None = None,
        trees: TreeConfig = DEFAULT_TREES,
        top_n: int = 32,
    ) -> None:
        """Leave after `num_layers` (None: run all) and attend to the blocks of `choose_blocks` (None: to all)."""
        self.vocab_size, self.max_model_len = view.vocab_size, view.max_model_len
        self.needs = DraftNeeds()
        self._view = view
        self._num_layers = num_layers
        self._choose_blocks = choose_blocks or _all_blocks
        self._rules = DraftRules(rng=rng, vocab_size=view.vocab_size, top_n=top_n, trees=trees)

    def draft(self, asks: Sequence[Ask], *, max_num_tokens: int) -> list[Draft]:
        """Draft for as many asks, oldest first, as there is scratch for, from the first token to the last.

        A request that holds no KV now (it was preempted, or has gone) is answered by an empty draft.
        """
        drafts, unable = self._begin(asks)
        growing = drafts
        while growing := [draft for draft in growing if draft.growth.frontier]:
            self._grow(growing)
        return unable + [answer_of(draft.ask, draft.growth) for draft in drafts]

    def release(self, key: SessionKey) -> None:
        """Nothing is kept."""

    def check_integrity(self, keys: Collection[SessionKey]) -> None:
        """Nothing is kept."""

    def _begin(self, asks: Sequence[Ask]) -> tuple[list[_Draft], list[Draft]]:
        drafts: list[_Draft] = []
        unable: list[Draft] = []
        scratch = iter(self._view.scratch_blocks)
        num_left = len(self._view.scratch_blocks)
        for ask in asks:
            request = self._view.request(ask.key.request_id)
            if request is None or request.num_computed_tokens != len(ask.token_ids) - 1:
                unable.append(ask.answer())
                continue
            num_scratch = scratch_blocks_per_draft(max(ask.length, ask.max_nodes), self._view.block_size)
            if num_scratch > num_left:
                break
            num_left -= num_scratch
            drafts.append(self._prepare(ask, request, [next(scratch) for _ in range(num_scratch)]))
        assert drafts or unable, "a draft longer than the scratch blocks were made for"
        return drafts, unable

    def _prepare(self, ask: Ask, request: Request, scratch: list[int]) -> _Draft:
        size = self._view.block_size
        num_whole, num_partial = divmod(request.num_computed_tokens, size)
        shared = self._choose_blocks(self._view, request)
        return _Draft(
            ask=ask,
            growth=start_growth(ask, self._rules.trees, vocab_size=self.vocab_size),
            block_table=[*shared, *scratch],
            num_prefix_tokens=len(shared) * size + num_partial,
            copy=(request.block_table[num_whole], scratch[0]) if num_partial else None,
        )

    def _grow(self, drafts: Sequence[_Draft]) -> None:
        """Run one forward over all drafts and give every node of their frontiers its children."""
        logits = self._view.execute(self._batch(drafts))  # [frontier nodes of all drafts, vocab_size]
        for draft in drafts:
            draft.num_kept = 1 + stem_length(draft.growth.tree)
        growing = [Growing(draft.ask, draft.growth, len(draft.ask.token_ids)) for draft in drafts]
        level = Levels(self._rules)
        level.launch(growing, logits)
        level.read()

    def _batch(self, drafts: Sequence[_Draft]) -> ScheduledBatch:
        batch = ScheduledBatch(
            token_ids=[],
            positions=[],
            slot_mapping=[],
            query_lengths=[],
            context_lengths=[],
            block_tables=[],
            logits_indices=[],
            num_layers=self._num_layers,
        )
        for draft in drafts:
            self._append(batch, draft)
        return batch

    def _append(self, batch: ScheduledBatch, draft: _Draft) -> None:
        tree, tokens, size = draft.growth.tree, draft.ask.token_ids, self._view.block_size
        nodes, parents = draft.query()
        first_token, first_place = len(batch.token_ids), draft.num_prefix_tokens + draft.num_kept
        batch.token_ids.extend(tokens[-1] if node == ROOT else tree.token_ids[node] for node in nodes)
        batch.positions.extend(len(tokens) - 1 if node == ROOT else len(tokens) + tree.depths[node] for node in nodes)
        places = range(first_place, first_place + len(nodes))
        batch.slot_mapping.extend(slots_of(draft.block_table, places, size))
        batch.query_lengths.append(len(nodes))
        batch.context_lengths.append(places.stop)
        batch.block_tables.append(draft.block_table[: -(-places.stop // size)])
        is_chain = parents == list(range(ROOT, len(parents) - 1))
        batch.tree_parents.append([] if is_chain else parents)
        batch.logits_indices.extend(first_token + nodes.index(node) for node in draft.growth.frontier)
        if draft.copy is not None:
            batch.copy_sources.append(draft.copy[0])
            batch.copy_targets.append(draft.copy[1])
            draft.copy = None


def _all_blocks(view: TargetView, request: Request) -> list[int]:
    return request.block_table[: request.num_computed_tokens // view.block_size]
