"""A small random model whose next token's law depends on the last two tokens alone: every token is a draw.

Its only layer that attends has a window of two, and rotary positions are relative. So the counts of what followed each
pair are draws from 25 laws over 5 ids, which the library computes from the pair alone; a request of 60 tokens is 60
draws, where the joint law of a request's first tokens would give one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy import stats
from transformers import PreTrainedModel

from exactness.drafter_checkpoints import small_tokens, write_tokenizer
from exactness.law import MIN_EXPECTED
from tiny.models import full_logits, make_model

VOCAB_SIZE = 5
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "sliding_window": 2,
    "pad_token_id": None,
}
SHARPNESS = 1.2  # standard deviation of the logits of one law


@dataclass(frozen=True, slots=True)
class MarkovTarget:
    """A checkpoint, and the law [VOCAB_SIZE] of what follows each pair: laws [VOCAB_SIZE] * 3."""

    folder: Path
    model: PreTrainedModel
    laws: np.ndarray


def make_target(folder: Path) -> MarkovTarget:
    """Write the checkpoint, with a tokenizer, into `folder`."""
    model = make_model("mistral", seed=3, **SHAPE)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.lm_head.weight.mul_(SHARPNESS / _logits_of_pairs(model).std(dim=-1).mean())
    model.save_pretrained(folder)
    write_tokenizer(folder, small_tokens(VOCAB_SIZE))
    laws = _logits_of_pairs(model).double().softmax(dim=-1).numpy()
    return MarkovTarget(folder, model, laws)


def _logits_of_pairs(model: PreTrainedModel) -> torch.Tensor:
    """Return the logits after each pair: [VOCAB_SIZE] * 3."""
    rows = [full_logits(model, [first, second])[-1] for first in range(VOCAB_SIZE) for second in range(VOCAB_SIZE)]
    return torch.stack(rows).view(VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE)


def count_transitions(prompt: Sequence[int], outputs: Iterable[Sequence[int]]) -> np.ndarray:
    """Count each output token after the two before it: [VOCAB_SIZE] * 3."""
    counts = np.zeros((VOCAB_SIZE,) * 3, dtype=np.int64)
    for output in outputs:
        tokens = np.array([*prompt[-2:], *output])
        np.add.at(counts, (tokens[:-2], tokens[1:-1], tokens[2:]), 1)
    return counts


def transition_p_value(counts: np.ndarray, laws: np.ndarray) -> float:
    """Return Pearson's chi-square of each pair's counts, summed over the pairs, as a probability.

    counts and laws [VOCAB_SIZE] * 3; cells of one pair that expect too little are pooled.
    """
    statistic, num_degrees = 0.0, 0
    for observed, law in zip(counts.reshape(-1, VOCAB_SIZE), laws.reshape(-1, VOCAB_SIZE), strict=True):
        observed, expected = _pooled(observed, law / law.sum() * observed.sum())
        if len(expected) > 1:
            statistic += float(((observed - expected) ** 2 / expected).sum())
            num_degrees += len(expected) - 1
    assert num_degrees, "too few draws: this test could not fail"
    return float(stats.chi2.sf(statistic, num_degrees))


def _pooled(observed: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pool the smallest cells until every one expects enough."""
    order = np.argsort(-expected)
    observed, expected = observed[order].astype(np.float64), expected[order]
    while len(expected) > 1 and expected[-1] < MIN_EXPECTED:
        observed = np.append(observed[:-2], observed[-2:].sum())
        expected = np.append(expected[:-2], expected[-2:].sum())
    return observed, expected


def power(laws: np.ndarray, num_draws: int, alpha: float, total_variation: float) -> float:
    """Return the chance that draws off by `total_variation` in every law, as hidden as can be, are caught.

    The shift moves mass within each law between the two halves of it; pairs are taken to come equally often.
    """
    noncentrality = 0.0
    for law in laws.reshape(-1, VOCAB_SIZE):
        order = np.argsort(-law)
        gaining = np.zeros(VOCAB_SIZE, dtype=bool)
        gaining[order[np.cumsum(law[order]) <= 0.5]] = True
        gaining[order[0]] = True
        shares = law[gaining].sum(), law[~gaining].sum()
        noncentrality += num_draws / VOCAB_SIZE**2 * total_variation**2 * (1 / shares[0] + 1 / shares[1])
    degrees = VOCAB_SIZE**2 * (VOCAB_SIZE - 1)
    return float(stats.ncx2.sf(stats.chi2.isf(alpha, degrees), degrees, noncentrality))
