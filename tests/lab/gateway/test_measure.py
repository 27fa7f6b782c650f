"""The whole way with real processes: a client, a server that somebody else started, the floor beside it."""

from __future__ import annotations

import pytest

from outrider.lab.gateway.floor import HOST, Sends
from outrider.lab.gateway.helpers import Floor, Helper
from outrider.lab.gateway.loads import Door, Load
from outrider.lab.gateway.measure import MeasureError, Options, Server, measure
from outrider.lab.gateway.processes import SERVER

NUM_TOKENS = 4
ANSWER = [
    b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices": [{"text": "a", "finish_reason": null}]}\n\n',
    *[b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n'] * (NUM_TOKENS - 1),
    b"data: [DONE]\n\n",
]
LOAD = Load(door=Door.HTTP, is_streamed=True, num_clients=8, num_rounds=2, num_tokens=NUM_TOKENS)


def server_of(floor: Floor) -> Server:
    return Server(host=HOST, ports={Door.HTTP: floor.port}, model="m", first=floor.pid, counts_first=True)


def test_a_server_is_measured_beside_one_that_sends_the_same() -> None:
    options = Options(loads=(LOAD,), repeats=1, step_s=0.0, has_floor=True, rest_s=0.1)
    names: list[str] = []
    with Floor(Sends(door=Door.HTTP, pieces=ANSWER, step_s=0.0)) as floor:
        rest_s, (figures,) = measure(server_of(floor), options, names.append)
    assert names == ["warming up", "at rest", "http, 8 streams"]
    assert figures.errors == ()
    assert figures.events_per_token == 1.0
    assert figures.costs_s.keys() == {SERVER} == rest_s.keys()
    assert rest_s[SERVER] < 1.0
    assert 0.0 < figures.together_s < 0.1
    assert figures.floor_ratio is not None
    assert 0.01 < figures.floor_ratio < 100.0  # they are the same program; time is the machine's


def test_a_server_that_answers_nothing_ends_it() -> None:
    options = Options(loads=(LOAD,), repeats=1, step_s=0.0, has_floor=False, rest_s=0.1)
    refusal = Sends(door=Door.HTTP, pieces=[b"HTTP/1.1 404 None\r\n\r\nno such model"], step_s=0.0)
    words = "http, 8 streams: no request was answered: 404: no such model"
    with Floor(refusal) as floor, pytest.raises(MeasureError, match=words):
        measure(server_of(floor), options)


def test_a_process_that_ends_is_an_error() -> None:
    with Helper("no_such_module") as helper, pytest.raises(match="no_such_module has ended"):
        helper.hear()
