"""What a request asks for before a step, and what drafts have on offer in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import numpy as np

from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, NO_NEEDS, ROOT, Draft, DraftNeeds
from outrider.verifier_service.messages.request import DisabledReason, Request
from outrider.verifier_service.messages.tree import depths
from outrider.verifier_service.pricing.cost_model import StepShape
from outrider.verifier_service.pricing.request_table import Bools, Floats, Ints
from outrider.verifier_service.scheduling.outcome import Outcome
from outrider.verifier_service.scheduling.schedule import ScheduledRequest


class Ask(NamedTuple):
    """A request that may ask a drafter for up to `bound` tokens; 0: it cannot draft."""

    request: Request
    drafter_id: str
    bound: int
    needs: DraftNeeds = NO_NEEDS


class AskLength(NamedTuple):
    """How many tokens to ask a drafter for."""

    length: int
    reason: DisabledReason | None = None  # why it is 0, or why a probe does not pay
    max_computed: int | None = None  # as in `Commit`


@dataclass(slots=True)
class PricedStep:
    """A step with the asks from before it; its requests may have asked again since."""

    outcomes: Sequence[Outcome]  # one for each of its requests
    held: Sequence[Request]  # requests left out of the step because they still waited for their drafts
    shape: StepShape  # drafts included
    _: KW_ONLY
    step_s: float = 0.0  # set before the step is learnt from
    exposed_s: float = 0.0  # wait for drafts before the step

    @property
    def items(self) -> Iterator[ScheduledRequest]:
        """Each request's share of the step."""
        return (outcome.item for outcome in self.outcomes)


class TreeOffer(NamedTuple):
    """The nodes of a tree of point masses: by the draft, and as estimated before it arrived; a child is worth less."""

    survivals: Floats
    before: Floats
    depths: Ints
    best_by_depth: Floats

    @classmethod
    def of(cls, parents: Sequence[int], rates: Floats, by_history: Floats) -> TreeOffer:
        """Return the offer of a tree; `rates`: of each node, the chance to be accepted where its parent is."""
        survivals = np.ones(len(parents) + 1)  # the last is the root's
        for node, (parent, rate) in enumerate(zip(parents, rates, strict=True)):
            survivals[node] = rate * survivals[parent]
        node_depths = np.array(depths(parents))
        best_by_depth = np.zeros(node_depths.max() + 1)
        np.maximum.at(best_by_depth, node_depths, survivals[:-1])
        before = np.append(by_history[: len(best_by_depth)], best_by_depth[len(by_history) :])
        return cls(survivals[:-1], before[node_depths], node_depths, best_by_depth)

    def down_to(self, depth: int | None) -> Bools:
        """Return which nodes are slots down to a depth (None: all): those better than the best one below it."""
        least = 0.0 if depth is None or depth >= len(self.best_by_depth) else self.best_by_depth[depth]
        return self.survivals > least

    def num_first_paying(self, price: float) -> int:
        """Return how many first nodes to verify: all if their sum pays, else those whose sum pays most."""
        gains = np.append(0.0, (self.survivals - price).cumsum())
        return len(self.survivals) if gains[-1] > 0.0 else int(gains.argmax())

    def paying(self, price: float, num_least: int) -> list[int]:
        """Return the nodes that pay; at least `num_least`."""
        paying = np.flatnonzero(self.survivals > price).tolist()
        return paying or [int(self.survivals.argmax())][:num_least]


def confidences_of(draft: Draft) -> Sequence[float] | None:
    """Return a chain's confidences; of drawn tokens, the largest weight of each row.

    A row's largest weight is a function of the row alone, and rows have been checked; a drafter's claim need not be.
    """
    if draft.parents is not None or draft.draft_probs is None:
        return draft.confidences if draft.parents is None else None
    return [max(row.weights) / DRAFT_PROB_SCALE for row in draft.draft_probs]


def judged_nodes(draft: Draft, outcome: Outcome) -> tuple[list[float], list[bool]]:
    """Return, of every node whose parent was accepted, its confidence and whether it was accepted."""
    assert draft.parents is not None
    assert draft.confidences is not None
    parents = (ROOT, *outcome.path)[: outcome.num_judged]
    judged = [node for node, parent in enumerate(draft.parents) if parent in parents]
    return [draft.confidences[node] for node in judged], [node in outcome.path for node in judged]
