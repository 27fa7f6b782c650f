"""The verifier's parts with defaults for everything: a test names what it is about."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from outrider.verifier_service.drafting.asking import CoordinatorConfig
from outrider.verifier_service.drafting.coordinator import DraftCoordinator
from outrider.verifier_service.drafting.state_source import StateSource
from outrider.verifier_service.messages.draft import (
    DRAFT_PROB_SCALE,
    Commit,
    Commits,
    Draft,
    DraftClient,
    SparseRow,
    VerifierMessage,
)
from outrider.verifier_service.messages.request import Request, SamplingParams, SpeculationPlan
from outrider.verifier_service.pricing.draft_pricing import DraftPricing
from outrider.verifier_service.scheduling.draft_shares import Admission
from outrider.verifier_service.scheduling.kv_cache import BlockPool
from outrider.verifier_service.scheduling.outcome import Outcome
from outrider.verifier_service.scheduling.schedule import ScheduledRequest
from outrider.verifier_service.scheduling.scheduler import Scheduler, SchedulerConfig

VOCAB_SIZE = 100
MAX_MODEL_LEN = 64


def request(
    request_id: str = "a", prompt: Iterable[int] = (1, 2, 3), *, output: Iterable[int] = (), **named: Any
) -> Request:
    """Return a request of the engine; what is named is a field of it, of its plan or of its sampling."""
    prompt = list(prompt)
    plan = SpeculationPlan(**_taken(SpeculationPlan, named))
    fields = {"arrival_s": 0.0, "plan": plan, **_taken(Request, named)}
    return Request(
        request_id=request_id,
        token_ids=[*prompt, *output],
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(**named),
        **fields,
    )


def _taken(kind: type, named: dict[str, Any]) -> dict[str, Any]:
    """Return what is named of a kind's fields, and take it out."""
    return {field.name: named.pop(field.name) for field in dataclasses.fields(kind) if field.name in named}


def scheduler(
    num_blocks: int = 16, block_size: int = 4, admission: Admission | None = None, **config: Any
) -> Scheduler:
    config = {"max_model_len": MAX_MODEL_LEN, "vocab_size": VOCAB_SIZE, **config}
    return Scheduler(SchedulerConfig(**config), BlockPool(num_blocks, block_size), admission)


def commit(scheduler: Scheduler, item: ScheduledRequest, committed: Sequence[int], path: Sequence[int] = ()) -> None:
    """Commit one item of a step; `path` leads down its draft."""
    scheduler.commit([Outcome(item, 0, [*committed], tuple(path), False, None)])


def singly(messages: Iterable[VerifierMessage]) -> Iterator[VerifierMessage]:
    """Yield messages to a drafter, the rows of columns one by one."""
    for message in messages:
        if isinstance(message, Commits):
            yield from message.commits()
        else:
            yield message


def coordinator(
    client: DraftClient, states: StateSource | None = None, pricing: DraftPricing | None = None, **config: Any
) -> DraftCoordinator:
    config = {"max_model_len": MAX_MODEL_LEN, "vocab_size": VOCAB_SIZE, **config}
    return DraftCoordinator(client, CoordinatorConfig(**config), states, pricing)


def draft(
    of: Request | Commit | None = None,
    token_ids: Iterable[int] = (),
    parents: Sequence[int] | None = None,
    *,
    is_drawn: bool = False,
    **fields: Any,
) -> Draft:
    """Return a draft of a request at its end, or the answer to an ask; `is_drawn`: from rows of one token each."""
    token_ids = tuple(token_ids)
    if isinstance(of, Commit):
        place = {"round_id": of.round_id, "position": of.position + len(of.token_ids)}
    else:
        place = {"round_id": 0, "position": 3 if of is None else of.num_tokens}
    return Draft(
        **{
            "request_id": "a" if of is None else of.request_id,
            **place,
            "token_ids": token_ids,
            "parents": None if parents is None else tuple(parents),
            "draft_probs": _point_rows(token_ids, parents) if is_drawn else None,
            **fields,
        }
    )


def _point_rows(token_ids: Sequence[int], parents: Sequence[int] | None) -> tuple[SparseRow, ...]:
    """Return a row for each node with children: all of it on the first of them."""
    firsts: dict[int, int] = {}
    for parent, token_id in zip(parents or range(len(token_ids)), token_ids, strict=True):
        firsts.setdefault(parent, token_id)
    return tuple(SparseRow(token_ids=(token_id,), weights=(DRAFT_PROB_SCALE,)) for token_id in firsts.values())
