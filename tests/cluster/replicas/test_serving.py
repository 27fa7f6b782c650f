"""`outrider serve` as a process: what it says, and what it leaves behind."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from ray.serve import Application
from ray.serve._private.common import DeploymentStatusTrigger
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
    ServeStatus,
)

from outrider.cluster.config.service_config import APP_NAME, ServiceConfig
from outrider.cluster.replicas.app import build
from outrider.cluster.replicas.serving import (
    NUM_START_ATTEMPTS,
    DeployError,
    check_ports,
    deploy,
    start_ray,
    stop_serve,
    tell_phases,
)
from outrider.verifier_service.model.ranks import free_ports

pytestmark = pytest.mark.service


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_server_leaves_no_process_behind(number: signal.Signals, tmp_path: Path):
    """`outrider serve` in a process group of its own: after Ctrl-C, or what an operating system sends, nothing is left.

    The signal comes twice: an impatient user does not cut the stopping short. Until it serves it says what it does.
    """
    port, grpc_port = free_ports(2)
    arguments = ["serve", "embedded", "--port", str(port), "--grpc-port", str(grpc_port)]
    command = [str(Path(sys.executable).with_name("outrider")), *arguments]
    environment = {**os.environ, "OUTRIDER_TEST_MARK": str(time.time_ns()), "PYTHONFAULTHANDLER": "1"}
    mark = f"OUTRIDER_TEST_MARK={environment['OUTRIDER_TEST_MARK']}".encode()
    with (tmp_path / "stderr").open("w") as errors:
        server = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, start_new_session=True
        )
    assert server.stdout is not None
    assert "serving" in server.stdout.readline()
    told = (tmp_path / "stderr").read_text()
    assert len(marked_processes(mark)) > 5, "Ray, replicas and ranks carry the mark of the process that started them"
    server.send_signal(number)
    assert "stopping" in server.stdout.readline()
    server.send_signal(number)
    try:
        assert server.wait(timeout=60) == 0
    except subprocess.TimeoutExpired:
        server.send_signal(signal.SIGABRT)  # its threads' stacks are in the test's output then
        raise
    deadline_s = time.monotonic() + 20
    while left := marked_processes(mark):
        assert time.monotonic() < deadline_s, f"still running: {left}"
        time.sleep(0.2)
    said = [line.partition(" s  ")[2] for line in told.splitlines()]
    replicas = "starting 1 gateway, 1 verifier, 1 drafter: loading, checking against the library, measuring steps"
    first = ["fetching outrider-embedded", "reading outrider-embedded, starting Ray", "starting Ray Serve"]
    assert said == [*first, replicas, "ready"], told


@pytest.mark.parametrize("to_group", [False, True], ids=["process", "group"])
def test_streams_run_out_before_the_service_stops(to_group: bool, tmp_path: Path):
    """Eight streams are under way when SIGTERM comes: all of them complete, and a new request is refused."""
    port, grpc_port = free_ports(2)
    arguments = ["serve", "embedded", "--port", str(port), "--grpc-port", str(grpc_port)]
    command = [str(Path(sys.executable).with_name("outrider")), *arguments]
    with (tmp_path / "stderr").open("w") as errors:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
    assert server.stdout is not None
    assert "drafts: draft_model by 1 drafter" in server.stdout.readline()
    url, begun = f"http://127.0.0.1:{port}/v1/completions", threading.Semaphore(0)

    def stream(index: int) -> tuple[str | None, int]:
        body = {
            "prompt": f"def f{index}(",
            "max_tokens": 900,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        reason, num_tokens = None, 0
        with httpx.stream("POST", url, json=body, timeout=120) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    choice = json.loads(line.removeprefix("data: "))["choices"][0]
                    if num_tokens == 0:
                        begun.release()
                    num_tokens += len(choice["token_ids"])
                    reason = choice["finish_reason"] or reason
        return reason, num_tokens

    with ThreadPoolExecutor(8) as threads:
        streams = [threads.submit(stream, index) for index in range(8)]
        for _ in streams:
            assert begun.acquire(timeout=60)
        (os.killpg if to_group else os.kill)(server.pid, signal.SIGTERM)
        begin_s = time.monotonic()
        assert "stopping" in server.stdout.readline()
        time.sleep(1.5)  # until the gateways have heard
        refused = httpx.post(url, json={"prompt": "a"}, timeout=10)
        ended = [stream.result(timeout=60) for stream in streams]
    assert ended == [("length", 900)] * 8
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert server.wait(timeout=60) == 0
    told = (tmp_path / "stderr").read_text()
    assert time.monotonic() - begin_s < 40.0
    assert "stopping: 8 streams left" in told
    assert "retries remaining" not in told


def marked_processes(mark: bytes) -> list[int]:
    """Return the processes whose environment carries a mark (children inherit it, whoever their parent is now)."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and mark in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue
    return found


