"""Requests that lose their verifier go on elsewhere: gRPC servers that die, hang, refuse and lie play the verifiers."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from fakes.engine_bench import greedy_tokens, make_request
from fakes.played_fleet import (
    HANGS,
    REQUEST,
    EngineVerifier,
    Fleet,
    ScriptedVerifier,
    fleet_of,
    outputs_of,
    tokens_of,
)
from fakes.tcp_proxy import TcpProxy
from outrider.cluster.common.errors import InvalidRequest, OutriderError, RequestFailed, Unavailable
from outrider.cluster.gateway import verifier_streams
from outrider.cluster.gateway.journal import MAX_ATTEMPTS, MAX_LOSSES
from outrider.proto import link_pb2, link_pb2_grpc
from outrider.verifier_service.messages.request import (
    FinishReason,
    GenerationRequest,
    RequestOutput,
    SpeculationMetrics,
    TokenLogprobs,
)
from outrider.verifier_service.messages.requests_link import Accepted
from outrider.verifier_service.messages.wire import decode, encode
from support.waiting import until

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def speculation(*per_position: int) -> SpeculationMetrics:
    return SpeculationMetrics(enabled=True, num_drafts=4, num_accepted_per_position=list(per_position))


async def plain_decoding(request: GenerationRequest) -> tuple[int, ...]:
    async with fleet_of(EngineVerifier()) as fleet:
        return tokens_of(await fleet.generate(request))


# --- nothing is lost, nothing doubled ---


@pytest.mark.parametrize(
    "request_",
    [
        make_request(max_tokens=20),
        make_request(max_tokens=20, temperature=5.0, seed=11),
        make_request(max_tokens=20, temperature=5.0, seed=11, frequency_penalty=2.0, min_tokens=18),
    ],
    ids=["greedy", "seeded", "seeded with penalties"],
)
async def test_tokens_are_those_of_an_undisturbed_stream(request_: GenerationRequest):
    expected = await plain_decoding(request_)
    verifiers = [EngineVerifier(dies_after=3), EngineVerifier(dies_after=5), EngineVerifier()]
    async with fleet_of(*verifiers) as fleet:
        outputs = await fleet.generate(request_)
    assert tokens_of(outputs) == expected
    assert len(expected) == 20
    assert [output.finish_reason for output in outputs] == [None] * 19 + [FinishReason.LENGTH]
    assert {output.request_id for output in outputs} == {request_.request_id}
    asked = [request for verifier in verifiers for request in verifier.requests]
    assert [request.output_token_ids for request in asked] == [(), expected[:3], expected[:8]]
    assert len({request.request_id for request in asked}) == 3, "a half-dead verifier may still run the old ones"


async def test_the_fakes_are_told_apart_by_seed_and_noise():
    greedy = await plain_decoding(make_request(max_tokens=20))
    seeded = [await plain_decoding(make_request(max_tokens=20, temperature=5.0, seed=seed)) for seed in (11, 12)]
    assert greedy == greedy_tokens(20)
    assert len({greedy, *seeded}) == 3


async def test_streams_of_one_lost_verifier_all_go_on():
    # the gateway knows 96 for an end, where the fake engine knows none: a stream lost just behind one would be over
    requests = [make_request(f"r{index}", prompt=(index, 2), max_tokens=12, ignore_eos=True) for index in range(8)]
    async with fleet_of(EngineVerifier(dies_after=30), EngineVerifier()) as fleet:
        streams = await asyncio.gather(*(fleet.generate(request) for request in requests))
    assert [tokens_of(outputs) for outputs in streams] == [greedy_tokens(12, (index, 2)) for index in range(8)]


async def test_everything_but_id_plan_and_published_tokens_is_asked_again():
    labels = {"group_id": "g", "cache_salt": "s", "trace_parent": "t", "session_id": "c"}
    request = dataclasses.replace(REQUEST, priority=-3, target_inter_token_ms=20.5, **labels)
    verifiers = [ScriptedVerifier([(5, 6)], end=UNAVAILABLE), ScriptedVerifier([(7,)])]
    async with fleet_of(*verifiers) as fleet:
        await fleet.generate(request)
    first, second = verifiers[0].requests[0], verifiers[1].requests[0]
    assert second == dataclasses.replace(first, request_id=second.request_id, output_token_ids=(5, 6))
    assert dataclasses.replace(first, request_id=request.request_id, plan=request.plan) == request


async def test_counters_of_all_verifiers_add_up_and_cached_tokens_stay_the_first_ones():
    first = RequestOutput(request_id="x", token_ids=(5,), num_cached_tokens=1, speculation=speculation(3, 1))
    last = RequestOutput(
        request_id="x",
        token_ids=(6,),
        num_cached_tokens=4,
        speculation=speculation(2),
        finish_reason=FinishReason.STOP,
    )
    async with fleet_of(ScriptedVerifier([first], end=UNAVAILABLE), ScriptedVerifier([last])) as fleet:
        outputs = await fleet.generate()
    assert outputs[0].speculation == speculation(3, 1)
    assert outputs[1].speculation == dataclasses.replace(speculation(5, 1), num_drafts=8)
    assert [output.num_cached_tokens for output in outputs] == [1, 1]


async def test_prompt_logprobs_are_asked_for_until_they_were_delivered():
    request = dataclasses.replace(REQUEST, sampling=dataclasses.replace(REQUEST.sampling, prompt_logprobs=0))
    logprobs = (None, TokenLogprobs(token_id=2, logprob=-1.0, rank=1), TokenLogprobs(token_id=3, logprob=-1.0, rank=1))
    first = RequestOutput(request_id="x", token_ids=(5,), prompt_logprobs=logprobs)
    verifiers = [
        ScriptedVerifier([], end=UNAVAILABLE),
        ScriptedVerifier([first], end=UNAVAILABLE),
        ScriptedVerifier([(6,)]),
    ]
    async with fleet_of(*verifiers) as fleet:
        outputs = await fleet.generate(request)
    assert [output.prompt_logprobs for output in outputs] == [logprobs, None]
    wanted = [verifier.requests[0].sampling.prompt_logprobs for verifier in verifiers]
    assert wanted == [0, 0, None]


@pytest.mark.parametrize("token_id", [96, 9], ids=["end of sequence", "max_tokens"])
async def test_a_request_that_had_ended_is_ended_here(token_id: int):
    request = dataclasses.replace(REQUEST, sampling=dataclasses.replace(REQUEST.sampling, max_tokens=2))
    verifiers = [ScriptedVerifier([(token_id,), (token_id,)][: 1 + (token_id == 9)], end=UNAVAILABLE)]
    async with fleet_of(*verifiers) as fleet:
        outputs = await fleet.generate(request)
    reason = FinishReason.STOP if token_id == 96 else FinishReason.LENGTH
    assert (outputs[-1].token_ids, outputs[-1].finish_reason) == ((), reason)
    assert len(verifiers[0].requests) == 1


# --- what is a loss ---


@pytest.mark.parametrize(
    "lost",
    [
        ScriptedVerifier([(5,)], end=grpc.StatusCode.CANCELLED),
        ScriptedVerifier([(5,)], end=grpc.StatusCode.INTERNAL),
        ScriptedVerifier([(5,)], end=None),
        ScriptedVerifier([(5,), b"no message"], end=HANGS),
    ],
    ids=["cancelled by the verifier", "broken", "ended without a reason", "garbage"],
)
async def test_a_stream_that_breaks_off_goes_on_elsewhere(lost: ScriptedVerifier):
    async with fleet_of(lost, ScriptedVerifier([(6,)])) as fleet:
        assert tokens_of(await fleet.generate()) == (5, 6)


async def test_a_server_that_stops_is_a_loss_and_its_other_streams_go_on_too():
    async with fleet_of(ScriptedVerifier([(5,)], end=HANGS)) as fleet:
        server_stops = fleet.stops[0]
        await fleet.add(ScriptedVerifier([(6,)]))
        streams = [outputs_of(fleet.backend, REQUEST) for _ in range(3)]
        assert [tokens_of([await anext(stream)]) for stream in streams] == [(5,)] * 3
        await server_stops()
        assert [tokens_of([output async for output in stream]) for stream in streams] == [(6,)] * 3


async def test_an_error_of_the_request_itself_is_not_tried_elsewhere():
    other = ScriptedVerifier([(6,)])
    async with fleet_of(ScriptedVerifier([(5,)], end=grpc.StatusCode.INVALID_ARGUMENT), other) as fleet:
        with pytest.raises(InvalidRequest, match="said so"):
            await fleet.generate()
    assert other.requests == []


async def test_a_peer_that_falls_silent_is_noticed_within_seconds_and_its_call_is_given_up():
    silent = ScriptedVerifier([(5,)], end=HANGS)
    async with fleet_of(silent, ScriptedVerifier([(6,)])) as fleet:
        proxy = TcpProxy(fleet.router.endpoints["v0"])
        try:
            fleet.router.endpoints["v0"] = proxy.address
            stream = outputs_of(fleet.backend, REQUEST)
            await anext(stream)
            proxy.lose_packets()
            began_s = time.monotonic()
            assert tokens_of([output async for output in stream]) == (6,)
            assert time.monotonic() - began_s < 4.5, "a ping a second, answered within two"
            proxy.heal()
            await until(lambda: silent.cancelled)
        finally:
            proxy.close()


async def test_a_verifier_that_never_says_it_has_the_request_is_passed_over(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verifier_streams, "ACCEPT_TIMEOUT_S", 0.1)
    deaf = ScriptedVerifier([], end=HANGS, accepts=False)
    async with fleet_of(deaf, ScriptedVerifier([(6,)])) as fleet:
        assert tokens_of(await asyncio.wait_for(fleet.generate(), 5)) == (6,)
        await until(lambda: deaf.cancelled)


# --- how long, how often ---


async def test_a_request_that_has_begun_waits_longer_for_a_verifier_than_a_new_one():
    async with fleet_of(ScriptedVerifier([(5,)], end=UNAVAILABLE)) as fleet:
        stream = outputs_of(fleet.backend, REQUEST)
        await anext(stream)
        fleet.router.endpoints.clear()
        rest = asyncio.ensure_future(anext(stream))
        await until(lambda: len(fleet.router.asks) >= 3)
        assert not rest.done()
        with pytest.raises(Unavailable, match="no verifier is ready"):
            await fleet.generate()
        await fleet.add(ScriptedVerifier([(6,)]))
        assert (await asyncio.wait_for(rest, 5)).token_ids == (6,)


async def test_the_same_verifier_takes_it_again_after_its_restart():
    async with fleet_of(ScriptedVerifier([(5,)], end=HANGS)) as fleet:
        stream = outputs_of(fleet.backend, REQUEST)
        await anext(stream)
        await fleet.stops.pop()()
        rest = asyncio.ensure_future(anext(stream))
        await until(lambda: len(fleet.router.asks) >= 6)
        await fleet.add(ScriptedVerifier([(6,)]), fleet.router.endpoints.pop("v0"))
        assert (await asyncio.wait_for(rest, 2)).token_ids == (6,)


async def test_the_wait_ends_at_the_time_out():
    async with fleet_of(ScriptedVerifier([(5,)], end=UNAVAILABLE), failover_timeout_s=1.0) as fleet:
        stream = outputs_of(fleet.backend, REQUEST)
        await anext(stream)
        fleet.router.endpoints.clear()
        with pytest.raises(Unavailable, match="within 1 s"):
            await asyncio.wait_for(anext(stream), 5)


async def test_a_waiting_request_can_be_cancelled():
    async with fleet_of(ScriptedVerifier([(5,)], end=UNAVAILABLE)) as fleet:
        stream = asyncio.ensure_future(fleet.generate())
        await until(lambda: len(fleet.router.asks) >= 2)
        stream.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stream


async def failure_of(fleet: Fleet) -> OutriderError:
    with pytest.raises(OutriderError) as failure:
        await fleet.generate(make_request(max_tokens=50))
    return failure.value


async def test_a_request_that_every_verifier_dies_of_is_given_up():
    verifiers = [ScriptedVerifier([], end=UNAVAILABLE) for _ in range(MAX_ATTEMPTS + 2)]
    async with fleet_of(*verifiers) as fleet:
        assert type(await failure_of(fleet)) is RequestFailed
    assert sum(len(verifier.requests) for verifier in verifiers) == MAX_ATTEMPTS


class ThreadedVerifier(link_pb2_grpc.VerifierLinkServicer):
    """A verifier, not on the test's loop, that dies of every request as soon as it has it."""

    def __init__(self) -> None:
        self.num_requests = 0

    def Serve(self, frames: Iterator[link_pb2.Frame], context: Any) -> Iterator[link_pb2.Frame]:
        request = decode(next(frames).payload, (GenerationRequest,))
        self.num_requests += 1
        yield link_pb2.Frame(payload=encode(Accepted(request_id=request.request_id)))
        context.abort(UNAVAILABLE, "said so")


