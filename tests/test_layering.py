"""The rooms, the arrows between them, and the house's limits, held by reading the sources.

Every rule is a function from source text (or an import graph) to complaints, tested on a snippet that breaks it.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from rooms import LAYERS, ROOT, Room, cycle, imported, module_name, parsed, read_rooms, rooms_of, sources

# Every folder of modules, and the rooms that it may import, typing included; in its own layer a room goes by its name.
ROOMS = {
    "proto": "",
    # the target model: what crosses, what executes, what decides
    "verifier_service": "",
    "verifier_service/messages": "proto",
    "verifier_service/cpu": "verifier_service",
    "verifier_service/gpu": "",
    "verifier_service/experts": "messages gpu",
    "verifier_service/formats": "verifier_service",
    "verifier_service/model": "verifier_service messages cpu gpu experts formats",
    "verifier_service/sampling": "messages gpu model",
    "verifier_service/scheduling": "messages",
    "verifier_service/pricing": "messages scheduling",
    "verifier_service/links": "verifier_service proto messages",
    "verifier_service/drafting": "messages pricing links",  # and neither model code nor Ray: other engines stand on it
    "verifier_service/refit": "messages formats model",
    "verifier_service/handover": "messages model links",
    "verifier_service/engine": (
        "verifier_service proto messages gpu experts model sampling scheduling pricing links drafting refit handover"
    ),
    # who drafts
    "drafter_service": "engine service verifier_service/messages",  # the names that plug-ins import
    "drafter_service/engine": (
        "verifier_service/messages verifier_service/gpu verifier_service/sampling verifier_service/scheduling "
        "verifier_service/pricing verifier_service/links verifier_service/engine"
    ),
    "drafter_service/lookup": "engine verifier_service/messages",
    "drafter_service/heads": "verifier_service/messages verifier_service/formats verifier_service/model",
    "drafter_service/head_drafters": (
        "engine heads verifier_service/messages verifier_service/gpu verifier_service/model"
    ),
    "drafter_service/models": (
        "engine heads verifier_service/messages verifier_service/gpu verifier_service/model verifier_service/engine"
    ),
    "drafter_service/target": (
        "engine verifier_service/messages verifier_service/model verifier_service/scheduling verifier_service/engine"
    ),
    "drafter_service/observing": "engine verifier_service/messages",
    "drafter_service/service": (
        "proto engine observing lookup heads head_drafters models target verifier_service verifier_service/messages "
        "verifier_service/formats verifier_service/model verifier_service/links verifier_service/engine "
        "verifier_service/refit"
    ),
    "drafter_service/embedded": "service",
    "drafter_service/shipped": "service",
    "drafter_service/training": (
        "engine heads models target service verifier_service verifier_service/messages verifier_service/formats "
        "verifier_service/model verifier_service/engine"
    ),
    "drafter_service/learning": (
        "engine heads service training verifier_service verifier_service/messages verifier_service/formats "
        "verifier_service/model verifier_service/engine"
    ),
    # the service around them
    "cluster": "scaling replicas offline hosted",  # the names that users' configurations and programs import
    "cluster/common": "verifier_service/messages verifier_service/links",
    "cluster/router": "common verifier_service/messages drafter_service/learning",
    "cluster/scaling": "router verifier_service/messages",
    "cluster/monitoring": "router verifier_service/messages drafter_service/learning",
    "cluster/gateway": (
        "common router monitoring proto verifier_service verifier_service/messages verifier_service/links "
        "drafter_service/learning"
    ),
    "cluster/peers": "common gateway proto verifier_service/messages verifier_service/links",
    "cluster/web": "",
    "cluster/replies": "common verifier_service/messages",
    "cluster/api/anthropic": "common gateway replies",
    "cluster/api/openai": "common gateway replies web api/anthropic verifier_service/messages",
    "cluster/api/rollouts": "common gateway peers api/openai verifier_service/messages",
    "cluster/api": "common gateway peers web api/openai proto verifier_service/messages drafter_service/learning",
    "cluster/vllm_engine": (
        "hosted verifier_service verifier_service/messages verifier_service/model verifier_service/engine"
    ),
    "cluster/config": (
        "common router scaling replies vllm_engine verifier_service verifier_service/messages verifier_service/model "
        "verifier_service/links verifier_service/engine drafter_service/service drafter_service/learning "
        "drafter_service/embedded drafter_service/shipped"
    ),
    "cluster/replicas": (
        "common router scaling monitoring gateway peers replies api api/openai api/rollouts config vllm_engine proto "
        "verifier_service verifier_service/messages verifier_service/model verifier_service/links "
        "verifier_service/engine drafter_service/engine drafter_service/service drafter_service/learning"
    ),
    "cluster/hosted": (  # within another engine's process: no Ray, no transformers at import, nothing of drafters
        "common router proto verifier_service/messages verifier_service/model verifier_service/scheduling "
        "verifier_service/pricing verifier_service/links verifier_service/drafting verifier_service/engine"
    ),
    "cluster/offline": (
        "common router monitoring gateway config verifier_service verifier_service/messages verifier_service/model "
        "verifier_service/links verifier_service/engine verifier_service/refit drafter_service/engine "
        "drafter_service/service"
    ),
    "cluster/client": "common",
    "cluster/cli": (  # its verbs' options, which the laboratory's verbs have, too
        "common replies config replicas offline client verifier_service/model drafter_service/service "
        "drafter_service/training"
    ),
    # what measures, simulates and shows it; nothing above imports this
    "lab": "cluster/common verifier_service/messages verifier_service/model verifier_service/sampling",
    "lab/bench": (
        "lab replay cluster/common cluster/config cluster/offline cluster/client verifier_service/messages "
        "verifier_service/model verifier_service/engine verifier_service/pricing verifier_service/sampling "
        "drafter_service/heads drafter_service/head_drafters drafter_service/service drafter_service/embedded"
    ),
    "lab/peers": (
        "lab bench cluster/common cluster/config cluster/offline verifier_service/formats verifier_service/model "
        "drafter_service/service"
    ),
    "lab/gateway": (
        "lab cluster/common cluster/config cluster/replicas proto verifier_service verifier_service/messages "
        "verifier_service/model verifier_service/sampling verifier_service/links verifier_service/engine"
    ),
    "lab/corpus": "cluster/offline drafter_service/training",
    "lab/head": (
        "lab corpus cluster/common cluster/config cluster/offline verifier_service/messages verifier_service/model "
        "drafter_service/service drafter_service/training"
    ),
    "lab/embedded": "drafter_service/embedded drafter_service/service drafter_service/training",
    "lab/replay": "verifier_service/messages drafter_service/engine drafter_service/lookup",
    "lab/simulate": (
        "lab replay cluster/common cluster/router cluster/scaling verifier_service/messages verifier_service/pricing "
        "verifier_service/scheduling"
    ),
    "lab/demo": (
        "lab cluster/common cluster/router cluster/scaling cluster/gateway cluster/config cluster/replicas "
        "cluster/client proto verifier_service/messages verifier_service/model drafter_service/embedded"
    ),
    "lab/cli": (  # nothing imports it
        "lab bench gateway peers corpus head replay simulate demo cluster/common cluster/scaling cluster/config "
        "cluster/replicas cluster/offline cluster/client cluster/cli"
    ),
}
VERSION = "outrider.__version__"  # all that the package itself has: the root's __init__.py
MAX_ROOM_FILES = 25
PURE_MODULES = {  # a room's modules; of those with none named, all
    "verifier_service/messages": ("batch", "draft", "request", "tree"),
    "verifier_service/scheduling": (),
    "verifier_service/pricing": (),
    "cluster/router": (
        *("routing", "planning", "drafter_assignment", "router", "fleet"),
    ),
    "cluster/scaling": ("autoscaling", "figures"),
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
    for module, name, line in imported(source):
        yield module, line
        if name:
            yield f"{module}.{name}", line


def arrow_violations(source: str, layer: str) -> list[str]:
    allowed = LAYERS[: LAYERS.index(layer) + 1]
    return [
        f"{line}: {layer} imports {module}"
        for module, line in imports_of(source)
        if module.startswith("outrider.") and module != VERSION and module.split(".")[1] not in allowed
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
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.Attribute) and node.attr in OBJECT_COLLECTIVES
    ]


def pickling_pipes(source: str) -> list[str]:
    """Complain of Connection.send/recv and of process queues wherever multiprocessing is imported.

    `send` with other than one argument and `recv` with any are not a Connection's, so they pass.
    """
    if not any(name.startswith("multiprocessing") for name, _ in imports_of(source)):
        return []
    nodes = list(ast.walk(parsed(source)))
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
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def swallowed_cancellations(source: str) -> list[str]:
    """Find `asyncio.wait_for`: on Python 3.11 it returns a result that comes with a cancellation, and forgets that."""
    return [
        f"{node.lineno}: asyncio.wait_for may swallow a cancellation; asyncio.timeout does not"
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "asyncio.wait_for"
    ]


def long_functions(source: str) -> list[str]:
    return [
        f"{node.lineno}: {node.name} has {size} lines, at most {MAX_FUNCTION_LINES} are allowed"
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (size := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]


def long_file(source: str) -> list[str]:
    size = len(source.splitlines())
    return [f"{size} lines, at most {MAX_FILE_LINES} are allowed"] if size > MAX_FILE_LINES else []


def names_laboratory(source: str) -> bool:
    """Return whether a text within the source is the name of a module of the laboratory."""
    texts = [node.value for node in ast.walk(parsed(source)) if isinstance(node, ast.Constant)]
    return any(isinstance(text, str) and text.startswith("outrider.lab") for text in texts)


def runtime_imports(source: str) -> set[str]:
    """Return what importing the module may import: not what stands under `if TYPE_CHECKING`."""
    tree = ast.parse(source)  # its own: it is changed
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            node.body = [ast.Pass()]
    return {module for module, _ in imports_of(ast.unparse(tree))}


def impure_path(start: str, graph: dict[str, set[str]], banned: frozenset[str] = BANNED_IN_PURE) -> list[str] | None:
    """Return a chain of imports from our module `start` to a banned library, or None.

    `graph` maps our modules to everything they import. Importing a.b.c runs a.b as well.
    """
    seen, paths = {start}, [[start]]
    while paths:
        path = paths.pop()
        for target in sorted(graph.get(path[-1], ())):
            if target.split(".")[0] in banned:
                return [*path, target]
            parent = target.rpartition(".")[0]
            for module in {target, parent} & graph.keys() - seen:
                seen.add(module)
                paths.append([*path, module])
    return None


def allowed_arrows(table: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the table with all names in full."""
    return {
        room: {other if other in table else f"{room.split('/')[0]}/{other}" for other in others.split()}
        for room, others in table.items()
    }


