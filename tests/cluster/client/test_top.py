from __future__ import annotations

import asyncio
import io
import itertools
import json
import os
import termios
from collections.abc import Callable

import httpx
import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fakes.fleet_snapshots import DECIDED_AT_S, busy_fleet
from outrider.cluster.cli.main import main
from outrider.cluster.client import top
from outrider.cluster.client.openai_client import Server
from outrider.cluster.client.top_view import TopState
from outrider.cluster.monitoring.fleet_load import fleet_load
from outrider.cluster.monitoring.metrics import GatewayMetrics
from outrider.verifier_service.model.ranks import free_port
from services.served_app import served

LOAD = fleet_load(busy_fleet(), DECIDED_AT_S)


def exposition() -> str:
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry, model_name="m")
    for _ in range(10):
        metrics.tokens_published(1, since_arrival_s=0.015, since_previous_s=None)
    return generate_latest(registry).decode()


def answering(load: object, metrics: str = "") -> Callable[[httpx.Request], httpx.Response]:
    def answer(request: httpx.Request) -> httpx.Response:
        text = json.dumps(load) if request.url.path == "/load" else metrics
        return httpx.Response(200, text=text)

    return answer


async def observed(answer: Callable[[httpx.Request], httpx.Response], before: TopState) -> TopState:
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://test") as client:
        return await top.observe(client, before)


BEFORE = TopState(url="http://test")


async def test_an_answer_is_the_new_state():
    state = await observed(answering(LOAD, exposition()), BEFORE)
    assert (state.load, state.error) == (LOAD, None)
    (latency,) = state.latencies
    assert (latency.name, latency.count) == ("time to first token", 10)
    assert 0.01 < latency.p50_s < latency.p99_s <= 0.02


def refuse(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("connection refused", request=request)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (refuse, "ConnectError: connection refused"),
        (lambda request: httpx.Response(401), "/load: HTTP 401"),
        (lambda request: httpx.Response(200, text="<html>"), "JSONDecodeError"),
        (answering({"server_load": 3}), "not that of an Outrider service"),
        (answering([]), "not that of an Outrider service"),
        (answering(LOAD, "metric{ nonsense"), "ValueError"),
    ],
)
async def test_without_an_answer_the_last_one_stays(answer, said: str):
    before = await observed(answering(LOAD), BEFORE)
    state = await observed(answer, before)
    assert state.load == LOAD
    assert said in state.error
    assert (await observed(answering(LOAD), state)).error is None, "it comes back"


def test_quantiles_are_interpolated_within_their_bucket():
    buckets = {1.0: 10.0, 2.0: 30.0, float("inf"): 40.0}
    assert top.quantile(buckets, 0.25) == 1.0
    assert top.quantile(buckets, 0.5) == 1.5
    assert top.quantile(buckets, 0.99) == 2.0, "beyond the last bound nothing is known"


def app_of(*statuses: int) -> Starlette:
    """Answer /load with these statuses, then with 200 for ever."""
    coming = itertools.chain(statuses, itertools.repeat(200))

    async def load(request: Request) -> Response:
        return JSONResponse(LOAD, status_code=next(coming))

    async def metrics(request: Request) -> Response:
        return Response(exposition(), media_type="text/plain")

    return Starlette(routes=[Route("/load", load), Route("/metrics", metrics)])


def test_one_frame_is_printed_by_the_command():
    with served(app_of()) as url:
        result = CliRunner().invoke(main, ["top", "--once", "--url", url])
    assert result.exit_code == 0, result.output
    assert "v0" in result.output
    assert "tokens/verif." in result.output, "a pipe has room for whole headings"
    assert "time to first token" in result.output


def test_one_frame_of_a_server_that_is_away_is_a_failure():
    result = CliRunner().invoke(main, ["top", "--once", "--url", f"http://127.0.0.1:{free_port()}"])
    assert result.exit_code == 1
    assert "no answer: ConnectError" in result.output


def test_watching_outlives_a_server_that_goes_away():
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    seen: list[str] = []

    class Enough(Exception):
        """End the endless watch."""

    def clock() -> float:
        frame = console.file.getvalue()
        seen.append(frame)
        if frame.count("tokens/s") >= 6 and "HTTP 503" in frame:
            raise Enough
        return float(len(seen))

    with served(app_of(200, 503, 200)) as url, pytest.raises(Enough):
        top.run(Server(url=url), console, interval_s=0.01, once=False, clock=clock)
    final = seen[-1]
    assert final.index("120.0 tokens/s") < final.index("/load: HTTP 503") < final.rindex("120.0 tokens/s")


async def test_q_quits_and_other_keys_do_not():
    keyboard, terminal = os.openpty()
    before = termios.tcgetattr(terminal)
    with open(terminal) as typed:
        with top.quit_key(typed) as quitting:
            os.write(keyboard, b"x")
            await asyncio.sleep(0.05)
            assert not quitting.is_set()
            os.write(keyboard, b"q")
            async with asyncio.timeout(5):
                await quitting.wait()
        assert termios.tcgetattr(terminal) == before
    os.close(keyboard)


async def test_where_no_terminal_is_read_from_no_key_quits(tmp_path):
    (tmp_path / "file").write_text("q")
    with (tmp_path / "file").open() as typed, top.quit_key(typed) as quitting:
        await asyncio.sleep(0.05)
        assert not quitting.is_set()