async def test_a_busy_gateway_hears_that_a_request_was_accepted_though_the_death_follows_at_once():
    """Its loop gets both in one turn: what stands in the initial metadata is lost then."""

    async def keep_busy() -> None:
        while True:
            time.sleep(0.01)
            await asyncio.sleep(0)

    verifier = ThreadedVerifier()
    server = grpc.server(ThreadPoolExecutor(1))
    link_pb2_grpc.add_VerifierLinkServicer_to_server(verifier, server)
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    async with fleet_of() as fleet:
        fleet.router.endpoints |= {f"v{index}": endpoint for index in range(MAX_ATTEMPTS + 2)}
        busy = asyncio.ensure_future(keep_busy())
        assert type(await failure_of(fleet)) is RequestFailed
        busy.cancel()
    server.stop(None)
    assert verifier.num_requests == MAX_ATTEMPTS


async def test_so_is_one_that_they_die_of_after_some_tokens():
    deadly = ScriptedVerifier([(5,), (6,)], end=UNAVAILABLE)
    async with fleet_of(deadly) as fleet:
        assert type(await failure_of(fleet)) is RequestFailed
    assert len(deadly.requests) == MAX_LOSSES


async def test_a_request_in_the_company_of_a_deadly_one_outlives_it():
    """What had got tokens has a try more than what never had: by then the deadly one is given up."""
    innocent = make_request("innocent", max_tokens=10)
    dying = [ScriptedVerifier([], end=UNAVAILABLE) for _ in range(MAX_ATTEMPTS - 1)]
    async with fleet_of(EngineVerifier(dies_after=4), *dying, EngineVerifier()) as fleet:
        assert tokens_of(await fleet.generate(innocent)) == greedy_tokens(10)


