"""What two gateways published, shown by each of them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from outrider.cluster.monitoring.metrics import GatewayMetrics
from outrider.cluster.monitoring.shared_metrics import SharedMetrics, merged

TOKENS = "outrider_generation_tokens"


class FakeFleet(CollectorRegistry):
    def collect(self) -> list[Metric]:
        return [GaugeMetricFamily("outrider_price", "of drafts", value=0.5)]


class PlayedGateway:
    """A gateway, and what the others answer it."""

    def __init__(self, gateway_id: str, num_tokens: int) -> None:
        self.gateway_id = gateway_id
        self.registry = CollectorRegistry()
        self.metrics_of_it = GatewayMetrics(self.registry, model_name="tiny", engine=gateway_id)
        self.metrics_of_it.tokens_published(num_tokens, since_arrival_s=0.1, since_previous_s=None)
        self.shared = SharedMetrics(self.registry, FakeFleet(), self)
        self.others: list[PlayedGateway] = []
        self.known: frozenset[str] = frozenset()

    def meet(self, other: PlayedGateway) -> None:
        self.others, self.known = [other], frozenset([other.gateway_id])

    async def metrics(self) -> dict[str, list[Metric]]:
        return {other.gateway_id: list(other.registry.collect()) for other in self.others}

    async def shown(self) -> dict[str, Metric]:
        families = list(text_string_to_metric_families(generate_latest(await self.shared.scrape()).decode()))
        assert len(families) == len({family.name for family in families}), "each family once"
        return {family.name: family for family in families}

    async def tokens(self) -> dict[str, float]:
        samples = (await self.shown())[TOKENS].samples
        return {sample.labels["engine"]: sample.value for sample in samples if sample.name == f"{TOKENS}_total"}


def two_gateways() -> tuple[PlayedGateway, PlayedGateway]:
    first, second = PlayedGateway("first", 3), PlayedGateway("second", 5)
    first.meet(second)
    second.meet(first)
    return first, second


async def test_each_shows_what_both_published_and_the_fleet_once():
    first, second = two_gateways()
    assert await first.tokens() == await second.tokens() == {"first": 3.0, "second": 5.0}
    (price,) = (await first.shown())["outrider_price"].samples
    assert price.value == 0.5
    counts = [s for s in (await first.shown())["vllm:time_to_first_token_seconds"].samples if s.name.endswith("_count")]
    assert [count.value for count in counts] == [1.0, 1.0]


async def test_all_figures_are_fresh_and_nothing_is_counted_twice():
    first, second = two_gateways()
    for gateway in (first, second):
        await gateway.tokens()
        gateway.metrics_of_it.tokens_published(10, since_arrival_s=0.2, since_previous_s=0.1)
    assert await first.tokens() == {"first": 13.0, "second": 15.0}
    assert await first.tokens() == {"first": 13.0, "second": 15.0}, "a scrape changes nothing"


async def test_of_one_that_does_not_answer_the_last_figures_stay_until_it_is_gone():
    first, _ = two_gateways()
    await first.tokens()
    first.others = []
    assert await first.tokens() == {"first": 3.0, "second": 5.0}
    first.known = frozenset()
    assert await first.tokens() == {"first": 3.0}


def test_families_of_one_name_become_one_and_stay_as_they_were():
    first, second = GaugeMetricFamily("one", "of it", value=1.0), GaugeMetricFamily("one", "of it", value=2.0)
    (whole,) = merged([first, second])
    assert [sample.value for sample in whole.samples] == [1.0, 2.0]
    assert [len(family.samples) for family in (first, second)] == [1, 1]
