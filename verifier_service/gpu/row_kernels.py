"""The Triton kernels of `rows`: norms, rotary embeddings and gated activations.

Parameters in capitals are compile-time constants: model sizes and flags. A program takes one token, so the grid has the
number of tokens. Everything is computed in float32 and rounded once, when stored.
"""

from __future__ import annotations

from outrider.verifier_service.gpu.language import jit, tl


@jit
def norm_kernel(
    output: tl.tensor, total: tl.tensor, rows: tl.tensor, update: tl.tensor, weight: tl.tensor, scale: tl.tensor,
    eps: tl.tensor, row_stride: tl.tensor, update_stride: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    HAS_UPDATE: tl.constexpr,
) -> None:  # fmt: skip
    """Norm one head of one token, or a whole row. With an update, store rows + scale * update, and norm that."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, BLOCK)
    is_dim = dims < SIZE
    place = (token * tl.num_programs(1) + head) * SIZE + dims
    values = tl.load(rows + token * row_stride + head * SIZE + dims, mask=is_dim, other=0.0).to(tl.float32)
    if HAS_UPDATE:
        added = tl.load(update + token * update_stride + head * SIZE + dims, mask=is_dim, other=0.0).to(tl.float32)
        summed = (values + scale * added).to(total.dtype.element_ty)
        tl.store(total + place, summed, mask=is_dim)
        values = summed.to(tl.float32)  # norm the rounded sum, as the next layers see it
    inverse = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    gains = tl.load(weight + head * SIZE + dims, mask=is_dim, other=0.0)
    tl.store(output + place, (values * inverse * gains).to(output.dtype.element_ty), mask=is_dim)


@jit
def turn_kernel(
    output: tl.tensor, heads: tl.tensor, cosines: tl.tensor, sines: tl.tensor, weight: tl.tensor, eps: tl.tensor,
    token_stride: tl.tensor, turn_stride: tl.tensor, NUM_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    HEADS: tl.constexpr, HAS_NORM: tl.constexpr,
) -> None:  # fmt: skip
    """Rotate some heads of one token; with a norm, norm each head first."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, BLOCK)
    is_dim = dims < HALF
    mask = (head < NUM_HEADS)[:, None] & is_dim[None, :]
    place = (head * 2 * HALF)[:, None] + dims[None, :]  # of the first half; dimension i is rotated with i + HALF
    source = heads + token * token_stride + place
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)  # [HEADS, BLOCK]
    second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        inverse = tl.rsqrt(tl.sum(first * first + second * second, 1) / (2 * HALF) + eps)[:, None]
        first = first * inverse * tl.load(weight + place, mask=mask, other=0.0)
        second = second * inverse * tl.load(weight + place + HALF, mask=mask, other=0.0)
    turn = token * turn_stride + dims
    first_cos = tl.load(cosines + turn, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    first_sin = tl.load(sines + turn, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    second_cos = tl.load(cosines + turn + HALF, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    second_sin = tl.load(sines + turn + HALF, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    target = output + token * NUM_HEADS * 2 * HALF + place
    tl.store(target, (first * first_cos + second * first_sin).to(output.dtype.element_ty), mask=mask)
    tl.store(target + HALF, (second * second_cos + first * second_sin).to(output.dtype.element_ty), mask=mask)


@jit
def _activated(gate: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    if ACTIVATION == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    exponent = gate
    if ACTIVATION == "gelu_pytorch_tanh":  # (1 + tanh x) / 2 is 1 / (1 + exp(-2 x))
        exponent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-exponent))  # correct also for an infinite exp


@jit
def gate_kernel(
    output: tl.tensor, gate_up: tl.tensor, row_stride: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
) -> None:  # fmt: skip
    """Compute activation(gate) * up for a block of one row."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_dim = dims < SIZE
    gate = tl.load(gate_up + row * row_stride + dims, mask=is_dim, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + SIZE + dims, mask=is_dim, other=0.0).to(tl.float32)
    product = _activated(gate, ACTIVATION) * up
    tl.store(output + row * SIZE + dims, product.to(output.dtype.element_ty), mask=is_dim)
