"""From seconds of processes to costs, and to tables."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from outrider.lab.gateway.client import Found
from outrider.lab.gateway.figures import Figures, Run, figures_of
from outrider.lab.gateway.loads import Door, Load, requests
from outrider.lab.gateway.processes import GATEWAY, RANK
from outrider.lab.gateway.report import GatewayResult, to_markdown

STREAMS = Load(door=Door.HTTP, is_streamed=True, num_clients=4, num_rounds=1, num_tokens=250)  # 1000 tokens
REQUESTS = requests(Door.GRPC, 2, 100)


def run_of(spent_s: Mapping[str, float], *, load: Load = STREAMS, floor_s: float | None = None, **found: object) -> Run:
    values: dict[str, object] = {"elapsed_s": 2.0, "waits_s": [0.1, 0.3, 0.2, 0.9], "num_events": [250] * 4, **found}
    return Run(load=load, found=Found(**values), spent_s=spent_s, floor_s=floor_s)  # type: ignore[arg-type]


def test_the_cost_of_a_token_is_the_time_of_all_processes_over_all_tokens() -> None:
    figures = figures_of([run_of({GATEWAY: 0.4, RANK: 0.1}, floor_s=0.01)])
    assert figures.costs_s == {GATEWAY: pytest.approx(4e-4), RANK: pytest.approx(1e-4)}
    assert figures.together_s == pytest.approx(5e-4)
    assert figures.floor_s == pytest.approx(1e-5)
    assert figures.floor_ratio == pytest.approx(50.0)
    assert figures.num_per_s == 500.0
    assert (figures.wait_p50_s, figures.wait_last_s) == (0.25, 0.9)
    assert (figures.events_per_token, figures.errors) == (1.0, ())


def test_the_cost_of_a_request_is_over_requests() -> None:
    figures = figures_of([run_of({GATEWAY: 0.4}, load=REQUESTS, num_events=[])])
    assert figures.together_s == pytest.approx(4e-3)
    assert figures.num_per_s == 50.0
    assert (figures.events_per_token, figures.floor_ratio) == (None, None)


def test_repeats_are_medians_and_a_role_that_was_not_there_took_nothing() -> None:
    figures = figures_of([run_of({GATEWAY: seconds}) for seconds in (0.9, 0.2, 0.4)])
    assert figures.together_s == pytest.approx(4e-4)
    assert figures_of([run_of({GATEWAY: 0.2}), run_of({GATEWAY: 0.2, RANK: 0.2})]).costs_s[RANK] == pytest.approx(1e-4)


def test_errors_of_all_repeats_are_told_once() -> None:
    lacking = run_of({}, num_events=[250, 249, 250, 240])
    failed = run_of({}, num_events=[250] * 3, num_errors=1, errors=["lost"])
    figures = figures_of([lacking, lacking, failed])
    assert figures.errors == ("2 of 4 streams had 240 to 249 events for 250 tokens", "1 of 4 failed: lost")
    assert figures.events_per_token == pytest.approx((989 * 2 + 750) / 3000)


def test_a_load_that_nobody_answered_has_no_figures() -> None:
    figures = figures_of([run_of({GATEWAY: 0.4}, num_events=[], waits_s=[], num_errors=4, errors=["lost"])])
    assert (figures.together_s, figures.num_per_s, figures.wait_p50_s, figures.costs_s) == (None, None, None, {})
    assert figures.errors == ("4 of 4 failed: lost",)
    assert "**0.000, see errors**" in to_markdown(result_of(figures))


def test_what_failed_is_not_divided_by() -> None:
    figures = figures_of([run_of({GATEWAY: 0.3}, num_events=[250] * 3, num_errors=1, errors=["lost"])])
    assert figures.together_s == pytest.approx(4e-4)


def result_of(*figures: Figures) -> GatewayResult:
    return GatewayResult(machine="a machine", server="a server", repeats=1, rest_s={GATEWAY: 0.02}, figures=figures)


def test_a_page_has_a_table_of_streams_and_one_of_requests() -> None:
    streams = figures_of([run_of({RANK: 0.1, GATEWAY: 0.4, "nginx": 0.05}, floor_s=0.01)])
    page = to_markdown(result_of(streams, figures_of([run_of({GATEWAY: 0.4}, load=REQUESTS, num_events=[])])))
    assert "a server; one run. a machine." in page
    assert "20 ms a second (gateway 20.0)" in page
    header = next(line for line in page.splitlines() if "| gateway |" in line)
    row = next(line for line in page.splitlines() if "4 x 250" in line)
    columns = dict(zip(header.split(" | "), row.split(" | "), strict=True))
    assert list(columns)[3:6] == ["nginx", GATEWAY, RANK]  # strangers first, ours in the order of a request's way
    shown = {name: columns[name] for name in (GATEWAY, RANK, "together", "floor", "÷ floor", "last, ms")}
    assert shown == {
        GATEWAY: "400",
        RANK: "100",
        "together": "**550**",
        "floor": "10.0",
        "÷ floor": "55.0",
        "last, ms": "900",
    }
    assert "| grpc | plain | 2 | 4.00 | **4.00** | - | - | 50 |" in page
    assert "Errors" not in page
