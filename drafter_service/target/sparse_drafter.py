"""Draft with the whole target over part of its KV (TriForce, Sun et al. 2024; MagicDec, Chen et al. 2024).

With a long context most of a decode step's time goes into reading the KV. The draft reads the first block (the
attention sink of StreamingLLM), the latest ones, and those whose keys are most like the latest token's; verification
reads all of it.
"""

from __future__ import annotations

import torch

from outrider.drafter_service.engine.tree_growth import DEFAULT_TREES, TreeConfig
from outrider.drafter_service.target.self_drafter import SelfDrafter
from outrider.drafter_service.target.target_view import TargetView
from outrider.verifier_service.messages.batch import slot_of
from outrider.verifier_service.messages.request import Request


def sparse_drafter(
    view: TargetView, rng: torch.Generator, *, num_blocks: int, trees: TreeConfig = DEFAULT_TREES
) -> SelfDrafter:
    """Attend to `num_blocks` whole KV blocks, and to the tokens that do not fill one yet."""

    def choose(view: TargetView, request: Request) -> list[int]:
        return choose_blocks(view, request, num_blocks)

    return SelfDrafter(view, rng, choose_blocks=choose, trees=trees)


def choose_blocks(view: TargetView, request: Request, num_blocks: int) -> list[int]:
    """Return the first, the latest and the most similar of a request's whole blocks, in their order."""
    size = view.block_size
    whole = request.block_table[: request.num_computed_tokens // size]
    if len(whole) <= num_blocks:
        return whole
    num_latest = max(1, num_blocks // 2)
    first, middle, latest = whole[:1], whole[1:-num_latest], whole[-num_latest:]
    last = request.num_computed_tokens - 1
    slot = slot_of(request.block_table, last, size)
    num_similar = num_blocks - num_latest - 1
    similar = view.block_similarity(middle, slot).topk(num_similar).indices.sort().values.tolist()
    return [*first, *(middle[index] for index in similar), *latest]
