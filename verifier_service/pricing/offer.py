"""What requests asked for before a step and had on offer in it: how good drafts are, as far as pricing may look."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple

from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, ROOT, Draft
from outrider.verifier_service.messages.request import Request
from outrider.verifier_service.pricing.cost_model import StepShape
from outrider.verifier_service.pricing.step_price import Slot
from outrider.verifier_service.pricing.survival import LastRound
from outrider.verifier_service.scheduling.outcome import Outcome
from outrider.verifier_service.scheduling.schedule import ScheduledRequest

FIRST_PLAIN_STEPS = 2  # in a row that are all taken in: the first is the one after a draft
PLAIN_STRIDE = 8  # plain steps after those, of which one is taken in for all: pricing where nothing pays is loss


class Offer(NamedTuple):
    """What a request had on offer in a step: positions of a chain or nodes of a tree.

    One is made for every draft, and a frozen dataclass takes several times as long to make.
    """

    survivals: Sequence[float] = ()
    worths: Sequence[float] = ()
    hoped: Sequence[float] = ()  # worths before the draft was there, as far as known
    levels: Sequence[float] = ()  # the best worth by depth: a chain's are its worths

    def down_to(self, depth: int | None) -> list[Slot]:
        """Return the slots of the first positions; of a tree, all nodes as good as the worst of them; None: all."""
        slots = zip(self.worths, hoped_worths(self.hoped, self.worths), strict=True)
        if depth is None or depth >= len(self.levels):
            return list(slots)
        if len(self.worths) == len(self.levels):  # a chain: no depth has two
            return list(itertools.islice(slots, depth))
        return [slot for slot in slots if slot[0] > self.levels[depth]]

    def num_first_paying(self, price: float) -> int:
        """Return how many first nodes to verify: all if they pay on the whole, else those that pay most together."""
        gains = list(itertools.accumulate((worth - price for worth in self.worths), initial=0.0))
        return len(self.worths) if gains[-1] > 0.0 else gains.index(max(gains))


@dataclass(slots=True)
class PricedRound:
    """What a request asked for before a step, and what its draft then had on offer."""

    drafter_id: str
    bound: int = 0  # what its plan and its limits allowed, or would have if it were not switched off
    length: int = 0  # how much of that was asked for
    is_probe: bool = False
    is_pinned: bool = False
    has_predictions: bool = False  # the drafter is told what the target predicts after each node of a tree
    is_free: bool = False  # it takes no time to draft: what is verified follows from the draft alone
    is_opening: bool = True  # its drafter had not answered yet: its first round contains a prefill
    worths: Sequence[float] = ()  # of the positions, by history, when a draft was asked for
    offered: Offer | None = None  # by its draft; None: it has none
    after: LastRound = LastRound.UNDRAFTED  # how the round before it had gone


@dataclass(slots=True)
class PricedRequest:
    """What is remembered of one request."""

    drafter_id: str
    num_rounds_off: int  # since its last draft was asked for
    is_opening: bool = True  # its drafter has not answered yet
    round: PricedRound | None = None  # None: it has not asked since the last step that it was in
    survivals: Sequence[float] = ()  # by history
    survivals_at: tuple[int, str, int] | None = None  # what they were estimated from


@dataclass(slots=True)
class PricedStep:
    """A step, and what its requests had asked for before it: they may have asked again since."""

    outcomes: Sequence[Outcome]  # one for each of its requests
    held: Sequence[Request]  # could have been in it, but still waited for their drafts
    shape: StepShape  # drafts included
    _: KW_ONLY
    step_s: float = 0.0  # set before it is learnt from
    exposed_s: float = 0.0  # how long its drafts held it up before that
    rounds: dict[str, PricedRound] = field(default_factory=dict)  # by request

    def asking(self, requests: Iterable[Request]) -> list[PricedRound]:
        """Return the rounds of those requests that had asked for a draft."""
        rounds = (self.rounds.get(request.request_id) for request in requests)
        return [one for one in rounds if one is not None and one.length]

    @property
    def items(self) -> Iterator[ScheduledRequest]:
        """Each request's share of the step."""
        return (outcome.item for outcome in self.outcomes)

    def is_pinned(self, item: ScheduledRequest) -> bool:
        """Return whether a request drafts whatever that costs."""
        asked = self.rounds.get(item.request.request_id)
        return asked is not None and asked.is_pinned

    def may_end(self, item: ScheduledRequest) -> bool:
        """Return whether it is decided here what a request drafts."""
        asked = self.rounds.get(item.request.request_id)
        return asked is None or asked.is_free or not asked.is_pinned

    def expected(self, item: ScheduledRequest) -> float:
        """Return how many tokens of an item's draft were expected to be accepted."""
        asked = self.rounds.get(item.request.request_id)
        if item.draft is None or asked is None or asked.offered is None:
            return 0.0
        return sum(sorted(asked.offered.survivals, reverse=True)[: len(item.draft.token_ids)])


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


def num_alike_plain(num_plain_steps: int) -> int:
    """Return how many steps the last of so many plain ones in a row stands for; 0: it is left out.

    Nothing is drafted in them, so a few tell of the others, and pricing may not cost what it cannot bring.
    """
    if num_plain_steps <= FIRST_PLAIN_STEPS:
        return 1
    return PLAIN_STRIDE if (num_plain_steps - FIRST_PLAIN_STEPS) % PLAIN_STRIDE == 0 else 0
