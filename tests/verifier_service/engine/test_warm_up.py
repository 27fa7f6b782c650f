"""What a verifier has run before it is ready."""

from __future__ import annotations

import pytest

from fakes.engine_bench import EngineBench
from outrider.verifier_service.engine.warm_up import DRAFT_LENGTH, SAMPLINGS, MadeUpDrafts, warm_up


class WarmBench(EngineBench):
    def __init__(self, **options: int) -> None:
        super().__init__(drafters=(), **options)
        self.engine.drafting._client = MadeUpDrafts()


def warmed_up(bench: WarmBench, max_requests: int = 8, patience_s: float = 1e9) -> int:
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 1.0
        return now_s

    return warm_up(bench.engine, max_requests=max_requests, patience_s=patience_s, clock=clock)


def test_drafts_of_one_request_and_of_more_and_more_are_verified():
    bench = WarmBench(num_blocks=256)
    assert warmed_up(bench) == 8
    shapes = [(len(batch.query_lengths), max(batch.query_lengths)) for batch in bench.runner.batches]
    for count in (1, 2, 4, 8):
        assert (count, DRAFT_LENGTH + 1) in shapes
    assert shapes.count((1, DRAFT_LENGTH + 1)) == len(SAMPLINGS), "each kind by itself"
    assert not bench.engine.has_work()
    bench.engine.check_integrity()


@pytest.mark.parametrize(("patience_s", "count"), [(0.5, 0), (2.0, 1), (4.0, 2)])
def test_it_ends_when_the_next_would_take_too_long(patience_s: float, count: int):
    assert warmed_up(WarmBench(num_blocks=256), patience_s=patience_s) == count


def test_an_engine_too_small_for_it_is_left_alone():
    assert warmed_up(WarmBench(max_model_len=4)) == 0


def test_trees_are_verified_where_drafts_may_be_trees():
    bench = WarmBench(num_blocks=256, max_tree_nodes=4)
    warmed_up(bench, max_requests=2)
    assert any(any(batch.tree_parents) for batch in bench.runner.batches)
