"""Many clients at once, slow ones, vanishing ones, too many: a live service whose engines check their books each step.

The long version, which leaves a table, is test_soak_load.py.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator

import grpc
import pytest

from outrider.drafter_service.embedded import held_out_prompts
from services.live_service import LiveService, SharedRay, wait_for
from services.load_tools import (
    MAX_NUM_SEQS,
    MAX_QUEUED,
    Ask,
    ClosedLoop,
    ask_many,
    asks_of,
    busy_verifier,
    expected_texts,
    grpc_client,
    loaded_service,
    post,
    require_flat,
    settled_processes,
    short_asks,
    stream_all,
)

pytestmark = [pytest.mark.service, pytest.mark.timeout(600)]  # a busy machine serves slowly

PROMPTS = held_out_prompts()[:3]
LOW_PRIORITY_LIMIT = MAX_QUEUED // 2
MAX_MODEL_LEN = 2048
LONG = 1800  # tokens: a generation that no test waits for
CONCURRENCY = 32
WAIT_S = 60.0


@pytest.fixture(scope="module")
def service(shared_ray: SharedRay) -> LiveService:
    return loaded_service(shared_ray)


@pytest.fixture(autouse=True)
def nothing_is_left(service: LiveService) -> Iterator[None]:
    """After every test nothing is held, and no engine has died of what `check_integrity` found."""
    before = engine_pids(service)
    yield
    service.wait_until_idle()
    assert engine_pids(service) == before


def engine_pids(service: LiveService) -> list[list[int]]:
    return [service.call(deployment, "rank_pids") for deployment in ("Verifier", "Drafter")]


def num_committed_tokens(service: LiveService) -> int:
    return service.call("Verifier", "load").counters.num_committed_tokens


def num_waiting(service: LiveService) -> int:
    return service.call("Verifier", "load").num_waiting


def test_64_streams_bring_what_they_bring_alone(service: LiveService):
    asks = asks_of(PROMPTS, 24)
    expected = expected_texts(service, asks)
    crowd = [asks[i % len(asks)] for i in range(64)]
    assert stream_all(service, crowd) == [expected[ask] for ask in crowd]


def test_short_requests_leave_nothing_behind(service: LiveService):
    expected = expected_texts(service, short_asks(PROMPTS))
    ask_many(service, expected, num_requests=200, concurrency=CONCURRENCY)
    service.wait_until_idle()
    before = settled_processes(service)
    result = ask_many(service, expected, num_requests=800, concurrency=CONCURRENCY)
    assert (len(result.latencies_s), result.num_wrong, result.errors) == (800, 0, ())
    service.wait_until_idle()
    require_flat(before, settled_processes(service))


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_slow_reader_holds_nobody_up(service: LiveService, protocol: str):
    """It reads one chunk, and no more before others are served and the verifier has let go of its request."""
    ask, others = Ask(PROMPTS[0], 400), asks_of(PROMPTS, 16)
    expected = expected_texts(service, [ask, *others])
    others_are_served = threading.Event()
    texts: list[str] = []

    def dawdle(num_chunks: int) -> None:
        assert others_are_served.wait(180)
        if num_chunks % 20 == 0:
            time.sleep(0.02)

    def read_over_http() -> None:
        texts.append(service.stream(on_chunk=dawdle, **ask.body).text)

    def read_over_grpc() -> None:
        with grpc_client(service) as client:
            chunks = []
            for chunk in client.stream(ask):
                chunks.append(chunk.text)
                dawdle(len(chunks))
            texts.append("".join(chunks))

    reader = threading.Thread(target=read_over_http if protocol == "http" else read_over_grpc, daemon=True)
    reader.start()
    assert stream_all(service, others) == [expected[other] for other in others]
    service.wait_until_idle()
    assert not texts, "the reader waits for the others"
    others_are_served.set()
    reader.join(180)
    assert texts == [expected[ask]]


def test_clients_that_vanish_free_what_they_held(service: LiveService):
    class Vanish(Exception):
        pass

    def vanish(num_chunks: int) -> None:
        if num_chunks == 2:
            raise Vanish

    def leave_http(seed: int) -> None:
        with pytest.raises(Vanish):
            service.stream(on_chunk=vanish, **Ask(PROMPTS[0], LONG, seed).body)

    before = num_committed_tokens(service)
    with grpc_client(service) as client:
        calls = [client.stream(Ask(PROMPTS[1], LONG, seed)) for seed in range(8)]
        leavers = [threading.Thread(target=leave_http, args=(seed,)) for seed in range(8)]
        for leaver in leavers:
            leaver.start()
        for call in calls:
            next(call)
            call.cancel()
        for leaver in leavers:
            leaver.join(60)
    service.wait_until_idle(timeout_s=15)
    assert num_committed_tokens(service) - before < 16 * LONG / 2, "they were generated to their end"


def test_a_deadline_ends_the_generation(service: LiveService):
    before = num_committed_tokens(service)
    with grpc_client(service) as client, pytest.raises(grpc.RpcError) as raised:
        for _ in client.stream(Ask(PROMPTS[0], LONG), timeout_s=0.5):
            pass
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    service.wait_until_idle(timeout_s=15)
    assert num_committed_tokens(service) - before < LONG


@pytest.mark.parametrize("num_beyond", [0, 1, 100_000])
def test_a_prompt_that_does_not_fit_is_refused_by_name(service: LiveService, num_beyond: int):
    ask = Ask((11,) * (MAX_MODEL_LEN + num_beyond), 1)
    answer = post(service, ask)
    assert (answer.status, answer.body["error"]["param"]) == (400, "prompt")
    with grpc_client(service) as client, pytest.raises(grpc.RpcError, match="token_ids") as raised:
        client.complete(ask)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_the_longest_prompt_is_served_and_its_output_bounded(service: LiveService):
    longest = (11,) * (MAX_MODEL_LEN - 1)
    answer = post(service, Ask(longest, 1))
    assert (answer.status, answer.body["usage"]["completion_tokens"]) == (200, 1)
    bounded = post(service, Ask(longest, 2))
    assert (bounded.status, bounded.body["usage"]["completion_tokens"]) == (200, 1)
    assert any("max_tokens" in warning for warning in bounded.body["warnings"])


def test_a_full_queue_refuses_and_loses_nothing(service: LiveService):
    expected = expected_texts(service, [Ask(PROMPTS[0], 2)])
    text = expected[Ask(PROMPTS[0], 2)]
    ask = Ask(PROMPTS[0], 2, priority=1)  # half of the queue is for those
    with grpc_client(service) as client:
        with busy_verifier(service, MAX_NUM_SEQS, LONG):
            futures = [client.unary(ask) for _ in range(LOW_PRIORITY_LIMIT + 64)]
            wait_for(lambda: sum(future.done() for future in futures) >= 64, WAIT_S)
            refused = [future for future in futures if future.done()]
            assert {future.code() for future in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
            assert all(int(dict(future.trailing_metadata())["retry-after"]) >= 1 for future in refused)
            answer = post(service, ask)
            assert (answer.status, answer.body["error"]["code"]) == (429, "overloaded")
            assert int(answer.headers["retry-after"]) >= 1
        accepted = [future for future in futures if future not in refused]
        assert len(accepted) > LOW_PRIORITY_LIMIT / 2
        assert {future.result().choices[0].text for future in accepted} == {text}


def test_an_urgent_request_overtakes_the_queue(service: LiveService):
    served: list[int] = []  # priorities, in the order in which they are served
    with grpc_client(service) as client:
        with busy_verifier(service, MAX_NUM_SEQS, LONG):
            futures = []
            for priority in [0] * 48 + [-2] * 8:
                futures.append(client.unary(Ask(PROMPTS[0], 2, priority=priority)))
                futures[-1].add_done_callback(lambda _, priority=priority: served.append(priority))
                if priority == 0 and len(futures) == 48:
                    wait_for(lambda: num_waiting(service) == 48, WAIT_S)
            wait_for(lambda: num_waiting(service) == 56, WAIT_S)
        for future in futures:
            future.result()
    wait_for(lambda: len(served) == 56, WAIT_S)
    places = [place for place, priority in enumerate(served) if priority == -2]
    assert statistics.median(places) < MAX_NUM_SEQS, served


def test_a_request_of_low_priority_is_served_in_the_end(service: LiveService):
    """The queue is never empty, and all that arrive have precedence over it: for a bounded time."""
    is_over = threading.Event()
    results = []
    expected = expected_texts(service, [Ask(PROMPTS[0], 8)])
    crowd = ClosedLoop(service, expected, 3 * MAX_NUM_SEQS)
    background = threading.Thread(target=lambda: results.append(crowd.run(is_over.is_set)), daemon=True)
    background.start()
    try:
        wait_for(lambda: num_waiting(service) >= MAX_NUM_SEQS, WAIT_S)
        with grpc_client(service) as client:
            text = client.complete(Ask(PROMPTS[0], 8, priority=1))
    finally:
        is_over.set()
        background.join(60)
    assert text == expected[Ask(PROMPTS[0], 8)]
    assert (results[0].num_wrong, results[0].errors) == (0, ())
