"""Warm-up: verify drafts of every shape before the first request, since a first call of a kernel or shape is slow.

The engine itself runs requests with made-up drafts: chains, and trees where drafts may be trees; greedy, seeded and
unseeded; first one request at a time, then 2, 4, 8 … in one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from outrider.verifier_service.engine.engine import VerifierEngine
from outrider.verifier_service.messages.draft import (
    DRAFT_PROB_SCALE,
    ROOT,
    Commit,
    Commits,
    Draft,
    DrafterEvent,
    SparseRow,
    VerifierMessage,
    each_commit,
)
from outrider.verifier_service.messages.request import GenerationRequest, SamplingParams, SpeculationPlan

PROMPT_LENGTH, DRAFT_LENGTH, NUM_TOKENS = 4, 4, 6
SAMPLINGS = (
    SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0),
    SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=1.0, seed=0),
    SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=1.0),
)
FORK = (ROOT, ROOT)  # parents of the smallest tree that is not a chain


class MadeUpDrafts:
    """A `DraftClient` whose drafter answers at once with the first tokens of the vocabulary."""

    def __init__(self) -> None:
        self._events = [DrafterEvent(drafter_id="warm-up")]

    def send(self, drafter_id: str, messages: Sequence[VerifierMessage]) -> None:
        asking = (message for message in messages if isinstance(message, Commit | Commits))
        drafts = [_made_up(ask) for message in asking for ask in each_commit(message)]
        self._events += (DrafterEvent(drafter_id=drafter_id, message=draft) for draft in drafts)

    def poll(self) -> list[DrafterEvent]:
        events, self._events = self._events, []
        return events


def _made_up(ask: Commit) -> Draft:
    is_tree = ask.max_nodes >= len(FORK)
    token_ids = tuple(range(len(FORK) if is_tree else ask.max_length))
    # request ids are numbers, and the last of every `SAMPLINGS` is unseeded: only its drafts have `draft_probs`
    has_rows = not is_tree and int(ask.request_id) % len(SAMPLINGS) == len(SAMPLINGS) - 1
    rows = tuple(SparseRow(token_ids=(token_id,), weights=(DRAFT_PROB_SCALE,)) for token_id in token_ids)
    return Draft(
        request_id=ask.request_id,
        round_id=ask.round_id,
        position=ask.position + len(ask.token_ids),
        token_ids=token_ids,
        parents=FORK if is_tree else None,
        draft_probs=rows if has_rows else None,
    )


def patience_s(device: torch.device) -> float:
    """Return how long a warm-up may take; on a CPU first calls cost little."""
    return 5.0 if device.type == "cuda" else 0.1


def doubled(most: int, patience_s: float, clock: Callable[[], float]) -> Iterator[int]:
    """Yield 1, 2, 4 … up to `most`; stop when twice the time so far exceeds `patience_s`."""
    begin_s, count = clock(), 1
    while count <= most and (clock() - begin_s) * 2 <= patience_s:
        yield count
        count *= 2


def warm_up(engine: VerifierEngine, *, max_requests: int, patience_s: float, clock: Callable[[], float]) -> int:
    """Verify drafts of 1, 2, 4 … requests within `patience_s` in all; return the largest number of requests.

    `engine` must draft with `MadeUpDrafts` and serve nothing else. If it cannot hold such a request, return 0.
    """
    num_done = 0
    for count in doubled(max_requests, patience_s, clock):
        together = [range(kind, kind + 1) for kind in range(len(SAMPLINGS))] if count == 1 else [range(count)]
        if not all(_verify(engine, numbers) for numbers in together):
            break
        num_done = count
    return num_done


def _verify(engine: VerifierEngine, numbers: range) -> bool:
    """Run one request per number, in one batch; return False if the engine refuses one."""
    for number in numbers:
        request = GenerationRequest(
            request_id=str(number),
            prompt_token_ids=tuple(range(PROMPT_LENGTH)),
            sampling=SAMPLINGS[number % len(SAMPLINGS)],
            plan=SpeculationPlan(draft_length=DRAFT_LENGTH, is_pinned=True),
            cache_salt=str(number),  # no prefix hits between them
        )
        if engine.add(request) is not None:
            return False
    while engine.has_work():
        engine.step()
    return True
