"""Shared by heads over hidden states: a decoder layer of the llama family, rotary positions and the loader.

A head continues the target's hidden states instead of reading the text again. Its input at position i is the pair
(state of token i, embedding of token i+1), its output there predicts token i+2. With its own output as the next state,
it drafts further tokens (EAGLE: Li et al. 2024, arXiv 2401.15077).

position      0             1             2
state         h0            h1            h2            of the target, later the head's own
token         x1            x2            x3
predicts      x2            x3            x4

Attention is a parameter: `attend_causally` over whole sequences (training), or a paged KV pool (serving).
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, cast

import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from outrider.drafter_service.heads.head_files import HeadFiles, opened
from outrider.verifier_service.formats.checkpoint import TensorSource, WeightError
from outrider.verifier_service.formats.quantized import open_checkpoint
from outrider.verifier_service.model.architectures import batch_dependent_rope
from outrider.verifier_service.model.attention import AttentionHandler, AttentionOptions, LayerShape, packed
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.decoder import GatedMLP
from outrider.verifier_service.model.packed_linear import make_linear, pack_linears
from outrider.verifier_service.model.settled import own_limit, resolve_device, resolve_dtype
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup

LAYER_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # `HeadLayer` computes pre-norm, RMSNorm, gated SiLU
# the target's tensors that a head may borrow; if the target ties its embeddings, the second is the first
SHARED = {
    "embed_tokens.weight": (r"(^|\.)embed_tokens\.weight$",),
    "lm_head.weight": (r"(^|\.)lm_head\.weight$", r"(^|\.)embed_tokens\.weight$"),
}

LAYER_INDEX = 0  # of a head's only layer in its pool
CPU = torch.device("cpu")
META = torch.device("meta")
ROTARY = re.compile(r"rotary_emb\.inv_freq$")  # computed, whatever a checkpoint stores
# what the `speculators` library stores besides
EXTRAS = re.compile(rf"^t2d$|^verifier_(norm|lm_head)\.|{ROTARY.pattern}")
# query [batch, num_heads, length, head_dim], key and value with their own number of heads
# -> [batch, length, num_heads, head_dim], scaled by head_dim ** -0.5
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class PooledAttend:
    """An `Attend` over a pool of keys and values; the library's layers enter it as theirs, with their own options."""

    def __init__(self, handler: AttentionHandler) -> None:
        self._handler = handler

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return self.attend(LAYER_INDEX, packed(query), packed(key), packed(value), AttentionOptions())[None]

    def attend(
        self, layer_index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Attend as an `AttentionHandler` does."""
        # what a peer's states make overflow must not get into the pool, where it would outlast its session
        return self._handler.attend(layer_index, query, key.nan_to_num(), value.nan_to_num(), options)


class HeadError(ValueError):
    """The head is not supported; the text names the field of its config."""


class TensorNames(NamedTuple):
    """What a checkpoint calls a head's tensors."""

    stored: Callable[[str], str] = lambda name: name  # of our names
    skipped: re.Pattern[str] = ROTARY  # of the checkpoint's, those that are left out
    aliases: Sequence[tuple[str, str]] | None = None  # as in `WeightReader`, of a layer of the library's


class HeadOutput(NamedTuple):
    """A head's output for each pair."""

    output: torch.Tensor  # [batch, length, hidden_size] input of its output embedding
    feedback: torch.Tensor  # [batch, length, hidden_size] state of the next pair, in place of the target's


def attend_causally(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention over whole sequences."""
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped).transpose(1, 2)


class HeadAttention(nn.Module):
    """Grouped-query attention with rotary positions, and qwen's biases and query and key norms if described."""

    def __init__(self, description: PreTrainedConfig, input_size: int) -> None:
        super().__init__()
        self.head_dim = head_dim_of(description)
        num_heads, num_kv_heads = description.num_attention_heads, description.num_key_value_heads
        is_qwen2 = description.model_type == "qwen2"  # always has q, k and v biases, and none of o_proj
        has_bias = bool(getattr(description, "attention_bias", False))
        self.q_proj = nn.Linear(input_size, num_heads * self.head_dim, bias=has_bias or is_qwen2)
        self.k_proj = nn.Linear(input_size, num_kv_heads * self.head_dim, bias=has_bias or is_qwen2)
        self.v_proj = nn.Linear(input_size, num_kv_heads * self.head_dim, bias=has_bias or is_qwen2)
        self.o_proj = nn.Linear(num_heads * self.head_dim, description.hidden_size, bias=has_bias)
        self.qkv_proj: nn.Module | None = None
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if description.model_type == "qwen3":
            self.q_norm = nn.RMSNorm(self.head_dim, eps=description.rms_norm_eps)
            self.k_norm = nn.RMSNorm(self.head_dim, eps=description.rms_norm_eps)

    def forward(
        self, rows: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], attend: Attend
    ) -> torch.Tensor:  # [batch, length, input_size] -> [batch, length, hidden_size]
        query_rows, key_rows, value_rows = self._project(rows)
        query, key = self._heads(query_rows, self.q_norm), self._heads(key_rows, self.k_norm)
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        return self.o_proj(attend(query, key, self._heads(value_rows, None)).flatten(2))

    def fuse(self) -> None:
        """Fuse the three projections; afterwards they cannot be trained or saved."""
        parts: list[Any] = [self.q_proj, self.k_proj, self.v_proj]
        self._sizes = [part.out_features for part in parts]
        self.qkv_proj = fused_linear(parts)
        del self.q_proj, self.k_proj, self.v_proj

    def _project(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        if self.qkv_proj is None:
            return self.q_proj(rows), self.k_proj(rows), self.v_proj(rows)
        return self.qkv_proj(rows).split(self._sizes, dim=-1)

    def _heads(self, rows: torch.Tensor, norm: nn.Module | None) -> torch.Tensor:
        split = rows.unflatten(-1, (-1, self.head_dim))
        return (split if norm is None else norm(split)).transpose(1, 2)


class HeadMLP(nn.Module):
    """SiLU-gated feed-forward."""

    def __init__(self, description: PreTrainedConfig) -> None:
        super().__init__()
        size, inner_size = description.hidden_size, description.intermediate_size
        has_bias = bool(getattr(description, "mlp_bias", False))
        self.gate_proj = nn.Linear(size, inner_size, bias=has_bias)
        self.up_proj = nn.Linear(size, inner_size, bias=has_bias)
        self.down_proj = nn.Linear(inner_size, size, bias=has_bias)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(rows)) * self.up_proj(rows))