async def test_attempts_that_reach_no_engine_do_not_count_as_deaths():
    async with fleet_of(ScriptedVerifier([(5,)], end=UNAVAILABLE)) as fleet:
        stream = outputs_of(fleet.backend, REQUEST)
        await anext(stream)
        await fleet.stops.pop()()
        rest = asyncio.ensure_future(anext(stream))
        await until(lambda: len(fleet.router.asks) > 3 * MAX_ATTEMPTS)
        assert not rest.done()
        await fleet.add(ScriptedVerifier([(6,)]))
        assert (await asyncio.wait_for(rest, 5)).token_ids == (6,)


async def test_a_verifier_without_an_engine_is_one_that_did_not_take_the_request():
    dead = EngineVerifier(dies_after=1)
    async with fleet_of(dead) as fleet:
        stream = outputs_of(fleet.backend, make_request(max_tokens=4))
        await anext(stream)
        rest = asyncio.ensure_future(anext(stream))
        await until(lambda: len(fleet.router.asks) > 3 * MAX_ATTEMPTS)
        await fleet.add(EngineVerifier())
        assert (await asyncio.wait_for(rest, 5)).token_ids == greedy_tokens(2)[1:]
        await stream.aclose()


# --- under other weights ---


@pytest.mark.parametrize(("second", "num_warnings"), [("1", 0), ("2", 1)])
async def test_an_output_names_its_weights_and_other_ones_are_no_secret(
    second: str, num_warnings: int, caplog: pytest.LogCaptureFixture
):
    def step(version: str, *token_ids: int) -> RequestOutput:
        return RequestOutput(request_id="", token_ids=token_ids, weight_version=version)

    lost = ScriptedVerifier([step("1", 5, 6)], end=UNAVAILABLE)
    last = RequestOutput(request_id="", token_ids=(8,), weight_version=second, finish_reason=FinishReason.STOP)
    async with fleet_of(lost, ScriptedVerifier([step(second, 7), last])) as fleet:
        outputs = await fleet.generate(REQUEST)
    assert [output.weight_version for output in outputs] == ["1", second, second]
    warnings = [record for record in caplog.records if "goes on under weights '2'" in record.getMessage()]
    assert len(warnings) == num_warnings
