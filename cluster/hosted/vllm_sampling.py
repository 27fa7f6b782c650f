"""vLLM's rejection sampling, mended where its CPU build has it wrong."""

from __future__ import annotations

from typing import Any

import torch

_PROBE = ((0.75, 0.25), (1, 3), (0.75, 0.25, 0.25))  # values, where each ends, and what they expand to


def mend_expansion(rejection_sampler: Any) -> bool:
    """Let drafted requests be sampled at their own temperature, top-k and top-p; return whether they would not be.

    vLLM 0.32 on a CPU hands `expand_batch_to_tokens` back unwritten, so that memory's leftovers are taken for these
    (vLLM issue 55005): whatever drafts, a sampled token then has another distribution than without drafts.
    """
    values, ends, expected = _PROBE
    expanded = rejection_sampler.expand_batch_to_tokens(
        torch.tensor(values), torch.tensor(ends, dtype=torch.int32), len(expected)
    )
    if tuple(expanded.tolist()) == expected:
        return False
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    return True


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeat each request's value for each of its tokens, `replace_from` as `replace_to`: [requests] to [tokens]."""
    num_repeats = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return (
        torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(num_repeats, output_size=num_tokens)
    )
