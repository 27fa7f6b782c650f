"""Two real ranks answer what one answers, for every architecture that is sharded; the others are refused by name."""

from __future__ import annotations

import dataclasses
from multiprocessing.connection import Connection

import pytest
import torch
from transformers import AutoConfig

from outrider.verifier_service.handover.kv_bytes import EngineKV, follower_calls
from outrider.verifier_service.messages.batch import placeholder_token
from outrider.verifier_service.model.architectures import (
    ARCHITECTURES,
    UnsupportedModelError,
    require_supported,
)
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.empty_model import build_empty_model
from outrider.verifier_service.model.runner import ModelRunner, ParallelRunner, follow
from outrider.verifier_service.model.start_check import make_tiny_model
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup, plan_shards, shrink, vocabulary_range
from tiny.formats.schemes import SCHEMES, write_quantized
from tiny.hub.families import FAMILIES, make_family_checkpoint
from tiny.models import (
    TINY_ARCHITECTURES,
    forked_batches,
    full_logits,
    make_checkpoint,
    make_model,
    random_sequences,
    relative_difference,
    scattered_batches,
)
from tiny.two_ranks import two_ranks

NUM_BLOCKS, BLOCK_SIZE = 64, 4
SHARDED = sorted(name for name, architecture in ARCHITECTURES.items() if architecture.tensor_parallel)
# beside the plain tiny models: one KV head for two ranks, a vocabulary that does not divide, MHA with biases
VARIANTS = {
    "one_kv_head": ("llama", {"num_key_value_heads": 1}),
    "odd_vocabulary": ("llama", {"vocab_size": 257}),
    "odd_tied_vocabulary": ("gemma2", {"vocab_size": 257}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "mixed_moe": ("qwen3_moe", {"mlp_only_layers": [0]}),
}
CASES = {name: (name, {}) for name in SHARDED if name in TINY_ARCHITECTURES} | VARIANTS
SHARDED_FAMILIES = sorted(name for name, family in FAMILIES.items() if family.text_type in SHARDED)


def config_of(folder: str, kv_cache_dtype: str = "auto") -> ModelConfig:
    sizes = {"num_kv_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "tensor_parallel_size": 2, "max_model_len": 160}
    return ModelConfig(path=folder, device="cpu", num_threads=1, kv_cache_dtype=kv_cache_dtype, **sizes)


def run_follower(connection: Connection, store_address: str) -> None:
    """Rank 1: follow one model after another, told in lines by what `config_of` takes; says how many bytes it read."""
    group = TensorParallelGroup.join(1, 2, store_address)
    while said := connection.recv_bytes().decode():
        runner = ModelRunner(config_of(*said.splitlines()), group)
        connection.send_bytes(str(runner.weight_bytes_read).encode())
        follow(connection, runner, follower_calls(runner))


@pytest.fixture(scope="module")
def pair():
    """This process as rank 0, and the pipe to rank 1."""
    with two_ranks(run_follower) as pair:
        yield pair


@pytest.mark.parametrize("case", sorted(CASES))
def test_two_ranks_equal_the_library(pair, tmp_path, case):
    model_type, overrides = CASES[case]
    model = make_checkpoint(tmp_path, model_type, **overrides)
    assert_each_rank_read_its_share(model, assert_ranks_equal(model, pair, tmp_path))


@pytest.mark.parametrize("name", SHARDED_FAMILIES)
def test_two_ranks_equal_a_familys_library(pair, tmp_path, name):
    model = make_family_checkpoint(tmp_path, name)
    bytes_read = assert_ranks_equal(model, pair, tmp_path)
    assert max(bytes_read) < 0.9 * sum(parameter.nbytes for parameter in model.parameters())


def assert_ranks_equal(model, pair, tmp_path) -> tuple[int, int]:
    """Return how many bytes of weights each rank has read."""
    group, connection = pair
    connection.send_bytes(str(tmp_path).encode())
    runner = ModelRunner(config_of(str(tmp_path)), group)
    bytes_read = (runner.weight_bytes_read, int(connection.recv_bytes()))
    parallel = ParallelRunner(runner, [connection])
    sequences = random_sequences((33, 14))
    expected = [full_logits(model, sequence) for sequence in sequences]
    got, wanted = [], []
    for batch, rows in scattered_batches(sequences, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE):
        got.append(parallel.execute(batch))
        wanted += [expected[index][position] for index, position in rows]
    parallel.close()
    assert relative_difference(torch.stack(wanted), torch.cat(got)) < 1e-5
    return bytes_read


@pytest.mark.parametrize(
    ("scheme", "model_type"),
    [
        ("fp8-blocks", "llama"),
        ("fp8-blocks", "qwen3_moe"),
        ("gptq", "llama"),
        ("awq", "llama"),
        ("compressed-int8", "llama"),
    ],
)
def test_two_ranks_equal_the_library_from_a_quantised_checkpoint(pair, tmp_path, scheme, model_type):
    assert_ranks_equal(write_quantized(tmp_path, SCHEMES[scheme], model_type), pair, tmp_path)


def test_block_copies_reach_every_rank(pair, tmp_path):
    group, connection = pair
    model = make_checkpoint(tmp_path)
    connection.send_bytes(str(tmp_path).encode())
    runner = ModelRunner(config_of(str(tmp_path)), group)
    connection.recv_bytes()
    parallel = ParallelRunner(runner, [connection])
    prefix, *ends = random_sequences((10, 7, 7), seed=3)
    sequences = [prefix + end for end in ends]
    got = torch.cat([parallel.execute(batch) for batch in forked_batches(sequences, 10, block_size=BLOCK_SIZE)])
    parallel.close()
    wanted = torch.cat([full_logits(model, sequence)[10:] for sequence in sequences])
    assert relative_difference(wanted, got) < 1e-5


def test_every_rank_is_told_the_tokens_that_stand_open(pair, tmp_path):
    group, connection = pair
    model = make_checkpoint(tmp_path)
    connection.send_bytes(str(tmp_path).encode())
    runner = ModelRunner(config_of(str(tmp_path)), group)
    connection.recv_bytes()
    parallel = ParallelRunner(runner, [connection])
    sequences = random_sequences((21, 14))
    got, wanted = [], []
    expected = [full_logits(model, sequence) for sequence in sequences]
    for batch, rows in scattered_batches(sequences, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE):
        chosen = torch.tensor([0, *batch.token_ids, 0])
        is_open = len(got) % 2  # the second step, the fourth ...
        token_ids = [placeholder_token(1 + place) for place in range(batch.num_tokens)] if is_open else batch.token_ids
        got.append(parallel.execute(dataclasses.replace(batch, token_ids=token_ids), chosen if is_open else None))
        wanted += [expected[index][position] for index, position in rows]
    parallel.close()
    assert len(got) > 1
    assert relative_difference(torch.stack(wanted), torch.cat(got)) < 1e-5


def assert_each_rank_read_its_share(model: torch.nn.Module, bytes_read: tuple[int, int]) -> None:
    """Half of every matrix, and whole only what is small: norms, biases of sums, routers, a shared KV head."""
    total = sum(parameter.nbytes for parameter in model.parameters())
    for one in bytes_read:
        assert total / 2 <= one < 0.56 * total


@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - set(SHARDED)))
def test_the_others_are_refused_by_name(name):
    with pytest.raises(UnsupportedModelError, match=rf"{name}: .*tensor_parallel_size"):
        require_supported(AutoConfig.for_model(name), 2)


