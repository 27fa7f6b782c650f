"""What a pool that learns is told of a request beyond the asks for drafts: the rest of its text, once it has ended.

The verifier has the text, the hidden states and the target's law of every request. A drafter hears of them with each
ask, and where drafts do not pay it is asked for none: then it is told all here, so that it learns to draft better.

    asked for drafts:   Open  States  Commit  ...  Commit │ States  Commit(max_length=0)  Close
    for none:                                             │ Open  States  Commit(max_length=0)  Close
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping

from outrider.verifier_service.drafting.drafter_record import DrafterRecord, DraftSession
from outrider.verifier_service.drafting.filing import Filing
from outrider.verifier_service.drafting.state_source import StateSource
from outrider.verifier_service.messages.draft import MAX_SAMPLE_TOKENS, Close, Commit, States, VerifierMessage
from outrider.verifier_service.messages.request import Request

TOKENS_PER_S = 2048  # at most, on average: the step loop reads the states
MAX_TOKENS_AT_ONCE = 8192


class ServedTexts:
    """Tells drafters of ended requests, so much a second."""

    def __init__(
        self, filing: Filing, states: StateSource | None, drafters: Mapping[str, DrafterRecord], *, is_on: bool
    ) -> None:
        """`drafters` are those that are up, by id. `is_on`: a request's states are still there when it has ended."""
        self._filing, self._states, self._drafters, self._is_on = filing, states, drafters, is_on
        self._heard: set[str] = set()  # running requests of which a drafter has made a sample already
        self._learning: list[str] = []  # of those drafters, the ones whose pool learns: looked up once a step
        self._num_allowed, self._now_s = float(MAX_TOKENS_AT_ONCE), 0.0

    @property
    def request_ids(self) -> set[str]:
        return self._heard

    def tick(self, now_s: float) -> None:
        """Allow more text to be told, for the time that has passed; drafters come and go just before it alone."""
        allowed = self._num_allowed + TOKENS_PER_S * (now_s - self._now_s)
        self._num_allowed, self._now_s = min(MAX_TOKENS_AT_ONCE, allowed), now_s
        self._learning = sorted(drafter_id for drafter_id, record in self._drafters.items() if record.needs.learns)

    def drafter_of(self, request: Request, session: DraftSession | None) -> str | None:
        """Return the drafter whose pool learns from a request: of its session, else one of all; None: there is none."""
        if not self._is_on or not request.may_learn or request.sampling.num_speculative_tokens == 0:
            return None
        if session is not None:
            return session.drafter_id if self._drafters[session.drafter_id].needs.learns else None
        if not self._learning:
            return None
        return self._learning[zlib.crc32(request.request_id.encode()) % len(self._learning)]

    def num_top_of(self, request: Request, session: DraftSession | None, *, is_unasked: bool) -> int:
        """Return how many of the target's likeliest tokens are told; `is_unasked`: also without a session."""
        drafter_id = session.drafter_id if session is not None else None
        if session is None and is_unasked:
            drafter_id = self.drafter_of(request, None)
        return self._drafters[drafter_id].needs.num_top if drafter_id is not None and request.may_learn else 0

    def note_end(self, request_id: str, session: DraftSession) -> None:
        """Note that a running request's session is closed: its text so far is a sample."""
        if session.num_sent_tokens and self._drafters[session.drafter_id].needs.learns:
            self._heard.add(request_id)

    def forget(self, request_id: str) -> None:
        self._heard.discard(request_id)

    def ending(self, request: Request, session: DraftSession | None) -> dict[str, list[VerifierMessage]]:
        """Return messages with what a drafter has not heard of an ended request; the `Close` of a `session` follows."""
        drafter_id = self.drafter_of(request, session)
        is_heard, told = request.request_id in self._heard, session or DraftSession("")
        stop, is_new = min(request.num_tokens, MAX_SAMPLE_TOKENS), not told.num_sent_tokens
        start = request.num_prompt_tokens if is_new else told.num_sent_tokens
        num_tokens = stop if is_new else stop - start
        is_moving = request.stands_until_s is not None  # who takes it over tells of it
        if drafter_id is None or is_moving or (is_new and is_heard) or start >= stop or num_tokens > self._num_allowed:
            return {}
        record, opening = self._drafters[drafter_id], self._filing.opening(request, request.num_prompt_tokens)
        if (record.needs.history and opening.history is not None) or not record.breaker.would_allow(self._now_s):
            return {}
        self._num_allowed -= num_tokens
        messages: list[VerifierMessage] = [opening] if is_new else []
        messages.extend(self._states_of(request, record, told.num_sent_states, stop))
        messages.append(
            Commit(
                request_id=request.request_id,
                round_id=0,
                position=start,
                token_ids=tuple(request.token_ids[start:stop]),
                max_length=0,
                target_rows=tuple(request.target_rows[: stop - start]),
            )
        )
        if session is None:
            messages.append(Close(request_id=request.request_id))
        return {drafter_id: messages}

    def _states_of(self, request: Request, record: DrafterRecord, start: int, stop: int) -> Iterator[States]:
        """Yield the states that a drafter lacks; the last token has none. One by one where it keeps the last alone."""
        if self._states is None or not record.needs.taps:
            return
        stop = min(stop, request.num_computed_tokens, request.num_tokens - 1)
        if not record.needs.last_state_only:
            yield from self._states.messages(request, start, stop)
            return
        for position in range(max(start, request.num_prompt_tokens - 1), stop):
            yield from self._states.messages(request, position, position + 1)