def fused_linear(parts: Sequence[nn.Linear]) -> nn.Module:
    """Fuse linears with the same input: all with a bias, or none."""
    biases: list[torch.Tensor] = [part.bias for part in parts if part.bias is not None]
    return make_linear(torch.cat([*(part.weight for part in parts)]), torch.cat(biases) if biases else None)


def make_lean(head: nn.Module, *, fuses_attention: bool = True) -> None:
    """Fuse and pack a head's linears for serving; results stay the same."""
    for parent in list(head.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, HeadAttention) and fuses_attention:
                child.fuse()
            elif isinstance(child, HeadMLP):
                gate_up = fused_linear([child.gate_proj, child.up_proj])
                down = make_linear(child.down_proj.weight, child.down_proj.bias)
                setattr(parent, name, GatedMLP(gate_up, down, "silu", TensorParallelGroup.single()))
    pack_linears(head)


class HeadLayer(nn.Module):
    """A decoder layer as the target's; EAGLE-1's has no norm before attention."""

    def __init__(self, description: PreTrainedConfig, *, has_input_norm: bool = True) -> None:
        super().__init__()
        self.input_layernorm = make_norm(description) if has_input_norm else nn.Identity()
        self.self_attn = HeadAttention(description, description.hidden_size)
        self.post_attention_layernorm = make_norm(description)
        self.mlp = HeadMLP(description)

    def forward(
        self, hidden: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], attend: Attend
    ) -> torch.Tensor:  # [batch, length, hidden_size]
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotary, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DraftHead(nn.Module):
    """A drafter on the target's hidden states; EAGLE-1, EAGLE-3 and MTP have one layer and differ in their inputs.

    Submodules are named as in the public checkpoint format: `state_dict` without `borrowed` is that format.
    """

    words: ClassVar[str] = "a head"
    is_in_target: ClassVar[bool] = False  # its checkpoint may be the target's, which has all embeddings
    fuses_attention: ClassVar[bool] = True  # for serving
    not_captured: str | None = None  # why no graph can be made of its steps; None: it can

    embed_tokens: nn.Embedding
    lm_head: nn.Linear
    target_ids: torch.Tensor | None  # [draft_vocab_size] target id of each draft token; None: the same

    def __init__(self, description: PreTrainedConfig, *, taps: Sequence[int], state_size: int) -> None:
        super().__init__()
        self.description = description
        self.taps = tuple(taps)  # as in `DraftNeeds`
        self.state_size = state_size  # values of one token's states, over all taps
        self.vocab_size: int = description.vocab_size  # the target's
        self.max_positions = own_limit(description)
        self.borrowed: frozenset[str] = frozenset()  # the target's tensors: not saved with the head
        self.register_buffer("target_ids", None, persistent=False)
        self.rotary = self.make_rotary()

    def make_rotary(self) -> nn.Module:
        """Return the rotary embedding of its layer, as all families describe it."""
        require_family(self.description)
        with torch.device("cpu"):  # computed, not loaded: never on the meta device
            return LlamaRotaryEmbedding(cast(LlamaConfig, self.description))

    @property
    def hidden_size(self) -> int:
        return self.description.hidden_size

    @property
    def layer_shape(self) -> LayerShape:
        """The shape of its layer's KV per pair."""
        head_dim = head_dim_of(self.description)
        return LayerShape(num_kv_heads=self.description.num_key_value_heads, head_dim=head_dim, value_dim=head_dim)

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """Project the target's tapped states [..., state_size] to the head's: [..., hidden_size]."""
        return states

    @abstractmethod
    def forward(
        self,
        token_ids: torch.Tensor,  # int64 [batch, length]
        hidden: torch.Tensor,  # [batch, length, hidden_size] states of the previous tokens
        positions: torch.Tensor,  # int64 [batch, length] of those states
        attend: Attend = attend_causally,
    ) -> HeadOutput: ...

    @classmethod
    @abstractmethod
    def begin(cls, files: HeadFiles, num_target_layers: int | None) -> tuple[Self, TensorNames]:
        """Return a head of a checkpoint's shape on the meta device; what it holds by other means is there already."""

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        *,
        target: TensorSource | None = None,
        num_target_layers: int | None = None,
        device: torch.device = CPU,
        dtype: str = "float32",
    ) -> Self:
        """Load a checkpoint of any format of its kind; embeddings that it lacks are the `target`'s.

        `num_target_layers` gives the taps that a config does not name. Raises `ValueError` naming the file, field or
        tensor, with both shapes if they differ.
        """
        with opened(folder) as files:
            head, names = cls.begin(files, num_target_layers)
            lender = files.source if target is None and cls.is_in_target else target
            _fill(head, files, lender, names, device, resolve_dtype(dtype, head.description, device))
        head.finish()
        return head.eval()

    def finish(self) -> None:
        """Prepare a head whose tensors are there for serving."""

    def borrow_embedding(self, weight: torch.Tensor) -> None:
        """Use the target's embedding [vocab_size, hidden_size]: frozen, and not saved with the head."""
        if weight.shape != self.embed_tokens.weight.shape:
            expected = tuple(self.embed_tokens.weight.shape)
            raise HeadError(f"the target's embedding has shape {tuple(weight.shape)}, the head expects {expected}")
        self.embed_tokens.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.borrowed |= {"embed_tokens.weight"}

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """Return [..., draft_vocab_size]."""
        return self.lm_head(output)

    def in_target_ids(self, logits: torch.Tensor) -> torch.Tensor:
        """Scatter draft logits into the target's vocabulary; other tokens get -inf."""
        if self.target_ids is None:
            return logits
        spread = logits.new_full((*logits.shape[:-1], self.vocab_size), float("-inf"))
        spread[..., self.target_ids] = logits
        return spread


