"""Medusa heads (Cai et al. 2024, arXiv 2401.10774): each guesses one later token from the target's last hidden state.

Head k reads the state of token t (after the target's final norm) and guesses token t+2+k; token t+1 is the target's.
A head is `num_layers` residual blocks x + SiLU(Wx + b) and an output embedding. Heads do not see each other's guesses:
given the state, their laws are independent.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outrider.drafter_service.heads.head_files import HeadFiles, opened, write_head
from outrider.verifier_service.formats.quantized import open_checkpoint

FILE_NAME = "medusa_lm_head.safetensors"
_PREFIX = r"^(?:medusa_heads?\.)?"
_ORIGINAL = re.compile(_PREFIX + r"(?P<head>\d+)\.(?P<layer>\d+)\.(?P<rest>linear\.weight|linear\.bias|weight)$")
_RENAMED = re.compile(_PREFIX + r"(?P<name>(?:blocks|lm_heads)\.\d+\..+|lm_head\.weight|token_map)$")


class ResidualBlock(nn.Module):
    """`num_layers` times x + SiLU(Wx + b)."""

    def __init__(self, hidden_size: int, num_layers: int, *, has_bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden_size, hidden_size, bias=has_bias) for _ in range(num_layers))

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] -> the same shape."""
        for layer in self.layers:
            state = state + nn.functional.silu(layer(state))
        return state


class MedusaHeads(nn.Module):
    """All heads; parameters are named as in vLLM's layout (`blocks.*`, `lm_heads.*`)."""

    token_map: torch.Tensor | None  # int64 [head_vocab_size]: target id of each row of the output embeddings

    def __init__(
        self,
        *,
        hidden_size: int,
        vocab_size: int,
        num_heads: int,
        num_layers: int = 1,
        has_bias: bool = True,
        token_map: torch.Tensor | None = None,
        shares_lm_head: bool = False,
        logit_scale: float = 1.0,
    ) -> None:
        """Create heads with random weights, for ids below `vocab_size`, or those of `token_map`.

        `shares_lm_head`: all heads use the target's output embedding.
        """
        super().__init__()
        if min(hidden_size, vocab_size, num_heads) < 1 or num_layers < 0:
            raise ValueError("hidden_size, vocab_size and num_heads must be positive, num_layers not negative")
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.num_heads, self.num_layers, self.has_bias = num_heads, num_layers, has_bias
        self.shares_lm_head, self.logit_scale = shares_lm_head, logit_scale
        self.register_buffer("token_map", token_map)
        self.blocks = nn.ModuleList(ResidualBlock(hidden_size, num_layers, has_bias=has_bias) for _ in range(num_heads))
        head_vocab_size = vocab_size if token_map is None else len(token_map)
        num_lm_heads = 1 if shares_lm_head else num_heads
        self.lm_heads = nn.ModuleList(nn.Linear(hidden_size, head_vocab_size, bias=False) for _ in range(num_lm_heads))

    @classmethod
    def from_folder(
        cls, path: Path | str, *, dtype: torch.dtype = torch.float32, target_lm_head: torch.Tensor | None = None
    ) -> MedusaHeads:
        """Read a checkpoint: FasterDecoding's original tensor names or vLLM's. Raises `ValueError` naming the tensor.

        `target_lm_head` [vocab_size, hidden_size] is used if the checkpoint shares the target's output embedding and
        does not contain it.
        """
        with opened(path) as files:
            return _read(files, dtype, target_lm_head).eval()

    def save(self, folder: Path | str, *, dtype: torch.dtype | None = None) -> None:
        """Write `config.json` and the tensors under their original names, which vLLM and TGI also read."""
        tensors = {_original_name(name, self.num_layers): tensor for name, tensor in self.state_dict().items()}
        write_head(folder, self._config(), tensors, dtype=dtype, file_name=FILE_NAME)

    def forward(self, state: torch.Tensor, num_heads: int | None = None) -> torch.Tensor:
        """Return the first heads' logits: [..., hidden_size] -> [num_heads, ..., vocab_size].

        Ids outside `token_map` get -inf.
        """
        assert state.shape[-1] == self.hidden_size, (state.shape, self.hidden_size)
        blocks = list(self.blocks)[:num_heads]
        logits = torch.stack([self._lm_head(index)(block(state)) for index, block in enumerate(blocks)])
        logits = logits * self.logit_scale  # [num_heads, ..., head_vocab_size]
        if self.token_map is None:
            return logits
        full = logits.new_full((*logits.shape[:-1], self.vocab_size), float("-inf"))
        return full.index_copy(-1, self.token_map, logits)

    def _lm_head(self, index: int) -> nn.Module:
        return self.lm_heads[0 if self.shares_lm_head else index]

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "medusa_num_heads": self.num_heads,
            "medusa_num_layers": self.num_layers,
            "medusa_fc_bias": self.has_bias,
        }
        if self.token_map is not None:
            config["truncated_vocab_size"] = len(self.token_map)
        if self.shares_lm_head:
            config["original_lm_head"] = True
        if self.logit_scale != 1.0:
            config["logit_scale"] = self.logit_scale
        return config


