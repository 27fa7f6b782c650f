"""All gateways' metrics in one scrape: the gateway that is scraped asks the others.

A series belongs to one gateway (`engine` is its id) and ends soon after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class OtherGateways(Protocol):
    """The other gateways of the service."""

    @property
    def known(self) -> frozenset[str]:
        """Their ids."""
        ...

    async def metrics(self) -> Mapping[str, Sequence[Metric]]:
        """Return what each publishes, by its id; one that does not answer is left out."""
        ...


class SharedMetrics(Collector):
    """A scrape of a gateway: its own families merged with the other gateways', and the fleet's."""

    def __init__(self, own: Collector, fleet: Collector, others: OtherGateways) -> None:
        self._own, self._fleet, self._others = own, fleet, others
        self._last: dict[str, Sequence[Metric]] = {}

    async def scrape(self) -> Collector:
        """Ask the others; of one that does not answer, show what it published last: its counters must not vanish."""
        found = self._last | dict(await self._others.metrics())
        self._last = {id_: families for id_, families in found.items() if id_ in self._others.known}
        return self

    def collect(self) -> Iterator[Metric]:
        others = (family for families in self._last.values() for family in families)
        yield from merged((*self._own.collect(), *others))
        yield from self._fleet.collect()


def merged(families: Iterable[Metric]) -> Iterable[Metric]:
    """Merge families of one name: a scrape may show a name once. The arguments are not changed."""
    by_name: dict[str, Metric] = {}
    for family in families:
        whole = by_name.setdefault(family.name, Metric(family.name, family.documentation, family.type, family.unit))
        whole.samples.extend(family.samples)
    return by_name.values()
