"""The scheduler under random arrivals, drafts, trees, holds, cancellations and steps, beside a model that knows its KV.

What holds after every step: queues in order, nothing lost or kept, no KV that other tokens wrote, every row at its
place, drafts cut by counts alone; and at the end nobody is stuck and all tokens are those of plain decoding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outrider.verifier_service.messages.draft import ROOT
from outrider.verifier_service.messages.request import Request
from outrider.verifier_service.messages.tree import depths, parents_of
from outrider.verifier_service.scheduling.kv_cache import BlockPool
from outrider.verifier_service.scheduling.schedule import Schedule, ScheduledRequest
from outrider.verifier_service.scheduling.scheduler import PRIORITY_STEP_S, Scheduler, SchedulerConfig
from support import parts

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
        assert max(batch.token_ids) < VOCAB_SIZE, "a drafted id that the model does not have"
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
        name = str(self.num_added)
        request = parts.request(name, prompt, output=output, max_tokens=max_tokens, arrival_s=self.now_s, **fields)
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
        request.draft = parts.draft(request, [*right[:num_right], *wrong[num_right:]], is_drawn=sampled)
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
        request.draft = parts.draft(request, [path[-1] for path in paths], parents, is_drawn=data.draw(st.booleans()))
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
        parts.commit(self.scheduler, item, committed, path)
        if request.block_table:
            num_blocks = self.scheduler._pool.num_blocks_for(request.num_computed_tokens)
            assert len(request.block_table) == num_blocks, "blocks of rejected tokens are kept"
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
