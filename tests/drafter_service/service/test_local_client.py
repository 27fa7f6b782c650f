"""A drafter in the verifier's process: it begins when it is asked, and is heard of later."""

from __future__ import annotations

import torch

from fakes.runner import NoisyRunner
from outrider.drafter_service.engine.drafter import DraftEngineConfig
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.service.local_client import LocalDraftClient
from outrider.drafter_service.service.own_weights import DrafterControl
from outrider.verifier_service.messages.draft import LOCAL_DRAFTER_ID, Close, Commits, Drafts, each_draft
from outrider.verifier_service.messages.engine import ControlResult, UpdateDraftWeights
from tiny.drafters import model_drafter
from tiny.scripted_drafter import commit, open_, say

NAMES = "abcd"
OPENS = [open_(name, (1, 2, place)) for place, name in enumerate(NAMES)]


def asks(*names: str, round_id: int = 1, position: int = 3) -> Commits:
    return Commits.of([commit(name, position, round_id=round_id, max_length=3) for name in names])


def make_engine() -> DraftEngine:
    drafter = model_drafter(NoisyRunner(vocab_size=13), torch.Generator().manual_seed(0), vocab_size=13)
    return DraftEngine(drafter, clock=lambda: 0.0, config=DraftEngineConfig())


def drafts_of(client: LocalDraftClient) -> list[tuple[str, int, tuple[int, ...]]]:
    frames = [event.message for event in client.poll() if isinstance(event.message, Drafts)]
    return [(one.request_id, one.round_id, one.token_ids) for frame in frames for one in each_draft(frame)]


def test_chains_begin_when_they_are_asked_for() -> None:
    engine, other = make_engine(), make_engine()
    client = LocalDraftClient(engine)
    client.send(LOCAL_DRAFTER_ID, [*OPENS, asks(*NAMES)])
    assert engine._drafter.num_forwards == 3, "all levels are launched"  # type: ignore[attr-defined]
    assert engine.counters.num_drafts == 0, "none is read"
    [expected] = say(other, *OPENS, asks(*NAMES))
    assert isinstance(expected, Drafts)
    assert drafts_of(client) == [(one.request_id, one.round_id, one.token_ids) for one in expected.drafts()]
    engine.check_integrity()


def test_what_is_said_while_chains_are_drafted_waits_for_them() -> None:
    engine = make_engine()
    client = LocalDraftClient(engine)
    client.send(LOCAL_DRAFTER_ID, [*OPENS, asks(*NAMES)])
    client.send(LOCAL_DRAFTER_ID, [Close(request_id="a")])
    client.send(LOCAL_DRAFTER_ID, [asks("b", "c", round_id=2)])
    engine.check_integrity()
    answered = [(name, round_id) for name, round_id, _ in drafts_of(client)]
    assert answered == [("a", 1), ("b", 1), ("c", 1), ("d", 1), ("b", 2), ("c", 2)]
    assert engine.load().num_sessions == 3
    assert drafts_of(client) == []
    engine.check_integrity()


class NotedControl(DrafterControl):
    """It changes nothing, and notes how many drafts were read before."""

    def __init__(self, engine: DraftEngine) -> None:
        self._of, self.num_drafts = engine, -1

    def handle(self, message: UpdateDraftWeights) -> ControlResult:
        self.num_drafts = self._of.counters.num_drafts
        return ControlResult(call_id=message.call_id)


def test_weights_change_between_two_steps() -> None:
    engine = make_engine()
    control = NotedControl(engine)
    client = LocalDraftClient(engine, control)
    client.send(LOCAL_DRAFTER_ID, [*OPENS, asks(*NAMES)])
    client.change_weights(UpdateDraftWeights(call_id="u", folder="f"))
    assert control.num_drafts == 4, "those that had begun are read"
    assert len(drafts_of(client)) == 4
