"""Run scheduled batches through a model: the tensor side of a step, for verifier and drafter."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedConfig

from outrider.verifier_service.cpu.kernels import wanted_isa
from outrider.verifier_service.formats.checkpoint import StateDictSource, TensorSource
from outrider.verifier_service.formats.quantized import PlainTensors, open_checkpoint
from outrider.verifier_service.gpu.transfers import upload
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.messages.counts import GraphCounts
from outrider.verifier_service.messages.wire import decode, encode
from outrider.verifier_service.model import start_check
from outrider.verifier_service.model.architectures import (
    UnsupportedModelError,
    checkpoint_names,
    expert_shape,
    load_model_description,
    read_eos_token_ids,
    require_supported,
    resolve_folder,
)
from outrider.verifier_service.model.attention import AttentionHandler, KVPool, LayerShape
from outrider.verifier_service.model.config import ModelConfig, Quantization
from outrider.verifier_service.model.cpu_attention import in_place_or_gathered
from outrider.verifier_service.model.decoder import Decoder
from outrider.verifier_service.model.decoder_spec import DecoderSpec, read_decoder_spec
from outrider.verifier_service.model.decoder_weights import load_decoder
from outrider.verifier_service.model.latent_attention import WIDE_HEAD
from outrider.verifier_service.model.library_model import finish, load_library_model, round_linears
from outrider.verifier_service.model.paged_metadata import fill_placeholders
from outrider.verifier_service.model.random_weights import RandomWeights, read_recipe
from outrider.verifier_service.model.settled import (
    has_fp8,
    limit_to_pool,
    resolve_device,
    resolve_dtype,
    resolve_kv_dtype,
    resolve_max_model_len,
    resolve_num_blocks,
)
from outrider.verifier_service.model.start_check import (
    engine_logits,
    has_long_window,
    library_logits,
    make_tiny_model,
    require_equal_logits,
    sample_sequences,
)
from outrider.verifier_service.model.state_pool import StatePool, require_taps, resolve_state_dtype
from outrider.verifier_service.model.step_graphs import CapturedModel, CudaCapture, GraphBackend, StepGraphs
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup
from outrider.verifier_service.model.weights import WeightReader
from outrider.verifier_service.start_memory import StartMemory
from outrider.verifier_service.start_phases import tell_phase

logger = logging.getLogger(__name__)

CHECKED = "checked"  # finding in `StartMemory`: the logits equal the library's


class PackedModel(CapturedModel, Protocol):
    """One rank's part of a causal model over packed tokens: `Decoder` or `LibraryModel`."""

    device: torch.device
    num_layers: int

    @property
    def kv_shapes(self) -> dict[int, LayerShape]: ...

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        attend: AttentionHandler,
        *,
        num_layers: int | None = None,
        taps: Sequence[int] = (),
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...


def load_model(
    description: PreTrainedConfig,
    source: TensorSource,
    group: TensorParallelGroup,
    dtype: torch.dtype,
    device: torch.device,
    *,
    check: bool,
    quantization: Quantization | None = None,
    num_cached_experts: int | None = None,
) -> PackedModel:
    """Build this rank's part of a model; raises `UnsupportedModelError` if its logits would be wrong.

    With `check` and one rank, the model is compared with the library's own forward of the same weights, which is loaded
    first and dropped. With several ranks, experts in host memory, or a window longer than the check's sequences, a tiny
    random model of the same architecture is compared instead or as well. An untested architecture is always checked.
    """
    architecture = require_supported(description, group.size)
    if not architecture.is_tested:
        _require_unlisted_works(description, group, device)
    elif check and (group.size > 1 or num_cached_experts is not None or has_long_window(description)):
        _check_tiny_model(description, group, device)
    spec = read_decoder_spec(description)
    if quantization is not None:
        _require_quantizable(quantization, description.model_type, spec, dtype, device)
    if num_cached_experts is not None:
        _require_offloadable(description.model_type, spec, group)
    aliases, ignored = checkpoint_names(description)
    sequences = sample_sequences(description.vocab_size)
    expected: torch.Tensor | None = None
    is_compared = (check or not architecture.is_tested) and group.size == 1 and num_cached_experts is None
    model: PackedModel
    if spec is None or is_compared:
        library = load_library_model(
            description, source, group, aliases=aliases, ignored=ignored, dtype=dtype, device=device
        )
        if is_compared:
            if quantization is not None:
                round_linears(library, quantization)
            expected = library_logits(library, sequences)
        if spec is None:
            model = finish(library, group, description.vocab_size)
        del library
    if spec is not None:
        reader = WeightReader(source, aliases)
        model = load_decoder(
            *(spec, reader, group),
            dtype=dtype,
            device=device,
            quantization=quantization,
            num_cached_experts=num_cached_experts,
        )
        reader.require_all_used(ignored)
    if expected is not None:
        require_equal_logits(description.model_type, expected, _engine_logits(model, sequences), dtype)
    return model


