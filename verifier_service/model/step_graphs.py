"""Captured steps: a model's forward, recorded as a CUDA graph per bucket of (tokens, requests), and replayed.

At batch size 1, a GPU runs a layer faster than a CPU launches it. A replayed graph launches everything at once, but
fixes shapes and addresses. So steps are padded to a bucket, and all inputs are copied to static buffers:

    step's integers -> parts -> pinned memory, in one copy -> `StepBuffers` -> graph -> the head's input, states
                                                                               wanted rows -> logits

The head runs outside of the graph, over the wanted rows only: of a prompt chunk these are few, and a row of logits is
as wide as the vocabulary.

A bucket is padded with one sequence, whose tokens lie in a KV block without owner (the null block), and with empty
sequences. Nothing in a graph depends on data; moves and copies of KV run before it. A `Capture` turns a function into
its replay: `CudaCapture` on a device; tests have a fake that fails where a real capture would.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from outrider.verifier_service.gpu.transfers import Layout, carved, num_bytes
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.messages.counts import GraphCounts
from outrider.verifier_service.model.attention import AttentionHandler, KVPool
from outrider.verifier_service.model.paged_metadata import WORD_BITS, PagedMetadata, fill_placeholders, metadata_parts

logger = logging.getLogger(__name__)

TOKEN_BUCKETS = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256),
    *(320, 384, 448, 512, 640, 768, 896, 1024, 1280),  # 256 requests with drafts of four tokens
)
REQUEST_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MANY_TOKENS = 256  # beyond, fewer request buckets: empty sequences cost relatively little in a large step …
MANY_TOKENS_REQUESTS = (64, 256)  # … these
MAX_TOKENS_EACH = 16  # mean tokens per request of a bucket; more tokens take a bucket of more, partly empty requests
NUM_MODEL_PARTS = 3  # token ids, positions, rows; the other parts are for attention
ROWS_PART = 2  # index of the rows
NUM_STAGED = 8  # steps that may be launched before the first of them runs: more than the levels of most drafts

Outputs = tuple[torch.Tensor, torch.Tensor | None]  # logits and states, as the model returns them


class CapturedModel(Protocol):
    """A model whose steps can be captured: our decoder, the library's, or a head with its states in static buffers."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def not_captured(self) -> str | None:
        """Why steps run eagerly; None: they are captured."""

    def hidden(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attend: AttentionHandler, *, taps: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the head's input [num_tokens, hidden_size] and, with taps, states [num_tokens, taps * hidden_size]."""

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [num_rows, vocab_size] of rows of `hidden`."""


Capture = Callable[[Callable[[], None]], Callable[[], None]]  # from a function over static buffers to its replay


@dataclass(frozen=True, slots=True)
class GraphBackend:
    """A device's way to capture steps, and its attention over metadata in static buffers."""

    capture: Capture
    attention: Callable[[PagedMetadata, KVPool], AttentionHandler]


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """The shape of a captured step."""

    num_tokens: int
    num_requests: int
    has_trees: bool = False


def all_buckets(*, has_trees: bool) -> list[Bucket]:
    """Return all buckets, largest first, so that the others reuse its memory."""
    return sorted(
        (
            Bucket(num_tokens, num_requests, has_trees)
            for num_requests in REQUEST_BUCKETS
            for num_tokens in TOKEN_BUCKETS
            if num_requests <= num_tokens <= MAX_TOKENS_EACH * num_requests
            if num_requests in _request_buckets(num_tokens)
        ),
        reverse=True,
    )


def bucket_of(batch: ScheduledBatch, table_width: int) -> Bucket | str:
    """Return the smallest bucket that holds a batch, or the reason why there is none."""
    if batch.num_layers is not None:
        return "early_exit"
    if batch.num_tokens > TOKEN_BUCKETS[-1]:
        return "many_tokens"
    if len(batch.query_lengths) > REQUEST_BUCKETS[-1]:
        return "many_requests"
    if max(map(len, batch.tree_parents), default=0) > WORD_BITS:
        return "large_tree"
    if max(map(len, batch.block_tables)) > table_width:
        return "long_context"
    num_tokens = next(size for size in TOKEN_BUCKETS if size >= batch.num_tokens)
    wanted = max(len(batch.query_lengths), num_tokens / MAX_TOKENS_EACH)
    num_requests = next(size for size in _request_buckets(num_tokens) if size >= wanted)
    return Bucket(max(num_tokens, num_requests), num_requests, any(batch.tree_parents))


def _request_buckets(num_tokens: int) -> Sequence[int]:
    return REQUEST_BUCKETS if num_tokens <= MANY_TOKENS else MANY_TOKENS_REQUESTS


def padded(batch: ScheduledBatch, bucket: Bucket, null_block: int, block_size: int) -> ScheduledBatch:
    """Pad a batch to a bucket: one sequence in the null block has the missing tokens, further ones are empty."""
    num_missing = bucket.num_tokens - batch.num_tokens
    num_empty = bucket.num_requests - len(batch.query_lengths)
    tables = [[null_block] * -(-num_missing // block_size), *[[] for _ in range(num_empty)]]
    return replace(
        batch,
        token_ids=batch.token_ids + [0] * num_missing,
        positions=batch.positions + [0] * num_missing,
        slot_mapping=batch.slot_mapping + [null_block * block_size + i % block_size for i in range(num_missing)],
        query_lengths=[*batch.query_lengths, num_missing, *[0] * num_empty],
        context_lengths=[*batch.context_lengths, num_missing, *[0] * num_empty],
        block_tables=batch.block_tables + tables,
        logits_indices=batch.logits_indices + [0] * (bucket.num_tokens - len(batch.logits_indices)),
        tree_parents=batch.tree_parents + [[] for _ in tables] if bucket.has_trees else [],
        tree_ends=batch.tree_ends + [[] for _ in tables] if batch.tree_ends else [],
    )


def step_layout(bucket: Bucket, table_width: int) -> Layout:
    """Return dtypes and shapes of `step_parts` of a batch padded to this bucket, with the widest tables."""
    num_tokens, num_sequences = bucket.num_tokens, bucket.num_requests + 1
    layout: list[tuple[torch.dtype, tuple[int, ...]]] = [
        *[(torch.int64, (num_tokens,))] * (NUM_MODEL_PARTS + 1),
        (torch.int32, (num_sequences + 1,)),
        (torch.int32, (num_sequences,)),
        (torch.int32, (num_sequences, table_width)),
    ]
    if bucket.has_trees:
        layout += [(torch.int32, (num_sequences,)), (torch.int32, (num_tokens,)), (torch.int64, (num_tokens, 1))]
    return layout


def step_parts(batch: ScheduledBatch) -> list[np.ndarray]:
    """Return token ids, positions, rows, and the attention's metadata."""
    numbers = (batch.token_ids, batch.positions, batch.logits_indices)
    return [*(np.array(each, np.int64) for each in numbers), *metadata_parts(batch)]


class Place:
    """One bucket's parts in the buffers, on the device and in each of the host's."""

    def __init__(self, memory: torch.Tensor, staged: Sequence[torch.Tensor], layout: Layout) -> None:
        size = num_bytes(layout)
        self.parts = carved(memory, layout)  # at static addresses
        self.hosted = [[part.numpy() for part in carved(each, layout)] for each in staged]
        self.memory, self.staged = memory[:size], [each[:size] for each in staged]


class Event(Protocol):
    """A `torch.cuda.Event`."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class StepBuffers:
    """Static buffers that all captured steps of a model share, filled by one copy per step from pinned memory.

    Steps use them one at a time, so every bucket's place begins at offset 0. Pinned memory is there NUM_STAGED times:
    the host may launch so many steps ahead of the device, such as the levels of a draft, before it has to wait.
    """

    def __init__(self, size: int, device: torch.device, make_event: Callable[[], Event] | None = None) -> None:
        """`make_event`: what says that a copy has ended; None: CUDA's, on a CUDA device."""
        on_device = device.type == "cuda"
        make_event = torch.cuda.Event if make_event is None and on_device else make_event
        self._memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self._staged = [torch.zeros(size, dtype=torch.uint8, pin_memory=on_device) for _ in range(NUM_STAGED)]
        self._copied = [None if make_event is None else make_event() for _ in range(NUM_STAGED)]
        self._turn = 0

    def place(self, layout: Layout) -> Place:
        """Return a bucket's place."""
        return Place(self._memory, self._staged, layout)

    def fill(self, place: Place, parts: Sequence[np.ndarray]) -> None:
        """Copy a step's parts to the device. If a part (a table) is smaller than its place, old values remain there."""
        turn, self._turn = self._turn, (self._turn + 1) % NUM_STAGED
        copied = self._copied[turn]
        if copied is not None:
            copied.synchronize()  # the last copy from there may still be reading
        for hosted, part in zip(place.hosted[turn], parts, strict=True):
            hosted[tuple(map(slice, part.shape))] = part
        place.memory.copy_(place.staged[turn], non_blocking=True)
        if copied is not None:
            copied.record()


@dataclass(frozen=True, slots=True)
class _Captured:
    place: Place
    replay: Callable[[], None]


class StepGraphs:
    """A model's captured steps over one KV pool, whose block `null_block` is not allocated to any request."""

    def __init__(
        self,
        model: CapturedModel,
        pool: KVPool,
        backend: GraphBackend,
        *,
        null_block: int,
        max_model_len: int,
        taps: Sequence[int],
        is_alone: bool = True,
        counts: GraphCounts | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`is_alone`: there are no other ranks; else a failed capture raises, since the others wait in a collective.

        `counts`: shared counters to add to; None: its own.
        """
        self.counts = GraphCounts() if counts is None else counts
        self._model, self._pool, self._backend, self._null_block = model, pool, backend, null_block
        self._taps, self._is_alone, self._clock = taps, is_alone, clock
        # wide enough for the longest sequence plus a tree, and for the padding: 1 KiB per request for 4,096 tokens
        self._table_width = -(-max(max_model_len + WORD_BITS, TOKEN_BUCKETS[-1]) // pool.block_size)
        largest = Bucket(TOKEN_BUCKETS[-1], REQUEST_BUCKETS[-1], has_trees=True)
        self._buffers = StepBuffers(num_bytes(step_layout(largest, self._table_width)), pool.device)
        # outputs are shared by all graphs, instead of one allocation per graph
        num_tokens, width = TOKEN_BUCKETS[-1], len(taps) * model.hidden_size
        self._hidden = torch.zeros(num_tokens, model.hidden_size, dtype=model.dtype, device=pool.device)
        self._states = torch.zeros(num_tokens, width, dtype=model.dtype, device=pool.device) if taps else None
        self._captured: dict[Bucket, _Captured | None] = {}  # None: the capture failed

    @torch.inference_mode()
    def capture(self, *, has_trees: bool = False) -> None:
        """Capture the steps of all buckets before serving; with `has_trees`, also those with trees."""
        if self._model.not_captured is not None:
            logger.warning("no step is captured: %s", self._model.not_captured)
            return
        for with_trees in (False, True) if has_trees else (False,):
            for bucket in all_buckets(has_trees=with_trees):
                self._capture_at(bucket)
        logger.info("captured %d steps in %.1f s", self.counts.num_graphs, self.counts.capture_s)

    def run(self, batch: ScheduledBatch, chosen: torch.Tensor | None = None) -> Outputs | None:
        """Replay a step: logits [num_rows, vocab_size]; states [num_tokens, width], valid until the next step.

        Returns None, and counts the reason, if the step must run eagerly. `chosen`: the tokens for placeholders. The
        caller moves and copies KV before.
        """
        bucket = self._model.not_captured or bucket_of(batch, self._table_width)
        captured = self._capture_at(bucket) if isinstance(bucket, Bucket) else None
        if captured is None or isinstance(bucket, str):
            reason = bucket if isinstance(bucket, str) else "capture_failed"
            self.counts.eager[reason] = self.counts.eager.get(reason, 0) + 1
            return None
        self._fill(captured.place, bucket, batch)
        if chosen is not None:
            fill_placeholders(captured.place.parts[0], chosen)
        captured.replay()
        self.counts.num_replayed += 1
        states = None if self._states is None else self._states[: batch.num_tokens]
        rows = captured.place.parts[ROWS_PART][: len(batch.logits_indices)]
        return self._model.logits(self._hidden.index_select(0, rows)), states

    def _fill(self, place: Place, bucket: Bucket, batch: ScheduledBatch) -> None:
        self._buffers.fill(place, step_parts(padded(batch, bucket, self._null_block, self._pool.block_size)))

    def _capture_at(self, bucket: Bucket) -> _Captured | None:
        """Return a bucket's captured step, capturing it if needed; None if the capture fails, now or before."""
        if bucket in self._captured:
            return self._captured[bucket]
        begin_s = self._clock()
        place = self._buffers.place(step_layout(bucket, self._table_width))
        self._fill(place, bucket, _one_token(bucket, self._null_block, self._pool.block_size))
        try:
            captured = _Captured(place, self._backend.capture(self._step(bucket, place)))
        except RuntimeError as error:  # CUDA: out of memory, or an operation that cannot be captured
            if not self._is_alone:
                raise
            logger.warning("%s cannot be captured: its steps run eagerly, as with --enforce-eager: %r", bucket, error)
            self._captured[bucket] = None
            return None
        self._captured[bucket] = captured
        self.counts.num_graphs += 1
        self.counts.capture_s += self._clock() - begin_s
        return captured

    def _step(self, bucket: Bucket, place: Place) -> Callable[[], None]:
        token_ids, positions = place.parts[:ROWS_PART]
        metadata = PagedMetadata.over(
            place.parts[NUM_MODEL_PARTS:],
            max_query_length=-(-bucket.num_tokens // bucket.num_requests),
            max_context_length=self._table_width * self._pool.block_size,
            block_size=self._pool.block_size,
            num_idle=1,
        )
        attend = self._backend.attention(metadata, self._pool)

        def step() -> None:
            hidden, states = self._model.hidden(token_ids, positions, attend, taps=self._taps)
            self._hidden[: bucket.num_tokens].copy_(hidden)
            if states is not None and self._states is not None:
                self._states[: bucket.num_tokens].copy_(states)

        return step


def _one_token(bucket: Bucket, null_block: int, block_size: int) -> ScheduledBatch:
    """Return a step over one token in the null block, to capture with."""
    return ScheduledBatch(
        token_ids=[0],
        positions=[0],
        slot_mapping=[null_block * block_size],
        query_lengths=[1],
        context_lengths=[1],
        block_tables=[[null_block]],
        logits_indices=[0],
        tree_parents=[[-1]] if bucket.has_trees else [],
    )


class CudaCapture:
    """Captures functions as CUDA graphs that share one memory pool, since one is replayed at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            step()  # warm-up: compiling kernels and allocating workspaces cannot be captured
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: CUDA calls of other threads, such as NCCL's watchdog, do not invalidate the capture
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            step()
        return graph.replay
