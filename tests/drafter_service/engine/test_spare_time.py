from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from outrider.drafter_service.engine.drafter import Ask, SessionKey
from outrider.drafter_service.engine.forward_cost import ForwardCost
from outrider.drafter_service.engine.outcomes import Pace
from outrider.drafter_service.engine.spare_time import KEPT_ANSWERS, TRIED_ANSWERS, SpareTime
from outrider.verifier_service.messages.draft import Draft, DraftSampling
from outrider.verifier_service.messages.drafter_load import DrafterCounters

KEY = SessionKey("v", "r")
ASK = Ask(key=KEY, ask_id=1, token_ids=[1], sampling=DraftSampling(temperature=0.0), length=2)


@dataclass
class Ahead:
    """A drafter that answers by `result`; a forward takes `step_s`."""

    result: Draft | None = None
    step_s: float = 0.25
    now_s: float = 0.0
    num_forwards: int = 0
    paces: list[Pace | None] = field(default_factory=list)
    budgets: list[int] = field(default_factory=list)
    forgotten: list[SessionKey] = field(default_factory=list)

    def expects(self, key: SessionKey) -> bool:
        return key == KEY

    def take(self, ask: Ask, pace: Pace | None) -> Draft | None:
        self.paces.append(pace)
        return self.result

    def forget_outcomes(self, key: SessionKey) -> None:
        self.forgotten.append(key)

    def has_spare_work(self) -> bool:
        return True

    def run_ahead(self, *, max_num_tokens: int) -> int:
        self.budgets.append(max_num_tokens)
        self.now_s += self.step_s
        self.num_forwards += 1
        return 3

    def spare_time(self) -> tuple[SpareTime, DrafterCounters]:
        counters = DrafterCounters()
        return SpareTime(self, cost=ForwardCost(lambda: self.now_s), counters=counters), counters


def test_a_drafter_that_cannot_run_ahead_has_no_use_for_it():
    spare_time = SpareTime(None, cost=ForwardCost(lambda: 0.0), counters=DrafterCounters())
    assert not spare_time.has_work()
    assert not spare_time.expects(KEY)
    spare_time.forget(KEY)


@pytest.mark.parametrize(
    ("token_ids", "hits", "misses"), [((4, 5), 1, 0), ((), 0, 1), (None, 0, 1)], ids=["hit", "empty", "to be drafted"]
)
def test_hits_and_misses_are_counted(token_ids: tuple[int, ...] | None, hits: int, misses: int):
    result = None if token_ids is None else ASK.answer(token_ids)
    spare_time, counters = Ahead(result).spare_time()
    assert spare_time.answer(ASK, None) == result
    assert (counters.num_cache_hits, counters.num_cache_misses) == (hits, misses)


def test_the_pace_is_the_median_forward_and_the_verifiers_pause():
    ahead = Ahead()
    spare_time, counters = ahead.spare_time()
    spare_time.answer(ASK, 0.5)
    for step_s in (0.25, 9.0, 0.5):
        ahead.step_s = step_s
        spare_time.spend(16)
    spare_time.answer(ASK, None)
    spare_time.answer(ASK, 0.125)
    assert ahead.paces == [None, None, Pace(step_s=0.5, round_s=0.125)]
    assert ahead.budgets == [16, 16, 16]
    assert counters.num_ahead_tokens == 9


def test_forgetting_is_the_drafters():
    ahead = Ahead()
    ahead.spare_time()[0].forget(KEY)
    assert ahead.forgotten == [KEY]


def answered(spare_time: SpareTime, seconds: float, count: int) -> None:
    for _ in range(count):
        spare_time.observe_answer(seconds)


@pytest.mark.parametrize(("without_s", "is_ahead"), [(0.02, True), (0.005, False)], ids=["quicker", "slower"])
def test_running_ahead_is_kept_where_answers_come_quicker(without_s: float, is_ahead: bool):
    spare_time, _ = Ahead().spare_time()
    for _ in range(3):
        assert spare_time.has_work(), "tried first"
        answered(spare_time, 0.01, TRIED_ANSWERS)
        assert not spare_time.has_work(), "then without"
        answered(spare_time, without_s, TRIED_ANSWERS)
        for _ in range(KEPT_ANSWERS):
            assert spare_time.has_work() == is_ahead
            answered(spare_time, 1.0, 1)
