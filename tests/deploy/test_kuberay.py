"""The KubeRay manifests: valid by their schemas, accepted by Serve and by us, and in agreement with each other."""

from __future__ import annotations

import copy
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import ray
import yaml
from ray.serve.schema import ServeDeploySchema

from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.replicas.app import build_app

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
KUBERNETES_VERSION = "1.33"
SCHEMA = json.loads((Path(__file__).parent / "rayservice.schema.json").read_text())
MANIFEST = yaml.safe_load((DEPLOY / "kuberay" / "rayservice.yaml").read_text())
CLUSTER = MANIFEST["spec"]["rayClusterConfig"]
GROUPS = {group["groupName"]: group for group in CLUSTER["workerGroupSpecs"]}
NODES = [CLUSTER["headGroupSpec"], *GROUPS.values()]
SERVE = yaml.safe_load(MANIFEST["spec"]["serveConfigV2"])
(APPLICATION,) = SERVE["applications"]


def config() -> ServiceConfig:
    return ServiceConfig(**APPLICATION["args"])


def container(node: dict[str, Any]) -> dict[str, Any]:
    (only,) = node["template"]["spec"]["containers"]
    return only


def manifests(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


# --- schemas ---


def test_the_ray_service_has_only_fields_that_kuberay_knows():
    jsonschema.validate(MANIFEST, SCHEMA)


@pytest.mark.parametrize(
    "path", [("spec", "serveConfig"), ("spec", "rayClusterConfig", "workerGroups"), ("metadata", "label")]
)
def test_a_field_that_kuberay_does_not_know_is_caught(path: tuple[str, ...]):
    broken = copy.deepcopy(MANIFEST)
    place = broken
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = "x"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, SCHEMA)


@pytest.mark.parametrize("node", NODES, ids=["front", *GROUPS])
def test_every_pod_template_is_a_pod_to_kubernetes(node: dict[str, Any]):
    metadata = {"name": "pod", **node["template"]["metadata"]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": node["template"]["spec"]}
    kubernetes_validate.validate(pod, KUBERNETES_VERSION, strict=True)
    broken = copy.deepcopy(pod)
    broken["spec"]["containers"][0]["imagee"] = "x"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, KUBERNETES_VERSION, strict=True)


@pytest.mark.parametrize("name", ["kuberay/service.yaml", "kuberay/pdb.yaml"])
def test_kubernetes_own_objects_are_valid(name: str):
    for manifest in manifests(name):
        kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)


# --- what Serve and we make of it ---


def test_serve_accepts_the_configuration_and_we_its_options():
    (application,) = ServeDeploySchema.model_validate(SERVE).applications
    assert application.import_path == "outrider.cluster.app:build_app"
    assert config().drafter_spec is not None
    assert CLUSTER["rayVersion"] == ray.__version__


def test_the_deployments_that_are_configured_are_those_of_the_application():
    application = build_app({**APPLICATION["args"], "device": "cpu"})
    gateway = application._bound_deployment
    names = {gateway.name} | {
        argument._bound_deployment.name for argument in gateway.init_args if hasattr(argument, "_bound_deployment")
    }
    assert {deployment["name"] for deployment in APPLICATION["deployments"]} <= names
    assert {"Verifier", "Drafter"} <= names


# --- agreement ---


def test_every_label_selector_finds_a_group_of_nodes_of_its_own():
    labels = [node["labels"] for node in NODES]
    wanted = [config().verifiers.verifier_labels, config().pools["default"].drafter_labels]
    wanted += [deployment["ray_actor_options"]["label_selector"] for deployment in APPLICATION["deployments"]]
    assert [labels.count(selector) for selector in wanted] == [1, 1, 1, 1]
    assert config().verifiers.verifier_labels == GROUPS["verifiers"]["labels"]
    assert config().pools["default"].drafter_labels == GROUPS["drafters"]["labels"]


