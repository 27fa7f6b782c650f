"""examples/grpc_client.py against the gateway's gRPC server, over a backend that plays a script."""

from __future__ import annotations

import asyncio
import runpy
from pathlib import Path

import pytest

from fakes.backend import FakeBackend, Step, build_tokenizer, says
from outrider.verifier_service.messages.request import GenerationRequest, SpeculationMetrics
from support.stack import Stack
from support.waiting import until

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "grpc_client.py"))
TOKENIZER = build_tokenizer()
STEPS = [step for text in ("the", "quick") for step in says(TOKENIZER, text)]


def script(request: GenerationRequest) -> list[Step]:
    """Two tokens of a step were a draft token that was right, and the bonus token; the long stream never ends."""
    first, *rest = STEPS
    return [first, None] if request.sampling.max_tokens == 1000 else [[*first, *rest[0]], *rest[1:]]


@pytest.mark.parametrize(
    ("speculation", "last_line"),
    [
        (SpeculationMetrics(enabled=True, num_drafts=1, num_draft_tokens=1, num_accepted_tokens=1), None),
        (SpeculationMetrics(disabled_reason="load"), "[no drafts: load]"),
    ],
)
async def test_it_shows_the_model_streams_with_capped_drafts_and_cancels(
    speculation: SpeculationMetrics, last_line: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = FakeBackend(script, speculation=speculation)
    async with asyncio.timeout(20), Stack(backend, tokenizer=TOKENIZER, max_model_len=2048).rpc() as rpc:
        await asyncio.to_thread(EXAMPLE["main"], f"127.0.0.1:{rpc.running.port}")
        await until(lambda: backend.cancelled)
    said = capsys.readouterr().out
    assert f"serves tiny: {len(TOKENIZER)} tokens, at most 2048 in a row" in said
    assert f"thequick\n[1 of {len(STEPS)} tokens came from drafts]" in said
    assert last_line is None or last_line in said
    assert "cancelled a second stream: CANCELLED" in said
    assert [request.sampling.num_speculative_tokens for request in backend.requests] == [2, None]
    assert backend.cancelled == [backend.requests[1].request_id]
