import math

import pytest
import torch

from fakes.priced_bench import ONE_CORE, FarBench, FarDrafts
from outrider.verifier_service.pricing.shortfall import Shortfall


def observed(*, gain: float, seen: float, num_steps: int = 200) -> Shortfall:
    """Steps that should have made `gain` times the tokens of plain decoding, and made `seen` times as many."""
    shortfall = Shortfall()
    for _ in range(num_steps):
        shortfall.observe(log_gain=math.log(gain), num_made=seen * 10, num_forgone=10)
    return shortfall


def test_what_is_not_seen_is_the_loss():
    assert Shortfall().log_loss == 0.0
    assert observed(gain=1.5, seen=0.9).log_loss == pytest.approx(math.log(1.5 / 0.9), rel=0.15)


def test_a_few_steps_say_little():
    assert observed(gain=1.5, seen=0.9, num_steps=1).log_loss == pytest.approx(math.log(1.5 / 0.9) / 5)


def test_what_steps_without_drafts_lose_those_with_drafts_must_bring():
    shortfall = Shortfall()
    for step in range(400):
        has_drafts = step % 4 == 0
        seen = 15 if has_drafts else 8  # of 10 that plain decoding makes
        shortfall.observe(log_gain=math.log(1.5) if has_drafts else None, num_made=seen, num_forgone=10)
    asked, brought = 4 * math.log((15 + 3 * 8) / 40), math.log(1.5)
    assert shortfall.log_loss == pytest.approx(brought - asked, rel=0.4), "more than drafts gain"
    assert shortfall.log_loss < brought - asked


def test_more_than_was_expected_is_no_loss():
    assert observed(gain=1.2, seen=1.4).log_loss == 0.0


def test_it_is_forgotten_while_nothing_drafts():
    shortfall = observed(gain=1.5, seen=0.9)
    before = shortfall.log_loss
    for _ in range(64):
        shortfall.observe_plain()
    assert before * 0.9 < shortfall.log_loss < before
    for _ in range(4096):
        shortfall.observe_plain()
    assert shortfall.log_loss < 0.01


@pytest.mark.parametrize("concurrency", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize(("share_wrong", "level_s", "contention"), [(0.4, 0.004, 0.4), (0.3, 0.002, 0.0)])
def test_a_far_drafter_never_makes_it_slower(concurrency: int, share_wrong: float, level_s: float, contention: float):
    """Against no drafts, and against the best of the fixed lengths: a drafter that splits the batch, or slows steps."""
    drafts = FarDrafts(level_s=level_s, fixed_s=0.003, share_wrong=share_wrong)
    bench = FarBench(drafts, ONE_CORE, contention=contention)

    def speed(num_requests: int = max(8, concurrency), **plan: object) -> float:
        return bench.speed(concurrency, num_requests=num_requests, **plan)

    off, *fixed = (speed(draft_length=length, is_pinned=True) for length in (0, 2, 4))
    speed()  # it learns
    priced = speed(4 * max(8, concurrency))
    assert priced > 0.96 * off
    assert priced > 0.92 * max(fixed)


class StallingBench(FarBench):
    """A machine on which now and then four steps in a row take two and a half times as long, with drafts or without."""

    num_steps = 0

    def _timed_execute(self, batch) -> torch.Tensor:
        begin_s, logits = self.now_s, super()._timed_execute(batch)
        self.num_steps += 1
        if self.num_steps % 60 >= 56:
            self.now_s += 1.5 * (self.now_s - begin_s)
        return logits


def test_what_slows_all_steps_down_is_not_held_against_drafts():
    found: list[float] = []
    for phase in range(0, 60, 5):  # drafts that pay little: a few courses of events say nothing
        drafts = FarDrafts(level_s=0.003, fixed_s=0.003, opening_s=0.01, share_wrong=0.43)
        bench = StallingBench(drafts, ONE_CORE, contention=0.2)
        bench.num_steps = phase
        off = bench.speed(1, num_requests=8, draft_length=0, is_pinned=True)
        found += [bench.speed(1, num_requests=8) / off for _ in range(6)]
    assert sum(found) / len(found) > 1.085, "held against them, stalls leave 1.04 of 1.12"