def _require_quantizable(
    quantization: Quantization, name: str, spec: DecoderSpec | None, dtype: torch.dtype, device: torch.device
) -> None:
    if quantization == "int8" and device.type != "cpu":
        raise ValueError(f"quantization: int8 is served on CPUs, device is {device.type}")
    if quantization == "fp8" and dtype is not torch.bfloat16:
        raise ValueError(f"quantization: fp8 is served in bfloat16, dtype is {dtype}")
    if quantization == "fp8" and not has_fp8(device):
        raise ValueError("quantization: fp8 needs a device that multiplies in FP8, from Ada and Hopper on")
    if spec is None:
        raise UnsupportedModelError(f"{name}: quantization is not served for architectures that run the library's code")
    if any(layer.experts is not None for layer in spec.layers):
        raise UnsupportedModelError(f"{name}: quantization is not served for mixtures of experts")


def _require_offloadable(name: str, spec: DecoderSpec | None, group: TensorParallelGroup) -> None:
    if spec is None or all(layer.experts is None for layer in spec.layers):
        raise UnsupportedModelError(f"{name}: num_cached_experts is for mixtures of experts that our decoder runs")
    if group.size > 1:
        raise UnsupportedModelError(f"{name}: num_cached_experts is not served with tensor_parallel_size > 1")


def _check_tiny_model(description: PreTrainedConfig, group: TensorParallelGroup, device: torch.device) -> None:
    whole = make_tiny_model(description, group.size)
    sequences = sample_sequences(whole.config.vocab_size)
    expected = library_logits(whole, sequences).to(device)
    source = StateDictSource(whole.state_dict())
    sliced = _build_unchecked(whole.config, source, group, device)
    require_equal_logits(description.model_type, expected, _engine_logits(sliced, sequences), torch.float32)


def _build_unchecked(
    description: PreTrainedConfig, source: TensorSource, group: TensorParallelGroup, device: torch.device
) -> PackedModel:
    spec = read_decoder_spec(description)
    if spec is not None:
        return load_decoder(spec, WeightReader(source), group, dtype=torch.float32, device=device)
    library = load_library_model(description, source, group, aliases=(), ignored=(), dtype=torch.float32, device=device)
    return finish(library, group, description.vocab_size)


def _require_unlisted_works(description: PreTrainedConfig, group: TensorParallelGroup, device: torch.device) -> None:
    """Raise `UnsupportedModelError` for any error of an untested architecture's code."""
    try:
        _check_tiny_model(description, group, device)
    except UnsupportedModelError:
        raise
    except Exception as error:
        text = f"{description.model_type}: the library's code does not run with our attention: {error!r}"
        raise UnsupportedModelError(text) from error


def _engine_logits(model: PackedModel, sequences: Sequence[list[int]]) -> torch.Tensor:
    pool = KVPool(
        model.kv_shapes,
        num_blocks=start_check.NUM_BLOCKS,
        block_size=start_check.BLOCK_SIZE,
        dtype=model.dtype,
        device=model.device,
    )
    return engine_logits(lambda batch: run_batch(model, pool, batch)[0], sequences)