def make_norm(description: PreTrainedConfig, size: int | None = None) -> nn.RMSNorm:
    return nn.RMSNorm(size or description.hidden_size, eps=description.rms_norm_eps)


def head_dim_of(description: PreTrainedConfig) -> int:
    return getattr(description, "head_dim", None) or description.hidden_size // description.num_attention_heads


# --- reading checkpoints ---


def describe_layer(config: Mapping[str, Any]) -> PreTrainedConfig:
    """Build the transformers config of a head's decoder layer; raises `HeadError`."""
    model_type = str(config.get("model_type", "llama"))
    if model_type not in LAYER_FAMILIES:
        raise HeadError(f"model_type: a head with a layer of {model_type!r} is not served")
    rest = {name: value for name, value in config.items() if name not in ("model_type", "architectures", "auto_map")}
    try:
        description = AutoConfig.for_model(model_type, **rest)
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise HeadError(f"the layer's config does not hold together: {error}") from error
    require_family(description)
    return description


def require_family(description: PreTrainedConfig) -> None:
    """Raise `HeadError`, naming the field, for a layer that `HeadLayer` would compute wrongly."""
    if description.model_type not in LAYER_FAMILIES:
        raise HeadError(f"model_type: a head with a layer of {description.model_type!r} is not served")
    if getattr(description, "hidden_act", "silu") != "silu":
        raise HeadError(f"hidden_act: {description.hidden_act!r} is not served, only silu")
    rope_type = batch_dependent_rope(getattr(description, "rope_parameters", None))
    if rope_type is not None:
        raise HeadError(f"rope type {rope_type!r} depends on the longest position of the batch")
    has_window = description.model_type == "mistral" and description.sliding_window is not None
    if has_window or "sliding_attention" in (getattr(description, "layer_types", None) or ())[:1]:
        raise HeadError("sliding_window: a head whose attention has a window is not served")


