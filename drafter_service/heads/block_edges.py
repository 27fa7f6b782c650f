"""What the guesses of a block know of each other, in drafters that are DFlash's otherwise: a row's law given the token
before it, which all of a block's rows are computed without.

DSpark (arXiv 2607.05147): a bias of low rank for the token before, and a confidence that the guess is accepted.
DFlash2: only the likeliest tokens of a row, scored again by the token before and the row's state; and convolutions over
the block around each layer's two parts. Names and shapes are those of the `speculators` library.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig

from outrider.drafter_service.heads.head_layer import Attend, HeadLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgesConfig:
    """Which parts a drafter has; 0: none."""

    markov_rank: int = 0
    has_confidence: bool = False
    confidence_reads_token: bool = False  # the token before, beside the row's state
    selector_rank: int = 0
    selector_top_k: int = 0
    conv_kernel_size: int = 0
    conv_group_size: int = 0


class MarkovHead(nn.Module):
    """A bias of low rank: markov_w2(markov_w1[token before])."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)

    def forward(self, hidden: torch.Tensor, logits: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Return [num_rows, draft_vocab_size]."""
        return logits + self.markov_w2(self.markov_w1(previous))


class ConfidenceHead(nn.Module):
    """The chance that a row's guess is accepted where those before it are."""

    def __init__(self, input_size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(input_size, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return [num_rows] in [0, 1]."""
        return self.proj(features)[:, 0].float().sigmoid()


class CandidateSelector(nn.Module):
    """A row's likeliest tokens, scored by (code of the token before * state) · code of the token; others get -inf."""

    def __init__(self, vocab_size: int, hidden_size: int, rank: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def forward(self, hidden: torch.Tensor, logits: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Return [num_rows, draft_vocab_size]."""
        best, ids = logits.topk(self.top_k, dim=-1)
        context = self.predecessor_codebook[previous] * self.hidden_projection(hidden)
        scores = best + (context[:, None] * self.successor_codebook[ids]).sum(dim=-1)
        return torch.full_like(logits, float("-inf")).scatter(-1, ids, scores)


class BlockConvolution(nn.Module):
    """Two causal convolutions over a block, before and after a layer's part, by kernels that its tokens choose."""

    def __init__(self, hidden_size: int, config: EdgesConfig) -> None:
        super().__init__()
        self._size, self._group = config.conv_kernel_size, config.conv_group_size
        self.base_kernel = nn.Parameter(torch.empty(2, self._size, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * self._size * (hidden_size // self._group), bias=False)

    def around(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first convolution of [num_blocks, block_size, hidden_size], and the kernels of the second."""
        kernels = self.kernel_projection(rows).unflatten(-1, (2, self._size, -1))
        kernels = self.base_kernel + kernels.repeat_interleave(self._group, dim=-1)
        return convolved(rows, kernels[:, :, 0]), kernels[:, :, 1]


def convolved(rows: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
    """Sum each token with those before it in its block: kernels [num_blocks, block_size, kernel_size, hidden_size]."""
    length = rows.shape[1]
    shifted = [F.pad(rows, (0, 0, tap, 0))[:, :length] for tap in range(kernels.shape[2])]
    return (torch.stack(shifted, dim=2) * kernels).sum(dim=2)


class ConvolvedLayer(HeadLayer):
    """A decoder layer of DFlash2."""

    def __init__(self, description: PreTrainedConfig, config: EdgesConfig) -> None:
        super().__init__(description)
        self.attention_conv = BlockConvolution(description.hidden_size, config)
        self.mlp_conv = BlockConvolution(description.hidden_size, config)

    def forward(
        self, hidden: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], attend: Attend
    ) -> torch.Tensor:  # [num_blocks, block_size, hidden_size]
        rows, kernels = self.attention_conv.around(self.input_layernorm(hidden))
        hidden = hidden + convolved(self.self_attn(rows, rotary, attend), kernels)
        rows, kernels = self.mlp_conv.around(self.post_attention_layernorm(hidden))
        return hidden + convolved(self.mlp(rows), kernels)
