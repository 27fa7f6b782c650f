"""Drafts of unseeded requests, judged as on a device, on whatever device there is: by laws and numbers that are given.

It fails where a device would have to wait for the host: see tests/tiny/played_graphs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from outrider.verifier_service.messages.draft import Draft
from outrider.verifier_service.messages.request import AcceptanceRule, SamplingParams
from outrider.verifier_service.messages.tree import VerifiedTokens
from outrider.verifier_service.sampling.device_verification import SampledRows, launch, path_to
from outrider.verifier_service.sampling.entries import VerificationEntry, first_rows
from outrider.verifier_service.sampling.verification import Verification, begin
from tiny.played_graphs import without_host

Plant = Callable[[SampledRows], SampledRows]  # a mistake in what is sent to the device


def verify_as_on_device(
    target_probs: torch.Tensor,
    drafts: Sequence[Draft | None],
    uniforms: torch.Tensor,
    rule: AcceptanceRule = AcceptanceRule.STANDARD,
    *,
    plant: Plant = lambda rows: rows,
) -> list[VerifiedTokens]:
    """Judge drafts by one rule: target_probs [num_rows, vocab_size], uniforms [num_rows] as in `verify_trees`."""
    sampling = SamplingParams(acceptance=rule)
    entries = [VerificationEntry(sampling=sampling, draft=draft, position=3) for draft in drafts]
    rows = plant(SampledRows.of(entries, uniforms, target_probs.shape[1], target_probs.device))
    ends, last = without_host(lambda: rows.judge(target_probs))
    return [
        VerifiedTokens.along(entry.draft, path_to(entry, end - start), token_id)
        for entry, start, end, token_id in zip(entries, first_rows(entries), ends.tolist(), last.tolist(), strict=True)
    ]


def begin_on_device(
    logits: torch.Tensor,
    entries: Sequence[VerificationEntry],
    rng: torch.Generator,
    rows: Sequence[int] | None = None,
) -> Verification:
    """As `begin`, by what judges on a device, wherever the logits are."""
    if not entries:
        return begin(logits, entries, rng, rows)
    return launch(logits if rows is None else logits[list(rows)], entries, rng)