def room_violations(rooms: Mapping[str, Room], allowed: Mapping[str, set[str]]) -> list[str]:
    """Complain of rooms that the table lacks or has too many of, and of arrows likewise."""
    problems = [f"{room} is not in the table" for room in rooms.keys() - allowed.keys()]
    problems += [f"{room} is in the table only" for room in allowed.keys() - rooms.keys()]
    for name, room in rooms.items():
        may = allowed.get(name, set())
        problems += [f"{name} may not import {other}: {room.arrows[other]}" for other in room.arrows.keys() - may]
        problems += [f"{name} does not import {other} any more" for other in may - room.arrows.keys()]
        if room.num_files > MAX_ROOM_FILES:
            problems.append(f"{name} has {room.num_files} files, at most {MAX_ROOM_FILES} find their way")
    return sorted(problems)


def complaints(paths: list[Path], rule: Rule) -> list[str]:
    return [f"{path.relative_to(ROOT)}:{problem}" for path in paths for problem in rule(path.read_text())]


@functools.cache
def runtime_graph() -> dict[str, set[str]]:
    """Map every module to what it imports when it is loaded."""
    return {module_name(path): runtime_imports(path.read_text()) for path in PACKAGED}


def is_pure(path: Path) -> bool:
    room = str(path.parent.relative_to(ROOT))
    return room in PURE_MODULES and (not PURE_MODULES[room] or path.stem in PURE_MODULES[room])


