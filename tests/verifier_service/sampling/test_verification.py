"""One step's verification keeps the target's law, whatever drafts; and planted mistakes are caught by the same test.

The law is the joint one of three tokens of a Markov chain over 5 tokens (125 cells): a drafter proposes two, one
verification commits one to three, and what is missing is sampled plainly. 30,000 draws; alpha and the power against a
planted shift are stated in `test_the_test_can_fail`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from exactness.law import (
    assert_law,
    draw_rows,
    joint_counts,
    joint_law,
    many_small_objects,
    p_value,
    power,
    rejects_law,
    shifted,
)
from exactness.references import typical_path
from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, ROOT, Draft, DraftSampling, SparseRow
from outrider.verifier_service.messages.request import AcceptanceRule, SamplingParams
from outrider.verifier_service.messages.tree import VerifiedTokens
from outrider.verifier_service.sampling.coupled_sampler import coupled_choice, gumbel_noise
from outrider.verifier_service.sampling.entries import VerificationEntry
from tiny.drafted import draft_tokens
from tiny.verified import target_probs, verify

VOCAB_SIZE = 5
DRAFT_VOCAB_SIZE = 6  # one id of padding, which a careless drafter draws
NUM_DRAWS = 30_000
POSITION = 7
PROMPT = 0  # the last committed token
PLAIN = SamplingParams()

Tamper = Callable[[Draft], Draft]


@pytest.fixture(autouse=True)
def _no_garbage_collection() -> Iterator[None]:
    with many_small_objects():
        yield


def table(seed: int, num_columns: int = VOCAB_SIZE) -> torch.Tensor:
    """Logits after each previous token: [DRAFT_VOCAB_SIZE, num_columns]."""
    return 1.2 * torch.randn(DRAFT_VOCAB_SIZE, num_columns, generator=torch.Generator().manual_seed(seed))


TARGET = table(0)
NEAR = torch.cat([TARGET + 0.3 * table(1), torch.full((DRAFT_VOCAB_SIZE, 1), -20.0)], dim=1)
FAR = table(2, DRAFT_VOCAB_SIZE)


def law_of(sampling: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Return the target's transitions [VOCAB_SIZE, VOCAB_SIZE] and the joint law of three tokens after the prompt."""
    transition = target_probs(TARGET[:VOCAB_SIZE], [sampling] * VOCAB_SIZE).double().numpy()
    return transition, joint_law(transition[PROMPT], transition, 3)


def drafts_of(
    drafter: torch.Tensor, samplings: Sequence[DraftSampling], *, vocab_size: int, top_n: int = 32
) -> list[Draft]:
    """Draw two tokens per sequence from a table of logits."""
    rng, last = torch.Generator().manual_seed(1), torch.full((len(samplings),), PROMPT)
    chosen = []
    for offset in range(2):
        positions = [POSITION + offset] * len(samplings)
        drawn = draft_tokens(drafter[last], samplings, positions, rng, vocab_size=vocab_size, top_n=top_n)
        chosen.append(drawn)
        last = torch.tensor([token_id for token_id, _ in drawn])
    return [
        Draft(
            request_id="r",
            round_id=1,
            position=POSITION,
            token_ids=(first[0], second[0]),
            draft_probs=None if first[1] is None else (first[1], second[1]),
        )
        for first, second in zip(*chosen, strict=True)
    ]


def committed_after(drafts: Sequence[Draft | None], samplings: Sequence[SamplingParams]) -> list[list[int]]:
    """Verify every draft, each a request of its own, in one step."""
    entries = [
        VerificationEntry(sampling=sampling, draft=draft, position=POSITION)
        for sampling, draft in zip(samplings, drafts, strict=True)
    ]
    last = [token_id for entry in entries for token_id in (PROMPT, *entry.draft_token_ids)]
    verified = verify(TARGET[torch.tensor(last)], entries, torch.Generator().manual_seed(2))
    return [tokens.token_ids for tokens in verified]


def counts_of(committed: Sequence[Sequence[int]], transition: np.ndarray) -> np.ndarray:
    """Sample what is missing to three tokens plainly, and count."""
    tokens = np.array([[*row, -1, -1][:3] for row in committed])
    rng = np.random.default_rng(3)
    for column in (1, 2):
        drawn = draw_rows(transition[tokens[:, column - 1]], rng)
        tokens[:, column] = np.where(tokens[:, column] < 0, drawn, tokens[:, column])
    return joint_counts(tokens, VOCAB_SIZE)


def draft_sampling(sampling: SamplingParams) -> DraftSampling:
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "choice_index")
    return DraftSampling(**{name: getattr(sampling, name) for name in names})


