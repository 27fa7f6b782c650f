"""Prefill and decode apart by hand: steps of 10 ms, and 1 ms more for each 10 tokens above 100."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from outrider.cluster.cli.main import main
from outrider.lab.simulate import apart
from outrider.lab.simulate.accelerators import StepTiming
from outrider.lab.simulate.apart import HANDOVER_S, ApartFigures, ApartRun, Client, Layout
from outrider.lab.simulate.drafting import DrafterShape
from outrider.lab.simulate.engines import VerifierShape
from outrider.lab.simulate.simulation import FleetShape

TIMING = StepTiming(compute_token_s=1e-4, base_s=10e-3, context_token_s=0.0, overhead_s=0.0)
DRAFTER = DrafterShape(timing=replace(TIMING, base_s=1e-3, compute_token_s=1e-6), max_draft_length=4)
FLEET = FleetShape(
    verifier=VerifierShape(timing=TIMING, kv_tokens=100_000), num_verifiers=2, drafter=DRAFTER, num_drafters=2
)
TOGETHER = Layout(max_num_batched_tokens=1000)
APART = Layout(max_num_batched_tokens=1000, link_bytes_per_s=1e9)
KV_TOKEN_S = 1e-5


def clients_of(layout: Layout, *prompts: Client, acceptance: float = 0.0, num_streams: int = 0) -> list[Client]:
    run = ApartRun(FLEET, layout, acceptance, KV_TOKEN_S, seed=0)
    run.run(prompts, num_streams, duration_s=1.0)
    return run.clients


def prompt(at_s: float, num_tokens: int, num_output_tokens: int = 10) -> Client:
    return Client(at_s, True, num_tokens, num_output_tokens)


@pytest.mark.parametrize("acceptance", [0.0, 0.7])
@pytest.mark.parametrize("layout", [TOGETHER, APART], ids=["together", "apart"])
def test_every_request_gets_all_of_its_tokens_in_time(layout: Layout, acceptance: float) -> None:
    clients = clients_of(layout, prompt(0.1, 3000), prompt(0.2, 500), acceptance=acceptance, num_streams=4)
    assert len(clients) > 6, "where a stream ends, the next begins"
    for client in clients:
        assert sum(client.num_tokens) == client.num_output_tokens
        assert client.outputs_s == sorted(client.outputs_s)
        assert client.outputs_s[0] > client.arrival_s
    assert any(size > 1 for client in clients for size in client.num_tokens) == (acceptance > 0)


def test_the_second_token_comes_when_the_last_chunk_has_crossed_the_link() -> None:
    # chunks of 1,000, 1,000 and 400 tokens take 100, 100 and 40 ms, on the link 10, 10 and 4: the last is waited for
    (client,) = clients_of(APART, prompt(0.0, 2400))
    assert client.outputs_s[0] == pytest.approx(0.24)
    assert client.outputs_s[1] - client.outputs_s[0] == pytest.approx(400 * KV_TOKEN_S + HANDOVER_S + 10e-3)
    (client,) = clients_of(TOGETHER, prompt(0.0, 2400))
    assert client.outputs_s[:2] == pytest.approx([0.24, 0.25])


def test_what_a_link_cannot_carry_in_time_queues() -> None:
    slow = ApartRun(FLEET, APART, 0.0, token_s=1e-3, seed=0)
    slow.run([prompt(0.0, 1000), prompt(0.0, 1000)], 0, duration_s=1.0)
    assert [client.outputs_s[0] for client in slow.clients] == pytest.approx([0.1, 0.2])
    # a second on the link for each, one after another
    assert [client.outputs_s[1] for client in slow.clients] == pytest.approx([1.111, 2.111])


@pytest.mark.parametrize(
    ("layout", "stall_s"),
    [(TOGETHER, 0.1), (Layout(max_num_batched_tokens=200), 0.02), (APART, 0.01)],
    ids=["large steps", "small steps", "apart"],
)
def test_a_long_prompt_stalls_a_stream_only_where_both_share_a_verifier(layout: Layout, stall_s: float) -> None:
    # three requests on two verifiers: the last joins the first
    clients = clients_of(layout, prompt(0.0, 100, 40), prompt(0.0, 100, 40), prompt(0.105, 3000))
    gaps_s = [later - earlier for earlier, later in itertools.pairwise(clients[0].outputs_s[1:])]
    assert max(gaps_s) == pytest.approx(stall_s)


def test_figures_are_of_what_comes_after_the_warm_up() -> None:
    early = Client(0.0, False, 1, 3, outputs_s=[0.1, 0.5, 0.6], num_tokens=[1, 1, 1])
    stream = Client(0.4, False, 1, 4, outputs_s=[0.5, 0.6, 0.9], num_tokens=[1, 2, 1])
    late = Client(0.9, True, 1, 2, outputs_s=[1.2, 1.3], num_tokens=[1, 1])
    figures = ApartFigures.of([early, stream, late], end_s=1.0)
    assert figures.tokens_per_s == pytest.approx(6 / 0.75)  # of 0.25 to 1 s
    assert figures.tokens_per_output == pytest.approx(6 / 5)
    assert figures.gap_p50_s == pytest.approx((0.1 + 0.3) / 2)  # 0.4, 0.1, 0.1, 0.3
    assert figures.long_ttft_p50_s == pytest.approx(0.3)
    assert figures.short_ttft_p99_s == pytest.approx(0.1)


def test_the_verb_shows_both_layouts_and_gives_the_same_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(apart, "CELLS", ((4, 0.4),))
    json_file = tmp_path / "apart.json"
    arguments = [
        "simulate",
        "--study",
        "apart",
        "--target-params",
        "8e9",
        "--duration-s",
        "1",
        "--json",
        str(json_file),
    ]
    first = CliRunner().invoke(main, arguments)
    assert first.exit_code == 0, first.output
    for text in ("together, steps of 512", "apart, 25 GB/s", "first to second p99"):
        assert text in first.output
    rows = json.loads(json_file.read_text())["runs"]
    assert [row["has_drafts"] for row in rows] == [False] * 6 + [True] * 6
    CliRunner().invoke(main, arguments)
    assert json.loads(json_file.read_text())["runs"] == rows
