import pytest

from outrider.verifier_service.joining import DueDraft, worth_waiting_until
from priced_bench import FREE, FarBench, FarDrafts

NOW_S = 100.0


def until(*due_in_s: float, num_ready: int = 2, step_s=lambda _: 0.020, num_tokens: int = 3) -> float:
    """Return how long two requests that are ready should wait for others, whose drafts are due in so many seconds."""
    held = [DueDraft(NOW_S + seconds, num_tokens) for seconds in due_in_s]
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


def test_overdue_drafts_are_not_waited_for():
    assert until(-0.001, 0.0) == 0.0
    assert until() == 0.0


@pytest.mark.parametrize(("level_s", "is_together"), [(0.003, True), (0.030, False)])
def test_requests_that_fell_apart_find_together_again(level_s: float, is_together: bool):
    bench = FarBench(FarDrafts(level_s=level_s), FREE)
    send, execute = bench.drafts.send, bench.runner.execute
    num_asks, sizes = 0, list[int]()

    def parting(drafter_id, messages) -> None:
        """Deliver the fifth batch of asks one by one."""
        nonlocal num_asks
        num_asks += 1
        for batch in [[message] for message in messages] if num_asks == 5 else [messages]:
            send(drafter_id, batch)

    def counted(batch):
        sizes.append(len(batch.query_lengths))
        return execute(batch)

    bench.drafts.send, bench.runner.execute = parting, counted
    bench.speed(2, num_requests=2, max_tokens=60, draft_length=2, is_pinned=True)
    later = sizes[12:-4]
    assert len(later) > 4
    assert (min(later) == 2) == is_together
