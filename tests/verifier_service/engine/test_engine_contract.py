"""What every engine owes its shell: our own at every pace, the one that plays, and vLLM behind our loop.

What only our own does (drafts, pauses, weights) is shown by test_loop.py and test_control.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fakes.engine_bench import make_request
from outrider.verifier_service.messages.engine import Cancel, FlushCache, PauseGeneration, SetPlans, UpdateWeights
from outrider.verifier_service.messages.request import FinishReason, GenerationRequest
from outrider.verifier_service.messages.wire import encode
from support.engines import ENGINES, EngineSide, OwnSide, PlayedSide, engine_side
from tiny.loop_thread import PATIENCE_S

FIRST, SECOND = (5, 9, 2), (7, 8)
LONG = 400  # tokens: nobody ends meanwhile


@pytest.fixture(params=ENGINES)
def side(request: pytest.FixtureRequest) -> Iterator[EngineSide]:
    with engine_side(request.param) as side:
        yield side


def asked(request_id: str, prompt: tuple[int, ...] = FIRST, max_tokens: int = 8, **sampling: Any) -> GenerationRequest:
    return make_request(request_id, prompt=prompt, max_tokens=max_tokens, **sampling)


def test_requests_are_served_beside_each_other_each_in_order(side: EngineSide):
    side.shell.say(asked("a"), asked("b", SECOND, max_tokens=5))
    side.shell.hear_until(lambda: side.shell.finished() == {"a", "b"})
    assert side.shell.tokens("a") == side.expected(FIRST, 8)
    assert side.shell.tokens("b") == side.expected(SECOND, 5)
    assert side.shell.ends == dict.fromkeys("ab", FinishReason.LENGTH)
    assert len([output for output in side.shell.outputs if output.request_id == "a"]) > 1, "they are streamed"


def test_a_request_that_does_not_decode_is_answered_by_the_field_and_the_next_is_served(side: EngineSide):
    bad = encode(asked("bad", max_tokens=77)).replace(b"max_tokens\x4d", b"max_tokens\x00")
    side.shell.say(asked("before"), bad, asked("after"))
    side.shell.hear_until(lambda: side.shell.finished() == {"before", "bad", "after"})
    (refused,) = [output for output in side.shell.outputs if output.request_id == "bad"]
    assert (refused.finish_reason, refused.token_ids) == (FinishReason.ERROR, ())
    assert "max_tokens" in str(refused.error)
    assert side.shell.tokens("after") == side.expected(FIRST, 8)


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_cancelled_request_is_heard_of_no_more_and_others_go_on(side: EngineSide, has_begun: bool):
    side.shell.say(asked("a", max_tokens=LONG), asked("b", SECOND, max_tokens=30))
    if has_begun:
        side.shell.hear_until(lambda: side.shell.tokens("a"))
    side.shell.say(Cancel(request_id="a"), Cancel(request_id="nobody"), SetPlans(plans={}))
    side.shell.hear_until(lambda: "b" in side.shell.finished())
    assert side.shell.tokens("b") == side.expected(SECOND, 30)
    side.shell.hear_until(lambda: not side.running())
    side.shell.say(asked("a", SECOND), asked("c"))  # its id is free again
    side.shell.hear_until(lambda: side.shell.finished() >= {"a", "c"})
    before = len(side.shell.tokens("a")) - 8
    assert side.shell.tokens("a") == side.expected(FIRST, before) + side.expected(SECOND, 8)
    assert before < LONG, "it was cancelled, and did not run to its end"


def test_a_load_comes_from_an_idle_engine_and_says_who_is_there(side: EngineSide):
    side.shell.hear_until(lambda: len(side.shell.loads) >= 2)
    assert all(load.requests == () and load.num_running == load.num_waiting == 0 for load in side.shell.loads)
    side.shell.say(asked("a", max_tokens=LONG, num_speculative_tokens=2))
    side.shell.hear_until(lambda: "a" in side.shell.finished() or side.shell.loads[-1].requests)
    for load in side.shell.loads:
        assert [(one.request_id, one.num_speculative_tokens) for one in load.requests] in ([], [("a", 2)])


def test_the_loop_ends_with_its_shell_while_requests_run(side: EngineSide):
    side.shell.say(asked("a", max_tokens=LONG), asked("b", max_tokens=LONG))
    side.shell.hear_until(lambda: side.shell.tokens("a"))
    side.shell.end()
    assert isinstance(side, OwnSide | PlayedSide) or not side.running(), "what another process would compute on"


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_that_fails_ends_the_loop_and_says_nothing_of_its_requests(name: str):
    """The shell sees the end of file, and the gateway goes on elsewhere: an error here would end the stream."""
    side = ENGINES[name]()
    side.shell.hear_until(lambda: side.shell.loads)
    side.fail()
    side.shell.say(asked("a"))
    with pytest.raises((EOFError, ConnectionError)):
        side.shell.hear_until(lambda: False)
    side.shell.thread.join(PATIENCE_S)
    assert not side.shell.finished()
    assert side.shell.error is None or isinstance(side.shell.error, ArithmeticError)


@pytest.mark.parametrize("name", ["vllm"])
def test_an_engine_that_takes_no_orders_says_so_and_runs_on(name: str):
    with engine_side(name) as side:
        side.shell.say(asked("a"), PauseGeneration(call_id="p"), FlushCache(call_id="f"))
        side.shell.say(UpdateWeights(call_id="w", folder="/w"))
        side.shell.hear_until(lambda: len(side.shell.results) == 3 and "a" in side.shell.finished())
        assert {result.call_id for result in side.shell.results} == {"p", "f", "w"}
        assert all("vLLM's own endpoints" in str(result.error) for result in side.shell.results)
        assert side.shell.tokens("a") == side.expected(FIRST, 8)
