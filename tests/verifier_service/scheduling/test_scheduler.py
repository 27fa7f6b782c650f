from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, ROOT, Draft, SparseRow
from outrider.verifier_service.messages.request import Request, SamplingParams, SpeculationPlan
from outrider.verifier_service.messages.tree import depths, parents_of
from outrider.verifier_service.scheduling.kv_cache import BlockPool
from outrider.verifier_service.scheduling.schedule import Schedule, ScheduledRequest, first_nodes
from outrider.verifier_service.scheduling.scheduler import MAX_PROMPT_ROWS, PRIORITY_STEP_S, Scheduler, SchedulerConfig

BLOCK_SIZE = 4


def make_scheduler(num_blocks: int = 16, **config) -> Scheduler:
    config = {"max_model_len": 64, "vocab_size": 100, **config}
    return Scheduler(SchedulerConfig(**config), BlockPool(num_blocks, BLOCK_SIZE))


def make_request(
    name: str, prompt, max_tokens: int = 16, *, output=(), prompt_logprobs=None, arrival_s=0.0, **fields
) -> Request:
    return Request(
        request_id=name,
        sampling=SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs),
        token_ids=[*prompt, *output],
        num_prompt_tokens=len(prompt),
        plan=SpeculationPlan(),
        arrival_s=arrival_s,
        **fields,
    )


def make_draft(request: Request, token_ids, sampled: bool = False, parents=None) -> Draft:
    first_children = dict(zip(reversed(parents or range(len(token_ids))), reversed(token_ids), strict=True))
    rows = tuple(
        SparseRow(token_ids=(first_children[parent],), weights=(DRAFT_PROB_SCALE,))
        for parent in dict.fromkeys(parents or range(len(token_ids)))
    )
    return Draft(
        request_id=request.request_id,
        round_id=0,
        position=request.num_tokens,
        token_ids=tuple(token_ids),
        draft_probs=rows if sampled else None,
        parents=None if parents is None else tuple(parents),
    )


def added(scheduler: Scheduler, name: str, prompt, max_tokens: int = 16, **fields) -> Request:
    request = make_request(name, prompt, max_tokens, **fields)
    scheduler.add(request)
    return request


def step(scheduler: Scheduler, committed=None, now_s: float = 0.0) -> Schedule:
    """Schedule and commit: `committed` per request id, by default one token 7."""
    schedule = scheduler.schedule(now_s)
    assert schedule is not None
    for item in schedule.items:
        tokens = (committed or {}).get(item.request.request_id, [7]) if item.samples else []
        scheduler.commit(item, tokens)
    scheduler.check_integrity()
    return schedule


def shares(schedule: Schedule) -> dict[str, int]:
    return {item.request.request_id: item.num_new_tokens for item in schedule.items}


# --- the batch -------------------------------------------------------------------------------------------------------


def test_prefill_then_decode():
    scheduler = make_scheduler()
    request = added(scheduler, "a", [1, 2, 3, 4, 5])
    assert scheduler.has_work()
    batch = step(scheduler, {"a": [6]}).batch
    assert batch.token_ids == [1, 2, 3, 4, 5]
    assert batch.positions == [0, 1, 2, 3, 4]
    assert batch.slot_mapping == [0, 1, 2, 3, 4]
    assert (batch.query_lengths, batch.context_lengths, batch.block_tables) == ([5], [5], [[0, 1]])
    assert batch.logits_indices == [4]
    assert (request.token_ids, request.num_computed_tokens) == ([1, 2, 3, 4, 5, 6], 5)

    batch = step(scheduler).batch
    assert (batch.token_ids, batch.positions, batch.slot_mapping) == ([6], [5], [5])
    assert (batch.query_lengths, batch.context_lengths, batch.logits_indices) == ([1], [6], [0])


def test_several_sequences_are_packed_in_order_of_arrival():
    scheduler = make_scheduler()
    added(scheduler, "a", [1, 2])
    step(scheduler, {"a": [3]})
    added(scheduler, "b", [11, 12, 13])
    request_a = scheduler.running[0]
    request_a.draft = make_draft(request_a, [4, 5])
    schedule = step(scheduler)
    assert schedule.batch.token_ids == [3, 4, 5, 11, 12, 13]
    assert schedule.batch.positions == [2, 3, 4, 0, 1, 2]
    assert schedule.batch.slot_mapping == [2, 3, 4, 8, 9, 10]
    assert schedule.batch.block_tables[1] == [2]
    assert schedule.batch.logits_indices == [0, 1, 2, 5], "1 + len(draft) rows, then the end of the prompt"
    assert [item.samples for item in schedule.items] == [True, True]


def test_nothing_to_do_is_none():
    scheduler = make_scheduler()
    assert scheduler.schedule(0.0) is None
    assert not scheduler.has_work()


def test_draft_ids_beyond_the_vocabulary_are_clamped_in_the_batch_only():
    scheduler = make_scheduler(vocab_size=10)
    request = added(scheduler, "a", [1])
    step(scheduler, {"a": [2]})
    request.draft = make_draft(request, [9, 10, 31])
    schedule = scheduler.schedule(0.0)
    assert schedule.batch.token_ids == [2, 9, 9, 9]
    assert schedule.items[0].draft.token_ids == (9, 10, 31), "verification must see what was drawn"


# --- chunked prefill and budget --------------------------------------------------------------------------------------


def test_long_prompt_is_computed_in_chunks():
    scheduler = make_scheduler(max_num_batched_tokens=6)
    request = added(scheduler, "a", range(1, 15))
    first = step(scheduler)
    assert (shares(first), first.items[0].samples, first.batch.logits_indices) == ({"a": 6}, False, [])
    assert (request.num_computed_tokens, len(request.block_table)) == (6, 2)
    second = step(scheduler)
    assert (second.batch.positions, second.batch.slot_mapping) == ([6, 7, 8, 9, 10, 11], [6, 7, 8, 9, 10, 11])
    third = step(scheduler, {"a": [50]})
    assert (shares(third), third.items[0].samples, third.batch.logits_indices) == ({"a": 2}, True, [1])
    assert request.token_ids[-1] == 50


def test_running_requests_go_before_new_ones():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    added(scheduler, "a", [1])
    step(scheduler)
    added(scheduler, "b", range(10))
    assert shares(step(scheduler)) == {"a": 1, "b": 3}


def test_budget_cuts_the_draft_not_the_request():
    scheduler = make_scheduler(max_num_batched_tokens=3)
    request = added(scheduler, "a", [1])
    step(scheduler)
    request.draft = make_draft(request, [1, 2, 3, 4], sampled=True)
    (item,) = scheduler.schedule(0.0).items
    assert (item.num_new_tokens, item.draft.token_ids, len(item.draft.draft_probs)) == (3, (1, 2), 2)
    assert request.metrics.num_cut_tokens == 2


def test_a_draft_waits_while_a_prefill_is_chunked():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    request = added(scheduler, "a", range(1, 7))
    request.draft = make_draft(request, [8, 9])
    assert scheduler.schedule(0.0).items[0].draft is None
    scheduler.commit(ScheduledRequest(request=request, num_new_tokens=4, draft=None, samples=False), [])
    (item,) = scheduler.schedule(0.0).items
    assert (item.num_new_tokens, item.draft.token_ids, item.samples) == (4, (8, 9), True)
    assert request.metrics.num_cut_tokens == 0


def test_max_num_seqs_limits_admission():
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        added(scheduler, name, [1])
    assert shares(step(scheduler)) == {"a": 1, "b": 1}
    scheduler.remove("a")
    assert shares(step(scheduler)) == {"b": 1, "c": 1}


# --- verification, rollback ------------------------------------------------------------------------------------------


def with_draft(num_tokens: int, draft_tokens, **config) -> tuple[Scheduler, Request]:
    """A request of `num_tokens` tokens, all but the last computed, with a draft."""
    scheduler = make_scheduler(**config)
    request = added(scheduler, "a", range(1, num_tokens))
    step(scheduler, {"a": [num_tokens]})
    request.draft = make_draft(request, draft_tokens)
    return scheduler, request