PACKAGED = [ROOT / "__init__.py", *(path for layer in LAYERS for path in sources(ROOT / layer))]
ALL = [*PACKAGED, *sources(ROOT / "tests"), *sources(ROOT / "deploy")]


# The repository.


def test_rooms_import_what_the_table_says() -> None:
    assert room_violations(read_rooms(), allowed_arrows(ROOMS)) == []


def test_the_package_imports_nothing_of_the_tests() -> None:
    folders = {path.name for path in (ROOT / "tests").iterdir()}
    names = [module for path in PACKAGED for module, _ in imports_of(path.read_text())]
    assert not {module.split(".")[0] for module in names} & (folders - {"proto"})


def test_nothing_that_serves_names_the_laboratory_but_the_table_of_verbs() -> None:
    """What imports it is an arrow to the right; what loads it by its name is found here."""
    served = [path for layer in LAYERS if layer != "lab" for path in sources(ROOT / layer)]
    assert [module_name(path) for path in served if names_laboratory(path.read_text())] == ["outrider.cluster.cli.main"]


def test_the_package_itself_imports_no_room() -> None:
    assert not [name for name, _ in imports_of((ROOT / "__init__.py").read_text()) if name.startswith("outrider")]


def test_no_two_rooms_import_each_other() -> None:
    assert cycle(allowed_arrows(ROOMS)) is None


