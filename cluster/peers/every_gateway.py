"""What concerns all gateways of a service: requests that may run at any, and the responses of rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prometheus_client.registry import Collector

from outrider.cluster.gateway.gateway import Gateway
from outrider.cluster.gateway.rollout_memory import Recorded
from outrider.cluster.peers.messages import (
    Aborted,
    AskAbort,
    AskMetrics,
    AskResponse,
    AskRunning,
    Done,
    Family,
    ForgetHistory,
    Kept,
    Meet,
    Metrics,
    Running,
    TellHistory,
)
from outrider.cluster.peers.others import Others

FindResponse = Callable[[AskResponse], bytes | None]


class EveryGateway:
    """This gateway and the others."""

    def __init__(self, own: Gateway, others: Others | None = None) -> None:
        self.own = own
        self._others = Others("") if others is None else others  # none are known

    async def abort(self, request_ids: Sequence[str]) -> list[str]:
        """Finish running requests with the reason "abort"; return those that were running."""
        aborted = {id_ for id_ in request_ids if self.own.abort(id_)}
        left = tuple(id_ for id_ in request_ids if id_ not in aborted)
        if left:
            answers: Mapping[str, Aborted] = await self._others.ask(AskAbort(request_ids=left))
            aborted.update(id_ for answer in answers.values() for id_ in answer.request_ids)
        return [id_ for id_ in request_ids if id_ in aborted]

    async def abort_all(self) -> int:
        """Finish all running requests with the reason "abort"; return their number."""
        count = self.own.abort_all()
        answers: Mapping[str, Aborted] = await self._others.ask(AskAbort(request_ids=None))
        return count + sum(answer.count for answer in answers.values())

    async def num_running(self) -> int:
        """Return the number of prompts that are being generated."""
        answers: Mapping[str, Running] = await self._others.ask(AskRunning())
        return self.own.num_running + sum(answer.count for answer in answers.values())

    async def forget_history(self) -> None:
        """Forget the responses of rollouts."""
        if self.own.memory is not None:
            self.own.memory.clear()
        await self._others.ask(ForgetHistory())


def answers_of(
    gateway: Gateway, others: Others, *, find_response: FindResponse, metrics: Collector
) -> dict[type, Callable[[Any], Any]]:
    """Return how a gateway answers the others; `metrics`: what it publishes."""
    memory = gateway.memory

    def meet(message: Meet) -> Done:
        others.hear_of({message.gateway_id: message.endpoint})
        if message.wants_history and memory is not None:
            past = (
                Recorded(key=one.key, token_ids=tuple(one.token_ids), weight_version=one.weight_version)
                for one in memory.exported()
            )
            others.tell_past(message.gateway_id, past)
        return Done()

    def abort(message: AskAbort) -> Aborted:
        if message.request_ids is None:
            return Aborted(count=gateway.abort_all())
        found = tuple(id_ for id_ in message.request_ids if gateway.abort(id_))
        return Aborted(count=len(found), request_ids=found)

    def remember(message: TellHistory) -> Done:
        if memory is not None:
            for response in message.responses:
                memory.hear(response)
        return Done()

    def forget(_: ForgetHistory) -> Done:
        if memory is not None:
            memory.clear()
        return Done()

    return {
        Meet: meet,
        AskAbort: abort,
        AskRunning: lambda _: Running(count=gateway.num_running),
        AskMetrics: lambda _: Metrics(families=tuple(Family.of(metric) for metric in metrics.collect())),
        AskResponse: lambda message: Kept(payload=find_response(message)),
        TellHistory: remember,
        ForgetHistory: forget,
    }
