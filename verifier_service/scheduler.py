"""Decide which tokens of which requests the next step computes: pure Python over integers.

There are no phases. A request is `num_computed_tokens` chasing `num_tokens` plus its draft; prefill, chunked prefill,
prefix-cache hit, decode and verification differ only in how far apart the two are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outrider.verifier_service.batch import ScheduledBatch
from outrider.verifier_service.drafting import Draft
from outrider.verifier_service.kv_cache import BlockPool
from outrider.verifier_service.prefix_cache import extend_hashes
from outrider.verifier_service.request import Request


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRequest:
    """One request's share of a step.

    token_ids  |<-- computed -->|<------- num_new_tokens ------->|
                                |<- to the end ->|<-- `draft` -->|   the draft only where the step `samples`
    """

    request: Request
    num_new_tokens: int  # draft included
    draft: Draft | None  # to verify now, possibly cut; never empty
    samples: bool  # this step reaches the end of the request's tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One step. `batch` shares the requests' block tables: it is good until the first `commit`."""

    items: tuple[ScheduledRequest, ...]  # in the batch's order
    preempted: tuple[Request, ...]  # back in the waiting queue, latest arrival first
    batch: ScheduledBatch  # logits_indices: for each sampling item its last 1 + len(draft) rows


@dataclass(slots=True)
class _Step:
    """A schedule in the making."""

    budget: int  # tokens that may still be added
    items: list[ScheduledRequest] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)


