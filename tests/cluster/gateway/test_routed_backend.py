"""The gateway's way to the verifiers, while nothing is lost; for the rest see test_failover."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc
import pytest
from ray.exceptions import RayActorError

from fakes.played_fleet import (
    HANGS,
    PLAN,
    REQUEST,
    Router,
    ScriptedVerifier,
    fleet_of,
    outputs_of,
    snapshot_of,
    tokens_of,
    until,
)
from outrider.cluster.common.errors import InvalidRequest, Overloaded, Unavailable
from outrider.cluster.gateway import routed_backend
from outrider.cluster.gateway.journal import HANDOVER_S, MAX_ATTEMPTS, RETRY_INTERVAL_S
from outrider.cluster.gateway.routed_backend import RoutedBackend, RouterClient, affinity_key
from outrider.cluster.router.fleet import (
    Assignment,
    FleetSnapshot,
    PlacementReason,
    RouteAnswer,
    RouteAsk,
    RouterPolicy,
)
from outrider.verifier_service.messages.request import (
    FinishReason,
    GenerationRequest,
    RequestOutput,
    SpeculationPlan,
)
from outrider.verifier_service.messages.requests_link import Accepted, Refused

ASK = RouteAsk(request_id="r", num_prompt_tokens=3)


def assigned(endpoint: str) -> Assignment:
    return Assignment(verifier_id="v", endpoint=endpoint, plan=PLAN, reason=PlacementReason.ONLY)


# --- routing ---


async def test_the_router_decides_while_it_answers():
    router = Router(assigned("v:1"))
    client = RouterClient(router, RouterPolicy())
    client.snapshot = snapshot_of("other")
    assert await client.route(ASK) == assigned("v:1")
    assert router.route.asked == [(ASK,)]
    assert client.snapshot.verifiers[0].num_assigned == 0


async def test_a_router_that_knows_of_no_verifier_knows_better_than_an_older_snapshot():
    client = RouterClient(Router(RouteAnswer(None)), RouterPolicy())
    client.snapshot = snapshot_of("v")
    with pytest.raises(Unavailable, match="no verifier"):
        await client.route(ASK)


@pytest.mark.parametrize("answer", [HANGS, RayActorError(), TimeoutError()], ids=["hangs", "is dead", "times out"])
async def test_without_the_router_the_snapshot_decides(answer: Any):
    client = RouterClient(Router(answer), RouterPolicy())
    client.snapshot = snapshot_of("v")
    begin_s = time.monotonic()
    assignment = await client.route(ASK)
    assert time.monotonic() - begin_s < 10 * routed_backend.ROUTE_TIMEOUT_S
    assert (assignment.verifier_id, assignment.endpoint) == ("v", "v:1")
    assert assignment.plan.disabled_reason == "load"


async def test_requests_routed_alone_count_and_so_spread():
    client = RouterClient(Router(RayActorError()), RouterPolicy())
    client.snapshot = snapshot_of("v", "w")
    chosen = [(await client.route(dataclasses.replace(ASK, request_id=str(i)))).verifier_id for i in range(6)]
    assert chosen.count("v") == chosen.count("w") == 3


@pytest.mark.parametrize("snapshot", [None, snapshot_of()], ids=["no snapshot", "an empty one"])
@pytest.mark.parametrize(
    "answer",
    [RouteAnswer(None), None, RayActorError()],
    ids=["the router knows none", "the router is new", "the router is dead"],
)
async def test_no_verifier_is_unavailable(answer: Any, snapshot: FleetSnapshot | None):
    client = RouterClient(Router(answer), RouterPolicy())
    client.snapshot = snapshot
    with pytest.raises(Unavailable, match="no verifier"):
        await client.route(ASK)


async def test_following_takes_the_newest_snapshot_and_keeps_it_when_the_router_goes():
    router = Router(HANGS, snapshot=snapshot_of("v"))
    client = RouterClient(router, RouterPolicy())
    following = asyncio.ensure_future(client.follow())
    await until(lambda: client.snapshot == router.snapshot_answer)
    router.snapshot_answer = newer = snapshot_of("v", "w")
    await until(lambda: client.snapshot == newer)
    router.snapshot_answer = RayActorError()
    num_asked = len(router.snapshot.asked)
    await until(lambda: len(router.snapshot.asked) >= num_asked + 2)
    assert client.snapshot == newer
    assert not following.done()
    following.cancel()


# --- streaming ---


@contextlib.asynccontextmanager
async def backend_over(verifier: ScriptedVerifier) -> AsyncIterator[tuple[RoutedBackend, Router]]:
    async with fleet_of(verifier) as fleet:
        fleet.router.answer = assigned(fleet.router.endpoints.pop("v0"))
        yield fleet.backend, fleet.router


async def generate(backend: RoutedBackend, request: GenerationRequest = REQUEST) -> list[RequestOutput]:
    async with asyncio.timeout(20):
        return [output async for output in outputs_of(backend, request)]


async def test_outputs_carry_the_callers_own_id_and_nothing_else_changes():
    verifier = ScriptedVerifier([(1, 2), (3,)])
    async with backend_over(verifier) as (backend, _):
        outputs = await generate(backend)
    assert outputs == [
        RequestOutput(request_id="mine", token_ids=(1, 2), num_cached_tokens=2),
        RequestOutput(request_id="mine", token_ids=(3,), num_cached_tokens=2, finish_reason=FinishReason.STOP),
    ]


async def test_the_verifier_sees_the_request_with_the_routers_plan_and_an_id_of_the_fleet():
    verifier = ScriptedVerifier([(1,)])
    async with backend_over(verifier) as (backend, router):
        await generate(backend)
    (seen,) = verifier.requests
    assert dataclasses.replace(seen, request_id="mine", plan=SpeculationPlan()) == REQUEST
    assert seen.plan == PLAN
    assert verifier.senders == ["g"]
    (ask,) = router.asks
    assert (ask.request_id, ask.num_prompt_tokens, ask.num_speculative_tokens) == (seen.request_id, 3, 2)


async def test_two_clients_may_choose_the_same_id():
    verifier = ScriptedVerifier([(1,)])
    async with backend_over(verifier) as (backend, _):
        first, second = await asyncio.gather(generate(backend), generate(backend))
    assert first == second
    assert len({request.request_id for request in verifier.requests}) == 2
    assert all(request.request_id.startswith("g/") for request in verifier.requests)


async def test_a_refusal_becomes_an_error_after_the_outputs_before_it():
    async with backend_over(ScriptedVerifier([(1,), (2,)], end=grpc.StatusCode.INVALID_ARGUMENT)) as (backend, _):
        stream = outputs_of(backend, REQUEST)
        assert [(await anext(stream)).token_ids for _ in range(2)] == [(1,), (2,)]
        with pytest.raises(InvalidRequest, match="said so"):
            await anext(stream)


async def test_a_verifier_that_is_not_there_is_unavailable():
    async with backend_over(ScriptedVerifier([(1,)])) as (backend, router):
        router.answer = assigned("127.0.0.1:1")
        with pytest.raises(Unavailable):
            await generate(backend)


async def test_without_any_verifier_no_call_is_made():
    verifier = ScriptedVerifier([(1,)])
    async with backend_over(verifier) as (backend, router):
        router.answer = None
        with pytest.raises(Unavailable, match="no verifier"):
            await generate(backend)
    assert verifier.requests == []


async def test_leaving_early_cancels_at_the_verifier():
    verifier = ScriptedVerifier([(1,)], end=HANGS)
    async with backend_over(verifier) as (backend, _):
        stream = outputs_of(backend, REQUEST)
        assert (await anext(stream)).token_ids == (1,)
        assert verifier.cancelled == []
        await stream.aclose()
        await until(lambda: verifier.cancelled)
        assert verifier.cancelled == [verifier.requests[0].request_id]


async def test_cancelling_the_caller_cancels_at_the_verifier():
    verifier = ScriptedVerifier([], end=HANGS)
    async with backend_over(verifier) as (backend, _):
        caller = asyncio.ensure_future(generate(backend))
        await until(lambda: verifier.requests)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        await until(lambda: verifier.cancelled)


async def test_one_channel_serves_all_requests_to_a_verifier():
    verifier = ScriptedVerifier([(1,)])
    async with backend_over(verifier) as (backend, _):
        for _ in range(3):
            await generate(backend)
        assert len(backend._streams._links) == 1


async def test_the_channel_of_a_verifier_that_has_stopped_is_closed():
    async with fleet_of(ScriptedVerifier([(1,)]), ScriptedVerifier([(1,)])) as fleet:
        await fleet.generate()
        streams, endpoint = fleet.backend._streams, fleet.router.endpoints["v0"]
        channel = streams._links[endpoint]._channel
        await fleet.stops[0]()
        await until(lambda: not streams._links and not streams._reading)
        assert channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN


async def test_a_late_loss_on_an_old_channel_leaves_the_new_one_in_use():
    class Moody(ScriptedVerifier):
        async def answer(self, request: GenerationRequest) -> AsyncGenerator[Any]:
            is_first = len(self.requests) == 1
            if is_first:
                await go_on.wait()
            if is_first or not is_well.is_set():
                yield Refused(request_id=request.request_id, error="not this one", is_lost=True)
                return
            yield Accepted(request_id=request.request_id)
            yield RequestOutput(request_id=request.request_id, token_ids=(9,), finish_reason=FinishReason.STOP)

    verifier, go_on, is_well = Moody([]), asyncio.Event(), asyncio.Event()
    async with backend_over(verifier) as (backend, router):
        old = asyncio.ensure_future(generate(backend))
        await until(lambda: verifier.requests)
        with pytest.raises(Unavailable):
            await generate(backend)
        is_well.set()
        await generate(backend)
        (new,) = backend._streams._links.values()
        router.answer = assigned("127.0.0.1:1")
        go_on.set()
        with pytest.raises(Unavailable):
            await old
        assert new in backend._streams._links.values()


async def test_a_verifier_that_is_gone_is_passed_over_while_nothing_was_published():
    verifier = ScriptedVerifier([(1,)])
    async with backend_over(verifier) as (backend, router):
        good, asked = router.answer, []

        async def route(ask: RouteAsk) -> RouteAnswer:
            asked.append(ask.excluded_verifier_ids)
            return RouteAnswer(good if ask.excluded_verifier_ids else dataclasses.replace(good, endpoint="127.0.0.1:1"))

        router.route = type("Handle", (), {"remote": staticmethod(route)})
        assert [output.token_ids for output in await generate(backend)] == [(1,)]
    assert asked == [(), ("v",)]


async def test_a_request_is_tried_a_few_times_only():
    async with backend_over(ScriptedVerifier([(1,)])) as (backend, router):
        router.answer = assigned("127.0.0.1:1")
        with pytest.raises(Unavailable, match="no verifier takes the request"):
            await generate(backend)
        tries = [ask for ask in router.asks if not ask.excluded_verifier_ids]
        assert MAX_ATTEMPTS <= len(tries) <= HANDOVER_S / RETRY_INTERVAL_S + 1


async def test_a_new_request_outlasts_a_verifier_that_stops_before_the_router_knows():
    """The gateway's own snapshot, older still, has no say while the router answers."""
    async with fleet_of(ScriptedVerifier([], end=grpc.StatusCode.UNAVAILABLE, accepts=False)) as fleet:
        fleet.client.snapshot = snapshot_of("v0")
        call = asyncio.create_task(fleet.generate())
        await until(lambda: len(fleet.router.asks) > MAX_ATTEMPTS)
        del fleet.router.endpoints["v0"]
        await asyncio.sleep(2 * RETRY_INTERVAL_S)
        await fleet.add(ScriptedVerifier([(1,)]))
        assert tokens_of(await call) == (1,)


