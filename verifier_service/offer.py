"""What a request's draft has on offer in a step: how good its positions are, as far as pricing may look at them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.verifier_service.drafting import DRAFT_PROB_SCALE, ROOT, Draft
from outrider.verifier_service.outcome import Outcome
from outrider.verifier_service.step_price import Slot


@dataclass(frozen=True, slots=True)
class Offer:
    """What a request had on offer in a step: survivals and worths of positions or nodes, the best worth by depth."""

    survivals: Sequence[float] = ()
    slots: Sequence[Slot] = ()
    levels: Sequence[float] = ()

    def down_to(self, depth: int | None) -> Sequence[Slot]:
        """Return the first positions; of a tree, all nodes as good as the worst of them; None: all."""
        if depth is None or depth >= len(self.levels):
            return self.slots
        if len(self.slots) == len(self.levels):  # a chain: no depth has two
            return self.slots[:depth]
        return [slot for slot in self.slots if slot[0] > self.levels[depth]]


def hoped_worths(by_history: Sequence[float], worths: Sequence[float]) -> Sequence[float]:
    """Return what positions were worth before their draft was there; where that is not known, what they are now."""
    return [*by_history[: len(worths)], *worths[len(by_history) :]]


def confidences_of(draft: Draft) -> Sequence[float] | None:
    """Return a chain's confidences; of drawn tokens the largest weights of their rows, whatever the drafter claims.

    Those are functions of the rows alone, which a claim need not be, and rows have been checked.
    """
    if draft.draft_probs is None:
        return draft.confidences
    return [max(row.weights) / DRAFT_PROB_SCALE for row in draft.draft_probs]


def judged_nodes(draft: Draft, outcome: Outcome) -> list[tuple[float, bool]]:
    """Return the confidence of every node whose parent was accepted, and whether it was, too."""
    assert draft.parents is not None
    assert draft.confidences is not None
    parents = (ROOT, *outcome.path)[: outcome.num_judged]
    return [
        (confidence, node in outcome.path)
        for node, (parent, confidence) in enumerate(zip(draft.parents, draft.confidences, strict=True))
        if parent in parents
    ]
