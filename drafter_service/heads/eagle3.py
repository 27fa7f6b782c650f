"""EAGLE-3: one decoder layer over states of three target layers and the embeddings of the next tokens.

Li et al. 2025 (arXiv 2503.01840). The tapped states are concatenated and projected (`fc`); attention reads them beside
the embedding, each with its own norm; the residual stream has the states only. The draft vocabulary is reduced: draft
token i is the target's i + d2t[i]. Two public formats are read and written: the authors' (`midlayer.*`) and the
`speculators` library's (`layers.0.*`, with the layer's config nested). Kimi-K2's heads have latent attention, which is
the transformers library's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedConfig

from outrider.drafter_service.heads.head_files import HeadFiles, write_head
from outrider.drafter_service.heads.head_layer import (
    CPU,
    EXTRAS,
    LAYER_FAMILIES,
    META,
    Attend,
    DraftHead,
    HeadAttention,
    HeadError,
    HeadMLP,
    HeadOutput,
    TensorNames,
    attend_causally,
    describe_layer,
    make_norm,
    unborrowed,
)
from outrider.drafter_service.heads.library_block import LibraryBlock, describe_latent, in_pool, over_rows_of
from outrider.verifier_service.model.attention import LayerShape, entered
from outrider.verifier_service.model.latent_attention import keep_latents

ORIGINAL_LAYER, SPECULATORS_LAYER = "midlayer.", "layers.0."


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """The shape of an EAGLE-3 head; `layer` describes its decoder layer and the target's vocabulary."""

    layer: PreTrainedConfig
    taps: tuple[int, ...]  # target layers whose input it reads
    draft_vocab_size: int
    target_hidden_size: int
    norm_before_residual: bool = False  # the residual stream starts at the normed states
    norm_before_fc: bool = False  # one norm over the concatenated states
    fc_norm: bool = False  # a norm for each tapped state
    norm_output: bool = False  # the fed-back state is after the final norm

    def __post_init__(self) -> None:
        if self.layer.num_hidden_layers != 1:
            raise HeadError(f"num_hidden_layers: {self.layer.num_hidden_layers}, an EAGLE-3 head is served with 1")
        if not self.taps or min(self.taps) < 0:
            raise HeadError(f"eagle_aux_hidden_state_layer_ids: {list(self.taps)} are not layers of the target")
        if not 1 <= self.draft_vocab_size <= self.layer.vocab_size:
            raise HeadError(f"draft_vocab_size: {self.draft_vocab_size} of a vocabulary of {self.layer.vocab_size}")
        if self.norm_before_fc and self.fc_norm:
            raise HeadError("fc_norm: not together with norm_before_fc")


class Eagle3Layer(nn.Module):
    """A decoder layer whose attention reads embedding and state, concatenated."""

    def __init__(self, config: Eagle3Config, latent: nn.Module | None = None) -> None:
        """`latent` is the library's latent attention; None: our grouped-query attention."""
        super().__init__()
        self._norm_before_residual = config.norm_before_residual
        self.input_layernorm = make_norm(config.layer)
        self.hidden_norm = make_norm(config.layer)
        self._is_latent = latent is not None
        self.self_attn = HeadAttention(config.layer, 2 * config.layer.hidden_size) if latent is None else latent
        self.post_attention_layernorm = make_norm(config.layer)
        self.mlp = HeadMLP(config.layer)

    def forward(
        self,
        embedding: torch.Tensor,  # [batch, length, hidden_size]
        hidden: torch.Tensor,  # [batch, length, hidden_size]
        rotary: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
    ) -> torch.Tensor:
        normed = self.hidden_norm(hidden)
        rows = torch.cat([self.input_layernorm(embedding), normed], dim=-1)
        residual = normed if self._norm_before_residual else hidden
        hidden = residual + self._attended(rows, rotary, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def _attended(self, rows: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], attend: Attend) -> torch.Tensor:
        if not self._is_latent:
            return self.self_attn(rows, rotary, attend)
        with entered(in_pool(attend)):
            return self.self_attn(hidden_states=rows, position_embeddings=rotary, attention_mask=None)[0]


