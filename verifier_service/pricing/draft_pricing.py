"""How much of its drafts an engine asks for and verifies: the price of a step, put to use.

Before drafting, a request asks for the positions whose survival, by history alone, exceeds the price; when its draft is
there, those are verified whose survival, by the draft's own confidences, exceeds what verifying alone costs: waiting is
past by then. (In a trial the first at least: what drafts claim is not known to mean anything yet.) Whatever was on
offer is remembered and makes the price of later steps. Nothing here looks at a drawn token: its confidence is the
largest weight of the row that it was drawn from, and the price comes from steps before the one that verifies it. Drawn
trees, whose shape must not depend on what was drawn, are cut by depth and history alone; trees of point masses lose any
node that does not pay, and all below it. Those of a drafter that learns from what the target predicts after each node
are verified whole while they pay on the whole, since nodes that do not are worth what they teach, and are else cut at
their end alone, or nobody could tell which prediction is of which node.

While nothing pays, a request now and then drafts a little all the same, so that its survival stays known. These probes
have a budget, a share of the time that steps take, and are charged what they were seen to cost. Requests that the
router has switched off are priced on, so that the price tells it when drafts would pay again. Without a profile of step
times nothing is priced: the plan's length stands.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outrider.verifier_service.messages.draft import NO_NEEDS, ROOT, Draft, DraftNeeds
from outrider.verifier_service.messages.engine import NEVER, StepTime
from outrider.verifier_service.messages.expert_shape import ExpertShape
from outrider.verifier_service.messages.request import DisabledReason, Request
from outrider.verifier_service.messages.tree import depths
from outrider.verifier_service.pricing.cost_model import ContextTime, CostModel, StepShape, StepTimeModel
from outrider.verifier_service.pricing.found_drafts import FoundDrafts
from outrider.verifier_service.pricing.load_levels import LoadLevel, LoadLevels
from outrider.verifier_service.pricing.offer import (
    Offer,
    PricedRequest,
    PricedRound,
    PricedStep,
    confidences_of,
    hoped_worths,
    judged_nodes,
    num_alike_plain,
)
from outrider.verifier_service.pricing.probes import PROBE_LENGTH, PROBE_ROUNDS, ProbeBudget
from outrider.verifier_service.pricing.survival import SurvivalEstimator
from outrider.verifier_service.pricing.token_worth import TokenWorth
from outrider.verifier_service.scheduling.outcome import Outcome, num_draft_tokens
from outrider.verifier_service.scheduling.schedule import ScheduledRequest, first_nodes, kept_nodes

STALL = 4.0  # times what a step should have taken: more is not booked, whatever it was
SLOW = 1.5  # times what a step with drafts usually takes: beyond that they are not what slows it down
UNPLANNED_LENGTH = 4  # of a draft: priced until a plan has named a drafter, so that drafts have a price by then
LOW_SURVIVAL = 0.25  # of a first position: below, a request is off for what it drafts and not for the load


@dataclass(slots=True)
class DraftPricing:
    """The engine's side of the price: `length` when it asks, `admit` when it schedules.

    After the step `end_step`, and `learn` once what requests then asked for is on its way: drafters work meanwhile.
    """

    survival: SurvivalEstimator = field(default_factory=SurvivalEstimator)
    worth: TokenWorth = field(default_factory=TokenWorth)
    num_extrapolated_steps: int = 0  # far beyond all that was profiled, or seen at this load
    _levels: LoadLevels | None = None  # None: there is no profile, so nothing is priced
    _level: LoadLevel | None = None  # of the last step
    _depths: tuple[int | None, int | None] = (None, None)  # how long drafts should be, and may be now; None: any length
    _requests: dict[str, PricedRequest] = field(default_factory=dict)
    _usual: tuple[str, int] = ("", UNPLANNED_LENGTH)  # drafter and plan of the last request that was allowed to draft
    _base: StepShape = field(default_factory=lambda: StepShape(1, 0))  # of the last step, its drafts left out
    _found: FoundDrafts = field(default_factory=FoundDrafts)
    _unlearnt: PricedStep | None = None  # the last one, until it is learnt from
    _gone: set[str] = field(default_factory=set)  # requests that have left since
    _probes: ProbeBudget = field(default_factory=ProbeBudget)
    _num_plain_steps: int = 0  # in a row, of one load, without prompts and with nobody who asked

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
        """The survival that a draft position must exceed now; None: nothing is priced."""
        return None if self._level is None else self._level.price.price

    @property
    def knee(self) -> float | None:
        """The number of tokens from which a step is compute-bound; None: never, or not known."""
        knee = math.inf if self._level is None else self._level.cost.knee()
        return None if math.isinf(knee) else knee

    @property
    def request_ids(self) -> set[str]:
        """The requests of which anything is kept here."""
        return ({*self._requests} | self.survival.request_ids | self.worth.request_ids) - self._gone

    def knows(self, num_requests: int) -> bool:
        """Return whether a step of so many requests can be learnt from later than they ask again."""
        return self._levels is None or not self._levels.at(num_requests).price.is_new

    def length(self, request: Request, drafter_id: str, bound: int, needs: DraftNeeds = NO_NEEDS) -> int:
        """Return how many of `bound` tokens to ask a drafter for: those expected to be worth the price.

        Only earlier rounds count, so nothing depends on what the drafter will draw.
        """
        if self._level is None:
            return bound
        if needs.is_found and bound and not request.plan.is_pinned:
            found = self._found.ask(self._level, self._base, drafter_id, bound)
            if found is not None:
                self._kept(request, drafter_id).round = found
                request.metrics.disabled_reason = None if found.length else DisabledReason.LOAD
                return found.length
        if bound:
            self._usual = drafter_id, request.plan.draft_length
        # who is switched off goes on being priced, or nobody would learn when the load that was the reason is gone
        drafter_id, potential = (drafter_id, bound) if bound else self._usual
        kept = self._kept(request, drafter_id)
        kept.is_opening = kept.is_opening or kept.drafter_id != drafter_id or request.plan.is_off
        kept.drafter_id, is_pinned = drafter_id, request.plan.is_pinned
        asked = kept.round = PricedRound(
            drafter_id,
            potential,
            bound,
            is_pinned=is_pinned,
            has_predictions=needs.predictions,
            is_opening=kept.is_opening,
        )
        if bound and not is_pinned:
            asked.length = 0
            if self._level.price.price < NEVER or not kept.survivals:  # else nothing is admitted, whatever it is worth
                asked.worths = self._worths(request.request_id, kept, asked)
                asked.length = self._level.asked(asked.worths, *self._depths)
            if not asked.length:
                self._probe(request.request_id, kept, asked)
                is_low = kept.survivals[0] < LOW_SURVIVAL
                request.metrics.disabled_reason = DisabledReason.LOW_ACCEPTANCE if is_low else DisabledReason.LOAD
        kept.num_rounds_off = 0 if asked.length else kept.num_rounds_off + 1
        return asked.length

    def predicted_length(self, request: Request, drafter_id: str, survivals: Sequence[float]) -> int:
        """Return how much of a draft that took nobody any time is worth verifying; the price learns nothing from it."""
        if self._level is None:
            return len(survivals)
        length = self._level.cost.best_length(self._base, survivals)
        if not length:
            request.metrics.disabled_reason = DisabledReason.LOAD
        asked = PricedRound(drafter_id, len(survivals), length, is_pinned=True, is_opening=False)
        self._kept(request, drafter_id).round = asked
        return length

    def _worths(self, request_id: str, kept: PricedRequest, asked: PricedRound) -> Sequence[float]:
        return self.worth.worths(request_id, self._survivals(request_id, kept, asked))

    def _survivals(self, request_id: str, kept: PricedRequest, asked: PricedRound) -> Sequence[float]:
        """Return those by history, estimated again only after something was learnt: without drafts nothing is."""
        source = (self.survival.num_observed, asked.drafter_id, asked.bound)
        if kept.survivals_at != source:
            kept.survivals = self.survival.survivals(request_id, asked.drafter_id, asked.bound)
            kept.survivals_at = source
        return kept.survivals

    def _kept(self, request: Request, drafter_id: str) -> PricedRequest:
        kept = self._requests.get(request.request_id)
        if kept is None:  # requests that came together do not probe together
            waited = zlib.crc32(request.request_id.encode()) % PROBE_ROUNDS
            kept = self._requests[request.request_id] = PricedRequest(drafter_id, num_rounds_off=waited)
        return kept

    def _probe(self, request_id: str, kept: PricedRequest, asked: PricedRound) -> None:
        """Let a request draft a little although it does not pay: mostly not at all."""
        assert self._level is not None
        if not self._probes.allow(kept.num_rounds_off):
            return
        length = min(PROBE_LENGTH, asked.bound)
        times = self._level.cost.seconds_with(self._base, length)
        self._probes.spend(times[-1] - times[0] + times[0] / self._base.num_tokens)  # it misses a step at least
        asked.length, asked.is_probe = length, True
        asked.worths = self._worths(request_id, kept, asked)

    def admit(self, request: Request, draft: Draft) -> Draft:
        """Return the part of a draft that is worth verifying by the price of earlier steps."""
        kept = self._requests.get(request.request_id)
        if self._level is None or kept is None or (asked := kept.round) is None:
            return draft
        if asked.is_free:
            known = request.request_id, asked.drafter_id, len(draft.token_ids), confidences_of(draft)
            length = self._level.cost.best_length(self._base, self.survival.survivals(*known))
            return first_nodes(draft, max_nodes=length, max_depth=length)
        if draft.parents is not None and draft.draft_probs is None:
            return self._best_nodes(request.request_id, asked, draft)
        is_chain = draft.parents is None
        num_levels = len(draft.token_ids) if is_chain else asked.length
        # a drafter that stopped of itself has nothing more on offer
        num_offered = max(num_levels, asked.bound) if is_chain and num_levels >= asked.length else num_levels
        confidences = confidences_of(draft) if is_chain else None
        survivals = self.survival.survivals(request.request_id, asked.drafter_id, num_offered, confidences)
        worths = self.worth.worths(request.request_id, survivals)
        asked.offered = Offer(survivals, worths, asked.worths, worths)
        if asked.is_probe or asked.is_pinned:
            return draft
        num_paying = self._level.price.num_paying(asked.offered.levels[:num_levels])
        num_paying = max(num_paying, int(self._level.trial.goes_on))
        if is_chain and num_paying == num_levels:
            return draft
        return first_nodes(draft, max_nodes=num_paying if is_chain else len(draft.token_ids), max_depth=num_paying)

    def _best_nodes(self, request_id: str, asked: PricedRound, draft: Draft) -> Draft:
        """Return the nodes of a tree of point masses that are worth the price; a node survives less than its parent."""
        assert draft.parents is not None
        assert self._level is not None
        rates = self.survival.claimed_rates(asked.drafter_id, draft.confidences or (0.5,) * len(draft.token_ids))
        survivals: list[float] = []
        for parent, rate in zip(draft.parents, rates, strict=True):
            survivals.append(rate * (1.0 if parent == ROOT else survivals[parent]))
        worths = self.worth.worths(request_id, survivals)
        levels: list[float] = []
        node_depths = depths(draft.parents)
        for depth, worth in zip(node_depths, worths, strict=True):
            levels.extend([0.0] * (depth + 1 - len(levels)))
            levels[depth] = max(levels[depth], worth)
        hoped = hoped_worths(asked.worths, levels)
        asked.offered = Offer(survivals, worths, [hoped[depth] for depth in node_depths], levels)
        if asked.is_probe or asked.is_pinned:
            return draft
        price = self._level.price.price
        num_least = int(self._level.trial.goes_on)
        if asked.has_predictions:
            num_nodes = max(asked.offered.num_first_paying(price), num_least)
            return first_nodes(draft, max_nodes=num_nodes, max_depth=len(worths))
        paying = [node for node, worth in enumerate(worths) if worth > price]
        return kept_nodes(draft, paying or [worths.index(max(worths))][:num_least])

    def end_step(self, step: PricedStep) -> None:
        """Note how a step's drafts went, before its requests ask again: all else that it says waits for `learn`."""
        self.learn()
        for outcome in step.outcomes:
            request_id = outcome.item.request.request_id
            kept = self._requests.get(request_id)
            if kept is None or not outcome.item.samples:  # who reads its prompt again may have a draft on its way
                continue
            if outcome.item.draft is None:
                self.survival.observe_plain(request_id)
            if kept.round is None:
                continue
            step.rounds[request_id] = kept.round
            if kept.round.length:  # whatever came of it: a drafter that has nothing for one request blinds nobody
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
            and not all(step.is_pinned(outcome.item) for outcome in step.outcomes)
        ):
            self.learn()  # or all would be asked for as if it were free

    def _go_to_level(self, num_requests: int) -> None:
        """Let the price be that of such a load."""
        if self._levels is None:
            return
        level = self._levels.at(num_requests)
        if level is not self._level:
            self._num_plain_steps = 0
        self._level, self._depths = level, (level.depth.bound, level.depth.next_bound)

    def learn(self) -> None:
        """Take in how long the last step took and what was on offer in it, if that is still to be done."""
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
        priced = [outcome.item for outcome in outcomes if outcome.item.samples and not step.is_pinned(outcome.item)]
        self._probes.earn(step.step_s, len(priced))
        is_asking = any(one.length for one in step.rounds.values())
        is_plain = not is_asking and shape.num_tokens == len(outcomes)
        if is_asking:
            self._num_plain_steps = 0
        self._num_plain_steps += is_plain
        num_alike = num_alike_plain(self._num_plain_steps) if is_plain else 1
        if not num_alike:  # nothing is seen in it that the one before it has not shown
            self._base = shape
            if len(priced) == len(outcomes):
                level.observe_plain()
            return
        taking_part = step.asking(item.request for item in step.items)
        asking = [*taking_part, *step.asking(step.held)]
        num_drafted = sum(len(item.draft.token_ids) for item in step.items if item.draft and step.may_end(item))
        # a step with drafts says nothing of how long plain ones take: drafters' work may have slowed it down
        is_drafting = bool(step.held) or any(item.draft is not None for item in step.items)
        shape = replace(shape, is_drafting=is_drafting)
        self.num_extrapolated_steps += level.cost.is_extrapolating(shape)
        level.cost.observe(shape, step.step_s)
        plain_s = level.cost.seconds(replace(shape, num_tokens=len(outcomes), is_drafting=False))
        is_accident = level.is_accident(max((one.length for one in asking), default=0), step.exposed_s, plain_s)
        # a drafter that had to read a prompt first says nothing of later rounds
        if taking_part and not is_accident and not any(one.is_opening for one in taking_part):
            level.exposure.observe(max(one.length for one in taking_part), step.exposed_s)
        base = StepShape(shape.num_tokens - num_drafted, shape.num_context_tokens - num_drafted)
        if level.price.is_new:  # before the first drafts: as if the prompts had been read already
            base = StepShape(max(1, len(priced)), shape.num_context_tokens)
        self._base = base
        if priced:
            self._observe_loss(level, step, priced, asking, base, num_drafted, is_accident=is_accident)
        self._observe_offers(level, base, [self._offer(step, item.request) for item in priced], num_alike)
        rounds = (
            (outcome.item.request.request_id, len(outcome.committed), num_draft_tokens(outcome.item))
            for outcome in outcomes
            if outcome.item.samples
        )
        self.worth.observe(rounds, level.price.price, num_alike)
        for outcome in outcomes:
            if (asked := step.rounds.get(outcome.item.request.request_id)) is not None:
                self._observe_draft(asked, outcome)

    def _observe_offers(self, level: LoadLevel, base: StepShape, offers: Sequence[Offer], num_steps: int) -> None:
        """Price what was on offer in the step, and in others like it, as far as drafts should go."""
        level.depth.observe(base, [offer.levels for offer in offers], level.price.price, num_steps)
        bound = level.depth.bound
        slots = [slot for offer in offers for slot in offer.down_to(bound)]
        longest = max((len(offer.levels) for offer in offers), default=0)
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
        """Compare a step with what the model expects of it; one with prompts in it counts for trials alone."""
        num_held = len(step.held)
        if any(one.is_pinned for one in asking):  # they are waited for whatever it costs
            return
        if not asking:
            if base.num_tokens == len(priced):
                level.observe_plain()
            return
        num_all = len(priced) + num_held
        plain_s = level.cost.seconds(StepShape(base.num_tokens + num_held, base.num_context_tokens))
        num_tokens = len(priced) + sum(step.expected(item) for item in priced)
        verified = replace(base, num_tokens=base.num_tokens + num_drafted)
        longest = max((one.length for one in asking), default=0)
        model_s = level.cost.seconds(verified) + level.exposure.seconds(longest)
        usual_s = level.cost.seconds(replace(verified, is_drafting=True))
        elapsed_s = min(step.exposed_s + min(step.step_s, SLOW * usual_s), STALL * (plain_s + model_s))
        made, forgone = num_tokens / num_all, elapsed_s / plain_s
        if not all(one.is_probe for one in asking):
            level.trial.observe(len(asking), forgone - made, is_accident=is_accident)
        elif base.num_tokens == len(priced):  # what a few cost says nothing of what all would
            level.observe_plain()
            level.trial.observe_probe(forgone - made)
            self._probes.spend(max(0.0, elapsed_s - plain_s * made))

    def _offer(self, step: PricedStep, request: Request) -> Offer:
        """Return what one request had on offer; where nothing was asked for, what history says."""
        asked = step.rounds.get(request.request_id)
        if asked is not None and asked.offered is not None:
            return asked.offered
        if asked is not None and asked.length:
            return Offer()  # its draft did not come
        if asked is None:  # it has not asked yet
            plan = request.plan
            asked = PricedRound(plan.drafter_id or "", 0 if plan.is_pinned else plan.draft_length)
        hoped = asked.worths or self._worths(request.request_id, self._kept(request, asked.drafter_id), asked)
        return Offer(worths=hoped, levels=hoped)

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
        """Drop what is kept of a request, once its last step is learnt from; its drafter's record stays.

        Until then nobody may ask by the same id.
        """
        if self._unlearnt is not None:
            self._gone.add(request_id)
            return
        self._requests.pop(request_id, None)
        self.survival.forget(request_id)
        self.worth.forget(request_id)