def test_rejection_rolls_blocks_back_across_a_boundary():
    # |1 2 3 4|5 6 _ _|        7 is next; the draft of 6 reaches into the fourth block
    # |1 2 3 4|5 6 7 d|d d d d|d    one accepted: computed 8, blocks 2 and 3 go back
    scheduler, request = with_draft(7, [8, 70, 70, 70, 70, 70])
    schedule = scheduler.schedule(0.0)
    assert len(request.block_table) == 4
    scheduler.commit(schedule.items[0], [8, 9])
    scheduler.check_integrity()
    assert request.token_ids == list(range(1, 10))
    assert (request.num_computed_tokens, request.block_table) == (8, [0, 1])
    assert request.draft is None
    batch = scheduler.schedule(0.0).batch
    assert (batch.token_ids, batch.positions, batch.slot_mapping) == ([9], [8], [8])


def test_full_acceptance_keeps_the_drafts_kv():
    scheduler, request = with_draft(7, [8, 9])
    step(scheduler, {"a": [8, 9, 10]})
    assert (request.num_tokens, request.num_computed_tokens, len(request.block_table)) == (10, 9, 3)


def test_total_rejection_leaves_one_recovered_token():
    scheduler, request = with_draft(7, [70, 71])
    step(scheduler, {"a": [8]})
    assert (request.num_tokens, request.num_computed_tokens, len(request.block_table)) == (8, 7, 2)


def test_rejected_kv_is_never_published():
    scheduler, _ = with_draft(7, [70, 71])  # the second block would be full with the rejected 70
    step(scheduler, {"a": [8]})
    other = added(scheduler, "b", [1, 2, 3, 4, 5, 6, 7, 70, 71])
    step(scheduler)
    assert other.num_cached_tokens == 4


def test_empty_draft_is_no_draft():
    scheduler, _ = with_draft(7, [])
    (item,) = scheduler.schedule(0.0).items
    assert (item.draft, item.num_new_tokens) == (None, 1)


def test_stale_draft_is_a_bug_of_the_caller():
    scheduler, request = with_draft(7, [1])
    request.token_ids.append(5)
    with pytest.raises(AssertionError, match="draft for 7 at 8 tokens"):
        scheduler.schedule(0.0)


def test_commit_checks_how_much_was_committed():
    scheduler, request = with_draft(7, [1])
    (item,) = scheduler.schedule(0.0).items
    for tokens in ([], [1, 2, 3]):
        with pytest.raises(AssertionError, match="tokens committed"):
            scheduler.commit(item, tokens)
    with pytest.raises(AssertionError, match="samples nothing"):
        scheduler.commit(ScheduledRequest(request=request, num_new_tokens=1, draft=None, samples=False), [1])


# --- cut drafts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_tokens", "max_model_len", "expected"),
    [
        (16, 64, (8, 9, 10, 11)),
        (5, 64, (8, 9, 10)),  # 1 output token so far, 3 accepted, 1 bonus: 5
        (2, 64, None),
        (16, 11, (8, 9, 10)),  # 7 tokens, 3 accepted, 1 bonus: 11
        (16, 8, None),
    ],
)
def test_accepted_and_bonus_tokens_stay_within_the_limits(max_tokens, max_model_len, expected):
    scheduler = make_scheduler(max_model_len=max_model_len)
    request = added(scheduler, "a", range(1, 7), max_tokens)
    step(scheduler)
    request.draft = make_draft(request, [8, 9, 10, 11])
    (item,) = scheduler.schedule(0.0).items
    assert (item.draft.token_ids if item.draft else None) == expected
    assert request.metrics.num_cut_tokens == 4 - len(expected or ())


def test_where_a_draft_is_cut_does_not_depend_on_its_tokens():
    """As docs/exactness.md, "The trap", has it: same counts, other tokens (invalid ones too), same cut."""
    cuts = set()
    for token_ids in ([8, 9, 10, 11], [99, 5000, 5000, 5000], [0, 0, 0, 0]):
        scheduler = make_scheduler(max_num_batched_tokens=8)
        request = added(scheduler, "a", range(1, 7), max_tokens=4)
        step(scheduler)
        request.draft = make_draft(request, token_ids, sampled=True)
        (item,) = scheduler.schedule(0.0).items
        cuts.add(len(item.draft.token_ids))
    assert cuts == {2}


def test_short_of_blocks_the_draft_is_cut_and_nobody_preempted():
    scheduler = make_scheduler(num_blocks=4)
    first = added(scheduler, "a", range(1, 7), max_tokens=8)
    second = added(scheduler, "b", range(21, 27), max_tokens=8)
    step(scheduler)
    first.draft = make_draft(first, [1, 2, 3, 4])  # one more slot in the second block, and no free block
    schedule = step(scheduler)
    assert shares(schedule) == {"a": 2, "b": 1}
    assert schedule.items[0].draft.token_ids == (1,)
    assert (first.metrics.num_cut_tokens, schedule.preempted, second.num_preemptions) == (3, (), 0)


# --- trees -----------------------------------------------------------------------------------------------------------

#           0     1     2     3     4     5
PARENTS = (ROOT, ROOT, 0, 1, 3, 3)  # node 4's path: 1, 3, 4


def with_tree(num_tokens: int, parents=PARENTS, **options) -> tuple[Scheduler, Request]:
    """A request in decode whose draft is a tree of the tokens 30, 31, ..."""
    scheduler = make_scheduler(**options)
    request = added(scheduler, "a", range(1, num_tokens), max_tokens=32)
    step(scheduler)
    request.draft = make_draft(request, [30 + node for node in range(len(parents))], parents=parents)
    return scheduler, request


def commit_path(scheduler: Scheduler, path, *, last: int | None = 50) -> Schedule:
    """Schedule, then accept the draft tokens along `path`; `last` follows them, None: a stop token ended it before."""
    schedule = scheduler.schedule(0.0)
    (item,) = schedule.items
    tokens = [item.draft.token_ids[node] for node in path] + ([] if last is None else [last])
    scheduler.commit(item, tokens, path)
    scheduler.check_integrity()
    return schedule


def test_a_trees_nodes_stand_one_after_another_at_the_positions_of_their_depths():
    scheduler, _ = with_tree(6)
    batch = scheduler.schedule(0.0).batch
    assert batch.token_ids == [7, 30, 31, 32, 33, 34, 35]
    assert batch.positions == [5, 6, 6, 7, 7, 8, 8]
    assert batch.slot_mapping == [5, 6, 7, 8, 9, 10, 11]
    assert (batch.context_lengths, batch.block_tables) == ([12], [[0, 1, 2]])
    assert batch.tree_parents == [list(PARENTS)]
    assert batch.logits_indices == [0, 1, 2, 3, 4, 5, 6]


def test_chains_beside_a_tree_have_no_parents_and_batches_of_chains_none_at_all():
    scheduler, _ = with_tree(6)
    other = added(scheduler, "b", [1, 2])
    assert scheduler.schedule(0.0).batch.tree_parents == [list(PARENTS), []]
    scheduler = make_scheduler()
    other = added(scheduler, "b", [1, 2])
    step(scheduler)
    other.draft = make_draft(other, [3, 4])
    assert scheduler.schedule(0.0).batch.tree_parents == []


