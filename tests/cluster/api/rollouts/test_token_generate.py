"""vLLM's token door: why an answer ended. What it shares with others: tests/cluster/api/test_doors.py."""

from __future__ import annotations

from typing import Any

import pytest

from fakes.backend import FakeBackend
from outrider.cluster.gateway.rollout_memory import RolloutMemory
from outrider.verifier_service.messages.request import FinishReason
from support.stack import Stack

A, B = 5, 6


@pytest.mark.parametrize(
    ("sampling", "reason", "told"),
    [
        ({"stop_token_ids": [B]}, FinishReason.STOP, ("stop", B)),
        ({"stop_token_ids": [A]}, FinishReason.STOP, ("stop", None)),  # it ended by itself
        ({}, FinishReason.STOP, ("stop", None)),
        ({"stop_token_ids": [B]}, FinishReason.LENGTH, ("length", None)),
    ],
)
async def test_an_answer_names_the_stop_token_that_it_has_met(
    sampling: dict[str, Any], reason: FinishReason, told: tuple[str, int | None]
) -> None:
    backend = FakeBackend(lambda _: [[A], [B]], finish_reason=reason)
    stack = Stack(backend, rollouts=True, memory=RolloutMemory())
    answer = await stack.post("/inference/v1/generate", {"token_ids": [7], "sampling_params": sampling})
    (choice,) = answer.json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == told
