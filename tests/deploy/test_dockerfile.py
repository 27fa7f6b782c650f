"""The image: clean to hadolint, made of files that exist, and it starts what we ship."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from outrider.cluster.config.service_config import ServiceConfig

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def instructions(keyword: str) -> list[str]:
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [line.partition(" ")[2].strip() for line in text.splitlines() if line.startswith(f"{keyword} ")]


def sources() -> set[str]:
    """Return what is copied from the build's context."""
    copies = [line.split() for line in instructions("COPY") if "--from=" not in line]
    return {word for words in copies for word in words[:-1] if not word.startswith("--")}


def test_hadolint_has_nothing_to_say():
    linter = Path(sys.executable).parent / "hadolint"
    result = subprocess.run([linter, DOCKERFILE], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_what_is_copied_exists_and_is_not_ignored():
    ignored = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == sources()
    assert all((ROOT / source).exists() for source in sources())


def test_everything_that_the_wheel_needs_is_copied():
    packages = {name.split(".")[1] for name in PROJECT["tool"]["setuptools"]["packages"] if "." in name}
    files = {PROJECT["project"]["readme"], *PROJECT["project"]["license-files"], "pyproject.toml"}
    files |= {"__init__.py", "py.typed"}  # of the package `outrider` itself
    assert packages | files <= sources()


def test_the_image_starts_our_command_as_an_ordinary_user():
    (entry_point,) = instructions("ENTRYPOINT")
    assert json.loads(entry_point)[0] in PROJECT["project"]["scripts"]
    (arguments,) = instructions("CMD")
    assert json.loads(arguments)[0] == "serve"
    assert instructions("USER") == ["1000"]
    assert any("--uid 1000" in line for line in instructions("RUN"))


def test_the_ports_and_the_health_check_are_those_that_are_served():
    config = ServiceConfig()
    assert instructions("EXPOSE") == [f"{config.port} {config.grpc_port}"]
    (check,) = instructions("HEALTHCHECK")
    assert f"http://127.0.0.1:{config.port}/health" in check


def test_the_image_has_the_extras_of_a_deployment():
    (install,) = (line for line in instructions("RUN") if "/tmp/wheels/*.whl" in line)
    extras = re.search(r"\[(otlp[^]]*)\]", install)
    assert extras is not None
    known = PROJECT["project"]["optional-dependencies"].keys()
    assert set(extras[1].split(",")) == known - {"plots", "vllm", "all", "dev"}


def test_there_is_a_cpu_and_a_cuda_variant():
    assert "DEVICE=cpu" in instructions("ARG")
    torch = next(line for line in instructions("RUN") if "index-url" in line)
    assert "cpu) index=https://download.pytorch.org/whl/cpu" in torch
    assert "cuda) index=https://pypi.org/simple" in torch
    assert "exit 1" in torch  # any other value
