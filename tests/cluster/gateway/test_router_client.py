"""A gateway's client of the router: it follows the news, and places by them."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest
from ray.exceptions import RayActorError

from fakes.played_fleet import HANGS, Handle, news_of, snapshot_of
from outrider.cluster.common.errors import Unavailable
from outrider.cluster.gateway import router_client
from outrider.cluster.gateway.router_client import RouterClient
from outrider.cluster.router.fleet import FleetSnapshot, RouteAsk
from outrider.cluster.router.news import FleetNews, NewsAsk
from outrider.verifier_service.messages.wire import encode
from support.waiting import until

ASK = RouteAsk(request_id="r", num_prompt_tokens=3)


class Router:
    """A router's replica, of which each call for news plays the next script: news, an error, or that it hangs."""

    def __init__(self, *calls: list[Any]) -> None:
        self.asks: list[NewsAsk] = []
        self._calls = iter(calls)

    async def news(self, ask: NewsAsk) -> AsyncGenerator[bytes]:
        self.asks.append(ask)
        for step in next(self._calls, [HANGS]):
            if step is HANGS:
                await asyncio.get_running_loop().create_future()
            if isinstance(step, BaseException):
                raise step
            yield encode(step)


@pytest.fixture
async def follow() -> AsyncIterator[Any]:
    """Return what begins to follow a router."""
    tasks: list[asyncio.Future[None]] = []

    def begin(router: Router) -> RouterClient:
        client = RouterClient(Handle(router), "g")
        tasks.append(asyncio.ensure_future(client.follow()))
        return client

    yield begin
    assert not any(task.done() for task in tasks), "it follows forever"
    for task in tasks:
        task.cancel()


def news(*names: str, version: int = 1, **report: Any) -> FleetNews:
    return news_of(snapshot_of(*names, **report), version)


def names_of(client: RouterClient) -> list[str]:
    fleet = client.view.fleet
    return [] if fleet is None else [state.report.verifier_id for state in fleet.verifiers]


async def test_it_takes_the_news_of_one_call_after_another_and_says_what_it_has_seen(follow: Any):
    router = Router([news("v"), news("v", "w", version=2)], [news("w", version=3), HANGS])
    client = follow(router)
    await until(lambda: names_of(client) == ["w"])
    assert [ask.seen and ask.seen.version for ask in router.asks] == [None, 2]
    assert {ask.gateway_id for ask in router.asks} == {"g"}


@pytest.mark.parametrize("failure", [RayActorError(), TimeoutError()], ids=["it is dead", "Ray waits too long"])
async def test_while_the_router_is_away_its_last_news_stay_and_requests_are_placed(
    follow: Any, monkeypatch: pytest.MonkeyPatch, failure: Exception
):
    monkeypatch.setattr(router_client, "RETRY_INTERVAL_S", 0.02)
    router = Router([news("v"), failure], [failure], [failure], [news("w", version=2), HANGS])
    client = follow(router)
    await until(lambda: len(router.asks) >= 3)
    assert client.route(ASK).verifier_id == "v"
    await until(lambda: names_of(client) == ["w"])
    assert client.route(ASK).verifier_id == "w"


async def test_a_router_that_says_nothing_is_asked_again(follow: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(router_client, "NEWS_TIMEOUT_S", 0.05)
    monkeypatch.setattr(router_client, "RETRY_INTERVAL_S", 0.02)
    router = Router([news("v"), HANGS], [HANGS], [news("w", version=2), HANGS])
    client = follow(router)
    await until(lambda: names_of(client) == ["w"])


async def test_placing_asks_nobody(follow: Any):
    router = Router([news("v"), HANGS])
    client = follow(router)
    await until(lambda: names_of(client))
    for index in range(5):
        assert client.route(dataclasses.replace(ASK, request_id=str(index))).verifier_id == "v"
    assert len(router.asks) == 1


@pytest.mark.parametrize("known", [None, snapshot_of()], ids=["nothing was heard", "there is no verifier"])
def test_no_verifier_is_unavailable(known: FleetSnapshot | None):
    client = RouterClient(None, "g")
    if known is not None:
        client.view.take(news_of(known))
    with pytest.raises(Unavailable, match="no verifier is ready"):
        client.route(ASK)
    assert client.place_of(ASK) is None


def test_loads_of_an_old_router_no_longer_attract_everything_after_ten_seconds():
    def places(age_s: float) -> set[str]:
        client = RouterClient(None, "g")
        (busy,) = snapshot_of("busy", age_s=age_s, num_running=50).verifiers
        fleet = snapshot_of("idle", age_s=age_s)
        client.view.take(news_of(dataclasses.replace(fleet, verifiers=(*fleet.verifiers, busy))))
        return {client.route(dataclasses.replace(ASK, request_id=str(index))).verifier_id for index in range(20)}

    assert places(9.0) == {"idle"}
    assert places(11.0) == {"idle", "busy"}


async def test_a_refresh_takes_all_that_there_is_now():
    router = Router([news("v")], [news("w", version=2), HANGS])
    client = RouterClient(Handle(router), "g")
    await client.refresh()
    assert names_of(client) == ["v"]
    await client.refresh()
    assert names_of(client) == ["w"]
    assert [ask.seen for ask in router.asks] == [None, None]


async def test_a_refresh_without_a_router_changes_nothing():
    client = RouterClient(Handle(Router([news("v")], [RayActorError()])), "g")
    await client.refresh()
    begin_s = time.monotonic()
    await client.refresh()
    assert names_of(client) == ["v"]
    assert time.monotonic() - begin_s < 1.0


async def test_a_gateway_that_starts_while_the_router_is_away_comes_up_with_it(
    follow: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(router_client, "RETRY_INTERVAL_S", 0.02)
    router = Router([RayActorError()], [RayActorError()], [news("v", max_model_len=128), HANGS])
    client = follow(router)
    assert await asyncio.wait_for(client.max_model_len(), 5) == 128
    assert len(router.asks) == 3
