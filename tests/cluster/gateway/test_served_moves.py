"""The gateway over two verifiers with real engines: requests that change hands have the tokens of one verifier."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

import pytest

from fakes.played_fleet import PLAN, Fleet, outputs_of, tokens_of
from outrider.cluster.gateway.kv_transfer import KeptOutput
from outrider.cluster.router.fleet import Assignment, PlacementReason, RouteAsk
from outrider.verifier_service.messages.handover import HandOver
from outrider.verifier_service.messages.request import GenerationRequest
from support.waiting import until
from tiny.handing import HandingEngine, ask, prompts
from tiny.handing_ports import Served


@pytest.fixture(scope="module")
def benches() -> tuple[HandingEngine, HandingEngine]:
    return HandingEngine(), HandingEngine()


@contextlib.asynccontextmanager
async def fleet_over(
    benches: tuple[HandingEngine, HandingEngine], *, has_roles: bool
) -> AsyncIterator[tuple[Fleet, Served, Served]]:
    """Run a gateway over v0 and v1; with roles v0 computes prompts, else the router names it first."""
    first, second = map(Served, benches)
    await first.start()
    await second.start()
    fleet = Fleet()
    fleet.router.endpoints |= {"v0": first.endpoint, "v1": second.endpoint}

    def answer(ask: RouteAsk) -> Assignment | None:
        names = ["v1", "v0"] if has_roles else ["v0", "v1"]
        name = next((name for name in names if name not in ask.excluded_verifier_ids), None)
        if name is None:
            return None
        assignment = Assignment(
            verifier_id=name, endpoint=fleet.router.endpoints[name], plan=PLAN, reason=PlacementReason.ONLY
        )
        if has_roles and ask.may_hand_over:
            assignment = dataclasses.replace(
                assignment, prefill_verifier_id="v0", prefill_endpoint=fleet.router.endpoints["v0"]
            )
        return assignment

    fleet.router.choose = answer
    for bench in benches:
        bench.engine.scheduler.flush_cache()
    async with asyncio.timeout(60):
        yield fleet, first, second
        await fleet.backend.close()
    await first.stop()
    await second.stop()


def requests() -> list[GenerationRequest]:
    seeded = {"temperature": 0.9, "seed": 5}
    made = [ask(f"greedy {index}", prompt) for index, prompt in enumerate(prompts())]
    return [*made, *(ask(f"seeded {index}", prompt, sampling=seeded) for index, prompt in enumerate(prompts()))]


async def generate(fleet: Fleet, request: GenerationRequest) -> tuple[int, ...]:
    return tokens_of([output async for output in outputs_of(fleet.backend, request)])


async def alone(fleet: Fleet) -> list[tuple[int, ...]]:
    """Return what one verifier makes of all: choices of a group stay at one."""
    return [await generate(fleet, dataclasses.replace(each, group_id=each.request_id)) for each in requests()]


async def test_prompts_are_computed_at_one_and_decoded_at_the_other(benches):
    async with fleet_over(benches, has_roles=True) as (fleet, _, _):
        expected = await alone(fleet)
        assert fleet.handovers == []
        assert await asyncio.gather(*(generate(fleet, each) for each in requests())) == expected
        assert fleet.handovers == [("taken", "", True)] * len(expected)
        await until(lambda: not benches[0].engine.has_work() and not benches[0].engine.requests)


async def test_what_runs_leaves_a_verifier_that_drains(benches):
    async with fleet_over(benches, has_roles=False) as (fleet, first, _):
        expected = await alone(fleet)
        streams = [outputs_of(fleet.backend, each) for each in requests()]
        begun = [tokens_of([await anext(stream)]) for stream in streams]
        first._shell.send(HandOver())
        rest = await asyncio.gather(*(collected(stream) for stream in streams))
        assert [before + after for before, after in zip(begun, rest, strict=True)] == expected
        assert ("moved", "", True) in fleet.handovers
        assert {outcome for outcome, _, _ in fleet.handovers} == {"moved"}
        assert len(first.table) == 0


async def test_one_at_a_time_leaves_a_verifier_that_is_full(benches):
    async with fleet_over(benches, has_roles=False) as (fleet, first, _):
        expected = await alone(fleet)
        streams = [outputs_of(fleet.backend, each) for each in requests()]
        begun = [tokens_of([await anext(stream)]) for stream in streams]
        first._shell.send(HandOver(max_held=1))
        rest = await asyncio.gather(*(collected(stream) for stream in streams))
        assert [before + after for before, after in zip(begun, rest, strict=True)] == expected
        assert fleet.handovers == [("moved", "", True)]


async def collected(stream: AsyncIterator) -> tuple[int, ...]:
    return tokens_of([output async for output in stream])


async def test_a_second_request_takes_the_prompt_and_draws_every_token_itself(benches):
    async with fleet_over(benches, has_roles=True) as (fleet, first, _):
        expected = await alone(fleet)
        for request, tokens in zip(requests(), expected, strict=True):
            sampling = dataclasses.replace(request.sampling, max_tokens=1)
            offered = dataclasses.replace(request, hands_over=True, sampling=sampling)
            (output,) = [output async for output in outputs_of(fleet.backend, offered)]
            assert isinstance(output, KeptOutput)
            assert output.token_ids == tokens[:1]
            source = dataclasses.replace(output.kept, draws_anew=True)
            fleet.backend._kv_peers = frozenset({source.endpoint})
            assert await generate(fleet, dataclasses.replace(request, kv_source=source)) == tokens
        assert fleet.handovers == [("taken", "", False)] * len(expected)
        await until(lambda: len(first.table) == 0)