async def test_one_request_that_fails_leaves_the_others_on_its_channel_alone():
    class Moody(ScriptedVerifier):
        async def answer(self, request: GenerationRequest) -> AsyncGenerator[Any]:
            if len(self.requests) > 1:
                yield Refused(request_id=request.request_id, error="not this one", is_lost=True)
                return
            yield Accepted(request_id=request.request_id)
            await go_on.wait()
            yield RequestOutput(request_id=request.request_id, token_ids=(9,), finish_reason=FinishReason.STOP)

    verifier, go_on = Moody([]), asyncio.Event()
    async with backend_over(verifier) as (backend, _):
        first = asyncio.ensure_future(generate(backend))
        await until(lambda: verifier.requests)
        with pytest.raises(Unavailable):
            await generate(backend)
        go_on.set()
        await asyncio.wait([first])
        assert not first.cancelled(), "nobody cancelled it"
        assert first.result()[-1].token_ids == (9,)


# --- which verifier, and whether at all ---


async def test_a_gateway_that_starts_while_the_router_is_away_comes_up_with_it():
    router = Router(RayActorError(), snapshot=RayActorError())
    client = RouterClient(router, RouterPolicy())
    following = asyncio.ensure_future(client.follow())
    length = asyncio.ensure_future(client.max_model_len())
    await until(lambda: len(router.snapshot.asked) >= 2)
    assert not following.done()
    assert not length.done()
    router.snapshot_answer = snapshot_of("v", max_model_len=128)
    assert await asyncio.wait_for(length, 5) == 128
    following.cancel()