@pytest.mark.parametrize(
    ("path", "moves"),
    [
        ((), []),
        ((0,), []),  # in its place already
        ((0, 2), [(8, 7)]),  # over a block's boundary
        ((1,), [(7, 6)]),
        ((1, 3, 5), [(7, 6), (9, 7), (11, 8)]),  # 7 is read before it is written
    ],
)
def test_an_accepted_paths_kv_is_moved_to_its_positions_with_the_next_batch(path, moves):
    scheduler, request = with_tree(6)
    commit_path(scheduler, path)
    assert request.num_computed_tokens == 6 + len(path)
    assert list(scheduler.moves) == moves
    assert len(request.block_table) == -(-request.num_computed_tokens // BLOCK_SIZE)
    batch = step(scheduler).batch
    assert list(zip(batch.move_sources, batch.move_targets, strict=True)) == moves
    assert not scheduler.moves
    assert step(scheduler).batch.move_sources == [], "once"


def test_moves_go_by_the_block_table_not_by_position():
    scheduler = make_scheduler()
    other = added(scheduler, "b", [1, 2])
    request = added(scheduler, "a", range(1, 6), max_tokens=32)
    step(scheduler)
    assert (other.block_table, request.block_table) == ([0], [1, 2])
    other.hold_until_s = 9.0
    request.draft = make_draft(request, range(30, 36), parents=PARENTS)
    commit_path(scheduler, (1, 3, 4))
    assert list(scheduler.moves) == [(11, 10), (13, 11), (14, 12)]
    assert request.block_table == [1, 2, 3]


def test_a_stop_token_within_the_path_cuts_it():
    """The last committed token's KV is not needed: nothing follows it."""
    scheduler, request = with_tree(6)
    commit_path(scheduler, (1, 3), last=None)
    assert request.token_ids[-2:] == [31, 33]
    assert request.num_computed_tokens == 7
    assert list(scheduler.moves) == [(7, 6)]


def test_a_chain_needs_no_path_and_moves_nothing():
    scheduler, request = with_tree(6, parents=(ROOT, 0, 1))
    commit_path(scheduler, (0, 1, 2))
    assert not scheduler.moves
    request.draft = make_draft(request, [5, 6])
    step(scheduler, {"a": [5, 6, 7]})
    assert not scheduler.moves


def test_who_takes_the_moves_must_make_them_and_the_next_batch_does_not():
    scheduler, _ = with_tree(6)
    commit_path(scheduler, (1,))
    assert scheduler.take_moves() == [(7, 6)]
    assert scheduler.take_moves() == []
    assert step(scheduler).batch.move_sources == []


def test_moves_wait_while_nothing_can_run():
    scheduler, request = with_tree(6)
    commit_path(scheduler, (1,))
    request.hold_until_s = 9.0
    assert scheduler.schedule(1.0) is None
    assert scheduler.schedule(9.0).batch.move_sources == [7]


def test_a_request_that_ends_leaves_its_moves_for_whoever_finds_its_prefix():
    """The path fills block 1, which is published before its KV is there; the batch that reads it moves it first."""
    scheduler, request = with_tree(6)
    commit_path(scheduler, (1, 3, 4))
    scheduler.remove("a")
    follower = added(scheduler, "b", request.token_ids[:9])
    batch = step(scheduler).batch
    assert follower.num_cached_tokens == 8
    assert batch.block_tables[0][:2] == [0, 1]
    assert list(zip(batch.move_sources, batch.move_targets, strict=True)) == [(7, 6), (9, 7), (10, 8)]
    assert not set(batch.slot_mapping) & {6, 7}


def test_moves_of_a_preempted_request_stay_in_the_batch_that_writes_into_its_blocks():
    """Moves are made before anything is written, so that they harm nobody."""
    scheduler = make_scheduler(num_blocks=3)
    first = added(scheduler, "first", range(1, 5), max_tokens=8)
    second = added(scheduler, "second", range(11, 14), max_tokens=8)
    step(scheduler)
    first.hold_until_s = 9.0
    second.draft = make_draft(second, range(30, 36), parents=PARENTS)
    commit_path(scheduler, (1, 3))
    first.hold_until_s = None
    schedule = step(scheduler)
    assert schedule.preempted == (second,)
    assert list(zip(schedule.batch.move_sources, schedule.batch.move_targets, strict=True)) == [(9, 8), (11, 9)]
    assert schedule.batch.slot_mapping == [8]
    assert second.token_ids[-3:] == [31, 33, 50]


@pytest.mark.parametrize(
    ("max_nodes", "max_depth", "num_kept", "num_rows"),
    [(9, 9, 6, 4), (6, 3, 6, 4), (5, 9, 5, 4), (4, 9, 4, 3), (3, 9, 3, 2), (9, 2, 4, 3), (9, 1, 2, 1), (0, 9, 0, 0)],
)
def test_a_tree_is_cut_by_counts_and_depths_with_its_rows(max_nodes, max_depth, num_kept, num_rows):
    request = make_request("a", [1, 2])
    draft = make_draft(request, range(30, 36), sampled=True, parents=PARENTS)
    kept = first_nodes(draft, max_nodes=max_nodes, max_depth=max_depth)
    assert kept.token_ids == draft.token_ids[:num_kept]
    assert kept.parents == PARENTS[:num_kept]
    assert kept.draft_probs == draft.draft_probs[:num_rows]


def test_a_tree_is_cut_at_the_first_node_that_is_too_deep_whatever_follows():
    draft = make_draft(make_request("a", [1, 2]), [30, 31, 32], parents=(ROOT, 0, ROOT))
    assert first_nodes(draft, max_nodes=9, max_depth=1).token_ids == (30,)


def test_confidences_are_cut_with_their_tokens():
    request = make_request("a", [1, 2])
    draft = dataclasses.replace(make_draft(request, [5, 6, 7]), confidences=(0.5, 0.25, 0.125))
    assert first_nodes(draft, max_nodes=2, max_depth=9).confidences == (0.5, 0.25)
    assert first_nodes(draft, max_nodes=9, max_depth=1).confidences == (0.5,)


def test_a_tree_at_the_end_of_a_request_is_cut_where_it_is_too_deep_and_counted():
    scheduler = make_scheduler()
    request = added(scheduler, "a", range(1, 6), max_tokens=4)
    step(scheduler)
    request.draft = make_draft(request, range(30, 36), parents=PARENTS)
    (item,) = scheduler.schedule(0.0).items
    assert item.draft.token_ids == (30, 31, 32, 33), "three are left: two accepted ones and the bonus token"
    assert request.metrics.num_cut_tokens == 2


# --- preemption ------------------------------------------------------------------------------------------------------


def crowded() -> tuple[Scheduler, Request, Request]:
    """Two requests that fill the pool of four blocks: 8 computed tokens each, a ninth to come."""
    scheduler = make_scheduler(num_blocks=4)
    first = added(scheduler, "a", range(1, 9), max_tokens=8)
    second = added(scheduler, "b", range(21, 29), max_tokens=8)
    step(scheduler, {"a": [9], "b": [29]})
    assert len(first.block_table) + len(second.block_table) == 4
    return scheduler, first, second


def test_the_latest_arrival_is_preempted_and_recomputed():
    scheduler, _, second = crowded()
    second.draft = make_draft(second, [30, 31])
    second.hold_until_s = 99.0
    schedule = step(scheduler)
    assert (shares(schedule), schedule.preempted) == ({"a": 1}, (second,))
    assert (second.block_table, second.num_computed_tokens, second.num_preemptions) == ([], 0, 1)
    assert (second.draft, second.hold_until_s, second.metrics.num_cut_tokens) == (None, None, 2)
    assert scheduler.waiting == (second,)
    late = added(scheduler, "c", [1])
    step(scheduler)
    assert scheduler.waiting == (second, late), "first come, first served: nobody overtakes"

    scheduler.remove("a")
    schedule = step(scheduler)
    assert second.token_ids[:9] == [*range(21, 29), 29]
    # `a` took the LRU block, the tail of b's prefix: block 0 of b is still cached.
    assert shares(schedule) == {"b": 5, "c": 1}
    assert second.num_cached_tokens == 0, "recorded at the first admission"
    assert (second.num_tokens, second.num_computed_tokens) == (10, 9)


def test_preempted_requests_go_to_the_front_of_the_queue_in_order_of_arrival():
    scheduler = make_scheduler(num_blocks=5, enable_prefix_caching=False)
    first = added(scheduler, "a", range(1, 9), max_tokens=8)
    second, third = added(scheduler, "b", [21, 22, 23, 24], max_tokens=8), added(scheduler, "c", [31, 32], max_tokens=8)
    step(scheduler)
    late = added(scheduler, "d", range(41, 53), max_tokens=8)
    assert shares(step(scheduler)) == {"a": 1, "b": 1}
    assert (third.num_preemptions, scheduler.waiting) == (1, (third, late))
    while not second.num_preemptions:
        step(scheduler)
    assert (scheduler.running, scheduler.waiting) == ((first,), (second, third, late))


def test_the_latest_arrival_waits_with_its_kv_rather_than_preempt_an_older_one():
    scheduler, first, second = crowded()
    first.hold_until_s = 5.0
    assert scheduler.schedule(0.0) is None
    assert (len(second.block_table), second.num_preemptions) == (2, 0)
    assert scheduler.next_deadline_s() == 5.0
    schedule = step(scheduler, now_s=5.0)
    assert (shares(schedule), schedule.preempted) == ({"a": 1}, (second,))


def test_a_prefill_is_preempted_half_way_and_starts_again():
    scheduler = make_scheduler(num_blocks=5, max_num_batched_tokens=5, enable_prefix_caching=False)
    first = added(scheduler, "a", range(1, 8), max_tokens=12)
    step(scheduler)
    step(scheduler)
    second = added(scheduler, "b", range(21, 33), max_tokens=4)  # 12 tokens: the 3 free blocks
    assert shares(step(scheduler)) == {"a": 1, "b": 4}
    assert shares(step(scheduler)) == {"a": 1, "b": 4}
    for _ in range(3):
        assert shares(step(scheduler)) == {"a": 1}  # `a` took the third block: `b` keeps what it has and waits
    assert second.num_computed_tokens == 8
    assert step(scheduler).preempted == (second,)
    assert second.token_ids[:12] == list(range(21, 33))
    scheduler.remove(first.request_id)
    assert shares(step(scheduler)) == {"b": 5}
    assert shares(step(scheduler)) == {"b": 5}


def test_a_request_is_admitted_only_if_all_of_it_fits():
    scheduler = make_scheduler(num_blocks=4, max_num_batched_tokens=8)
    added(scheduler, "a", range(1, 7), max_tokens=4)
    step(scheduler)
    added(scheduler, "b", range(21, 31), max_tokens=4)  # three blocks, two are free
    added(scheduler, "c", [1], max_tokens=4)
    assert shares(step(scheduler)) == {"a": 1}, "and the small one behind it does not overtake"
    scheduler.remove("a")
    assert shares(step(scheduler)) == {"b": 8}


# --- what can never run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "text"),
    [
        ([], 4, "at least 1"),
        (range(64), 4, "model's maximum of 64"),
        (range(10), 20, r"need 8 KV blocks of 4 tokens, the whole pool has 7"),
    ],
)
def test_add_refuses_what_could_never_run(prompt, max_tokens, text):
    scheduler = make_scheduler(num_blocks=7)
    with pytest.raises(ValueError, match=text):
        scheduler.add(make_request("a", prompt, max_tokens))
    assert not scheduler.has_work()


