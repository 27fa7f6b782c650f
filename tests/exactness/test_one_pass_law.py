"""The best of several drafts of one pass, each verified as if it were alone, has another law; their tree keeps it.

SpecDiff-2's self-selection (arXiv 2511.00606), two tokens over 4 ids by Pearson's chi-square, alpha 1e-4, seeds fixed.
That the drafters of one pass keep the target's law: `test_drafter_law`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from exactness import law
from exactness.references import verify_by_rejection, verify_tree
from fakes.scripted import random_laws, sparse_row
from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, ROOT, Draft

ALPHA = 1e-4
NUM_DRAWS = 4000
NUM_IDS, LAST = 4, 0
LAWS = random_laws(NUM_IDS, seed=5)[2][0]  # of the next token by the last one: [NUM_IDS, NUM_IDS]
# one pass' rows of two positions: the second does not see the first's guess
PASS = [sparse_row(0.5 * LAWS[LAST] + 0.5 / NUM_IDS, NUM_IDS), sparse_row(LAWS.mean(0), NUM_IDS)]
Verify = Callable[[np.random.Generator], list[int]]


def drawn(position: int, rng: np.random.Generator, count: int = 1) -> list[int]:
    row = PASS[position]
    return rng.choice(row.token_ids, size=count, replace=False, p=np.array(row.weights) / DRAFT_PROB_SCALE).tolist()


def laws_after(token_ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor(LAWS[[LAST, *token_ids]])


def one_chain(rng: np.random.Generator) -> list[int]:
    """Verify one draft of the pass."""
    token_ids = (*drawn(0, rng), *drawn(1, rng))
    draft = Draft(request_id="r", round_id=0, position=1, token_ids=token_ids, draft_probs=tuple(PASS))
    return verify_by_rejection(laws_after(token_ids), draft, rng.random)


def tree_of_two(rng: np.random.Generator) -> list[int]:
    """Verify two drafts of the pass as a tree: the first tokens are drawn without replacement and tried in order."""
    token_ids = (*drawn(0, rng, 2), *drawn(1, rng), *drawn(1, rng))
    rows = (PASS[0], PASS[1], PASS[1])
    draft = Draft(
        request_id="r", round_id=0, position=1, token_ids=token_ids, draft_probs=rows, parents=(ROOT, ROOT, 0, 1)
    )
    return verify_tree(laws_after(token_ids), draft, rng.random).token_ids


def best_of_two(rng: np.random.Generator) -> list[int]:
    """Mistake: verify two drafts, each as if it were the only one, and keep what came further."""
    return max((one_chain(rng) for _ in range(2)), key=len)


def pair_counts(verify: Verify) -> np.ndarray:
    """Return how often any two tokens came: [NUM_IDS, NUM_IDS]; a second that is missing is the target's."""
    rng = np.random.default_rng(0)
    committed = [verify(rng) for _ in range(NUM_DRAWS)]
    pairs = [own[:2] if len(own) > 1 else [*own, rng.choice(NUM_IDS, p=LAWS[own[0]])] for own in committed]
    return law.joint_counts(pairs, NUM_IDS)


@pytest.mark.parametrize("verify", [one_chain, tree_of_two])
def test_a_draft_of_the_pass_and_a_tree_of_its_drafts_keep_the_law(verify: Verify) -> None:
    law.assert_law(pair_counts(verify), law.joint_law(LAWS[LAST], LAWS, 2), ALPHA)


def test_keeping_the_best_of_several_drafts_by_outcome_is_detected() -> None:
    assert law.rejects_law(pair_counts(best_of_two), law.joint_law(LAWS[LAST], LAWS, 2), ALPHA)
