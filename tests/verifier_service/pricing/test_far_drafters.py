"""A drafter elsewhere: it splits the batch, slows steps down or stalls, and never makes a verifier slower."""

import pytest
import torch

from fakes.priced_bench import ONE_CORE, FarBench, FarDrafts


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
    assert priced > 0.95 * off
    assert priced > 0.92 * max(fixed)


class StallingBench(FarBench):
    """A machine on which now and then four steps in a row take two and a half times as long, with drafts or without."""

    num_steps = 0

    def _timed_execute(self, batch, chosen=None) -> torch.Tensor:
        begin_s, logits = self.now_s, super()._timed_execute(batch, chosen)
        self.num_steps += 1
        if self.num_steps % 60 >= 56:
            self.now_s += 1.5 * (self.now_s - begin_s)
        return logits


def test_what_slows_all_steps_down_is_not_held_against_drafts():
    found: list[float] = []
    for phase in range(0, 60, 15):  # drafts that pay little: a few courses of events say nothing
        drafts = FarDrafts(level_s=0.003, fixed_s=0.003, opening_s=0.01, share_wrong=0.43)
        bench = StallingBench(drafts, ONE_CORE, contention=0.2)
        bench.num_steps = phase
        off = bench.speed(1, num_requests=8, draft_length=0, is_pinned=True)
        found += [bench.speed(1, num_requests=8) / off for _ in range(6)]
    assert sum(found) / len(found) > 1.085, "held against them, stalls leave 1.04 of 1.12"