def test_add_refuses_a_known_id():
    scheduler = make_scheduler()
    added(scheduler, "a", [1])
    with pytest.raises(ValueError, match="already here"):
        scheduler.add(make_request("a", [1]))


def test_a_request_that_just_fits_runs_to_its_end_alone():
    scheduler = make_scheduler(num_blocks=7)
    request = added(scheduler, "a", range(10), max_tokens=19)  # 29 tokens, the last is never computed: 28 = 7 blocks
    while request.num_output_tokens < 19:
        step(scheduler)
    assert len(request.block_table) == 7


def test_config_names_the_bad_field():
    for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "vocab_size"):
        with pytest.raises(ValueError, match=name):
            make_scheduler(**{name: 0})


# --- held requests, removal ------------------------------------------------------------------------------------------


def test_a_preemption_that_frees_nothing_is_no_step():
    """All that the least senior holds may be shared with one that stays; the others may wait for their drafts."""
    scheduler = make_scheduler(num_blocks=6)
    holder = added(scheduler, "holder", range(50, 60), max_tokens=8, priority=-2)
    sharer = added(scheduler, "sharer", range(8))
    step(scheduler)
    holder.hold_until_s = sharer.hold_until_s = 5.0
    added(scheduler, "taker", range(9), max_tokens=8, priority=-1)
    for _ in range(4):  # until its blocks, two of them the sharer's, and the pool are full
        step(scheduler, now_s=1.0)
    assert scheduler.schedule(1.0) is None
    scheduler.check_integrity()
    assert [request.request_id for request in scheduler.waiting] == ["sharer"]
    assert shares(step(scheduler, now_s=5.0)) == {"holder": 1}, "the step loop goes on"


def test_held_request_is_left_out_until_its_deadline():
    scheduler = make_scheduler()
    first, second = added(scheduler, "a", [1]), added(scheduler, "b", [2])
    step(scheduler)
    first.hold_until_s, second.hold_until_s = 3.0, 2.0
    assert (scheduler.schedule(1.0), scheduler.next_deadline_s()) == (None, 2.0)
    assert (len(first.block_table), len(second.block_table)) == (1, 1)
    assert shares(step(scheduler, now_s=2.0)) == {"b": 1}
    assert (second.hold_until_s, scheduler.next_deadline_s()) == (None, 3.0)
    assert shares(step(scheduler, now_s=3.5)) == {"a": 1, "b": 1}
    assert scheduler.next_deadline_s() is None


def test_remove_frees_at_once_wherever_the_request_is():
    scheduler = make_scheduler(max_num_seqs=2)
    held, running, waiting = (added(scheduler, name, [1, 2, 3]) for name in "abc")
    step(scheduler)
    held.hold_until_s = 9.0
    for request in (waiting, held, running):
        assert scheduler.remove(request.request_id) is request
        assert (request.block_table, request.num_computed_tokens) == ([], 0)
        scheduler.check_integrity()
    assert scheduler.remove("a") is None
    assert not scheduler.has_work()
    assert scheduler.schedule(0.0) is None


def test_commit_after_removal_is_left_alone():
    scheduler = make_scheduler()
    request = added(scheduler, "a", [1, 2, 3])
    schedule = scheduler.schedule(0.0)
    scheduler.remove("a")
    assert schedule.batch.block_tables == [[0]], "the batch under way keeps its tables"
    scheduler.commit(schedule.items[0], [4])
    assert (request.token_ids, request.block_table) == ([1, 2, 3], [])
    scheduler.check_integrity()


# --- prefix cache ----------------------------------------------------------------------------------------------------


def test_prefix_of_a_running_request_is_shared():
    scheduler = make_scheduler()
    first = added(scheduler, "a", range(1, 11))
    step(scheduler)
    second = added(scheduler, "b", [*range(1, 9), 50])
    schedule = scheduler.schedule(0.0)
    assert shares(schedule) == {"a": 1, "b": 1}
    assert (second.num_cached_tokens, second.block_table[:2]) == (8, first.block_table[:2])
    assert schedule.batch.positions[1:] == [8]


def test_prefix_is_found_after_its_request_has_left_output_included():
    scheduler = make_scheduler()
    added(scheduler, "a", range(1, 8))
    step(scheduler, {"a": [8]})
    step(scheduler, {"a": [9]})
    scheduler.remove("a")
    second = added(scheduler, "b", range(1, 12))
    assert shares(step(scheduler)) == {"b": 3}
    assert second.num_cached_tokens == 8


def test_at_least_the_last_token_is_computed():
    scheduler = make_scheduler()
    added(scheduler, "a", range(1, 9))
    step(scheduler)
    second = added(scheduler, "b", range(1, 9))
    schedule = step(scheduler)
    assert shares(schedule)["b"] == 4
    assert second.num_cached_tokens == 4


def test_no_prefix_caching_when_switched_off():
    scheduler = make_scheduler(enable_prefix_caching=False)
    added(scheduler, "a", range(1, 9))
    step(scheduler)
    second = added(scheduler, "b", range(1, 9))
    step(scheduler)
    assert (second.num_cached_tokens, second.block_hashes) == (0, [])


def test_shared_blocks_let_a_request_in_that_would_not_fit_alone():
    scheduler = make_scheduler(num_blocks=4)
    added(scheduler, "a", range(1, 11), max_tokens=4)  # three blocks
    step(scheduler)
    added(scheduler, "b", range(31, 41), max_tokens=4)
    assert shares(step(scheduler)) == {"a": 1}
    scheduler.remove("b")
    added(scheduler, "c", [*range(1, 9), 50, 51], max_tokens=4)  # three blocks, two of them shared
    assert shares(step(scheduler)) == {"a": 1, "c": 2}


def test_a_cached_prefix_that_nobody_uses_makes_no_room():
    scheduler = make_scheduler(num_blocks=4)
    added(scheduler, "a", range(1, 9), max_tokens=4)
    step(scheduler)
    scheduler.remove("a")
    added(scheduler, "b", range(21, 27), max_tokens=4)  # the two empty blocks
    step(scheduler)
    waiting = added(scheduler, "c", range(1, 12), max_tokens=4)  # three blocks; the two free ones hold its prefix
    assert shares(step(scheduler)) == {"b": 1}
    assert scheduler.waiting == (waiting,)
    scheduler.remove("b")
    assert shares(step(scheduler)) == {"c": 3}


def test_salts_keep_prefixes_apart():
    scheduler = make_scheduler()
    first = added(scheduler, "a", range(1, 10), cache_salt="tenant")
    step(scheduler)
    other = added(scheduler, "b", range(1, 10))
    same = added(scheduler, "c", range(1, 10), cache_salt="tenant")
    step(scheduler)
    assert (other.num_cached_tokens, same.num_cached_tokens) == (0, 8)
    assert same.block_table[:2] == first.block_table[:2]
    assert not set(other.block_table) & {*first.block_table, *same.block_table}


