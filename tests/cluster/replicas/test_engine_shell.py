import asyncio
from multiprocessing import Pipe

import pytest
import uvloop

from outrider.cluster.replicas.engine_shell import EngineShell
from outrider.verifier_service.messages.engine import FROM_ENGINE, TO_ENGINE, Cancel, EngineUpdate, Published
from outrider.verifier_service.messages.request import RequestOutput
from outrider.verifier_service.messages.wire import decode, encode


class Engine:
    """The far end of the pipe, and what the shell told its owner."""

    def __init__(self) -> None:
        near, self.pipe = Pipe()
        self.messages: list[object] = []
        self.failures: list[str] = []
        self.shell = EngineShell(near, FROM_ENGINE, on_message=self.messages.append, on_failure=self.failures.append)
        self.shell.start()


async def settle() -> None:
    await asyncio.sleep(0.02)


async def test_messages_pass_both_ways_in_order():
    engine = Engine()
    updates = [
        EngineUpdate(outputs=(Published.of(RequestOutput(request_id=str(i), token_ids=(i,))),)) for i in range(3)
    ]
    for update in updates:
        engine.pipe.send_bytes(encode(update))
    await settle()
    assert engine.messages == updates
    engine.shell.send(Cancel(request_id="a"))
    assert decode(engine.pipe.recv_bytes(), TO_ENGINE) == Cancel(request_id="a")
    engine.shell.send(b"\xc1 is no message")
    assert engine.pipe.recv_bytes() == b"\xc1 is no message", "what is encoded already passes unopened"
    engine.shell.close()


def test_more_than_the_pipe_holds_waits_for_an_engine_that_is_busy_on_serves_own_event_loop():
    cancels = [Cancel(request_id=f"{index}" * 1000) for index in range(1000)]

    async def send_all() -> None:
        engine = Engine()
        for cancel in cancels:
            engine.shell.send(cancel)
        await settle()
        assert [decode(engine.pipe.recv_bytes(), TO_ENGINE) for _ in cancels] == cancels
        big = EngineUpdate(outputs=(Published.of(RequestOutput(request_id="a", token_ids=(1,) * 1_000_000)),))
        await asyncio.to_thread(engine.pipe.send_bytes, encode(big))
        await settle()
        assert (engine.messages, engine.failures) == ([big], [])
        engine.shell.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(send_all())


async def test_end_of_the_engine_is_told_once_and_sending_fails_from_then_on():
    engine = Engine()
    engine.pipe.close()
    await settle()
    assert len(engine.failures) == 1
    assert engine.shell.failure == engine.failures[0]
    with pytest.raises(ConnectionError, match="engine"):
        engine.shell.send(Cancel(request_id="a"))
    engine.shell.close()
    assert len(engine.failures) == 1


async def test_closing_ends_the_engines_pipe():
    engine = Engine()
    engine.shell.close()
    with pytest.raises(EOFError):
        engine.pipe.recv_bytes()
