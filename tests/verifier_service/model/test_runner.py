"""The runner's logits are the library's, for every architecture on the list, and its tests can tell when not."""

from __future__ import annotations

import copy
import dataclasses
import json
import multiprocessing
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig, PreTrainedModel

from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.model.architectures import ARCHITECTURES, UnsupportedModelError
from outrider.verifier_service.model.attention import AttentionContext, AttentionOptions
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.library_model import round_linears
from outrider.verifier_service.model.packed_linear import Fp8Linear, PackedLinear, PanelLinear
from outrider.verifier_service.model.runner import ModelRunner, ParallelRunner, follow, forward_packed
from outrider.verifier_service.model.settled import resolve_dtype
from outrider.verifier_service.model.start_check import (
    engine_logits,
    library_logits,
    require_equal_logits,
    sample_sequences,
)
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup
from tiny.hub.families import FAMILIES
from tiny.models import (
    TINY_ARCHITECTURES,
    forked_batches,
    full_logits,
    make_checkpoint,
    random_sequences,
    relative_difference,
    scattered_batches,
)

NUM_BLOCKS, BLOCK_SIZE = 64, 4
LENGTHS = (41, 9, 26)
EXACT, WRONG = 1e-5, 2e-2  # relative difference of logits: numerical noise, a mistake

Execute = Callable[[ModelRunner, ScheduledBatch], torch.Tensor]


@pytest.fixture(scope="module", params=sorted(TINY_ARCHITECTURES))
def served(request, tmp_path_factory) -> tuple[ModelRunner, PreTrainedModel]:
    folder = tmp_path_factory.mktemp(request.param)
    model = make_checkpoint(folder, request.param)
    return make_runner(folder), model