def rejection_counts(
    drafter: torch.Tensor,
    sampling: SamplingParams = PLAIN,
    *,
    num_draws: int = NUM_DRAWS,
    drafting: DraftSampling | None = None,
    vocab_size: int = VOCAB_SIZE,
    top_n: int = 32,
    tamper: Tamper = lambda draft: draft,
) -> np.ndarray:
    """Run the whole path, `tamper` between drafter and verifier, and count the joint outcomes."""
    shape = draft_sampling(sampling) if drafting is None else drafting
    drafts = drafts_of(drafter, [shape] * num_draws, vocab_size=vocab_size, top_n=top_n)
    committed = committed_after([tamper(draft) for draft in drafts], [sampling] * num_draws)
    return counts_of(committed, law_of(sampling)[0])


CUT_SHAPE = SamplingParams(temperature=0.8, top_k=4, top_p=0.9, min_p=0.02)


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(lambda: rejection_counts(NEAR), id="good"),
        pytest.param(lambda: rejection_counts(FAR, vocab_size=DRAFT_VOCAB_SIZE), id="bad, draws padding"),
        pytest.param(lambda: rejection_counts(FAR, top_n=2), id="truncated"),
        pytest.param(lambda: rejection_counts(FAR, drafting=DraftSampling(temperature=0.0)), id="point mass"),
    ],
)
def test_rejection_keeps_the_targets_law(run: Callable[[], np.ndarray]) -> None:
    assert_law(run(), law_of(PLAIN)[1])


def test_rejection_keeps_a_truncated_targets_law() -> None:
    assert_law(rejection_counts(NEAR, CUT_SHAPE), law_of(CUT_SHAPE)[1])


def drop_invalid(draft: Draft) -> Draft:
    """Mistake: cut the draft at a drawn token outside the vocabulary instead of verifying it."""
    return cut(draft, lambda token_id, row: token_id < VOCAB_SIZE)


def only_confident(draft: Draft) -> Draft:
    """Mistake: stop at a drawn token that the drafter held unlikely."""
    return cut(draft, lambda token_id, row: row.weights[row.token_ids.index(token_id)] > 0.2 * DRAFT_PROB_SCALE)


def cut(draft: Draft, keeps: Callable[[int, SparseRow], bool]) -> Draft:
    length = 0
    while length < len(draft.token_ids) and keeps(draft.token_ids[length], draft.draft_probs[length]):
        length += 1
    return replace(draft, token_ids=draft.token_ids[:length], draft_probs=draft.draft_probs[:length])


def misreport(draft: Draft) -> Draft:
    """Mistake: report a row that is 10 % flatter than the one that was drawn from."""
    return replace(draft, draft_probs=tuple(flattened(row) for row in draft.draft_probs))


def flattened(row: SparseRow) -> SparseRow:
    weights = [round(0.9 * weight + 0.1 * DRAFT_PROB_SCALE / len(row.weights)) for weight in row.weights]
    weights[0] += DRAFT_PROB_SCALE - sum(weights)
    return SparseRow(token_ids=row.token_ids, weights=tuple(weights))


@pytest.mark.parametrize("mistake", [drop_invalid, only_confident, misreport])
def test_planted_mistakes_are_detected(mistake: Tamper) -> None:
    counts = rejection_counts(FAR, vocab_size=DRAFT_VOCAB_SIZE, tamper=mistake, num_draws=NUM_DRAWS)
    assert rejects_law(counts, law_of(PLAIN)[1])


def test_the_test_can_fail() -> None:
    """Alpha 1e-6; a shift of 4 % total variation, spread thin, is caught with probability above 0.99."""
    joint = law_of(PLAIN)[1]
    wrong = shifted(joint, 0.04)
    assert np.abs(wrong - joint).sum() / 2 == pytest.approx(0.04)
    assert power(joint, wrong, NUM_DRAWS) > 0.99
    rng = np.random.default_rng(4)
    assert rejects_law(rng.multinomial(NUM_DRAWS, wrong.ravel() / wrong.sum()), joint.ravel())
    assert_law(rng.multinomial(NUM_DRAWS, joint.ravel() / joint.sum()), joint.ravel())
    assert p_value(np.array([10, 10, 1]), np.array([0.5, 0.5, 0.0])) == 0.0


def test_coupled_keeps_the_targets_law_over_seeds() -> None:
    samplings = [SamplingParams(seed=seed) for seed in range(NUM_DRAWS)]
    drafts = drafts_of(NEAR, [draft_sampling(sampling) for sampling in samplings], vocab_size=VOCAB_SIZE)
    committed = committed_after(drafts, samplings)
    acceptance_rate = np.mean([len(tokens) - 1 for tokens in committed]) / 2
    assert acceptance_rate > 0.5  # the drafter does share the noise: independent draws would agree in about a third
    transition, joint = law_of(PLAIN)
    assert_law(counts_of(committed, transition), joint)


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
