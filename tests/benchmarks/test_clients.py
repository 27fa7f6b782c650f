"""The study of clients, against a played model."""

from __future__ import annotations

import itertools
import json

import pytest

from benchmarks.clients import TEXTS, Answer, is_valid, measure, tokens_per_verification
from fakes.backend import FakeBackend, build_gateway, build_tokenizer, says
from outrider.cluster.api.openai.endpoints import build_api
from outrider.cluster.common.errors import Overloaded
from outrider.verifier_service.messages.request import FinishReason, SpeculationMetrics
from services.served_app import served

RIGHT = {"name": "weather", "arguments": {"city": "Rome", "days": 2}}


async def healthy():
    return True


@pytest.mark.parametrize(
    ("calls", "valid"),
    [
        ([RIGHT], True),
        ([RIGHT, RIGHT], True),
        ([], False),
        ([{"name": "wether", "arguments": {}}], False),
        ([{"name": "weather", "arguments": {"city": "Rome", "days": 20}}], False),
        ([{"name": "weather", "arguments": {"city": "Rome"}}], False),
    ],
)
def test_a_call_is_valid_where_its_schema_says_so(calls, valid):
    assert is_valid([{**call, "arguments": json.dumps(call["arguments"])} for call in calls]) == valid
    assert not is_valid([{"name": "weather", "arguments": "{"}])


def test_verifications_without_a_draft_count():
    drafted = Answer(text="", num_tokens=10, num_drafts=2, num_accepted=4, seconds=1.0)
    plain = Answer(text="", num_tokens=10, num_drafts=0, num_accepted=0, seconds=1.0)
    assert tokens_per_verification([drafted]) == pytest.approx(10 / 6)
    assert tokens_per_verification([drafted, plain]) == pytest.approx(20 / 16)


async def test_the_page_says_what_was_valid_and_the_same():
    tokenizer, turns = build_tokenizer(), itertools.count()

    def script(request):
        if next(turns) < 2:
            return [Overloaded("full")]
        return says(tokenizer, json.dumps([RIGHT]) if request.sampling.structured else "hm")

    speculation = SpeculationMetrics(enabled=True, num_drafts=1, num_draft_tokens=1, num_accepted_tokens=1)
    backend = FakeBackend(script, finish_reason=FinishReason.STOP, speculation=speculation)
    app = build_api(build_gateway(backend, tokenizer, max_model_len=4096), healthy)
    with served(app) as url:
        page = await measure(url, num_calls=3, concurrency=2, num_chats=4)
    (burst,) = (line for line in page.splitlines() if line.startswith("| 4 |"))
    assert burst.endswith("| 0 | 2 | 1 s (2) |")
    assert "| drafts | 3 / 3 | 3 / 3 |" in page
    assert "| none | 3 / 3 |  |" in page
    edits = [request for request in backend.requests if request.sampling.structured is None][4 + 2 :]  # after the burst
    assert len(edits) == 3 * 2 * len(TEXTS)
    assert sum(bool(request.prediction_token_ids) for request in edits) == len(edits) / 3
    assert sum(request.sampling.num_speculative_tokens == 0 for request in edits) == len(edits) / 3
