"""What two gateways published, shown by each of them."""

from __future__ import annotations

import asyncio
import contextlib

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from ray.exceptions import RayError

from outrider.cluster.monitoring.metrics import GatewayMetrics
from outrider.cluster.monitoring.shared_metrics import (
    EXCHANGE_INTERVAL_S,
    EXPIRE_AFTER_S,
    MetricsBoard,
    SharedMetrics,
    merged,
)

TOKENS = "outrider_generation_tokens"


class FakeFleet(CollectorRegistry):
    def collect(self) -> list[Metric]:
        return [GaugeMetricFamily("outrider_price", "of drafts", value=0.5)]


class PlayedRouter:
    """The router's handle: its board with a clock that stands still, or nobody."""

    def __init__(self) -> None:
        self.board = MetricsBoard()
        self.is_up = True
        self.num_calls = 0

    @property
    def exchange_metrics(self) -> PlayedRouter:
        return self

    async def remote(self, gateway_id: str, families: list[Metric]) -> list[Metric]:
        self.num_calls += 1
        if not self.is_up:
            raise RayError("the router is away")
        return self.board.exchange(gateway_id, families, now_s=0.0)


class PlayedGateway:
    def __init__(self, gateway_id: str, num_tokens: int) -> None:
        self.gateway_id = gateway_id
        registry = CollectorRegistry()
        self.metrics = GatewayMetrics(registry, model_name="tiny", engine=gateway_id)
        self.metrics.tokens_published(num_tokens, since_arrival_s=0.1, since_previous_s=None)
        self.is_alone = False
        self.shared = SharedMetrics(registry, FakeFleet(), lambda: self.is_alone)

    async def exchange_once(self, router: PlayedRouter) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.shared.exchange(router, self.gateway_id), EXCHANGE_INTERVAL_S / 10)

    def shown(self) -> dict[str, Metric]:
        families = list(text_string_to_metric_families(generate_latest(self.shared).decode()))
        assert len(families) == len({family.name for family in families}), "each family once"
        return {family.name: family for family in families}

    def tokens(self) -> dict[str, float]:
        samples = self.shown()[TOKENS].samples
        return {sample.labels["engine"]: sample.value for sample in samples if sample.name == f"{TOKENS}_total"}


async def test_each_shows_what_both_published_and_the_fleet_once():
    router, first, second = PlayedRouter(), PlayedGateway("first", 3), PlayedGateway("second", 5)
    for gateway in (first, second, first):
        await gateway.exchange_once(router)
    assert first.tokens() == second.tokens() == {"first": 3.0, "second": 5.0}
    (price,) = first.shown()["outrider_price"].samples
    assert price.value == 0.5
    counts = [s for s in first.shown()["vllm:time_to_first_token_seconds"].samples if s.name.endswith("_count")]
    assert [count.value for count in counts] == [1.0, 1.0]


async def test_its_own_figures_are_as_fresh_as_can_be_and_nothing_is_counted_twice():
    router, first, second = PlayedRouter(), PlayedGateway("first", 3), PlayedGateway("second", 5)
    for gateway in (first, second, first, second, first):
        await gateway.exchange_once(router)
    for gateway in (first, second):
        gateway.metrics.tokens_published(10, since_arrival_s=0.2, since_previous_s=0.1)
    assert first.tokens() == {"first": 13.0, "second": 5.0}
    assert first.tokens() == {"first": 13.0, "second": 5.0}, "a scrape changes nothing"


async def test_while_the_router_is_away_the_last_figures_stay():
    router, first, second = PlayedRouter(), PlayedGateway("first", 3), PlayedGateway("second", 5)
    for gateway in (second, first):
        await gateway.exchange_once(router)
    router.is_up = False
    num_calls = router.num_calls
    await first.exchange_once(router)
    assert router.num_calls == num_calls + 1
    assert first.tokens() == {"first": 3.0, "second": 5.0}


async def test_a_gateway_that_is_alone_exchanges_nothing_once_the_others_are_forgotten():
    router, first, second = PlayedRouter(), PlayedGateway("first", 3), PlayedGateway("second", 5)
    first.is_alone = True
    await first.exchange_once(router)
    assert router.num_calls == 0
    first.is_alone = False
    for gateway in (second, first):
        await gateway.exchange_once(router)
    first.is_alone = True
    await first.exchange_once(router)
    assert router.num_calls == 3, "the last one's figures must end"
    router.board = MetricsBoard()
    await first.exchange_once(router)
    assert first.tokens() == {"first": 3.0}
    await first.exchange_once(router)
    assert router.num_calls == 4


def test_a_gateway_that_is_silent_for_long_is_forgotten():
    board, family = MetricsBoard(), GaugeMetricFamily("one", "of it", value=1.0)
    assert board.exchange("first", [family], 0.0) == []
    assert board.exchange("second", [], EXPIRE_AFTER_S) == [family]
    assert board.exchange("second", [], EXPIRE_AFTER_S + 0.1) == []


def test_families_of_one_name_become_one_and_stay_as_they_were():
    first, second = GaugeMetricFamily("one", "of it", value=1.0), GaugeMetricFamily("one", "of it", value=2.0)
    (whole,) = merged([first, second])
    assert [sample.value for sample in whole.samples] == [1.0, 2.0]
    assert [len(family.samples) for family in (first, second)] == [1, 1]
