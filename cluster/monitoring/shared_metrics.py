"""All gateways' metrics in one scrape: gateways exchange them through the router.

A scrape reaches any one gateway. It shows its own metrics and the others', as last exchanged. A series belongs to one
gateway (`engine` is its id) and ends soon after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from outrider.cluster.common.reports import ask_router

EXCHANGE_INTERVAL_S = 0.5  # the next scrape, at another gateway, must not show smaller counters
EXPIRE_AFTER_S = 10.0


class MetricsBoard:
    """The router's side: every gateway's last families; a gateway that stays silent is forgotten."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, Sequence[Metric]]] = {}

    def exchange(self, gateway_id: str, families: Sequence[Metric], now_s: float) -> list[Metric]:
        """Store a gateway's families; return the other gateways'."""
        self._last[gateway_id] = now_s, families
        self._last = {id_: last for id_, last in self._last.items() if now_s - last[0] <= EXPIRE_AFTER_S}
        return [family for id_, (_, others) in self._last.items() if id_ != gateway_id for family in others]


class SharedMetrics(Collector):
    """A scrape of a gateway: its own families merged with the other gateways', and the fleet's."""

    def __init__(self, own: Collector, fleet: Collector, is_alone: Callable[[], bool]) -> None:
        """`is_alone` says whether there is no other gateway."""
        self._own, self._fleet, self._is_alone = own, fleet, is_alone
        self._others: Sequence[Metric] = ()

    async def exchange(self, router: Any, gateway_id: str) -> None:
        """Exchange families through the router, forever; while it is away, the others' last ones stay.

        A gateway that is alone exchanges nothing, once those of the last other one have expired.
        """
        while True:
            if self._others or not self._is_alone():
                others = await ask_router(router.exchange_metrics, gateway_id, list(self._own.collect()))
                self._others = self._others if others is None else others
            await asyncio.sleep(EXCHANGE_INTERVAL_S)

    def collect(self) -> Iterator[Metric]:
        yield from merged((*self._own.collect(), *self._others))
        yield from self._fleet.collect()


def merged(families: Iterable[Metric]) -> Iterable[Metric]:
    """Merge families of one name: a scrape may show a name once. The arguments are not changed."""
    by_name: dict[str, Metric] = {}
    for family in families:
        whole = by_name.setdefault(family.name, Metric(family.name, family.documentation, family.type, family.unit))
        whole.samples.extend(family.samples)
    return by_name.values()