SomeHead = TypeVar("SomeHead", bound=DraftHead)


def load_heads(
    kind: type[SomeHead],
    folders: Sequence[Path],
    config: ModelConfig,
    *,
    target: Path | None = None,
    num_target_layers: int | None = None,
) -> list[SomeHead]:
    """Load heads of one kind, ready to serve on the config's device in its dtype.

    `target` is the folder whose embeddings heads without their own use. Raises `ValueError` naming what is wrong.
    """
    if config.tensor_parallel_size != 1:
        raise HeadError(f"tensor_parallel_size: {config.tensor_parallel_size}, {kind.words} runs on one device")
    device = resolve_device(config.device)
    with ExitStack() as stack:
        source = None if target is None else stack.enter_context(open_checkpoint(target))
        heads = [
            kind.from_folder(
                folder, target=source, num_target_layers=num_target_layers, device=device, dtype=config.dtype
            )
            for folder in folders
        ]
    for head in heads:
        make_lean(head, fuses_attention=kind.fuses_attention)
    return heads


def _fill(
    head: DraftHead,
    files: HeadFiles,
    target: TensorSource | None,
    names: TensorNames,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Load the tensors of a head on the meta device; missing embeddings are the target's."""
    borrowed: set[str] = set()
    for name, empty in head.state_dict().items():
        stored = names.stored(name)
        if stored in files or name not in SHARED:
            value = files.take(stored, empty.shape, dtype, names.aliases)
        else:
            value = _borrowed(name, tuple(empty.shape), files, target).to(dtype)
            borrowed.add(name)
        owner, _, leaf = name.rpartition(".")
        setattr(head.get_submodule(owner), leaf, nn.Parameter(value.to(device), requires_grad=False))
    for name in filter(names.skipped.search, files.names):
        files.skip(name)
    files.require_all_taken()
    head.borrowed = frozenset(borrowed)
    head.rotary.to(device)
    if head.target_ids is not None:
        head.target_ids = head.target_ids.to(device)


def _borrowed(name: str, shape: tuple[int, ...], files: HeadFiles, target: TensorSource | None) -> torch.Tensor:
    if target is None:
        raise files.error(f"tensor {name!r} is missing, and no target was given to take it from")
    for pattern in SHARED[name]:
        found = sorted((there for there in target.names if re.search(pattern, there)), key=len)
        if not found:
            continue
        if target.shape(found[0]) != shape:
            there = f"the target's {found[0]!r} has shape {target.shape(found[0])}"
            raise WeightError(f"{there}, the head in {files.folder} expects {shape}")
        return target.read(found[0])
    raise files.error(f"tensor {name!r} is missing, and the target has none either")


def unborrowed(head: DraftHead) -> dict[str, torch.Tensor]:
    """Return the tensors that are saved with a head."""
    return {name: tensor.detach() for name, tensor in head.state_dict().items() if name not in head.borrowed}