async def test_the_choices_of_a_group_run_on_one_verifier_whatever_the_router_says():
    verifiers = [ScriptedVerifier([(1,)], end=HANGS), ScriptedVerifier([(1,)], end=HANGS)]
    async with fleet_of(*verifiers) as fleet:
        endpoints = iter([*fleet.router.endpoints.values()] * 4)
        fleet.router.route._answer = lambda ask: RouteAnswer(assigned(next(endpoints)))
        grouped = [dataclasses.replace(REQUEST, request_id=f"r-{index}", group_id="r") for index in range(4)]
        streams = [outputs_of(fleet.backend, request) for request in grouped]
        await asyncio.gather(*(anext(stream) for stream in streams))
        assert [len(verifier.requests) for verifier in verifiers] == [4, 0]
        other = outputs_of(fleet.backend, REQUEST)
        await anext(other)
        assert [len(verifier.requests) for verifier in verifiers] == [4, 1]
        for stream in (*streams, other):
            await stream.aclose()
        assert fleet.backend._groups == {}


def test_requests_with_a_common_prefix_or_session_have_an_affinity_key_in_common():
    prompt = tuple(range(256))
    request = dataclasses.replace(REQUEST, prompt_token_ids=(*prompt, 1))
    key = affinity_key(request)
    assert affinity_key(dataclasses.replace(request, request_id="x", prompt_token_ids=(*prompt, 2))) == key
    assert affinity_key(dataclasses.replace(request, prompt_token_ids=(7, *prompt))) != key
    assert affinity_key(dataclasses.replace(request, cache_salt="s")) != key
    assert affinity_key(dataclasses.replace(request, adapter="a")) != key
    assert affinity_key(dataclasses.replace(request, session_id="s")) == "s"
    assert affinity_key(dataclasses.replace(request, group_id="g", session_id="s")) == "s"
    assert affinity_key(dataclasses.replace(request, group_id="g")) == key, "of several choices, too"


