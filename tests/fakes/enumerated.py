"""Exact laws instead of counts: every way in which a draft is drawn and verified, with its probability.

Drafts are drawn from rows of a table, verified by one of the references, whose random choices are enumerated, and what
is committed is completed to a fixed number of tokens by the target's own law. The sum must be the target's joint law.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import numpy as np
import torch

from exactness.references import RandomChoices
from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, ROOT, Draft, SparseRow
from outrider.verifier_service.messages.tree import VerifiedTokens

Prefix = tuple[int, ...]
Laws = Callable[[Prefix], np.ndarray]  # what may follow a prefix: [vocab_size]
Drawn = tuple[Draft, float]  # a draft and how likely it is
Verification = Callable[[torch.Tensor, Draft], RandomChoices]


def random_laws(seed: int, vocab_size: int, *, concentration: float = 1.0) -> Laws:
    """Return laws that differ after every prefix."""
    found: dict[Prefix, np.ndarray] = {}

    def law(prefix: Prefix) -> np.ndarray:
        if prefix not in found:
            rng = np.random.default_rng([seed, len(prefix), *prefix])
            found[prefix] = rng.dirichlet([concentration] * vocab_size)
        return found[prefix]

    return law


def row_of(law: np.ndarray) -> SparseRow:
    """Round a law to integer weights."""
    weights = np.floor(law * DRAFT_PROB_SCALE).astype(int)
    weights[int(weights.argmax())] += DRAFT_PROB_SCALE - weights.sum()
    kept = [(id_, int(weight)) for id_, weight in enumerate(weights) if weight]
    return SparseRow(token_ids=tuple(id_ for id_, _ in kept), weights=tuple(weight for _, weight in kept))


def siblings_of(row: SparseRow, count: int) -> Iterator[tuple[Prefix, float]]:
    """Enumerate `count` draws without replacement, in order."""
    weights = dict(zip(row.token_ids, row.weights, strict=True))
    for drawn in itertools.permutations(row.token_ids, min(count, len(weights))):
        prob, remaining = 1.0, DRAFT_PROB_SCALE
        for token_id in drawn:
            prob *= weights[token_id] / remaining
            remaining -= weights[token_id]
        yield drawn, prob


def sampled_trees(
    draft_laws: Laws, num_children: Callable[[Prefix, SparseRow], int], max_depth: int
) -> Iterator[Drawn]:
    """Enumerate breadth-first sampled trees; how many children a node has is asked before any is drawn."""

    def grown(
        nodes: tuple[tuple[int, int], ...], rows: tuple[SparseRow, ...], open_nodes: tuple[tuple[int, Prefix], ...]
    ) -> Iterator[tuple[tuple[tuple[int, int], ...], tuple[SparseRow, ...], float]]:
        if not open_nodes:
            yield nodes, rows, 1.0
            return
        (node, prefix), *others = open_nodes
        row = row_of(draft_laws(prefix))
        count = num_children(prefix, row) if len(prefix) < max_depth else 0
        if count == 0:
            yield from grown(nodes, rows, tuple(others))
            return
        for drawn, prob in siblings_of(row, count):
            children = tuple((node, token_id) for token_id in drawn)
            new = tuple((len(nodes) + i, (*prefix, token_id)) for i, token_id in enumerate(drawn))
            for *rest, below in grown(nodes + children, (*rows, row), (*others, *new)):
                yield *rest, prob * below

    for nodes, rows, prob in grown((), (), ((ROOT, ()),)):
        yield draft_of(nodes, rows), prob


def draft_of(nodes: tuple[tuple[int, int], ...], rows: tuple[SparseRow, ...] | None) -> Draft:
    """Make a tree of (parent, token id)."""
    return Draft(
        request_id="r",
        round_id=1,
        position=3,
        token_ids=tuple(token_id for _, token_id in nodes),
        parents=tuple(parent for parent, _ in nodes),
        draft_probs=rows,
    )


def prefixes_of(draft: Draft) -> list[Prefix]:
    """Return what every row of a verification follows."""
    prefixes: list[Prefix] = [()]
    parents = range(ROOT, len(draft.token_ids) - 1) if draft.parents is None else draft.parents
    for parent, token_id in zip(parents, draft.token_ids, strict=True):
        prefixes.append((*prefixes[parent + 1], token_id))
    return prefixes


def target_rows(target: Laws, draft: Draft) -> torch.Tensor:
    """Return float64 [len(draft) + 1, vocab_size]."""
    return torch.from_numpy(np.stack([target(prefix) for prefix in prefixes_of(draft)]))


def outcomes_of(choices: Callable[[], RandomChoices]) -> Iterator[tuple[VerifiedTokens, float]]:
    """Enumerate everything that a verification may come to, by running it again for every row of choices."""
    waiting: list[tuple[list[int], float]] = [([], 1.0)]
    while waiting:
        made, prob = waiting.pop()
        running = choices()
        try:
            weights = next(running)
            for index in made:
                weights = running.send(index)
        except StopIteration as end:
            yield end.value, prob
            continue
        total = sum(weights)
        waiting += [([*made, i], prob * weight / total) for i, weight in enumerate(weights) if weight > 0.0]


def committed_law(
    target: Laws, drawn: Iterator[Drawn], verify: Verification, *, vocab_size: int, num_tokens: int
) -> np.ndarray:
    """Return the exact joint law of the first `num_tokens` tokens: [vocab_size] * num_tokens."""
    law = np.zeros((vocab_size,) * num_tokens)
    for verified, prob in verifications(target, drawn, verify):
        law[tuple(verified.token_ids)] += prob * completed_law(target, tuple(verified.token_ids), num_tokens)
    return law


def expected_length(target: Laws, drawn: Iterator[Drawn], verify: Verification) -> float:
    """Return how many draft tokens are accepted on average."""
    return sum(prob * len(verified.path) for verified, prob in verifications(target, drawn, verify))


def verifications(target: Laws, drawn: Iterator[Drawn], verify: Verification) -> Iterator[tuple[VerifiedTokens, float]]:
    """Enumerate what the drafts may come to."""
    for draft, drawn_prob in drawn:
        running = functools.partial(verify, target_rows(target, draft), draft)
        for verified, prob in outcomes_of(running):
            yield verified, drawn_prob * prob


def completed_law(target: Laws, prefix: Prefix, num_tokens: int) -> np.ndarray:
    """Return the target's law of what is missing after a prefix: [vocab_size] * (num_tokens - len(prefix))."""
    if len(prefix) == num_tokens:
        return np.ones(())
    row = target(prefix)
    return np.stack([prob * completed_law(target, (*prefix, id_), num_tokens) for id_, prob in enumerate(row)])
