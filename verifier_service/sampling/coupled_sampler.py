"""Coupled sampling: target and drafter take the argmax under the same noise, so a right guess needs no draft_probs.

The noise depends on (seed, choice index, absolute position, token id) alone and is computed in integers: the same
bits on every device. A token is chosen by argmax(log2 probs + noise), the Gumbel-max trick in units of log 2:

    E = -log2(uniform)          exponential, so argmin(E / probs) is distributed as probs
    noise = -log2(E)            so argmax(log2 probs + noise) is that argmin

The uniform number is a 64-bit hash read as a sign and an odd 53-bit magnitude: z = magnitude / 2^54 in (0, 1/2), and
the uniform is z or 1 - z by the sign. So both tails keep full relative precision: the tail near 1 decides which of
many unlikely tokens wins. As functions of z both branches of the noise are cubics over 64 segments of each power of
two.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from decimal import Decimal, localcontext

import torch

from outrider.verifier_service.sampling.sampler import first_largest

NOISE_FRACTION_BITS = 36  # the noise is fixed point: noise / 2**36 is -log2(E), right to 2**-28
LN2_SHIFT = 0.36651292058166435  # -ln(ln 2): a standard Gumbel value is ln 2 * noise / 2**36 + LN2_SHIFT

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # splitmix64 (Steele, Lea, Flood 2014), constants as signed 64-bit integers
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MULTIPLIER_2 = 0x94D049BB133111EB - (1 << 64)
_MANTISSA_BITS = 52
_SEGMENT_BITS = 6
_OFFSET_BITS = 28
_BRANCH_SIZE = 1 << 12  # table rows per sign: 6 exponent bits and 6 mantissa bits
CPU_CHUNK_ELEMENTS = 1 << 17  # temporaries stay in the cache; of more than 2^15 numbers torch gives each core a part
DEVICE_CHUNK_ELEMENTS = 1 << 22  # a launch is worth its while, and all temporaries together take 0.3 GB
_NEVER = -(1 << 62)


def gumbel_noise(
    seed: int, choice_index: int, positions: torch.Tensor, vocab_size: int, device: torch.device | str
) -> torch.Tensor:
    """Return the noise of one request at `positions` int64 [num_rows]: int64 [num_rows, vocab_size].

    Fixed point with NOISE_FRACTION_BITS fractional bits, in units of log 2. Token ids keep their noise whatever the
    vocabulary's size, so a drafter with a padded vocabulary still agrees.
    """
    positions = positions.to(device)
    keys = noise_keys(torch.full_like(positions, seed), torch.full_like(positions, choice_index), positions)
    return noise_of_keys(keys, vocab_size)


def noise_keys(seeds: torch.Tensor, choice_indices: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Hash what identifies a row of noise, all int64 [num_rows], to int64 [num_rows]."""
    assert seeds.dtype == choice_indices.dtype == positions.dtype == torch.int64
    assert seeds.shape == choice_indices.shape == positions.shape == (len(seeds),)
    keys = _mix_(seeds + _GOLDEN)
    keys = _mix_((keys ^ choice_indices) + _GOLDEN)
    return _mix_((keys ^ positions) + _GOLDEN)