class Eagle3Head(DraftHead):
    """An EAGLE-3 head; a new one has random weights, and needs the target's embedding."""

    _latent: nn.Module | None = None  # the library's latent attention

    def __init__(self, config: Eagle3Config, *, target_ids: torch.Tensor | None = None) -> None:
        """Create a head of the tokens `target_ids` int64 [draft_vocab_size]; None: the vocabulary's first ones."""
        state_size = config.target_hidden_size * len(config.taps)
        super().__init__(config.layer, taps=config.taps, state_size=state_size)
        self.config = config
        size = config.layer.hidden_size
        self.embed_tokens = nn.Embedding(self.vocab_size, size)
        self.input_norm = make_norm(config.layer, state_size) if config.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(make_norm(config.layer, config.target_hidden_size) for _ in config.taps)
            if config.fc_norm
            else None
        )
        self.fc = nn.Linear(state_size, size, bias=False)
        self.midlayer = Eagle3Layer(config, self._latent)
        self.norm = make_norm(config.layer)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.target_ids = _checked_target_ids(target_ids, config)

    def make_rotary(self) -> nn.Module:
        if self.description.model_type in LAYER_FAMILIES:
            return super().make_rotary()
        with CPU:  # what is computed is never on the meta device
            block = LibraryBlock(self.description)
        size = 2 * self.description.hidden_size
        self.__dict__["_latent"] = over_rows_of(block.layer.self_attn, size)  # of the layer, which is built later
        self.not_captured = "latent attention of the library's is run operation by operation"
        return block.rotary

    @property
    def layer_shape(self) -> LayerShape:
        if self._latent is None:
            return super().layer_shape
        latent = self.description.kv_lora_rank
        return LayerShape(num_kv_heads=1, head_dim=latent + self.description.qk_rope_head_dim, value_dim=latent)

    def finish(self) -> None:
        keep_latents(self.midlayer)

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            parts = states.chunk(len(self.fc_norm), dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(states)

    def forward(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend = attend_causally,
    ) -> HeadOutput:
        rotary = self.rotary(hidden, positions)
        hidden = self.midlayer(self.embed_tokens(token_ids), hidden, rotary, attend)
        normed = self.norm(hidden)
        return HeadOutput(output=normed, feedback=normed if self.config.norm_output else hidden)

    @classmethod
    def begin(cls, files: HeadFiles, num_target_layers: int | None) -> tuple[Eagle3Head, TensorNames]:
        config = parse_config(files.config, num_target_layers)
        with META:
            head = cls(config)
        head.target_ids = _read_target_ids(files, config)
        places = [prefix + layer for prefix in ("", "model.") for layer in (ORIGINAL_LAYER, SPECULATORS_LAYER)]
        place = next((place for place in places if f"{place}hidden_norm.weight" in files), SPECULATORS_LAYER)
        prefix = "model." if place.startswith("model.") else ""

        def stored(name: str) -> str:
            if name.startswith(ORIGINAL_LAYER):
                return place + name.removeprefix(ORIGINAL_LAYER)
            return name if name.startswith("lm_head.") else prefix + name

        return head, TensorNames(stored, EXTRAS)

    def save(self, folder: Path, *, layout: Literal["original", "speculators"] = "original") -> None:
        """Write the checkpoint in the authors' or the `speculators` format, without the target's tensors."""
        tensors = unborrowed(self)
        if self.target_ids is not None:
            own_ids = torch.arange(self.config.draft_vocab_size, device=self.target_ids.device)
            tensors["d2t"] = self.target_ids - own_ids
            tensors["t2d"] = torch.zeros(self.vocab_size, dtype=torch.bool).index_fill_(0, self.target_ids.cpu(), True)
        if layout == "speculators":
            renamed = {name.replace(ORIGINAL_LAYER, SPECULATORS_LAYER): tensor for name, tensor in tensors.items()}
            write_head(folder, _speculators_config(self.config), renamed)
        else:
            write_head(folder, _original_config(self.config), tensors)


def default_taps(num_target_layers: int) -> tuple[int, ...]:
    """Return the layers that the authors tap: an early, the middle and a late one."""
    return (2, num_target_layers // 2, num_target_layers - 3)


def parse_config(config: Mapping[str, Any], num_target_layers: int | None = None) -> Eagle3Config:
    """Read either format's config.json; raises `HeadError` naming the field."""
    is_nested = "transformer_layer_config" in config
    if is_nested and config.get("speculators_model_type") != "eagle3":
        raise HeadError(f"speculators_model_type: {config.get('speculators_model_type')!r} is not an EAGLE-3 head")
    eagle_config = dict(config.get("eagle_config") or {})
    if not eagle_config.get("use_aux_hidden_state", True):
        raise HeadError("eagle_config.use_aux_hidden_state: an EAGLE-3 head without tapped states is not served")
    if config.get("logit_scale", 1.0) != 1.0:
        raise HeadError(f"logit_scale: {config['logit_scale']} is not served")
    plain = config["transformer_layer_config"] if is_nested else config
    described = {name: value for name, value in plain.items() if name not in _HEAD_FIELDS}
    layer = describe_latent(described) if plain.get("model_type") in _LATENT else describe_layer(described)
    flags = {name: bool(_either(config, eagle_config, name)) for name in _FLAGS}
    return Eagle3Config(
        layer=layer,
        taps=_taps(_either(config, eagle_config, "eagle_aux_hidden_state_layer_ids"), num_target_layers),
        draft_vocab_size=config.get("draft_vocab_size") or layer.vocab_size,
        target_hidden_size=config.get("target_hidden_size") or layer.hidden_size,
        **flags,
    )


_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_LATENT = ("deepseek_v3", "kimi_k2")  # layers with latent attention
_HEAD_FIELDS = frozenset(
    {*_FLAGS, "eagle_config", "eagle_aux_hidden_state_layer_ids", "draft_vocab_size", "target_hidden_size"}
)


def _either(config: Mapping[str, Any], eagle_config: Mapping[str, Any], name: str) -> Any:
    return eagle_config[name] if name in eagle_config else config.get(name)


def _taps(named: Sequence[int] | None, num_target_layers: int | None) -> tuple[int, ...]:
    if not named:
        if num_target_layers is None:
            raise HeadError("eagle_aux_hidden_state_layer_ids: not in the config, and the target's depth is not known")
        return default_taps(num_target_layers)
    if num_target_layers is not None and max(named) >= num_target_layers:
        raise HeadError(f"eagle_aux_hidden_state_layer_ids: {list(named)} of a target with {num_target_layers} layers")
    return tuple(named)


def _read_target_ids(files: HeadFiles, config: Eagle3Config) -> torch.Tensor | None:
    """Convert offsets to ids; a head with the whole vocabulary may have none."""
    if "d2t" not in files and config.draft_vocab_size == config.layer.vocab_size:
        return None
    offsets = files.take("d2t", (config.draft_vocab_size,), torch.int64)
    return _checked_target_ids(offsets + torch.arange(config.draft_vocab_size), config)


def _checked_target_ids(ids: torch.Tensor | None, config: Eagle3Config) -> torch.Tensor | None:
    """Return None for the identity; raises `HeadError` unless the ids are distinct tokens."""
    num_ids = config.draft_vocab_size
    if ids is None:
        return None if num_ids == config.layer.vocab_size else torch.arange(num_ids)
    if ids.shape != (num_ids,) or ids.dtype != torch.int64:
        raise HeadError(f"d2t: expected int64 [{num_ids}], found {ids.dtype} {list(ids.shape)}")
    if int(ids.min()) < 0 or int(ids.max()) >= config.layer.vocab_size or len(ids.unique()) != num_ids:
        raise HeadError(f"d2t: not {num_ids} different ids below {config.layer.vocab_size}")
    is_identity = num_ids == config.layer.vocab_size and bool((ids == torch.arange(num_ids, device=ids.device)).all())
    return None if is_identity else ids


def _original_config(config: Eagle3Config) -> dict[str, Any]:
    flags = {name: True for name in _FLAGS if getattr(config, name)}
    return {
        **config.layer.to_diff_dict(),
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(config.taps)},
        **flags,
    }


def _speculators_config(config: Eagle3Config) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": None, "architectures": []},
        },
        "transformer_layer_config": {**config.layer.to_diff_dict(), "model_type": config.layer.model_type},
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(config.taps),
        **{name: getattr(config, name) for name in _FLAGS},
    }
