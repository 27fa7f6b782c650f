"""An engine whose drafter is on the target's device: steps are launched behind it, and its drafts are read later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from fakes.engine_bench import EngineBench, Pace, greedy_tokens, tokens_of
from fakes.runner import FakeRunner
from outrider.drafter_service.engine.drafter import ChainAnswers, DraftEngineConfig
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.service.local_client import LocalDraftClient
from outrider.drafter_service.service.plugin_drafter import PluginFailedError
from outrider.verifier_service.engine.launched_step import LaunchedStep
from outrider.verifier_service.engine.unread import UnreadDrafts
from outrider.verifier_service.messages.draft import DrafterEvent, VerifierMessage
from outrider.verifier_service.scheduling.outcome import Outcome
from tiny.drafters import model_drafter

PROMPTS = {name: (5, 9, place + 1) for place, name in enumerate("abcde")}


@dataclass
class Here:
    """The client of a drafter in this process, and what was done in which order."""

    client: LocalDraftClient
    engine: DraftEngine
    done: list[str] = field(default_factory=list)

    @classmethod
    def new(cls) -> Here:
        drafter = model_drafter(FakeRunner(), torch.Generator().manual_seed(0))
        engine = DraftEngine(drafter, clock=lambda: 0.0, config=DraftEngineConfig())
        return cls(LocalDraftClient(engine), engine)

    def send(self, drafter_id: str, messages: Sequence[VerifierMessage]) -> None:
        self.client.send(drafter_id, messages)

    def poll(self) -> list[DrafterEvent]:
        if self.engine.launched is not None:
            self.done.append("read")
        return self.client.poll()

    def unread(self) -> UnreadDrafts | None:
        return self.client.unread()


class UnreadBench(EngineBench):
    pace = Pace.ASYNC

    def __init__(self, **options: object) -> None:
        self.here = Here.new()
        super().__init__(drafts=self.here, **options)
        self.engine.drafts_here = self.here
        execute = self.runner.execute

        def noting(batch, chosen=None):
            self.here.done.append("launch" if min(batch.token_ids) >= 0 else "launch unread")
            return execute(batch, chosen)

        self.runner.execute = noting

    def add_all(self, *names: str, **options: object) -> None:
        for name in names or PROMPTS:
            self.add(name, prompt=PROMPTS[name], **{"draft_length": 3, "drafter_id": "local", **options})

    def settle(self) -> None:
        """Run steps until a draft was verified unread, and forget them."""
        for _ in range(4):
            self.step()
        assert "launch unread" in self.here.done
        self.here.done.clear()


def check_tokens(outputs: dict[str, list], num_tokens: int) -> None:
    for name, found in outputs.items():
        assert tokens_of(found) == greedy_tokens(num_tokens, PROMPTS[name])


def test_a_step_is_launched_before_its_drafts_are_read() -> None:
    bench = UnreadBench()
    bench.add_all(max_tokens=40)
    bench.settle()
    bench.step()
    bench.step()
    assert bench.here.done == ["launch unread", "read"] * 2


def test_tokens_are_those_of_plain_decoding() -> None:
    bench = UnreadBench()
    bench.add_all(max_tokens=40)
    check_tokens(bench.finish(), 40)
    assert bench.here.done.count("launch unread") > 5
    assert bench.engine.stats.num_accepted_tokens > 100
    bench.engine.check_integrity()


def test_what_is_left_of_the_budget_cuts_drafts_that_were_not_read() -> None:
    bench = UnreadBench(max_num_batched_tokens=11)
    bench.add_all(max_tokens=24)
    check_tokens(bench.finish(), 24)
    assert "launch unread" in bench.here.done


@pytest.mark.parametrize(
    "hold_up",
    [
        lambda bench: bench.add("x", draft_length=3, drafter_id="local", max_tokens=40, presence_penalty=0.5),
        lambda bench: setattr(bench.engine, "launches_early", False),
        lambda bench: setattr(bench.engine, "drafts_here", None),
        lambda bench: bench.engine.pricing._claims.add(0.5, 20),
    ],
    ids=["edited", "in turn", "elsewhere", "cut"],
)
def test_drafts_are_read_first_where_the_step_depends_on_them(hold_up: Callable[[UnreadBench], object]) -> None:
    bench = UnreadBench()
    bench.add_all(max_tokens=60)
    bench.settle()
    hold_up(bench)
    for _ in range(3):
        bench.step()
    bench.here.done.clear()
    for _ in range(3):
        bench.step()
    assert bench.here.done == ["read", "launch"] * 3


def test_who_waits_for_another_drafter_is_heard_first() -> None:
    """A draft of a prediction, or one that is on its way from elsewhere, is in the same step."""
    bench = UnreadBench()
    bench.add_all(max_tokens=60)
    bench.settle()
    bench.engine.requests["a"].hold_until_s = bench.now_s + 1.0
    bench.engine.drafting._sessions["a"].round = None
    bench.step()
    assert bench.here.done == ["read", "launch"]


def test_a_request_that_is_cancelled_after_its_ask_leaves_the_others_unread() -> None:
    bench = UnreadBench()
    bench.add_all(max_tokens=40)
    bench.settle()
    bench.engine.cancel("b")
    bench.step()
    assert bench.here.done == ["launch unread", "read"]
    outputs = bench.finish()
    assert "b" not in outputs
    bench.engine.check_integrity()
    assert bench.engine.scheduler.kv_usage == 0.0


def test_a_drafter_that_fails_while_it_is_read_costs_its_requests_a_step() -> None:
    bench = UnreadBench()
    bench.add_all(max_tokens=40)
    bench.settle()
    launched = bench.here.engine.launched
    assert launched is not None

    def fail() -> list[ChainAnswers]:
        raise PluginFailedError("broken")

    object.__setattr__(launched[1], "read", fail)
    before = {name: len(request.token_ids) for name, request in bench.engine.requests.items()}
    assert bench.step() == []
    assert bench.here.done == ["launch unread", "read"]
    assert {name: len(request.token_ids) for name, request in bench.engine.requests.items()} == before
    outputs = bench.finish()
    for name, found in outputs.items():
        expected = greedy_tokens(40, PROMPTS[name])
        assert expected[-len(tokens_of(found)) :] == tokens_of(found)
    bench.engine.check_integrity()


def test_a_step_takes_from_its_drafts_and_not_from_its_launch() -> None:
    """What is waited for drafts is no part of what verifying them takes."""
    bench = UnreadBench()
    bench.add_all(max_tokens=40)
    bench.settle()
    poll, steps = bench.here.poll, []

    def slow() -> list[DrafterEvent]:
        bench.now_s += 0.5
        return poll()

    bench.here.poll = slow
    price = bench.engine._price

    def noting(step: LaunchedStep, outcomes: Sequence[Outcome], step_s: float) -> None:
        steps.append((step.exposed_s, step_s))
        price(step, outcomes, step_s)

    bench.engine._price = noting
    bench.step()
    assert steps == [(pytest.approx(0.5), pytest.approx(0.0))]