def test_counts_queried_and_hit_tokens_of_first_admissions():
    scheduler = make_scheduler()
    added(scheduler, "a", range(1, 10))
    step(scheduler)
    assert (scheduler.num_prefix_queried_tokens, scheduler.num_prefix_hit_tokens) == (9, 0)
    added(scheduler, "b", range(1, 12))
    step(scheduler)
    assert (scheduler.num_prefix_queried_tokens, scheduler.num_prefix_hit_tokens) == (20, 8)
    scheduler = make_scheduler(enable_prefix_caching=False)
    added(scheduler, "a", range(1, 10))
    step(scheduler)
    assert scheduler.num_prefix_queried_tokens == 0


# --- priority --------------------------------------------------------------------------------------------------------


def test_a_lower_priority_value_is_served_earlier():
    scheduler = make_scheduler(max_num_seqs=1)
    names = {"a": 0, "b": 1, "c": -1, "d": 0, "e": -1}
    for name, priority in names.items():
        added(scheduler, name, [1], max_tokens=1, priority=priority)
    assert [request.request_id for request in scheduler.waiting] == ["c", "e", "a", "d", "b"]
    for name in ("c", "e", "a", "d", "b"):
        assert shares(step(scheduler)) == {name: 1}
        scheduler.remove(name)


@pytest.mark.parametrize(("waited_s", "first"), [(4.9, "urgent"), (5.1, "patient")])
def test_a_level_of_priority_is_worth_five_seconds_of_waiting(waited_s, first):
    scheduler = make_scheduler()
    added(scheduler, "patient", [1], arrival_s=0.0)
    added(scheduler, "urgent", [2], arrival_s=waited_s, priority=-1)
    assert scheduler.waiting[0].request_id == first


def test_a_senior_that_waits_preempts_nobody_but_nobody_overtakes_it():
    scheduler = make_scheduler(num_blocks=4)
    added(scheduler, "a", range(1, 9), max_tokens=4)
    step(scheduler)
    senior = added(scheduler, "b", range(21, 31), max_tokens=4, priority=-9)  # three blocks, two are free
    added(scheduler, "c", [1], max_tokens=4)
    schedule = step(scheduler)
    assert (shares(schedule), schedule.preempted) == ({"a": 1}, ())
    scheduler.remove("a")
    assert list(shares(step(scheduler))) == ["b", "c"]
    assert scheduler.running[0] is senior


def test_the_least_senior_is_preempted_first_even_if_it_came_first():
    scheduler = make_scheduler(num_blocks=4)
    first = added(scheduler, "a", range(1, 9), max_tokens=8, priority=1)
    second = added(scheduler, "b", range(21, 29), max_tokens=8)
    step(scheduler)
    assert scheduler.running == (second, first)
    schedule = step(scheduler)
    assert (shares(schedule), schedule.preempted, scheduler.num_preemptions) == ({"b": 1}, (first,), 1)


def test_a_newcomer_goes_before_those_who_run_and_takes_nothing_from_them():
    scheduler = make_scheduler(num_blocks=4)
    added(scheduler, "a", range(1, 8), max_tokens=8)
    step(scheduler)
    added(scheduler, "b", [1], max_tokens=8, priority=-1)
    assert list(shares(step(scheduler))) == ["a", "b"], "in the step of its admission, what runs has been scheduled"
    assert list(shares(step(scheduler))) == ["b", "a"]


# --- one prompt, several choices -------------------------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["caching", "no_caching"])
def caching(request) -> bool:
    return request.param


def added_choices(scheduler: Scheduler, prompt, names="abc", **fields) -> list[Request]:
    return [added(scheduler, name, prompt, group_id="g", **fields) for name in names]


def test_siblings_wait_for_the_first_and_share_its_prompt(caching):
    scheduler = make_scheduler(enable_prefix_caching=caching)
    first, second, third = added_choices(scheduler, range(1, 12))  # ten tokens to share: 2 blocks and a half
    assert shares(step(scheduler)) == {"a": 11}
    assert scheduler.waiting == (second, third)
    schedule = scheduler.schedule(0.0)
    assert shares(schedule) == {"a": 1, "b": 1, "c": 1}
    assert (second.num_cached_tokens, third.num_cached_tokens) == (10, 10)
    assert second.block_table[:2] == third.block_table[:2] == first.block_table[:2]
    assert schedule.batch.copy_sources == [first.block_table[2]] * 2
    assert schedule.batch.copy_targets == [second.block_table[2], third.block_table[2]]
    assert len({first.block_table[2], *schedule.batch.copy_targets}) == 3
    assert schedule.batch.positions == [11, 10, 10]


def test_a_prompt_that_ends_with_a_block_is_shared_without_a_copy(caching):
    scheduler = make_scheduler(enable_prefix_caching=caching)
    first, second = added_choices(scheduler, range(1, 10), "ab")
    step(scheduler)
    schedule = step(scheduler)
    assert (schedule.batch.copy_sources, second.num_cached_tokens) == ([], 8)
    assert second.block_table[:2] == first.block_table[:2]


def test_parked_siblings_hold_nobody_up():
    scheduler = make_scheduler(max_num_batched_tokens=6)
    added_choices(scheduler, range(1, 12))
    added(scheduler, "x", [7])
    assert shares(step(scheduler)) == {"a": 6}
    assert shares(step(scheduler)) == {"a": 5, "x": 1}
    assert shares(step(scheduler)) == {"a": 1, "b": 1, "c": 1, "x": 1}
    assert scheduler.num_waiting == 0


def test_a_choice_that_comes_later_shares_at_once(caching):
    scheduler = make_scheduler(enable_prefix_caching=caching)
    added_choices(scheduler, range(1, 12), "a")
    for _ in range(4):
        step(scheduler)
    (late,) = added_choices(scheduler, range(1, 12), "b")
    assert shares(step(scheduler)) == {"a": 1, "b": 1}
    assert late.num_cached_tokens == 10


def test_when_the_first_goes_half_way_the_next_computes_the_prompt(caching):
    scheduler = make_scheduler(max_num_batched_tokens=6, enable_prefix_caching=caching)
    added_choices(scheduler, range(1, 12))
    step(scheduler)
    scheduler.remove("a")
    scheduler.check_integrity()
    assert shares(step(scheduler)) == {"b": 6}
    step(scheduler)
    assert shares(step(scheduler)) == {"b": 1, "c": 1}


def test_when_the_first_finishes_at_once_the_cache_serves_its_siblings_together():
    scheduler = make_scheduler()
    added_choices(scheduler, range(1, 12))
    step(scheduler)
    scheduler.remove("a")
    assert shares(step(scheduler)) == {"b": 3, "c": 3}


def test_when_the_first_is_preempted_its_siblings_look_for_themselves():
    scheduler = make_scheduler(num_blocks=5, max_num_batched_tokens=5, enable_prefix_caching=False)
    added(scheduler, "x", range(21, 28), max_tokens=12)
    step(scheduler)
    step(scheduler)
    first, second = added_choices(scheduler, range(1, 13), "ab", max_tokens=4)  # 12 tokens: the 3 free blocks
    for _ in range(2):
        assert shares(step(scheduler)) == {"x": 1, "a": 4}
    while not first.num_preemptions:
        step(scheduler)
    assert scheduler.waiting == (first, second)
    scheduler.remove("x")
    scheduler.remove("a")
    assert shares(step(scheduler)) == {"b": 5}


def test_a_parked_sibling_can_be_removed():
    scheduler = make_scheduler(max_num_batched_tokens=6)
    _, second, third = added_choices(scheduler, range(1, 12))
    step(scheduler)
    assert scheduler.remove("b") is second
    scheduler.check_integrity()
    assert scheduler.waiting == (third,)
    step(scheduler)
    assert shares(step(scheduler)) == {"a": 1, "c": 1}


def test_nobody_waits_for_less_than_a_block():
    scheduler = make_scheduler()
    added_choices(scheduler, [1, 2, 3, 4])
    assert shares(step(scheduler)) == {"a": 4, "b": 4, "c": 4}


def test_nobody_waits_for_what_the_cache_holds():
    scheduler = make_scheduler()
    added(scheduler, "x", range(1, 12))
    step(scheduler)
    added_choices(scheduler, range(1, 12))
    assert shares(step(scheduler)) == {"x": 1, "a": 3, "b": 3, "c": 3}