def _original_name(name: str, num_layers: int) -> str:
    """Rename `blocks.{head}.layers.{layer}.*` and `lm_heads.{head}.weight` to original names; others stay."""
    parts = name.split(".")
    if parts[0] == "blocks":
        return f"{parts[1]}.{parts[3]}.linear.{parts[4]}"
    return f"{parts[1]}.{num_layers}.weight" if parts[0] == "lm_heads" else name


# --- reading ---


def target_lm_head(folder: Path) -> torch.Tensor | None:
    """Read a target's output embedding, for heads that share it; None: it has none by the usual names."""
    with open_checkpoint(folder) as target:
        name = next((name for name in ("lm_head.weight", "model.embed_tokens.weight") if name in target), None)
        return None if name is None else target.read(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """A checkpoint's tensor names, numbers of heads and layers."""

    sources: dict[str, str]  # by the name in `MedusaHeads`
    num_heads: int
    num_layers: int
    is_original: bool

    def source(self, name: str) -> str:
        """Return a tensor's name in the checkpoint; of a missing one, the expected name."""
        return self.sources.get(name, _original_name(name, self.num_layers) if self.is_original else name)


def _layout(files: HeadFiles) -> _Layout:
    """Recognise a layout by its tensors' names."""
    renamed = {match["name"]: name for name in files.names if (match := _RENAMED.match(name))}
    original = {name: match for name in files.names if (match := _ORIGINAL.match(name))}
    if original:
        return _original_layout(files, original, renamed)
    heads = {int(name.split(".")[1]) for name in renamed if name.startswith("blocks.")}
    layers = {int(match[1]) for name in renamed if (match := re.match(r"blocks\.\d+\.layers\.(\d+)\.", name))}
    if not heads:
        raise files.error(
            "no Medusa heads: expected tensors such as '0.0.linear.weight' or 'blocks.0.layers.0.weight', "
            f"found {sorted(files.names)[:3]}"
        )
    return _Layout(
        sources=renamed,
        num_heads=files.integer("num_heads", "medusa_num_heads", default=len(heads)),
        num_layers=files.integer("num_hidden_layers", "medusa_num_layers", default=len(layers), at_least=0),
        is_original=False,
    )


def _original_layout(files: HeadFiles, matches: dict[str, re.Match[str]], renamed: dict[str, str]) -> _Layout:
    num_found = len({match["layer"] for match in matches.values() if match["rest"] != "weight"})
    num_layers = files.integer("medusa_num_layers", "num_hidden_layers", default=num_found, at_least=0)
    if num_layers != num_found:
        raise files.error(f"config.json: {num_layers} residual layers, the tensors '*.linear.weight' have {num_found}")
    sources = dict(renamed)
    for name, match in matches.items():
        head, layer, rest = match["head"], match["layer"], match["rest"]
        if rest != "weight":
            sources[f"blocks.{head}.layers.{layer}.{rest.removeprefix('linear.')}"] = name
        elif int(layer) == num_layers:
            sources[f"lm_heads.{head}.weight"] = name
    # FasterDecoding's published configs say 2 heads, the files have 5: the file decides
    num_there = 1 + max(int(match["head"]) for match in matches.values())
    num_named = files.integer("medusa_num_heads", "num_heads", default=num_there)
    return _Layout(sources=sources, num_heads=max(num_there, num_named), num_layers=num_layers, is_original=True)


def _read(files: HeadFiles, dtype: torch.dtype, target_lm_head: torch.Tensor | None) -> MedusaHeads:
    layout = _layout(files)
    heads = _empty_heads(files, layout, target_lm_head)
    blocks = {name: weight.shape for name, weight in heads.named_parameters() if name.startswith("blocks.")}
    tensors = {name: files.take(layout.source(name), shape, dtype) for name, shape in blocks.items()}
    if heads.shares_lm_head:
        tensors["lm_heads.0.weight"] = _shared_lm_head(files, layout, heads, dtype, target_lm_head)
    else:
        names = [f"lm_heads.{index}.weight" for index in range(heads.num_heads)]
        tensors |= {name: _lm_head(files, layout.source(name), heads, dtype) for name in names}
    if heads.token_map is not None:
        tensors["token_map"] = heads.token_map
    files.require_all_taken()
    heads.load_state_dict(tensors, assign=True)
    return heads


def _empty_heads(files: HeadFiles, layout: _Layout, target_lm_head: torch.Tensor | None) -> MedusaHeads:
    """Build heads on the meta device; sizes missing in the config (FasterDecoding's) are the tensors'."""
    lm_head = next((name for key in ("lm_heads.0.weight", "lm_head.weight") if (name := layout.sources.get(key))), None)
    block = layout.sources.get("blocks.0.layers.0.weight")
    default_vocab_size = _dimension(files, lm_head, 0)
    if lm_head is None and target_lm_head is not None:
        default_vocab_size = target_lm_head.shape[0]
    vocab_size = files.integer("vocab_size", default=default_vocab_size)
    token_map = _token_map(files, layout, vocab_size)
    with torch.device("meta"):
        return MedusaHeads(
            hidden_size=files.integer("hidden_size", default=_dimension(files, block or lm_head, 1)),
            vocab_size=vocab_size,
            num_heads=layout.num_heads,
            num_layers=layout.num_layers,
            has_bias=files.boolean("medusa_fc_bias", "blocks.0.layers.0.bias" in layout.sources),
            token_map=token_map,
            shares_lm_head=files.boolean("original_lm_head", False),
            logit_scale=files.number("logit_scale", 1.0),
        )


def _dimension(files: HeadFiles, name: str | None, dim: int) -> int | None:
    shape = () if name is None else files.shape(name)
    return shape[dim] if len(shape) == 2 else None


def _token_map(files: HeadFiles, layout: _Layout, vocab_size: int) -> torch.Tensor | None:
    """Read the ids of a truncated vocabulary; without the config's flag, a map is ignored, as in vLLM."""
    num_kept = files.integer("truncated_vocab_size", default=vocab_size)
    name = layout.source("token_map")
    if num_kept >= vocab_size:
        files.skip(name)
        return None
    token_map = files.take(name, (num_kept,), torch.int64)
    if len(token_map.unique()) < num_kept or token_map.min() < 0 or token_map.max() >= vocab_size:
        raise files.error(f"tensor {name!r} must hold different ids in [0, {vocab_size})")
    return token_map


def _shared_lm_head(
    files: HeadFiles, layout: _Layout, heads: MedusaHeads, dtype: torch.dtype, target_lm_head: torch.Tensor | None
) -> torch.Tensor:
    """Read the shared output embedding: stored once, per head, or only in the target."""
    names = ["lm_head.weight", *(f"lm_heads.{index}.weight" for index in range(heads.num_heads))]
    stored = [layout.sources[name] for name in names if name in layout.sources]
    if stored:
        first, *others = [_lm_head(files, name, heads, dtype) for name in stored]
        for name, other in zip(stored[1:], others, strict=True):
            if not torch.equal(first, other):
                raise files.error(f"original_lm_head: tensor {name!r} differs from {stored[0]!r}")
        return first
    if target_lm_head is None:
        raise files.error("original_lm_head: tensor 'lm_head.weight' is missing, and the target's was not given")
    expected = (heads.vocab_size, heads.hidden_size)
    if target_lm_head.shape != expected:
        raise files.error(f"the target's lm_head has shape {tuple(target_lm_head.shape)}, expected {expected}")
    kept = target_lm_head if heads.token_map is None else target_lm_head[heads.token_map]
    return kept.to(dtype)


def _lm_head(files: HeadFiles, name: str, heads: MedusaHeads, dtype: torch.dtype) -> torch.Tensor:
    """Read an output embedding [head_vocab_size, hidden_size]; a truncated one may be stored untruncated."""
    whole = (heads.vocab_size, heads.hidden_size)
    if heads.token_map is None:
        return files.take(name, whole, dtype)
    if files.shape(name) == whole:
        return files.take(name, whole, dtype)[heads.token_map]
    return files.take(name, (len(heads.token_map), heads.hidden_size), dtype)
