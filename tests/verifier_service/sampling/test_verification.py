"""One step's verification: drafts and trees change no token of greedy and seeded requests, and numbers are drawn alike.

That a batch commits what the references do, whatever it holds, is test_verification_plan.py's; that these keep the
target's law is shown by enumeration (test_tree_sampler.py, test_block_verification.py) and by tests/exactness.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from exactness.references import typical_path
from outrider.verifier_service.messages.draft import ROOT, Draft, SparseRow
from outrider.verifier_service.messages.request import AcceptanceRule, SamplingParams
from outrider.verifier_service.messages.tree import VerifiedTokens
from outrider.verifier_service.sampling.coupled_sampler import coupled_choice, gumbel_noise
from outrider.verifier_service.sampling.entries import VerificationEntry
from tiny.verified import target_probs, verify

VOCAB_SIZE = 5
DRAFT_VOCAB_SIZE = 6  # one id of padding, which a careless drafter draws
POSITION = 7
PROMPT = 0  # the last committed token
PLAIN = SamplingParams()


def table(seed: int, num_columns: int = VOCAB_SIZE) -> torch.Tensor:
    """Logits after each previous token: [DRAFT_VOCAB_SIZE, num_columns]."""
    return 1.2 * torch.randn(DRAFT_VOCAB_SIZE, num_columns, generator=torch.Generator().manual_seed(seed))


TARGET = table(0)


def drafted(*token_ids: int, rows: tuple[SparseRow, ...] | None = None) -> Draft:
    return Draft(request_id="r", round_id=1, position=POSITION, token_ids=token_ids, draft_probs=rows)


def generated(sampling: SamplingParams, proposals: Callable[[int], tuple[int, ...]], num_tokens: int) -> list[int]:
    """Decode a chain, asking `proposals` for a draft at every position."""
    tokens, rng = [PROMPT], torch.Generator().manual_seed(0)
    while len(tokens) <= num_tokens:
        draft = drafted(*proposals(len(tokens)))
        entry = VerificationEntry(sampling=sampling, draft=draft, position=len(tokens))
        tokens += verify(TARGET[[tokens[-1], *draft.token_ids]], [entry], rng)[0].token_ids
    return tokens[: num_tokens + 1]


@pytest.mark.parametrize(
    "sampling", [SamplingParams(seed=5), SamplingParams(temperature=0.0)], ids=["seeded", "greedy"]
)
def test_tokens_do_not_depend_on_the_draft(sampling: SamplingParams) -> None:
    plain = generated(sampling, lambda position: (), 30)
    rng = np.random.default_rng(6)
    for length in (1, 2, 5):
        right = generated(sampling, lambda position, length=length: tuple(plain[position : position + length]), 30)
        wild = generated(sampling, lambda position, length=length: tuple(rng.integers(0, 5, length).tolist()), 30)
        assert right == wild == plain


def test_a_seed_gives_its_own_choices_at_each_position() -> None:
    sampling = SamplingParams(seed=5, choice_index=1, top_k=3)
    expected, last = [], PROMPT
    for position in range(1, 21):
        noise = gumbel_noise(5, 1, torch.tensor([position]), VOCAB_SIZE, "cpu")
        last = int(coupled_choice(target_probs(TARGET[[last]], [sampling]), noise))
        expected.append(last)
    assert generated(sampling, lambda position: (), 20)[1:] == expected
    other = generated(replace(sampling, choice_index=0), lambda position: (), 20)[1:]
    assert other != expected


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


# --- trees and the other rules ---

#   root -> 0 -> 2 -> 5
#        -> 1 -> 3
#             -> 4
PARENTS = (ROOT, ROOT, 0, 1, 1, 2)
BLOCK = SamplingParams(acceptance=AcceptanceRule.BLOCK)
TYPICAL = SamplingParams(acceptance=AcceptanceRule.TYPICAL)


def tree_of(*token_ids: int) -> Draft:
    return replace(drafted(*token_ids), parents=PARENTS[: len(token_ids)])


def following(draft: Draft) -> torch.Tensor:
    """Return what the target says after the prompt and after each token: [len(draft) + 1, VOCAB_SIZE]."""
    return TARGET[torch.tensor([PROMPT, *draft.token_ids])]


def test_rows_choose_positions_by_depth() -> None:
    entry = VerificationEntry(sampling=PLAIN, draft=tree_of(1, 2, 3, 4, 0, 1), position=POSITION)
    assert entry.positions == [7, 8, 8, 9, 9, 9, 10]
    assert replace(entry, draft=drafted(1, 2)).positions == [7, 8, 9]
    assert replace(entry, draft=None).positions == [7]


def trees_around(plain: list[int], position: int, rng: np.random.Generator) -> Draft:
    """A tree whose second branch, at a random node, follows the right tokens as far as it goes."""
    right = [*plain[position:], 0, 0, 0][:3]
    wrong = (rng.integers(0, VOCAB_SIZE, 6)).tolist()
    wrong[0] = (right[0] + 1) % VOCAB_SIZE
    wrong[3] = (right[1] + 1 + int(rng.integers(0, 4))) % VOCAB_SIZE
    return tree_of(wrong[0], right[0], wrong[2], wrong[3], right[1], wrong[5])


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(seed=5), SamplingParams(temperature=0.0), SamplingParams(seed=5, acceptance=AcceptanceRule.BLOCK)],
    ids=["seeded", "greedy", "seeded, block"],
)
def test_tokens_do_not_depend_on_the_tree(sampling: SamplingParams) -> None:
    plain = generated(sampling, lambda position: (), 30)
    tokens, rng, num_accepted = [PROMPT], np.random.default_rng(12), 0
    while len(tokens) <= 30:
        draft = trees_around(plain, len(tokens), rng)
        entry = VerificationEntry(sampling=sampling, draft=draft, position=len(tokens))
        logits = TARGET[torch.tensor([tokens[-1], *draft.token_ids])]
        (verified,) = verify(logits, [entry], torch.Generator().manual_seed(0))
        assert [draft.token_ids[index] for index in verified.path] == verified.token_ids[:-1]
        tokens += verified.token_ids
        num_accepted += len(verified.path)
    assert tokens[:31] == plain
    assert num_accepted >= 18  # two of three tokens come from the tree


def test_typical_acceptance_of_a_seeded_request_ends_in_its_own_choice() -> None:
    draft = tree_of(1, 3, 0, 2, 4)
    probs = target_probs(following(draft), [PLAIN] * 6)
    lengths = set()
    for seed in range(20):
        limits = {"typical_epsilon": 0.05 + 0.03 * seed, "typical_delta": 1.0}
        loose = SamplingParams(seed=seed, acceptance=AcceptanceRule.TYPICAL, **limits)
        entry = VerificationEntry(sampling=loose, draft=draft, position=POSITION)
        (tokens,) = verify(following(draft), [entry], torch.Generator())
        assert tokens.path == typical_path(probs, draft, loose)
        lengths.add(len(tokens.path))
        row = tokens.path[-1] + 1 if tokens.path else 0
        noise = gumbel_noise(seed, 0, torch.tensor([POSITION + len(tokens.path)]), VOCAB_SIZE, "cpu")
        assert tokens.token_ids[-1] == int(coupled_choice(probs[row][None], noise))
    assert len(lengths) > 1


def test_greedy_typical_acceptance_is_equality() -> None:
    sure = SamplingParams(temperature=0.0, acceptance=AcceptanceRule.TYPICAL, typical_epsilon=0.01, typical_delta=0.01)
    flat = torch.tensor([[0.0, 0.1, 0.0], [0.1, 0.0, 0.0], [0.0, 0.0, 0.1]])
    entry = VerificationEntry(sampling=sure, draft=drafted(1, 2), position=POSITION)
    assert verify(flat, [entry], torch.Generator()) == [VerifiedTokens([1, 0], (0,))]
