"""Captured steps, played on a CPU: buckets, buffers, padding, and equality with eager steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.verifier_service.gpu.transfers import TORCH_TYPES
from outrider.verifier_service.messages.batch import ScheduledBatch, placeholder_token, slots_of
from outrider.verifier_service.messages.draft import FINAL_TAP
from outrider.verifier_service.model import step_graphs
from outrider.verifier_service.model.attention import AttentionContext, KVPool
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.decoder import Decoder
from outrider.verifier_service.model.runner import forward_packed, graph_backend, run_batch
from outrider.verifier_service.model.step_graphs import (
    NUM_STAGED,
    REQUEST_BUCKETS,
    TOKEN_BUCKETS,
    Bucket,
    CudaCapture,
    GraphBackend,
    StepBuffers,
    StepGraphs,
    all_buckets,
    bucket_of,
    padded,
    step_layout,
    step_parts,
)
from tiny.models import VOCAB_SIZE, decoder_of, make_model, without_kernels
from tiny.played_graphs import NotCapturable, PlainPagedAttention, PlayedCapture, played_backend

BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = 4, 96, 96
WIDTH = 64  # blocks of the widest table
CPU = torch.device("cpu")
TREE = [-1, 0, 0, 1, -1, 4]
# drafts 0 and 1, then three blocks of two masks: after none, one and both of the drafts
MASKS, MASK_ENDS = [-1, 0, -1, 2, 0, 4, 1, 6], [1, 2, 4, 4, 6, 6, 8, 8]


@pytest.fixture(autouse=True)
def as_on_an_accelerator() -> Iterator[None]:
    with without_kernels():
        yield


def tiny_decoder(name: str = "llama", num_layers: int = 2, device: torch.device = CPU) -> Decoder:
    return decoder_of(make_model(name, num_hidden_layers=num_layers), device=device)


def make_pool(model: Decoder, seed: int = 3) -> KVPool:
    """A pool full of other requests' leavings; its last block belongs to nobody."""
    pool = KVPool(
        model.kv_shapes, num_blocks=NUM_BLOCKS + 1, block_size=BLOCK_SIZE, dtype=torch.float32, device=model.device
    )
    generator = torch.Generator().manual_seed(seed)
    for cache in (*pool.keys.values(), *pool.values.values()):
        owned = cache[: NUM_BLOCKS * BLOCK_SIZE]
        owned.copy_(torch.randn(owned.shape, generator=generator))
    return pool


def make_graphs(model: Decoder, pool: KVPool, backend: GraphBackend | None = None, taps=()) -> StepGraphs:
    return StepGraphs(
        *(model, pool, backend or played_backend()), null_block=NUM_BLOCKS, max_model_len=MAX_MODEL_LEN, taps=taps
    )


