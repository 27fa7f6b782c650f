"""DFlash: a block-diffusion drafter whose layers attend to the target's hidden states, all positions in one pass.

"DFlash: Block Diffusion for Flash Speculative Decoding" (arXiv 2602.06036). Each token's tapped target states are
concatenated and projected to one feature, from which every layer computes keys and values: these are the whole context.
The block (the last committed token, then masks) attends to the context and bidirectionally to itself; a mask's output
is the law of the token at its own position. Context tokens do not attend to each other, so new ones cost a matrix
product.

tokens   x0 ... x[n-2]          x[n-1]  mask  mask  mask
keys     of the target's states of the block itself, seen by all of it
gives    nothing                (x[n])  x[n]  x[n+1] ...      at x[n-1] only with `sample_from_anchor`

DSpark and DFlash2 are DFlash with parts that let a guess know the token before it (`block_edges`).

Two public formats with the same tensors are read: the authors' (`dflash_config`, where layer l means the output of
layer l) and the `speculators` library's (`aux_hidden_state_layer_ids`, where l means the input of layer l).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import rotate_half

from outrider.drafter_service.heads.block_edges import (
    CandidateSelector,
    ConfidenceHead,
    ConvolvedLayer,
    EdgesConfig,
    MarkovHead,
)
from outrider.drafter_service.heads.head_files import HeadFiles
from outrider.drafter_service.heads.head_layer import (
    EXTRAS,
    LAYER_FAMILIES,
    META,
    Attend,
    DraftHead,
    HeadError,
    HeadLayer,
    TensorNames,
    describe_layer,
    make_norm,
)

_MASK_EMBEDDING = "mask_embedding.pt"
_HEAD_FIELDS = frozenset({"dflash_config", "block_size", "num_target_layers", "target_hidden_size", "draft_vocab_size"})
_SERVED = frozenset({"mask_token_id", "target_layer_ids", "block_size", "sample_from_anchor"})  # of dflash_config
# fields that are rarely present, with their neutral values
_PLAIN = {"logit_scale": 1.0, "is_causal": False, "is_neox_style": True, "add_swa_attention_sink_bias": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig:
    """The shape of a DFlash drafter; `layer` describes its decoder layers and the target's vocabulary."""

    layer: PreTrainedConfig
    taps: tuple[int, ...]  # target layers whose input it reads
    draft_vocab_size: int
    target_hidden_size: int
    mask_token_id: int
    block_size: int  # tokens of a block, including the last committed one
    sample_from_anchor: bool = False  # the first guess is the last committed token's row
    edges: EdgesConfig = field(default_factory=EdgesConfig)

    def __post_init__(self) -> None:
        if not self.taps or min(self.taps) < 0 or len(set(self.taps)) != len(self.taps):
            raise HeadError(f"target_layer_ids: {list(self.taps)} are not different layers of the target")
        if not _is_integer(self.mask_token_id) or not 0 <= self.mask_token_id < self.layer.vocab_size:
            raise HeadError(f"mask_token_id: {self.mask_token_id!r} of a vocabulary of {self.layer.vocab_size}")
        if not _is_integer(self.block_size) or self.block_size < 2:
            raise HeadError(f"block_size: {self.block_size!r}, a block has two tokens at least")
        if not 1 <= self.draft_vocab_size <= self.layer.vocab_size:
            raise HeadError(f"draft_vocab_size: {self.draft_vocab_size} of a vocabulary of {self.layer.vocab_size}")
        if set(getattr(self.layer, "layer_types", None) or ()) - {"full_attention"}:
            raise HeadError("layer_types: a DFlash drafter with a sliding window is not served")

    @property
    def num_guesses(self) -> int:
        """The number of tokens that one block guesses."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1


class DFlashHead(DraftHead):
    """A DFlash drafter; a new one has random weights, and needs the target's embeddings."""

    words = "a DFlash drafter"
    fuses_attention = False  # contexts have keys and values, and no queries

    def __init__(self, config: DFlashConfig, *, target_ids: torch.Tensor | None = None) -> None:
        """Create a drafter of the tokens `target_ids` int64 [draft_vocab_size]; None: of all tokens."""
        super().__init__(config.layer, taps=config.taps, state_size=config.target_hidden_size * len(config.taps))
        self.config = config
        size = config.layer.hidden_size
        self.embed_tokens = nn.Embedding(self.vocab_size, size)
        self.fc = nn.Linear(self.state_size, size, bias=False)
        self.hidden_norm = make_norm(config.layer)
        self.layers = nn.ModuleList(_make_layer(config) for _ in range(config.layer.num_hidden_layers))
        self.norm = make_norm(config.layer)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.target_ids = target_ids
        edges = config.edges
        if edges.markov_rank:
            self.markov_head = MarkovHead(self.vocab_size, config.draft_vocab_size, edges.markov_rank)
        if edges.has_confidence:
            self.confidence_head = ConfidenceHead(size + edges.markov_rank * edges.confidence_reads_token)
        if edges.selector_rank:
            self.candidate_selector = CandidateSelector(
                self.vocab_size, size, edges.selector_rank, edges.selector_top_k
            )

    @property
    def has_edges(self) -> bool:
        """Whether a guess depends on the token before it."""
        return bool(self.config.edges.markov_rank or self.config.edges.selector_rank)

    def after(self, hidden: torch.Tensor, previous: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the logits of rows after these tokens, and the chance that what is drawn from them is accepted.

        hidden [num_rows, hidden_size] from `forward`, previous int64 [num_rows]; [num_rows, draft_vocab_size] and
        [num_rows], None: it has no opinion.
        """
        edges, logits = self.config.edges, self.logits(hidden)
        for part in (getattr(self, name, None) for name in ("markov_head", "candidate_selector")):
            logits = logits if part is None else part(hidden, logits, previous)
        if not edges.has_confidence:
            return logits, None
        features = [hidden, self.markov_head.markov_w1(previous)] if edges.confidence_reads_token else [hidden]
        return logits, self.confidence_head(torch.cat(features, dim=-1))

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        return self.hidden_norm(self.fc(states))

    def context_kv(self, features: torch.Tensor, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the keys and values of context tokens per layer: [num_tokens, num_kv_heads, head_dim] each.

        features [num_tokens, hidden_size] from `combine`, positions int64 [num_tokens].
        """
        cos, sin = (part[0, :, None] for part in self.rotary(features, positions[None]))  # [num_tokens, 1, head_dim]
        return [_keys_and_values(layer, features, cos, sin) for layer in self.layers]

    def forward(  # type: ignore[override]  # a block's tokens have no states
        self,
        token_ids: torch.Tensor,  # int64 [num_blocks, block_size]
        positions: torch.Tensor,  # int64 [num_blocks, block_size]
        attends: Sequence[Attend],  # per layer: attention to the context and to the block
    ) -> torch.Tensor:
        """Return the output embedding's input: [num_blocks, block_size, hidden_size]."""
        hidden = self.embed_tokens(token_ids)
        rotary = self.rotary(hidden, positions)
        for layer, attend in zip(self.layers, attends, strict=True):
            hidden = layer(hidden, rotary, attend)
        return self.norm(hidden)

    @classmethod
    def begin(cls, files: HeadFiles, num_target_layers: int | None) -> tuple[DFlashHead, TensorNames]:
        if (files.folder / _MASK_EMBEDDING).is_file():
            raise HeadError(f"{files.folder}: {_MASK_EMBEDDING}: a mask outside of the embedding is not served")
        config = parse_config(files.config, num_target_layers)
        with META:
            head = cls(config)
        head.target_ids = _read_target_ids(files, config)
        return head, TensorNames(skipped=EXTRAS)


def _make_layer(config: DFlashConfig) -> HeadLayer:
    return ConvolvedLayer(config.layer, config.edges) if config.edges.conv_kernel_size else HeadLayer(config.layer)


def _keys_and_values(
    layer: nn.Module, features: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    assert isinstance(layer, HeadLayer)
    attention = layer.self_attn
    assert attention.k_norm is not None
    key = attention.k_norm(attention.k_proj(features).unflatten(-1, (-1, attention.head_dim)))
    value = attention.v_proj(features).unflatten(-1, (-1, attention.head_dim))
    return key * cos + rotate_half(key) * sin, value


def parse_config(config: Mapping[str, Any], num_target_layers: int | None = None) -> DFlashConfig:
    """Read a config of either format; raises `HeadError` naming a missing or unsupported field."""
    for name, plain in _PLAIN.items():
        if config.get(name) not in (None, plain):
            raise HeadError(f"{name}: {config[name]!r} is not served")
    if "transformer_layer_config" in config:
        return _parse_speculators(config, num_target_layers)
    return _parse_original(config, num_target_layers)


def _parse_speculators(config: Mapping[str, Any], num_target_layers: int | None) -> DFlashConfig:
    kind = config.get("speculators_model_type")
    if kind not in _EDGES:
        raise HeadError(f"speculators_model_type: {kind!r}, expected one of {', '.join(_EDGES)}")
    plain = {"dtype": config.get("dtype") or config.get("torch_dtype"), **config["transformer_layer_config"]}
    layer = _describe(plain)
    taps = _require(config, "aux_hidden_state_layer_ids")
    return DFlashConfig(
        layer=layer,
        taps=_checked_taps(taps, "aux_hidden_state_layer_ids", num_target_layers),
        draft_vocab_size=config.get("draft_vocab_size") or layer.vocab_size,
        target_hidden_size=config.get("target_hidden_size") or layer.hidden_size,
        mask_token_id=_require(config, "mask_token_id"),
        block_size=_require(config, "block_size"),
        sample_from_anchor=bool(config.get("sample_from_anchor", kind == "dspark")),
        edges=_EDGES[kind](config),
    )


def _dspark_edges(config: Mapping[str, Any]) -> EdgesConfig:
    if (kind := config.get("markov_head_type", "vanilla")) != "vanilla":
        raise HeadError(f"markov_head_type: {kind!r} is not served")
    rank = config.get("markov_rank", 256)
    return EdgesConfig(
        markov_rank=rank,
        has_confidence=bool(config.get("enable_confidence_head", True)),
        confidence_reads_token=bool(config.get("confidence_head_with_markov", True)) and rank > 0,
    )


def _dflash2_edges(config: Mapping[str, Any]) -> EdgesConfig:
    return EdgesConfig(
        selector_rank=config.get("selector_rank", 256),
        selector_top_k=config.get("selector_top_k", 16),
        conv_kernel_size=config.get("conv_kernel_size", 2),
        conv_group_size=config.get("conv_group_size", 16),
    )


# the parts of each kind of the `speculators` library's, by its name
_EDGES: dict[str, Callable[[Mapping[str, Any]], EdgesConfig]] = {
    "dflash": lambda config: EdgesConfig(),
    "dspark": _dspark_edges,
    "dflash2": _dflash2_edges,
}


def _parse_original(config: Mapping[str, Any], num_target_layers: int | None) -> DFlashConfig:
    own = _require(config, "dflash_config")
    for name in sorted(own.keys() - _SERVED):
        if own[name]:  # a feature that is off changes nothing
            raise HeadError(f"dflash_config.{name}: {own[name]!r} is not served")
    layer = _describe({name: value for name, value in config.items() if name not in _HEAD_FIELDS})
    target_layers = _require(own, "target_layer_ids")
    taps = [index + 1 if _is_integer(index) else index for index in target_layers]
    return DFlashConfig(
        layer=layer,
        taps=_checked_taps(taps, "dflash_config.target_layer_ids + 1", num_target_layers),
        draft_vocab_size=config.get("draft_vocab_size") or layer.vocab_size,
        target_hidden_size=config.get("target_hidden_size") or layer.hidden_size,
        mask_token_id=_require(own, "mask_token_id"),
        block_size=config.get("block_size") or _require(own, "block_size"),
        sample_from_anchor=bool(own.get("sample_from_anchor")),
    )


def _require(config: Mapping[str, Any], name: str) -> Any:
    if config.get(name) is None:
        raise HeadError(f"{name}: not in the config of a DFlash drafter")
    return config[name]


def _describe(plain: Mapping[str, Any]) -> PreTrainedConfig:
    """Describe the layers: qwen3's (query and key norms), whichever model type of the family the config names."""
    family = plain.get("model_type", "qwen3")
    if family not in LAYER_FAMILIES:
        raise HeadError(f"model_type: a DFlash drafter with layers of {family!r} is not served")
    described = {name: value for name, value in plain.items() if value is not None}
    if family != "qwen3" and "head_dim" not in described:
        described["head_dim"] = int(_require(plain, "hidden_size")) // int(_require(plain, "num_attention_heads"))
    return describe_layer({**described, "model_type": "qwen3"})


def _checked_taps(taps: Sequence[Any], name: str, num_target_layers: int | None) -> tuple[int, ...]:
    if not all(map(_is_integer, taps)):
        raise HeadError(f"{name}: {list(taps)} are no layers")
    if num_target_layers is not None and taps and max(taps) >= num_target_layers:
        raise HeadError(f"{name}: {list(taps)}, inputs of layers, of a target with {num_target_layers} layers")
    return tuple(taps)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _read_target_ids(files: HeadFiles, config: DFlashConfig) -> torch.Tensor | None:
    """Convert offsets to the target's ids int64 [draft_vocab_size]; None: the vocabularies are equal."""
    num_ids, vocab_size = config.draft_vocab_size, config.layer.vocab_size
    if "d2t" not in files and num_ids == vocab_size:
        return None
    ids = files.take("d2t", (num_ids,), torch.int64) + torch.arange(num_ids)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(ids.unique()) != num_ids:
        raise files.error(f"tensor 'd2t': not {num_ids} different ids below {vocab_size}")
    return ids
