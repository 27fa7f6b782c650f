"""The series of another engine's process."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from outrider.cluster.hosted.metrics import HostedMetrics
from outrider.verifier_service.messages.engine import DrafterPerformance, EngineCounters, EngineLoad
from outrider.verifier_service.messages.request import DisabledReason

IDLE = EngineLoad(num_running=0, num_waiting=0, num_decoding=0, kv_usage=0.0)


class Page:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = HostedMetrics(self.registry)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"outrider_hosted_{name}", labels)


@pytest.fixture
def page() -> Page:
    return Page()


def load(**counters: object) -> EngineLoad:
    return replace(IDLE, counters=EngineCounters(**counters))  # type: ignore[arg-type]


def test_series_are_there_before_the_first_report(page: Page):
    assert page.value("drafts_total") == 0
    assert page.value("accepted_tokens_total") == 0
    assert page.value("drafters") == 0


def test_counters_follow_the_reports(page: Page):
    page.metrics.observe(load(num_drafts=3, num_draft_tokens=12, num_accepted_tokens=7, num_asks=5), {}, 1)
    page.metrics.observe(load(num_drafts=4, num_draft_tokens=14, num_accepted_tokens=7, num_asks=9), {}, 1)
    assert page.value("drafts_total") == 4
    assert page.value("draft_tokens_total") == 14
    assert page.value("accepted_tokens_total") == 7
    assert page.value("asks_total") == 9


def test_reasons_are_labels_by_the_names_of_the_fleets_metrics(page: Page):
    page.metrics.observe(load(fallbacks={"timeout": 2}), {DisabledReason.LOAD: 3}, 1)
    page.metrics.observe(load(fallbacks={"timeout": 5, "bad_draft": 1}), {DisabledReason.LOAD: 4}, 1)
    assert page.value("fallbacks_total", reason="timeout") == 5
    assert page.value("fallbacks_total", reason="bad_draft") == 1
    assert page.value("undrafted_total", reason="load") == 4
    assert b"DisabledReason" not in generate_latest(page.registry)


def test_gauges_are_the_last_reports(page: Page):
    drafters = tuple(DrafterPerformance(drafter_id=name, round_trip_s=took_s) for name, took_s in (("d", 1), ("e", 2)))
    page.metrics.observe(replace(IDLE, price=0.5, drafters=drafters), {}, 2)
    assert (page.value("price"), page.value("drafters"), page.value("round_trip_seconds")) == (0.5, 2, 2)
    page.metrics.observe(IDLE, {}, 0)
    assert (page.value("price"), page.value("drafters"), page.value("round_trip_seconds")) == (0, 0, 0)


def test_totals_never_fall_when_reports_begin_again(page: Page):
    page.metrics.observe(load(num_drafts=3, fallbacks={"timeout": 2}), {"load": 4}, 1)
    page.metrics.begin_again()
    page.metrics.observe(load(num_drafts=1, fallbacks={"timeout": 1}), {"load": 1}, 1)
    assert page.value("drafts_total") == 4
    assert page.value("fallbacks_total", reason="timeout") == 3
    assert page.value("undrafted_total", reason="load") == 5


def test_a_report_from_before_that_comes_after_it_is_no_failure(page: Page):
    """One thread reports, another begins again."""
    old = load(num_drafts=100, fallbacks={"timeout": 9})
    page.metrics.observe(old, {"load": 9}, 1)
    page.metrics.begin_again()
    page.metrics.observe(old, {"load": 9}, 1)
    page.metrics.observe(load(num_drafts=2, fallbacks={"timeout": 1}), {"load": 1}, 1)
    assert (page.value("drafts_total") or 0) >= 102
    page.metrics.observe(load(num_drafts=5, fallbacks={"timeout": 2}), {"load": 2}, 1)
    assert (page.value("drafts_total") or 0) >= 105