def make_batch(
    spans: list[tuple[int, int]],
    trees: dict[int, list[int]] | None = None,
    seed: int = 0,
    ends: dict[int, list[int]] | None = None,
) -> ScheduledBatch:
    """Sequences of (query length, tokens before) over scattered blocks; every other token's logits are wanted."""
    rng = random.Random(seed)
    free = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    tables = [[free.pop() for _ in range(-(-(length + old) // BLOCK_SIZE))] for length, old in spans]
    num_tokens = sum(length for length, _ in spans)
    return ScheduledBatch(
        token_ids=[rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)],
        positions=[position for length, old in spans for position in range(old, old + length)],
        slot_mapping=[
            slot
            for table, (length, old) in zip(tables, spans, strict=True)
            for slot in slots_of(table, range(old, old + length), BLOCK_SIZE)
        ],
        query_lengths=[length for length, _ in spans],
        context_lengths=[length + old for length, old in spans],
        block_tables=tables,
        logits_indices=list(range(0, num_tokens, 2)),
        tree_parents=[(trees or {}).get(index, []) for index in range(len(spans))] if trees else [],
        tree_ends=[ends.get(index, []) for index in range(len(spans))] if ends else [],
    )


BATCHES = {
    "decode": make_batch([(1, 0)]),
    "decode_three": make_batch([(1, 9), (1, 30), (1, 0)]),
    "verify": make_batch([(5, 12), (5, 3)]),
    "uneven": make_batch([(1, 7), (4, 20), (19, 0), (2, 2)]),
    "tree": make_batch([(7, 11)], {0: TREE}),
    "trees_and_chains": make_batch([(3, 5), (6, 20), (1, 1)], {1: TREE}),
    "masks": make_batch([(3, 5), (9, 20), (7, 3)], {1: MASKS, 2: TREE}, ends={1: MASK_ENDS}),
}


def kv_of(pool: KVPool) -> list[torch.Tensor]:
    """Keys and values of all blocks that somebody may own."""
    return [cache[: NUM_BLOCKS * BLOCK_SIZE].clone() for cache in (*pool.keys.values(), *pool.values.values())]


# --- buckets and padding ---


@given(spans=st.lists(st.integers(1, 40), min_size=1, max_size=80))
def test_every_step_of_few_tokens_has_a_bucket_that_holds_it(spans: list[int]) -> None:
    batch = replace(BATCHES["decode"], token_ids=[0] * sum(spans), query_lengths=spans)
    bucket = bucket_of(batch, WIDTH)
    if sum(spans) > TOKEN_BUCKETS[-1]:
        assert bucket == "many_tokens"
        return
    assert bucket in all_buckets(has_trees=False)
    assert bucket.num_tokens >= sum(spans)
    assert bucket.num_requests >= len(spans)


def test_decoding_and_verifying_one_request_take_the_smallest_buckets() -> None:
    assert bucket_of(make_batch([(1, 3)]), WIDTH) == Bucket(1, 1)
    assert bucket_of(make_batch([(5, 3)]), WIDTH) == Bucket(8, 1)
    assert bucket_of(make_batch([(17, 3)]), WIDTH) == Bucket(24, 2)
    assert bucket_of(make_batch([(1, 3)] * 17), WIDTH) == Bucket(32, 32)
    assert bucket_of(replace(BATCHES["decode"], token_ids=[0] * 320, query_lengths=[5] * 64), WIDTH) == Bucket(320, 64)
    mixed = replace(BATCHES["decode"], token_ids=[0] * 1000, query_lengths=[*[5] * 20, 900])  # a prompt's chunk
    assert bucket_of(mixed, WIDTH) == Bucket(1024, 64)
    assert bucket_of(BATCHES["tree"], WIDTH) == Bucket(8, 1, has_trees=True)


def test_what_has_no_bucket_says_why() -> None:
    batch = BATCHES["decode"]
    assert bucket_of(replace(batch, num_layers=1), WIDTH) == "early_exit"
    assert bucket_of(replace(batch, query_lengths=[1] * (REQUEST_BUCKETS[-1] + 1)), WIDTH) == "many_requests"
    assert bucket_of(replace(batch, token_ids=[0] * (TOKEN_BUCKETS[-1] + 1)), WIDTH) == "many_tokens"
    assert bucket_of(replace(batch, tree_parents=[[-1] * 65]), WIDTH) == "large_tree"
    assert bucket_of(replace(batch, block_tables=[[0] * (WIDTH + 1)]), WIDTH) == "long_context"


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_padding_writes_to_the_null_block_alone(batch: ScheduledBatch) -> None:
    bucket = bucket_of(batch, WIDTH)
    assert isinstance(bucket, Bucket)
    whole = padded(batch, bucket, NUM_BLOCKS, BLOCK_SIZE)
    own = batch.num_tokens
    assert whole.num_tokens == len(whole.positions) == len(whole.logits_indices) == bucket.num_tokens
    assert whole.slot_mapping[:own] == batch.slot_mapping
    assert all(slot // BLOCK_SIZE == NUM_BLOCKS for slot in whole.slot_mapping[own:])
    assert len(whole.query_lengths) == len(whole.context_lengths) == bucket.num_requests + 1
    assert sum(whole.query_lengths) == bucket.num_tokens
    shapes = [tuple(part.shape) for part in step_parts(whole)]
    layout = [shape for _, shape in step_layout(bucket, max(map(len, whole.block_tables)))]
    assert shapes == layout
    assert [TORCH_TYPES[part.dtype.name] for part in step_parts(whole)] == [own for own, _ in step_layout(bucket, 1)]


# --- the played graphs ---


@pytest.mark.parametrize(
    ("name", "taps"), [("llama", ()), ("mistral", ()), ("gemma2", (1, FINAL_TAP)), ("mixtral", (0,))], ids=str
)
def test_replayed_steps_are_the_eager_ones(name: str, taps: tuple[int, ...]) -> None:
    model = tiny_decoder(name)
    eager, replayed = make_pool(model), make_pool(model)
    graphs = make_graphs(model, replayed, taps=taps)
    order = [*BATCHES, "tree", "decode"]
    for name in order:
        expected, expected_states = run_batch(model, eager, BATCHES[name], taps)
        got, states = run_batch(model, replayed, BATCHES[name], taps, graphs)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        if taps:
            torch.testing.assert_close(states, expected_states, atol=1e-4, rtol=1e-4)
        for own, other in zip(kv_of(replayed), kv_of(eager), strict=True):
            torch.testing.assert_close(own, other, atol=1e-4, rtol=1e-4)
    assert graphs.counts.num_replayed == len(order)
    assert graphs.counts.num_graphs == len({bucket_of(batch, WIDTH) for batch in BATCHES.values()})
    assert not graphs.counts.eager


def opened(batch: ScheduledBatch) -> tuple[ScheduledBatch, list[int]]:
    """Leave every third token open, and return the numbers among which they are."""
    numbers = [VOCAB_SIZE + 1 + place for place in range(batch.num_tokens)]  # most are no tokens
    token_ids = list(batch.token_ids)
    for place in range(0, batch.num_tokens, 3):
        numbers[-1 - place] = token_ids[place]
        token_ids[place] = placeholder_token(batch.num_tokens - 1 - place)
    return replace(batch, token_ids=token_ids), numbers


@pytest.mark.parametrize("is_captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("name", BATCHES)
def test_placeholders_are_filled_by_what_was_chosen(name: str, is_captured: bool) -> None:
    model = tiny_decoder()
    pools = make_pool(model), make_pool(model)
    graphs = make_graphs(model, pools[1]) if is_captured else None
    batch, numbers = opened(BATCHES[name])
    closed = make_graphs(model, pools[0]) if is_captured else None
    expected, _ = run_batch(model, pools[0], BATCHES[name], graphs=closed)
    got, _ = run_batch(model, pools[1], batch, graphs=graphs, chosen=torch.tensor(numbers))
    assert torch.equal(got, expected)


def test_what_a_step_leaves_in_the_buffers_does_not_reach_the_next() -> None:
    model = tiny_decoder()
    pool, other = make_pool(model), make_pool(model)
    graphs, fresh = make_graphs(model, pool), make_graphs(model, other)
    for name in ("trees_and_chains", "uneven", "decode_three"):  # long tables and trees lie where short ones come
        run_batch(model, pool, BATCHES[name], (), graphs)
    for index, keys in make_pool(model).keys.items():
        pool.keys[index][: NUM_BLOCKS * BLOCK_SIZE] = keys[: NUM_BLOCKS * BLOCK_SIZE]
    for index, values in make_pool(model).values.items():
        pool.values[index][: NUM_BLOCKS * BLOCK_SIZE] = values[: NUM_BLOCKS * BLOCK_SIZE]
    for name in ("decode_three", "verify", "tree"):
        got, _ = run_batch(model, pool, BATCHES[name], (), graphs)
        expected, _ = run_batch(model, other, BATCHES[name], (), fresh)
        assert torch.equal(got, expected)


def test_steps_without_a_graph_run_eagerly_and_are_counted() -> None:
    model = tiny_decoder()
    pool = make_pool(model)
    graphs = make_graphs(model, pool)
    batch = replace(BATCHES["verify"], num_layers=1)
    expected, _ = run_batch(model, make_pool(model), batch)
    got, _ = run_batch(model, pool, batch, (), graphs)
    assert torch.equal(got, expected)
    assert graphs.counts.eager == {"early_exit": 1}
    assert graphs.counts.num_replayed == graphs.counts.num_graphs == 0


def test_moves_and_copies_come_before_the_replay() -> None:
    model = tiny_decoder()
    eager, replayed = make_pool(model), make_pool(model)
    batch = BATCHES["verify"]
    table = batch.block_tables[0]
    moved = replace(batch, copy_sources=[table[0]], copy_targets=[table[1]], move_sources=[5], move_targets=[9])
    expected, _ = run_batch(model, eager, moved)
    got, _ = run_batch(model, replayed, moved, (), make_graphs(model, replayed))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(got, run_batch(model, make_pool(model), batch)[0], atol=1e-3)


def test_all_chains_are_captured_at_start_and_trees_when_first_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graphs, "TOKEN_BUCKETS", TOKEN_BUCKETS[:8])  # to compute all of them takes long
    model = tiny_decoder(num_layers=1)
    pool = make_pool(model)
    graphs = make_graphs(model, pool)
    before = kv_of(pool)
    graphs.capture()
    assert graphs.counts.num_graphs == len(all_buckets(has_trees=False))
    assert graphs.counts.capture_s > 0
    assert all(torch.equal(*pair) for pair in zip(before, kv_of(pool), strict=True))
    run_batch(model, pool, BATCHES["uneven"], (), graphs)
    assert graphs.counts.num_graphs == len(all_buckets(has_trees=False))
    run_batch(model, pool, BATCHES["tree"], (), graphs)
    assert graphs.counts.num_graphs == len(all_buckets(has_trees=False)) + 1


def test_a_bucket_that_cannot_be_captured_runs_eagerly_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    played, failed = PlayedCapture(), []

    def fail_first(step) -> None:
        if not failed:
            failed.append(step)
            raise torch.OutOfMemoryError("no memory")
        return played(step)

    model = tiny_decoder()
    eager, pool = make_pool(model), make_pool(model)
    graphs = make_graphs(model, pool, GraphBackend(fail_first, PlainPagedAttention))
    for name in ("uneven", "verify", "uneven", "verify"):  # the largest comes first, as at the start
        expected, _ = run_batch(model, eager, BATCHES[name])
        torch.testing.assert_close(run_batch(model, pool, BATCHES[name], (), graphs)[0], expected, atol=1e-4, rtol=1e-4)
    assert graphs.counts.eager == {"capture_failed": 2}
    assert (graphs.counts.num_graphs, graphs.counts.num_replayed) == (1, 2)
    assert len(caplog.records) == 1


def test_a_model_that_no_graph_can_hold_runs_eagerly_by_name() -> None:
    model = tiny_decoder("mixtral")
    assert model.not_captured is None
    model.device = torch.device("cuda")  # where torch's grouped product reads float32 groups' ends on the host
    assert model.not_captured == "float32_experts"
    pool = make_pool(tiny_decoder("mixtral"))
    graphs = make_graphs(model, pool)
    graphs.capture()
    assert graphs.run(BATCHES["verify"]) is None
    assert graphs.counts.eager == {"float32_experts": 1}
    assert graphs.counts.num_graphs == 0


def test_no_step_is_captured_on_a_cpu_nor_where_a_user_says_so() -> None:
    assert graph_backend(ModelConfig(path="x"), CPU) is None
    assert graph_backend(ModelConfig(path="x", enforce_eager=True), torch.device("cuda")) is None


# --- what the played graph would notice ---


VALUES = torch.arange(3)


@pytest.mark.parametrize(
    "step",
    [
        *(VALUES.tolist, lambda: int(VALUES[0]), lambda: VALUES.sum().item(), lambda: bool(VALUES[0] > 0)),
        *(VALUES.nonzero, lambda: VALUES[VALUES > 1], lambda: VALUES.unique()),  # a shape that depends on values
        lambda: torch.tensor([1, 2]),  # host memory
    ],
)
def test_what_waits_for_the_host_is_no_part_of_a_graph(step) -> None:
    with pytest.raises(NotCapturable):
        PlayedCapture()(step)


def test_another_address_or_operator_is_noticed_in_the_replay() -> None:
    held = [torch.ones(3)]
    replay = PlayedCapture()(lambda: held[0].mul_(2))
    replay()
    assert held[0].tolist() == [8.0] * 3  # once before capturing, once then, once now
    kept, held[0] = held[0], torch.ones(3)
    with pytest.raises(NotCapturable, match="mul_"):
        replay()
    held[0] = kept
    replay()
    flags = [True]
    replay = PlayedCapture()(lambda: kept.add_(1) if flags[0] else kept.add_(1).mul_(1))
    flags[0] = False
    with pytest.raises(NotCapturable):
        replay()


def test_attention_by_gathered_blocks_could_not_be_captured() -> None:
    """The eager handler's masks are made of lists in every layer that has another window: a graph may not use it."""
    model = tiny_decoder("mistral")
    pool = make_pool(model)

    def step() -> None:
        forward_packed(model, BATCHES["verify"], AttentionContext.of(BATCHES["verify"], pool))

    with torch.inference_mode(), pytest.raises(NotCapturable, match="lift_fresh"):
        PlayedCapture()(step)


# --- the device ---


@pytest.mark.gpu
@pytest.mark.parametrize("taps", [(), (1, FINAL_TAP)], ids=str)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "mixtral"])
def test_a_gpus_graphs_replay_the_eager_steps(name: str, taps: tuple[int, ...]) -> None:
    device = torch.device("cuda", 0)
    model = tiny_decoder(name, device=device)
    eager, replayed = make_pool(model), make_pool(model)
    graphs = make_graphs(model, replayed, GraphBackend(CudaCapture(device), triton_context()), taps)
    graphs.capture()
    for batch in (*BATCHES.values(), *reversed(BATCHES.values())):
        expected, expected_states = run_batch(model, eager, batch, taps)
        got, states = run_batch(model, replayed, batch, taps, graphs)
        torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)
        if taps:
            torch.testing.assert_close(states, expected_states, atol=1e-3, rtol=1e-3)
        batch, numbers = opened(batch)
        got, _ = run_batch(model, replayed, batch, taps, graphs, torch.tensor(numbers, device=device))
        torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)
    if name == "mixtral":
        assert graphs.counts.eager == {"float32_experts": 4 * len(BATCHES)}
        return
    assert graphs.counts.num_replayed == 4 * len(BATCHES)
    assert not graphs.counts.eager