class Scheduler:
    """First come, first served, with one order of arrival throughout: every running request arrived before every
    waiting one, and a request takes blocks only from those that arrived after it.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self._config = config
        self._pool = pool
        self._requests: dict[str, Request] = {}  # by arrival: the running ones, then the waiting ones
        self._running: list[Request] = []
        self._waiting: deque[Request] = deque()

    @property
    def kv_usage(self) -> float:
        """Return the used share of the KV blocks, 0 to 1."""
        return self._pool.usage

    @property
    def running(self) -> Sequence[Request]:
        """The requests that hold KV (held ones too), in order of arrival."""
        return tuple(self._running)

    @property
    def waiting(self) -> Sequence[Request]:
        """The requests that hold no KV, in order of arrival."""
        return tuple(self._waiting)

    def has_work(self) -> bool:
        return bool(self._requests)

    def next_deadline_s(self) -> float | None:
        """Return the earliest `hold_until_s` of the running requests, or None when none is held."""
        return min((r.hold_until_s for r in self._running if r.hold_until_s is not None), default=None)

    def add(self, request: Request) -> None:
        """Queue a request; raises `ValueError` when it could not run even with the whole pool to itself."""
        if request.request_id in self._requests:
            raise ValueError(f"request {request.request_id!r} is already here")
        if not 0 < request.num_tokens < self._config.max_model_len:
            raise ValueError(
                f"prompt of {request.num_tokens} tokens; it must have at least 1 and leave room for one more "
                f"within the model's maximum of {self._config.max_model_len}"
            )
        # The last token is never computed: nothing follows it.
        num_blocks = self._pool.num_blocks_for(self._max_total_tokens(request) - 1)
        if num_blocks > self._pool.num_blocks:
            raise ValueError(
                f"prompt and max_tokens need {num_blocks} KV blocks of {self._pool.block_size} tokens, "
                f"the whole pool has {self._pool.num_blocks}"
            )
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def remove(self, request_id: str) -> Request | None:
        """Forget a request wherever it is and free its KV at once; None when it is not here."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        if request.block_table:
            self._running.remove(request)
            self._free(request)
        else:
            self._waiting.remove(request)
        return request

    def schedule(self, now_s: float) -> Schedule | None:
        """Choose the next step and reserve its KV; None when nothing can run now.

        Every scheduled request must then be committed (or removed) before the next call.
        """
        step = _Step(budget=self._config.max_num_batched_tokens)
        self._schedule_running(step, now_s)
        if not step.preempted:  # blocks were just taken away for want of room: there is none for newcomers
            self._admit_waiting(step)
        if not step.items:
            assert not step.preempted, "preemption must make room for the request it was done for"
            return None
        batch = build_batch(step.items, block_size=self._pool.block_size, vocab_size=self._config.vocab_size)
        return Schedule(items=tuple(step.items), preempted=tuple(step.preempted), batch=batch)

    def commit(self, item: ScheduledRequest, committed: Sequence[int]) -> None:
        """Take over a step's result: `committed` tokens after a sampling item, none after a prefill chunk.

        before   |<- num_computed ->|<- to the end ->|<---------- draft ---------->|
        verified |                  |                |<- accepted ->|<- rejected ->|
        after    |<------------- num_computed --------------------->| recovered | bonus: in token_ids, no KV yet
                                                                    |<- blocks beyond are released

        A request that was removed while its step ran is left alone.
        """
        request = item.request
        if self._requests.get(request.request_id) is not request:
            return
        first_unpublished = request.num_computed_tokens // self._pool.block_size
        if item.samples:
            max_committed = 1 + (len(item.draft.token_ids) if item.draft else 0)
            assert 1 <= len(committed) <= max_committed, f"{len(committed)} tokens committed, at most {max_committed}"
            request.token_ids.extend(committed)
            request.num_computed_tokens = request.num_tokens - 1
            request.draft = None
            request.hold_until_s = None
        else:
            assert not committed, "a prefill chunk samples nothing"
            request.num_computed_tokens += item.num_new_tokens
        self._roll_back(request)
        self._publish(request, first_unpublished)

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless queues, block tables and pool agree."""
        in_order = [*self._running, *self._waiting]
        assert in_order == list(self._requests.values()), "the queues are not in order of arrival"
        assert len(self._running) <= self._config.max_num_seqs, "too many requests are running"
        for request in self._waiting:
            assert not request.block_table, f"{request.request_id} waits and holds KV"
            assert request.num_computed_tokens == 0, f"{request.request_id} waits with computed tokens"
        for request in self._running:
            num_blocks = self._pool.num_blocks_for(request.num_computed_tokens)
            assert len(request.block_table) >= max(1, num_blocks), f"{request.request_id} has KV outside its blocks"
            assert request.num_computed_tokens < request.num_tokens, f"{request.request_id} has nothing to compute"
        self._pool.check_integrity([request.block_table for request in self._running])

    def _schedule_running(self, step: _Step, now_s: float) -> None:
        index = 0  # the list may lose its tail to preemption on the way
        while index < len(self._running) and step.budget:
            request = self._running[index]
            index += 1
            if request.hold_until_s is None or request.hold_until_s <= now_s:
                self._schedule_request(request, step)

    def _admit_waiting(self, step: _Step) -> None:
        while self._waiting and step.budget and len(self._running) < self._config.max_num_seqs:
            if not self._take_prefix(self._waiting[0]):
                break
            request = self._waiting.popleft()
            self._running.append(request)
            self._schedule_request(request, step)

    def _take_prefix(self, request: Request) -> bool:
        """Give a waiting request the cached blocks of its prefix, if all that it has to compute now fits besides.

        |<- cached: whole blocks ->|<- to compute, in chunks: at least the last token, whose logits are needed ->|
        """
        # The whole of it must fit, though only a chunk is allocated now: half a prefill, preempted, was for nothing.
        hashes = self._prefix_hashes(request)
        num_missing = self._pool.num_blocks_for(request.num_tokens) - self._pool.num_free_blocks
        if num_missing > 0 and not (num_missing <= len(hashes) and self._pool.is_cached(hashes[num_missing - 1])):
            return False  # the usual answer while the pool is full, without walking the prefix at every step
        cached = self._pool.match_prefix(hashes)
        if self._pool.num_blocks_for(request.num_tokens) - len(cached) > self._pool.num_free_blocks:
            self._pool.release(cached)  # blocks that nobody else uses were free before the match: no gain
            return False
        request.block_table = cached
        request.num_computed_tokens = len(cached) * self._pool.block_size
        if request.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed_tokens
        return True

    def _prefix_hashes(self, request: Request) -> Sequence[bytes]:
        if not self._config.enable_prefix_caching:
            return ()
        num_blocks = (request.num_tokens - 1) // self._pool.block_size
        extend_hashes(request.block_hashes, request.token_ids, self._pool.block_size, num_blocks)
        return request.block_hashes[:num_blocks]

    def _schedule_request(self, request: Request, step: _Step) -> None:
        """Add one running request to the step, as far as budget and blocks reach; its draft yields to both.

        Later arrivals are preempted for the request's own tokens only: a recompute costs more than a draft gains.
        """
        num_left = request.num_tokens - request.num_computed_tokens
        num_wanted = min(num_left, step.budget)
        while self._room(request) < num_wanted and self._running[-1] is not request:
            self._preempt(self._running.pop(), step)
        num_new = min(num_wanted, self._room(request))
        if num_new == 0:
            return
        samples = num_new == num_left
        draft = self._cut_draft(request, min(step.budget, self._room(request)) - num_new) if samples else None
        num_new += len(draft.token_ids) if draft else 0
        self._grow(request, request.num_computed_tokens + num_new)
        step.budget -= num_new
        step.items.append(ScheduledRequest(request=request, num_new_tokens=num_new, draft=draft, samples=samples))

    def _cut_draft(self, request: Request, num_fitting: int) -> Draft | None:
        """Return the part of a request's draft that this step verifies, counting what was cut.

        Where to cut depends on counts alone, never on the tokens drawn at or after the cut: otherwise a sampled draft
        would bias the committed tokens (design.md, the fifth idea). So an id that cannot be right stays in, to be
        verified with target probability 0.
        """
        draft = request.draft
        if draft is None or not draft.token_ids:
            return None
        assert draft.position == request.num_tokens, f"draft for {draft.position} at {request.num_tokens} tokens"
        num_tokens = len(draft.token_ids)
        # A recovered or bonus token always follows the accepted ones, and must still be within the limits.
        num_kept = max(0, min(num_tokens, num_fitting, self._max_total_tokens(request) - request.num_tokens - 1))
        request.metrics.num_cut_tokens += num_tokens - num_kept
        if num_kept == num_tokens:
            return draft
        probs = draft.draft_probs
        kept_probs = None if probs is None else probs[:num_kept]
        return replace(draft, token_ids=draft.token_ids[:num_kept], draft_probs=kept_probs) if num_kept else None

    def _preempt(self, request: Request, step: _Step) -> None:
        """Take a request's KV away; it will be recomputed, output included, when its turn comes again."""
        self._free(request)
        request.num_preemptions += 1
        if request.draft is not None:
            request.metrics.num_cut_tokens += len(request.draft.token_ids)
        request.draft = None
        request.hold_until_s = None
        self._waiting.appendleft(request)
        step.preempted.append(request)

    def _max_total_tokens(self, request: Request) -> int:
        return min(self._config.max_model_len, request.num_prompt_tokens + request.sampling.max_tokens)

    def _room(self, request: Request) -> int:
        """Return how many more tokens the request's own and all free blocks could hold."""
        num_blocks = len(request.block_table) + self._pool.num_free_blocks
        return num_blocks * self._pool.block_size - request.num_computed_tokens

    def _grow(self, request: Request, num_tokens: int) -> None:
        num_missing = self._pool.num_blocks_for(num_tokens) - len(request.block_table)
        if num_missing > 0:
            request.block_table.extend(self._pool.allocate(num_missing))

    def _roll_back(self, request: Request) -> None:
        num_kept = self._pool.num_blocks_for(request.num_computed_tokens)
        if num_kept < len(request.block_table):
            self._pool.release(request.block_table[num_kept:])
            del request.block_table[num_kept:]

    def _publish(self, request: Request, first: int) -> None:
        """Publish the blocks that became full of committed tokens since block `first`; rejected KV never is."""
        num_full = request.num_computed_tokens // self._pool.block_size
        if num_full == first or not self._config.enable_prefix_caching:
            return
        extend_hashes(request.block_hashes, request.token_ids, self._pool.block_size, num_full)
        for index in range(first, num_full):
            self._pool.publish(request.block_table[index], request.block_hashes[index])

    def _free(self, request: Request) -> None:
        self._pool.release(request.block_table)
        request.block_table = []  # a new list: the old one may belong to a batch that is still running
        request.num_computed_tokens = 0


