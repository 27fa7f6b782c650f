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

from fakes.played_fleet import (
    HANGS,
    PLAN,
    REQUEST,
    Fleet,
    Router,
    ScriptedVerifier,
    fleet_of,
    outputs_of,
    snapshot_of,
    tokens_of,
)
from outrider.cluster.common.errors import InvalidRequest, Overloaded, Unavailable
from outrider.cluster.gateway.journal import HANDOVER_S, MAX_ATTEMPTS, RETRY_INTERVAL_S
from outrider.cluster.gateway.routed_backend import RoutedBackend, affinity_key
from outrider.cluster.router.fleet import Assignment, PlacementReason, RouteAsk
from outrider.cluster.router.search import MAX_FULL
from outrider.verifier_service.messages.request import (
    FinishReason,
    GenerationRequest,
    RequestOutput,
    SpeculationPlan,
)
from outrider.verifier_service.messages.requests_link import Accepted, Refused
from support.waiting import until


def assigned(endpoint: str) -> Assignment:
    return Assignment(verifier_id="v", endpoint=endpoint, plan=PLAN, reason=PlacementReason.ONLY)


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
        with pytest.raises(Unavailable, match="no verifier is ready"):
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
        good, router.answer = router.answer, None
        assert good is not None
        gone = dataclasses.replace(good, endpoint="127.0.0.1:1")
        router.choose = lambda ask: good if ask.excluded_verifier_ids else gone
        assert [output.token_ids for output in await generate(backend)] == [(1,)]
        assert [ask.excluded_verifier_ids for ask in router.asks] == [(), ("v",)]


async def test_a_request_is_tried_a_few_times_only():
    async with backend_over(ScriptedVerifier([(1,)])) as (backend, router):
        router.answer = assigned("127.0.0.1:1")
        with pytest.raises(Unavailable, match="no verifier takes the request"):
            await generate(backend)
        tries = [ask for ask in router.asks if not ask.excluded_verifier_ids]
        assert MAX_ATTEMPTS <= len(tries) <= HANDOVER_S / RETRY_INTERVAL_S + 1


async def test_a_new_request_outlasts_a_verifier_that_stops_before_the_router_knows():
    async with fleet_of(ScriptedVerifier([], end=grpc.StatusCode.UNAVAILABLE, accepts=False)) as fleet:
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


async def test_the_choices_of_a_group_run_on_one_verifier_whatever_the_router_says():
    verifiers = [ScriptedVerifier([(1,)], end=HANGS), ScriptedVerifier([(1,)], end=HANGS)]
    async with fleet_of(*verifiers) as fleet:
        endpoints = iter([*fleet.router.endpoints.values()] * 4)
        fleet.router.choose = lambda ask: assigned(next(endpoints))
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
        fleet.router.know(snapshot_of("v0", num_waiting=8))
        with pytest.raises(Overloaded, match="8 requests wait"):
            await fleet.generate()
        assert (fleet.router.asks, verifier.requests) == ([], [])
        fleet.router.know(snapshot_of("v0", num_waiting=7))
        assert len(await fleet.generate()) == 1


async def test_a_burst_is_refused_before_any_report_shows_it():
    verifier = ScriptedVerifier([], end=HANGS)
    async with fleet_of(verifier, max_queued_requests=3) as fleet:
        fleet.router.know(snapshot_of("v0"))
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
        fleet.router.know(snapshot_of("v0"))
        streams = [outputs_of(fleet.backend, REQUEST) for _ in range(5)]
        for stream in streams:
            await anext(stream)
        for stream in streams:
            await stream.aclose()


# --- admission at the verifier ---


class Full(ScriptedVerifier):
    """A verifier where too many wait, but for requests that were admitted before."""

    async def answer(self, request: GenerationRequest) -> AsyncGenerator[Any]:
        if request.most_waiting is not None:
            yield Refused(request_id=request.request_id, error="9 requests wait here", is_lost=True, is_full=True)
            return
        async with contextlib.aclosing(super().answer(request)) as messages:
            async for message in messages:
                yield message


def known(fleet: Fleet, **report: Any) -> None:
    """Let the gateway know its verifiers."""
    fleet.router.know(snapshot_of(*fleet.router.endpoints, **report))


async def test_a_full_verifier_refuses_and_the_next_one_takes_the_request():
    full, other = Full([(1,)]), ScriptedVerifier([(2,)])
    async with fleet_of(full, other, max_queued_requests=8) as fleet:
        known(fleet)
        assert tokens_of(await fleet.generate()) == (2,)
        assert [ask.excluded_verifier_ids for ask in fleet.router.asks] == [(), ("v0",)]
        assert [request.most_waiting for request in (*full.requests, *other.requests)] == [8, 8]


