"""`outrider serve` as a process: what it says, and what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
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

from outrider.cluster.config.drafters_config import DraftersConfig
from outrider.cluster.config.service_config import APP_NAME, ServiceConfig
from outrider.cluster.replicas.app import build
from outrider.cluster.replicas.serving import (
    NUM_START_ATTEMPTS,
    QUIET_RAY,
    DeployError,
    check_models,
    check_ports,
    deploy,
    notes_of,
    own_ray_options,
    start_ray,
    stop_serve,
    tell_phases,
)
from outrider.verifier_service.model.architectures import UnsupportedModelError
from outrider.verifier_service.model.ranks import free_ports

pytestmark = pytest.mark.service
NUM_STREAMED = 900  # tokens of a stream that a service is stopped under


class Server:
    """`outrider serve` of the embedded pair, in a process group of its own."""

    def __init__(self, errors: Path) -> None:
        self.errors = errors
        self.port, grpc_port = free_ports(2)
        arguments = ["serve", "embedded", "--port", str(self.port), "--grpc-port", str(grpc_port)]
        command = [str(Path(sys.executable).with_name("outrider")), *arguments]
        environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
        with errors.open("w") as file:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=file, text=True, env=environment, start_new_session=True
            )
        self.serving = self.line()
        self.children = psutil.Process(self.process.pid).children(recursive=True)
        names = {child.name() for child in self.children}
        assert {"raylet", "ray::RuntimeEnvAgent"} < names, "Ray's processes, and those that they started"
        assert not any("Proxy" in name for name in names), "the gateway listens itself"
        commands = " ".join(" ".join(child.cmdline()) for child in self.children)
        assert not any(name in commands for name in ("log_monitor", "monitor.py", "dashboard.py")), "nobody looks on"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    @property
    def told(self) -> str:
        return self.errors.read_text()

    def memory(self) -> tuple[set[str], float]:
        """Return the names of processes with torch, and the proportional share of all, in MB."""
        processes = [psutil.Process(self.process.pid), *self.children]
        with_torch = {one.name() for one in processes if any("libtorch" in file.path for file in one.memory_maps())}
        return with_torch, sum(one.memory_full_info().pss for one in processes) / 1e6

    def wait(self) -> None:
        """Wait until it has ended well and nothing is left of it."""
        try:
            assert self.process.wait(timeout=60) == 0
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # its threads' stacks are in the test's output then
            raise
        _, left = psutil.wait_procs(self.children, timeout=20)
        assert not left, "still running"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "stderr")
    yield server
    for process in (server.process, *server.children):  # of a test that failed
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            process.kill()


def test_streams_run_out_before_the_service_stops(server: Server):
    """Eight streams are under way when SIGTERM comes to the whole group: all complete, and a new one is refused.

    Until it serves it says what it does. A signal that comes when the streams have ended does not cut the stopping
    short: no process is left behind.
    """
    assert "drafts: draft_model by 1 drafter" in server.serving
    said = [line.partition(" s  ")[2] for line in server.told.splitlines() if " s  " in line]
    first = ["fetching outrider-embedded", "reading outrider-embedded, starting Ray", "starting Ray Serve"]
    assert said[:4] == [*first, "starting 1 gateway, 1 verifier, 1 drafter"], server.told
    assert said[-1] == "ready"
    assert {"verifier: warming up, measuring steps", "verifier: ready", "drafter: ready"} < {*said[4:]}
    with_torch, memory_mb = server.memory()
    assert with_torch == {"ray::Rank.run"}, "what computes, and nothing else"
    assert memory_mb < 2100.0, "1,600 where the model was checked by an earlier start, 150 more where it is checked now"
    url, begun = f"http://127.0.0.1:{server.port}/v1/completions", threading.Semaphore(0)
    with ThreadPoolExecutor(8) as threads:
        streams = [threads.submit(stream, url, f"def f{index}(", begun.release) for index in range(8)]
        for _ in streams:
            assert begun.acquire(timeout=60)
        os.killpg(server.process.pid, signal.SIGTERM)
        assert "stopping" in server.line()
        time.sleep(1.5)  # until the gateways have heard
        refused = httpx.post(url, json={"prompt": "a"}, timeout=10)
        ended = [stream.result(timeout=60) for stream in streams]
    server.process.send_signal(signal.SIGINT)
    assert ended == [("length", NUM_STREAMED)] * 8
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    server.wait()
    assert "stopping: 8 streams left" in server.told
    assert not server.line(), "the last line is ours"


@pytest.mark.soak  # the second signal while streams run: test_stopping.py; after them: above
def test_a_server_that_is_interrupted_twice_leaves_no_process_behind(server: Server):
    """An impatient user does not cut the stopping short."""
    assert "serving" in server.serving
    server.process.send_signal(signal.SIGINT)
    assert "stopping" in server.line()
    server.process.send_signal(signal.SIGINT)
    server.wait()
    assert not server.line(), "the last line is ours"


def stream(url: str, prompt: str, on_begin: Callable[[], None]) -> tuple[str | None, int]:
    """Stream a completion; return its finish reason and how many tokens came."""
    body = {"prompt": prompt, "max_tokens": NUM_STREAMED, "ignore_eos": True, "stream": True, "return_token_ids": True}
    reason, num_tokens = None, 0
    with httpx.stream("POST", url, json=body, timeout=120) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                if num_tokens == 0:
                    on_begin()
                num_tokens += len(choice["token_ids"])
                reason = choice["finish_reason"] or reason
    return reason, num_tokens


def test_phases_are_told_with_the_time_since_the_start():
    times, said = iter([100.0, 100.5, 112.25]), []
    on_phase = tell_phases(said.append, clock=lambda: next(times))
    on_phase("starting Ray")
    on_phase("ready")
    assert said == ["  0.5 s  starting Ray", " 12.2 s  ready"]


@pytest.mark.soak  # what refuses it: below; how a verb tells bad values: tests/cluster/cli/test_serve.py
def test_an_operator_is_told_who_shares_a_cache_and_that_nothing_drafts():
    (shared,) = notes_of(ServiceConfig())
    assert "all clients share one prefix cache" in shared
    assert list(notes_of(ServiceConfig(api_key_hashes=["0" * 64]))) == []
    (idle,) = notes_of(ServiceConfig(api_key_hashes=["0" * 64], num_drafters=0))
    assert idle.startswith("nothing drafts")


def test_unsupported_model_is_refused_by_name_before_anything_starts(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "gptj", "vocab_size": 64, "n_layer": 1}')
    command = [str(Path(sys.executable).with_name("outrider")), "serve", str(tmp_path)]
    server = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert server.returncode == 2
    assert "gptj" in server.stderr
    assert "Traceback" not in server.stderr


def test_the_target_of_a_pool_alone_is_checked_by_the_engine_that_serves_it(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "gptj", "vocab_size": 64, "n_layer": 1}')
    options = {"model": str(tmp_path), "speculative_config": {"method": "suffix"}}
    check_models(DraftersConfig(**options))
    with pytest.raises(UnsupportedModelError, match="gptj"):
        check_models(ServiceConfig(**options))


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


def test_our_own_ray_keeps_no_records_unless_it_is_told_to(monkeypatch: pytest.MonkeyPatch):
    first, *others = QUIET_RAY
    monkeypatch.setenv(first, "an operator's")
    for name in others:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    found: dict[str, str | None] = {}
    ray = FakeRay(num_failures=0)
    start_ray(is_up=ray.is_up, init=lambda **_: found.update({name: os.environ.get(name) for name in QUIET_RAY}))
    assert found == {**QUIET_RAY, first: "an operator's"}


def test_a_ray_that_never_starts_is_an_error():
    ray = FakeRay(num_failures=99)
    with pytest.raises(Exception, match="timed out during startup"):
        start_ray(is_up=ray.is_up, init=ray.init, stop=ray.stop, num_cpus=2)
    assert ray.calls == ["init", "stop"] * NUM_START_ATTEMPTS


def test_our_own_ray_joins_nobody_and_lies_where_nobody_looks_for_one():
    options = own_ray_options(ServiceConfig())
    assert options["address"] == "local"
    assert Path(options["_temp_dir"]) != Path("/tmp/ray")  # where programs look for a cluster of this machine


@pytest.mark.parametrize(
    ("host", "address", "node"),
    [
        ("127.0.0.1", "127.0.0.1:8000", "127.0.0.1"),
        ("0.0.0.0", "0.0.0.0:8000", None),
        ("::", "[::]:8000", None),
        ("::1", "[::1]:8000", "127.0.0.1"),
    ],
)
def test_hosts_of_both_families_have_addresses_and_a_ray(host: str, address: str, node: str | None):
    config = ServiceConfig(host=host)
    assert config.address(config.port) == address
    assert own_ray_options(config)["_node_ip_address"] == node


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
