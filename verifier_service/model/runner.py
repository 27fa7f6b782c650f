"""Execute scheduled batches: the tensor side of a step, the same for verifier and drafter."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.messages.wire import decode, encode
from outrider.verifier_service.model import start_check
from outrider.verifier_service.model.architectures import (
    CHECKPOINT_ALIASES,
    IGNORED_TENSORS,
    Architecture,
    expert_shape,
    load_model_description,
    read_eos_token_ids,
    require_supported,
    resolve_folder,
)
from outrider.verifier_service.model.attention import (
    AttentionContext,
    AttentionHandler,
    KVPool,
    LayerShape,
    ShapeRecorder,
    entered,
)
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.empty_model import build_empty_model
from outrider.verifier_service.model.lean_modules import fuse_siblings, replace_rms_norms
from outrider.verifier_service.model.packed_linear import pack_linears
from outrider.verifier_service.model.start_check import (
    engine_logits,
    library_logits,
    make_tiny_model,
    require_equal_logits,
    sample_token_ids,
)
from outrider.verifier_service.model.state_pool import (
    StatePool,
    StateTaps,
    decoder_layers,
    resolve_state_dtype,
    states_width,
)
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup, plan_shards, shrink, wrap_shards
from outrider.verifier_service.model.weights import Checkpoint, StateDictSource, TensorSource, load_weights

logger = logging.getLogger(__name__)

CPU_CACHE_LIMIT_BYTES = 1 << 30
CPU_CACHE_SHARE = 0.1  # of the physical memory
CUDA_CACHE_SHARE = 0.8  # of the memory that is free once the weights are loaded


def load_model(
    description: PreTrainedConfig,
    checkpoint: TensorSource,
    group: TensorParallelGroup,
    dtype: torch.dtype,
    device: torch.device,
    *,
    check: bool,
) -> PreTrainedModel:
    """Build this rank's part of a model; raises `UnsupportedModelError` where it would answer wrongly.

    With `check`, one rank compares the finished model with the library's own forward of the same weights; several
    compare a tiny random model of the same architecture, sliced the same way.
    """
    architecture = require_supported(description, group.size)
    if check and group.size > 1:
        _check_sharding(description, group, device)
    model = build_empty_model(description, dtype=dtype, device=device)
    shards = plan_shards(model, group)
    shrink(model, shards)
    load_weights(
        model,
        checkpoint,
        shards=shards,
        aliases=(*architecture.aliases, *CHECKPOINT_ALIASES),
        ignored=(*IGNORED_TENSORS, *_prediction_layers(description)),
        device=device,
        dtype=dtype,
    )
    token_ids = sample_token_ids(description.vocab_size)
    expected = library_logits(model, token_ids) if check and group.size == 1 else None
    wrap_shards(model, group, description.vocab_size)
    make_lean(model, architecture)
    if expected is not None:
        require_equal_logits(description.model_type, expected, _engine_logits(model, token_ids, device), dtype)
    return model


def _prediction_layers(description: PreTrainedConfig) -> tuple[str, ...]:
    """Match the MTP layers of a target's checkpoint: a drafter reads those."""
    first, count = description.num_hidden_layers, getattr(description, "num_nextn_predict_layers", 0) or 0
    return (r"^(model\.)?mtp\.", *(rf"^model\.layers\.{first + index}\." for index in range(count)))


def make_lean(model: PreTrainedModel, architecture: Architecture) -> None:
    """Replace what the library computes in more calls than it needs; the results stay the same."""
    if architecture.plain_rms_norm:
        replace_rms_norms(model)
    fuse_siblings(model)
    pack_linears(model, keep=[module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)])


def _check_sharding(description: PreTrainedConfig, group: TensorParallelGroup, device: torch.device) -> None:
    whole = make_tiny_model(description, group.size)
    token_ids = sample_token_ids(whole.config.vocab_size)
    expected = library_logits(whole, token_ids).to(device)
    source = StateDictSource(whole.state_dict())
    sliced = load_model(whole.config, source, group, torch.float32, device, check=False)
    require_equal_logits(description.model_type, expected, _engine_logits(sliced, token_ids, device), torch.float32)


def _engine_logits(model: PreTrainedModel, token_ids: list[int], device: torch.device) -> torch.Tensor:
    pool = KVPool(
        record_shapes(model),
        num_blocks=start_check.NUM_BLOCKS,
        block_size=start_check.BLOCK_SIZE,
        dtype=model.dtype,
        device=device,
    )
    return engine_logits(lambda batch: run_batch(model, pool, batch), token_ids)


