"""What the engine does to a step's logits, in one call each: edits, laws, and the verification of entries or drafts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.verifier_service.messages.draft import Draft
from outrider.verifier_service.messages.request import SamplingParams
from outrider.verifier_service.messages.tree import VerifiedTokens
from outrider.verifier_service.sampling.entries import VerificationEntry, first_rows
from outrider.verifier_service.sampling.logits_processors import LogitEdits, SentEdits
from outrider.verifier_service.sampling.sampled_rows import SampledRows
from outrider.verifier_service.sampling.sampler import LawShapes, SamplingShape
from outrider.verifier_service.sampling.verification import begin
from outrider.verifier_service.sampling.verification_plan import path_to
from tiny.played_graphs import without_host

PLAIN = SamplingParams()


def apply_edits(logits: torch.Tensor, edits: Sequence[tuple[int, LogitEdits]]) -> torch.Tensor:
    """Return the logits with each request's edits, given with its first row: float32 [num_rows, vocab_size]."""
    return SentEdits.of(edits, logits.shape[1], logits.device).applied(logits)


def target_probs(logits: torch.Tensor, sampling: Sequence[SamplingShape]) -> torch.Tensor:
    """Return each row's law under its own shape, both float32 [num_rows, vocab_size]."""
    vocab_size, device = logits.shape[1], logits.device
    probs, is_right = LawShapes.of(sampling, vocab_size, device).probs(logits)
    for row in [] if is_right is None else (~is_right).nonzero()[:, 0].tolist():
        probs[row], _ = LawShapes.of([sampling[row]], vocab_size, device, ranks_all=True).probs(logits[row : row + 1])
    return probs


def verify(logits: torch.Tensor, entries: Sequence[VerificationEntry], rng: torch.Generator) -> list[VerifiedTokens]:
    """Verify a step from beginning to end; see `begin`."""
    return begin(logits, entries, rng).collect()


def verify_drafts(
    target_probs: torch.Tensor,
    drafts: Sequence[Draft | None],
    uniforms: torch.Tensor,
    sampling: SamplingParams | Sequence[SamplingParams] = PLAIN,
) -> list[VerifiedTokens]:
    """Verify drafts of unseeded requests by laws and numbers that are given; one `sampling` for all, or one for each.

    target_probs float [num_rows, vocab_size] and uniforms float64 [num_rows] have len(draft) + 1 rows per draft. It
    fails where a device would have to wait for the host: see tests/tiny/played_graphs.py.
    """
    samplings = [sampling] * len(drafts) if isinstance(sampling, SamplingParams) else sampling
    entries = [
        VerificationEntry(sampling=own, draft=draft, position=3) for own, draft in zip(samplings, drafts, strict=True)
    ]
    assert len(target_probs) == len(uniforms), (target_probs.shape, uniforms.shape)
    rows = SampledRows.of(entries, uniforms.numpy(), target_probs.shape[1], target_probs.device)
    ends, last = without_host(lambda: rows.judge(target_probs))
    return [
        VerifiedTokens.along(entry.draft, path_to(entry, end - start), token_id)
        for entry, start, end, token_id in zip(entries, first_rows(entries), ends.tolist(), last.tolist(), strict=True)
    ]
