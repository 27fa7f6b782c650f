"""What is shipped is what is on disk, and it lives in peace with proto-plus, whose import name is `proto`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from outrider.cluster.common.extras import PACKAGES
from rooms import LAYERS, ROOT

OWN_FILES = ("__init__.py", "py.typed")  # of the package `outrider` itself: the repository's root
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ENTRY_POINT = "outrider.cluster.cli.main:main"


def requirement_name(entry: str) -> str:
    return "".join(c if c.isalnum() or c == "-" else " " for c in entry).split()[0]


def package_folders() -> list[Path]:
    """Folders of our layers that hold modules."""
    return sorted({path.parent for layer in LAYERS for path in (ROOT / layer).rglob("*.py")})


def test_the_package_list_equals_the_folders_on_disk() -> None:
    on_disk = [".".join(("outrider", *folder.relative_to(ROOT).parts)) for folder in (ROOT, *package_folders())]
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == on_disk


@pytest.mark.parametrize("folder", ["proto", "tests", "deploy"])
def test_folders_that_would_shadow_others_are_no_regular_packages(folder: str) -> None:
    assert not list((ROOT / folder).rglob("__init__.py"))


@pytest.mark.parametrize("layer", ["", *LAYERS])
def test_every_layer_is_typed(layer: str) -> None:
    assert (ROOT / layer / "py.typed").is_file()
    assert layer == "proto" or (ROOT / layer / "__init__.py").is_file()


def run_python(*arguments: str | Path, path: Path | None = None) -> str:
    """Run Python away from the checkout, so that nothing is found by accident; -S hides the editable install."""
    isolation = ["-I"] if path is None else ["-S", "-I"]
    result = subprocess.run(
        [sys.executable, *isolation, *arguments], cwd="/", capture_output=True, text=True, timeout=200, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built without the network from a copy of the tree: setuptools leaves build products beside its input."""
    scratch = tmp_path_factory.mktemp("wheel")
    tree = scratch / "tree"
    for name in ("pyproject.toml", "README.md", "LICENSE", *OWN_FILES):
        tree.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tree)
    for folder in (*LAYERS, "tests"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    run_python("-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--quiet", "--wheel-dir", scratch, tree)
    (built,) = scratch.glob("*.whl")
    return built


def test_the_wheel_holds_every_module_and_data_file(wheel: Path) -> None:
    shipped = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        f"outrider/{path.relative_to(ROOT)}"
        for folder in package_folders()
        for path in folder.iterdir()
        if path.is_file()
        and (path.suffix in (".py", ".pyi", ".proto", ".cpp", ".txt", ".jsonl", ".md") or path.name == "py.typed")
    }
    assert wanted <= shipped, sorted(wanted - shipped)


def test_the_wheel_holds_the_embedded_models(wheel: Path) -> None:
    shipped = set(zipfile.ZipFile(wheel).namelist())
    embedded = ROOT / "drafter_service" / "embedded"
    models = [path for name in ("target", "draft") for path in (embedded / name).rglob("*") if path.is_file()]
    assert {f"outrider/{path.relative_to(ROOT)}" for path in models} <= shipped


def test_the_wheel_holds_the_web_page(wheel: Path) -> None:
    shipped = set(zipfile.ZipFile(wheel).namelist())
    page = ROOT / "cluster" / "web" / "static"
    assert {f"outrider/{path.relative_to(ROOT)}" for path in page.iterdir()} <= shipped


def test_the_wheel_holds_nothing_else(wheel: Path) -> None:
    shipped = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in shipped}
    assert tops == {"outrider", f"outrider-{PROJECT['project']['version']}.dist-info"}
    assert {name.split("/")[1] for name in shipped if name.startswith("outrider/")} == {*LAYERS, *OWN_FILES}
    assert not [name for name in shipped if "test" in Path(name).name or "__pycache__" in name]


IMPORT_BESIDE_PROTO_PLUS = """
import sys
sys.path[:0] = sys.argv[1:]
import outrider.cluster, outrider.drafter_service, outrider.verifier_service.messages.wire
from outrider.proto import generation_pb2_grpc, link_pb2_grpc
import proto, google.api_core.rest_streaming
assert issubclass(proto.Message, object)
print(outrider.__version__, outrider.cluster.__file__)
"""


def test_the_installed_wheel_imports_beside_proto_plus(wheel: Path, tmp_path: Path) -> None:
    run_python("-m", "pip", "install", "--no-deps", "--quiet", "--target", tmp_path, wheel)
    libraries = Path(importlib.metadata.distribution("proto-plus").locate_file("")).resolve()
    version, where = run_python("-c", IMPORT_BESIDE_PROTO_PLUS, tmp_path, libraries, path=tmp_path).split(" ", 1)
    assert version == PROJECT["project"]["version"]
    assert Path(where).is_relative_to(tmp_path)


def test_the_editable_install_is_this_checkout_and_leaves_proto_plus_alone() -> None:
    version, where = run_python("-c", IMPORT_BESIDE_PROTO_PLUS).split(" ", 1)
    assert version == PROJECT["project"]["version"]
    assert Path(where) == ROOT / "cluster" / "__init__.py"


def test_the_checkout_itself_on_the_path_leaves_proto_plus_alone() -> None:
    assert run_python("-c", IMPORT_BESIDE_PROTO_PLUS, ROOT)


def test_the_console_script_is_installed_and_its_module_exists() -> None:
    (script,) = importlib.metadata.distribution("outrider").entry_points.select(group="console_scripts")
    assert (script.name, script.value) == ("outrider", ENTRY_POINT)
    assert (Path(sys.executable).parent / "outrider").is_file()
    assert importlib.util.find_spec(script.module) is not None


def test_every_direct_dependency_is_pinned_in_the_constraints() -> None:
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    }
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"], *(entry for entries in extras.values() for entry in entries)]
    names = {requirement_name(entry) for entry in wanted}
    assert not names - pinned - {"outrider"}


def test_what_only_some_need_is_an_extra_and_all_of_them_are_one():
    extras = PROJECT["project"]["optional-dependencies"]
    ours = extras.keys() - {"all", "dev", "vllm"}  # what is said of vllm bounds packages of the core
    assert extras["all"] == [f"outrider[{','.join(name for name in extras if name in ours)}]"]
    assert "outrider[all]" in extras["dev"]
    assert ours == PACKAGES.keys()
    core = {requirement_name(entry) for entry in PROJECT["project"]["dependencies"]}
    assert not core & {requirement_name(entry) for name in ours for entry in extras[name]}


def test_make_installs_every_extra():
    makefile = (ROOT / "Makefile").read_text()
    assert '--editable ".[all]"' in makefile
    assert '--editable ".[dev]"' in makefile