@torch.inference_mode()
def run_batch(model: PreTrainedModel, pool: KVPool, batch: ScheduledBatch) -> torch.Tensor:
    """Run the model over a packed batch: float32 logits [num_rows, vocab_size]."""
    pool.move_slots(batch.move_sources, batch.move_targets)
    pool.copy_blocks(batch.copy_sources, batch.copy_targets)
    with entered(attention_context(batch, pool)), shortened(model, batch.num_layers):
        return forward_packed(model, batch.token_ids, batch.positions, batch.logits_indices)


def attention_context(batch: ScheduledBatch, pool: KVPool) -> AttentionHandler:
    """Return one step's attention: our kernel on CUDA, torch's over gathered blocks elsewhere."""
    if pool.device.type != "cuda":
        return AttentionContext.of(batch, pool)
    from outrider.verifier_service.model.triton_attention import TritonContext  # an installation for CPUs has no Triton

    return TritonContext.of(batch, pool)


@contextlib.contextmanager
def shortened(model: PreTrainedModel, num_layers: int | None) -> Iterator[None]:
    """Leave the model after its first `num_layers` decoder layers; final norm and output embedding stay."""
    if num_layers is None:
        yield
        return
    parent, name = decoder_layers(model)
    layers = getattr(parent, name)
    setattr(parent, name, layers[:num_layers])
    try:
        yield
    finally:
        setattr(parent, name, layers)


@torch.inference_mode()
def record_shapes(model: PreTrainedModel) -> dict[int, LayerShape]:
    """Ask the model itself what each layer of this rank caches."""
    recorder = ShapeRecorder()
    with entered(recorder):
        forward_packed(model, [0], [0], [0])
    return recorder.shapes


def forward_packed(model: PreTrainedModel, token_ids: list[int], positions: list[int], rows: list[int]) -> torch.Tensor:
    """Run the library's modelling code over packed tokens, with the attention handler that is active."""
    device = model.device
    output = model(
        input_ids=torch.tensor([token_ids], device=device),
        position_ids=torch.tensor([positions], device=device),
        use_cache=False,
        logits_to_keep=torch.tensor(rows, dtype=torch.long, device=device),
    )
    return output.logits[0].float()


class ModelRunner:
    """Executes `ScheduledBatch` on this rank."""

    def __init__(self, config: ModelConfig, group: TensorParallelGroup) -> None:
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        folder = resolve_folder(config)
        description = load_model_description(folder, config)
        self.device = resolve_device(config.device)
        self.dtype = resolve_dtype(config.dtype, description, self.device)
        self.group = group
        self.block_size = config.block_size
        self.vocab_size: int = description.vocab_size
        self.max_model_len = resolve_max_model_len(config, description)
        self.eos_token_ids = read_eos_token_ids(folder, description)
        self.num_layers: int = description.num_hidden_layers
        self.experts = expert_shape(description)
        with Checkpoint(folder) as checkpoint:
            self.model = load_model(description, checkpoint, group, self.dtype, self.device, check=config.check_logits)
            self.weight_bytes_read = checkpoint.bytes_read
        shapes = record_shapes(self.model)
        self.num_blocks = group.all_reduce_min(resolve_num_blocks(config, shapes, self.dtype, self.device))
        self.max_model_len = limit_to_pool(config, self.max_model_len, self.num_blocks * self.block_size)
        self.scratch_blocks = range(self.num_blocks, self.num_blocks + config.num_scratch_blocks)
        self.pool = KVPool(
            shapes,
            num_blocks=self.scratch_blocks.stop,
            block_size=self.block_size,
            dtype=self.dtype,
            device=self.device,
        )
        self._taps: StateTaps | None = None
        self.states: StatePool | None = None
        if config.state_taps and group.rank == 0:  # the ranks' hidden states are the same
            self._taps = StateTaps(self.model, config.state_taps)
            self.states = StatePool(
                num_blocks=self.scratch_blocks.stop,
                block_size=self.block_size,
                width=states_width(self.model, config.state_taps),
                dtype=resolve_state_dtype(config.state_dtype, self.dtype),
            )

    def execute(self, batch: ScheduledBatch) -> torch.Tensor:
        """Run one step and return float32 logits [num_rows, vocab_size] of `batch.logits_indices`.

        Token ids must lie in the vocabulary and slots in the pool. With several ranks the logits are the same on all.
        """
        if self._taps is None or self.states is None:
            return run_batch(self.model, self.pool, batch)
        self._taps.is_on = batch.num_layers is None
        logits = run_batch(self.model, self.pool, batch)
        self.states.copy_blocks(batch.copy_sources, batch.copy_targets)
        if self._taps.is_on:
            self.states.write(batch.slot_mapping, self._taps.take())
        return logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Rank 0's last message to a follower."""


