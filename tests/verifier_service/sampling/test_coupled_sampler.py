"""The shared noise: the same bits as a plain integer reference, pinned values, Gumbel's law; the choices follow."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from exactness.law import assert_law
from outrider.verifier_service.sampling.coupled_sampler import (
    LN2_SHIFT,
    NOISE_FRACTION_BITS,
    coupled_choice,
    gumbel_noise,
    noise_keys,
    noise_of_keys,
    noise_table,
)

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
SCALE = 1 << NOISE_FRACTION_BITS


def mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def reference_key(seed: int, choice_index: int, position: int) -> int:
    key = 0
    for part in (seed, choice_index, position):
        key = mix(((key ^ (part & MASK)) + GOLDEN) & MASK)
    return key


def reference_z(seed: int, choice_index: int, position: int, token_id: int) -> tuple[int, bool]:
    """Return the odd 53-bit magnitude and the sign, in Python's own integers."""
    hashed = mix((reference_key(seed, choice_index, position) + (token_id + 1) * GOLDEN) & MASK)
    signed = hashed - (1 << 64) if hashed >> 63 else hashed
    magnitude = (signed >> 10) | 1
    return abs(magnitude), magnitude < 0


def reference_noise(seed: int, choice_index: int, position: int, token_id: int) -> int:
    magnitude, is_negative = reference_z(seed, choice_index, position, token_id)
    exponent = magnitude.bit_length() - 1
    mantissa = (magnitude << (52 - exponent)) - (1 << 52)
    segment = is_negative * 4096 + ((1023 + exponent) % 64) * 64 + (mantissa >> 46)
    offset = (mantissa & ((1 << 46) - 1)) >> 18
    c0, c1, c2, c3 = noise_table()[segment]
    return (((((((c3 * offset) >> 28) + c2) * offset) >> 28) + c1) * offset >> 28) + c0


def numpy_noise(key: int, vocab_size: int) -> np.ndarray:
    """Return one row with unsigned arithmetic and real logical shifts."""
    values = np.uint64(key) + np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    signed = (values.view(np.int64) >> 10) | 1
    magnitude = np.abs(signed)
    exponent = np.frexp(magnitude.astype(np.float64))[1] - 1
    mantissa = (magnitude << (52 - exponent)) - (1 << 52)
    segment = (signed < 0) * 4096 + ((1023 + exponent) % 64) * 64 + (mantissa >> 46)
    offset = (mantissa & ((1 << 46) - 1)) >> 18
    c0, c1, c2, c3 = np.array(noise_table())[segment].T
    return (((((((c3 * offset) >> 28) + c2) * offset) >> 28) + c1) * offset >> 28) + c0


def many_rows(num_rows: int, vocab_size: int) -> torch.Tensor:
    """Noise of many seeds, the way requests come: small numbers one after another."""
    numbers = torch.arange(num_rows)
    return noise_of_keys(noise_keys(numbers, torch.zeros_like(numbers), numbers % 7), vocab_size)


KEYS = [(0, 0, 0), (1, 0, 5), (-1, 3, 100_000), (2**63 - 1, 1, 1), (-(2**63), 0, 2)]


@pytest.mark.parametrize(("seed", "choice_index", "position"), KEYS)
def test_the_noise_is_the_integer_references_bit_for_bit(seed: int, choice_index: int, position: int) -> None:
    noise = gumbel_noise(seed, choice_index, torch.tensor([position]), 500, "cpu")[0]
    assert noise.tolist() == [reference_noise(seed, choice_index, position, id_) for id_ in range(500)]


def test_the_noise_is_numpys_bit_for_bit_over_a_whole_vocabulary() -> None:
    noise = gumbel_noise(42, 0, torch.tensor([7, 8]), 131_072, "cpu")
    for row, position in enumerate((7, 8)):
        np.testing.assert_array_equal(noise[row].numpy(), numpy_noise(reference_key(42, 0, position), 131_072))