def make_runner(folder: Path, **fields) -> ModelRunner:
    fields = {"num_kv_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "device": "cpu", **fields}
    return ModelRunner(ModelConfig(path=str(folder), **fields), TensorParallelGroup.single())


def difference(
    runner: ModelRunner,
    model: PreTrainedModel,
    execute: Execute = ModelRunner.execute,
    lengths: tuple[int, ...] = LENGTHS,
) -> float:
    """Relative difference between runner and library over a mixed schedule of sequences."""
    sequences = random_sequences(lengths)
    expected = [full_logits(model, sequence) for sequence in sequences]
    got, wanted = [], []
    for batch, rows in scattered_batches(sequences, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE):
        got.append(execute(runner, batch))
        wanted += [expected[index][position] for index, position in rows]
    return relative_difference(torch.stack(wanted), torch.cat(got))


def test_logits_equal_the_library(served):
    assert difference(*served) < EXACT


def forked_difference(runner: ModelRunner, model: PreTrainedModel, execute: Execute = ModelRunner.execute) -> float:
    """Relative difference between runner and library over three continuations of one prefix, its KV copied."""
    prefix, *ends = random_sequences((10, 9, 9, 9), seed=3)
    sequences = [prefix + end for end in ends]
    got = torch.cat([execute(runner, batch) for batch in forked_batches(sequences, 10, block_size=BLOCK_SIZE)])
    wanted = torch.cat([full_logits(model, sequence)[10:] for sequence in sequences])
    return relative_difference(wanted, got)


def without_copies(runner: ModelRunner, batch: ScheduledBatch) -> torch.Tensor:
    return runner.execute(dataclasses.replace(batch, copy_sources=[], copy_targets=[]))


def test_copied_blocks_are_as_good_as_computed_ones(served):
    runner, model = served
    for cache in (*runner.pool.keys.values(), *runner.pool.values.values()):
        cache.zero_()  # or what another test left could do for the copy
    assert forked_difference(runner, model, without_copies) > WRONG
    assert forked_difference(runner, model) < EXACT


def test_a_copied_prefix_gives_identical_logits(tmp_path):
    make_checkpoint(tmp_path)
    runner = make_runner(tmp_path)
    sequence = random_sequences((19,))[0]
    _, rows = (runner.execute(batch) for batch in forked_batches([sequence] * 2, 10, block_size=BLOCK_SIZE))
    assert torch.equal(rows[:9], rows[9:])


def test_every_architecture_on_the_list_has_a_tiny_model():
    assert set(TINY_ARCHITECTURES) | {family.text_type for family in FAMILIES.values()} == set(ARCHITECTURES)


def without_history(runner: ModelRunner, batch: ScheduledBatch) -> torch.Tensor:
    """Read an unwritten block in place of those that hold only earlier steps' tokens."""
    tables = []
    for table, context, length in zip(batch.block_tables, batch.context_lengths, batch.query_lengths, strict=True):
        num_old = (context - length) // BLOCK_SIZE
        tables.append([0] * num_old + table[num_old:])
    return runner.execute(dataclasses.replace(batch, block_tables=tables))


def with_shifted_positions(runner: ModelRunner, batch: ScheduledBatch) -> torch.Tensor:
    """Shift positions from 8 on: a shift of all of them is no mistake under rotary embeddings."""
    return runner.execute(dataclasses.replace(batch, positions=[p + 3 if p >= 8 else p for p in batch.positions]))


class WindowIgnored:
    def __init__(self, context: AttentionContext) -> None:
        self._context = context

    def attend(self, layer_index: int, query, key, value, options: AttentionOptions) -> torch.Tensor:
        options = dataclasses.replace(options, sliding_window=None)
        return self._context.attend(layer_index, query, key, value, options)


def without_window(runner: ModelRunner, batch: ScheduledBatch) -> torch.Tensor:
    with torch.inference_mode():
        return forward_packed(runner.model, batch, WindowIgnored(AttentionContext.of(batch, runner.pool)))[0]


@pytest.mark.parametrize("mistake", [without_history, with_shifted_positions])
def test_mistakes_show(served, mistake):
    assert difference(*served, execute=mistake) > WRONG


def test_an_ignored_window_shows(served):
    runner, model = served
    has_window = "sliding_window" in TINY_ARCHITECTURES[model.config.model_type]
    ignored = difference(runner, model, execute=without_window)
    assert ignored > WRONG if has_window else ignored < EXACT


def test_a_step_without_rows_returns_no_logits(tmp_path):
    make_checkpoint(tmp_path, hidden_size=512, intermediate_size=512)  # large enough to be packed
    runner = make_runner(tmp_path)
    assert any(isinstance(module, PackedLinear | PanelLinear) for module in runner.model.modules())
    batch, _ = next(scattered_batches([[5, 6, 7]], num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE))
    assert runner.execute(dataclasses.replace(batch, logits_indices=[])).shape == (0, runner.vocab_size)


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3"])
def test_int8_is_checked_against_the_library_with_the_rounded_weights(tmp_path, name):
    plain = make_checkpoint(tmp_path, name)
    runner = make_runner(tmp_path, quantization="int8")  # refused at start if they differed
    rounded = copy.deepcopy(plain)
    round_linears(rounded)
    assert difference(runner, rounded) < EXACT
    assert difference(runner, plain) > EXACT * 100


def test_fp8_is_checked_against_the_library_with_the_rounded_weights(tmp_path):
    plain = make_checkpoint(tmp_path, dtype=torch.bfloat16)
    runner = make_runner(tmp_path, dtype="bfloat16", quantization="fp8")  # refused at start if they differed
    rounded = copy.deepcopy(plain)
    round_linears(rounded, "fp8")
    assert sum(isinstance(module, Fp8Linear) for module in runner.model.modules()) == 8  # all but the head
    assert difference(runner, rounded) < difference(runner, plain) < 0.3  # rows are rounded as well
    with pytest.raises(ValueError, match="quantization: fp8 is served in bfloat16"):
        make_runner(tmp_path, dtype="float32", quantization="fp8")


def test_int8_is_refused_where_it_is_not_served(tmp_path):
    make_checkpoint(tmp_path / "experts", "mixtral")
    with pytest.raises(UnsupportedModelError, match=r"^mixtral: quantization is not served for mixtures of experts"):
        make_runner(tmp_path / "experts", quantization="int8")
    make_checkpoint(tmp_path / "library", "gpt2")
    with pytest.raises(UnsupportedModelError, match=r"^gpt2: quantization .* library's code"):
        make_runner(tmp_path / "library", quantization="int8")
    with pytest.raises(ValueError, match=r"^quantization must be int8, fp8 or None"):
        make_runner(tmp_path / "library", quantization="int4")


def test_half_precision_stays_close(tmp_path):
    model = make_checkpoint(tmp_path, "qwen2", dtype=torch.bfloat16)
    runner = make_runner(tmp_path, dtype="bfloat16")
    assert runner.dtype == torch.bfloat16
    assert difference(runner, model) < 0.05


@pytest.mark.parametrize("own", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_bfloat16", [False, True])
def test_auto_is_the_checkpoints_own_where_the_processor_is_fast_in_it(monkeypatch, own, has_bfloat16):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_bfloat16})
    description = PreTrainedConfig(dtype=own)
    on_cpu = torch.bfloat16 if has_bfloat16 and own != torch.float32 else torch.float32
    assert resolve_dtype("auto", description, torch.device("cpu")) == on_cpu
    assert resolve_dtype("auto", description, torch.device("cuda")) == own
    assert resolve_dtype("float16", description, torch.device("cpu")) == torch.float16