def build_batch(items: Sequence[ScheduledRequest], *, block_size: int, vocab_size: int) -> ScheduledBatch:
    """Pack the items' tokens for one forward pass; every block table must already cover its tokens."""
    batch = ScheduledBatch(
        token_ids=[],
        positions=[],
        slot_mapping=[],
        query_lengths=[item.num_new_tokens for item in items],
        context_lengths=[item.request.num_computed_tokens + item.num_new_tokens for item in items],
        block_tables=[item.request.block_table for item in items],
        logits_indices=[],
    )
    for item, stop in zip(items, batch.context_lengths, strict=True):
        start = item.request.num_computed_tokens
        batch.token_ids.extend(item.request.token_ids[start:stop])
        num_rows = 1
        if item.draft is not None:
            num_rows += len(item.draft.token_ids)
            # A drafter's padded vocabulary may be larger than the target's. Such an id is verified with target
            # probability 0, so it is never accepted, but it still needs *some* embedding to occupy its position.
            batch.token_ids.extend([min(token_id, vocab_size - 1) for token_id in item.draft.token_ids])
        if item.samples:
            batch.logits_indices.extend(range(batch.num_tokens - num_rows, batch.num_tokens))
        batch.positions.extend(range(start, stop))
        _append_slots(batch.slot_mapping, item.request.block_table, start, stop, block_size)
    return batch


def _append_slots(slots: list[int], block_table: list[int], start: int, stop: int, block_size: int) -> None:
    """Append the slots of positions [start, stop), one range per block."""
    while start < stop:
        index, offset = divmod(start, block_size)
        first = block_table[index] * block_size + offset
        count = min(block_size - offset, stop - start)
        slots.extend(range(first, first + count))
        start += count