def noise_of_keys(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the noise of each keyed row: keys int64 [num_rows] -> int64 [num_rows, vocab_size]."""
    assert (keys.dtype, keys.ndim) == (torch.int64, 1), (keys.dtype, keys.shape)
    counters = torch.arange(1, vocab_size + 1, device=keys.device) * _GOLDEN  # [vocab_size]
    table = _table_on(keys.device)
    noise = torch.empty(len(keys), vocab_size, dtype=torch.int64, device=keys.device)
    for rows, columns in _chunks(len(keys), vocab_size, chunk_elements(keys.device)):
        noise[rows, columns] = _noise_of_hashes(_mix_(keys[rows, None] + counters[columns]), table)
    return noise


def coupled_choice(probs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Return argmax(log2 probs + noise) per row, never a token of probability 0: int64 [num_rows].

    probs float [num_rows, vocab_size]; noise int64 fixed point of the same shape.
    """
    assert (noise.dtype, noise.ndim) == (torch.int64, 2), (noise.dtype, noise.shape)
    assert probs.is_floating_point(), probs.dtype
    assert probs.shape == noise.shape, (probs.shape, noise.shape)
    choices = torch.empty(len(probs), dtype=torch.int64, device=probs.device)
    height = max(1, chunk_elements(probs.device) // probs.shape[1])
    for start in range(0, len(probs), height):
        rows = slice(start, start + height)
        log_probs = probs[rows].double().log2_().mul_(1 << NOISE_FRACTION_BITS)
        # probability 0 has log -inf, whose conversion to an integer differs between devices
        scores = log_probs.clamp_(min=float(_NEVER)).round_().to(torch.int64).add_(noise[rows])
        choices[rows] = first_largest(scores)
    return choices


def chunk_elements(device: torch.device) -> int:
    """Return how many numbers are hashed at once: a row of a large vocabulary would take a device hundreds of calls."""
    return CPU_CHUNK_ELEMENTS if device.type == "cpu" else DEVICE_CHUNK_ELEMENTS


def _chunks(num_rows: int, vocab_size: int, num_elements: int) -> Iterator[tuple[slice, slice]]:
    """Cut [num_rows, vocab_size] into whole rows, or a row into pieces, of about `num_elements`."""
    height = max(1, num_elements // vocab_size)
    for row in range(0, num_rows, height):
        for column in range(0, vocab_size, num_elements):
            yield slice(row, row + height), slice(column, column + num_elements)


def _mix_(values: torch.Tensor) -> torch.Tensor:
    """Apply splitmix64's finaliser in place; a mask after each arithmetic shift makes it a logical one."""
    values ^= (values >> 30).bitwise_and_((1 << 34) - 1)
    values *= _MULTIPLIER_1
    values ^= (values >> 27).bitwise_and_((1 << 37) - 1)
    values *= _MULTIPLIER_2
    values ^= (values >> 31).bitwise_and_((1 << 33) - 1)
    return values


def _noise_of_hashes(hashes: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Evaluate the cubic of each hash's segment: hashes int64 [rows, vocab_size], table int64 [segments, 4]."""
    magnitude = (hashes >> 10).bitwise_or_(1)  # signed and odd: 53 bits and a sign
    # the conversion is exact (53 bits), so it is an integer normalisation: sign, exponent and mantissa side by side
    bits = magnitude.to(torch.float64).view(torch.int64)
    segment = (bits >> (_MANTISSA_BITS - _SEGMENT_BITS)).bitwise_and_(_BRANCH_SIZE - 1)
    segment |= (bits >> 51).bitwise_and_(_BRANCH_SIZE)
    offset = bits.bitwise_and_((1 << (_MANTISSA_BITS - _SEGMENT_BITS)) - 1)
    offset >>= _MANTISSA_BITS - _SEGMENT_BITS - _OFFSET_BITS
    coefficients = table.index_select(0, segment.view(-1)).view(*hashes.shape, 4)
    noise = coefficients[..., 3] * offset
    for degree in (2, 1):
        noise = (noise >> _OFFSET_BITS).add_(coefficients[..., degree]).mul_(offset)
    return (noise >> _OFFSET_BITS).add_(coefficients[..., 0])


@functools.lru_cache(maxsize=16)
def _table_on(device: torch.device) -> torch.Tensor:
    return torch.tensor(noise_table(), dtype=torch.int64, device=device)


@functools.lru_cache(maxsize=1)
def noise_table() -> list[list[int]]:
    """Return the cubic coefficients of each segment, the constant one first, in NOISE_FRACTION_BITS fixed point.

    Row: sign bit, low 6 bits of the exponent as a float64 holds it, high 6 bits of the mantissa. Decimal's ln is
    correctly rounded by its specification, so the table does not depend on the platform's mathematics library.
    """
    num_segments = 1 << _SEGMENT_BITS
    table = [[0, 0, 0, 0] for _ in range(2 * _BRANCH_SIZE)]
    with localcontext() as context:
        context.prec = 40
        ln2 = Decimal(2).ln()
        for is_negative in (False, True):
            for exponent in range(_MANTISSA_BITS + 1):
                nodes = [_node(exponent, index, is_negative, ln2) for index in range(num_segments + 1)]
                base = is_negative * _BRANCH_SIZE + ((1023 + exponent) % num_segments) * num_segments
                for index in range(num_segments):
                    table[base + index] = _cubic(*nodes[index], *nodes[index + 1])
    return table


def _node(exponent: int, index: int, is_negative: bool, ln2: Decimal) -> tuple[Decimal, Decimal]:
    """Return the noise at one end of a segment of z in [2^exponent, 2^(exponent+1)) / 2^54, and its slope there."""
    width = Decimal(2) ** (exponent - _SEGMENT_BITS - _MANTISSA_BITS - 2)
    z = width * ((1 << _SEGMENT_BITS) + index)
    uniform = z if is_negative else 1 - z
    exponential = -uniform.ln() / ln2  # E
    slope = width / (uniform * exponential * ln2 * ln2)
    return -exponential.ln() / ln2, slope if is_negative else -slope


def _cubic(value_0: Decimal, slope_0: Decimal, value_1: Decimal, slope_1: Decimal) -> list[int]:
    """Return Hermite's cubic through two values with their slopes, in fixed point."""
    rise = value_1 - value_0
    coefficients = (value_0, slope_0, 3 * rise - 2 * slope_0 - slope_1, slope_0 + slope_1 - 2 * rise)
    return [int((coefficient * (1 << NOISE_FRACTION_BITS)).to_integral_value()) for coefficient in coefficients]
