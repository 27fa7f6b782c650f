"""The page of what agents could do."""

from __future__ import annotations

import datetime

from agents.packages import Package
from agents.study import CLIENTS, page
from agents.words import CALL, COLUMNS, ERROR, FIRST, REASONING


def test_a_client_is_shown_with_what_it_could_do_what_not_and_what_it_lacks() -> None:
    client = Package(package="some", api="chat", script="speak.py", lacks={REASONING: "drops it"})
    tried = {**dict.fromkeys(set(COLUMNS) - {REASONING}, ""), ERROR: "it hung"}
    text = page([(client, tried)], {"some": "1.2"}.__getitem__, datetime.date(2026, 11, 28))
    assert "| some | 1.2 | chat | yes | yes | yes | yes | yes | - | **no** |" in text
    assert "- some (chat), reasoning: it drops it." in text
    assert "2026-11-28" in text


def test_every_api_has_clients_that_stream_call_and_recognise_errors() -> None:
    assert {client.api for client in CLIENTS} == {"chat", "responses", "messages"}
    assert not any({FIRST, CALL, ERROR} & client.lacks.keys() for client in CLIENTS)