def test_phases_are_told_with_the_time_since_the_start():
    times, said = iter([100.0, 100.5, 112.25]), []
    on_phase = tell_phases(said.append, clock=lambda: next(times))
    on_phase("starting Ray")
    on_phase("ready")
    assert said == ["  0.5 s  starting Ray", " 12.2 s  ready"]


def test_unsupported_model_is_refused_by_name_before_anything_starts(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "gptj", "vocab_size": 64, "n_layer": 1}')
    command = [str(Path(sys.executable).with_name("outrider")), "serve", str(tmp_path)]
    server = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert server.returncode == 2
    assert "gptj" in server.stderr
    assert "Traceback" not in server.stderr


class FakeRay:
    """A Ray that fails to start the first few times."""

    def __init__(self, num_failures: int, is_running: bool = False) -> None:
        self.num_failures, self.is_running = num_failures, is_running
        self.calls: list[str] = []

    def is_up(self) -> bool:
        return self.is_running

    def init(self, **options: int) -> None:
        assert options == {"num_cpus": 2}
        self.calls.append("init")
        if self.calls.count("init") <= self.num_failures:
            raise Exception("The current node timed out during startup")

    def stop(self) -> None:
        self.calls.append("stop")


def test_a_ray_that_times_out_is_started_again(caplog: pytest.LogCaptureFixture):
    ray = FakeRay(num_failures=2)
    with caplog.at_level(logging.WARNING):
        start_ray(is_up=ray.is_up, init=ray.init, stop=ray.stop, num_cpus=2)
    assert ray.calls == ["init", "stop", "init", "stop", "init"]
    assert [record.message for record in caplog.records] == [
        f"Ray did not start (attempt {attempt} of 3): The current node timed out during startup" for attempt in (1, 2)
    ]


def test_a_ray_that_never_starts_is_an_error():
    ray = FakeRay(num_failures=99)
    with pytest.raises(Exception, match="timed out during startup"):
        start_ray(is_up=ray.is_up, init=ray.init, stop=ray.stop, num_cpus=2)
    assert ray.calls == ["init", "stop"] * NUM_START_ATTEMPTS


def test_a_ray_that_runs_in_this_process_is_neither_used_nor_stopped():
    ray = FakeRay(num_failures=0, is_running=True)
    with pytest.raises(DeployError, match="already"):
        start_ray(is_up=ray.is_up, init=ray.init, stop=ray.stop, num_cpus=2)
    assert ray.calls == []


@pytest.mark.parametrize(
    ("is_shared", "is_up", "calls"),
    [(False, True, ["shutdown"]), (True, True, ["delete outrider"]), (False, False, []), (True, False, [])],
)
def test_the_service_is_taken_down_where_there_is_a_ray_to_ask(is_shared: bool, is_up: bool, calls: list[str]):
    done: list[str] = []
    stop_serve(
        is_shared=is_shared,
        is_up=lambda: is_up,
        delete=lambda name: done.append(f"delete {name}"),
        shutdown=lambda: done.append("shutdown"),
    )
    assert done == calls


def test_a_service_that_does_not_come_up_says_what_ails_which_deployment():
    def fail(application: Application, **options: object) -> None:
        raise RuntimeError("Deploying application outrider failed")

    def overview(status: DeploymentStatus, message: str) -> DeploymentStatusOverview:
        return DeploymentStatusOverview(status, DeploymentStatusTrigger.UNSPECIFIED, {}, message)

    deployments = {
        "Gateway": overview(DeploymentStatus.DEPLOY_FAILED, "No address added out of total 1 resolved"),
        "Router": overview(DeploymentStatus.HEALTHY, "up"),
    }
    application = ApplicationStatusOverview(ApplicationStatus.DEPLOY_FAILED, "", 0.0, deployments)
    with pytest.raises(DeployError, match=r"^Deploying application outrider failed\nGateway: No address added[^\n]*$"):
        deploy(
            build(ServiceConfig()),
            run=fail,
            status=lambda: ServeStatus(applications={APP_NAME: application}),
        )


@pytest.mark.parametrize("name", ["port", "grpc_port"])
def test_a_port_that_a_stranger_holds_is_refused_by_name(name: str):
    """Even one that would share it: our gateways would lose their calls to it."""
    ports = dict(zip(("port", "grpc_port"), free_ports(2), strict=True))
    check_ports(ServiceConfig(**ports))
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        stranger.bind(("127.0.0.1", ports[name]))
        stranger.listen()
        with pytest.raises(OSError, match=f"^{name}: cannot listen on 127.0.0.1:{ports[name]}: Address already in use"):
            check_ports(ServiceConfig(**ports))
