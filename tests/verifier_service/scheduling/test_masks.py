"""Masks behind drafts: their tree, which blocks a step has, and that their KV slots are nobody's after it."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.verifier_service.messages.request import Request
from outrider.verifier_service.scheduling.masks import MaskBlocks, MaskPlanner, PlacedMasks
from outrider.verifier_service.scheduling.outcome import row_starts
from outrider.verifier_service.scheduling.schedule import Schedule
from outrider.verifier_service.scheduling.scheduler import Scheduler
from support import parts

MASK = 99
BLOCKS = MaskBlocks(token_id=MASK, length=2)


def make_scheduler(num_blocks: int = 16, blocks: MaskBlocks = BLOCKS, **limits: int) -> Scheduler:
    scheduler = parts.scheduler(num_blocks, **limits)
    scheduler.shares.masks = MaskPlanner(blocks)
    return scheduler


def added(scheduler: Scheduler, name: str = "a", **fields: Any) -> Request:
    request = parts.request(name, **{"draft_length": 2, **fields})
    scheduler.add(request)
    return request


def step(scheduler: Scheduler, committed: list[int], num_accepted: int = 0) -> Schedule:
    schedule = scheduler.schedule(0.0)
    assert schedule is not None
    for item in schedule.items:
        if item.samples:
            parts.commit(scheduler, item, committed, tuple(range(num_accepted)))
    scheduler.check_integrity()
    return schedule


def test_a_prompt_ends_with_the_block_of_no_draft():
    scheduler = make_scheduler()
    request = added(scheduler)
    batch = step(scheduler, [5]).batch
    assert batch.token_ids == [1, 2, 3, MASK, MASK]
    assert batch.positions == [0, 1, 2, 3, 4]
    assert (batch.query_lengths, batch.context_lengths) == ([5], [5])
    assert (batch.tree_parents, batch.tree_ends) == ([[-1, 0]], [[2, 2]])
    assert batch.logits_indices == [2, 3, 4]
    assert (request.num_computed_tokens, len(request.block_table)) == (3, 1), "the masks' block is free again"


def test_behind_a_draft_stands_a_block_for_each_of_its_prefixes():
    scheduler = make_scheduler()
    request, other = added(scheduler), added(scheduler, "b", draft_length=0)
    step(scheduler, [5])
    request.draft = parts.draft(request, [6, 7])
    schedule = scheduler.schedule(0.0)
    batch = schedule.batch
    assert batch.token_ids == [5, 6, 7, *[MASK] * 6, 5]
    assert batch.positions == [3, 4, 5, 4, 5, 5, 6, 6, 7, 3]
    assert len(set(batch.slot_mapping)) == 10
    assert batch.tree_parents == [[-1, 0, -1, 2, 0, 4, 1, 6], []]
    assert batch.tree_ends == [[1, 2, 4, 4, 6, 6, 8, 8], []]
    assert batch.logits_indices == list(range(10))
    assert row_starts(schedule.items) == [0, 9]
    assert schedule.items[0].masks.rows_of(1) == range(2, 4)
    parts.commit(scheduler, schedule.items[0], [6, 8], (0,))
    parts.commit(scheduler, schedule.items[1], [6], ())
    assert scheduler.moves == []
    assert (request.num_computed_tokens, request.num_tokens) == (5, 6)
    assert len(request.block_table) == 2
    scheduler.check_integrity()
    assert other.num_computed_tokens == 4


@pytest.mark.parametrize(
    ("limits", "num_masks"),
    [
        ({"max_num_batched_tokens": 5}, 2),
        ({"max_num_batched_tokens": 4}, 0),  # half a block is none
        ({"num_blocks": 1, "max_tokens": 1}, 0),
        ({"max_model_len": 6}, 2),
        ({"max_model_len": 5}, 0),
        ({"max_tokens": 2}, 0),  # the drawn token and one more: no draft can follow
        ({"max_tokens": 3}, 2),
        ({"draft_length": 0}, 0),
        ({"drafter_id": "in a pool"}, 0),
    ],
    ids=str,
)
def test_masks_are_there_where_they_fit_and_a_draft_can_follow(limits: dict, num_masks: int):
    own = {name: limits[name] for name in ("max_tokens", "draft_length", "drafter_id") if name in limits}
    scheduler = make_scheduler(**{name: value for name, value in limits.items() if name not in own})
    added(scheduler, **own)
    assert step(scheduler, [5]).batch.token_ids.count(MASK) == num_masks


@pytest.mark.parametrize(("max_model_len", "num_masks"), [(7, 4), (6, 0)])
def test_every_mask_has_a_position_in_the_context(max_model_len: int, num_masks: int):
    scheduler = make_scheduler(blocks=MaskBlocks(token_id=MASK, length=4), max_model_len=max_model_len)
    added(scheduler)
    assert step(scheduler, [5]).batch.token_ids.count(MASK) == num_masks


def test_the_draft_comes_before_masks_where_not_all_fit():
    scheduler = make_scheduler(max_num_batched_tokens=6)
    request = added(scheduler)
    step(scheduler, [5])
    request.draft = parts.draft(request, [6, 7])
    assert step(scheduler, [6, 7, 8], 2).batch.token_ids == [5, 6, 7, MASK, MASK]


def test_blocks_of_what_came_most_often_are_kept():
    planner = MaskPlanner(MaskBlocks(token_id=MASK, length=2, num_blocks=1))
    place = {"num_fitting": 100, "max_count": 100}
    assert planner.place(3, **place).counts == (3,), "where nothing is known, all may be accepted"
    for num_accepted in (1, 1, 0, 3):
        planner.observe(3, num_accepted)
    assert planner.place(3, **place).counts == (1,)
    assert planner.place(2, **place).counts == (2,), "each length for itself"
    two = MaskPlanner(MaskBlocks(token_id=MASK, length=2, num_blocks=2), {3: [2.0, 0.0, 1.0, 2.0]})
    assert two.place(3, **place).counts == (0, 3)
    assert two.place(3, num_fitting=100, max_count=2).counts == (0, 2)
    assert two.place(3, num_fitting=3, max_count=3).counts == (3,)
    assert two.place(3, num_fitting=1, max_count=3) is None
    assert two.place(3, num_fitting=100, max_count=-1) is None


def test_rows_of_blocks_come_in_their_order():
    masks = PlacedMasks(BLOCKS, (0, 2))
    assert (masks.num_tokens, masks.rows_of(0), masks.rows_of(2), masks.rows_of(1)) == (4, range(2), range(2, 4), None)
    assert masks.tree(2) == ([-1, 0, -1, 2, 1, 4], [1, 2, 4, 4, 6, 6])
