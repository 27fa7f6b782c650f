"""The way to the pool: a thread of its own, a real directory and real links on this machine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from fakes.reports import verifier_report
from fakes.scripted import DRAFTER_ID, DraftScript, ScriptedDrafter, random_laws, serving
from outrider.cluster.hosted.pool_connection import PoolConnection
from outrider.cluster.router.fleet import Directive, VerifierReport
from outrider.proto.link_pb2_grpc import add_DrafterDirectoryServicer_to_server
from outrider.verifier_service.messages.draft import Close, Commit, Draft, DraftSampling, Open
from outrider.verifier_service.messages.engine import PeerState, Relay
from outrider.verifier_service.messages.link import CHANNEL_OPTIONS, DrafterEndpoint, Hello, frame_of
from outrider.verifier_service.messages.request import SpeculationPlan
from outrider.verifier_service.messages.wire import decode, encode
from support.waiting import until

HELLO = Hello(verifier_id="v0", epoch=7, vocab_size=5)
TIMEOUT_S = 30.0
GREEDY = DraftSampling(temperature=0.0, seed=1)  # the scripted drafter sends ids alone


class Directory:
    """A directory that names the drafters that it is told; it may fall silent, too."""

    def __init__(self) -> None:
        self.drafters: tuple[DrafterEndpoint, ...] = ()
        self.reports: list[VerifierReport] = []
        self.is_silent = False

    async def Follow(self, request_iterator: Any, context: Any) -> None:
        while (frame := await context.read()) is not grpc.aio.EOF:
            self.reports.append(decode(frame.payload, (VerifierReport,)))
            if self.is_silent:
                await asyncio.sleep(TIMEOUT_S)
            plan = SpeculationPlan(drafter_id=DRAFTER_ID, draft_length=3)
            directive = Directive(plans={}, default_plan=plan, drafters=self.drafters)
            await context.write(frame_of(frame.sender, frame.epoch, encode(directive)))


@asynccontextmanager
async def directory_at(directory: Directory, port: int = 0) -> AsyncIterator[int]:
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    add_DrafterDirectoryServicer_to_server(directory, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    assert bound
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(grace=None)


class Side:
    """What the engine's side of a connection says and sees."""

    def __init__(self, port: int) -> None:
        self.directives: list[Directive] = []
        self.num_asked = 0
        self.fails = False
        self.is_busy = False
        self.arrived: list[PeerState | Relay] = []
        self.connection = PoolConnection(
            f"127.0.0.1:{port}", HELLO, report=self.report, follow=self.directives.append, max_backoff_s=0.2
        )

    def report(self, linked_drafters: tuple[str, ...]) -> VerifierReport | None:
        self.num_asked += 1
        if self.fails:
            raise RuntimeError("the report is broken")
        return None if self.is_busy else verifier_report("v0", linked_drafters=linked_drafters)

    def states(self) -> list[bool]:
        """Return whether the drafter came up or went away, each time it did."""
        self.arrived += self.connection.wait(0.0)
        return [one.is_up for one in self.arrived if isinstance(one, PeerState)]

    def drafts(self) -> list[Draft]:
        self.arrived += self.connection.wait(0.0)
        return [decode(one.payload, (Draft,)) for one in self.arrived if isinstance(one, Relay)]

    def ask(self, request_id: str) -> None:
        messages = (
            Open(request_id=request_id, token_ids=(1, 2, 3), sampling=GREEDY),
            Commit(request_id=request_id, round_id=1, position=3, token_ids=(), max_length=4),
        )
        self.connection.send([Relay(peer=DRAFTER_ID, payload=encode(message)) for message in messages])


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Side]:
    side = Side(port)
    side.connection.start()
    try:
        yield side
    finally:
        await asyncio.to_thread(side.connection.stop)
        assert not side.connection._thread.is_alive()


def drafter() -> ScriptedDrafter:
    laws = random_laws(5, seed=0)
    return ScriptedDrafter(DraftScript(laws=laws))


def endpoint(port: int, epoch: int = 1) -> DrafterEndpoint:
    return DrafterEndpoint(drafter_id=DRAFTER_ID, endpoint=f"127.0.0.1:{port}", epoch=epoch)


@asynccontextmanager
async def pool() -> AsyncIterator[tuple[Directory, int, ScriptedDrafter]]:
    """Serve a drafter and a directory that names it."""
    directory, scripted = Directory(), drafter()
    async with serving(scripted, max_model_len=64) as link_port, directory_at(directory) as port:
        directory.drafters = (endpoint(link_port),)
        yield directory, port, scripted


