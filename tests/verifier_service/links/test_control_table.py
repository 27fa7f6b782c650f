"""Control calls that wait for an engine in another process."""

from __future__ import annotations

import asyncio

import pytest

from outrider.verifier_service.links.control_table import ControlTable
from outrider.verifier_service.messages.engine import Control, ControlResult, FlushCache

CALL = FlushCache(call_id="a")


async def test_a_call_is_answered_by_the_result_of_its_id() -> None:
    sent: list[Control] = []
    table = ControlTable(sent.append)
    first, second = (asyncio.ensure_future(table.call(FlushCache(call_id=name))) for name in ("a", "b"))
    await asyncio.sleep(0)
    assert [message.call_id for message in sent] == ["a", "b"]
    assert len(table) == 2
    table.deliver([ControlResult(call_id="b", weight_version="2"), ControlResult(call_id="nobody's")])
    assert (await second).weight_version == "2"
    assert not first.done()
    table.deliver([ControlResult(call_id="a", error="no"), ControlResult(call_id="a")])  # the second one is too late
    assert (await first).error == "no"
    assert len(table) == 0


async def test_calls_fail_with_the_engine() -> None:
    table = ControlTable(lambda message: None)
    call = asyncio.ensure_future(table.call(CALL))
    await asyncio.sleep(0)
    table.fail("the engine has ended")
    with pytest.raises(ConnectionError, match="the engine has ended"):
        await asyncio.wait_for(call, 5.0)
    assert len(table) == 0


async def test_a_message_that_cannot_be_sent_leaves_no_call() -> None:
    def send(message: Control) -> None:
        raise ConnectionError("the engine is down")

    table = ControlTable(send)
    with pytest.raises(ConnectionError, match="down"):
        await table.call(CALL)
    assert len(table) == 0


async def test_one_id_waits_once() -> None:
    table = ControlTable(lambda message: None)
    call = asyncio.ensure_future(table.call(CALL))
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="'a' is not answered yet"):
        await table.call(CALL)
    table.deliver([ControlResult(call_id="a")])
    assert (await call) == ControlResult(call_id="a")


async def test_a_caller_that_leaves_does_not_stop_later_results() -> None:
    table = ControlTable(lambda message: None)
    call = asyncio.ensure_future(table.call(CALL))
    await asyncio.sleep(0)
    call.cancel()
    table.deliver([ControlResult(call_id="a")])
    with pytest.raises(asyncio.CancelledError):
        await call
    assert len(table) == 0
