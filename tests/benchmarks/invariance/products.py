"""The products of a decoder, one by one: all that a row passes on its way but attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, product
from typing import Any

import torch
from torch import nn

from benchmarks.invariance.company import POPULATION, Case
from outrider.verifier_service.cpu.kernels import load_kernels
from outrider.verifier_service.model import decoder
from outrider.verifier_service.model.decoder_spec import RotarySpec
from outrider.verifier_service.model.packed_linear import (
    MIN_WEIGHTS,
    Int8Linear,
    PackedLinear,
    PanelLinear,
    PlainLinear,
    can_pack,
    make_linear,
    quantize,
)
from tiny import models as tiny_models
from tiny.models import make_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
INT8 = "int8 weights"
CPU = torch.device("cpu")
# (out_features, in_features): more than one chunk of sums, panels and inputs that fill no tile
SMALL_LINEARS = ((200, 320), (7, 96), (64, 72))
REAL_LINEARS = ((192, 576), (960, 576), (3072, 576), (576, 1536), (1000, 640), (49152, 576))
LONG = 10_000_000  # weights, from which on a product takes long
FEW_ROWS, FEW_COUNTS = 130, (1, 2, 3, 4, 7, 8, 16, 17, 31, 32, 33, 64, 65, 128, 129)
EPS = 1e-5

Rows = Callable[[torch.Tensor], torch.Tensor]


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def case_of(name: str, dtype: str, compute: Rows, inputs: torch.Tensor, *, is_promised: bool | None = None) -> Case:
    """A product of rows of `inputs`; promised, unless said otherwise, wherever our kernels compute the decoder."""
    return Case(
        product=name,
        dtype=dtype,
        is_promised=load_kernels(inputs.dtype) is not None if is_promised is None else is_promised,
        compute=lambda rows: compute(inputs[rows]),
        num_rows=len(inputs),
    )


def product_cases(*, is_brief: bool) -> Iterator[Case]:
    """Yield all of them, for every dtype."""
    linears = SMALL_LINEARS if is_brief else (*SMALL_LINEARS, *REAL_LINEARS)
    for name, dtype in DTYPES.items():
        for outputs, inputs in linears:
            yield from linear_cases(outputs, inputs, name, dtype)
        yield from chain(norm_cases(name, dtype), rotary_cases(name, dtype), elementwise_cases(name, dtype))
        yield from mixture_cases(name, dtype)


# --- linear layers ---


def linear_cases(outputs: int, inputs: int, name: str, dtype: torch.dtype) -> Iterator[Case]:
    """The layer that a loader makes, also with a bias and int8 weights, and those of torch that it may fall back to."""
    weight, bias = drawn(outputs, inputs, dtype=dtype) / inputs**0.5, drawn(outputs, dtype=dtype)
    rows = drawn(POPULATION if weight.numel() < LONG else FEW_ROWS, inputs, dtype=dtype, seed=1)
    shape = f"({outputs}, {inputs})"
    made = {
        (f"linear {shape}", name): make_linear(weight),
        (f"linear {shape}, bias", name): make_linear(weight, bias),
        (f"linear {shape}", f"{name}, {INT8}"): make_linear(weight, bias, "int8"),
        (f"torch's linear {shape}", name): PlainLinear(weight, bias),
        (f"torch's linear {shape}", f"{name}, {INT8}"): Int8Linear(*quantize(weight), bias),
    }
    if can_pack(weight):
        made[f"oneDNN's packed linear {shape}", name] = PackedLinear(weight)
    for (product_name, kind), linear in made.items():
        own = case_of(product_name, kind, linear, rows, is_promised=isinstance(linear, PanelLinear))
        is_slow = isinstance(linear, Int8Linear) and dtype is torch.float32  # number by number
        if not (is_slow and weight.numel() > LONG):
            yield own if weight.numel() < (MIN_WEIGHTS if is_slow else LONG) else replace(own, counts=FEW_COUNTS)


# --- norms and rotations ---


def norm_cases(name: str, dtype: torch.dtype) -> Iterator[Case]:
    for size, wide in product((576, 100), {dtype, torch.float32}):  # Gemma's weights are float32
        norm = decoder.Norm(drawn(size, dtype=wide), EPS)
        kind = "" if wide is dtype else ", weight of float32"
        yield case_of(f"norm ({size}){kind}", name, norm, drawn(POPULATION, size, dtype=dtype))
    for num_heads, head_dim in ((12, 64), (5, 24)):
        heads = drawn(POPULATION, num_heads + 2, head_dim, dtype=dtype)  # beside the values, as the decoder has them
        shape = f"({num_heads} by {head_dim})"
        own = decoder.HeadNorm(drawn(num_heads, head_dim, dtype=dtype), EPS)
        yield case_of(f"norm of heads {shape}", name, lambda rows, own=own, num=num_heads: own(rows[:, :num]), heads)
        query, key = (decoder.Norm(drawn(num * head_dim, dtype=dtype), EPS) for num in (num_heads - 2, 2))
        both = decoder.AllHeadsNorm(query, key)
        yield case_of(
            f"norm of all heads {shape}", name, lambda rows, own=both, num=num_heads: own(rows[:, :num]), heads
        )


def rotary_cases(name: str, dtype: torch.dtype) -> Iterator[Case]:
    for head_dim in (64, 24):
        spec = RotarySpec(frequencies=tuple(10_000.0 ** (-2 * i / head_dim) for i in range(head_dim // 2)))
        rotary = decoder.Rotary(spec, head_dim, dtype=dtype, device=CPU)
        positions = torch.arange(POPULATION) * 7
        is_promised = load_kernels(dtype) is not None

        def table(rows: torch.Tensor, rotary: decoder.Rotary = rotary) -> torch.Tensor:
            return torch.cat(rotary(rows), dim=-1)

        yield case_of(f"rotary table ({head_dim})", name, table, positions, is_promised=is_promised)
        cosines, sines = rotary(positions)
        heads = drawn(POPULATION, 7, head_dim, dtype=dtype)
        packed = torch.cat([heads, cosines, sines], dim=1)

        def turned(rows: torch.Tensor) -> torch.Tensor:
            return decoder.rotated(rows[:, :5].clone(), (rows[:, 7:8].contiguous(), rows[:, 8:].contiguous()))

        yield case_of(f"rotation (5 by {head_dim})", name, turned, packed)


# --- number by number ---


def elementwise_cases(name: str, dtype: torch.dtype) -> Iterator[Case]:
    for activation, size in product(decoder.ACTIVATIONS, (1536, 100)):
        gate_up = drawn(POPULATION, 2 * size, dtype=dtype)
        yield case_of(
            f"gate {activation} ({size})", name, lambda rows, own=activation: decoder.gated(rows, own), gate_up
        )
    for scale, size in product((1.0, 0.22), (576, 100)):
        norm = decoder.Norm(drawn(size, dtype=dtype), EPS)

        def added(rows: torch.Tensor, scale: float = scale, norm: decoder.Norm = norm) -> torch.Tensor:
            hidden, update = rows.unbind(1)
            return torch.cat(decoder.added_and_normed(hidden, update, scale, norm), dim=1)

        yield case_of(f"residual by {scale:g} ({size})", name, added, drawn(POPULATION, 2, size, dtype=dtype))
    table = nn.Embedding.from_pretrained(drawn(POPULATION, 100, dtype=dtype))
    is_promised = load_kernels(dtype) is not None
    yield case_of("embedding", name, table, torch.arange(POPULATION), is_promised=is_promised)
    capped = decoder_of("gemma2", dtype, vocab_size=250)
    capped.head = nn.Identity()
    yield case_of("logits' soft cap (250)", name, capped.logits, drawn(POPULATION, 250, dtype=dtype) * 30)


def decoder_of(family: str, dtype: torch.dtype, **sizes: Any) -> decoder.Decoder:
    """Load a random model of one layer."""
    return tiny_models.decoder_of(make_model(family, **sizes, num_hidden_layers=1), dtype)


# --- mixtures ---


def mixture_cases(name: str, dtype: torch.dtype) -> Iterator[Case]:
    """A mixture's parts and the whole, with a gated shared expert and without."""
    for family, sizes in (
        ("qwen2_moe", {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}),
        ("mixtral", {"num_local_experts": 6, "hidden_size": 72, "intermediate_size": 104}),
    ):
        loaded = decoder_of(family, dtype, **sizes)
        mixture = loaded.layers[0].mlp
        assert isinstance(mixture, decoder.Experts)
        is_promised = isinstance(mixture, decoder.SeparateExperts)
        parts: dict[str, Rows] = {
            "router": lambda rows, own=mixture: torch.cat([part.double() for part in own._route(rows)], dim=1),
            "experts": lambda rows, own=mixture: own._outputs(rows, own._route(rows)[0]).view(len(rows), -1),
            "mixture": mixture,
        }
        for part, compute in parts.items():
            inputs = drawn(POPULATION, loaded.hidden_size, dtype=dtype)
            yield case_of(f"{part} ({family})", name, compute, inputs, is_promised=is_promised)
