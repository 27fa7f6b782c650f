"""Small random DFlash drafters, and a slow reference: whole blocks by the definition, token by token of the context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from outrider.drafter_service.heads.block_edges import EdgesConfig
from outrider.drafter_service.heads.dflash import DFlashConfig, DFlashHead
from tiny.heads import HIDDEN_SIZE, VOCAB_SIZE, qwen3_layer, randomised

MASK_ID, BLOCK_SIZE = 60, 6
KINDS: dict[str, EdgesConfig] = {
    "dspark": EdgesConfig(markov_rank=4, has_confidence=True, confidence_reads_token=True),
    "dflash2": EdgesConfig(selector_rank=4, selector_top_k=5, conv_kernel_size=2, conv_group_size=4),
}


def dflash_head(seed: int = 0, *, num_ids: int = VOCAB_SIZE, **changes: Any) -> DFlashHead:
    """A drafter of two layers over two taps, which drafts the first `num_ids` even-numbered ids or all."""
    config = DFlashConfig(
        layer=qwen3_layer(num_hidden_layers=2),
        **{
            "taps": (1, 2),
            "draft_vocab_size": num_ids,
            "target_hidden_size": HIDDEN_SIZE,
            "mask_token_id": MASK_ID,
            "block_size": BLOCK_SIZE,
            **changes,
        },
    )
    head = DFlashHead(config, target_ids=None if num_ids == VOCAB_SIZE else 2 * torch.arange(num_ids))
    randomised(head, seed)
    return head


@torch.no_grad()
def slow_block(
    head: DFlashHead, tokens: Sequence[int], states: torch.Tensor, forced_ids: Sequence[int] = ()
) -> torch.Tensor:
    """Return the logits of a whole block after `tokens`, [block_size, vocab_size]; NaN states are left out."""
    return head.in_target_ids(head.lm_head(slow_hidden(head, tokens, states, forced_ids)))


@torch.no_grad()
def slow_hidden(
    head: DFlashHead, tokens: Sequence[int], states: torch.Tensor, forced_ids: Sequence[int] = ()
) -> torch.Tensor:
    """Return what a block's logits are made of, [block_size, hidden_size]."""
    size = head.config.block_size
    masks = [head.config.mask_token_id] * size
    hidden = head.embed_tokens(torch.tensor([tokens[-1], *forced_ids, *masks][:size]))
    there = [position for position in range(len(tokens) - 1) if not states[position].isnan().any()]
    features = head.hidden_norm(head.fc(states[there]))
    places = [*there, *range(len(tokens) - 1, len(tokens) - 1 + size)]
    for layer in head.layers:
        normed = layer.input_layernorm(hidden)
        before, after = slow_convolutions(getattr(layer, "attention_conv", None), normed)
        hidden = hidden + after(_attend(layer.self_attn, torch.cat([features, before(normed)]), places, size))
        normed = layer.post_attention_layernorm(hidden)
        before, after = slow_convolutions(getattr(layer, "mlp_conv", None), normed)
        hidden = hidden + after(layer.mlp(before(normed)))
    return head.norm(hidden)


def slow_convolutions(part: nn.Module | None, rows: torch.Tensor) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """Return DFlash2's convolutions before and after a layer's part, token by token and tap by tap."""
    if part is None:
        return [lambda given: given] * 2
    num_taps, width = part.base_kernel.shape[1:]
    chosen = part.kernel_projection(rows).view(len(rows), 2, num_taps, -1)
    group = width // chosen.shape[-1]

    def convolve(which: int, given: torch.Tensor) -> torch.Tensor:
        made = []
        for token in range(len(given)):
            total = torch.zeros(width)
            for tap in range(min(num_taps, token + 1)):
                kernel = part.base_kernel[which, tap] + chosen[token, which, tap].repeat_interleave(group)
                total = total + kernel * given[token - tap]
            made.append(total)
        return torch.stack(made)

    return [partial(convolve, which) for which in range(2)]


def _attend(attention: nn.Module, rows: torch.Tensor, places: Sequence[int], size: int) -> torch.Tensor:
    """Let the last `size` rows look at all rows, head by head."""
    width = attention.head_dim
    query, key, value = (
        projection(rows).view(len(rows), -1, width)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    query, key = _rotated(attention.q_norm(query), places), _rotated(attention.k_norm(key), places)
    outputs = []
    for index in range(query.shape[1]):
        shared = index * key.shape[1] // query.shape[1]
        weights = (query[-size:, index] @ key[:, shared].T / width**0.5).softmax(dim=-1)
        outputs.append(weights @ value[:, shared])
    return attention.o_proj(torch.cat(outputs, dim=-1))


def _rotated(vectors: torch.Tensor, places: Sequence[int], theta: float = 10000.0) -> torch.Tensor:
    """Turn each pair (i, i + half) of vectors [num_rows, num_heads, head_dim] by its place."""
    half = vectors.shape[-1] // 2
    angles = torch.tensor(places)[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    left, right = vectors[..., :half], vectors[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
