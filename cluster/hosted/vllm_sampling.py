"""A fix of vLLM's rejection sampling on CPUs."""

from __future__ import annotations

from typing import Any

import torch

_PROBE = ((0.75, 0.25), (1, 3), (0.75, 0.25, 0.25))  # values, cumulative token counts, expected result


def mend_expansion(rejection_sampler: Any) -> bool:
    """Replace a broken `expand_batch_to_tokens`; return whether it was broken.

    vLLM 0.32 on a CPU returns it uninitialised, and samples drafted requests with garbage for temperature, top-k and
    top-p (vLLM issue 55005): with any drafter, sampled tokens then have another distribution than without.
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
    """Repeat each request's value for its tokens, [requests] to [tokens]; `replace_from` becomes `replace_to`."""
    num_repeats = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return (
        torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(num_repeats, output_size=num_tokens)
    )
