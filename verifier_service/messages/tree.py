"""Draft trees as lists of parents, and paths in them.

`parents[i]` is the index of token i's parent, or ROOT for the last committed token. A token comes after its parent, and
siblings in the order in which they are tried, so one pass from the front walks down the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.verifier_service.messages.draft import ROOT, Draft, SparseRow


@dataclass(frozen=True, slots=True)
class VerifiedTokens:
    """The tokens of one verification: the draft tokens along `path`, then one recovered or bonus token."""

    token_ids: list[int]  # one more than `path`
    path: tuple[int, ...]  # indices of the accepted draft tokens, root first

    @classmethod
    def along(cls, draft: Draft | None, path: Sequence[int], last_token_id: int) -> VerifiedTokens:
        accepted = () if draft is None else (draft.token_ids[index] for index in path)
        return cls([*accepted, last_token_id], tuple(path))


def chain_parents(num_tokens: int) -> tuple[int, ...]:
    """Return the parents of a chain: every token follows the one before."""
    return tuple(range(ROOT, num_tokens - 1))


def is_chain(parents: Sequence[int]) -> bool:
    """Return whether every token's parent is the one before; True for an empty tree."""
    return tuple(parents) == chain_parents(len(parents))


def parents_of(draft: Draft | None) -> tuple[int, ...]:
    """Return a draft's parents, also for a chain."""
    if draft is None:
        return ()
    return chain_parents(len(draft.token_ids)) if draft.parents is None else draft.parents


def depths(parents: Sequence[int]) -> list[int]:
    """Return each token's depth: 0 for a child of ROOT."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent == ROOT else found[parent] + 1)
    return found


def ancestors(parents: Sequence[int], index: int) -> list[int]:
    """Return a token's ancestors, root first, without itself."""
    above: list[int] = []
    while (index := parents[index]) != ROOT:
        above.append(index)
    return above[::-1]


def rows_by_parent(draft: Draft) -> dict[int, SparseRow]:
    """Return, by parent, the row that its children were drawn from; empty for point masses."""
    if draft.draft_probs is None:
        return {}
    return dict(zip(dict.fromkeys(parents_of(draft)), draft.draft_probs, strict=True))
