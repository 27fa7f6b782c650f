"""The arrows between the folders and the house's limits, held by reading the sources.

Every rule is a function from source text (or an import graph) to complaints, tested on a snippet that breaks it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("proto", "verifier_service", "drafter_service", "cluster")  # imports point left only
PURE_MODULES = {  # a room's modules; of those with none named, all
    "verifier_service/messages": ("batch", "draft", "request", "tree"),
    "verifier_service/scheduling": (),
    "verifier_service/pricing": (),
    "cluster/router": (
        *("routing", "planning", "goodput", "router", "fleet", "autoscaling", "scaling_figures", "judging"),
    ),
}
BANNED_IN_PURE = frozenset({"torch", "ray", "grpc"})
OBJECT_COLLECTIVES = frozenset(
    {"broadcast_object_list", "scatter_object_list", "all_gather_object", "gather_object"}
    | {"send_object_list", "recv_object_list"}
)
CONNECTION_METHODS = {"send": 1, "recv": 0}  # and how many arguments each takes
PROCESS_QUEUES = frozenset({"Queue", "SimpleQueue", "JoinableQueue"})
PICKLES = frozenset({"pickle", "cloudpickle", "dill", "shelve", "marshal"})
MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 450

Rule = Callable[[str], list[str]]


def imports_of(source: str) -> Iterator[tuple[str, int]]:
    """Yield every imported module with its line; `from a import b` yields both `a` and `a.b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield module, node.lineno
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


def arrow_violations(source: str, layer: str) -> list[str]:
    allowed = LAYERS[: LAYERS.index(layer) + 1]
    return [
        f"{line}: {layer} imports {module}"
        for module, line in imports_of(source)
        if module.startswith("outrider.") and module.split(".")[1] not in allowed
    ]


def unprefixed_imports(source: str) -> list[str]:
    return [
        f"{line}: import {module} by its full name, outrider.…"
        for module, line in imports_of(source)
        if module.startswith(".") or module.split(".")[0] in (*LAYERS, "deploy", "tests")
    ]


def pickles(source: str) -> list[str]:
    """Complain of pickle modules and of torch.distributed's object collectives, which pickle."""
    modules = [f"{line}: {name}" for name, line in imports_of(source) if name.split(".")[0] in PICKLES]
    return modules + [
        f"{node.lineno}: {node.attr} pickles"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and node.attr in OBJECT_COLLECTIVES
    ]


def pickling_pipes(source: str) -> list[str]:
    """Complain of Connection.send/recv and of process queues wherever multiprocessing is imported.

    `send` with other than one argument and `recv` with any are not a Connection's, so they pass.
    """
    if not any(name.startswith("multiprocessing") for name, _ in imports_of(source)):
        return []
    nodes = list(ast.walk(ast.parse(source)))
    num_arguments = {node.func: len(node.args) + len(node.keywords) for node in nodes if isinstance(node, ast.Call)}
    return [
        f"{node.lineno}: {ast.unparse(node)} pickles; a Connection has send_bytes and recv_bytes"
        for node in nodes
        if isinstance(node, ast.Attribute)
        and (
            num_arguments.get(node, CONNECTION_METHODS.get(node.attr)) == CONNECTION_METHODS.get(node.attr, -1)
            or (node.attr in PROCESS_QUEUES and ast.unparse(node.value) not in ("asyncio", "queue"))
        )
    ]


def prints(source: str) -> list[str]:
    return [
        f"{node.lineno}: print"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def long_functions(source: str) -> list[str]:
    return [
        f"{node.lineno}: {node.name} has {size} lines, at most {MAX_FUNCTION_LINES} are allowed"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (size := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]


def long_file(source: str) -> list[str]:
    size = len(source.splitlines())
    return [f"{size} lines, at most {MAX_FILE_LINES} are allowed"] if size > MAX_FILE_LINES else []


def runtime_imports(source: str) -> set[str]:
    """Return what importing the module may import: not what stands under `if TYPE_CHECKING`."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            node.body = [ast.Pass()]
    return {module for module, _ in imports_of(ast.unparse(tree))}


def impure_path(start: str, graph: dict[str, set[str]]) -> list[str] | None:
    """Return a chain of imports from our module `start` to a banned library, or None.

    `graph` maps our modules to everything they import. Importing a.b.c runs a.b as well.
    """
    seen, paths = {start}, [[start]]
    while paths:
        path = paths.pop()
        for target in sorted(graph.get(path[-1], ())):
            if target.split(".")[0] in BANNED_IN_PURE:
                return [*path, target]
            parent = target.rpartition(".")[0]
            for module in {target, parent} & graph.keys() - seen:
                seen.add(module)
                paths.append([*path, module])
    return None


def sources(folder: str) -> list[Path]:
    """Our hand-written modules of a folder."""
    return sorted(path for path in (ROOT / folder).rglob("*.py") if "_pb2" not in path.name)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("outrider", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def complaints(paths: list[Path], rule: Rule) -> list[str]:
    return [f"{path.relative_to(ROOT)}:{problem}" for path in paths for problem in rule(path.read_text())]


def is_pure(path: Path) -> bool:
    room = str(path.parent.relative_to(ROOT))
    return room in PURE_MODULES and (not PURE_MODULES[room] or path.stem in PURE_MODULES[room])


PACKAGED = [path for layer in LAYERS for path in sources(layer)]
ALL = [*PACKAGED, *sources("tests"), *sources("deploy")]


# The repository.


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_left_only(layer: str) -> None:
    assert not complaints(sources(layer), lambda source: arrow_violations(source, layer))


@pytest.mark.parametrize("rule", [pickles, pickling_pipes, prints, long_file, unprefixed_imports, long_functions])
def test_packages_keep_the_house_rules(rule: Rule) -> None:
    assert not complaints(PACKAGED, rule)


@pytest.mark.parametrize("rule", [unprefixed_imports, long_functions, pickles])
def test_tests_keep_the_house_rules(rule: Rule) -> None:
    assert not complaints(sources("tests"), rule)


@pytest.mark.parametrize(
    "path",
    [path for path in PACKAGED if is_pure(path)],
    ids=module_name,
)
def test_policies_need_no_torch_ray_or_grpc(path: Path) -> None:
    graph = {module_name(other): runtime_imports(other.read_text()) for other in PACKAGED}
    assert impure_path(module_name(path), graph) is None


def test_shells_start_without_model_code() -> None:
    """It takes seconds of a core to import, and a service starts several shells at once."""
    source = """
        import sys
        from outrider.cluster.replicas import drafter_replica, gateway_replica, router_replica, verifier_replica
        print(sys.modules.keys() & {"torch", "transformers", "outrider.drafter_service.service.drafters"})
    """
    found = subprocess.run([sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_the_rules_see_the_sources() -> None:
    names = {module_name(path) for path in PACKAGED}
    assert {"outrider.verifier_service.messages.wire", "outrider.proto.generate", "outrider.cluster"} <= names


# The rules.


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("proto", "from outrider.verifier_service.messages.wire import encode"),
        ("verifier_service", "from outrider.drafter_service import sessions"),
        ("verifier_service", "from outrider import cluster"),
        ("verifier_service", "def f():\n    import outrider.cluster.router.router"),
        ("drafter_service", "from outrider.cluster.config.service_config import Config"),
        ("cluster", "import outrider.deploy.render"),
        ("cluster", "from outrider.tests.fakes import FakeClock"),
    ],
)
def test_an_arrow_to_the_right_is_caught(layer: str, source: str) -> None:
    assert arrow_violations(source, layer)


def test_an_arrow_to_the_left_is_fine() -> None:
    source = "from outrider.verifier_service.messages import wire\nfrom outrider.proto import link_pb2\nimport torch"
    for layer in LAYERS[1:]:
        assert not arrow_violations(source, layer)


@pytest.mark.parametrize(
    "source",
    [
        "import proto",
        "import cluster.router",
        "from verifier_service import wire",
        "from . import x",
        "from ..a import b",
    ],
)
def test_an_unprefixed_import_is_caught(source: str) -> None:
    assert unprefixed_imports(source)
    assert not unprefixed_imports("from outrider.proto import link_pb2\nimport protocol")


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import ray, cloudpickle",
        "import torch.distributed as dist\ndist.broadcast_object_list([1])",
    ],
)
def test_pickle_is_caught(source: str) -> None:
    assert pickles(source)
    assert not pickles("import msgpack\nmsgpack.packb({})")


@pytest.mark.parametrize(
    "source",
    [
        "from multiprocessing import Pipe\nleft, right = Pipe()\nleft.send({})",
        "from multiprocessing.connection import Connection\ndef f(link: Connection):\n    return link.recv()",
        "import multiprocessing\ndef f(link):\n    return map(link.send, [1])",
        "import multiprocessing\nqueue = multiprocessing.get_context('spawn').Queue()",
    ],
)
def test_a_pickling_pipe_is_caught(source: str) -> None:
    assert pickling_pipes(source)


def test_what_does_not_pickle_passes() -> None:
    pipe = "from multiprocessing import Pipe\nleft, right = Pipe()\n"
    assert not pickling_pipes(pipe + "left.send_bytes(right.recv_bytes())")
    assert not pickling_pipes(pipe + "drafters.send('drafter', [])\nsocket.recv(4)\nasyncio.Queue()")
    assert not pickling_pipes("def f(sender):\n    sender.send(1)")


def test_a_print_is_caught() -> None:
    assert prints("def f():\n    print('x')")
    assert not prints("console.print('x')")


def test_a_long_function_is_caught_and_named() -> None:
    longest = "def f():\n" + "    x = 1\n" * (MAX_FUNCTION_LINES - 1)
    assert not long_functions(longest)
    assert long_functions("async " + longest + "    x = 1\n") == ["1: f has 61 lines, at most 60 are allowed"]


def test_a_long_file_is_caught() -> None:
    assert not long_file("x = 1\n" * MAX_FILE_LINES)
    assert long_file("x = 1\n" * (MAX_FILE_LINES + 1))


GRAPH = {
    "outrider.a": {"outrider.b", "math"},
    "outrider.b": {"outrider.pack.c", "outrider.pack.c.Name"},
    "outrider.pack": {"ray.serve"},
    "outrider.pack.c": {"outrider.a"},
}


def test_a_banned_library_is_found_through_other_modules_and_their_packages() -> None:
    assert impure_path("outrider.a", GRAPH) == ["outrider.a", "outrider.b", "outrider.pack", "ray.serve"]
    assert impure_path("outrider.x", {"outrider.x": {"torch"}}) == ["outrider.x", "torch"]
    assert impure_path("outrider.a", GRAPH | {"outrider.pack": set()}) is None


def test_an_import_for_type_checkers_is_no_runtime_import() -> None:
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\nelse:\n    import ray"
    assert runtime_imports(source) == {"typing", "typing.TYPE_CHECKING", "ray"}