class LoneRank(TensorParallelGroup):
    """A rank of a group that does not exist: enough to plan shards."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size, None)


def plan(size: int, rank: int = 0, model_type: str = "llama", **overrides):
    description = make_model(model_type, **overrides).config
    model = build_empty_model(description, dtype=torch.float32, device=torch.device("cpu"))
    shards = plan_shards(model, LoneRank(rank, size))
    shrink(model, shards)
    return model, shards


def test_shards_tile_every_matrix():
    _, first = plan(2, 0)
    _, second = plan(2, 1)
    for name, shard in first.items():
        assert (shard.dim, shard.start, shard.stop) == (second[name].dim, 0, second[name].start), name


def test_neighbouring_ranks_share_a_kv_head():
    starts = [plan(4, rank)[1]["model.layers.0.self_attn.k_proj.weight"].start for rank in range(4)]
    assert starts == [0, 0, 16, 16]


def test_fused_experts_shrink_along_their_intermediate_dimension():
    model, _ = plan(2, model_type="qwen3_moe")
    experts = model.model.layers[0].mlp.experts
    assert tuple(experts.gate_up_proj.shape) == (4, 32, 64)
    assert tuple(experts.down_proj.shape) == (4, 64, 16)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3}, "num_attention_heads"),
        ({"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}, "num_key_value_heads"),
        ({"intermediate_size": 97}, "gate_proj"),
    ],
)
def test_what_does_not_divide_is_refused(overrides, reason):
    with pytest.raises(UnsupportedModelError, match=f"llama: .*{reason}"):
        plan(2, **overrides)


def test_vocabulary_ranges_cover_the_vocabulary():
    ranges = [vocabulary_range(257, LoneRank(rank, 4)) for rank in range(4)]
    assert ranges == [(0, 65), (65, 130), (130, 195), (195, 257)]


def test_the_tiny_instance_keeps_the_architecture_and_every_layer_type():
    description = make_model("gemma3_text", num_hidden_layers=7, layer_types=None).config
    tiny = make_tiny_model(description, 2).config
    assert tiny.model_type == "gemma3_text"
    assert set(tiny.layer_types) == set(description.layer_types) == {"sliding_attention", "full_attention"}
    assert tiny.hidden_size <= 64


def test_single_rank_collectives_return_their_input():
    group = TensorParallelGroup.single()
    tensor = torch.ones(2, 3)
    assert group.all_reduce(tensor) is tensor
    assert group.all_gather(tensor, dim=1) is tensor
    assert group.all_reduce_min(5) == 5


def test_join_refuses_what_cannot_be():
    with pytest.raises(ValueError, match="backend"):
        TensorParallelGroup.join(0, 2, "127.0.0.1:1", backend="mpi")
    with pytest.raises(ValueError, match="rank"):
        TensorParallelGroup.join(2, 2, "127.0.0.1:1")


@pytest.mark.parametrize("stored", ["auto", "fp8"])
def test_kv_of_two_ranks_is_that_of_one(pair, tmp_path, stored):
    """What two ranks computed, with a KV head each or sharing one, is read as one rank's, and written by either."""
    group, connection = pair
    for model_type in ("llama", "qwen3"):
        folder = tmp_path / model_type
        make_checkpoint(folder, model_type)
        connection.send_bytes(f"{folder}\n{stored}".encode())
        config = config_of(str(folder), stored)
        shared = ModelRunner(config, group)
        connection.recv_bytes()
        alone = ModelRunner(dataclasses.replace(config, tensor_parallel_size=1), TensorParallelGroup.single())
        parallel, both, one = ParallelRunner(shared, [connection]), EngineKV(shared, [connection]), EngineKV(alone)
        (tokens,) = random_sequences((30,))
        table = list(range(8))
        batch, _ = next(scattered_batches([tokens], num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE))
        parallel.execute(batch)
        alone.execute(batch)
        length = batch.context_lengths[0]
        table = batch.block_tables[0]
        of_both, of_one = both.read(table, 0, length), one.read(table, 0, length)
        assert both.fingerprint == one.fingerprint
        assert of_both.shape == of_one.shape
        numbers = [read.view(alone.kv_dtype).float() for read in (of_one, of_both)]
        # of FP8 a few may lie a step apart
        assert relative_difference(*numbers) < (1e-5 if stored == "auto" else 1e-2)
        both.write(table, 0, length, of_one)
        assert torch.equal(both.read(table, 0, length), of_one)
        one.write(table, 0, length, of_both)
        assert torch.equal(one.read(table, 0, length), of_both)
        parallel.close()
