"""The service on a Ray cluster of three nodes, deployed and operated as an operator does: by Serve's REST interface."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

from live_service import LiveService, Streamed, wait_for
from outrider.cluster.config import APP_NAME, ServiceConfig
from outrider.cluster.fleet import DisabledReason
from outrider.drafter_service.embedded import held_out_prompts
from outrider.verifier_service.ranks import free_port, free_ports

# a replica takes seconds to start, on a busy machine a minute
pytestmark = [pytest.mark.service, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
MAX_TOKENS = 200
NUM_STREAMS = 6
WAIT_S = 180.0
POLICY = {  # so many streams want both verifiers and all three drafters; on a busy machine the price says little
    "requests_per_verifier": 4,
    "sessions_per_drafter": 2,
    "low_price": 1.0,
    "high_price": 2.0,
}
QUICK = {"upscale_delay_s": 1.0, "downscale_delay_s": 4.0, "look_back_period_s": 2.0, "metrics_interval_s": 0.5}
DRAFTERS = {"min_replicas": 0, "initial_replicas": 1, "max_replicas": 3, **QUICK}


@dataclass
class Cluster:
    """The script's process, and what it printed: its nodes' pools and the dashboard's address."""

    process: subprocess.Popen[str]
    pool_of_node: dict[str, str] = field(default_factory=dict)
    dashboard: str = ""

    @classmethod
    def start(cls) -> Cluster:
        command = [sys.executable, str(ROOT / "deploy" / "local_cluster.py"), "--dashboard-port", str(free_port())]
        environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
        cluster = cls(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
        assert cluster.process.stdout is not None
        for line in cluster.process.stdout:
            if line.startswith("node "):
                _, node_id, pool = line.split()
                cluster.pool_of_node[node_id] = pool.removeprefix("pool=")
            elif line.startswith("RAY_DASHBOARD_ADDRESS="):
                cluster.dashboard = line.strip().partition("=")[2]
                return cluster
        raise AssertionError("the cluster did not start")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)


@dataclass
class Deployed:
    """The application on the cluster."""

    cluster: Cluster
    client: ServeSubmissionClient
    manifest: dict[str, Any]
    service: LiveService

    def deploy(self, manifest: dict[str, Any]) -> None:
        self.client.deploy_applications(manifest)
        self.manifest = manifest

    @property
    def application(self) -> dict[str, Any]:
        return self.client.get_serve_details()["applications"].get(APP_NAME, {"status": "NOT_STARTED"})

    def replicas(self, deployment: str) -> list[dict[str, Any]]:
        """Return the replicas that run."""
        return [
            replica
            for replica in self.application["deployments"][deployment]["replicas"]
            if replica["state"] == "RUNNING"
        ]

    @property
    def sizes(self) -> dict[str, int]:
        return {name: len(self.replicas(name)) for name in self.application["deployments"]}

    def has(self, num_verifiers: int, num_drafters: int) -> bool:
        return (self.sizes["Verifier"], self.sizes["Drafter"]) == (num_verifiers, num_drafters)

    def replica_ids(self) -> dict[str, set[str]]:
        return {name: {r["replica_id"] for r in self.replicas(name)} for name in self.application["deployments"]}

    def pools(self, deployment: str) -> set[str]:
        """Return the pools of the nodes that a deployment's replicas are on."""
        return {self.cluster.pool_of_node[replica["node_id"]] for replica in self.replicas(deployment)}

    def stream(self, prompt: str, **body: Any) -> Streamed:
        return self.service.stream(prompt, max_tokens=MAX_TOKENS, ignore_eos=True, **body)


def wait(condition: Callable[[], bool]) -> None:
    wait_for(condition, WAIT_S)


def manifest_for_test(port: int, grpc_port: int) -> dict[str, Any]:
    """Return the manifest that we ship, on free ports, with speculation pinned on and a policy that acts in seconds."""
    manifest = yaml.safe_load((ROOT / "deploy" / "serve.yaml").read_text())
    manifest["http_options"]["port"] = port
    (application,) = manifest["applications"]
    application["args"] |= {"grpc_port": grpc_port, "device": "cpu"}
    application["autoscaling_policy"]["policy_kwargs"] = POLICY
    (router,) = application["deployments"]
    router["user_config"] = {"mode": "always", "max_draft_length": 4}
    application["deployments"] += [
        {"name": "Verifier", "autoscaling_config": {"min_replicas": 1, "max_replicas": 2, **QUICK}},
        {"name": "Drafter", "autoscaling_config": {**DRAFTERS, "downscale_to_zero_delay_s": 600.0}},
    ]
    return manifest


