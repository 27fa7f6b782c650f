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


def matching_path(token_ids: Sequence[int], parents: Sequence[int], choices: Sequence[int]) -> tuple[int, ...]:
    """Return the path along the target's own choices: choices[0] after the root, choices[i + 1] after token i."""
    path: list[int] = []
    node = ROOT
    for index, (token_id, parent) in enumerate(zip(token_ids, parents, strict=True)):
        if parent == node and token_id == choices[node + 1]:
            path.append(index)
            node = index
    return tuple(path)


def longest_path(parents: Sequence[int], is_right: Sequence[bool]) -> tuple[int, ...]:
    """Return the longest path from the root over tokens with `is_right`; the first of several."""
    lengths: list[int] = []  # of the path that ends in each token; 0: a token on it is wrong
    for parent, right in zip(parents, is_right, strict=True):
        above = 0 if parent == ROOT else lengths[parent]
        lengths.append(above + 1 if right and (parent == ROOT or above) else 0)
    if not any(lengths):
        return ()
    end = lengths.index(max(lengths))
    return (*ancestors(parents, end), end)