def test_the_halls_of_tests_are_rooms_as_well() -> None:
    folders = {path.parent for path in sources(ROOT / "tests")}
    assert not [folder for folder in folders if len(list(folder.glob("*.py"))) > MAX_ROOM_FILES]


def test_another_engine_can_stand_on_the_verifiers_side_of_drafting() -> None:
    """Sessions, deadlines, prices, messages and links: without transformers and without Ray."""
    rooms = ("messages", "pricing", "links", "drafting")
    modules = [module_name(path) for room in rooms for path in sources(ROOT / "verifier_service" / room)]
    source = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\n"
    source += "print(sys.modules.keys() & {'transformers', 'ray'})"
    found = subprocess.run([sys.executable, "-c", source, *modules], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_left_only(layer: str) -> None:
    assert not complaints(sources(ROOT / layer), lambda source: arrow_violations(source, layer))


@pytest.mark.parametrize(
    "rule", [pickles, pickling_pipes, prints, swallowed_cancellations, long_file, unprefixed_imports, long_functions]
)
def test_packages_keep_the_house_rules(rule: Rule) -> None:
    assert not complaints(PACKAGED, rule)


@pytest.mark.parametrize("rule", [unprefixed_imports, long_functions, pickles])
def test_tests_keep_the_house_rules(rule: Rule) -> None:
    assert not complaints(sources(ROOT / "tests"), rule)


@pytest.mark.parametrize(
    "path",
    [path for path in PACKAGED if is_pure(path)],
    ids=module_name,
)
def test_policies_need_no_torch_ray_or_grpc(path: Path) -> None:
    assert impure_path(module_name(path), runtime_graph()) is None


@pytest.mark.parametrize("name", ["cluster.offline.llm", "cluster.cli.generate", "lab.bench.gpu"])
def test_what_generates_without_a_server_needs_no_ray(name: str) -> None:
    assert impure_path(f"outrider.{name}", runtime_graph(), frozenset({"ray"})) is None


def test_shells_start_without_model_code() -> None:
    """It takes seconds of a core to import, and a service starts several shells at once."""
    source = """
        import sys
        from outrider.cluster.replicas import drafter_replica, gateway_replica, router_replica, verifier_replica
        heavy = {"torch", "transformers", "pandas", "scipy", "pyarrow", "sympy", "triton", "PIL"}
        print(sys.modules.keys() & {*heavy, "outrider.drafter_service.service.drafters"})
    """
    found = subprocess.run([sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_a_gateway_reads_its_model_and_its_answers_without_torch() -> None:
    source = """
        import sys
        from outrider.cluster.gateway.text_codec import TextCodec
        from outrider.cluster.replicas.gateway_replica import model_info
        from outrider.cluster.replies.reader import ReplySyntax
        from outrider.cluster.replies.tools import read_tool_use
        from outrider.drafter_service.embedded import target_path
        from outrider.verifier_service.messages.request import AcceptanceRule, LogprobsMode
        from outrider.verifier_service.model.config import ModelConfig
        from outrider.verifier_service.model.tokenizer import load_tokenizer
        from outrider.verifier_service.without_torch import import_transformers
        import_transformers()
        model = ModelConfig(path=str(target_path()))
        text = TextCodec(load_tokenizer(model))
        assert model_info("m", model, 100, AcceptanceRule.STANDARD, LogprobsMode.RAW).vocab_size == 2048
        prompt = text.render_chat_now([{"role": "user", "content": "hello"}])
        assert text.encode_now(prompt, add_special_tokens=False)
        use = read_tool_use([{"type": "function", "function": {"name": "f", "parameters": {}}}], None, None)
        reader = ReplySyntax(tool_call_parser="hermes").reader(prompt, use, is_constrained=False)
        assert reader.read(["hello"], is_last=True).content == "hello"
        print(sys.modules.keys() & {"torch", "pandas", "scipy", "pyarrow", "sympy", "triton"})
        import torch  # whoever needs it finds it
    """
    found = subprocess.run([sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, check=True)
    assert (found.stdout.strip(), found.stderr) == ("set()", "")


def test_the_rules_see_the_sources() -> None:
    names = {module_name(path) for path in PACKAGED}
    assert {"outrider.verifier_service.messages.wire", "outrider.proto.generate", "outrider.cluster"} <= names


# The rules.


HOUSE = {
    "outrider.a.x": ("a", "from outrider.b import y"),
    "outrider.b": ("b", ""),
    "outrider.b.y": ("b", "def f():\n    import outrider.a.x"),
    "outrider.c": ("c", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from outrider.b.y import Thing"),
}


def test_arrows_are_found_also_within_functions_and_for_typing() -> None:
    rooms = rooms_of(HOUSE)
    assert {name: room.arrows for name, room in rooms.items()} == {
        "a": {"b": ["outrider.a.x:1"]},
        "b": {"a": ["outrider.b.y:2"]},
        "c": {"b": ["outrider.c:3"]},
    }
    assert (rooms["b"].num_files, rooms["b"].num_lines) == (2, 2)


def test_an_arrow_that_the_table_lacks_is_caught_and_so_is_one_that_it_no_longer_needs() -> None:
    table = {"a": {"b"}, "b": {"a"}, "c": {"b"}}
    assert room_violations(rooms_of(HOUSE), table) == []
    assert room_violations(rooms_of(HOUSE), {**table, "c": {"a"}}) == [
        "c does not import a any more",
        "c may not import b: ['outrider.c:3']",
    ]
    assert room_violations(rooms_of(HOUSE), {"a": {"b"}, "b": {"a"}, "d": set()}) == [
        "c is not in the table",
        "c may not import b: ['outrider.c:3']",
        "d is in the table only",
    ]


def test_a_hall_is_caught() -> None:
    hall = {f"outrider.a.m{index}": ("a", "") for index in range(MAX_ROOM_FILES + 1)}
    assert room_violations(rooms_of(hall), {"a": set()}) == ["a has 26 files, at most 25 find their way"]


def test_rooms_that_import_each_other_are_caught() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None


def test_names_in_the_table_are_those_of_the_same_layer() -> None:
    table = {"proto": "", "cluster/api": "web api/openai proto", "cluster/web": "", "cluster/api/openai": ""}
    assert allowed_arrows(table)["cluster/api"] == {"proto", "cluster/web", "cluster/api/openai"}


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
        ("cluster", "def f():\n    from outrider.lab.bench.pairs import pairs"),
    ],
)
def test_an_arrow_to_the_right_is_caught(layer: str, source: str) -> None:
    assert arrow_violations(source, layer)


def test_an_arrow_to_the_left_is_fine() -> None:
    source = "from outrider.verifier_service.messages import wire\nfrom outrider.proto import link_pb2\nimport torch\n"
    source += "from outrider import __version__"
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


def test_a_wait_that_may_swallow_a_cancellation_is_caught() -> None:
    assert swallowed_cancellations("async def f():\n    await asyncio.wait_for(g(), 1)")
    assert not swallowed_cancellations("lock.wait_for(ready)")


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


def test_a_module_of_the_laboratory_is_seen_in_a_text() -> None:
    assert names_laboratory("import_module('outrider.lab.bench')")
    assert not names_laboratory("import_module('outrider.cluster.cli')")


def test_an_import_for_type_checkers_is_no_runtime_import() -> None:
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\nelse:\n    import ray"
    assert runtime_imports(source) == {"typing", "typing.TYPE_CHECKING", "ray"}
