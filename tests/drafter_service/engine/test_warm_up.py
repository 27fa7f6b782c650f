"""What a drafter has run before it is asked, and that nothing of it is left."""

from __future__ import annotations

import pytest
import torch

from fakes.runner import FakeRunner
from outrider.drafter_service.engine.drafter import DraftEngineConfig
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.engine.tree_growth import TreeConfig
from outrider.drafter_service.engine.warm_up import NUM_ACCEPTED, PROMPT_LENGTH, warm_up
from outrider.drafter_service.head_drafters.head_runner import HeadRunner
from outrider.drafter_service.heads.switched import SwitchedHeads
from outrider.verifier_service.messages.draft import DraftNeeds
from support.clock import Clock
from tiny.drafters import eagle_drafter, model_drafter
from tiny.heads import eagle3_head

LENGTH = 4


def engine_of(drafter, **config: int) -> DraftEngine:
    config = {"max_draft_length": LENGTH, "max_sessions": 8, "max_tree_nodes": 0, **config}
    return DraftEngine(drafter, clock=lambda: 0.0, config=DraftEngineConfig(**config))


def test_rounds_of_one_session_and_of_more_and_more_are_drafted():
    runner = FakeRunner(num_blocks=256)
    drafter = model_drafter(runner, torch.Generator().manual_seed(0))
    assert warm_up(engine_of(drafter), state_width=0, patience_s=1e9, clock=Clock(tick_s=1.0)) == 8
    shapes = {(len(batch.query_lengths), max(batch.query_lengths)) for batch in runner.batches}
    for count in (1, 2, 4, 8):
        assert {(count, PROMPT_LENGTH), (count, NUM_ACCEPTED), (count, 1)} <= shapes, "opening, round, level"
    drafter.check_integrity(set())
    assert drafter._pool.num_free_blocks == 256


def test_trees_are_grown_where_drafts_may_be_trees():
    runner = FakeRunner(num_blocks=256)
    drafter = model_drafter(runner, torch.Generator().manual_seed(0), trees=TreeConfig(branching=2))
    warm_up(engine_of(drafter, max_tree_nodes=6), state_width=0, patience_s=1e9, clock=Clock(tick_s=1.0))
    assert any(any(batch.tree_parents) for batch in runner.batches)
    assert any(not any(batch.tree_parents) and max(batch.query_lengths) == 1 for batch in runner.batches)


def test_a_head_gets_states():
    head = eagle3_head()
    runner = HeadRunner(SwitchedHeads([head]), num_blocks=64, block_size=4, max_model_len=64)
    drafter = eagle_drafter(runner, torch.Generator().manual_seed(0))
    engine = engine_of(drafter, max_sessions=2)
    assert warm_up(engine, state_width=head.state_size, patience_s=1e9, clock=Clock(tick_s=1.0)) == 2
    assert drafter.num_forwards > 0
    assert engine.counters.num_bad_messages == engine.counters.num_resyncs == 0
    drafter.check_integrity(set())


@pytest.mark.parametrize(("patience_s", "count"), [(0.5, 0), (2.0, 1), (4.0, 2), (6.0, 4)])
def test_it_ends_when_the_next_would_take_too_long(patience_s: float, count: int):
    drafter = model_drafter(FakeRunner(num_blocks=256), torch.Generator())
    assert warm_up(engine_of(drafter), state_width=0, patience_s=patience_s, clock=Clock(tick_s=1.0)) == count


def test_a_model_too_short_for_it_is_left_alone():
    drafter = model_drafter(FakeRunner(max_model_len=PROMPT_LENGTH), torch.Generator())
    assert drafter.needs == DraftNeeds()
    assert warm_up(engine_of(drafter), state_width=0, patience_s=1e9, clock=Clock(tick_s=1.0)) == 0
