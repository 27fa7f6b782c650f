"""Drafts that a drafter in this process is making: the next step may verify them before anybody has read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.verifier_service.drafting.drafter_record import OutstandingRound
from outrider.verifier_service.messages.draft import Draft
from outrider.verifier_service.messages.request import Request
from outrider.verifier_service.sampling.unread import UnreadChains

NO_ANSWER: tuple[int, tuple[int, ...]] = (0, ())  # rounds count from 1


@dataclass(frozen=True, slots=True)
class UnreadDrafts:
    """What answers the rounds of a step, a chain each."""

    request_ids: Sequence[str]
    round_ids: Sequence[int]
    chains: UnreadChains


class DraftsHere(Protocol):
    """A drafter in this process, on the device of the target."""

    def unread(self) -> UnreadDrafts | None:
        """Return all that is being drafted; None: nothing is, or there is more to be heard than drafts."""


def attach(
    unread: UnreadDrafts, running: Sequence[Request], round_of: Callable[[Request], OutstandingRound | None]
) -> list[Request]:
    """Give running requests their unread drafts, and return them; none, unless these are all that is waited for."""
    rounds = zip(unread.round_ids, unread.chains.placeholders(), strict=True)
    answers = dict(zip(unread.request_ids, rounds, strict=True))
    found: list[tuple[Request, Draft]] = []
    for request in running:
        if request.draft is not None:
            return []
        if request.hold_until_s is None:
            continue
        asked, (round_id, token_ids) = round_of(request), answers.get(request.request_id, NO_ANSWER)
        position = len(request.token_ids)
        if asked is None or (asked.round_id, asked.position) != (round_id, position):
            return []
        draft = Draft(request_id=request.request_id, round_id=round_id, position=position, token_ids=token_ids)
        found.append((request, draft))
    for request, draft in found:
        request.draft, request.hold_until_s = draft, None
    return [request for request, _ in found]
