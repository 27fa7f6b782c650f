"""The port between the link's servicer and a draft engine that the test plays at the end of a real pipe."""

from __future__ import annotations

import asyncio
from multiprocessing import Pipe

import pytest

from outrider.cluster.replicas.drafter_replica import ShellPort
from outrider.cluster.replicas.engine_host import EngineHost
from outrider.cluster.replicas.engine_shell import EngineShell
from outrider.drafter_service.engine.messages import FROM_DRAFT_ENGINE, TO_DRAFT_ENGINE, DrafterUpdate
from outrider.drafter_service.service.service import EngineDeadError
from outrider.verifier_service.messages.drafter_load import DrafterLoad
from outrider.verifier_service.messages.engine import Control, ControlResult, PeerState, Relay, UpdateDraftWeights
from outrider.verifier_service.messages.wire import decode, encode


class Scene:
    """A port whose engine is the far end of `pipe`."""

    def __init__(self) -> None:
        near, self.pipe = Pipe()
        self.shell = EngineShell(
            near,
            FROM_DRAFT_ENGINE,
            on_message=lambda update: self.port.on_update(update),
            on_failure=lambda reason: self.port.fail(reason),
        )
        self.now_s = 0.0
        self.port = ShellPort(
            self.shell, lambda: self.now_s
        )  # of a host, the port uses what a shell has too: `send` and `failure`
        self.shell.start()

    def hear(self) -> Relay | PeerState | Control:
        assert self.pipe.poll(10)
        return decode(self.pipe.recv_bytes(), TO_DRAFT_ENGINE)

    async def say(self, update: DrafterUpdate) -> None:
        self.pipe.send_bytes(encode(update))
        await asyncio.sleep(0.02)


async def test_payloads_go_to_the_engine_unopened():
    scene = Scene()
    scene.port.submit("v/1/1", b"\xc1 not even msgpack")
    scene.port.peer_gone("v/1/1")
    assert scene.hear() == Relay(peer="v/1/1", payload=b"\xc1 not even msgpack")
    assert scene.hear() == PeerState(peer="v/1/1", is_up=False)
    scene.shell.close()


async def test_answers_reach_the_peers_that_subscribed_and_nobody_else():
    scene = Scene()
    heard: dict[str, list[bytes]] = {"a": [], "b": []}
    for peer, payloads in heard.items():
        scene.port.subscribe(peer, payloads.append)
    said = (("a", b"1"), ("b", b"2"), ("c", b"3"), ("a", b"4"))
    relays = [Relay(peer=peer, payload=payload) for peer, payload in said]
    await scene.say(DrafterUpdate(relays=tuple(relays)))
    assert heard == {"a": [b"1", b"4"], "b": [b"2"]}
    scene.port.unsubscribe("a")
    scene.port.unsubscribe("a")  # its stream may end twice over
    await scene.say(DrafterUpdate(relays=tuple(relays)))
    assert heard == {"a": [b"1", b"4"], "b": [b"2", b"2"]}
    scene.shell.close()


async def test_the_load_is_the_last_one_reported():
    scene = Scene()
    assert scene.port.load() == DrafterLoad()
    load = DrafterLoad(num_sessions=3, queue_depth=2, mean_draft_s=0.5)
    await scene.say(DrafterUpdate(load=load))
    await scene.say(DrafterUpdate(relays=(Relay(peer="a", payload=b""),)))
    assert scene.port.load() == load
    scene.shell.close()


async def test_a_drafter_is_quiet_once_nobody_asks_it_any_more():
    scene = Scene()
    assert scene.port.is_quiet, "no session"
    await scene.say(DrafterUpdate(load=DrafterLoad(num_sessions=1)))
    scene.port.submit("a", b"")
    assert not scene.port.is_quiet
    scene.now_s += 0.6
    scene.port.submit("a", b"")
    scene.now_s += 0.6
    assert not scene.port.is_quiet
    scene.now_s += 0.6
    assert scene.port.is_quiet, "a session whose request goes on without drafts keeps nothing waiting"
    scene.shell.close()


async def test_a_trainers_call_waits_for_the_engines_answer():
    scene = Scene()
    update = UpdateDraftWeights(call_id="u", folder="f")
    call = asyncio.ensure_future(scene.port.control(update))
    await asyncio.sleep(0)
    assert scene.hear() == update
    await scene.say(DrafterUpdate(load=DrafterLoad(weight_version="")))
    assert not call.done()
    result = ControlResult(call_id="u", weight_version="v1")
    await scene.say(DrafterUpdate(load=DrafterLoad(weight_version="v1"), results=(result,)))
    assert (await call, scene.port.load().weight_version) == (result, "v1")
    scene.shell.close()


async def test_a_trainers_call_fails_with_the_engine():
    scene = Scene()
    call = asyncio.ensure_future(scene.port.control(UpdateDraftWeights(call_id="u", folder="f")))
    await asyncio.sleep(0)
    scene.pipe.close()
    with pytest.raises(ConnectionError, match="engine process is gone"):
        await call
    with pytest.raises(ConnectionError):
        await scene.port.control(UpdateDraftWeights(call_id="u", folder="f"))


async def test_a_dead_engine_is_told_to_whoever_asks():
    scene = Scene()
    scene.pipe.close()
    await asyncio.sleep(0.02)
    for use in (
        scene.port.load,
        lambda: scene.port.submit("a", b""),
        lambda: scene.port.peer_gone("a"),
    ):
        with pytest.raises(EngineDeadError):
            use()


async def test_a_port_whose_engine_has_not_started_is_dead():
    port = ShellPort(EngineHost(on_message=lambda message: None, on_failure=lambda reason: None, timeout_s=10.0))
    with pytest.raises(EngineDeadError, match="not started"):
        port.load()
    with pytest.raises(EngineDeadError, match="not started"):
        port.submit("a", b"")
