"""examples/openai_client.py against the HTTP application on a real port, over a backend that plays a script."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from outrider.verifier_service.messages.request import SpeculationMetrics
from services.served_app import served
from support.stack import Stack

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "openai_client.py"))


def test_it_lists_the_model_streams_and_steers_speculation(capsys: pytest.CaptureFixture[str]) -> None:
    drafts = SpeculationMetrics(enabled=True, num_drafts=2, num_draft_tokens=6, num_accepted_tokens=3)
    stack = Stack("the quick fox", speculation=drafts, max_model_len=200)
    with served(stack.app) as url:
        EXAMPLE["main"](f"{url}/v1")
    said = capsys.readouterr().out
    assert "serves tiny" in said
    assert said.count("the quick fox\n[3 of 6 draft tokens were right, 2.50 tokens per verification]") == 3
    assert [request.sampling.num_speculative_tokens for request in stack.requests] == [None, 2, 0]
    assert {request.sampling.seed for request in stack.requests} == {1}


@pytest.mark.parametrize(
    ("speculation", "line"),
    [
        ({"num_drafts": 0, "disabled_reason": "load"}, "no drafts: load"),
        ({"num_drafts": 0, "disabled_reason": None}, "no drafts: none came in time"),
    ],
)
def test_it_says_why_there_were_no_drafts(speculation: dict[str, object], line: str) -> None:
    assert EXAMPLE["summary"](speculation) == line
