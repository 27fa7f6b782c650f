"""What our loop around vLLM, which is played, owes beyond what every engine does: silence of a stuck one, its failures.

The rest is the contract of engines: tests/verifier_service/engine/test_engine_contract.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from fakes.hosted.vllm_outputs import scheduler_stats
from outrider.cluster.vllm_engine.loop import LOAD_INTERVAL_S
from outrider.verifier_service.messages.request import FinishReason, GenerationRequest, SamplingParams
from support.engines import VllmSide
from tiny.looping import Shell


@pytest.fixture
def side() -> Iterator[VllmSide]:
    side = VllmSide()
    yield side
    side.shell.end()


def request(request_id: str, max_tokens: int = 16) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=max_tokens)
    return GenerationRequest(request_id=request_id, prompt_token_ids=(1,), sampling=sampling)


def heard_later(shell: Shell) -> int:
    """Return how many loads have come once some should have."""
    deadline_s = time.monotonic() + 3 * LOAD_INTERVAL_S
    while (left_s := deadline_s - time.monotonic()) > 0:
        if shell.pipe.poll(left_s):
            shell.take(shell.pipe.recv_bytes())
    return len(shell.loads)


def test_an_engine_that_takes_no_step_falls_silent_so_that_it_is_given_up(side: VllmSide):
    side.shell.say(request("a", max_tokens=10_000))
    side.shell.hear_until(lambda: side.shell.loads and side.shell.loads[-1].requests)
    side.vllm.may_go = False
    num_loads = heard_later(side.shell)
    assert heard_later(side.shell) == num_loads
    side.vllm.load.record(scheduler_stats(1), None)
    side.shell.hear_until(lambda: len(side.shell.loads) == num_loads + 1)
    side.vllm.may_go = True
    side.shell.hear_until(lambda: len(side.shell.loads) > num_loads + 2)


@pytest.mark.parametrize(
    ("error", "said"),
    [(ValueError("min_p: no"), "min_p: no"), (RuntimeError("odd"), "vLLM failed: RuntimeError: odd")],
)
def test_a_request_that_fails_ends_with_why_and_the_next_is_served(side: VllmSide, error: Exception, said: str):
    side.vllm.error = error
    side.shell.say(request("a"))
    side.shell.hear_until(lambda: side.shell.ends == {"a": FinishReason.ERROR})
    assert side.shell.outputs[-1].error == said
    side.vllm.error = None
    side.shell.say(request("b"))
    side.shell.hear_until(lambda: side.shell.ends.get("b") is FinishReason.LENGTH)
