"""What is wrong in a YAML of Ray Serve is said in one line, before anything is started."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ray.serve.exceptions import RayServeException

from fakes.command_line import invoke
from outrider.cluster.replicas.app import OptionsError, build_app
from outrider.cluster.replicas.manifest import check_manifest

ROOT = Path(__file__).resolve().parents[3]
SERVE_YAML = (ROOT / "deploy" / "serve.yaml").read_text()


def test_what_is_shipped_is_as_it_should_be():
    assert check_manifest(SERVE_YAML) == ["outrider"]
    assert check_manifest((ROOT / "examples" / "two_pools.yaml").read_text()) == ["outrider"]


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("num_verifiers:", "num_verifierz:", "unknown option 'num_verifierz'; did you mean 'num_verifiers'?"),
        ("num_gateways: 1", "num_gateways: none", "num_gateways "),
        ("grpc_port: 50051", "grpc_port: many", "grpc_port: Input should be a valid integer"),
        ("off_dwell_s: 2.0", "off_dwel_s: 2.0", "unknown policy setting 'off_dwel_s'; did you mean 'off_dwell_s'?"),
        ("low_price: 0.5", "low_prize: 0.5", "low_prize"),
        ("proxy_location: HeadOnly", "proxy_location: Head", "proxy_location: Input should be"),
        ("num_gateways: 1", "own_listener: true", "port: gateways and Serve's proxy would share 8000"),
        ("applications:", "aplications:", "applications: Field required"),
        ("app:build_app", "app:build_ap", "applications: none has the import_path"),
        ("port: 8000", "port: [8000", "while parsing"),
        ("proxy_location: HeadOnly", "kind: RayService\nspec: {}", "spec.serveConfigV2: there is no"),
    ],
)
def test_what_is_wrong_is_one_line_that_names_it(tmp_path: Path, right: str, wrong: str, said: str):
    file = tmp_path / "typo.yaml"
    file.write_text(SERVE_YAML.replace(right, wrong, 1))
    result = invoke("check", str(file))
    assert result.exit_code == 1
    (line,) = result.output.splitlines()
    assert line.startswith(f"Error: {file}: ")
    assert said in line


@pytest.mark.parametrize(
    ("right", "wrong"), [("proxy_location: HeadOnly", "proxy_location: Disabled"), ("port: 8000", "port: 8001")]
)
def test_gateways_that_listen_themselves_need_a_port_of_their_own(right: str, wrong: str):
    listening = SERVE_YAML.replace("num_gateways: 1", "own_listener: true")
    assert check_manifest(listening.replace(right, wrong, 1)) == ["outrider"]


LEARNING = """
applications:
  - name: outrider
    import_path: outrider.cluster.app:build_app
    args: { device: cpu, admin_api_key: sk-admin, learner: { num_steps: 7 } }
    deployments:
      - name: Learner
        user_config: { sample_share: 0.5, num_steps: 9 }
"""


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("sample_share", "sample_shrae", "unknown learner setting 'sample_shrae'; did you mean 'sample_share'?"),
        ("sample_share: 0.5", "sample_share: 5", "sample_share must be at most 1"),
        ("sample_share: 0.5", "num_threads: 2", "num_threads holds from the learner's start"),
        ("name: Learner", "name: Learner-look", "deployments: Learner-look: no such pool learns"),
        ("learner: { num_steps: 7 }", "seed: 1", "deployments: Learner: no such pool learns"),
    ],
)
def test_a_learners_settings_are_checked_as_its_replica_will(right: str, wrong: str, said: str):
    assert check_manifest(LEARNING) == ["outrider"]
    with pytest.raises(ValueError, match=re.escape(said)):
        check_manifest(LEARNING.replace(right, wrong, 1))


@pytest.mark.parametrize("http_options", ["", "http_options: { host: 127.0.0.1 }", "http_options: { host: 10.0.0.7 }"])
@pytest.mark.parametrize("opened", ["rollouts: true", "learner: {}"])
def test_who_changes_weights_behind_serves_proxy_needs_an_admins_key(http_options: str, opened: str):
    """Serve's proxies listen at 0.0.0.0 unless told otherwise, and on a cluster that runs, wherever they do."""
    application = "{ name: outrider, import_path: 'outrider.cluster.app:build_app', args: { device: cpu, %s } }"
    yaml = f"{http_options}\napplications:\n  - {application}\n"
    host = http_options.partition("host: ")[2].rstrip(" }") or "0.0.0.0"
    for args in (opened, f"{opened}, api_key: sk-client", f"{opened}, host: 127.0.0.1"):
        with pytest.raises(
            ValueError, match=rf"{opened.partition(':')[0]}: whoever reaches http_options: host {host}, p"
        ):
            check_manifest(yaml % args)
        with pytest.raises(ValueError, match="add --admin-api-key, OUTRIDER_ADMIN_API_KEY or role=admin"):
            check_manifest("proxy_location: Disabled\n" + yaml % f"{args}, own_listener: true")
    assert check_manifest(yaml % f"{opened}, admin_api_key: sk-admin") == ["outrider"]


def test_a_manifest_of_kuberay_is_read_inside(tmp_path: Path):
    manifest = (ROOT / "deploy" / "kuberay" / "rayservice.yaml").read_text()
    assert check_manifest(manifest.replace("device: cuda", "device: cpu")) == ["outrider"]
    with pytest.raises(ValueError, match="num_verifierz"):
        check_manifest(manifest.replace("num_verifiers:", "num_verifierz:"))


def test_serve_run_says_it_in_one_line_and_ends():
    """With its options on the command line, where the application is built in Serve's own process."""
    serve = str(Path(sys.executable).with_name("serve"))
    command = [serve, "run", "outrider.cluster.app:build_app", "num_verifierz=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "RAY_ADDRESS": ""})
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "Error: unknown option 'num_verifierz'; did you mean 'num_verifiers'?"
    assert "Traceback" not in done.stderr


def test_serves_controller_takes_the_line_for_its_status():
    """It reports the text of its own exceptions, once, and the traceback of any other after four attempts."""
    with pytest.raises(OptionsError) as caught:
        build_app({"num_verifierz": 1})
    assert isinstance(caught.value, RayServeException)
    assert str(caught.value) == "unknown option 'num_verifierz'; did you mean 'num_verifiers'?"
