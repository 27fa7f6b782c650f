"""Gateways of one service, each with a port of its own for the others: whoever is asked, all answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
import httpx
import openai
import pytest
from fastapi import FastAPI

from fakes.backend import BRACKETS, FakeBackend, build_gateway, build_tokenizer, says
from outrider.cluster.api.grpc_api import start_grpc_server
from outrider.cluster.api.openai.endpoints import build_api
from outrider.cluster.api.openai.response_store import Responses
from outrider.cluster.api.rollouts.history import PATH, add_history_routes
from outrider.cluster.common.security import LinkTls
from outrider.cluster.gateway.rollout_memory import RolloutMemory
from outrider.cluster.monitoring.shared_metrics import SharedMetrics
from outrider.cluster.peers import others as others_module
from outrider.cluster.peers.every_gateway import EveryGateway, answers_of
from outrider.cluster.peers.messages import AskResponse, AskRunning
from outrider.cluster.peers.others import GatewayLinkServicer, Others
from outrider.cluster.peers.registry import EXPIRE_AFTER_S, MEET_INTERVAL_S, Registry
from outrider.cluster.replicas.engine_host import open_port
from outrider.proto import generation_pb2 as pb
from outrider.proto import generation_pb2_grpc, link_pb2, link_pb2_grpc
from support.waiting import healthy, until

TOKENIZER = build_tokenizer(BRACKETS)


class PlayedGateway:
    """A gateway behind its HTTP application and its port for the others."""

    def __init__(self, name: str, text: str, *, waits: bool = False) -> None:
        self.name = name
        self.others = Others(name)
        self.memory = RolloutMemory(tell=self.others.tell)
        self.backend = FakeBackend(lambda _: [[5], None] if waits else says(TOKENIZER, text))
        self.gateway = build_gateway(self.backend, TOKENIZER, max_model_len=512, rollouts=True, memory=self.memory)
        self.every = EveryGateway(self.gateway, self.others)
        self.responses = Responses(name, self._fetch)
        self.app: FastAPI = build_api(
            self.gateway,
            healthy,
            responses=self.responses,
            scrape=SharedMetrics(self.gateway.metrics.registry, _Nothing(), self.others).scrape,
        )
        add_history_routes(self.app, self.every)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://gateway")
        self.endpoint, self.server = "", None

    async def open(self) -> None:
        answers = answers_of(
            self.gateway,
            self.others,
            find_response=lambda ask: self.responses.packed(ask.response_id, is_removed=ask.is_removed),
            metrics=self.gateway.metrics.registry,
        )
        self.server, self.endpoint = await open_port(
            "127.0.0.1",
            lambda server: link_pb2_grpc.add_GatewayLinkServicer_to_server(GatewayLinkServicer(answers), server),
            LinkTls(),
        )

    async def meet(self, registry: Registry, *, now_s: float = 0.0, wants_history: bool = True) -> bool:
        found = registry.meet(self.name, self.endpoint, now_s)
        return await self.others.take(found, self.endpoint, wants_history=wants_history)

    async def _fetch(self, gateway_id: str, response_id: str, is_removed: bool) -> bytes | None:
        answer = await self.others.ask_one(gateway_id, AskResponse(response_id=response_id, is_removed=is_removed))
        return None if answer is None else answer.payload

    @property
    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url="http://gateway/v1", api_key="x", http_client=self.client, max_retries=0)

    async def history(self) -> set[str]:
        return set((await self.client.get(PATH)).text.splitlines())

    async def close(self) -> None:
        await self.client.aclose()
        await self.others.close()
        if self.server is not None:
            await self.server.stop(0.0)
            self.server = None


class _Nothing:
    def collect(self) -> list[Any]:
        return []


@contextlib.asynccontextmanager
async def service(*gateways: PlayedGateway) -> AsyncIterator[Registry]:
    """Open the gateways one after another, as Serve starts them."""
    registry = Registry()
    try:
        for gateway in gateways:
            await gateway.open()
            await gateway.meet(registry)
        yield registry
    finally:
        for gateway in gateways:
            await gateway.close()


async def test_a_response_is_found_continued_and_removed_through_any_gateway():
    one, two = PlayedGateway("one", "rabbit"), PlayedGateway("two", "hole")
    async with service(one, two):
        first = await one.openai.responses.create(model="tiny", input="fox")
        assert first.id.startswith("resp_one_")
        assert (await two.openai.responses.retrieve(first.id)).output_text == "rabbit"
        second = await two.openai.responses.create(model="tiny", input="and?", previous_response_id=first.id)
        (request,) = two.backend.requests
        assert TOKENIZER.decode(request.prompt_token_ids) == "[user]fox[assistant]rabbit[user]and?[assistant]"
        third = await one.openai.responses.create(model="tiny", input="so", previous_response_id=second.id)
        assert third.previous_response_id == second.id
        await two.openai.responses.delete(first.id)
        for gateway in (one, two):
            with pytest.raises(openai.NotFoundError):
                await gateway.openai.responses.retrieve(first.id)
            with pytest.raises(openai.NotFoundError):
                await gateway.openai.responses.delete(first.id)
        assert (await two.openai.responses.retrieve(third.id)).id == third.id


async def test_an_item_of_a_response_is_found_through_any_gateway():
    one, two = PlayedGateway("one", "rabbit"), PlayedGateway("two", "hole")
    async with service(one, two):
        first = await one.openai.responses.create(model="tiny", input="fox")
        (item,) = first.output
        reference = {"type": "item_reference", "id": item.id}
        await two.openai.responses.create(model="tiny", input=[reference, {"role": "user", "content": "and?"}])
        (request,) = two.backend.requests
        assert TOKENIZER.decode(request.prompt_token_ids) == "[assistant]rabbit[user]and?[assistant]"
        for strange in (f"{item.id}0", item.id[:-2], first.id, "msg", "msg_nobody_1_0", "_one_", ""):
            with pytest.raises(openai.NotFoundError) as refused:
                await two.openai.responses.create(model="tiny", input=[{"type": "item_reference", "id": strange}])
            assert refused.value.param == "input"


async def test_a_response_ends_with_its_gateway():
    one, two = PlayedGateway("one", "rabbit"), PlayedGateway("two", "hole")
    async with service(one, two):
        first = await one.openai.responses.create(model="tiny", input="fox")
        await one.close()
        with pytest.raises(openai.NotFoundError, match="is not stored here"):
            await two.openai.responses.retrieve(first.id)
        for strange in ("resp_", "resp_one", "resp_nobody_1", "resp_one_" + "9" * 200, "x_one_y"):
            with pytest.raises(openai.NotFoundError):
                await two.openai.responses.create(model="tiny", input="go on", previous_response_id=strange)


async def test_requests_are_counted_and_aborted_wherever_they_run():
    one, two = PlayedGateway("one", "", waits=True), PlayedGateway("two", "", waits=True)
    async with service(one, two):
        bodies = [{"prompt": [1, 2], "max_tokens": 9} for _ in range(3)]
        tasks = [
            asyncio.create_task(gateway.client.post("/v1/completions", json=body))
            for gateway, body in zip((one, two, two), bodies, strict=True)
        ]
        await one.backend.until_waiting(1)
        await two.backend.until_waiting(2)
        assert await one.every.num_running() == await two.every.num_running() == 3
        named = [request.request_id for gateway in (one, two) for request in gateway.backend.requests]
        assert await one.every.abort(["nobody", named[1], named[0]]) == [named[1], named[0]]
        assert await one.every.num_running() == 1
        assert await one.every.abort_all() == 1
        reasons = [(await task).json()["choices"][0]["finish_reason"] for task in tasks]
        assert reasons == ["abort"] * 3


async def test_a_grpc_client_aborts_what_runs_at_another_gateway():
    one, two = PlayedGateway("one", ""), PlayedGateway("two", "", waits=True)
    async with service(one, two):
        running = await start_grpc_server(one.gateway, "127.0.0.1:0", every=one.every)
        task = asyncio.create_task(two.client.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 9}))
        await two.backend.until_waiting(1)
        (request,) = two.backend.requests
        async with grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel:
            ask = pb.AbortRequest(request_ids=[request.request_id, "nobody"])
            answer = await generation_pb2_grpc.InferenceStub(channel).Abort(ask)
        assert list(answer.aborted) == [request.request_id]
        assert (await task).json()["choices"][0]["finish_reason"] == "abort"
        await running.server.stop(0.0)


async def test_what_one_records_of_rollouts_all_have():
    one, two = PlayedGateway("one", ""), PlayedGateway("two", "")
    async with service(one, two):
        given = {"history_key": "k", "responses": [[7, 8, 9]], "weight_version": "1", "opens_version": True}
        await one.client.post(PATH, json=given)
        await until(lambda: _same(one, two))
        assert len(await two.history()) == 1
        await two.client.post(PATH, json={**given, "responses": [[1, 2, 3], [4, 5, 6]]})
        await until(lambda: _same(one, two))
        assert len(await one.history()) == 3, "and nothing comes back to whom it came from"
        for gateway in (one, two):
            gateway.memory.check_integrity()
        await one.client.delete(PATH)
        assert await one.history() == await two.history() == set()


async def _same(one: PlayedGateway, two: PlayedGateway) -> bool:
    found = await one.history()
    return found == await two.history() and bool(found)


async def test_a_new_gateway_begins_with_the_memory_of_one_that_is_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(others_module, "MAX_TOLD_TOKENS", 10)  # several messages
    one, two, new = (PlayedGateway(name, "") for name in ("one", "two", "new"))
    async with service(one, two) as registry:
        for number in range(20):
            given = {
                "history_key": "k",
                "responses": [[number, 8, 9]],
                "weight_version": str(number // 6),
                "opens_version": True,
            }
            await one.client.post(PATH, json=given)
        await until(lambda: _same(one, two))
        await new.open()
        assert await new.meet(registry), "one tells its history"
        await until(lambda: _same(one, new))
        assert len(await new.history()) == len(await one.history()) == 20
        await one.client.post(PATH, json={"history_key": "k", "responses": [[50, 51]]})
        await until(lambda: _same(one, new))
        await new.close()


async def test_a_scrape_shows_all_and_of_one_that_hangs_its_last_figures():
    one, two = PlayedGateway("one", "ab"), PlayedGateway("two", "abc")

    async def tokens(gateway: PlayedGateway) -> int:
        lines = (await gateway.client.get("/metrics")).text.splitlines()
        return len([line for line in lines if line.startswith("outrider_generation_tokens_total{")])

    async with service(one, two) as registry:
        for gateway in (one, two):
            await gateway.client.post("/v1/completions", json={"prompt": [1, 2]})
        assert await tokens(one) == await tokens(two) == 2
        await two.close()
        assert await tokens(one) == 2
        for now_s in (EXPIRE_AFTER_S + 1.0, EXPIRE_AFTER_S + 2.0):
            await one.meet(registry, now_s=now_s)
        assert await tokens(one) == 1


async def test_a_router_that_has_just_started_makes_nobody_forget():
    one, two = PlayedGateway("one", ""), PlayedGateway("two", "")
    async with service(one, two):
        registry = Registry()
        await one.meet(registry)
        assert one.others.known == {"two"}
        await two.meet(registry, now_s=MEET_INTERVAL_S)
        await one.meet(registry, now_s=MEET_INTERVAL_S)
        assert (one.others.known, two.others.known) == ({"two"}, {"one"})


async def test_a_gateway_stays_known_to_the_router_and_waits_for_it():
    class Router:
        """Away at first."""

        def __init__(self) -> None:
            self.registry, self.num_calls = Registry(), 0

        @property
        def meet_gateway(self) -> Router:
            return self

        async def remote(self, gateway_id: str, endpoint: str) -> Mapping[str, str]:
            self.num_calls += 1
            if self.num_calls == 1:
                raise TimeoutError
            return self.registry.meet(gateway_id, endpoint, 0.0)

    router, one, two = Router(), PlayedGateway("one", ""), PlayedGateway("two", "")
    async with service(two):
        router.registry.meet("two", two.endpoint, 0.0)
        await one.open()
        following = asyncio.create_task(one.others.follow(router, one.endpoint, wants_history=True))
        await until(lambda: _is_known(one, two))
        following.cancel()
        assert set(router.registry.meet("two", two.endpoint, 0.0)) == {"one"}
        await one.close()


async def _is_known(one: PlayedGateway, two: PlayedGateway) -> bool:
    return two.others.known == {"one"} and one.others.known == {"two"}


async def test_a_question_that_is_none_is_refused_by_name():
    one = PlayedGateway("one", "")
    async with service(one):
        async with grpc.aio.insecure_channel(one.endpoint) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="frame is no message") as caught:
                await link_pb2_grpc.GatewayLinkStub(channel).Ask(link_pb2.Frame(payload=b"x"))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await one.others.ask(AskRunning()) == {}


def test_a_gateway_that_is_silent_for_long_is_forgotten():
    registry = Registry()
    assert registry.meet("one", "1:1", 0.0) == {}
    assert registry.meet("two", "2:2", EXPIRE_AFTER_S) == {"one": "1:1"}
    assert registry.meet("two", "2:2", EXPIRE_AFTER_S + 0.1) == {}
