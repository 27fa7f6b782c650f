"""Drafts that nobody has read: their placeholders are judged as the tokens that they stand for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.verifier_service.messages.batch import placeholder_token
from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, Draft, SparseRow
from outrider.verifier_service.messages.request import AcceptanceRule, SamplingParams
from outrider.verifier_service.sampling.entries import VerificationEntry
from outrider.verifier_service.sampling.unread import UnreadTokens
from outrider.verifier_service.sampling.verification import PendingVerification, begin, draw_uniforms
from outrider.verifier_service.sampling.verification_plan import VerificationPlan
from tiny.played_graphs import without_host

VOCAB_SIZE, WIDTH = 6, 4
CPU = torch.device("cpu")
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(seed=5),
    SamplingParams(),
    SamplingParams(top_p=0.8, temperature=0.7),
    SamplingParams(acceptance=AcceptanceRule.BLOCK),
    SamplingParams(acceptance=AcceptanceRule.TYPICAL),
)


def sparse_row(rng: random.Random) -> SparseRow:
    ids = rng.sample(range(VOCAB_SIZE), rng.randint(1, WIDTH))
    weights = sorted((rng.randint(1, 99) for _ in ids), reverse=True)
    return SparseRow(token_ids=tuple(ids), weights=(DRAFT_PROB_SCALE - sum(weights[1:]), *weights[1:]))


def chain(rng: random.Random, *, is_drawn: bool) -> Draft | None:
    length = rng.randint(0, 4)
    if length == 0:
        return None
    rows = tuple(sparse_row(rng) for _ in range(length)) if is_drawn else None
    token_ids = tuple(
        rng.choice(rows[place].token_ids) if rows else rng.randrange(VOCAB_SIZE) for place in range(length)
    )
    return Draft(request_id="r", round_id=1, position=3, token_ids=token_ids, draft_probs=rows)


def entries_of(rng: random.Random) -> list[VerificationEntry]:
    point_mass = Draft(request_id="r", round_id=1, position=3, token_ids=(rng.randrange(VOCAB_SIZE),))
    entries = [VerificationEntry(SAMPLINGS[0], point_mass, position=3)]
    for _ in range(rng.randint(0, 6)):
        sampling = rng.choice(SAMPLINGS)
        is_drawn = sampling.seed is None and sampling.temperature > 0 and rng.random() < 0.7
        entries.append(VerificationEntry(sampling, chain(rng, is_drawn=is_drawn), position=rng.randint(3, 9)))
    return entries


def unread(entries: Sequence[VerificationEntry]) -> tuple[list[VerificationEntry], UnreadTokens]:
    """Put placeholders in the place of the drafts' tokens: those of point masses are the first."""
    drafts = [entry.draft for entry in entries if entry.draft is not None]
    drafts.sort(key=lambda draft: draft.draft_probs is not None)
    numbers = [token_id for draft in drafts for token_id in draft.token_ids]
    rows = [row for draft in drafts for row in draft.draft_probs or ()]
    candidates, weights = np.full((len(rows), WIDTH), 1), np.zeros((len(rows), WIDTH), np.int64)
    for place, row in enumerate(rows):
        candidates[place, : len(row.token_ids)], weights[place, : len(row.weights)] = row.token_ids, row.weights
    places: dict[int, tuple[int, ...]] = {}
    for draft in drafts:
        start = sum(map(len, places.values()))
        places[id(draft)] = tuple(placeholder_token(start + place) for place in range(len(draft.token_ids)))
    opened = [replace(entry) for entry in entries]
    for entry in opened:
        if entry.draft is not None:
            entry.draft = replace(entry.draft, token_ids=places[id(entry.draft)], draft_probs=None)
    return opened, UnreadTokens(torch.tensor(numbers), torch.from_numpy(candidates), torch.from_numpy(weights))


@pytest.mark.parametrize("seed", range(40))
def test_placeholders_are_judged_as_the_tokens_that_they_stand_for(seed: int) -> None:
    rng = random.Random(seed)
    entries = entries_of(rng)
    num_rows = sum(entry.num_rows for entry in entries)
    logits = torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    uniforms = draw_uniforms(entries, torch.Generator().manual_seed(seed))
    expected = VerificationPlan(entries, uniforms, VOCAB_SIZE, CPU).judge(logits)
    opened, tokens = unread(entries)
    plan = VerificationPlan(opened, uniforms, VOCAB_SIZE, CPU, unread=tokens)
    assert torch.equal(without_host(lambda: plan.judge(logits)), expected)


def test_drafts_are_put_into_the_entries_before_they_are_collected() -> None:
    draft = Draft(request_id="r", round_id=1, position=3, token_ids=(2, 4))
    entry = VerificationEntry(SamplingParams(temperature=0.0), draft, 3)
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[torch.arange(3), torch.tensor([2, 4, 1])] = 9.0
    opened, tokens = unread([entry])
    verification = begin(logits, opened, torch.Generator(), None, tokens)
    assert isinstance(verification, PendingVerification), "no walk on the host, which does not know the tokens"
    opened[0].draft = draft
    (found,) = verification.collect()
    assert (found.token_ids, found.path) == ([2, 4, 1], (0, 1))
