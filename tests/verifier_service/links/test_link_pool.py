"""A verifier's links to real drafter servers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import torch

from fakes.in_process_port import InProcessPort
from fakes.runner import FakeRunner, confidence, continuation
from outrider.drafter_service.engine.drafter import DraftEngineConfig
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.service.service import DrafterLinkServicer
from outrider.proto.link_pb2_grpc import add_DrafterLinkServicer_to_server
from outrider.verifier_service.links.link_pool import LinkPool
from outrider.verifier_service.messages.draft import Commit, Draft, DraftSampling, Open, Resync
from outrider.verifier_service.messages.engine import PeerState, Relay
from outrider.verifier_service.messages.link import CHANNEL_OPTIONS, DrafterEndpoint, DrafterIdentity, Hello, frame_of
from outrider.verifier_service.messages.wire import decode, encode
from support.waiting import until
from tiny.drafters import model_drafter

HELLO = Hello(verifier_id="v", epoch=1, vocab_size=97)
OPEN = Open(request_id="r", sampling=DraftSampling(temperature=0.0), token_ids=(1, 2))
COMMIT = Commit(request_id="r", round_id=1, position=2, token_ids=(), max_length=3)


class Drafter:
    """A drafter service of this process, named and addressed."""

    def __init__(self, drafter_id: str, *, vocab_size: int = 97) -> None:
        self.drafter_id = drafter_id
        self.vocab_size = vocab_size
        drafter = model_drafter(FakeRunner(vocab_size=vocab_size), torch.Generator().manual_seed(0))
        self.engine = DraftEngine(drafter, clock=lambda: 0.0, config=DraftEngineConfig())
        self.port = InProcessPort(self.engine, idle_s=0.05)

    async def start(self) -> None:
        identity = DrafterIdentity(
            drafter_id=self.drafter_id,
            vocab_size=self.vocab_size,
            vocab_fingerprint="",
            max_draft_length=8,
            max_model_len=64,
        )
        self.server = grpc.aio.server(options=CHANNEL_OPTIONS)
        add_DrafterLinkServicer_to_server(DrafterLinkServicer(self.port, identity), self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        await self.server.start()

    def endpoint(self, epoch: int = 1, drafter_id: str | None = None) -> DrafterEndpoint:
        return DrafterEndpoint(drafter_id=drafter_id or self.drafter_id, endpoint=self.address, epoch=epoch)

    async def stop(self) -> None:
        await self.server.stop(grace=None)
        self.port.stop()


class Scene:
    """A pool, and what it told the engine."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.pool = LinkPool(HELLO, self.told.append)

    def ask(self, drafter_id: str, *messages: Any) -> None:
        self.pool.send([Relay(peer=drafter_id, payload=encode(message)) for message in messages])

    def answers(self) -> list[tuple[str, Any]]:
        relays = [message for message in self.told if isinstance(message, Relay)]
        return [(relay.peer, decode(relay.payload, (Draft, Resync))) for relay in relays]

    def states(self) -> list[PeerState]:
        return [message for message in self.told if isinstance(message, PeerState)]


@contextlib.asynccontextmanager
async def serving(*drafters: Drafter) -> AsyncIterator[Scene]:
    scene = Scene()
    for drafter in drafters:
        await drafter.start()
    try:
        yield scene
    finally:
        await scene.pool.close()
        for drafter in drafters:
            await drafter.stop()


def up(drafter_id: str, vocab_size: int = 97) -> PeerState:
    return PeerState(peer=drafter_id, is_up=True, vocab_size=vocab_size)


def down(drafter_id: str) -> PeerState:
    return PeerState(peer=drafter_id, is_up=False)


def draft_of(num_tokens: int, vocab_size: int = 97) -> Draft:
    return Draft(
        request_id="r",
        round_id=1,
        position=2,
        token_ids=continuation([1, 2], num_tokens, vocab_size),
        confidences=(confidence(vocab_size),) * num_tokens,
    )


async def test_messages_go_to_their_own_peer_and_answers_come_back_named():
    first, second = Drafter("d"), Drafter("e", vocab_size=101)
    async with serving(first, second) as scene:
        await scene.pool.hold([first.endpoint(), second.endpoint()])
        await until(lambda: len(scene.told) == 2)
        scene.ask("d", OPEN, COMMIT)
        await until(lambda: len(scene.answers()) == 1)
        assert scene.answers() == [("d", draft_of(3))]
        scene.ask("e", COMMIT)
        await until(lambda: len(scene.answers()) == 2)
        assert scene.answers()[-1] == ("e", Resync(request_id="r")), "it was never told of the request"
        scene.ask("e", OPEN, COMMIT)
        await until(lambda: len(scene.answers()) == 3)
        assert scene.answers()[-1] == ("e", draft_of(3, 101))


