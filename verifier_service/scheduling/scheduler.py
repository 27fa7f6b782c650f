"""Decide which tokens of which requests the next step computes: pure Python over integers.

There are no phases. In each request, `num_computed_tokens` catches up with `num_tokens` plus the draft; prefill,
chunked prefill, prefix-cache hit, decode and verification differ only in how far apart the two are.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider.verifier_service.messages.batch import slot_of
from outrider.verifier_service.messages.request import Request
from outrider.verifier_service.scheduling.block_tables import BlockTables
from outrider.verifier_service.scheduling.draft_shares import Admission, DraftShares
from outrider.verifier_service.scheduling.fits import check_fits
from outrider.verifier_service.scheduling.kv_cache import BlockPool
from outrider.verifier_service.scheduling.outcome import Outcome
from outrider.verifier_service.scheduling.prompt_groups import PromptGroups
from outrider.verifier_service.scheduling.schedule import Schedule, ScheduledRequest, StepPlan, build_batch
from outrider.verifier_service.scheduling.waiting_queue import Seniority, WaitingQueue

PRIORITY_STEP_S = 5.0  # one level of priority counts as so many seconds of earlier arrival
BACKGROUND_TOKENS = 64  # of background requests per step: an arrival waits for one such step at most


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step and of one request. Raises `ValueError` naming the field that is out of range."""

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    max_model_len: int
    vocab_size: int
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        minima = {"max_num_batched_tokens": 1, "max_num_seqs": 1, "max_model_len": 2, "vocab_size": 1}
        for name, minimum in minima.items():
            if getattr(self, name) < minimum:
                raise ValueError(f"{name} must be at least {minimum}")


