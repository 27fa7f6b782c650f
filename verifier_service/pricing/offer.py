"""What a request asked for before a step, and the draft positions it had on offer in that step."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, NO_NEEDS, ROOT, Draft, DraftNeeds
from outrider.verifier_service.messages.request import DisabledReason, Request
from outrider.verifier_service.messages.tree import depths
from outrider.verifier_service.pricing.cost_model import StepShape
from outrider.verifier_service.pricing.step_price import Slot
from outrider.verifier_service.pricing.survival import LastRound
from outrider.verifier_service.scheduling.outcome import Outcome
from outrider.verifier_service.scheduling.schedule import ScheduledRequest, first_nodes, kept_nodes


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


class Offer(NamedTuple):
    """Survivals of a draft's positions (a chain) or nodes (a tree).

    A NamedTuple: one is made per draft, and a frozen dataclass takes several times as long to make.
    """

    survivals: Sequence[float] = ()
    by_history: Sequence[float] = ()  # estimates from before the draft arrived; shorter where there were none
    best_by_depth: Sequence[float] = ()  # of a chain: its survivals

    def down_to(self, depth: int | None) -> list[Slot]:
        """Return the slots down to a depth (None: all); of a tree, the nodes better than the best one below it."""
        slots = zip(self.survivals, survivals_before(self.by_history, self.survivals), strict=True)
        if depth is None or depth >= len(self.best_by_depth):
            return list(slots)
        if len(self.survivals) == len(self.best_by_depth):  # a chain: one position per depth
            return list(itertools.islice(slots, depth))
        return [slot for slot in slots if slot[0] > self.best_by_depth[depth]]

    def num_first_paying(self, price: float) -> int:
        """Return how many first nodes to verify: all if their sum pays, else those whose sum pays most."""
        gains = list(itertools.accumulate((survival - price for survival in self.survivals), initial=0.0))
        return len(self.survivals) if gains[-1] > 0.0 else gains.index(max(gains))


class RoundKind(Enum):
    """Who decides a draft's length."""

    PRICED = auto()  # the price
    PINNED = auto()  # the operator, whatever drafts cost
    FOUND = auto()  # each draft for itself: looking it up takes no time
    MASKED = auto()  # what each brings, beside what it and the masks for the next one cost
    PREDICTED = auto()  # the same for a guess from the request's own `prediction`, which is cut before it is a draft


@dataclass(slots=True)
class PricedRound:
    """A request's ask before a step, and the offer of the draft that came."""

    drafter_id: str
    bound: int = 0  # the longest draft that plan and limits allow; for a request that is switched off: would allow
    length: int = 0  # tokens asked for
    kind: RoundKind = RoundKind.PRICED
    is_probe: bool = False
    has_predictions: bool = False  # the drafter learns from the target's prediction after each node of a tree
    is_opening: bool = True  # the drafter's first round for the request, which contains a prefill
    by_history: Sequence[float] = ()  # survivals of the positions when the draft was asked for
    offered: Offer | None = None  # None: no draft came
    after: LastRound = LastRound.UNDRAFTED  # the outcome of the round before


@dataclass(slots=True)
class PricedRequest:
    """What pricing remembers of a request."""

    drafter_id: str
    num_rounds_off: int  # rounds since its last draft was asked for
    is_opening: bool = True  # its drafter has not answered yet
    round: PricedRound | None = None  # None: no ask since its last step
    survivals: Sequence[float] = ()  # by history, cached …
    survivals_at: tuple[int, str, int] | None = None  # … under this key


@dataclass(slots=True)
class PricedStep:
    """A step with the asks from before it; its requests may have asked again since."""

    outcomes: Sequence[Outcome]  # one for each of its requests
    held: Sequence[Request]  # requests left out of the step because they still waited for their drafts
    shape: StepShape  # drafts included
    _: KW_ONLY
    step_s: float = 0.0  # set before the step is learnt from
    exposed_s: float = 0.0  # wait for drafts before the step
    rounds: dict[str, PricedRound] = field(default_factory=dict)  # by request

    def asking(self, requests: Iterable[Request]) -> list[PricedRound]:
        """Return the rounds of those requests that had asked for a draft."""
        rounds = (self.rounds.get(request.request_id) for request in requests)
        return [one for one in rounds if one is not None and one.length]

    @property
    def items(self) -> Iterator[ScheduledRequest]:
        """Each request's share of the step."""
        return (outcome.item for outcome in self.outcomes)

    def kind(self, item: ScheduledRequest) -> RoundKind:
        """Return who decided the length of a request's draft."""
        asked = self.rounds.get(item.request.request_id)
        return RoundKind.PRICED if asked is None else asked.kind

    def num_expected(self, item: ScheduledRequest) -> float:
        """Return the expected number of accepted tokens of an item's draft."""
        asked = self.rounds.get(item.request.request_id)
        if item.draft is None or asked is None or asked.offered is None:
            return 0.0
        return sum(sorted(asked.offered.survivals, reverse=True)[: len(item.draft.token_ids)])


def survivals_before(by_history: Sequence[float], survivals: Sequence[float]) -> Sequence[float]:
    """Return the survivals before the draft arrived; beyond the estimates of then, those of now."""
    return [*by_history[: len(survivals)], *survivals[len(by_history) :]]


def confidences_of(draft: Draft) -> Sequence[float] | None:
    """Return a chain's confidences; of drawn tokens, the largest weight of each row.

    A row's largest weight is a function of the row alone, and rows have been checked; a drafter's claim need not be.
    """
    if draft.draft_probs is None:
        return draft.confidences
    return [max(row.weights) / DRAFT_PROB_SCALE for row in draft.draft_probs]


def judged_nodes(draft: Draft, outcome: Outcome) -> list[tuple[float, bool]]:
    """Return, for every node whose parent was accepted, its confidence and whether it was accepted."""
    assert draft.parents is not None
    assert draft.confidences is not None
    parents = (ROOT, *outcome.path)[: outcome.num_judged]
    return [
        (confidence, node in outcome.path)
        for node, (parent, confidence) in enumerate(zip(draft.parents, draft.confidences, strict=True))
        if parent in parents
    ]


def paying_nodes(asked: PricedRound, draft: Draft, rates: Sequence[float], *, price: float, num_least: int) -> Draft:
    """Return the nodes of a tree of point masses that pay; a child survives less than its parent.

    `rates`: of each node, the chance to be accepted where its parent is. At least `num_least` nodes are kept.
    """
    assert draft.parents is not None
    survivals: list[float] = []
    for parent, rate in zip(draft.parents, rates, strict=True):
        survivals.append(rate * (1.0 if parent == ROOT else survivals[parent]))
    best_by_depth: list[float] = []
    node_depths = depths(draft.parents)
    for depth, survival in zip(node_depths, survivals, strict=True):
        best_by_depth.extend([0.0] * (depth + 1 - len(best_by_depth)))
        best_by_depth[depth] = max(best_by_depth[depth], survival)
    before = survivals_before(asked.by_history, best_by_depth)
    asked.offered = Offer(survivals, [before[depth] for depth in node_depths], best_by_depth)
    if asked.is_probe or asked.kind is not RoundKind.PRICED:
        return draft
    if asked.has_predictions:
        num_nodes = max(asked.offered.num_first_paying(price), num_least)
        return first_nodes(draft, max_nodes=num_nodes, max_depth=len(survivals))
    paying = [node for node, survival in enumerate(survivals) if survival > price]
    return kept_nodes(draft, paying or [survivals.index(max(survivals))][:num_least])
