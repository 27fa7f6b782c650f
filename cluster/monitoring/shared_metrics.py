"""One scrape shows all gateways: by way of the router they tell each other what they published.

A scrape reaches whichever gateway the proxy picks, which alone could show its own figures only. It shows the others',
too, as they were when they were last exchanged. A series is one gateway's (`engine` is its id) and ends soon after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from outrider.cluster.common.reports import ask_router

EXCHANGE_INTERVAL_S = 0.5  # a second gateway must not show less, at the next scrape, than the first one did
EXPIRE_AFTER_S = 10.0


class MetricsBoard:
    """The router's side: what every gateway published, as it last said; one that is silent for long is forgotten."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, Sequence[Metric]]] = {}

    def exchange(self, gateway_id: str, families: Sequence[Metric], now_s: float) -> list[Metric]:
        """Take in a gateway's families; return those of the others."""
        self._last[gateway_id] = now_s, families
        self._last = {id_: last for id_, last in self._last.items() if now_s - last[0] <= EXPIRE_AFTER_S}
        return [family for id_, (_, others) in self._last.items() if id_ != gateway_id for family in others]


class SharedMetrics(Collector):
    """What a gateway shows at a scrape: its own families with the other gateways', and the fleet's."""

    def __init__(self, own: Collector, fleet: Collector) -> None:
        self._own, self._fleet = own, fleet
        self._others: Sequence[Metric] = ()

    async def exchange(self, router: Any, gateway_id: str) -> None:
        """Go on exchanging by the router; while it is away the others' last figures stay."""
        while True:
            others = await ask_router(router.exchange_metrics, gateway_id, list(self._own.collect()))
            self._others = self._others if others is None else others
            await asyncio.sleep(EXCHANGE_INTERVAL_S)

    def collect(self) -> Iterator[Metric]:
        yield from merged((*self._own.collect(), *self._others))
        yield from self._fleet.collect()


def merged(families: Iterable[Metric]) -> Iterable[Metric]:
    """Return families of one name as one, as a scrape may show each but once; nothing given is changed."""
    by_name: dict[str, Metric] = {}
    for family in families:
        whole = by_name.setdefault(family.name, Metric(family.name, family.documentation, family.type, family.unit))
        whole.samples.extend(family.samples)
    return by_name.values()
