"""The whole demo, on the embedded pair and with small waves."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from outrider.cluster.config.service_config import ServiceConfig
from outrider.lab.demo.kill import MAX_TOKENS
from outrider.lab.demo.show import run

# a drafter that was killed starts again, on a busy machine in half a minute
pytestmark = [pytest.mark.service, pytest.mark.soak, pytest.mark.timeout(600)]


def test_the_demo_keeps_its_word():
    written = io.StringIO()
    run(ServiceConfig(), Console(file=written, width=160), waves=(4, 8))
    said = written.getvalue()
    table = said[said.index("| what") :]
    answers = [f"{act} by {client}" for act in ("answers", "asked again") for client in ("HTTP (3)", "gRPC (2)")]
    for row in (*answers, "burst of 4", "burst of 8", "drafter killed"):
        assert f"| {row} " in table
    assert f"none of {MAX_TOKENS} tokens changed" in said
    assert "drafts again after" in said
    assert "\u2039accepted\u203a" in said