async def test_messages_for_an_unknown_peer_are_lost_silently():
    drafter = Drafter("d")
    async with serving(drafter) as scene:
        scene.ask("d", OPEN)  # no link at all
        await scene.pool.hold([drafter.endpoint()])
        scene.ask("d", OPEN)  # not up yet
        await until(lambda: scene.told)
        scene.ask("nobody", OPEN, COMMIT)
        scene.ask("d", COMMIT)
        await until(lambda: scene.answers())
        assert scene.answers() == [("d", Resync(request_id="r"))], "what was sent before is lost, not delayed"
        assert scene.states() == [up("d")]


async def test_a_live_link_outlasts_a_router_that_does_not_name_its_drafter():
    first, second = Drafter("d"), Drafter("e")
    async with serving(first, second) as scene:
        await scene.pool.hold([first.endpoint(), second.endpoint()])
        await until(lambda: len(scene.told) == 2)
        scene.ask("d", OPEN)
        await scene.pool.hold([])
        assert sorted(scene.pool.linked_drafters) == ["d", "e"]
        scene.ask("d", COMMIT)
        await until(lambda: scene.answers())
        assert scene.answers() == [("d", draft_of(3))], "and so does its session"


async def test_a_drafter_that_is_down_and_no_longer_named_is_let_go():
    first, second = Drafter("d"), Drafter("e")
    async with serving(first, second) as scene:
        await scene.pool.hold([first.endpoint(), second.endpoint()])
        await until(lambda: len(scene.told) == 2)
        await first.server.stop(grace=None)
        await until(lambda: down("d") in scene.told)
        await scene.pool.hold([second.endpoint()])
        assert [endpoint.drafter_id for endpoint in scene.pool._links] == ["e"], "nobody tries to reach it any more"


async def test_two_directives_at_a_time_are_followed_one_after_the_other():
    nowhere = [DrafterEndpoint(drafter_id=name, endpoint="127.0.0.1:1", epoch=1) for name in "def"]
    async with serving() as scene:
        await scene.pool.hold(nowhere)
        await asyncio.gather(scene.pool.hold([]), scene.pool.hold([]))
        assert scene.pool._links == {}


async def test_a_link_that_dies_is_seen():
    def refuse(message: Any) -> None:
        raise OSError("no room")

    drafter = Drafter("d")
    await drafter.start()
    pool = LinkPool(HELLO, refuse)
    try:
        await pool.hold([drafter.endpoint()])
        pool.check()
        (link,) = pool._links.values()
        await until(lambda: link._task is not None and link._task.done())
        with pytest.raises(RuntimeError, match="the link to drafter d has ended") as raised:
            pool.check()
        assert isinstance(raised.value.__cause__, OSError)
    finally:
        with contextlib.suppress(OSError):  # it is told that the drafter is down
            await pool.close()
        await drafter.stop()


async def test_holding_the_same_drafters_again_changes_nothing():
    drafter = Drafter("d")
    async with serving(drafter) as scene:
        await scene.pool.hold([drafter.endpoint()])
        await until(lambda: scene.told)
        scene.ask("d", OPEN)
        for _ in range(3):
            await scene.pool.hold([drafter.endpoint()])
        scene.ask("d", COMMIT)
        await until(lambda: scene.answers())
        assert scene.told[0] == up("d")
        assert scene.answers() == [("d", draft_of(3))], "the session outlives the directive"
        assert len(scene.told) == 2


async def test_a_new_incarnation_gets_a_new_link():
    drafter = Drafter("d")
    async with serving(drafter) as scene:
        await scene.pool.hold([drafter.endpoint(epoch=1)])
        await until(lambda: scene.told)
        await scene.pool.hold([drafter.endpoint(epoch=2)])
        await until(lambda: len(scene.told) == 3)
        assert scene.told == [up("d"), down("d"), up("d")]
        assert scene.pool.linked_drafters == ("d",)


async def test_a_drafter_that_never_came_up_leaves_without_a_word():
    drafter = Drafter("d")
    async with serving(drafter) as scene:
        await scene.pool.hold([drafter.endpoint(drafter_id="somebody else")])
        (link,) = scene.pool._links.values()
        await until(lambda: link.counters.num_failures)
        assert scene.pool.linked_drafters == ()
        await scene.pool.hold([])
        assert scene.told == []


class Babbler(DrafterLinkServicer):
    """A drafter that greets well and then sends frames which mean nothing."""

    def __init__(self, identity: DrafterIdentity) -> None:
        self._greeting = encode(identity.welcome())

    async def Stream(self, request_iterator: Any, context: Any) -> None:
        await context.read()
        for payload in (self._greeting, b"garbage", b"more garbage"):
            await context.write(frame_of("v", 1, payload))
        await context.read()


async def test_bad_frames_are_counted_beyond_the_link_that_brought_them():
    identity = DrafterIdentity(
        drafter_id="d", vocab_size=97, vocab_fingerprint="", max_draft_length=8, max_model_len=64
    )
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    add_DrafterLinkServicer_to_server(Babbler(identity), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    scene = Scene()
    await scene.pool.hold([DrafterEndpoint(drafter_id="d", endpoint=address, epoch=1)])
    await until(lambda: scene.pool.num_bad_frames == 2)
    await scene.pool.close()
    assert scene.pool.num_bad_frames == 2
    await server.stop(grace=None)
