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
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.verifier_service.messages.draft import LOCAL_DRAFTER_ID, Draft
from outrider.verifier_service.messages.engine import NEVER, StepTime
from outrider.verifier_service.messages.expert_shape import ExpertShape
from outrider.verifier_service.messages.request import DisabledReason, Request, SpeculationPlan
from outrider.verifier_service.pricing.cost_model import ContextTime, CostModel, StepShape, StepTimeModel
from outrider.verifier_service.pricing.fading import Fading
from outrider.verifier_service.pricing.load_levels import LoadLevels
from outrider.verifier_service.pricing.masked_drafts import MaskedDrafts
from outrider.verifier_service.pricing.offer import (
    Ask,
    AskLength,
    PricedStep,
    TreeOffer,
    confidences_of,
)
from outrider.verifier_service.pricing.policies import Books, Found, Load, Pinned, Policy, Priced, is_free, sought
from outrider.verifier_service.pricing.request_table import (
    FOUND,
    MASKED,
    PINNED,
    PREDICTED,
    PRICED,
    Bools,
    Rounds,
    Rows,
    groups_of,
    within,
)
from outrider.verifier_service.pricing.step_lessons import EndedStep, StepLessons
from outrider.verifier_service.pricing.survival import SurvivalEstimator, bins_of_rows
from outrider.verifier_service.scheduling.schedule import first_nodes, kept_nodes

UNPLANNED_LENGTH = 4  # draft length priced until a plan has named a drafter, so that drafts have a price by then
CLAIMS_FADE, CLAIMS_STEPS = 0.95, 4.0  # of what claims save, per step: a memory of 20 steps, and the prior's weight
READING_SHARE = 0.03  # of a step's time that the device waits while drafts are read before they are verified
NO_ROUNDS = Rounds(0, 0)  # of requests that still wait: mostly there are none
NO_ANSWER = (None, False, AskLength(0))  # of a request that is to be decided
# by kind of round; that of masks is the engine's
POLICIES: dict[int, Policy] = {PRICED: Priced(), FOUND: Found(), PINNED: Pinned(), PREDICTED: Pinned()}