async def test_the_router_is_told_the_affinity_key():
    async with fleet_of(ScriptedVerifier([(1,)])) as fleet:
        await fleet.generate()
        assert [ask.affinity_key for ask in fleet.router.asks] == [affinity_key(REQUEST)]


async def test_a_full_queue_in_the_last_snapshot_refuses_before_anything_is_sent():
    verifier = ScriptedVerifier([(1,)])
    async with fleet_of(verifier, max_queued_requests=8) as fleet:
        fleet.client.snapshot = snapshot_of("v0", num_waiting=8)
        with pytest.raises(Overloaded, match="8 requests wait"):
            await fleet.generate()
        assert (fleet.router.asks, verifier.requests) == ([], [])
        fleet.client.snapshot = snapshot_of("v0", num_waiting=7)
        assert len(await fleet.generate()) == 1


async def test_a_burst_is_refused_before_any_report_shows_it():
    verifier = ScriptedVerifier([], end=HANGS)
    async with fleet_of(verifier, max_queued_requests=3) as fleet:
        fleet.client.snapshot = snapshot_of("v0")
        sent = [asyncio.ensure_future(fleet.generate()) for _ in range(3)]
        await until(lambda: len(verifier.requests) == 3)
        with pytest.raises(Overloaded):
            await fleet.generate()
        for stream in sent:
            stream.cancel()
        await asyncio.gather(*sent, return_exceptions=True)
        verifier.script, verifier.end = [(1,)], FinishReason.STOP
        assert len(await fleet.generate()) == 1


async def test_requests_that_have_a_token_do_not_count_as_waiting():
    verifier = ScriptedVerifier([(1,)], end=HANGS)
    async with fleet_of(verifier, max_queued_requests=2) as fleet:
        fleet.client.snapshot = snapshot_of("v0")
        streams = [outputs_of(fleet.backend, REQUEST) for _ in range(5)]
        for stream in streams:
            await anext(stream)
        for stream in streams:
            await stream.aclose()
