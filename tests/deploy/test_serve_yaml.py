import pkgutil
from pathlib import Path

import pytest
import yaml
from ray.serve.config import AutoscalingPolicy
from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.scaling.serve_scaling import ServicePolicy

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
MANIFESTS = {
    "serve.yaml": yaml.safe_load((DEPLOY / "serve.yaml").read_text()),
    "rayservice.yaml": yaml.safe_load(
        yaml.safe_load((DEPLOY / "kuberay" / "rayservice.yaml").read_text())["spec"]["serveConfigV2"]
    ),
}


def application(name: str) -> ServeApplicationSchema:
    (found,) = ServeDeploySchema.model_validate(MANIFESTS[name]).applications
    return found


def test_serve_accepts_the_manifest_and_we_its_options():
    assert application("serve.yaml").import_path == "outrider.cluster.app:build_app"
    config = ServiceConfig(**application("serve.yaml").args)
    assert config.drafter_spec is not None


@pytest.mark.parametrize("name", MANIFESTS)
def test_serve_finds_the_policy_and_it_takes_its_settings(name):
    settings = application(name).autoscaling_policy
    policy = AutoscalingPolicy(**settings)
    assert policy.policy_function == "outrider.cluster.serve_scaling:ServicePolicy"
    assert pkgutil.resolve_name(policy.policy_function) is ServicePolicy
    ServicePolicy(**policy.policy_kwargs)
