"""The plug-in as a whole: what fails in it costs drafts and nothing else."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from fakes.hosted.engine import HostedEngine
from outrider.cluster.hosted.drafting import HostedConfig, HostRequest, HostRow
from outrider.cluster.hosted.metrics import HostedMetrics
from outrider.cluster.hosted.options import PluginOptions
from outrider.cluster.hosted.plugin import MAX_FAILURES, OFF_S, HostStep, Plugin

ROW = HostRow(request_id="a", num_tokens=4, num_scheduled_tokens=3, num_draft_tokens=0, num_new_tokens=1)
CONFIG = HostedConfig(vocab_size=9, max_model_len=64, num_speculative_tokens=3)


class Host:
    """An engine whose records can be broken."""

    def __init__(self) -> None:
        self.began_s = 0.0
        self.fails = False

    def describe(self, row: int) -> HostRequest:
        if self.fails:
            raise KeyError("no such request")
        return HostRequest(num_prompt_tokens=3, max_tokens=8)

    def token_ids(self, row: int, start: int, stop: int) -> Sequence[int]:
        return [1, 2, 3, 4][start:stop]


class Bench:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.host = Host()
        self.now_s = 1000.0
        self.plugin = Plugin(
            PluginOptions(pool="127.0.0.1:1"),  # nobody listens there
            CONFIG,
            vocab_fingerprint="",
            engine="played",
            known_ids=lambda: ("a",),
            metrics=HostedMetrics(self.registry),
            clock=lambda: self.now_s,
        )

    def propose(self, *rows: HostRow, finished_ids: Sequence[str] = ()) -> list[list[int]]:
        rows = rows or (ROW,)
        return self.plugin.propose(len(rows), lambda: (rows, finished_ids, self.host))


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    try:
        yield bench
    finally:
        await asyncio.to_thread(bench.plugin.close)


async def test_without_a_pool_every_draft_is_empty():
    async with bench() as one:
        assert one.propose() == [[]]
        assert one.propose(ROW, replace(ROW, request_id="b")) == [[], []]


async def test_an_exception_is_empty_drafts_and_the_plug_in_begins_again(caplog: pytest.LogCaptureFixture):
    async with bench() as one:
        one.host.fails = True
        assert one.propose() == [[]]
        assert "drafting has failed; it begins again" in caplog.text
        one.host.fails = False
        assert one.propose() == [[]]
        report = one.plugin._report(("d",))
        assert report is not None
        assert [request.request_id for request in report.load.requests] == ["a"]
        assert report.load.counters.num_steps == 1, "it forgot all of before"


async def test_after_three_exceptions_it_is_off_for_a_while(caplog: pytest.LogCaptureFixture):
    async with bench() as one:
        one.host.fails = True
        for _ in range(MAX_FAILURES):
            assert one.propose() == [[]]
        assert "it is off for 600 s" in caplog.text
        one.host.fails = False
        assert one.propose() == [[]]
        report = one.plugin._report(())
        assert report is not None
        assert report.load.counters.num_steps == 0
        assert caplog.text.count("drafting has failed") == MAX_FAILURES
        one.now_s += OFF_S
        one.propose()
        report = one.plugin._report(())
        assert report is not None
        assert report.load.counters.num_steps == 1, "it begins again"


async def test_exceptions_that_are_far_apart_never_end_it():
    async with bench() as one:
        one.host.fails = True
        for _ in range(3 * MAX_FAILURES):
            one.propose()
            one.now_s += OFF_S
        one.host.fails = False
        one.propose()
        report = one.plugin._report(())
        assert report is not None
        assert report.load.counters.num_steps == 1


async def test_a_step_that_cannot_even_be_read_is_one_such_exception(caplog: pytest.LogCaptureFixture):
    def read() -> HostStep:
        raise AttributeError("the engine is another one than was tried")

    async with bench() as one:
        assert one.plugin.propose(2, read) == [[], []]
        assert "the engine is another one" in caplog.text


async def test_reports_say_who_it_is_and_what_it_may_hold():
    async with bench() as one:
        one.propose()
        report = one.plugin._report(("d", "e"))
        assert report is not None
        assert report.verifier_id.startswith("played-")
        assert (report.endpoint, report.max_model_len) == ("", 64)
        assert report.linked_drafters == ("d", "e")
        undrafted = one.registry.get_sample_value("outrider_hosted_undrafted_total", {"reason": "drafter_unavailable"})
        assert undrafted == 1
        assert one.registry.get_sample_value("outrider_hosted_drafters") == 2


async def test_requests_that_the_engine_no_longer_knows_leave_the_report():
    async with bench() as one:
        one.propose(ROW, replace(ROW, request_id="vanished"))
        report = one.plugin._report(())
        assert report is not None
        assert [request.request_id for request in report.load.requests] == ["a"]


def test_a_request_that_has_just_come_is_not_forgotten_by_a_report_that_asked_before_it_came():
    """The engine's requests are asked for while no step can come in between."""
    engine = HostedEngine()
    engine.add()
    engine.step()
    held: list[bool] = []

    def known_ids() -> Sequence[str]:
        held.append(engine.drafting._lock.locked())
        return list(engine.running)

    assert engine.drafting.refresh_load(known_ids) is not None
    assert held == [True]


def test_the_plug_in_loads_neither_ray_nor_our_engine_nor_transformers():
    """They cost seconds, memory and versions that another engine's environment does not have."""
    source = """
        import sys
        import outrider.cluster.hosted.plugin
        import outrider.cluster.hosted.sglang_entry
        import outrider.cluster.hosted.vllm_hook
        print(sys.modules.keys() & {"ray", "transformers", "vllm", "sglang", "outrider.verifier_service.engine.engine"})
    """
    found = subprocess.run([sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
