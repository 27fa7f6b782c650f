"""What a step teaches once it has ended: what steps take, what drafts are waited for, what they bring, their price."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outrider.verifier_service.pricing.cost_model import StepShape
from outrider.verifier_service.pricing.exposure import longest_of
from outrider.verifier_service.pricing.load_levels import LoadLevel
from outrider.verifier_service.pricing.masked_drafts import MaskedDrafts
from outrider.verifier_service.pricing.offer import PricedStep, TreeOffer, judged_nodes
from outrider.verifier_service.pricing.policies import Books
from outrider.verifier_service.pricing.request_table import (
    MASKED,
    Bools,
    Floats,
    Ints,
    Rounds,
    Rows,
    groups_of,
    within,
)
from outrider.verifier_service.scheduling.outcome import num_mask_rows

STALL = 4.0  # clamp on a step's loss, in expected step times: a stall is not charged to drafts in full
SLOW = 1.5  # clamp on a drafted step's time, in its usual times: beyond that something else slows it down
FIRST_PLAIN_STEPS = 2  # plain steps in a row that are all learnt from: the first is the one after a draft
PLAIN_STRIDE = 8  # of the plain steps after those, each so manieth is learnt from, for all: pricing costs time
FIRST_DRAFTED_STEPS, DRAFTED_STRIDE = 128, 4  # the same of steps with drafts, for step times, pools, depths and prices


@dataclass(slots=True, kw_only=True)
class EndedStep:
    """A step and the rounds that ended with it, in columns: a place for each outcome."""

    step: PricedStep
    rows: Rows
    rounds: Rounds  # of a request without one: that of a request that has asked for nothing
    held: Rounds  # that go on
    num_drafted: Ints
    num_accepted: Ints
    num_judged: Ints
    num_alike: int  # steps that it stands for; 0: others have taught the same of pools and prices
    has_round: Bools
    is_priced: Bools  # whose drafts the price decides
    judged: Rows  # the places of drafts that were asked for
    trees: dict[int, TreeOffer]  # of point masses, by place

    @property
    def lengths(self) -> Ints:
        """How many tokens were asked for, also by requests that still wait for them."""
        held = self.held.length
        return np.concatenate((self.rounds.length, held)) if len(held) else self.rounds.length


@dataclass(slots=True)
class StepLessons:
    """Teaches levels of load, drafters' records and the budget of probes."""

    _num_in_a_row: int = 0  # steps with asks, or without asks and without prompts, at one load …
    _kind: tuple[LoadLevel, bool] | None = None  # … which this is
    num_extrapolated_steps: int = 0  # far beyond the profile and all earlier steps of their load

    def learn(self, books: Books, level: LoadLevel, ended: EndedStep, masked: MaskedDrafts | None) -> StepShape:
        """Learn from a step; return its base, what it would have been without its drafts."""
        step, num_priced = ended.step, int(np.count_nonzero(ended.is_priced))
        books.probes.earn(step.step_s, num_priced)
        num_drafted = int(ended.num_drafted[ended.rounds.kind <= MASKED].sum())
        has_masks = False
        if masked is not None:
            num_drafted += sum(map(num_mask_rows, step.items))
            has_masks = self._observe_masks(masked, ended)
        # drafters' work or masks may have slowed down a step with drafts: it does not tell what plain steps take
        is_drafting = bool(step.held) or has_masks or bool(np.count_nonzero(ended.num_drafted))
        shape = StepShape(step.shape.num_tokens, step.shape.num_context_tokens, is_drafting)
        if ended.num_alike:
            self.num_extrapolated_steps += level.cost.is_extrapolating(shape)
            level.cost.observe(shape, step.step_s)
        is_accident = self._observe_wait(level, ended)
        base = StepShape(shape.num_tokens - num_drafted, shape.num_context_tokens - num_drafted)
        if level.price.is_new:  # before the first drafts: priced as if the prompts had been read already
            base = StepShape(max(1, num_priced), shape.num_context_tokens)
        self._observe_found(level, ended, base, is_accident=is_accident)
        if num_priced:
            self._observe_loss(books, level, ended, base, num_drafted, is_accident=is_accident)
        if ended.num_alike:
            self._observe_offers(books, level, ended, num_priced, base)
        self._observe_drafts(books, ended)
        return base

    def num_alike(self, step: PricedStep, level: LoadLevel, *, is_asking: bool) -> int:
        """Count a step, and return the number of steps that it stands for; 0: it is left out."""
        if not is_asking and step.shape.num_tokens > len(step.outcomes):  # prompts are read in it
            return 1
        if self._kind != (level, is_asking):
            self._kind, self._num_in_a_row = (level, is_asking), 0
        self._num_in_a_row += 1
        num_first, stride = (FIRST_DRAFTED_STEPS, DRAFTED_STRIDE) if is_asking else (FIRST_PLAIN_STEPS, PLAIN_STRIDE)
        num_later = self._num_in_a_row - num_first
        if num_later <= 0:
            return 1
        return stride if num_later % stride == 0 else 0

    @staticmethod
    def pass_over(books: Books, level: LoadLevel, step: PricedStep) -> StepShape:
        """Count a plain step that is left out; return its base."""
        books.probes.earn(step.step_s, len(step.outcomes))
        level.observe_plain()
        return step.shape

    def _observe_masks(self, masked: MaskedDrafts, ended: EndedStep) -> bool:
        """Count a step with masks; return whether it was one."""
        has_masks = np.array([item.masks is not None for item in ended.step.items])
        is_masked = has_masks & (ended.rounds.kind == MASKED)
        if is_masked.any():
            masked.observe_step((ended.num_drafted > 0)[is_masked & ~ended.rounds.is_opening].tolist())
        return bool(is_masked.any())

    def _observe_wait(self, level: LoadLevel, ended: EndedStep) -> bool:
        """Learn how long drafts were waited for; return whether that was an accident."""
        step, rounds = ended.step, ended.rounds
        plain_s = level.cost.seconds(StepShape(len(step.outcomes), step.shape.num_context_tokens))
        is_accident = level.is_accident(int(ended.lengths.max(initial=0)), step.exposed_s, plain_s)
        longest = int((rounds.length * ~rounds.is_found).max(initial=0))  # that may have been computed
        # an opening round contains a prefill: it does not tell what later rounds take
        if longest and not is_accident and not np.count_nonzero(rounds.is_opening * rounds.length):
            level.exposure.observe(longest, step.exposed_s)
        return is_accident

    def _observe_found(self, level: LoadLevel, ended: EndedStep, base: StepShape, *, is_accident: bool) -> None:
        """Book what look-ups lost or gained beside plain decoding, where nothing was to be computed."""
        rounds, num_requests = ended.rounds, len(ended.rows)
        if not np.count_nonzero(rounds.sought) or np.count_nonzero(ended.lengths):
            level.finding.observe_plain()
            return
        num_found, num_accepted = (int(each[rounds.is_found].sum()) for each in (ended.num_drafted, ended.num_accepted))
        plain_s = level.cost.seconds(base)
        verified_s = level.cost.seconds(StepShape(base.num_tokens + num_found, base.num_context_tokens))
        lost = (ended.step.exposed_s + verified_s) / plain_s - 1.0 - num_accepted / num_requests
        level.finding.observe(num_requests, lost, is_accident=is_accident)

    def _observe_loss(
        self, books: Books, level: LoadLevel, ended: EndedStep, base: StepShape, num_drafted: int, *, is_accident: bool
    ) -> None:
        """Book what a step's drafts lost or gained beside plain decoding."""
        here, held, step = ended.rounds, ended.held, ended.step
        if np.count_nonzero(here.kind * here.length) + np.count_nonzero(held.kind * held.length):
            return  # the wait is not the price's doing
        num_priced, num_asking = np.count_nonzero(ended.is_priced), int(np.count_nonzero(ended.lengths))
        if not num_asking:
            if base.num_tokens == num_priced:
                level.observe_plain()
            return
        num_held, num_found = len(step.held), int(ended.num_drafted[here.is_found].sum())  # these cost nothing to try
        plain_s = level.cost.seconds(StepShape(base.num_tokens + num_held + num_found, base.num_context_tokens))
        verified = StepShape(base.num_tokens + num_drafted, base.num_context_tokens)
        model_s = level.cost.seconds(verified) + level.exposure.seconds(int(ended.lengths.max()))
        usual_s = level.cost.seconds(StepShape(verified.num_tokens, verified.num_context_tokens, is_drafting=True))
        elapsed_s = min(step.exposed_s + min(step.step_s, SLOW * usual_s), STALL * (plain_s + model_s))
        num_tokens = num_priced + self._num_expected(ended)
        made, elapsed = num_tokens / (num_priced + num_held), elapsed_s / plain_s  # both in plain steps
        if np.count_nonzero(here.is_probe) + np.count_nonzero(held.is_probe) < num_asking:
            level.trial.observe(num_asking, elapsed - made, is_accident=is_accident)
        elif base.num_tokens == num_priced:  # what a few probes lose does not tell what drafts of all would
            level.observe_plain()
            books.probes.spend(max(0.0, elapsed_s - plain_s * made))

    def _num_expected(self, ended: EndedStep) -> float:
        """Return the expected number of accepted tokens of the priced drafts that were not found."""
        offered, num_verified = ended.rounds.offered, ended.num_drafted * ended.is_priced * ~ended.rounds.is_found
        num_expected = float((offered * within(num_verified, offered.shape[1])).sum())
        for place, offer in ended.trees.items():
            num_expected += float(np.sort(offer.survivals)[::-1][: num_verified[place]].sum())
        return num_expected

    def _observe_offers(
        self, books: Books, level: LoadLevel, ended: EndedStep, num_priced: int, base: StepShape
    ) -> None:
        """Learn the best depth and the price from what was on offer in a step and in others like it."""
        all_priced = num_priced == len(ended.rows)
        survivals, before = self._offers(books, ended, slice(None) if all_priced else ended.is_priced)
        trees = [offer for place, offer in ended.trees.items() if ended.is_priced[place]]
        by_depth = survivals
        if trees:
            deepest = max(survivals.shape[1], *(len(offer.best_by_depth) for offer in trees))
            rows = [survivals, *(offer.best_by_depth[None] for offer in trees)]
            by_depth = np.concatenate([np.pad(row, ((0, 0), (0, deepest - row.shape[1]))) for row in rows])
        level.depth.observe(base, by_depth, level.price.value, ended.num_alike)
        bound, longest = level.depth.bound, longest_of(by_depth)
        exposed_s = level.exposure.seconds(longest if bound is None else min(bound, longest))
        is_slot = survivals[:, :bound] > 0.0
        slots, slots_before = survivals[:, :bound][is_slot], before[:, :bound][is_slot]
        for offer in trees:
            nodes = offer.down_to(bound)
            slots = np.append(slots, offer.survivals[nodes])
            slots_before = np.append(slots_before, offer.before[nodes])
        level.price.observe(base, num_priced, slots, slots_before, exposed_s=exposed_s, num_steps=ended.num_alike)

    def _offers(self, books: Books, ended: EndedStep, priced: slice | Bools) -> tuple[Floats, Floats]:
        """Return the survivals that priced requests had on offer, by the draft and before it: [rows, width + 1].

        Of a request that has asked for no draft, those by its history; of one whose draft did not come, none, nor of
        one whose draft was found: nothing has to be computed for it.
        """
        rounds = ended.rounds
        rounds.offered[rounds.is_found] = rounds.by_history[rounds.is_found] = 0.0
        is_off = (rounds.length == 0) & ~rounds.is_found
        if np.count_nonzero(is_off):
            unknown = (is_off & ended.is_priced & (rounds.by_history[:, 0] == 0.0)).nonzero()[0]
            for place in unknown[~ended.has_round[unknown]].tolist():  # no ask yet
                plan = ended.step.outcomes[place].item.request.plan
                rounds.drafter[place] = books.survival.number_of(plan.drafter_id or "")
                rounds.bound[place] = 0 if plan.is_pinned else min(plan.draft_length, rounds.width)
            for drafter, own in groups_of(rounds.drafter[unknown]):
                own = unknown[own]
                survivals = books.estimate(ended.rows[own], drafter, rounds.bound[own])
                rounds.by_history[own] = survivals[:, : rounds.width + 1]
            rounds.offered[is_off] = rounds.by_history[is_off]
        offered, by_history = rounds.offered[priced], rounds.by_history[priced]
        return offered, np.where(by_history > 0.0, by_history, offered)

    def _observe_drafts(self, books: Books, ended: EndedStep) -> None:
        """Learn from the drafts that were verified."""
        for drafter, own in groups_of(ended.rounds.record[ended.judged]):
            own = ended.judged[own]
            counts = ended.num_judged[own], ended.num_accepted[own], ended.rounds.after[own]
            bins = ended.rounds.bins[own]
            books.survival.observe(ended.rows[own], drafter, *counts, bins, num_alike=ended.num_alike)
        for place in ended.trees:
            draft = ended.step.outcomes[place].item.draft
            if draft is not None and draft.confidences is not None:
                drafter = int(ended.rounds.drafter[place])
                books.survival.observe_claims(drafter, *judged_nodes(draft, ended.step.outcomes[place]))
