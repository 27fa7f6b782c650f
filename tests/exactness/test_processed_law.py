"""Unseeded sampling under penalties and biases keeps its law whatever drafts; forgetting the draft's tokens does not.

The law is the joint one of three output tokens over 5 ids (125 cells), each row processed by the reference that counts
from scratch. A drafter that knows nothing of penalties proposes two tokens, one id of them beyond the vocabulary; one
verification commits one to three, and what is missing is drawn plainly. Pearson's chi-square over 60,000 draws at
alpha 1e-6; a shift of total variation 0.03 that hides as well as it can is caught with a probability above 0.99.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from exactness.law import assert_law, draw_rows, joint_counts, many_small_objects, power, rejects_law, shifted
from fakes.processed import processed_row
from fakes.scripted import softmax, sparse_row
from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, Draft
from outrider.verifier_service.messages.request import LogitBias, SamplingParams
from outrider.verifier_service.sampling.entries import VerificationEntry
from outrider.verifier_service.sampling.logits_processors import LogitEdits, LogitsProcessor
from tiny.verified import target_probs, verify

VOCAB_SIZE = 5
NUM_DRAWS = 60_000
NUM_DEFECT_DRAWS = 20_000
PROMPT = (0, 3)
STOP = 4
SAMPLING = SamplingParams(
    temperature=0.9,
    presence_penalty=0.8,
    frequency_penalty=0.6,
    repetition_penalty=1.5,
    logit_bias=(LogitBias(token_id=1, bias=0.7), LogitBias(token_id=2, bias=-0.5)),
    min_tokens=2,
    bad_words=((1, 0), (2, 3, 1)),
    top_p=0.95,
)
LOGITS = 1.2 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))  # after each token
DRAFT_LAWS = softmax(np.random.default_rng(1).normal(size=(VOCAB_SIZE + 1, VOCAB_SIZE + 1)))  # one id of padding

EditsOf = Callable[[LogitsProcessor, Draft], LogitEdits]


@pytest.fixture(autouse=True)
def _no_garbage_collection() -> Iterator[None]:
    with many_small_objects():
        yield


def law_after(*output: int) -> np.ndarray:
    """Return the next token's law: [VOCAB_SIZE]."""
    last = (*PROMPT, *output)[-1]
    row = processed_row(LOGITS[last], SAMPLING, prompt=PROMPT, output=output, stop_token_ids=(STOP,))
    return target_probs(row[None], [SAMPLING])[0].double().numpy()


IDS = range(VOCAB_SIZE)
FIRST = law_after()
SECOND = np.array([law_after(a) for a in IDS])
THIRD = np.array([[law_after(a, b) for b in IDS] for a in IDS])
LAW = FIRST[:, None, None] * SECOND[:, :, None] * THIRD


def drafts_of(num_draws: int) -> list[Draft]:
    rows = [sparse_row(law, VOCAB_SIZE + 1) for law in DRAFT_LAWS]
    weights = np.zeros_like(DRAFT_LAWS)
    for law, row in zip(weights, rows, strict=True):
        law[list(row.token_ids)] = np.array(row.weights) / DRAFT_PROB_SCALE
    rng = np.random.default_rng(2)
    first = draw_rows(np.tile(weights[PROMPT[-1]], (num_draws, 1)), rng)
    second = draw_rows(weights[first], rng)
    return [
        Draft(
            request_id="r", round_id=1, position=len(PROMPT), token_ids=(a, b), draft_probs=(rows[PROMPT[-1]], rows[a])
        )
        for a, b in zip(first.tolist(), second.tolist(), strict=True)
    ]


def seeing_the_draft(processor: LogitsProcessor, draft: Draft) -> LogitEdits:
    return processor.edits(PROMPT, draft.token_ids)


def without_the_draft(processor: LogitsProcessor, draft: Draft) -> LogitEdits:
    """Mistake: every row is penalised as if only the committed tokens were output."""
    edits = processor.edits(PROMPT, draft.token_ids)
    first = {name: getattr(edits, name)[:1] for name in ("divisors", "penalties")}
    return dataclasses.replace(edits, **{name: np.repeat(row, len(edits.biases), 0) for name, row in first.items()})


def counts_of(edits_of: EditsOf, num_draws: int) -> np.ndarray:
    drafts = drafts_of(num_draws)
    entries = [
        VerificationEntry(sampling=SAMPLING, draft=draft, position=len(PROMPT), edits=edits_of(new_processor(), draft))
        for draft in drafts
    ]
    last = [min(token_id, VOCAB_SIZE - 1) for draft in drafts for token_id in (PROMPT[-1], *draft.token_ids)]
    verified = verify(LOGITS[torch.tensor(last)], entries, torch.Generator().manual_seed(3))
    tokens = np.array([[*row.token_ids, -1, -1][:3] for row in verified])
    rng = np.random.default_rng(4)
    for column in (1, 2):
        laws = SECOND[tokens[:, 0]] if column == 1 else THIRD[tokens[:, 0], tokens[:, 1]]
        tokens[:, column] = np.where(tokens[:, column] < 0, draw_rows(laws, rng), tokens[:, column])
    return joint_counts(tokens, VOCAB_SIZE)


def new_processor() -> LogitsProcessor:
    return LogitsProcessor(SAMPLING, num_prompt_tokens=len(PROMPT), stop_token_ids=(STOP,), vocab_size=VOCAB_SIZE)


def test_the_law_is_kept() -> None:
    counts = counts_of(seeing_the_draft, NUM_DRAWS)
    assert counts[STOP].sum() == counts[:, STOP].sum() == 0, "too early to stop"
    assert counts[:, :, STOP].sum() > 0
    assert_law(counts, LAW)


def test_forgetting_the_drafts_tokens_is_detected() -> None:
    assert rejects_law(counts_of(without_the_draft, NUM_DEFECT_DRAWS), LAW)


def test_the_test_can_fail() -> None:
    assert power(LAW, shifted(LAW, 0.03), NUM_DRAWS) > 0.99
    plain = target_probs(LOGITS[[PROMPT[-1]]], [SamplingParams()])[0].double().numpy()
    assert np.abs(plain - FIRST).sum() / 2 > 0.1, "the processors do nothing"
