"""Run loads against a server and against the floor, and read the clocks of their processes before and after."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from outrider.lab.gateway.client import Ask, Found
from outrider.lab.gateway.figures import Figures, Run, figures_of
from outrider.lab.gateway.floor import HOST, Sends
from outrider.lab.gateway.helpers import Client, Floor
from outrider.lab.gateway.loads import Door, Load
from outrider.lab.gateway.processes import Spent, processor_s, snapshot, spent_between

MAX_SECONDS = 120.0  # of a load; what is left then is an error
REST_S = 2.0  # how long it is watched without a request
WARM_UP = 8  # streams and tokens of each that are not measured


class MeasureError(RuntimeError):
    """A server that answers nothing, or a process that is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What is measured."""

    host: str
    ports: dict[Door, int]
    model: str
    first: int  # pid; its descendants are counted
    counts_first: bool  # False: the first process is ours


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How it is measured."""

    loads: tuple[Load, ...]
    repeats: int
    step_s: float  # of the floor
    has_floor: bool
    max_seconds: float = MAX_SECONDS
    rest_s: float = REST_S


def measure(
    server: Server, options: Options, on_run: Callable[[str], None] = lambda name: None
) -> tuple[dict[str, float], list[Figures]]:
    """Return the processor time a second at rest, by role, and the figures of every load.

    Raises `MeasureError` where a first request is not answered.
    """
    runs: dict[Load, list[Run]] = {load: [] for load in options.loads}
    with Client() as client:
        meter = _Meter(server, client, options)
        on_run("warming up")
        meter.warm_up()
        on_run("at rest")
        rest_s = meter.at_rest()
        for _ in range(options.repeats):
            for load in options.loads:
                on_run(load.name)
                runs[load].append(meter.run(load))
    return rest_s, [figures_of(found) for found in runs.values()]


class _Meter:
    def __init__(self, server: Server, client: Client, options: Options) -> None:
        self._server, self._client, self._options = server, client, options

    def warm_up(self) -> None:
        for load in {(one.door, one.is_streamed, one.variant): one for one in self._options.loads}.values():
            small = Load(
                door=load.door,
                is_streamed=load.is_streamed,
                num_clients=WARM_UP,
                num_rounds=2,
                num_tokens=WARM_UP if load.is_streamed else 1,
                variant=load.variant,
            )
            found = self._client.send(self._ask(small))
            if found.num_errors == small.num_requests:
                raise MeasureError(f"{small.name}: no request was answered: {'; '.join(found.errors)}")

    def at_rest(self) -> dict[str, float]:
        """Return the processor time a second that each role takes without a request."""
        before, begin_s = self._snapshot(), time.perf_counter()
        time.sleep(self._options.rest_s)
        after, elapsed_s = self._snapshot(), time.perf_counter() - begin_s
        return {role: seconds / elapsed_s for role, seconds in spent_between(before, after).items()}

    def run(self, load: Load) -> Run:
        """Measure a load once; then the floor with what one of its requests was answered."""
        before, after = self._snapshot(), dict[int, Spent]()

        def note() -> None:
            after.update(self._snapshot())

        found = self._client.send(self._ask(load), note)
        floor_s = None
        if self._options.has_floor and found.sample:
            floor_s = self._floor_s(load, found)
        return Run(load=load, found=found, spent_s=spent_between(before, after), floor_s=floor_s)

    def _floor_s(self, load: Load, found: Found) -> float:
        """Return the processor time that a bare server takes for the load."""
        with Floor(Sends(door=load.door, pieces=found.sample, step_s=self._options.step_s)) as floor:
            begin_s = processor_s(floor.pid)
            ends_s: list[float] = []
            sent = self._client.send(self._ask(load, floor.port), lambda: ends_s.append(processor_s(floor.pid)))
        if sent.num_errors:
            raise MeasureError(f"the floor did not answer {load.name}: {'; '.join(sent.errors)}")
        return ends_s[0] - begin_s

    def _ask(self, load: Load, floor_port: int | None = None) -> Ask:
        server = self._server
        host, port = (server.host, server.ports[load.door]) if floor_port is None else (HOST, floor_port)
        return Ask(load=load, host=host, port=port, model=server.model, max_seconds=self._options.max_seconds)

    def _snapshot(self) -> dict[int, Spent]:
        found = snapshot(self._server.first, without={self._client.pid})
        if not self._server.counts_first:
            del found[self._server.first]
        return found