def test_a_node_holds_one_replica_and_there_are_nodes_for_all_of_them():
    verifiers, drafters = GROUPS["verifiers"], GROUPS["drafters"]
    assert container(verifiers)["resources"]["limits"]["nvidia.com/gpu"] == str(config().verifiers.tensor_parallel_size)
    assert container(drafters)["resources"]["limits"]["nvidia.com/gpu"] == str(
        config().speculative.draft_tensor_parallel_size
    )
    for group, replicas in ((verifiers, config().num_verifiers), (drafters, config().pools["default"].num_drafters)):
        assert (group["minReplicas"], group["maxReplicas"]) == (replicas.fewest, replicas.most)
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_replicas_reach_each_other_and_clients_the_front():
    assert config().links.internal_host == "auto"
    assert config().host == SERVE["http_options"]["host"] == "0.0.0.0"
    ports = {port["name"]: port["containerPort"] for port in container(CLUSTER["headGroupSpec"])["ports"]}
    assert (ports["serve"], ports["grpc"]) == (config().port, config().grpc_port)
    assert SERVE["http_options"]["port"] == config().port
    (service,) = manifests("kuberay/service.yaml")
    assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]} == {
        name: ports[name] for name in ("serve", "grpc")
    }
    assert service["spec"]["selector"].items() <= pod_labels(CLUSTER["headGroupSpec"]).items()


def pod_labels(node: dict[str, Any]) -> dict[str, str]:
    return node["template"]["metadata"]["labels"]


def test_each_disruption_budget_protects_one_group():
    budgets = manifests("kuberay/pdb.yaml")
    chosen = [
        [name for name, group in GROUPS.items() if selector.items() <= pod_labels(group).items()]
        for selector in (budget["spec"]["selector"]["matchLabels"] for budget in budgets)
    ]
    assert chosen == [["verifiers"], ["drafters"]]


def test_the_service_monitor_finds_the_service_and_its_port():
    (monitor,) = manifests("prometheus/servicemonitor.yaml")
    (service,) = manifests("kuberay/service.yaml")
    assert (monitor["apiVersion"], monitor["kind"]) == ("monitoring.coreos.com/v1", "ServiceMonitor")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert endpoint["path"] == "/metrics"


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
def test_a_pod_that_stops_has_time_to_drain(group: dict[str, Any]):
    script, limit_s = container(group)["lifecycle"]["preStop"]["exec"]["command"]
    assert script == "outrider-drain-node"
    assert config().drain_timeout_s < int(limit_s) < group["template"]["spec"]["terminationGracePeriodSeconds"]


def test_the_kustomization_names_every_manifest_and_labels_the_dashboard():
    (kustomization,) = manifests("kustomization.yaml")
    shipped = {path.relative_to(DEPLOY).as_posix() for path in (DEPLOY / "kuberay").glob("*.yaml")}
    assert set(kustomization["resources"]) == shipped | {"prometheus/servicemonitor.yaml"}
    (dashboard,) = kustomization["configMapGenerator"]
    assert dashboard["files"] == ["grafana/outrider.json"]
    assert (DEPLOY / dashboard["files"][0]).is_file()
    assert dashboard["options"]["labels"] == {"grafana_dashboard": "1"}


# --- draining a node ---


def drain(folder: Path, *, num_polls_with_replicas: int, limit_s: int) -> tuple[subprocess.CompletedProcess, list[str]]:
    """Run the drain script with `ray`, `pgrep` and `sleep` that write down their calls."""
    log = folder / "calls"
    log.touch()
    bodies = {
        "ray": "",
        "sleep": "",
        "pgrep": f'[[ $(grep -c ^pgrep "{log}") -le {num_polls_with_replicas} ]]',
    }
    for name, body in bodies.items():
        (folder / name).write_text(f'#!/usr/bin/env bash\necho "{name} $*" >> "{log}"\n{body}\n')
        (folder / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    command = [DEPLOY / "drain-node.sh", str(limit_s)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20, check=False)
    return result, log.read_text().splitlines()


def test_draining_waits_until_the_replicas_are_gone(tmp_path: Path):
    result, calls = drain(tmp_path, num_polls_with_replicas=2, limit_s=9)
    assert result.returncode == 0, result.stderr
    assert calls[0].startswith("ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION")
    assert "--deadline-remaining-seconds 9" in calls[0]
    assert [call.split()[0] for call in calls[1:]] == ["pgrep", "sleep", "pgrep", "sleep", "pgrep"]


def test_draining_gives_up_at_its_limit_and_says_so(tmp_path: Path):
    result, calls = drain(tmp_path, num_polls_with_replicas=99, limit_s=3)
    assert calls.count("sleep 1") == 3
    assert "still here after 3 s" in result.stderr


def test_ray_knows_the_drain_command_and_its_options():
    from ray.scripts.scripts import drain_node

    known = {name for parameter in drain_node.params for name in parameter.opts}
    used = {word for word in (DEPLOY / "drain-node.sh").read_text().split() if word.startswith("--")}
    assert used <= known
    assert len(used) == 3
