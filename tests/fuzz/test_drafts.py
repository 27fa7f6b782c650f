"""Drafts of a hostile drafter: what passes the check is verified without an exception, and no known fault passes."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exactness.references import verify_step
from fuzz.budget import examples
from fuzz.tally import TALLY
from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, ROOT, Draft, SparseRow
from outrider.verifier_service.messages.draft_checks import check_draft
from outrider.verifier_service.messages.request import AcceptanceRule, SamplingParams
from outrider.verifier_service.messages.tree import parents_of
from outrider.verifier_service.messages.wire import WireError, decode
from outrider.verifier_service.sampling.entries import VerificationEntry
from outrider.verifier_service.scheduling.schedule import first_nodes
from services.external_drafter import FAULTS, MORE_FAULTS, Fault
from tiny.verified import verify

VOCAB_SIZE, DRAFT_VOCAB_SIZE = 7, 9  # the drafter's is padded
MAX_LENGTH, MAX_NODES = 4, 6
SAMPLINGS = [
    SamplingParams(temperature=temperature, seed=seed, acceptance=rule)
    for (temperature, seed), rule in itertools.product(((0.0, None), (1.0, None), (1.0, 3)), AcceptanceRule)
]


@st.composite
def rows_for(draw: st.DrawFn, token_ids: tuple[int, ...]) -> SparseRow:
    """Draw a row that holds some tokens and, most of the time, is one."""
    ids = tuple(dict.fromkeys((*token_ids, *draw(st.lists(st.integers(0, DRAFT_VOCAB_SIZE - 1), max_size=3)))))
    weights = [1 + draw(st.integers(0, 99)) for _ in ids[1:]]
    first = DRAFT_PROB_SCALE - sum(weights) + draw(st.sampled_from((0, 0, 0, 0, 0, 1)))
    return SparseRow(token_ids=ids, weights=(first, *weights))


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    """Draw a draft that is nearly right, or right."""
    ids = st.integers(0, DRAFT_VOCAB_SIZE - 1) | st.sampled_from((0, 1, 2)) | st.just(DRAFT_VOCAB_SIZE)
    token_ids = tuple(draw(st.lists(ids, max_size=MAX_NODES + 1)))
    parents = None
    if draw(st.booleans()):
        parents = tuple(draw(st.integers(ROOT, max(ROOT, index - 1))) for index in range(len(token_ids)))
        if draw(st.sampled_from((False, False, False, True))):
            parents = tuple(draw(st.lists(st.integers(-2, MAX_NODES), max_size=MAX_NODES)))
    own = range(ROOT, len(token_ids) - 1) if parents is None else parents
    children: dict[int, list[int]] = {}
    for parent, token_id in zip(own, token_ids, strict=False):
        children.setdefault(parent, []).append(token_id)
    rows = None
    if draw(st.booleans()):
        rows = tuple(draw(rows_for(tuple(drawn))) for drawn in children.values())
    confidences = draw(st.none() | st.lists(st.floats(0.0, 1.0), max_size=2).map(tuple))
    if draw(st.booleans()):
        confidences = (0.5,) * len(token_ids)
    return Draft(
        request_id="r",
        round_id=1,
        position=3,
        token_ids=token_ids,
        draft_probs=rows,
        parents=parents,
        confidences=confidences,
    )


def problem_of(draft: Draft, max_nodes: int = MAX_NODES) -> str | None:
    return check_draft(draft, draft_vocab_size=DRAFT_VOCAB_SIZE, max_length=MAX_LENGTH, max_nodes=max_nodes)


@examples(400)
@given(drafts(), st.integers(0, MAX_NODES), st.integers(0, MAX_LENGTH))
def test_what_passes_the_check_is_verified(draft: Draft, max_nodes: int, max_depth: int) -> None:
    if (problem := problem_of(draft)) is not None:
        TALLY.count("drafts: nearly right", "refused")
        assert problem.strip()
        return
    TALLY.count("drafts: nearly right", "verified")
    for cut in (draft, first_nodes(draft, max_nodes=max_nodes, max_depth=max_depth)):
        assert problem_of(cut) is None, "a cut draft is a draft"
        samplings = [each for each in SAMPLINGS if cut.parents is None or each.acceptance is not AcceptanceRule.BLOCK]
        entries = [VerificationEntry(sampling=sampling, draft=cut, position=3) for sampling in samplings]
        logits = torch.randn(len(entries) * (len(cut.token_ids) + 1), VOCAB_SIZE)
        committed = verify(logits, entries, torch.Generator().manual_seed(0))
        assert verify_step(logits, entries, torch.Generator().manual_seed(0)) == committed
        for verified in committed:
            assert all(0 <= token_id < VOCAB_SIZE for token_id in verified.token_ids)
            assert [cut.token_ids[node] for node in verified.path] == verified.token_ids[:-1]
            above = [ROOT, *verified.path][: len(verified.path)]
            assert [parents_of(cut)[node] for node in verified.path] == above


def is_refused(fault: Fault, draft: Draft, max_nodes: int) -> bool:
    """Tell whether a fault shows in the message itself."""
    try:
        heard = [decode(payload, (Draft,)) for payload in fault.change(draft)]
    except WireError:
        return True
    wrong_place = any(each.position != draft.position or each.round_id != draft.round_id for each in heard)
    return wrong_place or any(problem_of(each, max_nodes) is not None for each in heard)


HARMLESS = {"slow", "silent", "garbage tokens", "wrong vocabulary", "oversized frames"}  # to this check


@pytest.mark.parametrize("max_nodes", [0, 32])
@pytest.mark.parametrize("fault", FAULTS + MORE_FAULTS, ids=lambda fault: fault.name)
def test_every_fault_of_the_drills_is_one(fault: Fault, max_nodes: int) -> None:
    draft = Draft(request_id="r", round_id=1, position=3, token_ids=(4, 2, 5))
    refused = functools.partial(is_refused, fault, max_nodes=max_nodes)
    if fault.name not in HARMLESS:
        assert refused(draft)
