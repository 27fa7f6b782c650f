from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from fakes.fleet_snapshots import DECIDED_AT_S, busy_fleet
from outrider.cluster.client.top_view import Latency, TopState, render
from outrider.cluster.monitoring.fleet_load import fleet_load

STATE = TopState(
    url="http://host:8000",
    load=fleet_load(busy_fleet(), DECIDED_AT_S + 0.5),
    latencies=(Latency(name="time to first token", p50_s=0.0125, p99_s=0.25, count=42),),
)


def shown(state: TopState) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(render(state))
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 120
    return text


def row_of(text: str, *beginning: str) -> list[str]:
    (row,) = (line.split() for line in text.splitlines() if line.split()[: len(beginning)] == list(beginning))
    return row


def test_a_frame_shows_every_replica_and_what_it_does():
    text = shown(STATE)
    busy = ["v0", "ready", "6", "2", "██████░░░░", "62%", "120.0", "50.0", "ms", "96", "12%"]
    assert row_of(text, "v0", "ready") == busy
    assert row_of(text, "v1", "draining") == ["v1", "draining", "0", "0", "░░░░░░░░░░", "0%", "0.0", "-", "-", "0%"]
    assert row_of(text, "d0") == ["d0", "ready", "default", "6", "1", "4.0", "ms", "75%", "2", "0"]
    assert row_of(text, "d1") == ["d1", "draining", "lookup", "0", "0", "-", "-", "1", "1"]


def test_a_frame_shows_what_verifiers_have_of_their_drafts():
    text = shown(STATE)
    drafting = ["v0", "up", "to", "3", "2.5", "0.25", "75%", "3.25", "7%", "41.7", "ms"]
    assert row_of(text, "v0", "up") == drafting
    assert row_of(text, "v1", "off:") == ["v1", "off:", "warmup", "0.0", "-", "-", "-", "-", "-"]


def test_every_figure_has_its_heading():
    text = shown(STATE)
    headings = {
        "verifiers": "state running waiting KV tokens/s step knee verify idle",
        "drafts": "of plan asked price accepted tokens/verif. late late by",
        "drafters": "state pool sessions queue draft ahead hits links up circuits open",
    }
    for role, names in headings.items():
        assert row_of(text, role) == [role, *names.split()]


def test_a_learner_shows_what_serves_and_what_its_versions_brought():
    text = shown(STATE)
    headings = "of phase serving samples steps named per round last event"
    assert row_of(text, "learner") == ["learner", *headings.split()]
    row = row_of(text, "default", "watch")
    assert row[:9] == ["default", "watch", "v4", "37", "150", "v2", "1.75,", "v4", "2.00"]
    assert row[9:12] == ["v4", "serves:", "in"]


@pytest.mark.parametrize("load", [{"learners": []}, {}])
def test_where_nothing_learns_nothing_is_said_of_learners(load: dict[str, list[str]]):
    rest = {name: value for name, value in STATE.load.items() if name != "learners"}
    assert "learner" not in shown(replace(STATE, load=rest | load))


def test_a_frame_fits_the_widest_names_and_figures():
    verifier = {
        **STATE.load["verifiers"][0],
        "id": "x7k2p9qa",
        "state": "draining",
        "num_running": 1024,
        "num_waiting": 65536,
        "tokens_per_s": 123456.7,
        "mean_step_s": 12.3456,
        "knee": 8192.0,
        "draft_length": 0,
        "disabled_reason": "drafter_unavailable",
        "mean_lateness_s": 12.3456,
    }
    text = shown(replace(STATE, load={**STATE.load, "verifiers": [verifier]}))
    assert row_of(text, "x7k2p9qa", "draining")[-3:] == ["ms", "8192", "12%"]
    assert row_of(text, "x7k2p9qa", "off:")[:3] == ["x7k2p9qa", "off:", "drafter_unavailable"]
    assert "12345.6 ms" in text


def test_totals_decisions_and_latencies_are_shown():
    text = shown(STATE)
    title, totals = text.splitlines()[:2]
    assert title.rstrip() == "Outrider http://host:8000"
    assert totals.split("   ")[:5] == [
        *("running 6", "waiting 2", "120.0 tokens/s", "24.0 per accelerator", "accepted 75%")
    ]
    assert row_of(text, "on")[:4] == ["on", "pays", "31", "74%"]
    assert row_of(text, "off")[:4] == ["off", "load", "11", "26%"]
    assert "time to first token  12.5 ms  250.0 ms  42" in text


def test_a_server_that_went_away_is_named_and_what_is_shown_is_dated():
    text = shown(replace(STATE, error="ConnectError: refused", age_s=12.0))
    assert "no answer: ConnectError: refused; what follows is 12 s old" in text
    assert "v0" in text


def test_a_server_that_never_answered_shows_nothing_else():
    text = shown(TopState(url="http://host:8000", error="ConnectError: refused"))
    assert "no answer: ConnectError: refused" in text
    assert "verifiers" not in text


@pytest.mark.parametrize(("age_s", "said"), [(0.5, False), (4.0, True), (None, True)])
def test_a_router_that_is_away_is_said(age_s: float | None, said: bool):
    text = shown(replace(STATE, load={**STATE.load, "age_s": age_s}))
    assert ("router" in text.splitlines()[0] + text.splitlines()[1]) == said


def test_an_empty_fleet_is_shown_as_such():
    text = shown(replace(STATE, load=fleet_load(None, 0.0), latencies=()))
    assert text.count("none") == 5
    assert "running 0" in text
    assert "   - per accelerator" in text


def test_names_from_the_network_can_neither_style_nor_drive_the_terminal():
    verifier = {**STATE.load["verifiers"][0], "id": "[red]\x1b[2Jv0"}
    text = shown(replace(STATE, load={**STATE.load, "verifiers": [verifier]}))
    assert "[red]" in text
    assert "\x1b" not in text