class Scheduler:
    """Serves the most senior request first; seniority is arrival plus `priority` times PRIORITY_STEP_S seconds.

    Seniority is fixed at arrival: a waiting request outranks all but a bounded span of later arrivals and never
    starves. A running request may preempt less senior ones to get blocks; a waiting one preempts none.

    Siblings (one prompt, one `group_id`) share the prompt's blocks. While one computes them, the others are parked
    outside of the queue and block no other request.

    A background request runs only while there are no others: the next step after an arrival preempts it. The blocks
    that it has filled stay in the prefix cache, so it goes on from there once the others have finished.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool, admission: Admission | None = None) -> None:
        """Without `admission`, drafts are cut only to what fits."""
        self._config = config
        self._pool = pool
        self._tables = BlockTables(pool, config.enable_prefix_caching)
        self._requests: dict[str, Request] = {}
        self._seniority: dict[str, Seniority] = {}
        self._num_added = 0
        self._running: list[Request] = []  # most senior first
        self._num_seats = 0  # that the running have
        self._waiting = WaitingQueue()
        self._background = WaitingQueue()  # background requests without KV
        self._num_background = 0  # with KV or without
        self._groups = PromptGroups()
        self._arrived: list[tuple[Request, int]] = []  # admitted with KV of another verifier; see `take_arrived`
        self._moves: list[tuple[int, int]] = []  # KV slots (source, target) of accepted tree paths
        self.shares = DraftShares(config.max_model_len, admission)
        self.num_preemptions = 0
        # counted at the first admission, as in vLLM; a sibling's prompt is a hit, too
        self.num_prefix_queried_tokens = 0
        self.num_prefix_hit_tokens = 0

    @property
    def kv_usage(self) -> float:
        """Return the share of KV blocks in use, 0 to 1."""
        return self._pool.usage

    @property
    def running(self) -> Sequence[Request]:
        """The requests that own KV, held ones included, most senior first."""
        return tuple(self._running)

    @property
    def waiting(self) -> Sequence[Request]:
        """The requests without KV, background requests left out, most senior first: O(n log n)."""
        return tuple(sorted([*self._waiting, *self._groups.parked], key=self._seniority_of))

    @property
    def num_waiting(self) -> int:
        return len(self._requests) - len(self._running) - len(self._background)

    @property
    def background(self) -> Sequence[Request]:
        """The background requests without KV, in the order of arrival."""
        return tuple(self._background)

    def has_work(self) -> bool:
        return bool(self._requests)

    def next_deadline_s(self) -> float | None:
        """Return when the first of the running requests that are held, or stand still, may go on; None: none is."""
        pauses = (pause for r in self._running for pause in (r.hold_until_s, r.stands_until_s) if pause is not None)
        return min(pauses, default=None)

    def add(self, request: Request) -> None:
        """Queue a request; raises `ValueError` if it cannot run even alone in the pool."""
        if request.request_id in self._requests:
            raise ValueError(f"request {request.request_id!r} is already here")
        limits = {"max_model_len": self._config.max_model_len, "max_num_seqs": self._config.max_num_seqs}
        check_fits(request, self._pool, self.shares.max_total_tokens(request), **limits)
        self._requests[request.request_id] = request
        seniority_s = math.inf if request.is_background else request.arrival_s + request.priority * PRIORITY_STEP_S
        self._num_background += request.is_background
        self._seniority[request.request_id] = (seniority_s, self._num_added)
        self._num_added += request.num_seats
        self._groups.add(request)
        self._enqueue([request])

    def remove(self, request_id: str) -> Request | None:
        """Remove a request from any queue and free its KV; return None if it is unknown."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        if request.block_table:
            self._running.remove(request)
            self._num_seats -= request.num_seats
            self._free(request)
        elif self._seniority_of(request) in (queue := self._queue_of(request)):
            queue.discard(self._seniority_of(request))
        self._num_background -= request.is_background
        self._groups.remove(request)
        del self._seniority[request_id]
        return request

    def go_on(self, requests: Sequence[Request], parents: Sequence[Request]) -> None:
        """Have beams go on from the KV of their `parents`, which run; new ones begin to run, behind the first."""
        arrival_s, number = self._seniority_of(requests[0])
        for place, request in enumerate(requests):
            if self._requests.setdefault(request.request_id, request) not in self._running:
                self._seniority[request.request_id] = (arrival_s, number + place)
                insort(self._running, request, key=self._seniority_of)
        self._tables.go_on(requests, parents)

    def schedule(self, now_s: float) -> Schedule | None:
        """Choose the next step and reserve its KV; return None if nothing can run now.

        Commit or remove every scheduled request before the next call; otherwise it computes the same tokens again.
        """
        step = StepPlan(budget=self._config.max_num_batched_tokens)
        if self._is_idle:
            step.budget = min(step.budget, BACKGROUND_TOKENS)
        else:
            self._preempt_background()
        self.shares.begin_step(self._running)
        self._schedule_running(step, now_s)
        if not step.preempted:  # after a preemption the pool has no room for new requests
            self._admit_waiting(step)
        if not step.items:  # possible after a preemption, too: if all preempted blocks were shared, none became free
            return None
        batch = build_batch(
            step.items,
            copies=step.copies,
            moves=self.take_moves(),
            block_size=self._pool.block_size,
            vocab_size=self._config.vocab_size,
        )
        return Schedule(items=tuple(step.items), preempted=tuple(step.preempted), batch=batch)

    @property
    def moves(self) -> Sequence[tuple[int, int]]:
        """The KV slots (source, target) that the next batch moves, for tree paths accepted since the last batch."""
        return self._moves

    def take_moves(self) -> list[tuple[int, int]]:
        """Return and clear the moves; the next batch must make them before it runs."""
        moves, self._moves = self._moves, []
        return moves

    def take_arrived(self) -> list[tuple[Request, int]]:
        """Return and clear the requests that were just admitted with KV of another verifier, to be written from there.

        They are in no step yet: their drafts may be asked for before.
        """
        arrived, self._arrived = self._arrived, []
        return arrived

    def publish_arrived(self, request: Request, start: int) -> None:
        """Let other requests find KV that was written from a position on."""
        self._tables.publish(request, start // self._pool.block_size)

    def is_current(self, request: Request) -> bool:
        """Return whether a request's KV began under the weights of now."""
        return self._tables.is_current(request)

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        """Append a step's committed tokens (none after a prefill chunk) and release the KV of rejected ones.

        before   |<- num_computed ->|<- to the end ->|<---------- draft ---------->|
        verified |                  |                |<- accepted ->|<- rejected ->|
        after    |<------------- num_computed --------------------->| recovered | bonus: in token_ids, no KV yet
                                                                    |<- blocks beyond are released

        Does nothing for a request that was removed while its step ran.
        """
        requests, size, masks = self._requests, self._pool.block_size, self.shares.masks
        for outcome in outcomes:
            item, committed = outcome.item, outcome.committed
            request, draft = item.request, item.draft
            if requests.get(request.request_id) is not request:
                continue
            first = request.num_computed_tokens
            if item.samples:
                max_committed = 1 if draft is None else 1 + len(draft.token_ids)
                assert 1 <= len(committed) <= max_committed, f"{len(committed)} tokens committed, of {max_committed}"
                if draft is not None and draft.parents is not None:
                    self._move_path(request, outcome.path[: len(committed) - 1])
                request.token_ids.extend(committed)
                if masks is not None:
                    masks.observe(max_committed - 1, len(outcome.path))
                stop = request.num_computed_tokens = len(request.token_ids) - 1
                request.draft = request.hold_until_s = None
            else:
                assert not committed, "a prefill chunk samples nothing"
                stop = request.num_computed_tokens = first + item.num_new_tokens
            if stop <= (len(request.block_table) - 1) * size:
                self._tables.roll_back(request)
            if stop // size != first // size:
                self._tables.publish(request, first // size)
            if request.group_id is not None:
                self._enqueue(self._groups.release(request))

    def _move_path(self, request: Request, path: Sequence[int]) -> None:
        """Queue moves of the KV of accepted tree nodes to the slots of their positions; call before committing them.

        slots    |<- committed ->|<- node 0 | node 1 | node 2 | node 3 ->|
        path     |               |<-          node 1 ,         node 3 ->|   the node at depth k moves to the k-th slot
        """
        first, size = request.num_tokens, self._pool.block_size
        for depth, node in enumerate(path):
            if node != depth:
                source, target = (slot_of(request.block_table, first + place, size) for place in (node, depth))
                self._moves.append((source, target))

    def change_root(self, root: bytes) -> None:
        """Share no KV between requests of before and after: the weights have changed. `root`: see `root_hash`.

        Running requests go on with the KV that they have, without siblings.
        """
        for request in self._running:
            self._enqueue(self._groups.leave(request))
            self._groups.remove(request)
        self._tables.change_root(root)

    def preempt_all(self) -> None:
        """Free the KV of all running requests and queue them again. No step may be in flight."""
        while self._running:
            self._preempt()

    def flush_cache(self) -> None:
        """Empty the prefix cache. No request may be running."""
        self._pool.flush()

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless queues, block tables and pool agree."""
        waiting = (*self.waiting, *self._background)
        assert self._num_background == sum(request.is_background for request in self._requests.values())
        assert {*self._running, *waiting} == {*self._requests.values()}, "the queues are not what was added"
        assert len(self._running) + len(waiting) == len(self._requests), "a request is queued twice"
        assert self._running == sorted(self._running, key=self._seniority_of), "the running are not in order"
        assert self._num_seats == sum(request.num_seats for request in self._running), "a seat is miscounted"
        assert len(self._running) <= self._num_seats <= self._config.max_num_seqs, "too many requests are running"
        for request in waiting:
            assert not request.block_table, f"{request.request_id} waits and holds KV"
            assert request.num_computed_tokens == 0, f"{request.request_id} waits with computed tokens"
        for request in self._running:
            num_blocks = self._pool.num_blocks_for(request.num_computed_tokens)
            assert len(request.block_table) >= max(1, num_blocks), f"{request.request_id} has KV outside its blocks"
            assert request.num_computed_tokens < request.num_tokens, f"{request.request_id} has nothing to compute"
        self._groups.check_integrity(self._running)
        self._pool.check_integrity([request.block_table for request in self._running])

    def _seniority_of(self, request: Request) -> Seniority:
        return self._seniority[request.request_id]

    @property
    def _is_idle(self) -> bool:
        """Whether there are no requests but background requests."""
        return len(self._requests) == self._num_background

    def _queue_of(self, request: Request) -> WaitingQueue:
        return self._background if request.is_background else self._waiting

    def _enqueue(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._queue_of(request).push(self._seniority_of(request), request)

    def _schedule_running(self, step: StepPlan, now_s: float) -> None:
        running, items, pool, paying = self._running, step.items, self._pool, self.shares.paying
        references, size, may_have_masks = pool.references, pool.block_size, self.shares.masks is not None
        index = 0  # not `for`: preemption shortens the list from its end
        while index < len(running) and step.budget:
            request = running[index]
            index += 1
            if request.stands_until_s is not None and request.stands_until_s <= now_s:
                request.stands_until_s = None  # nobody came
            if request.stands_until_s is not None or (request.hold_until_s or 0.0) > now_s:
                continue
            computed, table, num_tokens = request.num_computed_tokens, request.block_table, len(request.token_ids)
            draft, num_new = request.draft, 1
            if draft is not None:
                draft = paying.get(request.request_id, draft)
                num_new += len(draft.token_ids)
            place = computed // size  # of the block that it writes into next
            num_missing = (computed + num_new - 1) // size + 1 - len(table)
            if (
                num_tokens - computed != 1
                or may_have_masks
                or (place < len(table) and references[table[place]] != 1)
                or (num_missing > 0 and num_missing > pool.num_free_blocks)
                or (num_new > 1 and (num_new > step.budget or num_tokens + num_new > request.limit))
                or (draft is not None and draft.parents is not None)
            ):
                self._schedule_request(request, step)
                continue
            # most requests in most steps: a token and a chain, which fit; as `_schedule_request`, without its calls
            if num_missing > 0:
                table.extend(pool.allocate(num_missing))
            if request.draft is not None:
                assert request.draft.position == num_tokens, f"not at {num_tokens} tokens: {request.draft}"
                request.metrics.num_cut_tokens += len(request.draft.token_ids) + 1 - num_new
            step.budget -= num_new
            items.append(ScheduledRequest(request, num_new, draft if num_new > 1 else None, True))

    def _admit_waiting(self, step: StepPlan) -> None:
        queue = self._background if self._is_idle else self._waiting
        while step.budget and self._num_seats < self._config.max_num_seqs:
            request = queue.first()
            if request is None or self._num_seats + request.num_seats > self._config.max_num_seqs:
                return
            if self._park(request):
                queue.pop()
                continue
            if not self._take_prefix(request):
                return
            queue.pop()
            insort(self._running, request, key=self._seniority_of)
            self._num_seats += request.num_seats
            self._groups.enter(request)
            if request.arrived is None:
                self._schedule_request(request, step)
            else:
                self._arrived.append((request, self._tables.place_arrived(request, request.arrived.num_tokens)))

    def _park(self, request: Request) -> bool:
        """Park a request while a sibling computes their prompt, if that is at least a block; return whether it was."""
        num_blocks = (request.num_prompt_tokens - 1) // self._pool.block_size
        if request.group_id is None or num_blocks == 0 or _wants_prompt_rows(request):
            return False
        return not self._tables.has_cached(request, num_blocks - 1) and self._groups.park(request)

    def _take_prefix(self, request: Request) -> bool:
        """Give a waiting request the KV of its prefix from cache or sibling; return False if the rest does not fit."""
        if _wants_prompt_rows(request):
            return self._tables.take_nothing(request)
        source = self._groups.source(request)
        # After a preemption the cache may hold this request's output beyond the prompt; a sibling has no such KV.
        if source is None or self._tables.has_cached(request, (request.num_prompt_tokens - 1) // self._pool.block_size):
            is_taken = self._tables.take_cached(request)
        else:
            is_taken = self._tables.fork(request, source)
        if is_taken and request.num_preemptions == 0:
            self._count_prefix(request)
        return is_taken

    def _count_prefix(self, request: Request) -> None:
        request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        if self._config.enable_prefix_caching and not request.is_background:
            self.num_prefix_queried_tokens += request.num_tokens
            self.num_prefix_hit_tokens += request.num_computed_tokens

    def _schedule_request(self, request: Request, step: StepPlan) -> None:
        """Add one running request to the step, within budget and free blocks; its draft gets only what is left.

        Less senior requests are preempted for its tokens, not for its draft: a recompute costs more than a draft gains.
        """
        num_left = request.num_tokens - request.num_computed_tokens
        num_wanted = min(num_left, step.budget)
        if _wants_prompt_rows(request):  # at least one token: every running request owns KV
            num_wanted = min(num_wanted, max(1, step.num_prompt_rows_left))
        while (room := self._tables.room(request)) < num_wanted and self._running[-1] is not request:
            step.preempted.append(self._preempt())
        num_new = min(num_wanted, room)
        if num_new == 0:
            return
        samples = num_new == num_left
        num_prompt_rows = num_new - samples if _wants_prompt_rows(request) else 0
        draft = self.shares.cut_draft(request, min(step.budget, room) - num_new) if samples else None
        num_new += len(draft.token_ids) if draft else 0
        masks = self.shares.place_masks(request, draft, min(step.budget, room) - num_new) if samples else None
        num_new += masks.num_tokens if masks is not None else 0
        step.copies += self._tables.reserve(request, num_new)
        step.budget -= num_new
        step.num_prompt_rows_left -= num_prompt_rows
        step.items.append(
            ScheduledRequest(
                request=request,
                num_new_tokens=num_new,
                draft=draft,
                samples=samples,
                num_prompt_rows=num_prompt_rows,
                masks=masks,
            )
        )

    def _preempt(self) -> Request:
        """Free the least senior running request's KV and queue it again; its prompt and output will be recomputed."""
        request = self._running.pop()
        self._num_seats -= request.num_seats
        self._free(request)
        request.num_preemptions += 1
        self.num_preemptions += not request.is_background
        if request.draft is not None:
            request.metrics.num_cut_tokens += len(request.draft.token_ids)
        request.draft = None
        request.hold_until_s = request.stands_until_s = None
        self._enqueue([request])
        return request

    def _preempt_background(self) -> None:
        while self._running and self._running[-1].is_background:
            self._preempt()

    def _free(self, request: Request) -> None:
        """Free a running request's KV and queue the siblings that were parked for it."""
        self._tables.free(request)
        self._enqueue(self._groups.leave(request))


def _wants_prompt_rows(request: Request) -> bool:
    """Return whether logits of all prompt positions are needed, so that no prefix may be taken from the cache."""
    return request.sampling.prompt_logprobs is not None and request.num_output_tokens == 0
