"""What the options of `outrider bench gateway` may be."""

from __future__ import annotations

import os

import pytest
from click.testing import CliRunner

from outrider.lab.cli.bench import bench
from outrider.lab.gateway.loads import Door
from outrider.lab.gateway.verb import running_server

URL, PID = "http://127.0.0.1:8123", os.getpid()


def test_a_server_that_runs_is_named_by_its_url_and_its_first_process() -> None:
    server = running_server(f"{URL}/v1", PID, "m")
    assert (server.host, server.ports, server.model) == ("127.0.0.1", {Door.HTTP: 8123}, "m")
    assert (server.first, server.counts_first) == (PID, True)
    assert running_server("http://somewhere", PID, "m").ports == {Door.HTTP: 80}


@pytest.mark.parametrize(  # process 1: a test's name has to be the same in all of pytest's workers
    ("url", "pid", "model", "name"),
    [
        ("https://127.0.0.1:8123", 1, "m", "url"),
        ("127.0.0.1:8123", 1, "m", "url"),
        (f"{URL}/metrics", 1, "m", "url"),
        (URL, None, "m", "pid"),
        (URL, 1 << 22, "m", "pid"),  # beyond the largest
        (URL, 1, None, "model"),
    ],
)
def test_what_is_missing_or_bad_is_named(url: str, pid: int | None, model: str | None, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        running_server(url, pid, model)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--pid", str(PID)), "pid: it is that of --url, which is not given"),
        (("--url", URL, "--door", "grpc"), "door: grpc is our own service's"),
        (("--url", URL, "--gateways", "2"), "gateways: they are our own service's"),
        (("--streams", "1,x"), "expected numbers with commas between them"),
        (("--streams", "0"), "streams must be numbers from 1"),
        (("--step-ms", "-1"), "--step-ms"),
        (("--door", "telnet"), "--door"),
    ],
)
def test_bad_options_end_it_with_a_line(arguments: tuple[str, ...], words: str) -> None:
    result = CliRunner().invoke(bench, ["gateway", *arguments])
    assert result.exit_code != 0
    assert words in result.output
    assert "Traceback" not in result.output