@pytest.mark.gpu
@pytest.mark.parametrize("is_captured", [False, True], ids=["eager", "captured"])
def test_a_gpus_step_by_placeholders_waits_for_nothing(is_captured: bool) -> None:
    device = torch.device("cuda", 0)
    model = tiny_decoder(device=device)
    pool = make_pool(model)
    graphs = make_graphs(model, pool, GraphBackend(CudaCapture(device), triton_context())) if is_captured else None
    for whole in BATCHES.values():
        batch, numbers = opened(whole)
        chosen = torch.tensor(numbers, device=device)
        expected, _ = run_batch(model, pool, whole, graphs=graphs)  # kernels are compiled, graphs captured
        expected = expected.clone()
        torch.cuda.set_sync_debug_mode("error")
        try:
            got, _ = run_batch(model, pool, batch, graphs=graphs, chosen=chosen)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)


def triton_context() -> type:
    from outrider.verifier_service.model.triton_attention import TritonContext

    return TritonContext


class Said:
    """An event that says what is done with it."""

    def __init__(self, said: list[str], name: str) -> None:
        self._said, self._name = said, name

    def record(self) -> None:
        self._said.append(f"copied from {self._name}")

    def synchronize(self) -> None:
        self._said.append(f"waited for {self._name}")


def test_a_step_waits_only_for_the_copy_that_read_its_own_memory() -> None:
    said: list[str] = []
    names = iter("abcdefgh")
    buffers = StepBuffers(64, torch.device("cpu"), make_event=lambda: Said(said, next(names)))
    place = buffers.place([(torch.int64, (2,))])
    for step in range(NUM_STAGED + 1):
        buffers.fill(place, [np.array([step, step + 1])])
        assert place.parts[0].tolist() == [step, step + 1]
    turns = [*"abcdefgh", "a"]
    assert said == [line for turn in turns for line in (f"waited for {turn}", f"copied from {turn}")]
    assert [int(hosted[0][0]) for hosted in place.hosted] == [8, *range(1, 8)], "each has its own memory"