@pytest.fixture(scope="module")
def deployed() -> Iterator[Deployed]:
    cluster = Cluster.start()
    try:
        port, grpc_port = free_ports(2)
        service = LiveService(ServiceConfig(port=port, grpc_port=grpc_port))
        deployed = Deployed(cluster, ServeSubmissionClient(cluster.dashboard), {}, service)
        deployed.deploy(manifest_for_test(port, grpc_port))
        wait(lambda: deployed.application["status"] in ("RUNNING", "DEPLOY_FAILED"))
        assert deployed.application["status"] == "RUNNING", deployed.application
        service.wait_for_drafts()
        yield deployed
    finally:
        cluster.stop()


def test_pools_are_on_their_own_nodes(deployed: Deployed):
    assert sorted(deployed.cluster.pool_of_node.values()) == ["drafter", "drafter", "verifier"]
    assert deployed.pools("Verifier") == {"verifier"}
    assert deployed.pools("Drafter") == {"drafter"}


class Load:
    """Greedy streams, one after the other on each of some threads, each compared with the text of plain decoding."""

    def __init__(self, deployed: Deployed, prompts: list[str]) -> None:
        self.deployed = deployed
        self.expected = {prompt: deployed.stream(prompt, disable_spec_decode=True).text for prompt in prompts}
        self.streamed: list[Streamed] = []
        self.num_wanted = len(prompts)

    def run(self, index: int) -> None:
        """Stream for as long as so many are wanted; raises what a client would see."""
        prompt = list(self.expected)[index]
        while index < self.num_wanted:
            streamed = self.deployed.stream(prompt)
            assert streamed.text == self.expected[prompt]
            assert streamed.finish_reason == "length"
            self.streamed.append(streamed)


def test_both_pools_follow_a_load_that_rises_and_falls_without_a_lost_or_changed_request(deployed: Deployed):
    load = Load(deployed, held_out_prompts()[:NUM_STREAMS])
    assert deployed.sizes == {"Verifier": 1, "Drafter": 1, "Gateway": 1, "Router": 1}
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        streams = [threads.submit(load.run, index) for index in range(NUM_STREAMS)]
        try:
            wait(lambda: deployed.has(2, 3) or any(stream.done() for stream in streams))
            assert deployed.pools("Verifier") == {"verifier"}
            assert deployed.pools("Drafter") == {"drafter"}
            num_before = len(load.streamed)
            wait(lambda: len(load.streamed) > num_before + 2)
            load.num_wanted = 1  # the rest of the load ends, one stream goes on
            wait(lambda: deployed.has(1, 1) or streams[0].done())
            num_before = len(load.streamed)
            wait(lambda: len(load.streamed) > num_before + 1)
        finally:
            load.num_wanted = 0
        for stream in streams:
            stream.result()
    assert all(streamed.speculation["num_drafts"] > 0 for streamed in load.streamed)
    assert deployed.sizes == {"Verifier": 1, "Drafter": 1, "Gateway": 1, "Router": 1}


def test_a_changed_user_config_changes_plans_and_restarts_nothing(deployed: Deployed):
    prompt = held_out_prompts()[0]
    before, replica_ids = deployed.stream(prompt), deployed.replica_ids()
    assert before.speculation["num_draft_tokens"] > 2 * before.speculation["num_drafts"]
    manifest = copy.deepcopy(deployed.manifest)
    manifest["applications"][0]["deployments"][0]["user_config"]["max_draft_length"] = 1
    deployed.deploy(manifest)
    wait(lambda: one_token_per_draft(deployed.stream(prompt)))
    assert deployed.replica_ids() == replica_ids


def one_token_per_draft(streamed: Streamed) -> bool:
    return 0 < streamed.speculation["num_draft_tokens"] == streamed.speculation["num_drafts"]


def test_without_requests_there_is_no_drafter_and_with_them_one_comes_back(deployed: Deployed):
    manifest = copy.deepcopy(deployed.manifest)
    drafter = manifest["applications"][0]["deployments"][-1]
    drafter["autoscaling_config"] = DRAFTERS  # the last one goes as soon as others do
    deployed.deploy(manifest)
    wait(lambda: deployed.has(1, 0))
    load = Load(deployed, held_out_prompts()[:1])
    with ThreadPoolExecutor(1) as threads:
        stream = threads.submit(load.run, 0)
        try:
            wait(lambda: deployed.has(1, 1) or stream.done())
            wait(lambda: stream.done() or load.streamed[-1].speculation["num_drafts"] > 0)
        finally:
            load.num_wanted = 0
        stream.result()
    assert load.streamed[0].speculation["num_drafts"] == 0, "it was served without waiting for a drafter"


def test_a_router_left_to_decide_says_why_not_where_it_does_not_speculate(deployed: Deployed):
    manifest = copy.deepcopy(deployed.manifest)
    manifest["applications"][0]["deployments"][0]["user_config"]["mode"] = "auto"
    deployed.deploy(manifest)
    streamed = deployed.stream(held_out_prompts()[1])
    assert streamed.finish_reason == "length"
    reason = streamed.speculation["disabled_reason"]
    assert (reason is None) == (streamed.speculation["num_drafts"] > 0) or reason in set(DisabledReason)