@pytest.mark.gpu
def test_the_noise_is_the_same_on_a_gpu() -> None:
    on_gpu, on_cpu = (gumbel_noise(42, 1, torch.arange(8), 131_072, device) for device in ("cuda", "cpu"))
    assert torch.equal(on_gpu.cpu(), on_cpu)


PINNED_NOISE = [[-29628020404, -36233861889, 103110289022, 176762141630]]
PINNED_SEGMENT = [3674515195280, -1549082005, 12100762, -123164]


def test_pinned_values() -> None:
    noise = gumbel_noise(42, 0, torch.tensor([10]), 4, "cpu")
    assert noise.tolist() == PINNED_NOISE
    assert noise_table()[63 * 64] == PINNED_SEGMENT  # z = 1 / 2^54: exponent 0, first segment


def test_the_fixed_point_logarithms_are_right_in_both_tails() -> None:
    common = [(9, id_) for id_ in range(2000)]
    extreme = []  # hashes cannot be chosen, so the smallest z come from many tokens
    for seed in range(4):
        order = np.argsort(numpy_noise(reference_key(seed, 0, 0), 131_072))
        extreme += [(seed, id_) for id_ in (*order[:50].tolist(), *order[-50:].tolist())]
    for seed, id_ in common + extreme:
        magnitude, is_negative = reference_z(seed, 0, 0, id_)
        z = magnitude / 2**54
        exponential = -math.log2(z) if is_negative else -math.log1p(-z) / math.log(2)
        assert reference_noise(seed, 0, 0, id_) / SCALE == pytest.approx(-math.log2(exponential), abs=2**-28)


def test_every_part_of_the_key_matters() -> None:
    rows = [gumbel_noise(*key, 64, "cpu") for key in ((1, 0, torch.tensor([5])), (2, 0, torch.tensor([5])))]
    rows += [gumbel_noise(1, 1, torch.tensor([5]), 64, "cpu"), gumbel_noise(1, 0, torch.tensor([6]), 64, "cpu")]
    rows += [gumbel_noise(5, 0, torch.tensor([1]), 64, "cpu"), gumbel_noise(0, 1, torch.tensor([5]), 64, "cpu")]
    assert len({tuple(row[0].tolist()) for row in rows}) == len(rows)


@pytest.mark.parametrize("shape", [(1, 200_000), (25_000, 8)])
def test_the_noise_is_gumbel(shape: tuple[int, int]) -> None:
    values = many_rows(*shape).double().numpy().ravel() * math.log(2) / SCALE + LN2_SHIFT
    assert stats.kstest(values, "gumbel_r").pvalue > 1e-6
    assert stats.kstest(values * 1.05, "gumbel_r").pvalue < 1e-6  # the test can tell 5 %


def test_neighbouring_tokens_and_positions_are_independent() -> None:
    noise = many_rows(20_000, 4).double().numpy()
    uniform = np.exp(-np.exp(-(noise * math.log(2) / SCALE + LN2_SHIFT)))
    cells = np.floor(uniform * 8).astype(int)
    for left, right in ((cells[:, 0], cells[:, 1]), (cells[:-1, 0], cells[1:, 0]), (cells[:-1, 1], cells[1:, 0])):
        counts = np.bincount(left * 8 + right, minlength=64)
        assert_law(counts, np.full(64, 1 / 64))


def test_choices_follow_the_law_over_seeds() -> None:
    law = torch.tensor([0.4, 0.0, 0.3, 0.2, 0.0999, 0.0001])
    chosen = coupled_choice(law.expand(200_000, 6), many_rows(200_000, 6))
    assert_law(np.bincount(chosen.numpy(), minlength=6), law.double().numpy())


def test_probability_zero_is_never_chosen_and_ties_go_to_the_lowest_id() -> None:
    noise = torch.tensor([[50 * SCALE, 0, -5 * SCALE], [0, 0, 0]])
    probs = torch.tensor([[0.0, 0.0, 1e-38], [0.25, 0.375, 0.375]])
    assert coupled_choice(probs, noise).tolist() == [2, 1]
