"""One step's verification: a seeded request draws by its own noise at each place, and numbers are drawn alike for all.

That a batch commits what the references do, whatever it holds, is test_verification_plan.py's; that these keep the
target's law is shown by enumeration (test_tree_sampler.py, test_block_verification.py), and that drafts change
no token of seeded and greedy requests by tests/exactness.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider.verifier_service.messages.draft import ROOT, Draft
from outrider.verifier_service.messages.request import SamplingParams
from outrider.verifier_service.sampling.coupled_sampler import coupled_choice, gumbel_noise
from outrider.verifier_service.sampling.entries import VerificationEntry
from tiny.verified import target_probs, verify

VOCAB_SIZE = 5
POSITION = 7
PROMPT = 0  # the last committed token
PLAIN = SamplingParams()
TARGET = 1.2 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))  # by the token before


def drafted(*token_ids: int) -> Draft:
    return Draft(request_id="r", round_id=1, position=POSITION, token_ids=token_ids)


def generated(sampling: SamplingParams, num_tokens: int) -> list[int]:
    """Decode without drafts."""
    tokens = [PROMPT]
    while len(tokens) <= num_tokens:
        entry = VerificationEntry(sampling=sampling, draft=None, position=len(tokens))
        tokens += verify(TARGET[tokens[-1:]], [entry], torch.Generator().manual_seed(0))[0].token_ids
    return tokens[1:]


def test_a_seed_gives_its_own_choices_at_each_position() -> None:
    sampling = SamplingParams(seed=5, choice_index=1, top_k=3)
    expected, last = [], PROMPT
    for position in range(1, 21):
        noise = gumbel_noise(5, 1, torch.tensor([position]), VOCAB_SIZE, "cpu")
        last = int(coupled_choice(target_probs(TARGET[[last]], [sampling]), noise))
        expected.append(last)
    assert generated(sampling, 20) == expected
    assert generated(replace(sampling, choice_index=0), 20) != expected


def test_randomness_is_drawn_in_a_fixed_way() -> None:
    """One number per row, whatever is accepted: requests behind in the batch do not feel a draft's fate."""
    sampled = VerificationEntry(sampling=SamplingParams(), draft=None, position=POSITION)
    ends = []
    for first in (drafted(0, 0), drafted(9, 9)):
        entries = [VerificationEntry(sampling=SamplingParams(), draft=first, position=POSITION), *[sampled] * 20]
        rng = torch.Generator().manual_seed(10)
        committed = verify(TARGET[[PROMPT] * 23], entries, rng)
        ends.append((committed[1:], torch.rand(1, generator=rng).item()))
    assert ends[0] == ends[1]


def test_rows_and_entries_must_agree() -> None:
    entry = VerificationEntry(sampling=SamplingParams(), draft=drafted(1), position=POSITION)
    with pytest.raises(AssertionError):
        verify(torch.zeros(3, 4), [entry], torch.Generator())


PARENTS = (ROOT, ROOT, 0, 1, 1, 2)


def test_rows_choose_positions_by_depth() -> None:
    entry = VerificationEntry(sampling=PLAIN, draft=replace(drafted(*range(6)), parents=PARENTS), position=POSITION)
    assert entry.positions == [7, 8, 8, 9, 9, 9, 10]
    assert replace(entry, draft=drafted(1, 2)).positions == [7, 8, 9]
    assert replace(entry, draft=None).positions == [7]
