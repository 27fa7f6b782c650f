"""The core without what only some need: it imports, it serves, and it says which extra is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from outrider.cluster.common.extras import PACKAGES, MissingExtraError, is_installed, missing_extra, require_extra
from outrider.verifier_service.formats import gguf
from rooms import LAYERS, ROOT, imported, module_name, sources

# the optional parts themselves: the only modules that import an extra's packages
PARTS = {
    "outrider.lab.plots": "plots",
    "outrider.lab.peers.plot": "plots",
    "outrider.cluster.gateway.tracing": "otlp",
    "outrider.cluster.api.vllm_grpc": "vllm-grpc",
    "outrider.lab.peers.half_gguf": "gguf",
}
# they are loaded by another engine, or beside it, in an environment of its own, which is no extra of ours
WITHIN_VLLM = frozenset(
    {
        "outrider.cluster.vllm",
        "outrider.cluster.hosted.vllm_drafts",
        "outrider.cluster.hosted.vllm_worker",
        "outrider.cluster.vllm_engine.process",
    }
)
# they are run in such an environment, and import it in functions
BESIDE_VLLM = frozenset({"outrider.lab.peers.vllm_worker", "outrider.lab.bench.gpu_beside"})
MODULES = [path for layer in LAYERS for path in sources(ROOT / layer)]


@pytest.mark.parametrize("extra", PACKAGES)
def test_an_extra_is_missing_where_one_of_its_packages_is(extra: str):
    assert missing_extra(extra, lambda _: True) is None
    require_extra(extra, "--this", lambda _: True)
    for lacking in PACKAGES[extra]:
        assert missing_extra(extra, lambda package, lacking=lacking: package != lacking) is not None
        with pytest.raises(MissingExtraError, match=rf"^--this needs .*: pip install 'outrider\[{extra}\]'$"):
            require_extra(extra, "--this", lambda package, lacking=lacking: package != lacking)


@pytest.mark.parametrize("extra", PACKAGES)
def test_the_development_environment_has_them_all(extra: str):
    assert missing_extra(extra) is None


def test_the_reader_of_gguf_files_asks_for_the_packages_of_its_extra():
    assert PACKAGES["gguf"] == gguf.PACKAGES


@pytest.mark.parametrize("package", ["no_such_package", "no_such_package.inside", "json.no_such_module"])
def test_a_package_that_is_not_there_is_told_without_an_error(package: str):
    assert is_installed("json.decoder")
    assert not is_installed(package)


def test_only_the_optional_parts_import_an_extras_packages():
    found = {
        (module_name(path), extra)
        for path in MODULES
        for module, _, _ in imported(path.read_text())
        for extra, packages in PACKAGES.items()
        if any(f"{module}.".startswith(f"{package}.") for package in packages)
    }
    assert found == set(PARTS.items())


def test_the_parts_within_vllm_are_those_that_import_it():
    found = {
        module_name(path)
        for path in MODULES
        for module, _, _ in imported(path.read_text())
        if f"{module}.".startswith(("vllm.", "outrider.cluster.hosted.vllm_drafts."))
    }
    assert found - BESIDE_VLLM == WITHIN_VLLM


WITHOUT_EXTRAS = """
import asyncio, importlib, json, logging, sys
from importlib.machinery import PathFinder

modules, packages = json.loads(sys.argv[1]), json.loads(sys.argv[2])

class NotInstalled(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if any(f"{name}.".startswith(f"{package}.") for package in packages):
            return None
        return PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [NotInstalled if finder is PathFinder else finder for finder in sys.meta_path]
logging.basicConfig(stream=sys.stderr, level=logging.WARNING)

for name in modules:
    importlib.import_module(name)

from click.testing import CliRunner
from fakes.backend import FakeBackend, build_gateway, build_tokenizer
from outrider.cluster.api.grpc_api import start_grpc_server
from outrider.cluster.cli.main import main

async def served():
    running = await start_grpc_server(build_gateway(FakeBackend(lambda _: []), build_tokenizer()), "127.0.0.1:0")
    names = sorted(running.health._server_status)
    await running.server.stop(None)
    return names

def said(*arguments):
    result = CliRunner().invoke(main, list(arguments))
    return [result.exit_code, result.output]

print(json.dumps({
    "simulate": said("simulate", "--study", "load", "--plot", "x.png"),
    "bench": said("bench", "serve", "--url", "http://127.0.0.1:9", "--plot", "x.png"),
    "serve": said("serve", "--otlp-traces-endpoint", "http://127.0.0.1:4317"),
    "names": asyncio.run(served()),
}))
"""


@pytest.fixture(scope="module")
def without_extras() -> tuple[Mapping[str, Any], str]:
    """What the core answers, and logs, in a process in which no extra's packages can be imported."""
    modules = [name for path in MODULES if (name := module_name(path)) not in PARTS.keys() | WITHIN_VLLM]
    packages = [package for names in PACKAGES.values() for package in names]
    code = f"import sys; sys.path.append({str(ROOT / 'tests')!r})\n{WITHOUT_EXTRAS}"
    found = subprocess.run(
        [sys.executable, "-c", code, json.dumps(modules), json.dumps(packages)],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    return json.loads(found.stdout.splitlines()[-1]), found.stderr


@pytest.mark.parametrize(
    ("verb", "option", "extra"),
    [
        ("simulate", "--plot", "plots"),
        ("bench", "--plot", "plots"),
        ("serve", "otlp_traces_endpoint", "otlp"),
    ],
)
def test_what_is_asked_for_without_its_extra_is_a_usage_error(
    without_extras: tuple[Mapping[str, Any], str], verb: str, option: str, extra: str
):
    exit_code, output = without_extras[0][verb]
    assert exit_code == 2, output
    assert f"{option} needs packages that are not installed: pip install 'outrider[{extra}]'" in output


def test_without_vllms_messages_our_own_interface_is_served_and_the_log_says_so_once(
    without_extras: tuple[Mapping[str, Any], str],
):
    said, log = without_extras
    assert "outrider.v1.Inference" in said["names"]
    assert not [name for name in said["names"] if name.startswith("vllm.")]
    assert log.count("VllmEngine is not served: pip install 'outrider[vllm-grpc]'") == 1