@pytest.mark.parametrize("fields", [{"prompt": range(2, 13)}, {"cache_salt": "s"}, {"prompt": range(1, 11)}])
def test_another_prompt_or_salt_under_the_same_group_shares_nothing(fields):
    scheduler = make_scheduler(enable_prefix_caching=False)
    added_choices(scheduler, range(1, 12), "a")
    step(scheduler)
    (other,) = added_choices(scheduler, names="b", **{"prompt": range(1, 12), **fields})
    step(scheduler)
    assert other.num_cached_tokens == 0
    assert not set(other.block_table) & set(scheduler.running[0].block_table)


def test_a_sibling_waits_until_its_own_blocks_fit():
    scheduler = make_scheduler(num_blocks=4, enable_prefix_caching=False)
    added_choices(scheduler, range(1, 11), "ab", max_tokens=3)
    added(scheduler, "x", [1], max_tokens=3)
    assert shares(step(scheduler)) == {"a": 10, "x": 1}  # the three blocks of the prompt and one more: none is left
    assert shares(step(scheduler)) == {"a": 1, "x": 1}
    scheduler.remove("x")
    assert shares(step(scheduler)) == {"a": 1, "b": 1}


def test_whoever_writes_into_a_shared_block_does_so_in_a_copy():
    scheduler = make_scheduler(enable_prefix_caching=False)
    request = added(scheduler, "a", range(1, 7))
    step(scheduler)
    held = list(request.block_table)
    scheduler._pool.share(held)
    schedule = scheduler.schedule(0.0)
    assert (schedule.batch.copy_sources, schedule.batch.copy_targets) == (held[1:], request.block_table[1:])
    assert request.block_table[0] == held[0]
    assert request.block_table[1] != held[1]
    assert schedule.batch.slot_mapping == [request.block_table[1] * BLOCK_SIZE + 2]
    scheduler._pool.release(held)


def test_a_copy_needs_a_block_too():
    scheduler = make_scheduler(num_blocks=2, enable_prefix_caching=False)
    request = added(scheduler, "a", range(1, 7), max_tokens=2)
    step(scheduler)
    scheduler._pool.share(request.block_table)
    assert scheduler.schedule(0.0) is None


# --- prompt logprobs -------------------------------------------------------------------------------------------------


def rows_of(schedule: Schedule) -> dict[str, int]:
    return {item.request.request_id: item.num_prompt_rows for item in schedule.items}


def test_every_prompt_position_has_a_row_chunk_by_chunk():
    scheduler = make_scheduler(max_num_batched_tokens=6)
    added(scheduler, "a", range(1, 15), prompt_logprobs=0)
    first, second, third = step(scheduler), step(scheduler), step(scheduler)
    assert [rows_of(each)["a"] for each in (first, second, third)] == [6, 6, 1]
    assert (first.batch.logits_indices, third.batch.logits_indices) == ([0, 1, 2, 3, 4, 5], [0, 1])
    assert [each.items[0].samples for each in (first, second, third)] == [False, False, True]
    assert rows_of(step(scheduler)) == {"a": 0}, "the prompt is done"


def test_prompt_rows_come_before_the_rows_of_the_draft():
    scheduler = make_scheduler()
    added(scheduler, "x", [1, 2])
    request = added(scheduler, "a", [1, 2, 3], prompt_logprobs=0)
    request.draft = make_draft(request, [8, 9])
    schedule = scheduler.schedule(0.0)
    assert rows_of(schedule) == {"x": 0, "a": 2}
    assert schedule.batch.logits_indices == [1, 2, 3, 4, 5, 6]


def test_prompt_logprobs_bypass_cache_and_siblings():
    scheduler = make_scheduler()
    added_choices(scheduler, range(1, 12), "a")
    step(scheduler)
    queried = scheduler.num_prefix_queried_tokens
    (request,) = added_choices(scheduler, range(1, 12), "b", prompt_logprobs=0)
    assert shares(step(scheduler)) == {"a": 1, "b": 11}
    assert (request.num_cached_tokens, scheduler.num_prefix_queried_tokens) == (0, queried)


def test_a_prompt_for_logprobs_is_admitted_only_if_all_of_it_fits():
    scheduler = make_scheduler(num_blocks=4, max_num_batched_tokens=6)
    added(scheduler, "a", range(1, 6), max_tokens=2)
    step(scheduler)
    added(scheduler, "b", range(1, 11), max_tokens=4, prompt_logprobs=0)  # three blocks, two are free
    assert shares(step(scheduler)) == {"a": 1}
    scheduler.remove("a")
    assert shares(step(scheduler)) == {"b": 6}


def test_prompt_rows_are_bounded_over_all_requests_of_a_step():
    scheduler = Scheduler(SchedulerConfig(max_model_len=1024, vocab_size=100), BlockPool(256, 16))
    added(scheduler, "a", [1] * 200, prompt_logprobs=0)
    added(scheduler, "b", [2] * 200, prompt_logprobs=0)
    added(scheduler, "c", [3] * 200, prompt_logprobs=0)
    added(scheduler, "d", [4] * 200)
    assert shares(step(scheduler)) == {"a": 200, "b": MAX_PROMPT_ROWS - 199, "c": 1, "d": 200}
    assert shares(step(scheduler)) == {"a": 1, "b": 143, "c": 114, "d": 1}


def test_a_prompt_without_a_first_token_yet_starts_its_rows_again_after_preemption():
    scheduler = make_scheduler(num_blocks=5, max_num_batched_tokens=5, enable_prefix_caching=False)
    added(scheduler, "x", range(21, 28), max_tokens=12)
    step(scheduler)
    step(scheduler)
    request = added(scheduler, "a", range(1, 13), max_tokens=4, prompt_logprobs=0)
    while not request.num_preemptions:
        step(scheduler)
    scheduler.remove("x")
    assert request.num_computed_tokens == 0
    assert [rows_of(step(scheduler))["a"] for _ in range(3)] == [5, 5, 1]


# --- continuation ----------------------------------------------------------------------------------------------------


def test_a_continuation_goes_on_after_its_output():
    scheduler = make_scheduler()
    request = added(scheduler, "a", [1, 2, 3], max_tokens=4, output=[4, 5], prompt_logprobs=0)
    schedule = step(scheduler, {"a": [6]})
    assert (shares(schedule), rows_of(schedule)) == ({"a": 5}, {"a": 0})
    request.draft = make_draft(request, [7, 8])
    assert scheduler.schedule(0.0).items[0].draft is None, "one token is left of max_tokens"


def test_a_continuation_finds_its_output_in_the_cache_and_counts_the_prompt():
    scheduler = make_scheduler()
    added(scheduler, "a", range(1, 7), group_id="g")
    step(scheduler, {"a": [7]})
    for token_id in range(8, 14):
        step(scheduler, {"a": [token_id]})
    request = added(scheduler, "b", range(1, 7), output=range(7, 15), group_id="g")
    assert shares(step(scheduler)) == {"a": 1, "b": 2}
    assert request.num_cached_tokens == 6


@pytest.mark.parametrize(("num_output", "max_tokens", "max_model_len"), [(4, 4, 64), (5, 4, 64), (4, 16, 7)])
def test_a_continuation_with_nothing_left_is_refused(num_output, max_tokens, max_model_len):
    scheduler = make_scheduler(max_model_len=max_model_len)
    with pytest.raises(ValueError, match="output_token_ids: nothing is left"):
        scheduler.add(make_request("a", [1, 2, 3], max_tokens, output=[9] * num_output))
    assert not scheduler.has_work()