def test_limits_come_from_the_checkpoint(tmp_path):
    make_checkpoint(tmp_path)
    runner = make_runner(tmp_path, max_model_len=100, num_kv_blocks=None, kv_cache_memory_bytes=100_000)
    assert (runner.max_model_len, runner.vocab_size, runner.eos_token_ids) == (100, 256, (2,))
    block_bytes = BLOCK_SIZE * 2 * 2 * 2 * 16 * 4  # tokens, layers, keys and values, heads, head_dim, float32
    assert runner.num_blocks == 100_000 // block_bytes
    with pytest.raises(ValueError, match="max_model_len"):
        make_runner(tmp_path, max_model_len=257)
    with pytest.raises(ValueError, match="kv_cache_memory_bytes"):
        make_runner(tmp_path, num_kv_blocks=None, kv_cache_memory_bytes=10)


def test_every_file_names_end_tokens(tmp_path):
    make_checkpoint(tmp_path, eos_token_id=11)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert make_runner(tmp_path).eos_token_ids == (7, 9, 11)


def test_a_model_with_yarn_serves_beyond_what_was_before_it(tmp_path):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10_000.0}
    model = make_checkpoint(tmp_path, max_position_embeddings=64, rope_parameters=yarn)
    runner = make_runner(tmp_path, max_model_len=256)  # whose logits were compared with the library's
    assert runner.max_model_len == 256
    assert difference(runner, model, lengths=(200,)) < EXACT


def test_wrong_logits_are_refused():
    expected = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    require_equal_logits("llama", expected, expected + 1e-5, torch.float32)
    with pytest.raises(UnsupportedModelError, match="llama"):
        require_equal_logits("llama", expected, expected.roll(1, 0), torch.float32)
    with pytest.raises(UnsupportedModelError, match="llama"):
        require_equal_logits("llama", expected, torch.full_like(expected, float("nan")), torch.bfloat16)


def test_half_precision_may_differ_in_single_rows_and_a_mistake_does_in_more():
    expected = torch.randn(20, 50, generator=torch.Generator().manual_seed(0))
    one_off, some_off = expected.clone(), expected.clone()
    one_off[7] = -expected[7]
    some_off[10:18] = -expected[10:18]
    require_equal_logits("llama", expected, one_off, torch.bfloat16)
    for got, dtype in ((one_off, torch.float32), (some_off, torch.bfloat16)):
        with pytest.raises(UnsupportedModelError, match="llama"):
            require_equal_logits("llama", expected, got, dtype)


def test_the_start_check_refuses_a_model_without_meaning(tmp_path):
    make_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"llama: .*nan"):
        make_runner(tmp_path)
    make_runner(tmp_path, check_logits=False)


@pytest.mark.parametrize("mistake", [without_history, with_shifted_positions])
def test_the_start_checks_own_schedule_shows_mistakes(tmp_path, mistake):
    model = make_checkpoint(tmp_path)
    runner = make_runner(tmp_path)
    sequences = sample_sequences(runner.vocab_size)
    expected = library_logits(model, sequences)
    require_equal_logits("llama", expected, engine_logits(runner.execute, sequences), torch.float32)
    with pytest.raises(UnsupportedModelError, match="llama"):
        require_equal_logits(
            "llama", expected, engine_logits(lambda batch: mistake(runner, batch), sequences), torch.float32
        )


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_multimodal_model(tmp_path, prefix):
    model = make_checkpoint(tmp_path, "gemma3_text")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {re.sub(r"^model\.", prefix, name): tensor for name, tensor in tensors.items()}
    tensors["vision_tower.patch.weight"] = torch.zeros(2)
    save_file(tensors, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    assert difference(make_runner(tmp_path), model) < EXACT


def test_a_follower_executes_until_it_is_told_to_stop(tmp_path):
    make_checkpoint(tmp_path)
    runner, follower = make_runner(tmp_path), make_runner(tmp_path)
    near, far = multiprocessing.Pipe()
    thread = threading.Thread(target=follow, args=(far, follower, {}))
    thread.start()
    parallel = ParallelRunner(runner, [near])
    for batch in forked_batches(random_sequences((9, 9)), 6, block_size=BLOCK_SIZE):
        parallel.execute(batch)
    parallel.close()
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert torch.equal(runner.pool.keys[0], follower.pool.keys[0])
    assert runner.pool.keys[0].abs().sum() > 0


def test_a_follower_stops_when_rank_0_is_gone(tmp_path):
    make_checkpoint(tmp_path)
    near, far = multiprocessing.Pipe()
    near.close()
    follow(far, make_runner(tmp_path), {})
    ParallelRunner(make_runner(tmp_path), [far]).close()  # a closed pipe is no error either
