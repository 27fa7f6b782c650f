"""The verifier's side of drafting: choose drafters, ask them, wait for drafts until a deadline, attach what arrives.

Sans I/O: drafters are reached through a `DraftClient`, time is passed in. A step never waits beyond the deadline: a
request whose draft is in flight is *held* until then, and then runs without a draft. The deadline is estimated from
earlier rounds only. No drafter, a late, stale or bad draft: each is an empty draft, that is, plain decoding.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from outrider.verifier_service.drafting.asking import Asking, CoordinatorConfig, Outbox
from outrider.verifier_service.drafting.drafter_record import (
    AnsweredRound,
    DrafterChoice,
    DrafterRecord,
    DraftSession,
    OutstandingRound,
    WantedDraft,
)
from outrider.verifier_service.drafting.filing import Filing
from outrider.verifier_service.drafting.followed_updates import FollowedUpdates
from outrider.verifier_service.drafting.joining import DueDraft
from outrider.verifier_service.drafting.predicted_text import PREDICTION, Predictions
from outrider.verifier_service.drafting.served_texts import ServedTexts
from outrider.verifier_service.drafting.state_source import StateSource
from outrider.verifier_service.messages.counts import Histogram
from outrider.verifier_service.messages.draft import (
    NO_NEEDS,
    Close,
    Draft,
    DraftClient,
    DrafterEvent,
    DraftNeeds,
    Drafts,
    Resync,
    VerifierMessage,
)
from outrider.verifier_service.messages.draft_checks import check_draft, check_drafts
from outrider.verifier_service.messages.engine import NEVER, BreakerState, DrafterPerformance
from outrider.verifier_service.messages.request import DisabledReason, Request
from outrider.verifier_service.pricing.draft_pricing import DraftPricing
from outrider.verifier_service.pricing.offer import Ask, AskLength

ROUND_TRIP_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0)
LATENESS_BOUNDS_S = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class DraftCoordinator:
    """The drafting side of the step loop: `receive` before scheduling, `ask` after committing."""

    def __init__(
        self,
        client: DraftClient,
        config: CoordinatorConfig,
        states: StateSource | None = None,
        pricing: DraftPricing | None = None,
    ) -> None:
        """`states`: the target's hidden states, for drafters that read them. Without `pricing`, plans set lengths."""
        self._client = client
        self._pricing = pricing
        self._config = config
        self.filing, self.updates = Filing(in_rollouts=config.rollouts), FollowedUpdates()
        self._drafters: dict[str, DrafterRecord] = {}
        self._asking = Asking(self._drafters, self.filing, states, config)
        self._texts = ServedTexts(self.filing, states, self._drafters, is_on=config.tells_texts)
        self._sessions: dict[str, DraftSession] = {}
        self._answered: dict[str, AnsweredRound] = {}  # by request; kept when the drafter is lost
        self._predictions = Predictions()
        self._num_steps = 0  # with a round that counts; see `choose`
        self.fallbacks: collections.Counter[str] = collections.Counter()  # rounds that ended without a draft, by reason
        self.num_stale_drafts = self.num_resyncs = 0
        self.num_asks = self.num_asked_tokens = 0  # one ask per request and step, also for a length of 0
        self.round_trip_s = Histogram(ROUND_TRIP_BOUNDS_S)
        self.lateness_s = Histogram(LATENESS_BOUNDS_S)

    def drafters(self, now_s: float) -> tuple[DrafterPerformance, ...]:
        """Return the performance of every drafter that has answered."""
        all_ = (
            record.performance(drafter_id, now_s, self._num_steps, self.updates.num_behind(drafter_id))
            for drafter_id, record in self._drafters.items()
        )
        return tuple(performance for performance in all_ if performance is not None)

    @property
    def request_ids(self) -> set[str]:
        """The requests with any state here."""
        recorded = {request_id for drafter in self._drafters.values() for request_id in drafter.session_ids}
        return {*self._sessions, *self._answered} | recorded | self._predictions.request_ids | self._texts.request_ids

    def needs_of(self, request: Request) -> DraftNeeds:
        """Return what a request's drafter must be sent besides tokens."""
        session = self._sessions.get(request.request_id)
        return NO_NEEDS if session is None else self._drafters[session.drafter_id].needs

    @property
    def reads_logits(self) -> bool:
        """Whether any drafter is told more of the target's logits than its tokens."""
        return any(record.needs.predictions or record.needs.num_top for record in self._drafters.values())

    def num_top_of(self, request: Request, *, is_unasked: bool) -> int:
        """Return how many of the target's likeliest tokens a pool learns from; `is_unasked`: also without a session."""
        return self._texts.num_top_of(request, self._sessions.get(request.request_id), is_unasked=is_unasked)

    def answered_round(self, request: Request) -> AnsweredRound | None:
        """Return the request's last round with a valid draft, or None."""
        return self._answered.get(request.request_id)

    def round_of(self, request: Request) -> OutstandingRound | None:
        """Return a request's round without an answer, or None."""
        session = self._sessions.get(request.request_id)
        return None if session is None else session.round

    def circuits(self, now_s: float) -> dict[str, BreakerState]:
        """Return the state of the circuit breaker of every drafter that is up."""
        return {drafter_id: drafter.breaker.state_at(now_s) for drafter_id, drafter in self._drafters.items()}

    def due(self, request: Request) -> DueDraft | None:
        """Return when a held request's draft is expected; None: not held, or no earlier round to estimate from."""
        session = None if request.hold_until_s is None else self._sessions.get(request.request_id)
        return None if session is None else self._drafters[session.drafter_id].due(session)

    # --- before scheduling ---

    def receive(self, requests: Mapping[str, Request], now_s: float) -> None:
        """Attach drafts that have arrived, drop stale ones, and release requests whose draft is late or lost."""
        for event in self._client.poll():
            self._on_event(event, requests, now_s)
        self._send(self.filing.take_seeds(self._drafters))
        self._texts.tick(now_s)
        self._expire_rounds(requests, now_s)

    def _on_event(self, event: DrafterEvent, requests: Mapping[str, Request], now_s: float) -> None:
        self.updates.hear(event)
        if not event.is_up:
            self._lose_drafter(event.drafter_id, requests)
            return
        if event.drafter_id not in self._drafters:
            self._drafters[event.drafter_id] = DrafterRecord.new(
                event.vocab_size or self._config.vocab_size,
                event.needs,
                first_s=self._config.first_deadline_s,
                min_s=self._config.min_deadline_s,
                max_s=self._config.max_deadline_s,
            )
        match event.message:
            case Draft() as draft:
                self._on_draft(event.drafter_id, draft, requests, min(event.received_s or now_s, now_s))
            case Drafts() as frame:
                self._on_drafts(event.drafter_id, frame, requests, min(event.received_s or now_s, now_s))
            case Resync(request_id=request_id):
                self._on_resync(event.drafter_id, request_id, requests, now_s)

    def _on_drafts(self, drafter_id: str, frame: Drafts, requests: Mapping[str, Request], now_s: float) -> None:
        """Attach a frame's chains that are good and in time, in one pass; `_on_draft` takes each of the others.

        For the next deadline a frame counts once, for each time at which some of it was asked for.
        """
        drafter, sessions, answered = self._drafters[drafter_id], self._sessions, self._answered
        found = [sessions.get(request_id) for request_id in frame.request_ids]
        own = [one if one is not None and one.drafter_id == drafter_id else None for one in found]
        rounds = [None if session is None else session.round for session in own]
        max_lengths = np.array([asked.max_length if asked is not None else 0 for asked in rounds], np.int64)
        are_bad = check_drafts(frame, draft_vocab_size=drafter.vocab_size, max_lengths=max_lengths).tolist()
        of_round: AnsweredRound | None = None
        num_held = 0
        for draft, session, asked, is_bad in zip(frame.drafts(), own, rounds, are_bad, strict=True):
            request = requests.get(draft.request_id)
            if (
                is_bad
                or asked is None
                or session is None
                or request is None
                or asked.round_id != draft.round_id
                or not asked.position == draft.position == len(request.token_ids)
            ):
                self._on_draft(drafter_id, draft, requests, now_s)
                continue
            if of_round is None or of_round.asked_s != asked.asked_s:
                of_round = AnsweredRound(drafter_id=drafter_id, asked_s=asked.asked_s, received_s=now_s)
                drafter.timer_of(session).observe(now_s - asked.asked_s)
            num_held += session.has_answered and request.hold_until_s is not None
            self.round_trip_s.observe(now_s - asked.asked_s)
            drafter.breaker.record_success(now_s)  # in turn with the failures of others
            session.round, session.has_answered = None, True
            request.hold_until_s, request.draft = None, draft
            answered[draft.request_id] = of_round
        if of_round is not None:
            drafter.late_share.observe(now_s, is_late=False, count=num_held)

    def _on_draft(self, drafter_id: str, draft: Draft, requests: Mapping[str, Request], now_s: float) -> None:
        request, session = requests.get(draft.request_id), self._sessions.get(draft.request_id)
        outstanding = session.round if session is not None and session.drafter_id == drafter_id else None
        if request is None or session is None or outstanding is None or outstanding.round_id != draft.round_id:
            self.num_stale_drafts += 1
            self._observe_lateness(drafter_id, session, draft, now_s)
            return
        session.round = None
        if outstanding.position != request.num_tokens:  # the request ran without this draft: background, or preempted
            if outstanding.background_until_s is None:
                self.num_stale_drafts += 1
                return
            session.has_answered = True
            self._drafters[drafter_id].breaker.record_success(now_s)
            return
        was_held, request.hold_until_s = request.hold_until_s is not None, None  # not held: preempted since the ask
        drafter = self._drafters[drafter_id]
        limits = {"max_length": outstanding.max_length, "max_nodes": outstanding.max_nodes}
        problem = check_draft(draft, draft_vocab_size=drafter.vocab_size, **limits)
        if problem or draft.position != outstanding.position:
            self.fallbacks["bad_draft"] += 1
            drafter.breaker.record_failure(now_s)
            return
        drafter.breaker.record_success(now_s)
        drafter.timer_of(session).observe(now_s - outstanding.asked_s)
        if session.has_answered and was_held:
            drafter.late_share.observe(now_s, is_late=False)
        self.round_trip_s.observe(now_s - outstanding.asked_s)
        session.has_answered = True
        request.draft = draft
        self._answered[request.request_id] = AnsweredRound(
            drafter_id=drafter_id, asked_s=outstanding.asked_s, received_s=now_s
        )

    def _observe_lateness(self, drafter_id: str, session: DraftSession | None, draft: Draft, now_s: float) -> None:
        """Give the round trip of a late draft to its drafter's timer, so that the next deadline allows for it."""
        missed = session.missed if session is not None and session.drafter_id == drafter_id else None
        if session is None or missed is None or missed.round_id != draft.round_id:
            return
        self.lateness_s.observe(max(0.0, now_s - session.missed_deadline_s))
        self._drafters[drafter_id].timer_of(session).observe(now_s - missed.asked_s)
        session.missed, session.has_answered = None, True

    def _on_resync(self, drafter_id: str, request_id: str, requests: Mapping[str, Request], now_s: float) -> None:
        """Send the drafter the whole prefix again. The round's deadline stays: no step waits longer for it."""
        request, session = requests.get(request_id), self._sessions.get(request_id)
        if request is None or session is None or session.drafter_id != drafter_id:
            return
        self.num_resyncs += 1
        session.num_sent_tokens = session.num_sent_states = 0
        session.has_answered = False
        if (outstanding := session.round) is not None:
            until_s = outstanding.background_until_s
            wanted = WantedDraft(request, session, outstanding.max_length, outstanding.max_computed)
            self._client.send(drafter_id, self._asking.begin(wanted, now_s, until_s))

    def _lose_drafter(self, drafter_id: str, requests: Mapping[str, Request]) -> None:
        drafter = self._drafters.pop(drafter_id, None)
        if drafter is None:
            return
        for request_id in drafter.session_ids:
            session = self._sessions.pop(request_id)
            requests[request_id].predicted_ids = ()  # another drafter may not be told any
            if session.round is not None:
                self.fallbacks["drafter_lost"] += 1
                requests[request_id].hold_until_s = None

    def _expire_rounds(self, requests: Mapping[str, Request], now_s: float) -> None:
        """End the rounds whose deadline has passed: their requests run without a draft in this step.

        A drafter that stalls misses many requests' rounds at once; that counts as one failure.
        """
        late: dict[tuple[str, bool], DraftSession] = {}  # one session per timer
        for request_id, session in self._sessions.items():
            if session.round is None:
                continue
            request = requests[request_id]
            deadline_s = session.round.background_until_s if request.hold_until_s is None else request.hold_until_s
            if deadline_s is None or deadline_s > now_s:
                continue
            session.missed, session.missed_deadline_s = session.round, deadline_s
            session.round = request.hold_until_s = None
            self.fallbacks["timeout"] += 1
            late[session.drafter_id, session.has_answered] = session
            if session.has_answered:
                self._drafters[session.drafter_id].late_share.observe(now_s, is_late=True)
        for session in late.values():
            self._drafters[session.drafter_id].timer_of(session).back_off()
        for drafter_id in {drafter_id for drafter_id, _ in late}:
            self._drafters[drafter_id].breaker.record_failure(now_s)

    # --- after committing ---

    def observe_verified(self, drafts: Iterable[tuple[str, int, int]]) -> None:
        """Credit a step's drafts to their drafters: of each its request, how many tokens were verified and accepted."""
        counts: dict[str, list[int]] = {}  # by drafter
        for request_id, num_drafted, num_accepted in drafts:
            if (answered := self._answered.get(request_id)) is not None:
                count = counts.setdefault(answered.drafter_id, [0, 0])
                count[0] += num_drafted
                count[1] += num_accepted
        for drafter_id, (num_drafted, num_accepted) in counts.items():
            self.updates.observe(drafter_id, num_drafted, num_accepted)
            if (record := self._drafters.get(drafter_id)) is not None:
                record.draft_yield.observe_accepted(num_accepted)

    def ask(self, requests: Iterable[Request], now_s: float) -> None:
        """Send each request's new tokens to its drafter and hold the request until the draft's deadline."""
        self.send(self.choose(requests, now_s), now_s)

    def choose(self, requests: Iterable[Request], now_s: float) -> list[WantedDraft]:
        """Return whose drafts to ask for and how long; end the sessions of requests whose plan is off.

        Reads token values only of requests with a prediction; the others' last token may be a placeholder.
        """
        asks, reasons = self._asks_of(requests, now_s)
        lengths = [AskLength(ask.bound) for ask in asks] if self._pricing is None else self._pricing.ask_all(asks)
        wanted: list[WantedDraft] = []
        outbox: Outbox = {}
        num_rounds: collections.Counter[str] = collections.Counter()
        # a round without a draft does not count for a drafter's yield if the price forbids drafts
        is_forbidden = self._pricing is not None and self._pricing.price == NEVER
        sessions = self._sessions
        for (request, drafter_id, _, _), reason, answer in zip(asks, reasons, lengths, strict=True):
            length, price_reason, max_computed = answer
            request.metrics.disabled_reason = reason or price_reason
            session = sessions.get(request.request_id)
            if drafter_id and (length or not is_forbidden):
                num_rounds[drafter_id] += 1
            if drafter_id and length:
                if session is None or session.drafter_id != drafter_id:
                    session = self._begin_session(request, drafter_id, outbox)
                wanted.append(WantedDraft(request, session, length, max_computed))
            elif session is not None and request.plan.is_off:
                self._end_session(request.request_id, outbox)
            elif session is not None:
                session.round = None  # its draft will be stale
        are_allowed = [self._drafters[id_].breaker.allow(now_s) for id_ in {one.session.drafter_id for one in wanted}]
        assert all(are_allowed), "a drafter was chosen that may not be asked"
        self._num_steps += bool(num_rounds)
        for drafter_id in num_rounds.keys() & self._drafters.keys():
            self._drafters[drafter_id].draft_yield.observe_rounds(num_rounds[drafter_id], self._num_steps)
        self._send(outbox)
        return wanted

    def send(self, wanted: Sequence[WantedDraft], now_s: float) -> None:
        """Ask for the chosen drafts and hold their requests, once the tokens that the drafts follow are known."""
        self.num_asked_tokens += sum([one.length for one in wanted])
        self._send(self._asking.begin_all(wanted, now_s))

    def _send(self, outbox: Mapping[str, Sequence[VerifierMessage]]) -> None:
        for drafter_id, messages in outbox.items():
            self._client.send(drafter_id, messages)

    def _draft_from_prediction(self, request: Request, guess: tuple[int, ...]) -> None:
        """Use a prediction's guess as the draft, within the price: point masses that follow from committed tokens."""
        if (session := self._sessions.get(request.request_id)) is not None:
            session.round = None
        self._answered.pop(request.request_id, None)  # accepted tokens are not a drafter's
        bound, reason = self._bound_of(request)
        length = min(len(guess), bound)
        if length > 0 and self._pricing is not None and not request.plan.is_pinned:
            survivals = self._predictions.survivals(request, length)
            length, reason, _ = self._pricing.cut_prediction(request, PREDICTION, survivals)
        request.metrics.disabled_reason = reason
        if length > 0:
            position = request.num_tokens
            request.draft = Draft(
                request_id=request.request_id, round_id=0, position=position, token_ids=guess[:length]
            )
            request.metrics.enabled = True

    def close(self, request: Request) -> None:
        """Forget a finished request, whose states are still there, and let its drafter free the session."""
        outbox: Outbox = self.filing.ending(request, self._drafters)
        outbox |= self._texts.ending(request, self._sessions.get(request.request_id))
        self._answered.pop(request.request_id, None)
        self._predictions.forget(request.request_id)
        self._end_session(request.request_id, outbox)
        self._texts.forget(request.request_id)
        self._send(outbox)

    def _asks_of(self, requests: Iterable[Request], now_s: float) -> tuple[list[Ask], list[DisabledReason | None]]:
        """Return the longest drafts that a step's requests may ask for, by counts and never by drawn tokens.

        Of those that may ask for none also why. A prediction's guess becomes its request's draft at once; while a
        drafter reads a prompt in the background, its request asks for nothing.
        """
        asks: list[Ask] = []
        reasons: list[DisabledReason | None] = []
        sessions, drafters, choice = self._sessions, self._drafters, DrafterChoice(self._drafters, now_s)
        for request in requests:
            self.num_asks += 1
            plan, session = request.plan, sessions.get(request.request_id)
            if request.prediction_token_ids and (guess := self._predictions.guess(request)):
                self._draft_from_prediction(request, guess)
                continue
            bound, reason = self._bound_of(request)
            drafter_id, needs = None, NO_NEEDS
            if drafters and not (plan.draft_length == 0 and plan.drafter_id is None):
                if session is not None:
                    if session.round is not None and session.round.background_until_s is not None:
                        continue
                    if session.drafter_id in choice.sure and plan.drafter_id in (None, session.drafter_id):
                        drafter_id = session.drafter_id
                drafter_id = drafter_id or choice.of(plan, session, is_asking=bound > 0)
            if drafter_id is not None:
                needs = drafters[drafter_id].needs
            elif bound > 0:
                reason = DisabledReason.DRAFTER_TIMEOUT if drafters else DisabledReason.DRAFTER_UNAVAILABLE
                bound = 0
            asks.append(Ask(request, drafter_id or "", bound, needs))
            reasons.append(reason)
        return asks, reasons

    def _bound_of(self, request: Request) -> tuple[int, DisabledReason | None]:
        """Return the longest draft that plan, request and remaining places allow; if it is 0, with the reason."""
        sampling, length = request.sampling, request.plan.draft_length
        if sampling.num_speculative_tokens is not None:
            if sampling.num_speculative_tokens == 0:
                return 0, DisabledReason.REQUEST_OPT_OUT
            length = min(length, sampling.num_speculative_tokens)
        if length == 0:
            return 0, request.plan.disabled_reason
        # one place is left for the bonus token
        limit = min(request.num_prompt_tokens + sampling.max_tokens, self._config.max_model_len)
        left = limit - len(request.token_ids) - 1
        if left > 0:
            return min(length, left), None
        return 0, request.metrics.disabled_reason  # no new reason

    def _begin_session(self, request: Request, drafter_id: str, outbox: Outbox) -> DraftSession:
        self._end_session(request.request_id, outbox)
        session = self._sessions[request.request_id] = DraftSession(drafter_id)
        self._drafters[drafter_id].session_ids.add(request.request_id)
        return session

    def _end_session(self, request_id: str, outbox: Outbox) -> None:
        session = self._sessions.pop(request_id, None)
        if session is not None:
            self._texts.note_end(request_id, session)
            self._drafters[session.drafter_id].session_ids.discard(request_id)
            outbox.setdefault(session.drafter_id, []).append(Close(request_id=request_id))
