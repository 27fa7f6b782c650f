"""Which requests are given drafts that nobody has read: those of a step, or none of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fakes.engine_bench import make_request
from outrider.verifier_service.drafting.drafter_record import OutstandingRound
from outrider.verifier_service.engine.unread import UnreadDrafts, attach
from outrider.verifier_service.messages.draft import Draft
from outrider.verifier_service.messages.request import Request
from outrider.verifier_service.sampling.unread import UnreadChains, UnreadTokens

NAMES = "abc"


class Running:
    """Three requests that wait for their drafts, of 2, 1 and 3 tokens."""

    def __init__(self) -> None:
        self.requests = [Request.of(make_request(name), 0.0) for name in NAMES]
        for request in self.requests:
            request.hold_until_s = 1.0
        self.rounds = {
            name: OutstandingRound(round_id, len(request.token_ids), 3, 0, 0.0)
            for round_id, (name, request) in enumerate(zip(NAMES, self.requests, strict=True), 7)
        }
        none = torch.zeros(0, 4, dtype=torch.int64)
        chains = UnreadChains(
            np.array([2, 1, 3]), np.array([0, 3, 1, 2, 4, 5]), UnreadTokens(torch.arange(6), none, none)
        )
        self.unread = UnreadDrafts(NAMES, (7, 8, 9), chains)

    def attach(self) -> list[str]:
        found = attach(self.unread, self.requests, lambda request: self.rounds.get(request.request_id))
        return [request.request_id for request in found]


def test_each_has_placeholders_for_its_own_tokens() -> None:
    running = Running()
    assert running.attach() == ["a", "b", "c"]
    drafts = [request.draft for request in running.requests]
    assert [draft and draft.token_ids for draft in drafts] == [(-1, -4), (-2,), (-3, -5, -6)]
    assert all(draft is not None and draft.is_unread for draft in drafts)
    assert [(draft.round_id, draft.position) for draft in drafts if draft] == [(7, 3), (8, 3), (9, 3)]
    assert all(request.hold_until_s is None for request in running.requests)


def test_who_waits_for_nothing_is_left_alone() -> None:
    running = Running()
    running.requests[1].hold_until_s = None
    assert running.attach() == ["a", "c"]
    assert running.requests[1].draft is None


def test_who_is_gone_is_left_out() -> None:
    running = Running()
    del running.requests[0]
    assert running.attach() == ["b", "c"]


@pytest.mark.parametrize("how", ["round", "position", "elsewhere", "read"])
def test_nobody_is_given_one_where_somebody_waits_for_another(how: str) -> None:
    running = Running()
    match how:
        case "round":
            running.rounds["b"].round_id = 6
        case "position":
            running.requests[1].token_ids.append(5)
        case "elsewhere":
            del running.rounds["b"]
        case "read":
            running.requests[1].draft = Draft(request_id="b", round_id=8, position=3, token_ids=(1,))
            running.requests[1].hold_until_s = None
    before = [request.draft for request in running.requests]
    assert running.attach() == []
    assert [request.draft for request in running.requests] == before
    assert running.requests[0].hold_until_s == 1.0


def test_nothing_waits_for_drafts() -> None:
    running = Running()
    for request in running.requests:
        request.hold_until_s = None
    assert running.attach() == []
