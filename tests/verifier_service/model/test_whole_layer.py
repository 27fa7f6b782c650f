"""A layer in one call against its parts, to the bit: families, dtypes, chains and trees; and which layers have one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from outrider.verifier_service.cpu.kernels import load_kernels
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.model.attention import AttentionContext, KVPool
from outrider.verifier_service.model.cpu_attention import MAX_ROWS, WholeLayer, in_place_or_gathered
from outrider.verifier_service.model.decoder import Decoder
from outrider.verifier_service.model.decoder_spec import FAMILIES
from outrider.verifier_service.model.runner import forward_packed
from tiny.models import TINY_ARCHITECTURES, decoder_of, make_model

CPU = torch.device("cpu")
BLOCK_SIZE = 4
NAMES = sorted(name for name in TINY_ARCHITECTURES if name in FAMILIES)
IN_PARTS = {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "olmo2"}  # experts; norms over all heads at once


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    if load_kernels(torch.float32) is None:
        pytest.skip("needs a C++ compiler (g++ or clang++), there is none")


def batch_of(lengths: list[int], old: list[int], trees: list[list[int]] | None = None) -> ScheduledBatch:
    """Sequences one after the other in the pool, each of `length` new tokens behind `old` ones."""
    widths = [-(-(length + before) // BLOCK_SIZE) for length, before in zip(lengths, old, strict=True)]
    tables = [list(range(sum(widths[:i]), sum(widths[: i + 1]))) for i in range(len(widths))]
    places = [(i, place) for i, length in enumerate(lengths) for place in range(old[i], old[i] + length)]
    return ScheduledBatch(
        token_ids=[(7 * i + 3 * place) % 250 for i, place in places],
        positions=[place for _, place in places],
        slot_mapping=[tables[i][0] * BLOCK_SIZE + place for i, place in places],
        query_lengths=lengths,
        context_lengths=[length + before for length, before in zip(lengths, old, strict=True)],
        block_tables=tables,
        logits_indices=list(range(len(places))),
        tree_parents=trees or [],
    )


BATCHES = {
    "one": batch_of([1], [0]),
    "decoding": batch_of([1, 1, 1], [9, 40, 20]),
    "drafts and a prompt": batch_of([5, 1, 37], [30, 12, 0]),
    "trees": batch_of([6, 1, 9], [11, 20, 30], [[-1, -1, 0, 0, 1], [], [-1, 0, 0, 1, 1, 2]]),
    "many": batch_of([MAX_ROWS + 1], [3]),
}


@torch.inference_mode()
def logits_of(model: Decoder, batch: ScheduledBatch, make: Callable = in_place_or_gathered) -> torch.Tensor:
    pool = KVPool(model.kv_shapes, num_blocks=64, block_size=BLOCK_SIZE, dtype=model.dtype, device=CPU)
    generator = torch.Generator().manual_seed(0)
    for cache in (*pool.keys.values(), *pool.values.values()):
        cache.copy_(torch.randn(cache.shape, generator=generator))
    return forward_packed(model, batch, make(batch, pool))[0]


def in_parts(model: Decoder, batch: ScheduledBatch) -> torch.Tensor:
    for layer in model.layers:
        layer.whole = None
    return logits_of(model, batch)


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", sorted(set(NAMES) - IN_PARTS))
def test_a_layer_in_one_call_makes_the_bits_of_its_parts(name, dtype, batch):
    model = decoder_of(make_model(name), dtype)
    assert torch.equal(logits_of(model, batch), in_parts(model, batch))


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_so_it_does_with_int8_weights(name):
    model = decoder_of(make_model(name), torch.bfloat16, "int8")
    batch = BATCHES["drafts and a prompt"]
    assert torch.equal(logits_of(model, batch), in_parts(model, batch))


@pytest.mark.parametrize("name", NAMES)
def test_layers_have_one_unless_their_parts_are_others(name):
    model = decoder_of(make_model(name), torch.float32)
    assert {isinstance(layer.whole, WholeLayer) for layer in model.layers} == {name not in IN_PARTS}


def test_a_residual_branch_that_is_scaled_is_in_parts():
    model = decoder_of(make_model("granite", residual_multiplier=0.5), torch.float32)
    assert not any(isinstance(layer.whole, WholeLayer) for layer in model.layers)


def test_it_is_asked_for_few_rows_alone():
    model = decoder_of(make_model("llama"), torch.float32)
    asked: list[int] = []
    whole = model.layers[0].whole

    def counting(hidden: torch.Tensor, *rest: object) -> torch.Tensor | None:
        output = whole(hidden, *rest)
        asked.append(len(hidden) if output is not None else -1)
        return output

    model.layers[0].whole = counting
    logits_of(model, BATCHES["drafts and a prompt"])
    logits_of(model, BATCHES["many"])
    logits_of(model, BATCHES["one"], AttentionContext.of)  # other attention than ours
    assert asked == [43, -1, -1]
