"""What long work tells a log and a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from outrider.cluster.common.terminal import show_work


def test_a_log_gets_a_line_now_and_then():
    times = iter([0.0, 1.0, 5.0, 25.0, 90.0])
    written = io.StringIO()
    console = Console(file=written, force_terminal=False, width=20)
    with show_work("work", 200, console=console, clock=lambda: next(times)) as on_work:
        for done in (10, 20, 100, 300):
            on_work(done, f"{done} of many things that are longer than a line")
    assert written.getvalue().splitlines() == [
        "work: loading",
        "work: 5% in 0.0 min, 10 of many things that are longer than a line",
        "work: 50% in 0.4 min, 100 of many things that are longer than a line",
        "work: 100% in 1.5 min, 300 of many things that are longer than a line",
    ]


def test_a_terminal_gets_a_bar():
    written = io.StringIO()
    with show_work("work", 200, console=Console(file=written, force_terminal=True, width=100)) as on_work:
        on_work(50, "a quarter")
    assert "25%" in written.getvalue()
    assert "a quarter" in written.getvalue()


def test_nobody_need_know_how_much_there_is():
    times = iter([0.0, 1.0, 30.0])
    written = io.StringIO()
    with show_work("work", None, console=Console(file=written, width=80), clock=lambda: next(times)) as on_work:
        for done in (1, 2):
            on_work(done, f"{done} runs")
    assert written.getvalue().splitlines() == ["work: loading", "work: 0.0 min, 1 runs", "work: 0.5 min, 2 runs"]
    written = io.StringIO()
    with show_work("work", None, console=Console(file=written, force_terminal=True, width=100)) as on_work:
        on_work(2, "2 runs")
    assert "2 runs" in written.getvalue()
    assert "%" not in written.getvalue()
