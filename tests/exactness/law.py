"""Do counts follow a law? Pearson's chi-square, with its power, for tests of exactness.

With fixed seeds an outcome is fixed too: `alpha` says how unlikely it is that a right sampler fails when a test is
written or its seed changes; `power` says how likely it is that a wrong one is caught.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence

import numpy as np
from scipy import stats

ALPHA = 1e-6
MIN_EXPECTED = 5.0  # cells below are pooled, or chi-square's law does not hold


def p_value(counts: np.ndarray, expected_probs: np.ndarray) -> float:
    """Return the probability of counts at least this far off: 0 when something impossible happened.

    counts and expected_probs of any one shape; expected_probs sum to 1.
    """
    counts, probs = np.asarray(counts, dtype=np.float64).ravel(), np.asarray(expected_probs, dtype=np.float64).ravel()
    assert counts.shape == probs.shape, (counts.shape, probs.shape)
    assert abs(probs.sum() - 1.0) < 1e-5, probs.sum()
    assert counts.sum() > 0
    if counts[probs == 0.0].any():
        return 0.0
    observed, expected = _pooled(counts, probs / probs.sum() * counts.sum())
    assert len(observed) >= 2, "one cell only: this test could not fail"
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return float(stats.chi2.sf(statistic, len(observed) - 1))


def rejects_law(counts: np.ndarray, expected_probs: np.ndarray, alpha: float = ALPHA) -> bool:
    """Say whether the counts contradict the law at significance `alpha`."""
    return p_value(counts, expected_probs) < alpha


def assert_law(counts: np.ndarray, expected_probs: np.ndarray, alpha: float = ALPHA) -> None:
    """Fail when the counts contradict the law at significance `alpha`."""
    probability = p_value(counts, expected_probs)
    assert probability >= alpha, f"counts contradict the law: p-value {probability:.2e}, alpha {alpha:.0e}"


def power(expected_probs: np.ndarray, actual_probs: np.ndarray, num_draws: int, alpha: float = ALPHA) -> float:
    """Return the probability that `rejects_law` catches draws from `actual_probs` (noncentral chi-square)."""
    expected = np.asarray(expected_probs, dtype=np.float64).ravel()
    actual = np.asarray(actual_probs, dtype=np.float64).ravel()
    if actual[expected == 0.0].any():
        return float(-np.expm1(num_draws * np.log1p(-actual[expected == 0.0].sum())))
    actual_cells, expected_cells = _pooled(actual * num_draws, expected * num_draws)
    noncentrality = float(((actual_cells - expected_cells) ** 2 / expected_cells).sum())
    degrees = len(expected_cells) - 1
    return float(stats.ncx2.sf(stats.chi2.isf(alpha, degrees), degrees, noncentrality))


def shifted(probs: np.ndarray, total_variation: float) -> np.ndarray:
    """Plant a defect of a known size: spread it over the likelier half of the cells, which is where it hides best.

    The gain of each cell is proportional to its probability, and so is the loss of the others.
    """
    flat = np.asarray(probs, dtype=np.float64).ravel()
    order = np.argsort(-flat, kind="stable")
    gaining = np.zeros(len(flat), dtype=bool)
    gaining[order[np.cumsum(flat[order]) <= 0.5]] = True
    gaining[order[0]] = True
    assert total_variation <= flat[~gaining].sum()
    gains = np.where(gaining, flat / flat[gaining].sum(), -flat / flat[~gaining].sum())
    return (flat + total_variation * gains).reshape(np.shape(probs))


def joint_law(first: np.ndarray, transition: np.ndarray, num_tokens: int) -> np.ndarray:
    """Return the law of a Markov chain's first tokens: [vocab_size] * num_tokens.

    first [vocab_size]; transition [vocab_size, vocab_size], one row per previous token.
    """
    law = np.asarray(first, dtype=np.float64)
    for _ in range(num_tokens - 1):
        law = law[..., None] * np.asarray(transition, dtype=np.float64)
    return law


def joint_counts(sequences: np.ndarray | Sequence[Sequence[int]], vocab_size: int) -> np.ndarray:
    """Count sequences [num_draws, num_tokens] in the cells of their joint law: [vocab_size] * num_tokens."""
    sequences = np.asarray(sequences)
    shape = (vocab_size,) * sequences.shape[1]
    flat = np.ravel_multi_index(tuple(sequences.T), shape)
    return np.bincount(flat, minlength=vocab_size ** sequences.shape[1]).reshape(shape)


def draw_rows(probs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw one id per row: probs [num_rows, vocab_size] -> [num_rows], never an id of probability 0."""
    cumulative = np.cumsum(probs, axis=1)
    thresholds = rng.random((len(probs), 1)) * cumulative[:, -1:]
    return np.minimum((cumulative <= thresholds).sum(axis=1), probs.shape[1] - 1)


@contextlib.contextmanager
def many_small_objects() -> Iterator[None]:
    """Pause the cyclic garbage collector: over 100,000 drafts it takes more than half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _pooled(counts: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pool the cells that expect too little into one (and that one into the next smallest); drop impossible ones."""
    counts, expected = counts[expected > 0.0], expected[expected > 0.0]
    order = np.argsort(-expected, kind="stable")
    counts, expected = counts[order], expected[order]
    num_kept = int((expected >= MIN_EXPECTED).sum())
    if num_kept < len(expected):
        if expected[num_kept:].sum() < MIN_EXPECTED and num_kept:
            num_kept -= 1
        counts = np.append(counts[:num_kept], counts[num_kept:].sum())
        expected = np.append(expected[:num_kept], expected[num_kept:].sum())
    return counts, expected
