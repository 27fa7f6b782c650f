"""The target's law: truncations against a plain reference and against transformers, ties, and the draw from a law."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fakes.processed import warpers
from outrider.verifier_service.messages.request import SamplingParams
from outrider.verifier_service.sampling import sampler
from outrider.verifier_service.sampling.sampler import NUCLEUS_CANDIDATES, choose, first_largest, top_candidates
from tiny.verified import target_probs


def reference_probs(logits: np.ndarray, shape: SamplingParams) -> np.ndarray:
    """One row, one token at a time: logits [vocab_size] -> float64 [vocab_size]."""
    scaled = logits.astype(np.float64) / shape.temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = sorted(range(len(probs)), key=lambda id_: (-logits[id_], id_))
    if shape.top_k:
        probs[order[shape.top_k :]] = 0.0
        probs /= probs.sum()
    above, kept = 0.0, set()
    for id_ in order:
        if above < shape.top_p:
            kept.add(id_)
        above += probs[id_]
    probs[[id_ for id_ in order if id_ not in kept]] = 0.0
    probs[probs < shape.min_p * probs.max()] = 0.0
    return probs / probs.sum()


SHAPES = [
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=3.0, min_p=0.2),
    SamplingParams(top_k=1),
    SamplingParams(top_k=5, temperature=0.7),
    SamplingParams(top_k=10_000),
    SamplingParams(top_p=0.5),
    SamplingParams(top_p=0.99, temperature=1.5),
    SamplingParams(top_p=1e-9),
    SamplingParams(top_k=8, top_p=0.7, min_p=0.05, temperature=1.3),
    SamplingParams(min_p=1.0),
]


@pytest.mark.parametrize("vocab_size", [50, 3 * NUCLEUS_CANDIDATES])  # in the second some nuclei outgrow the candidates
def test_mixed_rows_match_the_reference(vocab_size: int) -> None:
    logits = 2 * torch.randn(len(SHAPES), vocab_size, generator=torch.Generator().manual_seed(0))
    probs = target_probs(logits, SHAPES)
    assert probs.dtype == torch.float32
    for row, shape in enumerate(SHAPES):
        expected = reference_probs(logits[row].numpy(), shape)
        np.testing.assert_allclose(probs[row].numpy(), expected, atol=1e-6, err_msg=str(shape))
        assert ((probs[row].numpy() > 0) == (expected > 0)).all(), shape
        alone = target_probs(logits[row : row + 1], [shape])[0]
        # not bit for bit: torch.softmax moves with the batch by an ulp
        torch.testing.assert_close(alone, probs[row], atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_truncations_compose_as_in_transformers(shape: SamplingParams) -> None:
    logits = 2 * torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    expected = torch.softmax(warpers(shape)(None, logits.clone()), dim=1)
    torch.testing.assert_close(target_probs(logits, [shape] * 6), expected, atol=1e-6, rtol=1e-5)


def test_ties_keep_the_lowest_ids_and_exactly_k() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0, 1.0], [0.0, -0.0, 0.0, -0.0, 0.0, 0.0]])
    probs = target_probs(logits, [SamplingParams(top_k=2), SamplingParams(top_k=3)])
    assert probs[0].tolist() == [0.0, 0.5, 0.5, 0.0, 0.0, 0.0]
    torch.testing.assert_close(probs[1], torch.tensor([1 / 3, 1 / 3, 1 / 3, 0.0, 0.0, 0.0]))
    halves = target_probs(torch.zeros(1, 8), [SamplingParams(top_p=0.5)])
    assert halves[0].tolist() == [0.25] * 4 + [0.0] * 4


def test_forbidden_tokens_stay_forbidden() -> None:
    logits = torch.tensor([[0.0, float("-inf"), 1.0, float("-inf")]]).repeat(4, 1)
    shapes = [SamplingParams(), SamplingParams(top_k=3), SamplingParams(top_p=0.999), SamplingParams(min_p=0.01)]
    probs = target_probs(logits, shapes)
    assert (probs[:, [1, 3]] == 0.0).all()
    torch.testing.assert_close(probs.sum(dim=1), torch.ones(4))


@pytest.mark.parametrize("num_candidates", [1, 7, 64])
def test_candidates_are_ordered_by_value_then_id(num_candidates: int) -> None:
    values = torch.randint(-3, 4, (5, 64), generator=torch.Generator().manual_seed(2)).float() / 2
    best, ids = top_candidates(values, num_candidates)
    for row in range(5):
        expected = sorted(range(64), key=lambda id_: (-float(values[row, id_]), id_))[:num_candidates]
        assert ids[row].tolist() == expected
        assert torch.equal(best[row], values[row, ids[row]])


def test_choosing_follows_the_cumulative_sum_and_skips_weight_zero() -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 3.0, 0.0]], dtype=torch.float64).repeat(5, 1)
    uniforms = torch.tensor([0.0, 0.2499999, 0.25, 1 - 2**-53, 1.0], dtype=torch.float64)
    assert choose(weights, uniforms).tolist() == [1, 1, 3, 3, 3]


def test_greedy_rows_and_wrong_types_are_refused() -> None:
    with pytest.raises(AssertionError, match="greedy"):
        target_probs(torch.zeros(1, 4), [SamplingParams(temperature=0.0)])
    with pytest.raises(AssertionError):
        target_probs(torch.zeros(1, 4).double(), [SamplingParams()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool])
def test_of_equally_large_numbers_the_first_is_found(dtype: torch.dtype) -> None:
    values = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0], [1, 0, 1, 1]]).to(dtype)
    assert first_largest(values).tolist() == [1, 0, 0]
    assert first_largest(values[:, ::2]).tolist() == [0, 0, 0], "not in one piece"
    assert first_largest(values[:0]).tolist() == []


@pytest.mark.parametrize("num_wanted", [1, 3, 40, 64, 70])
def test_a_cpu_finds_the_likeliest_as_a_device_does(num_wanted: int) -> None:
    rng = torch.Generator().manual_seed(num_wanted)
    values = torch.randn(6, 64, generator=rng)
    values[1] = values[1].round()  # many are equal
    values[2, :40] = float("-inf")
    values[3] = 0.0
    values[4, ::3] *= -0.0
    values[5, [3, 9]] = float("nan")
    found = sampler._top_ids_on_cpu(values, num_wanted)
    wanted = sampler._top_ids_on_device(values, num_wanted)
    assert found.tolist()[:5] == wanted.tolist()[:5]
    assert len(set(found[5].tolist())) == min(num_wanted, 64), "of what is no number as many are there"