@torch.inference_mode()
def run_batch(
    model: PackedModel,
    pool: KVPool,
    batch: ScheduledBatch,
    taps: Sequence[int] = (),
    graphs: StepGraphs | None = None,
    chosen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the model over a packed batch: float32 logits [num_rows, vocab_size], tapped states [num_tokens, width].

    With `graphs`, which belong to this model, pool and taps, the states are valid until the next batch. `chosen` int64
    [num_chosen], on the model's device: the tokens for the batch's placeholders.
    """
    pool.move_slots(batch.move_sources, batch.move_targets)
    pool.copy_blocks(batch.copy_sources, batch.copy_targets)
    replayed = None if graphs is None else graphs.run(batch, chosen)
    return forward_packed(model, batch, attention_context(batch, pool), taps, chosen) if replayed is None else replayed


def forward_packed(
    model: PackedModel,
    batch: ScheduledBatch,
    attend: AttentionHandler,
    taps: Sequence[int] = (),
    chosen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the model eagerly with this attention; see `run_batch`."""
    numbers = (batch.token_ids, batch.positions, batch.logits_indices)
    token_ids, positions, rows = upload([np.array(each, np.int64) for each in numbers], model.device)
    if chosen is not None:
        fill_placeholders(token_ids, chosen)
    return model(token_ids, positions, rows, attend, num_layers=batch.num_layers, taps=taps)


def attention_context(batch: ScheduledBatch, pool: KVPool) -> AttentionHandler:
    """Return one step's attention: our kernel over block tables if there is one, else torch's over gathered blocks.

    Our kernel on CUDA holds the query heads of a KV head at once, which for a whole layer's latents are too many.
    """
    if pool.device.type != "cuda" or pool.widest > WIDE_HEAD:
        return in_place_or_gathered(batch, pool)
    from outrider.verifier_service.model.triton_attention import TritonContext  # imported here: CPUs have no Triton

    return TritonContext.of(batch, pool)


def graph_backend(config: ModelConfig, device: torch.device) -> GraphBackend | None:
    """Return how steps are captured; None: every step runs eagerly."""
    if device.type != "cuda" or config.enforce_eager:
        return None
    from outrider.verifier_service.model.triton_attention import TritonContext

    return GraphBackend(CudaCapture(device), TritonContext)


class ModelRunner:
    """Runs `ScheduledBatch`es on this rank."""

    def __init__(self, config: ModelConfig, group: TensorParallelGroup, backend: GraphBackend | None = None) -> None:
        """`backend` captures steps; None: the device's default, which for a CPU is no capture.

        A step's shape is captured when it first occurs, unless `graphs.capture` was called before.
        """
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        folder = resolve_folder(config)
        description = load_model_description(folder, config)
        self.config, self.description = config, description
        self.device = resolve_device(config.device)
        self.dtype = resolve_dtype(config.dtype, description, self.device)
        self.group = group
        self.block_size = config.block_size
        self.vocab_size: int = description.vocab_size
        self.max_model_len = resolve_max_model_len(config, description)
        self.eos_token_ids = read_eos_token_ids(folder, description, config)
        self.num_layers: int = description.num_hidden_layers
        self.experts = expert_shape(description)
        settings = {**dataclasses.asdict(config), "check_logits": None, "check_anew": None, "isa": wanted_isa()}
        self.memory = StartMemory(settings, folder, self.device, rank=group.rank, is_anew=config.check_anew)
        self.model = self._load(config, folder, description)
        self.routing = self.model.record_routing() if isinstance(self.model, Decoder) else None
        shapes = self.model.kv_shapes
        self.kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, self.dtype, self.device)
        self.num_blocks = group.all_reduce_min(resolve_num_blocks(config, shapes, self.kv_dtype, self.device))
        self.max_model_len = limit_to_pool(config, self.max_model_len, self.num_blocks * self.block_size)
        self.scratch_blocks = range(self.num_blocks, self.num_blocks + config.num_scratch_blocks)
        backend = graph_backend(config, self.device) if backend is None else backend
        null_block = self.scratch_blocks.stop
        self.pool = KVPool(
            shapes,
            num_blocks=null_block if backend is None else null_block + 1,
            block_size=self.block_size,
            dtype=self.dtype,
            device=self.device,
            stored=self.kv_dtype,
        )
        self._taps = config.state_taps if group.rank == 0 else ()  # hidden states are equal on all ranks
        self.states: StatePool | None = None
        if self._taps:
            require_taps(self._taps, self.num_layers)
            self.states = StatePool(
                num_blocks=self.scratch_blocks.stop,
                block_size=self.block_size,
                width=len(self._taps) * self.model.hidden_size,
                dtype=resolve_state_dtype(config.state_dtype, self.dtype),
            )
        self.graphs: StepGraphs | None = None
        if backend is not None and self.pool.widest <= WIDE_HEAD:
            self.graphs = StepGraphs(
                *(self.model, self.pool, backend),
                null_block=null_block,
                max_model_len=self.max_model_len,
                taps=self._taps,
                is_alone=group.size == 1,
            )

    def _load(self, config: ModelConfig, folder: Path, description: PreTrainedConfig) -> PackedModel:
        """Load this rank's part of the model; check its logits unless an earlier start did."""
        is_checked = self.group.all_reduce_min(int(self.memory.recall(CHECKED) is True)) == 1  # on every rank
        check = config.check_logits and not is_checked
        tell_phase("loading weights, checking logits" if check else "loading weights")
        with self.open_checkpoint(folder) as checkpoint:
            model = load_model(
                *(description, checkpoint, self.group, self.dtype, self.device),
                check=check,
                quantization=config.quantization,
                num_cached_experts=config.num_cached_experts,
            )
            self.weight_bytes_read = checkpoint.bytes_read
            self.kept_int8 = checkpoint.kept if isinstance(checkpoint, PlainTensors) else frozenset()
            if isinstance(checkpoint, PlainTensors) and checkpoint.summary and self.group.rank == 0:
                logger.warning("%s: %s", config.path, checkpoint.summary)
        if check:
            self.memory.remember(CHECKED, True)
        return model

    @contextlib.contextmanager
    def open_checkpoint(self, folder: Path) -> Iterator[PlainTensors | RandomWeights]:
        """Open the tensors in a folder, dequantised, or those that its recipe draws. Raises `WeightError`."""
        drawn = read_recipe(folder, self.description, dtype=self.dtype, device=self.device)
        if drawn is not None:
            yield drawn
            return
        is_hosted = self.config.num_cached_experts is not None  # most weights: they are dequantised where they stay
        device = torch.device("cpu") if is_hosted else self.device
        is_ours = self.config.quantization is None and read_decoder_spec(self.description) is not None
        keeps_int8 = is_ours and self.device.type == "cpu"
        with open_checkpoint(folder, dtype=self.dtype, device=device, keeps_int8=keeps_int8) as checkpoint:
            yield checkpoint

    def execute(self, batch: ScheduledBatch, chosen: torch.Tensor | None = None) -> torch.Tensor:
        """Run one step and return float32 logits [num_rows, vocab_size] of `batch.logits_indices`, equal on all ranks.

        Slots must lie in the pool, token ids in the vocabulary. A batch with placeholders needs `chosen` on rank 0.
        """
        taps = self._taps if batch.num_layers is None else ()
        chosen = self._on_every_rank(batch, chosen)
        logits, states = run_batch(self.model, self.pool, batch, taps, self.graphs, chosen)
        if self.states is not None:
            self.states.copy_blocks(batch.copy_sources, batch.copy_targets)
            if states is not None:
                self.states.write(batch.slot_mapping, states)
        return logits

    def _on_every_rank(self, batch: ScheduledBatch, chosen: torch.Tensor | None) -> torch.Tensor | None:
        """Broadcast rank 0's tokens for the batch's placeholders; return None if it has none."""
        num_chosen = max(0, -min(batch.token_ids))  # placeholder ids are -1 - index
        if num_chosen == 0:
            return None
        if chosen is None:  # a follower
            chosen = torch.empty(num_chosen, dtype=torch.int64, device=self.device)
        return self.group.broadcast(chosen[:num_chosen])


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Rank 0's last message to a follower."""


