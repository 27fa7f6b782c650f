"""The measuring tape itself: the reference speculation keeps the target's law, shares are counted right."""

import pytest
import torch

from outrider.lab.embedded.evaluate import distinct_share, verify


def test_distinct_share_counts_four_grams():
    assert distinct_share(list(range(20))) == 1.0
    assert distinct_share([1, 2, 3, 4] * 5) == pytest.approx(4 / 17)


def test_verification_of_one_hot_rows_compares_argmaxes():
    eye, generator = torch.eye(4), torch.Generator().manual_seed(0)
    assert verify([1, 2], eye[[1, 2]], eye[[1, 2, 3]], generator) == [1, 2, 3]
    assert verify([1, 2], eye[[1, 2]], eye[[1, 0, 3]], generator) == [1, 0]


def test_the_first_committed_token_has_the_targets_law():
    generator = torch.Generator().manual_seed(0)
    target_probs = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]])  # [draft_length + 1, vocab]
    draft_probs = torch.tensor([[0.2, 0.2, 0.6]])  # [draft_length, vocab]
    counts = torch.zeros(3)
    for _ in range(6000):
        chain = torch.multinomial(draft_probs[0], 1, generator=generator).tolist()
        counts[verify(chain, draft_probs, target_probs, generator)[0]] += 1
    torch.testing.assert_close(counts / counts.sum(), target_probs[0], atol=0.025, rtol=0)
