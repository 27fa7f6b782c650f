"""Norms, rotary embeddings and gated activations on a CUDA device, one launch each, reading the rows once.

The reference are the torch operators that `decoder` uses elsewhere. All calls can be captured: launches depend on
argument shapes only, nothing is read back, and every output is newly allocated. `TRITON_INTERPRET=1` runs the kernels
without a GPU.
"""

from __future__ import annotations

import torch

from outrider.verifier_service.gpu.row_kernels import gate_kernel, norm_kernel, turn_kernel

TURNED_AT_ONCE = 512  # pairs per program, so that one token's heads use several multiprocessors
GATED_AT_ONCE = 1_024
MAX_WARPS = 16
VALUES_PER_WARP = 512  # of a normed row: 16 per thread


class RowKernels:
    """The kernels, with the interface of `cpu.kernels.Kernels`, and fused ones.

    Rows are float32, float16 or bfloat16 (unchecked) with a contiguous last dimension and any token stride.
    """

    activations = frozenset({"silu", "gelu", "gelu_pytorch_tanh"})

    def rms_norm(self, rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Norm each head of [num_tokens, num_heads * size] or [num_tokens, num_heads, size].

        `weight` [num_heads, size] is float32.
        """
        output = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        _norm(output, None, rows, None, 1.0, weight, eps)
        return output

    def add_and_norm(
        self, rows: torch.Tensor, update: torch.Tensor, scale: float, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows + scale * update, and its norm: [num_tokens, size] each; `weight` [1, size] is float32."""
        assert update.shape == rows.shape
        assert update.stride(-1) == 1
        total, output = (torch.empty(rows.shape, dtype=rows.dtype, device=rows.device) for _ in range(2))
        _norm(output, total, rows, update, scale, weight, eps)
        return total, output

    def rotate(self, heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """Rotate [num_tokens, num_heads, head_dim]; see `decoder.Rotary`."""
        return _turned(heads, cosines, sines, None, 0.0)

    def norm_and_rotate(
        self, heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Apply `rms_norm`, then `rotate`, without rounding in between."""
        return _turned(heads, cosines, sines, weight, eps)

    def gated(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """Map [..., 2 * size] to activation(gate) * up [..., size]; the activation is one of `activations`."""
        *others, width = gate_up.shape
        rows, size = gate_up.reshape(-1, width), width // 2
        assert rows.stride(1) == 1
        output = torch.empty((*others, size), dtype=gate_up.dtype, device=gate_up.device)
        block = min(_power_of_two(size), GATED_AT_ONCE)
        with torch.cuda.device_of(rows):  # Triton launches on the thread's own device, which need not be the tensors'
            gate_kernel[(rows.shape[0], -(-size // block))](
                output, rows, rows.stride(0), SIZE=size, BLOCK=block, ACTIVATION=activation
            )
        return output


def _norm(
    output: torch.Tensor,
    total: torch.Tensor | None,
    rows: torch.Tensor,
    update: torch.Tensor | None,
    scale: float,
    weight: torch.Tensor,
    eps: float,
) -> None:
    num_heads, size = weight.shape
    assert weight.is_contiguous()
    assert rows.stride(-1) == 1
    assert rows.dim() == 2 or rows.stride(1) == size
    block = _power_of_two(size)
    with torch.cuda.device_of(rows):
        norm_kernel[(rows.shape[0], num_heads)](
            *(output, total, rows, update, weight, scale, eps),
            *(rows.stride(0), 0 if update is None else update.stride(0)),
            SIZE=size,
            BLOCK=block,
            HAS_UPDATE=update is not None,
            num_warps=min(max(block // VALUES_PER_WARP, 1), MAX_WARPS),
        )


def _turned(
    heads: torch.Tensor,
    cosines: torch.Tensor,  # [num_tokens, 1, head_dim], as the sines
    sines: torch.Tensor,
    weight: torch.Tensor | None,  # [num_heads, head_dim]
    eps: float,
) -> torch.Tensor:
    num_tokens, num_heads, head_dim = heads.shape
    assert heads.stride()[1:] == (head_dim, 1)
    assert head_dim % 2 == 0
    assert cosines.shape == sines.shape == (num_tokens, 1, head_dim)
    assert cosines.is_contiguous()
    assert sines.is_contiguous()
    assert weight is None or (weight.shape == heads.shape[1:] and weight.is_contiguous())
    output = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    block = _power_of_two(head_dim // 2)
    at_once = min(max(TURNED_AT_ONCE // block, 1), _power_of_two(num_heads))
    with torch.cuda.device_of(heads):
        turn_kernel[(num_tokens, -(-num_heads // at_once))](
            *(output, heads, cosines, sines, weight, eps, heads.stride(0), head_dim),
            NUM_HEADS=num_heads,
            HALF=head_dim // 2,
            BLOCK=block,
            HEADS=at_once,
            HAS_NORM=weight is not None,
        )
    return output


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