class ParallelRunner:
    """Rank 0's runner of a tensor-parallel group: sends every batch to the followers, then all ranks run it."""

    def __init__(self, runner: ModelRunner, followers: Sequence[Connection] = ()) -> None:
        self._runner, self._followers = runner, followers
        self.vocab_size, self.max_model_len = runner.vocab_size, runner.max_model_len
        self.num_blocks, self.block_size = runner.num_blocks, runner.block_size
        self.eos_token_ids, self.device = runner.eos_token_ids, runner.device
        self.states, self.scratch_blocks = runner.states, runner.scratch_blocks
        self.pool, self.num_layers = runner.pool, runner.num_layers
        self.experts, self.routing = runner.experts, runner.routing
        self.model, self.memory = runner.model, runner.memory  # rank 0's
        self.graph_counts = GraphCounts() if runner.graphs is None else runner.graphs.counts
        self.fetches = runner.model.fetches if isinstance(runner.model, Decoder) else None

    def execute(self, batch: ScheduledBatch, chosen: torch.Tensor | None = None) -> torch.Tensor:
        """Run one step on all ranks; return float32 logits [num_rows, vocab_size] on rank 0's device."""
        if self._followers:
            payload = encode(batch)
            for follower in self._followers:
                follower.send_bytes(payload)
        return self._runner.execute(batch, chosen)

    def close(self) -> None:
        """Tell the followers to stop."""
        for follower in self._followers:
            with contextlib.suppress(OSError):
                follower.send_bytes(encode(Stop()))


def follow(connection: Connection, runner: ModelRunner, others: Mapping[type, Callable[[Any], object]]) -> None:
    """Run the batches that rank 0 sends, and what else it asks for, until `Stop` or the end of the pipe.

    A follower idles on the pipe, never in a collective, which would time out. `others`: what to do with messages of
    other types. What fails on one rank fails on all: rank 0 tells of it.
    """
    while True:
        try:
            message = decode(connection.recv_bytes(), (ScheduledBatch, Stop, *others))
        except EOFError:
            return
        if isinstance(message, Stop):
            return
        if isinstance(message, ScheduledBatch):
            runner.execute(message)
            continue
        try:
            others[type(message)](message)
        except ValueError as error:
            logger.warning("%s is refused: %s", type(message).__name__, error)
