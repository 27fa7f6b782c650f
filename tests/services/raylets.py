"""A Ray cluster of three nodes on this machine and the service on it, operated by Serve's REST interface."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

from outrider.cluster.config.service_config import APP_NAME, ServiceConfig
from outrider.verifier_service.model.ranks import free_port, free_ports
from services.live_service import LiveService, Streamed, wait_for

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 180.0  # a replica takes seconds to start, on a busy machine a minute
QUICK = {"upscale_delay_s": 1.0, "downscale_delay_s": 4.0, "look_back_period_s": 2.0, "metrics_interval_s": 0.5}


def wait(condition: Callable[[], bool]) -> None:
    wait_for(condition, WAIT_S)


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

    def stream(self, prompt: str, *, max_tokens: int = 200, **body: Any) -> Streamed:
        return self.service.stream(prompt, max_tokens=max_tokens, ignore_eos=True, **body)


@contextlib.contextmanager
def deployed_service(
    *,
    policy: Mapping[str, Any],
    router: Mapping[str, Any],
    verifiers: Mapping[str, Any],
    drafters: Mapping[str, Any],
    **args: Any,
) -> Iterator[Deployed]:
    """Deploy the manifest that we ship, on free ports, and wait until the service drafts.

    `policy` is the pools' policy, `router` the router's, `verifiers` and `drafters` how Serve scales them, `args` are
    further options of the service.
    """
    manifest = yaml.safe_load((ROOT / "deploy" / "serve.yaml").read_text())
    port, grpc_port = free_ports(2)
    manifest["http_options"]["port"] = port
    (application,) = manifest["applications"]
    application["args"] |= {"grpc_port": grpc_port, "device": "cpu", **args}
    application["autoscaling_policy"]["policy_kwargs"] = dict(policy)
    (router_deployment,) = application["deployments"]
    router_deployment["user_config"] = dict(router)
    application["deployments"] += [
        {"name": "Verifier", "autoscaling_config": dict(verifiers)},
        {"name": "Drafter", "autoscaling_config": dict(drafters)},
    ]
    cluster = Cluster.start()
    try:
        service = LiveService(ServiceConfig(port=port, grpc_port=grpc_port, **args))
        deployed = Deployed(cluster, ServeSubmissionClient(cluster.dashboard), {}, service)
        deployed.deploy(manifest)
        wait(lambda: deployed.application["status"] in ("RUNNING", "DEPLOY_FAILED"))
        assert deployed.application["status"] == "RUNNING", deployed.application
        service.wait_for_drafts()
        yield deployed
    finally:
        cluster.stop()
