"""Verify drafts once in every shape before anything is served: the first call of a kernel, or of a shape, is dear.

What runs is the engine itself, over requests whose drafts are made up: chains, trees where drafts may be trees, greedy,
seeded and drawn ones, one by one and then more and more of them together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from outrider.verifier_service.engine.engine import VerifierEngine
from outrider.verifier_service.messages.draft import (
    DRAFT_PROB_SCALE,
    ROOT,
    Commit,
    Draft,
    DrafterEvent,
    SparseRow,
    VerifierMessage,
)
from outrider.verifier_service.messages.request import GenerationRequest, SamplingParams, SpeculationPlan

PROMPT_LENGTH, DRAFT_LENGTH, NUM_TOKENS = 4, 4, 6
SAMPLINGS = (
    SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0),
    SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=1.0, seed=0),
    SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=1.0),
)
FORK = (ROOT, ROOT)  # parents of the smallest tree that is no chain


class MadeUpDrafts:
    """A `DraftClient` whose drafter answers at once, with the first tokens of the vocabulary."""

    def __init__(self) -> None:
        self._events = [DrafterEvent(drafter_id="warm-up")]

    def send(self, drafter_id: str, messages: Sequence[VerifierMessage]) -> None:
        drafts = [_made_up(message) for message in messages if isinstance(message, Commit)]
        self._events += (DrafterEvent(drafter_id=drafter_id, message=draft) for draft in drafts)

    def poll(self) -> list[DrafterEvent]:
        events, self._events = self._events, []
        return events


def _made_up(ask: Commit) -> Draft:
    is_tree = ask.max_nodes >= len(FORK)
    token_ids = tuple(range(len(FORK) if is_tree else ask.max_length))
    # requests are numbered: those that are neither greedy nor seeded get rows, as their drafts have them
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
    """Return how long a warm-up may take: on a CPU first calls cost little."""
    return 5.0 if device.type == "cuda" else 0.1


def doubled(most: int, patience_s: float, clock: Callable[[], float]) -> Iterator[int]:
    """Yield 1, 2, 4 … up to `most`, as long as twice what all before took is less than `patience_s`."""
    begin_s, count = clock(), 1
    while count <= most and (clock() - begin_s) * 2 <= patience_s:
        yield count
        count *= 2


def warm_up(engine: VerifierEngine, *, max_requests: int, patience_s: float, clock: Callable[[], float]) -> int:
    """Verify drafts of 1, 2, 4 … requests as long as that takes less than `patience_s` in all; return how many at most.

    `engine` must have `MadeUpDrafts` and be used for nothing else. One that cannot hold such a request verifies none.
    """
    num_done = 0
    for count in doubled(max_requests, patience_s, clock):
        together = [range(kind, kind + 1) for kind in range(len(SAMPLINGS))] if count == 1 else [range(count)]
        if not all(_verify(engine, numbers) for numbers in together):
            break
        num_done = count
    return num_done


def _verify(engine: VerifierEngine, numbers: range) -> bool:
    """Let so many requests draft and verify; return whether the engine took them."""
    for number in numbers:
        request = GenerationRequest(
            request_id=str(number),
            prompt_token_ids=tuple(range(PROMPT_LENGTH)),
            sampling=SAMPLINGS[number % len(SAMPLINGS)],
            plan=SpeculationPlan(draft_length=DRAFT_LENGTH, is_pinned=True),
            cache_salt=str(number),  # each reads a prompt of its own
        )
        if engine.add(request) is not None:
            return False
    while engine.has_work():
        engine.step()
    return True
