"""The study of second turns, against a played model."""

from __future__ import annotations

import pytest

from benchmarks.chats import turns
from fakes.backend import FakeBackend, build_gateway, build_tokenizer, says
from outrider.cluster.api.openai.endpoints import build_api
from outrider.verifier_service.messages.request import FinishReason
from services.served_app import served


async def healthy():
    return True


async def test_a_page_has_a_row_of_every_kind_and_arm(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(turns, "THINKING_S", 0.0)
    tokenizer = build_tokenizer()
    backend = FakeBackend(lambda _: says(tokenizer, "the lazy dog"), finish_reason=FinishReason.STOP)
    app = build_api(build_gateway(backend, tokenizer, max_model_len=4096), healthy)
    with served(app) as url:
        page = await turns.measure(url, num_conversations=1, num_clients=2, num_rounds=1)
    assert "tokens differ in 0 of 2" in page
    for arm in turns.ARMS:
        assert sum(f"| {arm} |" in line for line in page.splitlines()) == len(turns.KINDS) + 1
    stored = [request.history_key != "" for request in backend.requests]
    assert any(stored)
    assert not all(stored)


def test_an_interval_holds_the_median():
    low, high = turns.interval([float(value) for value in range(100)])
    assert low < 49.5 < high
    assert high - low < 50
