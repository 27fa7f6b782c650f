"""Multi-head latent attention in the library's layers: the KV pool keeps one latent a token, not every head's keys.

DeepSeek-V2 (arXiv:2405.04434, section 2.1): keys and values of all heads are products of one latent. Each product is
taken on the other side instead: of the query, before it meets the latent, and of what was read. All query heads then
share one KV head, whose key is the latent and the rotated part, and whose value is the latent: 1,088 numbers a token
and layer of Kimi-K2, not 20,480.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WIDE_HEAD = 256  # keys with more numbers than our kernel on CUDA holds


class Absorbed(nn.Module):
    """The two products of one layer, [num_heads, key_dim, latent_dim] and [num_heads, latent_dim, value_dim]."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        weight = layer.kv_b_proj.weight.unflatten(0, (-1, layer.qk_nope_head_dim + layer.v_head_dim))
        key, value = weight.split([layer.qk_nope_head_dim, layer.v_head_dim], dim=1)
        self.key, self.value = key.contiguous(), value.transpose(1, 2).contiguous()

    def query(self, heads: torch.Tensor) -> torch.Tensor:
        """Map [num_tokens, num_heads, key_dim + rotary_dim] to [num_tokens, num_heads, latent_dim + rotary_dim]."""
        plain, rotated = heads.split([self.key.shape[1], heads.shape[-1] - self.key.shape[1]], dim=-1)
        latent = torch.bmm(plain.transpose(0, 1), self.key).transpose(0, 1)
        return torch.cat([latent, rotated], dim=-1)

    def output(self, read: torch.Tensor) -> torch.Tensor:
        """Map [num_tokens, num_heads, latent_dim] to [num_tokens, num_heads, value_dim]."""
        return torch.bmm(read.transpose(0, 1), self.value).transpose(0, 1)


def keep_latents(model: nn.Module) -> None:
    """Have every layer of latent attention give `attend_paged` its latents, and no expanded heads."""
    layers: list[Any] = list(model.modules())
    for layer in layers:
        if hasattr(layer, "expand_kv") and isinstance(layer.kv_b_proj, nn.Linear):
            layer.absorbed = Absorbed(layer)
            layer.kv_b_proj = None
            layer.expand_kv = _latents


def read_every_key(model: nn.Module) -> None:
    """Take the indexers out of sparse attention, which up to `sparse_limit` tokens chooses all keys.

    So far Llama 4's temperature is 1, too; the library takes it by a token's place in the packed batch.
    """
    layers: list[Any] = list(model.modules())
    for layer in layers:
        if isinstance(getattr(layer, "indexer", None), nn.Module):
            layer.indexer = _NoIndexer()
            layer.register_forward_pre_hook(_with_a_mask, with_kwargs=True)
        if hasattr(layer, "attn_temperature_tuning"):
            layer.attn_temperature_tuning = False


class _NoIndexer(nn.Module):
    """Stands where layers call an indexer; what it returns is read by the library's own attention alone."""

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states.new_empty(0)

    def build_block_mask(self, *_: Any, **__: Any) -> None:
        return None


def _with_a_mask(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Give a layer that slices its mask, which `attend_paged` never reads, something to slice."""
    return args, {**kwargs, "attention_mask": kwargs["hidden_states"].new_empty(1, 1, 0, 0)}


def _latents(latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a token's one key and value, [1, 1, num_tokens, ...] each."""
    return torch.cat([latent, rotated], dim=-1), latent