@dataclass(slots=True)
class DraftPricing:
    """The engine's price: `ask_all` before drafting, `admit_all` when scheduling, then `end_step` and `learn`.

    `learn` may wait until the next asks are in flight: drafters work meanwhile.
    """

    masked: MaskedDrafts | None = None  # prices the drafts of the drafter in this process, if steps have masks for it
    lessons: StepLessons = field(default_factory=StepLessons)
    books: Books = field(default_factory=Books)
    _levels: LoadLevels | None = None  # None: no profile, no price
    _load: Load | None = None  # of the last step
    _usual: tuple[int, int] = (0, UNPLANNED_LENGTH)  # drafter and bound of the last request that could draft
    _told: frozenset[int] = frozenset()  # drafters that learn from the target's prediction after each node of a tree
    _off: dict[str, tuple[SpeculationPlan | None, bool, AskLength]] = field(default_factory=dict)  # while no draft pays
    _claims: Fading = field(default_factory=lambda: Fading(CLAIMS_FADE))  # share of a step that cuts by them save
    _num_off: int = 0  # steps in which they were given again
    _trees: dict[int, TreeOffer] = field(default_factory=dict)  # of drafts that came, by the row of their request
    _unlearnt: EndedStep | PricedStep | None = None  # the last step, until `learn`
    _gone: set[str] = field(default_factory=set)  # requests that finished since

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
        self._load = Load(self._levels.at(1), 1, StepShape(1, 0))

    @property
    def survival(self) -> SurvivalEstimator:
        """The record of all drafters."""
        return self.books.survival

    @property
    def cost(self) -> CostModel | None:
        """What steps take at the present load; None: there is no profile."""
        return None if self._load is None else self._load.level.cost

    @property
    def price(self) -> float | None:
        """The survival that a draft position must exceed now; None: there is no price."""
        return None if self._load is None else self._load.level.price.value

    @property
    def knee(self) -> float | None:
        """The number of tokens from which a step is compute-bound; None: never, or unknown."""
        knee = math.inf if self._load is None else self._load.level.cost.knee()
        return None if math.isinf(knee) else knee

    @property
    def num_extrapolated_steps(self) -> int:
        """Steps far beyond the profile and all earlier steps of their load."""
        return self.lessons.num_extrapolated_steps

    @property
    def request_ids(self) -> set[str]:
        """The requests with any state here."""
        return (self.books.table.request_ids | {*self._off}) - self._gone

    @property
    def awaits_claims(self) -> bool:
        """Whether drafts are read before they are verified, as what they claim would cut them by more than that takes.

        Else a drafter on the target's device is not waited for. By earlier steps alone, as all cuts.
        """
        return bool(self._claims.mean(0.0, CLAIMS_STEPS) > READING_SHARE)

    def can_learn_later(self, num_requests: int) -> bool:
        """Return whether a step's requests may ask again before it is learnt from: a price is there, or not needed."""
        return self._levels is None or self.masked is not None or not self._levels.at(num_requests).price.is_new

    # --- before drafting ---

    def ask_all(self, asks: Sequence[Ask]) -> list[AskLength]:
        """Begin the rounds of a step's requests: decide how many tokens to ask their drafters for.

        A request that cannot draft has a round, too: it is priced by the drafter and bound of the last one that could.
        Only earlier rounds count, so nothing depends on what the drafters will draw.
        """
        if self._load is None or not asks:
            return [AskLength(ask.bound) for ask in asks]
        if answers := self._known_answers(self._load, asks):
            return answers
        keys = [(ask.drafter_id, ask.bound > 0, ask.request.plan.is_pinned) for ask in asks]
        groups = dict.fromkeys(keys)
        if len(groups) == 1:
            return self._begin(self._load, asks)
        answers = [AskLength(0)] * len(asks)
        for key in groups:
            places = [place for place, own in enumerate(keys) if own == key]
            for place, answer in zip(places, self._begin(self._load, [asks[it] for it in places]), strict=True):
                answers[place] = answer
        return answers

    def _known_answers(self, load: Load, asks: Sequence[Ask]) -> list[AskLength]:
        """Return the last answers again where none can draft, or no draft pays and no probe is left; else none."""
        may_change = load.level.price.value < NEVER or self.books.probes.is_left
        if may_change and asks[0].bound:
            return []
        known = [self._off.get(ask.request.request_id, NO_ANSWER) for ask in asks]
        for (plan, is_able, _), (request, _, bound, _) in zip(known, asks, strict=True):
            if plan is not request.plan or is_able != (bound > 0) or (bound and may_change):
                return []
        self._num_off += 1
        table = self.books.table
        rows = table.find([ask.request.request_id for ask in asks])
        table.requests.is_asked[rows], table.rounds.by_history[rows, 0] = True, 0.0
        return [answer for *_, answer in known]

    def _kind_of(self, load: Load, asks: Sequence[Ask]) -> int:
        """Return who decides, of asks that are alike."""
        first = asks[0]
        if first.request.plan.is_pinned:
            return PINNED
        if first.bound and self.masked is not None and first.drafter_id == LOCAL_DRAFTER_ID:
            return MASKED
        if first.bound and first.needs.is_found and is_free(load, max(ask.bound for ask in asks)):
            return FOUND
        return PRICED

    def _policy(self, kind: int) -> Policy:
        return self.masked if kind == MASKED and self.masked is not None else POLICIES[kind]

    def _begin(self, load: Load, asks: Sequence[Ask]) -> list[AskLength]:
        """Begin rounds of one drafter; all can draft, or none."""
        kind, table, survival = self._kind_of(load, asks), self.books.table, self.survival
        first, limits = asks[0], np.array([ask.bound for ask in asks])
        if first.bound:
            drafter, bounds, longest = survival.number_of(first.drafter_id), limits, int(limits.max())
            self._usual = drafter, first.request.plan.draft_length
            self._told = self._told | {drafter} if first.needs.predictions else self._told - {drafter}
        else:
            drafter, longest = self._usual
            bounds = np.full(len(asks), longest)
        table.rounds.widen(longest)
        if self._num_off:  # before requests that are new, whose own count is spread
            table.requests.num_rounds_off += self._num_off
            self._num_off = 0
        rows = table.rows([ask.request.request_id for ask in asks])
        rounds, requests = Rounds(len(asks), table.rounds.width), table.requests
        rounds.kind[:], rounds.drafter[:], rounds.bound = kind, drafter, bounds
        rounds.is_opening = ~requests.has_answer[rows]
        if first.bound:
            rounds.is_opening |= requests.drafter[rows] != drafter
        else:
            rounds.is_opening |= [ask.request.plan.is_off for ask in asks]
        self._policy(kind).ask(self.books, load, rows, rounds, limits)
        if kind == PRICED and first.bound and first.needs.finds_some:
            rounds.sought = sought(load, limits)
        requests.drafter[rows], requests.has_answer[rows] = drafter, ~rounds.is_opening
        requests.num_rounds_off[rows] = (requests.num_rounds_off[rows] + 1) * (rounds.length == 0)
        answers = self._asked(rows, rounds, can_be_off=bool(first.bound) and kind != PINNED)
        is_kept = kind == PRICED and (load.level.price.value >= NEVER or not first.bound)
        if is_kept or self._off:
            for ask, answer in zip(asks, answers, strict=True):
                self._off.pop(ask.request.request_id, None)
                if is_kept and not answer.length:
                    self._off[ask.request.request_id] = ask.request.plan, ask.bound > 0, answer
        return answers

    def _asked(self, rows: Rows, rounds: Rounds, *, can_be_off: bool) -> list[AskLength]:
        """Keep rounds that have begun; return their lengths, and why drafts are off."""
        table, lengths = self.books.table, rounds.length.tolist()
        table.rounds.put(rows, rounds)
        table.requests.is_asked[rows] = True
        if np.count_nonzero(rounds.sought):
            asked = np.maximum(lengths, rounds.sought).tolist()
            return [AskLength(length, None, computed) for length, computed in zip(asked, lengths, strict=True)]
        if not can_be_off or (all(lengths) and not np.count_nonzero(rounds.is_probe)):
            return list(map(AskLength, lengths))
        is_low = table.requests.was_low[rows] & (rounds.kind == PRICED)
        codes = (((rounds.length == 0) | rounds.is_probe) * (1 + is_low)).tolist()
        reasons = (None, DisabledReason.LOAD, DisabledReason.LOW_ACCEPTANCE)
        return [AskLength(length, reasons[code]) for length, code in zip(lengths, codes, strict=True)]

    def cut_prediction(self, request: Request, drafter_id: str, survivals: Sequence[float]) -> AskLength:
        """Begin a request's round with a guess from its `prediction`: decide how much of it is worth verifying."""
        if self._load is None:
            return AskLength(len(survivals))
        table = self.books.table
        self._off.pop(request.request_id, None)
        rows, rounds = table.rows([request.request_id]), Rounds(1, table.rounds.width)
        rounds.kind[0], rounds.drafter[0] = PREDICTED, self.survival.number_of(drafter_id)
        rounds.bound[0] = len(survivals)
        rounds.length[0] = self._load.level.cost.best_length(self._load.base, survivals)
        return self._asked(rows, rounds, can_be_off=True)[0]

    def drafts_on(self, request: Request) -> bool:
        """Return whether a request's last ask was for a draft; if it has not asked yet, whether masks pay."""
        table = self.books.table
        (row,) = table.find([request.request_id])
        if not table.requests.is_asked[row]:
            return self.masked is None or self.masked.is_on or request.plan.is_pinned
        return bool(table.rounds.length[row] > 0)

    # --- once drafts are there ---

    def admit_all(self, drafts: Sequence[tuple[Request, Draft]]) -> list[Draft]:
        """Return, of each of a step's drafts, the part that is worth verifying at the price of earlier steps."""
        admitted = [draft for _, draft in drafts]
        if self._load is None or not drafts:
            return admitted
        table = self.books.table
        rows = table.find([request.request_id for request, _ in drafts])
        is_asked = table.requests.is_asked[rows].tolist()
        lines: list[int] = []
        for place, draft in enumerate(admitted):
            if is_asked[place] and draft.parents is not None and draft.draft_probs is None:
                admitted[place] = self._admit_tree(self._load, int(rows[place]), draft)
            elif is_asked[place]:
                lines.append(place)
        if lines:
            cut = self._admit_lines(self._load, rows[lines], [admitted[place] for place in lines])
            for place, draft in zip(lines, cut, strict=True):
                admitted[place] = draft
        return admitted

    def _admit_lines(self, load: Load, rows: Rows, drafts: list[Draft]) -> list[Draft]:
        """Cut chains, and trees whose tokens are drawn: these by depth and history alone."""
        table = self.books.table
        lengths, bounds = table.rounds.length[rows], table.rounds.bound[rows]
        num_tokens = num_drafted = np.array([len(draft.token_ids) for draft in drafts])
        if are_trees := any(draft.parents is not None for draft in drafts):
            is_chain = np.array([draft.parents is None for draft in drafts])
            num_drafted = np.where(is_chain, num_tokens, lengths)  # positions, or a tree's depth
            bounds = bounds * is_chain
        # a draft shorter than asked for: its drafter has nothing more to offer
        num_offered = np.maximum(num_drafted, bounds * (num_drafted >= lengths))
        length = int(num_offered.max())
        table.rounds.widen(length)
        width = table.rounds.width + 1
        bins, survivals = np.zeros((len(drafts), width), np.int64), np.zeros((len(drafts), width))
        bins[:, :length] = bins_of_rows([confidences_of(draft) for draft in drafts], length)
        is_found = np.array([draft.is_found for draft in drafts]) & (table.rounds.sought[rows] > 0)
        table.rounds.is_found[rows] = is_found
        for drafter, own in groups_of(table.rounds.record[rows]):
            survivals[own, :length] = self.survival.survivals(rows[own], drafter, length, bins[own, :length])
        if np.count_nonzero(num_offered - length):
            survivals *= within(num_offered, width)
        table.rounds.bins[rows], table.rounds.offered[rows] = bins, survivals
        if np.count_nonzero(num_offered - num_drafted):
            survivals *= within(num_drafted, width)
        kept = num_drafted.copy()
        is_probe = table.rounds.is_probe[rows]
        # an optimum over a step's own survivals is for point masses alone (docs/exactness.md, "The trap")
        is_drawn = np.array([draft.draft_probs is not None for draft in drafts])
        kinds = np.where(is_found, FOUND, table.rounds.kind[rows])
        kinds[is_drawn & (kinds == FOUND)] = PRICED
        for kind, own in groups_of(kinds):
            kept[own] = self._policy(kind).cut(load, survivals[own], num_drafted[own], is_probe[own])
        times = load.level.cost.seconds_with(load.base, int(num_drafted.sum()))
        self._claims.add(1.0 - times[kept.sum()] / times[-1])
        for place in (kept < num_tokens + are_trees).nonzero()[0].tolist():
            draft, depth = drafts[place], int(kept[place])
            num_nodes = depth if draft.parents is None else len(draft.token_ids)
            drafts[place] = first_nodes(draft, max_nodes=num_nodes, max_depth=depth)
        return drafts

    def _admit_tree(self, load: Load, row: int, draft: Draft) -> Draft:
        """Cut a tree of point masses node by node, or at its end where its drafter hears of each node's prediction."""
        asked, drafter = self.books.table.rounds, int(self.books.table.rounds.drafter[row])
        assert draft.parents is not None
        rates = self.survival.claimed_rates(drafter, draft.confidences or (0.5,) * len(draft.token_ids))
        offer = self._trees[row] = TreeOffer.of(draft.parents, rates, asked.by_history[row])
        if asked.is_probe[row] or asked.kind[row] != PRICED:
            return draft
        price, num_least = load.level.price.value, int(load.level.trial.goes_on)
        if drafter not in self._told:
            return kept_nodes(draft, offer.paying(price, num_least))
        num_nodes = max(offer.num_first_paying(price), num_least)
        return first_nodes(draft, max_nodes=num_nodes, max_depth=len(draft.token_ids))

    # --- after the step ---

    def end_step(self, step: PricedStep) -> None:
        """End the rounds of a step's requests before they ask again; the rest of what it teaches waits for `learn`."""
        self.learn()
        if self._levels is None or not step.outcomes:
            return
        num_requests = len(step.outcomes) + len(step.held)
        level = self._levels.at(num_requests)
        self._load = Load(level, num_requests, step.shape if self._load is None else self._load.base)
        table = self.books.table
        rows = table.rows([outcome.item.request.request_id for outcome in step.outcomes])
        # a preempted request may have a draft in flight: its round goes on
        has_round = table.requests.is_asked[rows] & [outcome.item.samples for outcome in step.outcomes]
        asked = table.rounds.length[rows] + table.rounds.sought[rows]
        is_asking = bool(step.held) or bool(np.count_nonzero(asked * has_round))
        num_alike = self.lessons.num_alike(step, level, is_asking=is_asking)
        if not (num_alike or is_asking):  # the plain steps before it have taught the same
            self._unlearnt = step
            return
        ended = self._unlearnt = self._end_rounds(step, rows, has_round, num_alike)
        if level.price.is_new and np.count_nonzero(ended.is_priced):
            self.learn()  # without a first price all requests would ask for all tokens

    def _end_rounds(self, step: PricedStep, rows: Rows, has_round: Bools, num_alike: int) -> EndedStep:
        table, requests, outcomes = self.books.table, self.books.table.requests, step.outcomes
        held = table.find([request.request_id for request in step.held])
        drafts = [outcome.item.draft for outcome in outcomes]
        num_drafted = np.array([0 if draft is None else len(draft.token_ids) for draft in drafts])
        samples = np.array([outcome.item.samples for outcome in outcomes])
        rounds = table.rounds.take(rows)
        if np.count_nonzero(has_round) < len(rows):
            silent = (~has_round).nonzero()[0]
            rounds.put(silent, Rounds(len(silent), rounds.width))
        is_plain = samples & (num_drafted == 0)
        if np.count_nonzero(is_plain):
            is_one = np.count_nonzero(rounds.length) + len(held) > 0  # of plain steps, those left out count, too
            self.survival.observe_plain(rows[is_plain], 1 if is_one else num_alike)
        requests.is_asked[rows[has_round]] = False
        # an empty answer counts: a drafter without a draft for one request has answered
        requests.has_answer[rows[rounds.length > 0]] = True
        ended = EndedStep(
            step=step,
            rows=rows,
            rounds=rounds,
            held=table.rounds.take(held[requests.is_asked[held]]) if len(held) else NO_ROUNDS,
            num_drafted=num_drafted,
            num_accepted=np.array([len(outcome.path) for outcome in outcomes]),
            num_judged=np.array([outcome.num_judged for outcome in outcomes]),
            num_alike=num_alike,
            has_round=has_round,
            is_priced=samples & (rounds.kind == PRICED),
            judged=(has_round & (num_drafted > 0)).nonzero()[0],
            trees={place: self._trees.pop(row) for place, row in enumerate(rows.tolist()) if row in self._trees},
        )
        for drafter, own in groups_of(rounds.record[ended.judged]):
            own = ended.judged[own]
            counts = ended.num_judged[own], ended.num_accepted[own]
            rounds.after[own] = self.survival.end_rounds(rows[own], drafter, *counts)
        return ended

    def learn(self) -> None:
        """Learn from the last step's time and offers, unless that is done."""
        if self._unlearnt is None or self._load is None:
            return
        ended, self._unlearnt = self._unlearnt, None
        if isinstance(ended, EndedStep):
            self._load.base = self.lessons.learn(self.books, self._load.level, ended, self.masked)
        else:
            self._load.base = self.lessons.pass_over(self.books, self._load.level, ended)
        gone, self._gone = self._gone, set()
        for request_id in gone:
            self.forget(request_id)

    def forget(self, request_id: str) -> None:
        """Drop a request's state, once its last step is learnt from; its drafter's record stays.

        Until then its id must not be used again.
        """
        if self._unlearnt is not None:
            self._gone.add(request_id)
            return
        (row,) = self.books.table.find([request_id]).tolist()
        self._trees.pop(row, None)
        if self.masked is not None:
            self.masked.forget(row)
        self._off.pop(request_id, None)
        self.books.table.forget(request_id)
