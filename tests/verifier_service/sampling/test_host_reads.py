"""How often a step's choices are read back: each read waits for an accelerator to finish what it was given."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, Draft, SparseRow
from outrider.verifier_service.messages.request import SamplingParams
from outrider.verifier_service.sampling.block_verification import verify_blocks
from outrider.verifier_service.sampling.rejection_sampler import verify_batch_on_device
from outrider.verifier_service.sampling.tree_sampler import verify_trees
from outrider.verifier_service.sampling.verification import VerificationEntry, verify
from tiny.played_graphs import HostReads

VOCAB_SIZE = 2000  # more than a nucleus looks at first
SHARES = (DRAFT_PROB_SCALE // 2, DRAFT_PROB_SCALE // 4, DRAFT_PROB_SCALE // 4)


def draft_of(*token_ids: int, parents: tuple[int, ...] | None = None) -> Draft:
    rows = tuple(SparseRow(token_ids=(id_, 7, 9), weights=SHARES) for id_ in token_ids)
    return Draft(
        request_id="r",
        round_id=1,
        position=3,
        token_ids=token_ids,
        draft_probs=rows if parents is None else None,
        parents=parents,
    )


CHAINS = (draft_of(4, 5), draft_of(6), None)
TREES = (draft_of(4, 5, 6, parents=(-1, -1, 0)), None)


def reads_of(act: Callable[[], object]) -> list[str]:
    act()  # tables that are made once
    with HostReads() as reads:
        act()
    return reads.names


def numbers_of(drafts: tuple[Draft | None, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return target probabilities and uniform numbers for drafts."""
    num_rows = sum(1 + (0 if draft is None else len(draft.token_ids)) for draft in drafts)
    generator = torch.Generator().manual_seed(0)
    probs = torch.randn(num_rows, VOCAB_SIZE, generator=generator).softmax(dim=1)
    return probs, torch.rand(num_rows, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize(
    ("sampling", "num_reads"),
    [
        (SamplingParams(temperature=0.0), 1),
        (SamplingParams(temperature=0.7, seed=5), 1),
        (SamplingParams(temperature=0.7, seed=5, min_p=0.1), 1),
        (SamplingParams(temperature=0.7, seed=5, top_k=20, top_p=0.9), 1),
        (SamplingParams(temperature=3.0, seed=5, top_p=0.1), 2),  # whether the best 1,024 tokens were enough
    ],
)
def test_greedy_and_seeded_steps_read_their_choices_alone(sampling: SamplingParams, num_reads: int) -> None:
    entries = [VerificationEntry(sampling=sampling, draft=draft, position=3) for draft in CHAINS]
    logits = torch.randn(6, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    assert len(reads_of(lambda: verify(logits, entries, torch.Generator()))) == num_reads


def test_rejection_of_chains_reads_once_on_a_device() -> None:
    probs, uniforms = numbers_of(CHAINS)
    assert reads_of(lambda: verify_batch_on_device(probs, CHAINS, uniforms)) == ["tolist"]


def test_blocks_and_trees_still_walk_on_the_host() -> None:
    """Each also reads its uniform numbers, which never leave the host."""
    probs, uniforms = numbers_of(CHAINS)
    assert len(reads_of(lambda: verify_blocks(probs, CHAINS, uniforms))) == 3 + 1
    probs, uniforms = numbers_of(TREES)
    assert len(reads_of(lambda: verify_trees(probs, TREES, uniforms))) == 2 + 1