@pytest.mark.parametrize(("priority", "most"), [(0, 8), (1, 4), (-1, 10)])
async def test_the_verifier_is_told_how_many_may_wait_before_a_request_of_its_priority(priority: int, most: int):
    verifier = ScriptedVerifier([(2,)])
    async with fleet_of(verifier, max_queued_requests=8) as fleet:
        known(fleet)
        await fleet.generate(dataclasses.replace(REQUEST, priority=priority))
        assert [request.most_waiting for request in verifier.requests] == [most]


class Busy(ScriptedVerifier):
    """A verifier where one more would have to wait."""

    async def answer(self, request: GenerationRequest) -> AsyncGenerator[Any]:
        if request.most_waiting == 0:
            yield Refused(request_id=request.request_id, error="1 would wait", is_lost=True, is_full=True)
            return
        async with contextlib.aclosing(super().answer(request)) as messages:
            async for message in messages:
                yield message


@pytest.mark.parametrize("num_verifiers", [2, 3, 4])
async def test_a_request_looks_for_one_that_runs_it_at_once_before_it_waits(num_verifiers: int):
    verifiers = [Busy([(place,)]) for place in range(num_verifiers)]
    async with fleet_of(*verifiers, max_queued_requests=8) as fleet:
        known(fleet)

        def choose(ask: RouteAsk) -> Assignment | None:
            first = fleet.router.first(ask)
            return first and dataclasses.replace(first, reason=PlacementReason.PREFIX)

        fleet.router.choose = choose
        (token_id,) = tokens_of(await fleet.generate())
    asked = [request.most_waiting for verifier in verifiers for request in verifier.requests]
    assert (token_id, asked) == ((0, [0, 8, 0]) if num_verifiers == 2 else (2, [0, 0, 8]))


async def test_choices_of_one_prompt_stay_together_and_wait():
    verifiers = [Busy([(1,)]), Busy([(2,)])]
    async with fleet_of(*verifiers, max_queued_requests=8) as fleet:
        known(fleet)
        fleet.router.answer = dataclasses.replace(assigned(fleet.router.endpoints["v0"]), verifier_id="v0")
        assert tokens_of(await fleet.generate(dataclasses.replace(REQUEST, group_id="g"))) == (1,)
        assert [request.most_waiting for request in verifiers[0].requests] == [8]


@pytest.mark.parametrize("num_verifiers", [1, 2, MAX_FULL + 1])
async def test_where_all_are_full_the_client_is_told_to_come_back(num_verifiers: int):
    verifiers = [Full([(1,)]) for _ in range(num_verifiers)]
    async with fleet_of(*verifiers) as fleet:
        known(fleet)
        begin_s = time.monotonic()
        with pytest.raises(Overloaded) as refused:
            await fleet.generate()
        assert time.monotonic() - begin_s < RETRY_INTERVAL_S, "nothing is waited for"
        assert refused.value.retry_after_s >= 1.0
        assert sum(len(verifier.requests) for verifier in verifiers) == min(num_verifiers, MAX_FULL)


async def test_a_request_that_has_begun_is_taken_whoever_waits():
    lost = ScriptedVerifier([(1,)], end=grpc.StatusCode.UNAVAILABLE)
    async with fleet_of(lost, Full([(2,)])) as fleet:
        known(fleet)
        assert tokens_of(await fleet.generate()) == (1, 2)


# --- own requests ---


async def test_a_request_is_load_until_its_verifiers_report_includes_it():
    class Counting(ScriptedVerifier):
        async def answer(self, request: GenerationRequest) -> AsyncGenerator[Any]:
            yield Accepted(request_id=request.request_id, num_taken=5)
            yield RequestOutput(request_id=request.request_id, token_ids=(1,))
            await asyncio.get_running_loop().create_future()

    def num_assigned() -> int:
        (state,) = fleet.router.view.fleet.verifiers
        return state.num_assigned

    async with fleet_of(Counting([])) as fleet:
        known(fleet, num_taken=4)
        stream = outputs_of(fleet.backend, REQUEST)
        await anext(stream)
        assert num_assigned() == 1
        known(fleet, num_taken=5)
        assert num_assigned() == 0
        await stream.aclose()
        other = outputs_of(fleet.backend, REQUEST)
        known(fleet, num_taken=4)
        await anext(other)
        assert num_assigned() == 1
        await other.aclose()
        assert num_assigned() == 0, "it has ended"


async def test_a_request_whose_client_leaves_at_once_is_no_load():
    async with fleet_of(ScriptedVerifier([], end=HANGS, accepts=False)) as fleet:
        known(fleet)
        call = asyncio.ensure_future(fleet.generate())
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert [state.num_assigned for state in fleet.router.view.fleet.verifiers] == [0]