class ParallelRunner:
    """Rank 0's view of a tensor-parallel group: followers get every batch over their pipe, then all execute it."""

    def __init__(self, runner: ModelRunner, followers: Sequence[Connection] = ()) -> None:
        self._runner, self._followers = runner, followers
        self.vocab_size, self.max_model_len = runner.vocab_size, runner.max_model_len
        self.num_blocks, self.block_size = runner.num_blocks, runner.block_size
        self.eos_token_ids, self.device = runner.eos_token_ids, runner.device
        self.states, self.scratch_blocks = runner.states, runner.scratch_blocks
        self.pool, self.num_layers, self.experts = runner.pool, runner.num_layers, runner.experts

    def execute(self, batch: ScheduledBatch) -> torch.Tensor:
        """Run one step on all ranks: float32 logits [num_rows, vocab_size] on rank 0's device."""
        if self._followers:
            payload = encode(batch)
            for follower in self._followers:
                follower.send_bytes(payload)
        return self._runner.execute(batch)

    def close(self) -> None:
        """Tell the followers to stop; one that is gone already needs no telling."""
        for follower in self._followers:
            with contextlib.suppress(OSError):
                follower.send_bytes(encode(Stop()))


def follow(connection: Connection, runner: ModelRunner) -> None:
    """Execute what rank 0 sends until it says stop or its end of the pipe closes.

    A follower idles on the pipe, never inside a collective: an idle collective would run into its timeout.
    """
    while True:
        try:
            message = decode(connection.recv_bytes(), (ScheduledBatch, Stop))
        except EOFError:
            return
        if isinstance(message, Stop):
            return
        runner.execute(message)


def resolve_device(name: str) -> torch.device:
    """Choose the device of `ModelConfig.device`."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def resolve_dtype(name: str, description: PreTrainedConfig, device: torch.device) -> torch.dtype:
    """Choose the dtype of `ModelConfig.dtype`; half precision is slow on a CPU, so "auto" means float32 there."""
    if name != "auto":
        return getattr(torch, name)
    own = description.dtype
    return own if device.type == "cuda" and isinstance(own, torch.dtype) else torch.float32


def resolve_max_model_len(config: ModelConfig, description: PreTrainedConfig) -> int:
    """Bound the sequence length by the model's own limit; raises `ValueError` naming the field."""
    own = description.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > own:
        raise ValueError(f"max_model_len must be at most the model's own limit of {own}")
    return config.max_model_len or own


def limit_to_pool(config: ModelConfig, max_model_len: int, num_slots: int) -> int:
    """Bound the sequence length by what the KV pool holds; raises `ValueError` where more was asked for."""
    if max_model_len <= num_slots:
        return max_model_len
    if config.max_model_len is not None:
        raise ValueError(f"max_model_len must be at most {num_slots}, the tokens that the KV cache holds")
    logger.warning("the KV cache holds %d tokens of the model's %d: sequences end there", num_slots, max_model_len)
    return num_slots


def resolve_num_blocks(
    config: ModelConfig, shapes: dict[int, LayerShape], dtype: torch.dtype, device: torch.device
) -> int:
    """Count the KV blocks that fit; raises `ValueError` where not even one does."""
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    block_bytes = config.block_size * dtype.itemsize * sum(shape.num_elements for shape in shapes.values())
    budget_bytes = config.kv_cache_memory_bytes or free_cache_bytes(device)
    if budget_bytes < block_bytes:
        raise ValueError(f"kv_cache_memory_bytes must be at least {block_bytes}, one block; there are {budget_bytes}")
    return budget_bytes // block_bytes


def free_cache_bytes(device: torch.device) -> int:
    """Take a modest share of a CPU's memory, most of what a CUDA device has free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * CUDA_CACHE_SHARE)
    physical_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(CPU_CACHE_LIMIT_BYTES, int(physical_bytes * CPU_CACHE_SHARE))