async def test_links_come_up_and_frames_flow_both_ways():
    async with pool() as (directory, port, scripted), connected(port) as side:
        await until(side.states)
        assert side.states() == [True]
        side.ask("a")
        await until(side.drafts)
        (draft,) = side.drafts()
        assert (draft.request_id, draft.round_id, len(draft.token_ids)) == ("a", 1, 4)
        side.connection.send([Relay(peer=DRAFTER_ID, payload=encode(Close(request_id="a")))])
        await until(lambda: scripted.load().num_sessions == 0)
        await until(lambda: directory.reports[-1].linked_drafters == (DRAFTER_ID,))
        assert side.directives[0].default_plan.draft_length == 3
        assert side.connection.num_failures == 0


async def test_waiting_ends_with_the_first_arrival_or_its_time():
    side = Side(1)
    begin_s = time.monotonic()
    assert side.connection.wait(0.05) == []
    assert 0.04 < time.monotonic() - begin_s < 5.0
    async with pool() as (_, port, _), connected(port) as side:
        arrived = await asyncio.to_thread(side.connection.wait, TIMEOUT_S)
        assert [type(one) for one in arrived] == [PeerState]


async def test_frames_are_lost_while_there_is_no_link_and_nothing_blocks():
    side = Side(1)
    side.ask("a")  # not even started
    async with pool() as (directory, port, scripted):
        directory.drafters = ()
        async with connected(port) as side:
            await until(lambda: side.directives)
            side.ask("a")
            assert side.drafts() == []
            assert scripted.load().num_sessions == 0


async def test_a_directory_that_goes_away_leaves_the_links_and_is_found_again():
    scripted, directory = drafter(), Directory()
    async with serving(scripted, max_model_len=64) as link_port:
        directory.drafters = (endpoint(link_port),)
        async with directory_at(directory) as port:
            side = Side(port)
            side.connection.start()
            await until(side.states)
        await until(lambda: side.connection.num_failures)
        assert side.connection.last_error is not None
        side.ask("a")
        await until(side.drafts)
        num_reports = len(directory.reports)
        async with directory_at(directory, port):
            await until(lambda: len(directory.reports) > num_reports + 1)
            await until(lambda: side.connection.last_error is None)
        assert side.states() == [True], "the link was up all the while"
        await asyncio.to_thread(side.connection.stop)


async def test_without_any_directory_it_goes_on_trying_and_says_so_once(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        async with connected(1) as side:
            await until(lambda: side.connection.num_failures >= 3)
            assert side.connection.linked_drafters == ()
    assert caplog.text.count("is not reached") == 1


async def test_a_busy_engine_is_asked_again_soon():
    async with pool() as (directory, port, _), connected(port) as side:
        side.is_busy = True
        await until(lambda: side.num_asked > 3)
        num_reports = len(directory.reports)
        side.is_busy = False
        await until(lambda: len(directory.reports) > num_reports)


async def test_to_begin_again_closes_the_links_and_opens_them_anew():
    async with pool() as (_, port, scripted), connected(port) as side:
        await until(side.states)
        side.ask("a")
        await until(side.drafts)
        assert scripted.load().num_sessions == 1
        side.connection.begin_again()
        await until(lambda: len(side.states()) == 3)
        assert side.states() == [True, False, True]
        assert scripted.load().num_sessions == 0, "the drafter freed what it held"
        side.ask("b")
        await until(lambda: [draft.request_id for draft in side.drafts()] == ["a", "b"])


async def test_a_report_that_fails_is_logged_and_all_begins_again(caplog: pytest.LogCaptureFixture):
    async with pool() as (_, port, _), connected(port) as side:
        await until(side.states)
        side.fails = True
        await until(lambda: "the report is broken" in caplog.text)
        side.fails = False
        await until(lambda: len(side.states()) >= 3)
        assert side.states()[:3] == [True, False, True]


async def test_a_drafter_of_a_new_epoch_gets_a_new_link():
    async with pool() as (directory, port, _), connected(port) as side:
        await until(side.states)
        (old,) = directory.drafters
        directory.drafters = (DrafterEndpoint(drafter_id=old.drafter_id, endpoint=old.endpoint, epoch=2),)
        await until(lambda: side.states() == [True, False, True])


async def test_to_stop_at_once_ends_the_thread():
    side = Side(1)
    side.connection.start()
    begin_s = time.monotonic()
    await asyncio.to_thread(side.connection.stop)
    assert time.monotonic() - begin_s < 3.0
    assert not side.connection._thread.is_alive()


async def test_a_stop_before_there_is_a_loop_is_not_lost():
    side = Side(1)
    side.connection._stopping.set()  # between the thread's first look at it and its loop
    async with asyncio.timeout(TIMEOUT_S):
        await side.connection._keep()


async def test_to_stop_tells_of_the_drafters_that_were_up():
    async with pool() as (_, port, scripted):
        async with connected(port) as side:
            await until(side.states)
        assert side.states() == [True, False]
        side.ask("a")  # nobody is there any more, which is no failure
        assert scripted.load().num_sessions == 0
