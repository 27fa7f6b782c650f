"""How many draft tokens to ask for, and how many of a draft to verify: the price of a step, put to use.

`ask`, before drafting: a request asks for the positions whose survival, by its history, exceeds the price. `admit`,
once the draft is there: the positions whose survival, by the draft's confidences, exceeds the price are verified;
during a trial at least the first, since confidences are not calibrated yet. What was on offer in a step sets the price
of later steps. No drawn token is looked at: a confidence is the largest weight of the row that the token was drawn
from, and the price comes from earlier steps.

Trees whose tokens are drawn are cut by depth and history alone: their shape must not depend on the draw. A tree of
point masses loses each node that does not pay, and all below it. A tree whose drafter learns from the target's
prediction after each node is verified whole as long as its sum pays, and else cut at its end: a node that does not pay
is worth what it teaches, and holes would hide which prediction belongs to which node.

While no draft pays, a request drafts a few tokens now and then (probes), so that its survival stays known. Probes have
a budget, a share of step time. A request that the router has switched off is still priced, so that the price falls when
its drafts would pay again. Without a profile of step times there is no price: the plan's length holds. (Behind a router
such a plan is off, `warmup`, unless it is pinned.)
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outrider.verifier_service.messages.draft import LOCAL_DRAFTER_ID, NO_NEEDS, Draft, DraftNeeds
from outrider.verifier_service.messages.engine import NEVER, StepTime
from outrider.verifier_service.messages.expert_shape import ExpertShape
from outrider.verifier_service.messages.request import DisabledReason, Request
from outrider.verifier_service.pricing.cost_model import ContextTime, CostModel, StepShape, StepTimeModel
from outrider.verifier_service.pricing.found_drafts import FoundDrafts
from outrider.verifier_service.pricing.load_levels import LoadLevel, LoadLevels
from outrider.verifier_service.pricing.masked_drafts import MaskedDrafts
from outrider.verifier_service.pricing.offer import (
    Ask,
    AskLength,
    Offer,
    PricedRequest,
    PricedRound,
    PricedStep,
    RoundKind,
    confidences_of,
    judged_nodes,
    paying_nodes,
)
from outrider.verifier_service.pricing.probes import PROBE_LENGTH, PROBE_ROUNDS, ProbeBudget
from outrider.verifier_service.pricing.survival import SurvivalEstimator
from outrider.verifier_service.scheduling.outcome import Outcome, num_draft_tokens, num_mask_rows
from outrider.verifier_service.scheduling.schedule import ScheduledRequest, first_nodes

STALL = 4.0  # clamp on a step's loss, in expected step times: a stall is not charged to drafts in full
SLOW = 1.5  # clamp on a drafted step's time, in its usual times: beyond that something else slows it down
UNPLANNED_LENGTH = 4  # draft length priced until a plan has named a drafter, so that drafts have a price by then
LOW_SURVIVAL = 0.25  # of the first position: below, the reason is low acceptance and not load
FIRST_PLAIN_STEPS = 2  # plain steps in a row that are all learnt from: the first is the one after a draft
# whose drafts and masks are decided here: the base is the step without them
DECIDED = (RoundKind.PRICED, RoundKind.FOUND, RoundKind.MASKED)
PLAIN_STRIDE = 8  # of the plain steps after those, each so manieth is learnt from, for all: pricing costs time


@dataclass(slots=True)
class DraftPricing:
    """The engine's price: `ask` before drafting, `admit` when scheduling, then `end_step` and `learn`.

    `learn` may wait until the next asks are in flight: drafters work meanwhile.
    """

    survival: SurvivalEstimator = field(default_factory=SurvivalEstimator)
    masked: MaskedDrafts | None = None  # prices the drafts of the drafter in this process, if steps have masks for it
    num_extrapolated_steps: int = 0  # steps far beyond the profile and all earlier steps of their load
    _levels: LoadLevels | None = None  # None: no profile, no price
    _level: LoadLevel | None = None  # of the last step
    _num_requests: int = 1  # of the last step
    _depths: tuple[int | None, int | None] = (None, None)  # best draft length, longest next one; None: any
    _requests: dict[str, PricedRequest] = field(default_factory=dict)
    _usual: tuple[str, int] = ("", UNPLANNED_LENGTH)  # drafter and bound of the last request that could draft
    _base: StepShape = field(default_factory=lambda: StepShape(1, 0))  # of the last step, without its drafts
    _found: FoundDrafts = field(default_factory=FoundDrafts)
    _unlearnt: PricedStep | None = None  # the last step, until `learn`
    _gone: set[str] = field(default_factory=set)  # requests that finished since
    _probes: ProbeBudget = field(default_factory=ProbeBudget)
    _num_plain_steps: int = 0  # in a row at one load, without prompts and without asks

    def use_profile(
        self,
        step_times: Sequence[StepTime],
        experts: ExpertShape | None = None,
        context: ContextTime | None = None,
    ) -> None:
        """Price by measured step times, or by others; too few of them change nothing. See `CostModel` for the rest."""
        if len({point.num_tokens for point in step_times}) < 2:
            return
        if self._levels is not None:
            self._levels.use_profile(StepTimeModel.from_points(step_times))
            return
        self._levels = LoadLevels(CostModel(StepTimeModel.from_points(step_times), experts, context))
        self._go_to_level(1)

    @property
    def cost(self) -> CostModel | None:
        """What steps take at the present load; None: there is no profile."""
        return None if self._level is None else self._level.cost

    @property
    def price(self) -> float | None:
        """The survival that a draft position must exceed now; None: there is no price."""
        return None if self._level is None else self._level.price.value

    @property
    def knee(self) -> float | None:
        """The number of tokens from which a step is compute-bound; None: never, or unknown."""
        knee = math.inf if self._level is None else self._level.cost.knee()
        return None if math.isinf(knee) else knee

    @property
    def request_ids(self) -> set[str]:
        """The requests with any state here."""
        return ({*self._requests} | self.survival.request_ids) - self._gone

    def can_learn_later(self, num_requests: int) -> bool:
        """Return whether a step's requests may ask again before it is learnt from: a price is there, or not needed."""
        return self._levels is None or self.masked is not None or not self._levels.at(num_requests).price.is_new

    def ask_all(self, asks: Sequence[Ask]) -> list[AskLength]:
        """Begin the rounds of a step's requests; see `ask`."""
        return [self.ask(*one) for one in asks]

    def ask(self, request: Request, drafter_id: str, bound: int, needs: DraftNeeds = NO_NEEDS) -> AskLength:
        """Begin a request's round: decide how many of `bound` tokens to ask its drafter for.

        `bound` 0: the request cannot draft; its round is priced all the same, by the drafter and bound of the last
        request that could. Only earlier rounds count, so nothing depends on what the drafter will draw.
        """
        if self._level is None:
            return AskLength(bound)
        is_pinned, request_id = request.plan.is_pinned, request.request_id
        if self.masked is not None and bound and not is_pinned and drafter_id == LOCAL_DRAFTER_ID:
            kept, plain = self._kept(request, drafter_id), replace(self._base, num_tokens=self._num_requests)
            survivals = self.survival.usual_survivals(request_id, drafter_id, bound)
            known = self._level, plain, survivals, self._probes
            num_asked = self.masked.ask_length(request_id, *known, kept.num_rounds_off)
            kept.num_rounds_off = 0 if num_asked else kept.num_rounds_off + 1
            kept.is_opening = kept.is_opening or not num_asked  # no masks: the next round that asks has no draft yet
            return self._begin_decided_round(request, drafter_id, bound, num_asked, RoundKind.MASKED)
        if needs.is_found and bound and not is_pinned:
            length = self._found.ask_length(self._level, self._base, bound)
            if length is not None:
                return self._begin_decided_round(request, drafter_id, bound, length, RoundKind.FOUND)
        if bound:
            self._usual = drafter_id, request.plan.draft_length
        drafter_id, potential = (drafter_id, bound) if bound else self._usual
        kept = self._kept(request, drafter_id)
        kept.is_opening = kept.is_opening or kept.drafter_id != drafter_id or request.plan.is_off
        kept.drafter_id = drafter_id
        asked = kept.round = PricedRound(
            drafter_id,
            bound=potential,
            length=bound,
            kind=RoundKind.PINNED if is_pinned else RoundKind.PRICED,
            has_predictions=needs.predictions,
            is_opening=kept.is_opening,
        )
        reason = None
        if bound and not is_pinned:
            asked.length = 0
            if self._level.price.value < NEVER or not kept.survivals:  # at NEVER no survival is high enough
                asked.by_history = self._survivals(request.request_id, kept, asked)
                asked.length = self._level.ask_length(asked.by_history, *self._depths)
            if not asked.length:
                self._probe(request.request_id, kept, asked)
                is_low = kept.survivals[0] < LOW_SURVIVAL
                reason = DisabledReason.LOW_ACCEPTANCE if is_low else DisabledReason.LOAD
        kept.num_rounds_off = 0 if asked.length else kept.num_rounds_off + 1
        return AskLength(asked.length, reason)

    def cut_prediction(self, request: Request, drafter_id: str, survivals: Sequence[float]) -> AskLength:
        """Begin a request's round with a guess from its `prediction`: decide how much of it is worth verifying."""
        if self._level is None:
            return AskLength(len(survivals))
        length = self._level.cost.best_length(self._base, survivals)
        return self._begin_decided_round(request, drafter_id, len(survivals), length, RoundKind.PREDICTED)

    def drafts_on(self, request: Request) -> bool:
        """Return whether a request's last ask was for a draft; if it has not asked yet, whether masks pay."""
        kept = self._requests.get(request.request_id)
        if kept is None or kept.round is None:
            return self.masked is None or self.masked.is_on or request.plan.is_pinned
        return kept.round.length > 0

    def _begin_decided_round(
        self, request: Request, drafter_id: str, bound: int, length: int, kind: RoundKind
    ) -> AskLength:
        """Begin a round in which the price has no part."""
        kept = self._kept(request, drafter_id)
        is_opening = kind is RoundKind.MASKED and kept.is_opening
        kept.round = PricedRound(drafter_id, bound, length, kind, is_opening=is_opening)
        return AskLength(length, None if length else DisabledReason.LOAD)

    def _survivals(self, request_id: str, kept: PricedRequest, asked: PricedRound) -> Sequence[float]:
        """Return survivals by history; estimated again only after the estimator has learnt."""
        source = (self.survival.version, asked.drafter_id, asked.bound)
        if kept.survivals_at != source:
            kept.survivals = self.survival.survivals(request_id, asked.drafter_id, asked.bound)
            kept.survivals_at = source
        return kept.survivals

    def _kept(self, request: Request, drafter_id: str) -> PricedRequest:
        kept = self._requests.get(request.request_id)
        if kept is None:  # spread by name: requests that arrive together shall not probe together
            waited = zlib.crc32(request.request_id.encode()) % PROBE_ROUNDS
            kept = self._requests[request.request_id] = PricedRequest(drafter_id, num_rounds_off=waited)
        return kept

    def _probe(self, request_id: str, kept: PricedRequest, asked: PricedRound) -> None:
        """Ask for a few tokens although they do not pay, if the budget of probes allows."""
        assert self._level is not None
        if not self._probes.allow(kept.num_rounds_off):
            return
        length = min(PROBE_LENGTH, asked.bound)
        times = self._level.cost.seconds_with(self._base, length)
        self._probes.spend(times[-1] - times[0] + times[0] / self._base.num_tokens)  # its request misses a step, too
        asked.length, asked.is_probe = length, True
        asked.by_history = self._survivals(request_id, kept, asked)

    def admit_all(self, drafts: Sequence[tuple[Request, Draft]]) -> list[Draft]:
        """Return, of each of a step's drafts, the part that is worth verifying; see `admit`."""
        return [self.admit(*one) for one in drafts]

    def admit(self, request: Request, draft: Draft) -> Draft:
        """Return the part of a draft that is worth verifying at the price of earlier steps."""
        kept = self._requests.get(request.request_id)
        if self._level is None or kept is None or (asked := kept.round) is None:
            return draft
        if asked.kind is RoundKind.FOUND:
            known = request.request_id, asked.drafter_id, len(draft.token_ids), confidences_of(draft)
            length = self._level.cost.best_length(self._base, self.survival.survivals(*known))
            return first_nodes(draft, max_nodes=length, max_depth=length)
        if draft.parents is not None and draft.draft_probs is None:
            rates = self.survival.claimed_rates(asked.drafter_id, draft.confidences or (0.5,) * len(draft.token_ids))
            num_least = int(self._level.trial.goes_on)
            return paying_nodes(asked, draft, rates, price=self._level.price.value, num_least=num_least)
        is_chain = draft.parents is None
        num_drafted = len(draft.token_ids) if is_chain else asked.length  # positions, or a tree's depth
        # a draft shorter than asked for: its drafter has nothing more to offer
        num_offered = max(num_drafted, asked.bound) if is_chain and num_drafted >= asked.length else num_drafted
        confidences = confidences_of(draft) if is_chain else None
        survivals = self.survival.survivals(request.request_id, asked.drafter_id, num_offered, confidences)
        asked.offered = Offer(survivals, asked.by_history, survivals)
        if asked.is_probe or asked.kind is not RoundKind.PRICED:
            return draft
        num_paying = self._level.price.num_paying(survivals[:num_drafted])
        num_paying = max(num_paying, int(self._level.trial.goes_on))
        if is_chain and num_paying == num_drafted:
            return draft
        return first_nodes(draft, max_nodes=num_paying if is_chain else len(draft.token_ids), max_depth=num_paying)

    def end_step(self, step: PricedStep) -> None:
        """End the rounds of a step's requests before they ask again; the rest of what it teaches waits for `learn`."""
        self.learn()
        for outcome in step.outcomes:
            request_id = outcome.item.request.request_id
            kept = self._requests.get(request_id)
            if kept is None or not outcome.item.samples:  # a preempted request may have a draft in flight: no end yet
                continue
            if outcome.item.draft is None:
                self.survival.observe_plain(request_id)
            if kept.round is None:
                continue
            step.rounds[request_id] = kept.round
            if kept.round.length:  # an empty answer counts: a drafter without a draft for one request has answered
                kept.is_opening = False
            if outcome.item.draft is not None:
                kept.round.after = self.survival.end_round(
                    request_id, kept.round.drafter_id, outcome.num_judged, len(outcome.path)
                )
            kept.round = None
        for request in step.held:
            if (kept := self._requests.get(request.request_id)) is not None and kept.round is not None:
                step.rounds[request.request_id] = kept.round
        self._unlearnt = step
        self._go_to_level(len(step.outcomes) + len(step.held))
        if (
            self._level is not None
            and self._level.price.is_new
            and any(step.kind(outcome.item) is RoundKind.PRICED for outcome in step.outcomes)
        ):
            self.learn()  # without a first price all requests would ask for all tokens

    def _go_to_level(self, num_requests: int) -> None:
        """Switch to the prices of a load."""
        if self._levels is None:
            return
        level = self._levels.at(num_requests)
        if level is not self._level:
            self._num_plain_steps = 0
        self._level, self._depths = level, (level.depth.bound, level.depth.next_bound)
        self._num_requests = num_requests

    def learn(self) -> None:
        """Learn from the last step's time and offers, unless that is done."""
        if self._unlearnt is None:
            return
        step, self._unlearnt = self._unlearnt, None
        self._found.end_step()
        self._observe_step(step)
        gone, self._gone = self._gone, set()
        for request_id in gone:
            self.forget(request_id)

    def _observe_step(self, step: PricedStep) -> None:
        if (level := self._level) is None:
            return
        outcomes, shape = step.outcomes, step.shape
        sampled = [outcome.item for outcome in outcomes if outcome.item.samples]
        priced = [item for item in sampled if step.kind(item) is RoundKind.PRICED]
        self._probes.earn(step.step_s, len(priced))
        num_alike = self._num_alike(step)
        if not num_alike:  # the plain steps before it have taught the same
            self._base = shape
            if len(priced) == len(outcomes):
                level.observe_plain()
            return
        taking_part = step.asking(item.request for item in step.items)
        asking = [*taking_part, *step.asking(step.held)]
        decided = [item for item in step.items if step.kind(item) in DECIDED]
        num_drafted = sum(num_draft_tokens(item) + num_mask_rows(item) for item in decided)
        # drafters' work or masks may have slowed down a step with drafts: it does not tell what plain steps take
        masked = [item for item in decided if item.masks is not None and step.kind(item) is RoundKind.MASKED]
        if self.masked is not None and masked:
            rounds = ((item, step.rounds[item.request.request_id]) for item in masked)
            self.masked.observe_step(item.draft is not None for item, asked in rounds if not asked.is_opening)
        is_drafting = bool(step.held or masked) or any(item.draft is not None for item in step.items)
        shape = replace(shape, is_drafting=is_drafting)
        self.num_extrapolated_steps += level.cost.is_extrapolating(shape)
        level.cost.observe(shape, step.step_s)
        plain_s = level.cost.seconds(replace(shape, num_tokens=len(outcomes), is_drafting=False))
        is_accident = level.is_accident(max((one.length for one in asking), default=0), step.exposed_s, plain_s)
        # an opening round contains a prefill: it does not tell what later rounds take
        if taking_part and not is_accident and not any(one.is_opening for one in taking_part):
            level.exposure.observe(max(one.length for one in taking_part), step.exposed_s)
        base = StepShape(shape.num_tokens - num_drafted, shape.num_context_tokens - num_drafted)
        if level.price.is_new:  # before the first drafts: priced as if the prompts had been read already
            base = StepShape(max(1, len(priced)), shape.num_context_tokens)
        self._base = base
        if priced:
            self._observe_loss(level, step, priced, asking, base, num_drafted, is_accident=is_accident)
        self._observe_offers(level, base, [self._offer(step, item.request) for item in priced], num_alike)
        for outcome in outcomes:
            if (asked := step.rounds.get(outcome.item.request.request_id)) is not None:
                self._observe_draft(asked, outcome)

    def _num_alike(self, step: PricedStep) -> int:
        """Count a step, and return the number of steps that it stands for; 0: it is left out."""
        if any(one.length for one in step.rounds.values()):
            self._num_plain_steps = 0
            return 1
        if step.shape.num_tokens > len(step.outcomes):  # prompts are read in it
            return 1
        self._num_plain_steps += 1
        num_later = self._num_plain_steps - FIRST_PLAIN_STEPS
        if num_later <= 0:
            return 1
        return PLAIN_STRIDE if num_later % PLAIN_STRIDE == 0 else 0

    def _observe_offers(self, level: LoadLevel, base: StepShape, offers: Sequence[Offer], num_steps: int) -> None:
        """Learn the best depth and the price from what was on offer in a step and in others like it."""
        level.depth.observe(base, [offer.best_by_depth for offer in offers], level.price.value, num_steps)
        bound = level.depth.bound
        slots = [slot for offer in offers for slot in offer.down_to(bound)]
        longest = max((len(offer.best_by_depth) for offer in offers), default=0)
        exposed_s = level.exposure.seconds(longest if bound is None else min(bound, longest))
        level.price.observe(base, len(offers), slots, exposed_s=exposed_s, num_steps=num_steps)

    def _observe_loss(
        self,
        level: LoadLevel,
        step: PricedStep,
        priced: Sequence[ScheduledRequest],
        asking: Sequence[PricedRound],
        base: StepShape,
        num_drafted: int,
        *,
        is_accident: bool,
    ) -> None:
        """Book what a step's drafts lost or gained beside plain decoding."""
        if any(one.kind is not RoundKind.PRICED for one in asking):  # the wait is not the price's doing
            return
        if not asking:
            if base.num_tokens == len(priced):
                level.observe_plain()
            return
        num_held = len(step.held)
        plain_s = level.cost.seconds(StepShape(base.num_tokens + num_held, base.num_context_tokens))
        num_tokens = len(priced) + sum(step.num_expected(item) for item in priced)
        verified = replace(base, num_tokens=base.num_tokens + num_drafted)
        longest = max((one.length for one in asking), default=0)
        model_s = level.cost.seconds(verified) + level.exposure.seconds(longest)
        usual_s = level.cost.seconds(replace(verified, is_drafting=True))
        elapsed_s = min(step.exposed_s + min(step.step_s, SLOW * usual_s), STALL * (plain_s + model_s))
        made, elapsed = num_tokens / (len(priced) + num_held), elapsed_s / plain_s  # both in plain steps
        if not all(one.is_probe for one in asking):
            level.trial.observe(len(asking), elapsed - made, is_accident=is_accident)
        elif base.num_tokens == len(priced):  # what a few probes lose does not tell what drafts of all would
            level.observe_plain()
            self._probes.spend(max(0.0, elapsed_s - plain_s * made))

    def _offer(self, step: PricedStep, request: Request) -> Offer:
        """Return what a request had on offer; if it asked for no draft, the survivals by its history."""
        asked = step.rounds.get(request.request_id)
        if asked is not None and asked.offered is not None:
            return asked.offered
        if asked is not None and asked.length:
            return Offer()  # its draft did not come
        if asked is None:  # no ask yet
            plan = request.plan
            asked = PricedRound(plan.drafter_id or "", 0 if plan.is_pinned else plan.draft_length)
        survivals = asked.by_history or self._survivals(
            request.request_id, self._kept(request, asked.drafter_id), asked
        )
        return Offer(survivals, best_by_depth=survivals)

    def _observe_draft(self, asked: PricedRound, outcome: Outcome) -> None:
        draft = outcome.item.draft
        if draft is None:
            return
        is_chain = draft.parents is None
        self.survival.observe(
            draft.request_id,
            asked.drafter_id,
            num_draft_tokens=outcome.num_judged,
            num_accepted_tokens=len(outcome.path),
            confidences=confidences_of(draft) if is_chain else None,
            after=asked.after,
        )
        if not is_chain and draft.confidences is not None:
            self.survival.observe_claims(asked.drafter_id, judged_nodes(draft, outcome))

    def forget(self, request_id: str) -> None:
        """Drop a request's state, once its last step is learnt from; its drafter's record stays.

        Until then its id must not be used again.
        """
        if self._unlearnt is not None:
            self._gone.add(request_id)
            return
        self._requests.pop(request_id, None)
        if self.masked is not None:
            self.masked.forget(request_id)
        self.survival.forget(request_id)
