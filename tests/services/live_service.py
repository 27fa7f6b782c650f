"""A service of the embedded pair, as tests drive it: over its public ports, and by pid."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import ray
from ray import serve

from outrider.cluster.common.reports import ROUTER_ERRORS
from outrider.cluster.config.service_config import APP_NAME, ServiceConfig
from outrider.cluster.replicas.app import build
from outrider.cluster.replicas.serving import deploy, fetch_models, own_ray_options, start_ray
from outrider.cluster.router.fleet import DrafterReport, DrafterState, VerifierState
from outrider.verifier_service.model.ranks import RankMain, free_ports

NUM_CPUS = 64  # Ray counts them to place ranks; here ranks share cores


@dataclass
class Streamed:
    """What a stream brought, and when."""

    text: str = ""
    prompt_token_ids: list[int] = field(default_factory=list)  # where `return_token_ids` asked for them
    token_ids: list[int] = field(default_factory=list)  # likewise
    weight_versions: list[str] = field(default_factory=list)  # likewise, of each token
    arrivals_s: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    speculation: dict[str, Any] = field(default_factory=dict)

    @property
    def longest_pause_s(self) -> float:
        gaps = zip(self.arrivals_s, self.arrivals_s[1:], strict=False)
        return max((after - before for before, after in gaps), default=0.0)


@dataclass(frozen=True)
class LiveService:
    config: ServiceConfig

    @property
    def base_url(self) -> str:
        return f"http://{self.config.host}:{self.config.port}"

    @property
    def grpc_address(self) -> str:
        return f"{self.config.host}:{self.config.grpc_port}"

    def stream(
        self, prompt: str, *, on_chunk: Callable[[int], None] = lambda _: None, timeout_s: float = 60.0, **body: Any
    ) -> Streamed:
        """Stream a completion; `on_chunk` is told the number of chunks so far, `timeout_s` bounds each pause."""
        body = {"model": self.config.model.name, "prompt": prompt, "stream": True, "temperature": 0, **body}
        streamed = Streamed()
        with httpx.stream("POST", f"{self.base_url}/v1/completions", json=body, timeout=timeout_s) as response:
            if response.is_error:
                response.read()
            response.raise_for_status()
            for line in response.iter_lines():
                payload = line.removeprefix("data:").strip()
                if not payload or payload == "[DONE]" or line.startswith(":"):  # a comment, while nothing else comes
                    continue
                event = json.loads(payload)
                assert "error" not in event, event
                streamed.arrivals_s.append(time.monotonic())
                choice = event["choices"][0]
                streamed.text += choice["text"]
                streamed.prompt_token_ids += choice.get("prompt_token_ids") or []
                streamed.token_ids += choice.get("token_ids") or []
                for span in choice.get("weight_versions") or []:
                    streamed.weight_versions += [span["version"]] * (span["end"] - span["start"])
                streamed.finish_reason = choice["finish_reason"] or streamed.finish_reason
                streamed.speculation = (event.get("metrics") or {}).get("speculative_decoding", streamed.speculation)
                on_chunk(len(streamed.arrivals_s))
        return streamed

    def call(self, deployment: str, method: str) -> Any:
        """Call a method of some replica of a deployment."""
        handle = serve.get_deployment_handle(deployment, APP_NAME)
        return getattr(handle, method).remote().result(timeout_s=30)

    def report_drafter(self, report: DrafterReport) -> None:
        """Tell the router of a drafter that is no replica of this service."""
        serve.get_deployment_handle("Router", APP_NAME).report_drafter.remote(report).result(timeout_s=10)

    def remove_drafter(self, drafter_id: str) -> None:
        serve.get_deployment_handle("Router", APP_NAME).remove.remote(drafter_id).result(timeout_s=10)

    def kill(self, deployment: str, *, rank: int = 0, number: int = signal.SIGKILL) -> int:
        """Send a signal to a rank of a deployment; return its pid."""
        pid = self.call(deployment, "rank_pids")[rank]
        os.kill(pid, number)
        return pid

    def all_rank_pids(self, deployment: str, timeout_s: float = 30.0) -> list[list[int]]:
        """Return the ranks' processes of every replica that serves, in a stable order."""
        num_replicas = serve.status().applications[APP_NAME].deployments[deployment].replica_states["RUNNING"]
        found: dict[int, list[int]] = {}

        def has_all() -> bool:
            pids = self.call(deployment, "rank_pids")
            found[pids[0]] = pids
            return len(found) >= num_replicas

        self._wait(has_all, timeout_s)
        return [found[pid] for pid in sorted(found)]

    def wait_for_fleet(self, num_verifiers: int, num_drafters: int, timeout_s: float = 120.0) -> None:
        """Wait until so many verifiers report, each with a link to so many drafters."""

        def is_whole() -> bool:
            verifiers, drafters = self._fleet()
            links = {len(state.report.drafters_up) for state in verifiers}
            return len(verifiers) == num_verifiers and len(drafters) == num_drafters and links == {num_drafters}

        self._wait(is_whole, timeout_s)

    def _fleet(self) -> tuple[tuple[VerifierState, ...], tuple[DrafterState, ...]]:
        snapshot = self.call("Router", "snapshot")
        return snapshot.verifiers, snapshot.drafters

    def wait_for_drafts(self, timeout_s: float = 90.0) -> None:
        """Wait until a request is served with drafts again."""
        self._wait(lambda: self.stream("import os\n", max_tokens=8).speculation["num_drafts"] > 0, timeout_s)

    def wait_until_idle(self, timeout_s: float = 120.0) -> None:
        """Wait until neither a request nor a session nor a KV block is held anywhere."""
        self._wait(self._is_idle, timeout_s)

    def _is_idle(self) -> bool:
        verifiers, drafters = self._fleet()
        loads = [state.report.load for state in verifiers]
        held = [load.num_running + load.num_waiting + load.kv_usage for load in loads]
        return bool(verifiers) and sum(held) == 0 and all(state.report.load.num_sessions == 0 for state in drafters)

    @staticmethod
    def _wait(condition: Callable[[], bool], timeout_s: float) -> None:
        wait_for(lambda: _holds(condition), timeout_s)


