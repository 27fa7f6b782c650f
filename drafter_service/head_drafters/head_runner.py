"""Execute packed batches of pairs (state, token) with a head over its own paged KV, and load heads by method."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig

from outrider.drafter_service.heads.eagle import EagleHead
from outrider.drafter_service.heads.eagle3 import Eagle3Head
from outrider.drafter_service.heads.head_files import CONFIG_NAME, read_json
from outrider.drafter_service.heads.head_layer import Attend, DraftHead, HeadError, make_lean
from outrider.drafter_service.heads.mtp import MtpHead
from outrider.drafter_service.heads.switched import SwitchedHeads
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.model.attention import AttentionOptions, KVPool, packed
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.cpu_attention import in_place_or_gathered
from outrider.verifier_service.model.runner import limit_to_pool, resolve_device, resolve_dtype, resolve_num_blocks
from outrider.verifier_service.model.weights import Checkpoint, TensorSource

LAYER_INDEX = 0  # of the head's only layer in its KV pool
METHODS = ("eagle", "eagle3", "mtp")


class HeadRows(NamedTuple):
    """What a head computed for the wanted pairs of a batch."""

    logits: torch.Tensor  # float32 [num_rows, vocab_size] in the target's ids; -inf where the head never drafts
    feedback: torch.Tensor  # [num_rows, hidden_size] the state that follows each pair


class HeadRunner:
    """Runs `SwitchedHeads` over one KV pool; the counterpart of a model's `ModelRunner`."""

    def __init__(self, heads: SwitchedHeads, *, num_blocks: int, block_size: int, max_model_len: int) -> None:
        self.heads = heads
        weight = heads.first.embed_tokens.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.num_blocks, self.block_size, self.max_model_len = num_blocks, block_size, max_model_len
        self.vocab_size, self.state_size = heads.first.vocab_size, heads.first.state_size
        self.pool = KVPool(
            {LAYER_INDEX: heads.first.layer_shape},
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=self.dtype,
            device=self.device,
        )

    @classmethod
    def sized_by(cls, heads: SwitchedHeads, config: ModelConfig) -> HeadRunner:
        """Size the KV pool and bound the context as a model's of the same config."""
        weight = heads.first.embed_tokens.weight
        shapes = {LAYER_INDEX: heads.first.layer_shape}
        num_blocks = resolve_num_blocks(config, shapes, weight.dtype, weight.device)
        max_model_len = min(config.max_model_len or heads.first.max_positions, heads.first.max_positions)
        max_model_len = limit_to_pool(config, max_model_len, num_blocks * config.block_size)
        return cls(heads, num_blocks=num_blocks, block_size=config.block_size, max_model_len=max_model_len)

    @torch.inference_mode()
    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """Make the target's states [num_tokens, state_size] the head's own: [num_tokens, hidden_size]."""
        return self.heads.first.combine(states.to(self.device, self.dtype))

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch, hidden: torch.Tensor, set_index: int = 0) -> HeadRows:
        """Run one parameter set over packed pairs: token ids of the batch, states [num_tokens, hidden_size].

        Keys and values are written to the batch's slots; `logits_indices` names the pairs that are wanted.
        """
        assert hidden.shape[0] == batch.num_tokens, (hidden.shape, batch.num_tokens)
        self.pool.copy_blocks(batch.copy_sources, batch.copy_targets)
        head = self.heads[set_index]
        output, feedback = head(
            torch.tensor([batch.token_ids], device=self.device),
            hidden[None],
            torch.tensor([batch.positions], device=self.device),
            _paged(batch, self.pool),
        )
        rows = torch.tensor(batch.logits_indices, dtype=torch.long, device=self.device)
        logits = head.in_target_ids(head.logits(output[0].index_select(0, rows)).float())
        return HeadRows(logits=logits, feedback=feedback[0].index_select(0, rows))


def _paged(batch: ScheduledBatch, pool: KVPool) -> Attend:
    context = in_place_or_gathered(batch, pool)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        # what a peer's states make overflow must not get into the pool, where it would outlast its session
        key, value = packed(key.nan_to_num()), packed(value.nan_to_num())
        return context.attend(LAYER_INDEX, packed(query), key, value, AttentionOptions())[None]

    return attend


def load_heads(
    method: str,
    folders: Sequence[Path],
    config: ModelConfig,
    *,
    target: Path | None = None,
    num_target_layers: int | None = None,
) -> SwitchedHeads:
    """Load a head, or one for each draft position, ready to serve on the config's device in its dtype.

    `target` is the folder whose embeddings a head without its own uses. Raises `ValueError` naming what is wrong.
    """
    if config.tensor_parallel_size != 1:
        raise HeadError(f"tensor_parallel_size: {config.tensor_parallel_size}, a head runs on one device")
    device = resolve_device(config.device)
    with ExitStack() as stack:
        source = None if target is None else stack.enter_context(Checkpoint(target))
        heads = [
            load_head(
                method,
                folder,
                target=source,
                num_target_layers=num_target_layers,
                device=device,
                dtype=_dtype_of(config, folder, device),
            )
            for folder in folders
        ]
    for head in heads:
        make_lean(head)
    return SwitchedHeads(heads)


def load_head(
    method: str,
    folder: Path,
    *,
    target: TensorSource | None,
    num_target_layers: int | None,
    device: torch.device,
    dtype: torch.dtype,
) -> DraftHead:
    """Load one head as its checkpoint has it; raises `ValueError` naming what is wrong."""
    match method:
        case "eagle":
            return EagleHead.from_folder(folder, target=target, device=device, dtype=dtype)
        case "eagle3":
            return Eagle3Head.from_folder(
                folder, target=target, num_target_layers=num_target_layers, device=device, dtype=dtype
            )
        case "mtp":
            return MtpHead.from_folder(folder, target=target, device=device, dtype=dtype)
    raise HeadError(f"method: {method!r} is none of {', '.join(METHODS)}")


def _dtype_of(config: ModelConfig, folder: Path, device: torch.device) -> torch.dtype:
    """Choose as for a model: a head's config may keep its dtype beside its layer's, or in it."""
    described = read_json(folder / CONFIG_NAME)
    nested = described.get("transformer_layer_config", described)
    name = nested.get("dtype") or nested.get("torch_dtype") or "float32"
    return resolve_dtype(config.dtype, PreTrainedConfig(dtype=name), device)
