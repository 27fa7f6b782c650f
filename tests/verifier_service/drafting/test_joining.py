import random

import pytest

from fakes.priced_bench import FREE, FarBench, FarDrafts
from outrider.verifier_service.drafting.joining import DueDraft, worth_waiting_until

NOW_S = 100.0


def until(*due_in_s: float, late_s: float = 0.0, num_ready: int = 2, step_s=lambda _: 0.020) -> float:
    """Return how long two requests that are ready should wait for others, whose drafts are due in so many seconds."""
    held = [DueDraft(NOW_S + seconds, NOW_S + seconds + late_s, num_tokens=3) for seconds in due_in_s]
    found = worth_waiting_until(NOW_S, held, num_ready=num_ready, num_ready_tokens=num_ready * 3, step_s=step_s)
    return found - NOW_S


def test_a_flat_step_is_shared_if_the_wait_is_shorter_than_it():
    assert until(0.010, 0.010) == pytest.approx(0.010)
    assert until(0.030, 0.030) == 0.0


def test_where_every_token_costs_as_much_nobody_waits():
    assert until(0.001, 0.001, step_s=lambda count: 0.010 * count) == 0.0


def test_one_straggler_is_left_behind():
    assert until(0.002, 0.002, 0.030) == pytest.approx(0.002)
    assert until(0.015, num_ready=7) == 0.0


def test_drafts_that_should_have_come_long_ago_are_not_waited_for():
    assert until(-0.001, 0.0) == 0.0
    assert until(-0.010, late_s=0.009) == 0.0
    assert until() == 0.0


def test_one_that_is_late_gets_as_long_as_late_ones_take_if_that_is_not_too_long():
    assert until(-0.001, late_s=0.006) == pytest.approx(0.005)
    assert until(0.005, late_s=0.006) == pytest.approx(0.011)
    assert until(-0.001, late_s=0.100) == 0.0


def test_whose_draft_may_come_soon_or_late_counts_as_there_only_when_it_is_expected():
    uncertain = DueDraft(NOW_S - 0.001, NOW_S + 0.198, num_tokens=3)
    soon = DueDraft(NOW_S + 0.003, NOW_S + 0.004, num_tokens=3)

    def found(*held: DueDraft, step_s: float) -> float:
        flat = worth_waiting_until(NOW_S, held, num_ready=2, num_ready_tokens=6, step_s=lambda _: step_s)
        return flat - NOW_S

    assert found(soon, step_s=0.005) == found(uncertain, soon, step_s=0.005) == 0.0
    assert found(uncertain, soon, step_s=0.020) == pytest.approx(0.004), "not for the one that may be long in coming"
    assert found(uncertain, soon, step_s=1.0) == pytest.approx(0.198), "until both have come"


def sizes_of_steps(drafts: FarDrafts) -> list[int]:
    """Return how many requests each step had, of two whose fifth asks the drafter gets one by one."""
    bench = FarBench(drafts, FREE)
    send, execute = bench.drafts.send, bench.runner.execute
    num_asks, sizes = 0, list[int]()

    def parting(drafter_id, messages) -> None:
        nonlocal num_asks
        num_asks += 1
        for batch in [[message] for message in messages] if num_asks == 5 else [messages]:
            send(drafter_id, batch)

    def counted(batch, chosen):
        sizes.append(len(batch.query_lengths))
        return execute(batch, chosen)

    bench.drafts.send, bench.runner.execute = parting, counted
    bench.speed(2, num_requests=2, max_tokens=200, draft_length=2, is_pinned=True)
    return sizes[12:-4]


@pytest.mark.parametrize(("level_s", "is_together"), [(0.003, True), (0.030, False)])
def test_requests_that_fell_apart_find_together_again(level_s: float, is_together: bool):
    sizes = sizes_of_steps(FarDrafts(level_s=level_s))
    assert len(sizes) > 4
    assert (min(sizes) == 2) == is_together


class UnevenDrafts(FarDrafts):
    """A drafter that answers each ask by itself, now sooner and now later than usual."""

    def __init__(self) -> None:
        super().__init__(level_s=0.003)
        self._rng = random.Random(0)

    def send(self, drafter_id, messages) -> None:
        for message in messages:
            self._free_s, self.level_s = 0.0, self._rng.choice([0.002, 0.003, 0.004])
            super().send(drafter_id, [message])
        self._coming.sort(key=lambda batch: batch[0])


def test_drafts_that_take_somewhat_longer_than_usual_are_waited_for():
    sizes = sizes_of_steps(UnevenDrafts())
    assert sizes.count(2) / len(sizes) > 0.9
