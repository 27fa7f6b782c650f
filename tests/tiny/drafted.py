"""Draft tokens chosen from logits, one per row, as the drafters choose them."""

from __future__ import annotations

from typing import Any

from outrider.drafter_service.engine.draft_sampler import launch_children, read_children
from outrider.verifier_service.messages.draft import SparseRow


def draft_tokens(*arguments: Any, top_n: int = 32, **options: Any) -> list[tuple[int, SparseRow | None]]:
    """Return each row's token, with the distribution it was drawn from where it was drawn at random.

    The arguments are those of `launch_children`.
    """
    found = launch_children(*arguments, num_children=1, sampled=True, top_n=top_n, **options)
    return [(children.token_ids[0], children.row) for children in read_children(found)]
