"""What the scheduler owes beyond being right, which the machine beside this shows: who comes when and shares what."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from outrider.verifier_service.messages.draft import ROOT
from outrider.verifier_service.messages.request import Request
from outrider.verifier_service.scheduling.schedule import MAX_PROMPT_ROWS, Schedule, ScheduledRequest, first_nodes
from outrider.verifier_service.scheduling.scheduler import Scheduler
from support import parts

BLOCK_SIZE = 4
PROMPT = range(1, 12)  # ten tokens to share: 2 blocks and a half


def added(scheduler: Scheduler, name: str, prompt: Iterable[int], **fields: Any) -> Request:
    request = parts.request(name, prompt, **fields)
    scheduler.add(request)
    return request


def step(scheduler: Scheduler, committed: Mapping[str, list[int]] = {}, now_s: float = 0.0) -> Schedule:
    """Schedule and commit: `committed` per request id, by default one token 7."""
    schedule = scheduler.schedule(now_s)
    assert schedule is not None
    for item in schedule.items:
        parts.commit(scheduler, item, committed.get(item.request.request_id, [7]) if item.samples else [])
    scheduler.check_integrity()
    return schedule


def shares(schedule: Schedule) -> dict[str, int]:
    return {item.request.request_id: item.num_new_tokens for item in schedule.items}


# --- who is in a step, with how many tokens ---


@dataclasses.dataclass(frozen=True)
class Come:
    """A request that is added."""

    name: str
    prompt: Iterable[int]
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def come(name: str, prompt: Iterable[int], **fields: Any) -> Come:
    return Come(name, prompt, fields)


def choices(names: str, *, prompt: Iterable[int] = PROMPT, **fields: Any) -> list[Come]:
    return [come(name, prompt, group_id="g", **fields) for name in names]


LONG = range(1, 9)  # two blocks, and a third with the first token
ALONE = {"enable_prefix_caching": False}
# options of the scheduler, and what happens: who comes; who has how many tokens in a step ("a6 b1"), who goes ("-a")
PLAYS: dict[str, tuple[dict[str, Any], list[Come | str]]] = {
    "a long prompt is computed in chunks": (
        {"max_num_batched_tokens": 6},
        [come("a", range(14)), "a6; a6; a2; a1"],
    ),
    "running requests go before new ones": (
        {"max_num_batched_tokens": 4},
        [come("a", [1]), "a1", come("b", range(10)), "a1 b3"],
    ),
    "so many run at a time": (
        {"max_num_seqs": 2},
        [come("a", [1]), come("b", [1]), come("c", [1]), "a1 b1; -a; b1 c1"],
    ),
    "a request is admitted only if all of it fits, and the small one behind it does not overtake": (
        {"num_blocks": 4, "max_num_batched_tokens": 8},
        [
            come("a", range(6), max_tokens=4),
            "a6",
            come("b", range(21, 31), max_tokens=4),
            come("c", [1], max_tokens=4),
            "a1; -a; b8",
        ],
    ),
    "a newcomer goes before those who run from the next step on": (
        {"num_blocks": 4},
        [come("a", range(7), max_tokens=8), "a7", come("b", [1], priority=-1), "a1 b1; b1 a1"],
    ),
    "a senior that waits preempts nobody, and nobody overtakes it": (
        {"num_blocks": 4},
        [
            come("a", LONG, max_tokens=4),
            "a8",
            come("b", range(21, 31), max_tokens=4, priority=-9),
            come("c", [1]),
            "a1; -a; b10 c1",
        ],
    ),
    "shared blocks let a request in that would not fit alone": (
        {"num_blocks": 4},
        [
            come("a", range(1, 11), max_tokens=4),
            "a10",
            come("b", range(31, 41), max_tokens=4),
            "a1; -b",
            come("c", [*LONG, 50, 51], max_tokens=4),
            "a1 c2",
        ],
    ),
    "a cached prefix that nobody uses makes no room": (
        {"num_blocks": 4},
        [
            come("a", LONG, max_tokens=4),
            "a8; -a",
            come("b", range(21, 27), max_tokens=4),
            "b6",
            come("c", PROMPT, max_tokens=4),
            "b1; -b; c3",
        ],
    ),
    "siblings wait for the first and share its prompt": (
        {},
        [*choices("abc"), "a11; a1 b1 c1"],
    ),
    "and do without a cache": (ALONE, [*choices("abc"), "a11; a1 b1 c1"]),
    "parked siblings hold nobody up": (
        {"max_num_batched_tokens": 6},
        [*choices("abc"), come("x", [7]), "a6; a5 x1; a1 x1 b1 c1"],
    ),
    "a choice that comes later shares at once": (
        ALONE,
        [*choices("a"), "a11; a1", *choices("b"), "a1 b1"],
    ),
    "when the first goes half-way the next computes the prompt": (
        {"max_num_batched_tokens": 6},
        [*choices("abc"), "a6; -a; b6; b1 c1"],
    ),
    "when the first finishes at once the cache serves its siblings": (
        {},
        [*choices("abc"), "a11; -a; b3 c3"],
    ),
    "a parked sibling can go": (
        {"max_num_batched_tokens": 6},
        [*choices("abc"), "a6; -b; a5; a1 c1"],
    ),
    "nobody waits for less than a block": ({}, [*choices("ab", prompt=range(4)), "a4 b4"]),
    "nobody waits for what the cache holds": (
        {},
        [come("x", PROMPT), "x11", *choices("ab"), "x1 a3 b3"],
    ),
    "a sibling waits until its own blocks fit": (
        {"num_blocks": 4, **ALONE},
        [*choices("ab", prompt=range(10), max_tokens=3), come("x", [1], max_tokens=3), "a10 x1; a1 x1; -x; a1 b1"],
    ),
    "another prompt under the same group shares nothing": (
        ALONE,
        [*choices("a"), "a11", *choices("b", prompt=range(2, 13)), "a1 b11"],
    ),
    "nor does another salt": (ALONE, [*choices("a"), "a11", *choices("b", cache_salt="s"), "a1 b11"]),
    "prompt logprobs need every position": (
        {},
        [*choices("a"), "a11", *choices("b", prompt_logprobs=0), "a1 b11"],
    ),
}


@pytest.mark.parametrize("name", PLAYS)
def test_who_is_in_a_step_with_how_many_tokens(name: str):
    options, moves = PLAYS[name]
    scheduler = parts.scheduler(**options)
    for move in moves:
        match move:
            case Come():
                added(scheduler, move.name, move.prompt, **move.fields)
            case str():
                for event in move.split("; "):
                    if event.startswith("-"):
                        assert scheduler.remove(event[1:])
                    else:
                        assert " ".join(f"{name}{count}" for name, count in shares(step(scheduler)).items()) == event


def test_a_siblings_last_block_is_copied_and_the_others_are_shared():
    scheduler = parts.scheduler()
    first, second = (added(scheduler, name, PROMPT, group_id="g") for name in "ab")
    step(scheduler)
    batch = scheduler.schedule(0.0).batch
    assert (second.num_cached_tokens, second.block_table[:2]) == (10, first.block_table[:2])
    assert (batch.copy_sources, batch.copy_targets) == (first.block_table[2:], second.block_table[2:])
    assert first.block_table[2] != second.block_table[2]


def test_when_the_first_is_preempted_its_siblings_look_for_themselves():
    scheduler = parts.scheduler(num_blocks=5, max_num_batched_tokens=5, enable_prefix_caching=False)
    added(scheduler, "x", range(21, 28), max_tokens=12)
    step(scheduler)
    step(scheduler)
    first, second = (added(scheduler, name, range(1, 13), group_id="g", max_tokens=4) for name in "ab")
    while not first.num_preemptions:
        step(scheduler)
    assert scheduler.waiting == (first, second)
    scheduler.remove("x")
    scheduler.remove("a")
    assert shares(step(scheduler)) == {"b": 5}


def test_prompt_rows_are_bounded_over_all_requests_of_a_step():
    scheduler = parts.scheduler(256, 16, max_model_len=1024)
    for token_id, name in enumerate("abc", start=1):
        added(scheduler, name, [token_id] * 200, prompt_logprobs=0)
    added(scheduler, "d", [4] * 200)
    assert shares(step(scheduler)) == {"a": 200, "b": MAX_PROMPT_ROWS - 199, "c": 1, "d": 200}
    assert shares(step(scheduler)) == {"a": 1, "b": 143, "c": 114, "d": 1}


# --- the prefix cache ---


@pytest.mark.parametrize(
    ("first", "second", "options", "num_cached"),
    [
        (LONG, [*LONG, 50], {}, 8),
        ([*LONG, 50], [*LONG, 50, 51, 52, 53], {}, 8),  # the third block was not full
        (LONG, LONG, {}, 4),  # at least the last token is computed
        (range(3), range(3), {}, 0),
        (range(5), range(5), {}, 4),
        (LONG, [9, *LONG], {}, 0),
        ([*LONG, 7, 7], [*LONG, 7, 7, 7, 8], {}, 8),  # the first one's output would come after the third block
        ([*LONG, 7, 7, 7], [*LONG, 7, 7, 7, 7, 8], {}, 12),  # its first output token fills it
        (LONG, LONG, {"enable_prefix_caching": False}, 0),
    ],
)
@pytest.mark.parametrize("is_gone", [False, True])
def test_how_much_of_a_prompt_is_found(first, second, options: dict, num_cached: int, is_gone: bool):
    scheduler = parts.scheduler(**options)
    added(scheduler, "a", first)
    step(scheduler)
    step(scheduler)
    if is_gone:
        scheduler.remove("a")
    request = added(scheduler, "b", second)
    step(scheduler)
    assert request.num_cached_tokens == num_cached


def test_salts_keep_prefixes_apart():
    scheduler = parts.scheduler()
    added(scheduler, "a", [*LONG, 9], cache_salt="tenant")
    step(scheduler)
    other, same = (added(scheduler, salt, [*LONG, 9], cache_salt=salt) for salt in ("", "tenant"))
    step(scheduler)
    assert (other.num_cached_tokens, same.num_cached_tokens) == (0, 8)


def test_a_continuation_finds_its_output_and_counts_the_prompt_alone():
    scheduler = parts.scheduler()
    added(scheduler, "a", range(1, 7), group_id="g")
    for token_id in range(7, 14):
        step(scheduler, {"a": [token_id]})
    request = added(scheduler, "b", range(1, 7), output=range(7, 15), group_id="g")
    assert shares(step(scheduler)) == {"a": 1, "b": 2}
    assert request.num_cached_tokens == 6


def test_counts_queried_and_hit_tokens_of_first_admissions():
    scheduler = parts.scheduler()
    for name, prompt, counts in (("a", range(1, 10), (9, 0)), ("b", range(1, 12), (20, 8))):
        added(scheduler, name, prompt)
        step(scheduler)
        assert (scheduler.num_prefix_queried_tokens, scheduler.num_prefix_hit_tokens) == counts


# --- drafts ---


def with_draft(num_tokens: int, draft_tokens, parents=None, *, max_tokens: int = 16, **options):
    """A request of `num_tokens` tokens, all but the last computed, with a draft."""
    scheduler = parts.scheduler(**options)
    request = added(scheduler, "a", range(1, num_tokens), max_tokens=max_tokens)
    while not request.num_output_tokens:
        step(scheduler, {"a": [num_tokens]})
    request.draft = parts.draft(request, draft_tokens, parents, is_drawn=parents is None)
    return scheduler, request


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (8, 9, 10, 11)),
        ({"max_tokens": 5}, (8, 9, 10)),  # 1 output token so far, 3 accepted, 1 bonus: 5
        ({"max_tokens": 2}, None),
        ({"max_model_len": 11}, (8, 9, 10)),  # 7 tokens, 3 accepted, 1 bonus: 11
        ({"max_model_len": 8}, None),
        ({"max_num_batched_tokens": 3}, (8, 9)),
    ],
)
def test_a_draft_is_cut_to_what_the_limits_and_the_budget_leave(options: dict, expected):
    scheduler, request = with_draft(7, [8, 9, 10, 11], **options)
    (item,) = scheduler.schedule(0.0).items
    assert (item.draft and item.draft.token_ids) == expected
    assert item.draft is None or len(item.draft.draft_probs) == len(expected)
    assert request.metrics.num_cut_tokens == 4 - len(expected or ())


def test_where_a_draft_is_cut_does_not_depend_on_its_tokens():
    """As docs/exactness.md, "The trap", has it: same counts, other tokens (invalid ones too), same cut."""
    cuts = set()
    for token_ids in ([8, 9, 10, 11], [99, 5000, 5000, 5000], [0, 0, 0, 0]):
        scheduler, _ = with_draft(7, token_ids, max_tokens=4)
        (item,) = scheduler.schedule(0.0).items
        assert item.draft.token_ids == tuple(token_ids[:2]), "verification must see what was drawn"
        cuts.add(len(item.draft.token_ids))
    assert cuts == {2}


def test_short_of_blocks_the_draft_is_cut_and_nobody_preempted():
    scheduler = parts.scheduler(num_blocks=4)
    first, second = (
        added(scheduler, name, range(place, place + 6), max_tokens=8) for name, place in (("a", 1), ("b", 21))
    )
    step(scheduler)
    first.draft = parts.draft(first, [1, 2, 3, 4])  # one more slot in the second block, and no free block
    schedule = step(scheduler)
    assert shares(schedule) == {"a": 2, "b": 1}
    assert (first.metrics.num_cut_tokens, schedule.preempted, second.num_preemptions) == (3, (), 0)


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
            parts.commit(scheduler, item, tokens)
    with pytest.raises(AssertionError, match="samples nothing"):
        parts.commit(scheduler, ScheduledRequest(request=request, num_new_tokens=1, draft=None, samples=False), [1])


#           0     1     2     3     4     5
PARENTS = (ROOT, ROOT, 0, 1, 3, 3)  # node 4's path: 1, 3, 4


def test_batches_of_chains_have_no_trees_and_beside_a_tree_they_have_no_parents():
    scheduler, _ = with_draft(6, range(30, 36), PARENTS)
    other = added(scheduler, "b", [1, 2])
    assert step(scheduler).batch.tree_parents == [list(PARENTS), []]
    other.draft = parts.draft(other, [3, 4])
    assert scheduler.schedule(0.0).batch.tree_parents == []


@pytest.mark.parametrize(
    ("path", "num_committed", "moves"),
    [
        ((), 1, []),
        ((0,), 2, []),  # in its place already
        ((0, 2), 3, [(8, 7)]),
        ((1, 3, 5), 4, [(7, 6), (9, 7), (11, 8)]),
        ((1, 3), 2, [(7, 6)]),  # a stop token within the path: nothing follows it, so that its KV is not needed
    ],
)
def test_an_accepted_paths_kv_is_moved_once(path: tuple[int, ...], num_committed: int, moves):
    scheduler, request = with_draft(6, range(30, 36), PARENTS)
    (item,) = scheduler.schedule(0.0).items
    parts.commit(scheduler, item, [50] * num_committed, path)
    assert (list(scheduler.moves), request.num_computed_tokens) == (moves, 5 + num_committed)
    batch = step(scheduler).batch
    assert list(zip(batch.move_sources, batch.move_targets, strict=True)) == moves
    assert step(scheduler).batch.move_sources == []


@pytest.mark.parametrize(
    ("max_nodes", "max_depth", "num_kept", "num_rows"),
    [(9, 9, 6, 4), (6, 3, 6, 4), (5, 9, 5, 4), (4, 9, 4, 3), (3, 9, 3, 2), (9, 2, 4, 3), (9, 1, 2, 1), (0, 9, 0, 0)],
)
def test_a_tree_is_cut_by_counts_and_depths_with_its_rows(max_nodes, max_depth, num_kept, num_rows):
    draft = parts.draft(None, range(30, 36), PARENTS, is_drawn=True)
    kept = first_nodes(draft, max_nodes=max_nodes, max_depth=max_depth)
    assert (kept.token_ids, kept.parents) == (draft.token_ids[:num_kept], PARENTS[:num_kept])
    assert kept.draft_probs == draft.draft_probs[:num_rows]


def test_a_draft_is_cut_at_the_first_node_that_is_too_deep_whatever_follows_with_its_confidences():
    draft = parts.draft(None, [30, 31, 32], (ROOT, 0, ROOT))
    assert first_nodes(draft, max_nodes=9, max_depth=1).token_ids == (30,)
    draft = parts.draft(None, [5, 6, 7], confidences=(0.5, 0.25, 0.125))
    assert first_nodes(draft, max_nodes=2, max_depth=9).confidences == (0.5, 0.25)
    assert first_nodes(draft, max_nodes=9, max_depth=1).confidences == (0.5,)


# --- preemption, holds ---


def test_the_latest_arrival_is_preempted_and_recomputed():
    scheduler = parts.scheduler(num_blocks=4)
    _, second = (added(scheduler, name, range(place, place + 8), max_tokens=8) for name, place in (("a", 1), ("b", 21)))
    step(scheduler)
    second.draft = parts.draft(second, [30, 31])
    second.hold_until_s = 99.0
    schedule = step(scheduler)
    assert (shares(schedule), schedule.preempted) == ({"a": 1}, (second,))
    assert (second.block_table, second.num_computed_tokens, second.num_preemptions) == ([], 0, 1)
    assert (second.draft, second.hold_until_s, second.metrics.num_cut_tokens) == (None, None, 2)
    scheduler.remove("a")
    assert shares(step(scheduler)) == {"b": 5}, "`a` took the tail of b's prefix: its first block is still cached"
    assert second.num_cached_tokens == 0, "recorded at the first admission"


def test_a_preemption_that_frees_nothing_is_no_step():
    """All that the least senior holds may be shared with one that stays; the others may wait for their drafts."""
    scheduler = parts.scheduler(num_blocks=6)
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


def test_a_held_request_is_left_out_until_its_deadline():
    scheduler = parts.scheduler()
    first, second = added(scheduler, "a", [1]), added(scheduler, "b", [2])
    step(scheduler)
    first.hold_until_s, second.hold_until_s = 3.0, 2.0
    assert (scheduler.schedule(1.0), scheduler.next_deadline_s()) == (None, 2.0)
    assert shares(step(scheduler, now_s=2.0)) == {"b": 1}
    assert (second.hold_until_s, scheduler.next_deadline_s()) == (None, 3.0)
    assert shares(step(scheduler, now_s=3.5)) == {"a": 1, "b": 1}


@pytest.mark.parametrize(("waited_s", "first"), [(4.9, "urgent"), (5.1, "patient")])
def test_a_level_of_priority_is_worth_five_seconds_of_waiting(waited_s, first):
    scheduler = parts.scheduler()
    added(scheduler, "patient", [1], arrival_s=0.0)
    added(scheduler, "urgent", [2], arrival_s=waited_s, priority=-1)
    assert scheduler.waiting[0].request_id == first


# --- what can never run ---


@pytest.mark.parametrize(
    ("prompt", "fields", "text"),
    [
        ([], {}, "at least 1"),
        (range(64), {}, "prompt_token_ids: a prompt of 64 tokens.* model's maximum of 64"),
        (range(10), {"max_tokens": 20}, r"need 8 KV blocks of 4 tokens, the whole pool has 7"),
        ([1, 2, 3], {"max_tokens": 4, "output": [9] * 4}, "output_token_ids: nothing is left"),
        (range(60), {"output": [9] * 4}, "output_token_ids: nothing is left"),
    ],
)
def test_add_refuses_what_could_never_run(prompt, fields: dict, text: str):
    scheduler = parts.scheduler(num_blocks=7)
    with pytest.raises(ValueError, match=text):
        scheduler.add(parts.request("a", prompt, **fields))
    assert not scheduler.has_work()
    assert scheduler.schedule(0.0) is None


def test_add_refuses_a_known_id():
    scheduler = parts.scheduler()
    added(scheduler, "a", [1])
    with pytest.raises(ValueError, match="already here"):
        added(scheduler, "a", [1])


@pytest.mark.parametrize("name", ["max_num_batched_tokens", "max_num_seqs", "max_model_len", "vocab_size"])
def test_config_names_the_bad_field(name: str):
    with pytest.raises(ValueError, match=name):
        parts.scheduler(**{name: 0})


# --- speed ---


def test_scheduling_256_requests_with_drafts_is_cheap():
    scheduler = parts.scheduler(1024, 16, max_model_len=4096)
    for index in range(256):
        added(scheduler, str(index), [index % 100, index // 100, 1])
    step(scheduler)
    times_s = []
    for _ in range(9):
        for request in scheduler.running:
            request.draft = parts.draft(request, [1, 2, 3, 4])
        begin_s = time.perf_counter()
        schedule = scheduler.schedule(0.0)
        times_s.append(time.perf_counter() - begin_s)
        for item in schedule.items:
            parts.commit(scheduler, item, [1])
    # About 1 ms on an idle core; the margin is for machines that are shared.
    assert min(times_s) < 0.010


def test_fifty_thousand_requests_in_the_queue_cost_no_step():
    scheduler = parts.scheduler(num_blocks=64, max_num_seqs=8)
    requests = [parts.request(str(index), [1], max_tokens=1, priority=index % 7) for index in range(50_000)]
    begin_s = time.perf_counter()
    for request in requests:
        scheduler.add(request)
    for request in requests[1::2]:
        scheduler.remove(request.request_id)
    for _ in range(500):
        schedule = scheduler.schedule(0.0)
        for item in schedule.items:
            parts.commit(scheduler, item, [1])
            scheduler.remove(item.request.request_id)
    # About 0.5 s on an idle core; removals or steps that walk the queue would make it minutes.
    assert time.perf_counter() - begin_s < 5.0
    assert scheduler.num_waiting == 21_000
    scheduler.check_integrity()