# --- lengths ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [3, 4, 5, 7, 8, 9])
def test_prompts_around_block_boundaries_take_the_blocks_they_need(num_tokens, caching):
    scheduler = make_scheduler(enable_prefix_caching=caching)
    request = added(scheduler, "a", range(num_tokens))
    step(scheduler)
    assert len(request.block_table) == -(-num_tokens // BLOCK_SIZE)
    again = added(scheduler, "b", range(num_tokens))
    step(scheduler)
    assert again.num_cached_tokens == ((num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE if caching else 0)


def test_the_longest_prompt_has_room_for_one_token():
    scheduler = make_scheduler(max_model_len=16, num_blocks=4)
    request = added(scheduler, "a", range(15), max_tokens=9)
    assert shares(step(scheduler)) == {"a": 15}
    assert request.num_tokens == 16
    scheduler.remove("a")
    with pytest.raises(ValueError, match="prompt_token_ids: a prompt of 16 tokens"):
        scheduler.add(make_request("b", range(16)))


# --- speed -----------------------------------------------------------------------------------------------------------


def test_scheduling_256_requests_with_drafts_is_cheap():
    scheduler = Scheduler(SchedulerConfig(max_model_len=4096, vocab_size=100), BlockPool(1024, 16))
    for index in range(256):
        added(scheduler, str(index), [index % 100, index // 100, 1])
    step(scheduler)
    times_s = []
    for _ in range(9):
        for request in scheduler.running:
            request.draft = make_draft(request, [1, 2, 3, 4])
        begin_s = time.perf_counter()
        schedule = scheduler.schedule(0.0)
        times_s.append(time.perf_counter() - begin_s)
        for item in schedule.items:
            scheduler.commit(item, [1])
    # About 1 ms on an idle core; the margin is for machines that are shared.
    assert min(times_s) < 0.010


def test_fifty_thousand_requests_in_the_queue_cost_no_step():
    scheduler = make_scheduler(num_blocks=64, max_num_seqs=8)
    requests = [make_request(str(index), [1], max_tokens=1, priority=index % 7) for index in range(50_000)]
    begin_s = time.perf_counter()
    for request in requests:
        scheduler.add(request)
    for request in requests[1::2]:
        scheduler.remove(request.request_id)
    for _ in range(500):
        schedule = scheduler.schedule(0.0)
        for item in schedule.items:
            scheduler.commit(item, [1])
            scheduler.remove(item.request.request_id)
    # About 0.5 s on an idle core; removals or steps that walk the queue would make it minutes.
    assert time.perf_counter() - begin_s < 5.0
    assert scheduler.num_waiting == 21_000
    scheduler.check_integrity()


# --- simulation ------------------------------------------------------------------------------------------------------

VOCAB_SIZE = 5  # small, so that prefixes are often shared and wrong drafts often right
# lists of parents: the k-th node follows the root or any node before it
PARENT_LISTS = st.lists(st.floats(0, 0.99), min_size=1, max_size=9).map(
    lambda shares: [int(share * (index + 1)) - 1 for index, share in enumerate(shares)]
)


def mix(context: int, token_id: int) -> int:
    """What the KV at a position holds: a digest of all tokens up to it, made from the KV before it."""
    return (context * 1_000_003 + token_id + 1) % (1 << 61)


def next_token(context: int) -> int:
    return (context >> 7) % VOCAB_SIZE


def plain_decoding(prompt: list[int], num_tokens: int) -> list[int]:
    """The reference: no batch, no blocks, no drafts."""
    tokens, context = list(prompt), 0
    for token_id in prompt:
        context = mix(context, token_id)
    while len(tokens) < num_tokens:
        tokens.append(next_token(context))
        context = mix(context, tokens[-1])
    return tokens


@dataclass
class PagedModel:
    """A model that knows nothing but its batch and the KV slots: a stale slot derails everything after it."""

    block_size: int
    kv: dict[int, int] = field(default_factory=dict)

    def execute(self, batch) -> list[int]:
        """Return the next token after every row that wants logits."""
        outputs, row = [], 0
        self.move(list(zip(batch.move_sources, batch.move_targets, strict=True)))
        self._copy_blocks(batch)
        assert len(set(batch.slot_mapping)) == batch.num_tokens, "a slot is written twice"
        trees = batch.tree_parents or [[]] * len(batch.block_tables)
        rows = zip(batch.query_lengths, batch.context_lengths, batch.block_tables, trees, strict=True)
        for query_length, context_length, block_table, parents in rows:
            assert len(block_table) == -(-context_length // self.block_size), "the table covers the context, no more"
            first = context_length - len(parents)
            position_at = {first - 1: first - 1}  # of the tree's places
            for place in range(context_length - query_length, context_length):
                before_place = place - 1 if place < first else first + parents[place - first]
                position_at[place] = place if place < first else position_at[before_place] + 1
                assert batch.positions[row] == position_at[place]
                slot = self._slot(block_table, place)
                assert batch.slot_mapping[row] == slot
                before = self.kv[self._slot(block_table, before_place)] if before_place >= 0 else 0
                self.kv[slot] = mix(before, batch.token_ids[row])
                outputs.append(next_token(self.kv[slot]))
                row += 1
        assert row == batch.num_tokens
        return [outputs[index] for index in batch.logits_indices]

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Read all slots before the first is written."""
        self.kv.update([(target, self.kv[source]) for source, target in moves])

    def _copy_blocks(self, batch) -> None:
        """Copy all slots that hold anything, reading all before the first is written."""
        copied = {
            target * self.block_size + offset: self.kv.get(source * self.block_size + offset)
            for source, target in zip(batch.copy_sources, batch.copy_targets, strict=True)
            for offset in range(self.block_size)
        }
        self.kv.update(copied)

    def check(self, request: Request, moves: Sequence[tuple[int, int]]) -> None:
        """Every computed position of a sequence must hold exactly what its own tokens would have written.

        It may lie at the source of a move that the next batch makes.
        """
        context = 0
        source_of = {target: source for source, target in moves}
        for position in range(request.num_computed_tokens):
            context = mix(context, request.token_ids[position])
            slot = self._slot(request.block_table, position)
            assert self.kv[source_of.get(slot, slot)] == context, f"stale KV at {position}"

    def _slot(self, block_table: list[int], position: int) -> int:
        return block_table[position // self.block_size] * self.block_size + position % self.block_size


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, drafts, holds, cancellations and steps over a small pool."""

    @initialize(
        num_blocks=st.integers(4, 14),
        block_size=st.integers(1, 4),
        max_num_batched_tokens=st.integers(1, 14),
        max_num_seqs=st.integers(1, 5),
        caching=st.booleans(),
    )
    def start(self, num_blocks, block_size, max_num_batched_tokens, max_num_seqs, caching):
        self.config = SchedulerConfig(
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=24,
            vocab_size=VOCAB_SIZE,
            enable_prefix_caching=caching,
        )
        self.scheduler = Scheduler(self.config, BlockPool(num_blocks, block_size, caching))
        self.model = PagedModel(block_size)
        self.now_s = 0.0
        self.num_added = 0
        self.num_drafted: dict[str, int] = {}
        self.num_verified: dict[str, int] = {}
        self.num_prompt_rows: dict[str, int] = {}

    @rule(
        prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=4),
        max_tokens=st.integers(1, 12),
        num_output=st.sampled_from([0, 0, 0, 1, 5]),
        fields=st.fixed_dictionaries(
            {
                "priority": st.integers(-2, 2),
                "cache_salt": st.sampled_from(["", "salt"]),
                "prompt_logprobs": st.sampled_from([None, None, 0]),
                "is_background": st.sampled_from([False, False, False, True]),
            }
        ),
    )
    def add(self, prompts, max_tokens, num_output, fields):
        for prompt in prompts:
            self.add_one(prompt, max_tokens, num_output, **fields)

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        max_tokens=st.integers(1, 12),
        group_id=st.sampled_from(["g", "h"]),
        salts=st.lists(st.sampled_from(["", "", "salt"]), min_size=2, max_size=4),
        num_output=st.sampled_from([0, 0, 3]),
        priority=st.integers(-1, 1),
    )
    def add_choices(self, prompt, max_tokens, group_id, salts, num_output, priority):
        for salt in salts:
            self.add_one(prompt, max_tokens, num_output, group_id=group_id, cache_salt=salt, priority=priority)

    def add_one(self, prompt, max_tokens, num_output, **fields):
        limit = min(self.config.max_model_len, len(prompt) + max_tokens)
        output = plain_decoding(prompt, min(len(prompt) + num_output, limit - 1))[len(prompt) :]
        request = make_request(str(self.num_added), prompt, max_tokens, output=output, arrival_s=self.now_s, **fields)
        if self.scheduler._pool.num_blocks_for(limit - 1) > self.scheduler._pool.num_blocks:
            with pytest.raises(ValueError, match="the whole pool"):
                self.scheduler.add(request)
            return
        self.scheduler.add(request)
        self.num_added += 1
        self.num_drafted[request.request_id] = self.num_verified[request.request_id] = 0

    @precondition(lambda self: self.scheduler.has_work())
    @rule(data=st.data(), length=st.integers(0, 6), num_right=st.integers(0, 6), sampled=st.booleans())
    def draft_arrives(self, data, length, num_right, sampled):
        request = self.pick(data)
        if request.draft is not None:
            return
        right = plain_decoding(request.token_ids, request.num_tokens + length)[request.num_tokens :]
        wrong = data.draw(st.lists(st.integers(0, VOCAB_SIZE + 2), min_size=length, max_size=length))
        request.draft = make_draft(request, [*right[:num_right], *wrong[num_right:]], sampled)
        request.hold_until_s = None
        self.num_drafted[request.request_id] += length

    @precondition(lambda self: self.scheduler.running)
    @rule(data=st.data(), parents=PARENT_LISTS, is_right=st.lists(st.booleans(), min_size=9, max_size=9))
    def tree_arrives(self, data, parents, is_right):
        """A tree of up to 9 nodes, some of which say what the target says after their parents."""
        request = data.draw(st.sampled_from(self.scheduler.running))
        if request.draft is not None:
            return
        paths: list[list[int]] = []
        for parent, right in zip(parents, is_right, strict=False):
            path = [] if parent == ROOT else paths[parent]
            tokens = [*request.token_ids, *path]
            token_id = plain_decoding(tokens, len(tokens) + 1)[-1]
            paths.append([*path, token_id if right else (token_id + 1 + len(paths)) % VOCAB_SIZE])
        request.draft = make_draft(request, [path[-1] for path in paths], data.draw(st.booleans()), parents)
        request.hold_until_s = None
        self.num_drafted[request.request_id] += len(paths)

    @rule()
    def somebody_takes_the_moves(self):
        self.model.move(self.scheduler.take_moves())

    @precondition(lambda self: self.scheduler.running)
    @rule(data=st.data(), wait_s=st.integers(1, 3))
    def hold(self, data, wait_s):
        data.draw(st.sampled_from(self.scheduler.running)).hold_until_s = self.now_s + wait_s

    @precondition(lambda self: self.scheduler.has_work())
    @rule(data=st.data())
    def cancel(self, data):
        request = self.pick(data)
        assert self.scheduler.remove(request.request_id) is request

    @rule(seconds=st.integers(1, 3))
    def time_passes(self, seconds):
        self.now_s += seconds

    @rule(count=st.integers(1, 6))
    def steps(self, count):
        for _ in range(count):
            self.run_step()
            self.books_agree()

    @precondition(lambda self: self.scheduler.has_work())
    @rule(data=st.data())
    def step_with_a_cancellation_in_flight(self, data):
        self.run_step(cancel=self.pick(data))

    @invariant()
    def books_agree(self):
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_integrity()
        for request in self.scheduler.running:
            self.model.check(request, self.scheduler.moves)
        salted, plain = (
            {block_id for r in self.scheduler.running if bool(r.cache_salt) is is_salted for block_id in r.block_table}
            for is_salted in (True, False)
        )
        assert not salted & plain, "a block under two salts"

    def teardown(self):
        """Nothing is stuck: whatever is left runs to its end."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(5000):
            if not self.scheduler.has_work():
                break
            self.now_s = max([self.now_s, *(r.hold_until_s or 0.0 for r in self.scheduler.running)])
            assert self.run_step(), "nothing is held, so something must run"
            self.books_agree()
        assert not self.scheduler.has_work()
        self.scheduler._pool.check_integrity([])

    def pick(self, data) -> Request:
        here = [*self.scheduler.running, *self.scheduler.waiting, *self.scheduler.background]
        return data.draw(st.sampled_from(here))

    def run_step(self, cancel: Request | None = None) -> bool:
        is_free = any(r.hold_until_s is None for r in self.scheduler.running[:1])
        self.started = {request.request_id for request in self.scheduler.running}
        schedule = self.scheduler.schedule(self.now_s)
        if schedule is None:
            assert not is_free, "the oldest running request can always go on"
            return False
        self.check_schedule(schedule)
        rows = iter(self.model.execute(schedule.batch))
        outputs: dict[str, list[int]] = {}
        for item in schedule.items:
            self.check_prompt_rows(item, rows)
            if item.samples:
                outputs[item.request.request_id] = [next(rows) for _ in range(1 + self.num_draft_tokens(item))]
        assert next(rows, None) is None
        if cancel is not None:
            self.scheduler.remove(cancel.request_id)
        for item in schedule.items:
            self.commit(item, outputs.get(item.request.request_id, []))
        return True

    def check_prompt_rows(self, item: ScheduledRequest, rows) -> None:
        """The rows of all chunks together are the prompt's positions but the last, each with its own context."""
        request, start = item.request, item.request.num_computed_tokens
        wanted = request.sampling.prompt_logprobs is not None and request.num_output_tokens == 0
        assert wanted or item.num_prompt_rows == 0
        for position in range(start, start + item.num_prompt_rows):
            assert next(rows) == plain_decoding(request.token_ids[: position + 1], position + 2)[-1]
        if wanted:
            before = self.num_prompt_rows.get(request.request_id, 0) if start else 0
            assert before == start, "a prompt position without a row"
            self.num_prompt_rows[request.request_id] = before + item.num_prompt_rows
            assert not item.samples or before + item.num_prompt_rows == request.num_prompt_tokens - 1

    def check_schedule(self, schedule: Schedule) -> None:
        self.check_order(schedule)
        kinds = {item.request.is_background for item in schedule.items}
        is_idle = all(request.is_background for request in self.scheduler._requests.values())
        assert kinds == {is_idle}, "a background request runs beside another"
        assert schedule.batch.num_tokens <= self.config.max_num_batched_tokens
        scheduled = {item.request.request_id for item in schedule.items}
        assert not scheduled & {request.request_id for request in schedule.preempted}
        for item in schedule.items:
            request = item.request
            assert request.hold_until_s is None or request.hold_until_s <= self.now_s
            assert item.draft is None or (item.samples and item.draft.token_ids)
            if item.draft is not None and item.draft.draft_probs is not None:
                assert len(item.draft.draft_probs) == len(set(parents_of(item.draft)))
            limit = min(self.config.max_model_len, request.num_prompt_tokens + request.sampling.max_tokens)
            depth = max(depths(parents_of(item.draft)), default=-1) + 1
            assert request.num_tokens + depth + 1 <= limit or not item.samples

    def check_order(self, schedule: Schedule) -> None:
        """The slow reference of both queues: sort by seniority; only the parked may be overtaken."""
        order = [r.request_id for r in sorted(self.scheduler._requests.values(), key=self.seniority)]
        places = {request_id: place for place, request_id in enumerate(order)}
        parked = {request.request_id for request in self.scheduler._groups.parked}
        queued = [places[r.request_id] for r in self.scheduler.waiting if r.request_id not in parked]
        assert queued == sorted(queued)
        running = [places[r.request_id] for r in self.scheduler.running]
        assert running == sorted(running)
        admitted = [places[i.request.request_id] for i in schedule.items if i.request.request_id not in self.started]
        assert not admitted or not queued or max(admitted) < queued[0], "overtaken in the queue"
        if schedule.preempted:
            assert min(places[r.request_id] for r in schedule.preempted) > max(running)
        for item in schedule.items:
            first_written = item.request.num_computed_tokens // self.scheduler._pool.block_size
            written = item.request.block_table[first_written:]
            assert not any(map(self.scheduler._pool.is_shared, written)), "writes into a shared block"

    @staticmethod
    def seniority(request: Request) -> float:
        if request.is_background:
            return math.inf
        return request.arrival_s + request.priority * PRIORITY_STEP_S  # `sorted` keeps arrivals in order

    def commit(self, item: ScheduledRequest, outputs: list[int]) -> None:
        """Verify greedily, commit, and finish what has reached its limit."""
        request = item.request
        self.num_verified[request.request_id] += self.num_draft_tokens(item)
        draft_ids = item.draft.token_ids if item.draft else ()
        path: list[int] = []
        node = ROOT
        for index, (token_id, parent) in enumerate(zip(draft_ids, parents_of(item.draft), strict=True)):
            if parent == node and token_id == outputs[node + 1]:
                path.append(index)
                node = index
        committed = [draft_ids[index] for index in path] + outputs[node + 1 : node + 2]
        self.scheduler.commit(item, committed, path if item.draft and item.draft.parents else None)
        limit = min(self.config.max_model_len, request.num_prompt_tokens + request.sampling.max_tokens)
        assert request.num_tokens <= limit
        if request.num_tokens == limit and self.scheduler.remove(request.request_id):
            assert request.token_ids == plain_decoding(request.token_ids[: request.num_prompt_tokens], limit)
            num_drafted = self.num_drafted[request.request_id]
            assert num_drafted == self.num_verified[request.request_id] + request.metrics.num_cut_tokens

    @staticmethod
    def num_draft_tokens(item: ScheduledRequest) -> int:
        return len(item.draft.token_ids) if item.draft else 0


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)