def wait_for(condition: Callable[[], bool], timeout_s: float, seen: Callable[[], object] = lambda: "") -> None:
    """Ask again and again until the condition holds; raises what it raises, or at the end what is `seen`."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"condition not met within {timeout_s} s: {seen()}"
        time.sleep(0.1)


def _holds(condition: Callable[[], bool]) -> bool:
    """A replica or a gateway that is being replaced cannot answer: the condition does not hold yet."""
    try:
        return condition()
    except (*ROUTER_ERRORS, httpx.HTTPError):
        return False


class SharedRay:
    """One Ray and one Serve for all services of a run, each deployed in the other's place.

    They start with the first. `outrider serve` and its like bring a Ray of their own: test_serving.py.
    """

    def __init__(self) -> None:
        self._exit = contextlib.ExitStack()  # of Ray and Serve
        self._options: dict[str, Any] | None = None
        self._service: LiveService | None = None

    def service(
        self, *, wait_for_drafts: bool = True, main: Callable[[ServiceConfig], RankMain] | None = None, **options: Any
    ) -> LiveService:
        """Return the service that stands if it has these options, else one in its place.

        Speculation is pinned on, and drafts are waited for, unless said otherwise. `main`: what verifiers run instead
        of the configuration's engine; such a service is always a new one.
        """
        if self._service is None or options != self._options or main is not None:
            self._clear()
            self._service = self._deployed(options, main)
            self._options = options if main is None else None
        if wait_for_drafts:
            self._service.wait_for_drafts()
        return self._service

    def close(self) -> None:
        self._clear()
        self._exit.close()

    def _deployed(self, options: dict[str, Any], main: Callable[[ServiceConfig], RankMain] | None) -> LiveService:
        if not ray.is_initialized():
            self._start()
        port, grpc_port = free_ports(2)
        # a machine's ranks share its cores, and a gigabyte of KV, the default, takes each half a second to clear
        usual = {"speculation": "always", "threads_per_rank": 1, "kv_cache_memory_bytes": 256 << 20}
        listening = {"own_listener": True, "port": port, "grpc_port": grpc_port}
        config = ServiceConfig(**{**usual, **listening, **options})
        fetch_models(config)
        deploy(build(config, None if main is None else main(config)))
        return LiveService(config)

    def _start(self) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        start_ray(**{**own_ray_options(ServiceConfig()), "num_cpus": NUM_CPUS})
        self._exit.callback(ray.shutdown)
        serve.start(proxy_location="Disabled")
        self._exit.callback(serve.shutdown)

    def _clear(self) -> None:
        if self._service is not None:
            serve.delete(APP_NAME)
        self._service = self._options = None
