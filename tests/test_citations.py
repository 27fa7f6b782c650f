"""What prose cites is there: files, folders, modules, what is in them, and headings of pages.

Prose is a Markdown page, a docstring, a comment, the help of an option. These are citations: a path or a name with a
suffix that files here have (`deploy/serve.yaml`, `step_price.py`), a folder (`cluster/router`), a module and a name in
it (`outrider.cluster.app:build_app`, `SLOW` in step_lessons.py), a page and a heading (docs/architecture.md, "Words").
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path, PurePosixPath

import pytest

from checkout import ROOT, own_files

LAYERS = ("proto", "verifier_service", "drafter_service", "cluster", "lab", "tests", "deploy", "docs", "examples")

# Names of files that are not here, and why they may be cited all the same.
ELSEWHERE = {
    "keys.txt": "users make it: API keys",
    "server.pem": "users make it: a certificate",
    "clients.pem": "users make it: a certificate",
    "replica.pem": "users make it: a certificate",
    "fleet.pem": "users make it: a certificate",
    "FILE.jsonl": "stands for a file of prompts",
    "load.json": "a command beside it writes it",
    "load.png": "a command beside it writes it",
    "results.json": "a command beside it writes it",
    "STEP.md": "a command beside it writes it",
    "figures.json": "`outrider make-head` writes it",
    "figures.md": "`outrider make-head` writes it",
    "ray/serve/_private/replica_result.py": "Ray's",
}

SUFFIXES = (
    *("py", "pyi", "proto", "js", "css", "html", "sh", "md", "txt", "json", "jsonl", "yaml", "yml", "toml"),
    *("gz", "png", "svg", "pem", "safetensors"),
)
# Not within a longer word, path or address. `*` and `<what>` stand for anything.
FILE = re.compile(
    rf"(?<![\w/.:@$~-])(?:[\w*{{}}<>.-]+/)*[\w*{{}}<>.-]*[\w}}*>]\.(?:{'|'.join(SUFFIXES)})\b(?![\w(/]|\.\w)"
)
MODULE = re.compile(rf"(?<![\w/.])outrider\.((?:{'|'.join(LAYERS)})(?:\.\w+)*)(?::(\w+))?")
FOLDER = re.compile(rf"(?<![\w/.:@$~-])((?:{'|'.join(LAYERS)})(?:/\w+)+)(?![\w/.*<{{-]*\.\w)")
WITHIN = re.compile(r"((?:`\w+`(?:, | and | or ))*`\w+`) in (?:`|\[[^]]*\]\((?:\.\./)*)?((?:\w+/)*\w+\.py)\b")
WORD = re.compile(r"`(\w+)`")
HEADING = re.compile(r'(?<![\w/.])([\w/.-]+\.md)`?, "([^"]+)"')
HINT = re.compile(rf"\.(?:{'|'.join(SUFFIXES)})\b|outrider\.|\b(?:{'|'.join(LAYERS)})/")
IMPORT = re.compile(r"\s*(?:from|import) outrider\.")
HASH_COMMENTS = {".yaml", ".yml", ".toml", ".sh", ".dockerignore", ""}  # "": Makefile, Dockerfile, .ci/run
SLASH_COMMENTS = {".proto", ".js", ".css"}
HELP_ARGUMENTS = {"help", "short_help", "epilog", "description"}


@dataclass(frozen=True, slots=True)
class Tree:
    """The files of a checkout, as paths from its root."""

    paths: frozenset[str]
    names: frozenset[str]

    @classmethod
    def of(cls, paths: list[str]) -> Tree:
        return cls(frozenset(paths), frozenset(PurePosixPath(path).name for path in paths))

    def has(self, cited: str, page: str) -> bool:
        """Tell whether a file is there: a path from the root or from the page that cites it, or a name anywhere."""
        if "/" not in cited:
            return self._matches(cited, self.names)
        return self._matches(cited, self.paths) or self._matches(_joined(page, cited), self.paths)

    @staticmethod
    def _matches(cited: str, known: frozenset[str]) -> bool:
        pattern = re.sub(r"<\w+>|\{\w+\}", "*", cited)
        return cited in known or ("*" in pattern and any(fnmatch(path, pattern) for path in known))


def _joined(page: str, cited: str) -> str:
    parts: list[str] = []
    for part in (*PurePosixPath(page).parts[:-1], *PurePosixPath(cited).parts):
        parts = parts[:-1] if part == ".." else [*parts, part]
    return "/".join(part for part in parts if part != ".")


def file_problems(text: str, page: str, tree: Tree) -> list[str]:
    """Complain of files that are cited and are neither there nor known to be elsewhere."""
    cited = sorted({found[0] for found in FILE.finditer(text)} - ELSEWHERE.keys())
    return [f"{page}: {name} is not there" for name in cited if not tree.has(name, page)]


def module_problems(text: str, page: str, root: Path = ROOT) -> list[str]:
    """Complain of modules, and of names within modules, that are cited and are not there."""
    cited = sorted({(found[1], found[2] or "") for found in MODULE.finditer(text)})
    return [
        f"{page}: outrider.{name}{':' if within else ''}{within} is not there"
        for name, within in cited
        if not _has_module(root, (*name.split("."), *filter(None, [within])))
    ]


def _has_module(root: Path, parts: tuple[str, ...]) -> bool:
    """Tell whether a package, a module, or a module that says the next name is there."""
    depth = next((depth for depth in range(len(parts)) if not root.joinpath(*parts[: depth + 1]).is_dir()), len(parts))
    if depth == len(parts):
        return True
    module = root.joinpath(*parts[: depth + 1]).with_suffix(".py")
    rest = parts[depth + 1 :] if module.exists() else parts[depth:]
    module = module if module.exists() else root.joinpath(*parts[:depth], "__init__.py")
    return module.exists() and (not rest or re.search(rf"\b{rest[0]}\b", module.read_text()) is not None)


def folder_problems(text: str, page: str, root: Path = ROOT) -> list[str]:
    """Complain of folders, and of modules cited without their suffix, that are not there."""
    cited = sorted({found[1] for found in FOLDER.finditer(text)})
    return [
        f"{page}: {name} is not there"
        for name in cited
        if not (root / name).exists() and not (root / name).with_suffix(".py").exists()
    ]


def within_problems(text: str, page: str, sources: Mapping[str, str]) -> list[str]:
    """Complain of a `name` in a module that does not define it; a module that is not there is left out."""
    problems = []
    for name, cited in sorted({(name, cited) for names, cited in WITHIN.findall(text) for name in WORD.findall(names)}):
        modules = [source for path, source in sources.items() if f"/{path}".endswith(f"/{cited}")]
        if modules and not any(_defines(source, name) for source in modules):
            problems.append(f"{page}: {name} is not in {cited}")
    return problems


def _defines(source: str, name: str) -> bool:
    """Tell whether a module defines or assigns a name, or has it as a key or a name of an option."""
    definition = rf"^ *(async def|def|class) {name}\b|\b{name}\b *[:=]|[\"']{name}[\"']"
    return re.search(definition, source, re.MULTILINE) is not None


def heading_problems(text: str, page: str, root: Path = ROOT) -> list[str]:
    """Complain of headings that are cited and that the page lacks."""
    return [
        f'{page}: {target} has no heading "{heading}"'
        for target, heading in HEADING.findall(text)
        if (root / target).exists() and heading not in headings((root / target).read_text())
    ]


def headings(markdown: str) -> set[str]:
    return set(re.findall(r"^#+ +(.+?) *$", markdown, re.MULTILINE))


def prose(name: str, text: str) -> str:
    """Return what a file says to people, each piece on a line of its own; "" of a file that only holds data."""
    suffix = PurePosixPath(name).suffix
    if suffix == ".md":
        return text
    if suffix == ".py":
        return "\n".join(" ".join(piece.split()) for piece in _python_prose(text))
    if suffix in HASH_COMMENTS:
        return "\n".join(re.findall(r"(?:^|\s)#(.*)", text))
    if suffix in SLASH_COMMENTS:
        return "\n".join("".join(found) for found in re.findall(r"(?s)/\*(.*?)\*/|(?:^|\s)//([^\n]*)", text))
    return ""


def _python_prose(source: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
        elif isinstance(node, ast.keyword) and node.arg in HELP_ARGUMENTS:
            yield from (
                part.value
                for part in ast.walk(node.value)
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
            )


@cache
def texts() -> dict[str, str]:
    """Return the hand-written files that may say something, by their paths."""
    suffixes = {".md", ".py", *HASH_COMMENTS, *SLASH_COMMENTS}
    return {
        path: (ROOT / path).read_text()
        for path in own_files()
        if PurePosixPath(path).suffix in suffixes and "_pb2" not in path
    }


def problems(path: str, text: str, tree: Tree) -> list[str]:
    """Complain of what a file's prose cites. To parse takes long: only what has a suspect line, or cites a page, is."""

    def found(said: str) -> list[str]:
        return [
            *file_problems(said, path, tree),
            *module_problems(said, path),
            *folder_problems(said, path),
            *within_problems(said, path, texts()),
            *heading_problems(said, path),
        ]

    lines = [line for line in text.splitlines() if HINT.search(line) and not IMPORT.match(line)]
    suspect = found("\n".join(lines)) or any(".md" in line for line in lines)
    return found(prose(path, text)) if suspect else []


# The repository.


def folder_of(path: str) -> str:
    return "/".join(PurePosixPath(path).parts[:-1][:2]) or "."


@pytest.mark.parametrize("folder", sorted({folder_of(path) for path in texts()}))
def test_what_is_cited_is_there(folder: str) -> None:
    tree = Tree.of(list(own_files()))
    mine = {path: text for path, text in texts().items() if folder_of(path) == folder}
    assert not [problem for path, text in mine.items() for problem in problems(path, text, tree)]


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_is_elsewhere_is_cited_and_not_here(name: str) -> None:
    assert name not in Tree.of(list(own_files())).names
    assert any(name in text for path, text in texts().items() if path != "tests/test_citations.py")


# The rules.

TREE = Tree.of(["deploy/serve.yaml", "deploy/kuberay/pdb.yaml", "a/step_price.py", "proto/link_pb2.py", "docs/a.md"])


@pytest.mark.parametrize(
    "text",
    [
        "see step_price.py, `deploy/serve.yaml`.",
        "(deploy/kuberay/pdb.yaml)",
        "[rates](kuberay/pdb.yaml#rates) and ./serve.yaml and ../docs/a.md",
        "all of *_pb2.py, <name>_pb2.py, {name}_pb2.py",
        "https://example.org/x.md, ~/keys.pem, $HOME/x.txt, x.pyramid, path.py(3), a.json.x",
        "keys.txt, ray/serve/_private/replica_result.py: elsewhere",
    ],
)
def test_what_is_there_passes(text: str) -> None:
    assert file_problems(text, "deploy/README.md", TREE) == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("see `price.py`: gone", "price.py"),
        ("STEP_PRICE.md.", "STEP_PRICE.md"),
        ("serve.yml", "serve.yml"),
        ("verifier/step_price.py", "verifier/step_price.py"),
        ("a/serve.yaml", "a/serve.yaml"),
        ("[x](../kuberay/pdb.yaml)", "../kuberay/pdb.yaml"),
        ("--output=x.json", "x.json"),
        ("every *_grpc.py", "*_grpc.py"),
    ],
)
def test_what_is_not_there_is_caught(text: str, name: str) -> None:
    assert file_problems(text, "deploy/README.md", TREE) == [f"deploy/README.md: {name} is not there"]


def test_modules_and_what_is_in_them_are_looked_up(tmp_path: Path) -> None:
    (tmp_path / "cluster" / "router").mkdir(parents=True)
    (tmp_path / "cluster" / "app.py").write_text("def build_app(): ...\n")
    (tmp_path / "cluster" / "__init__.py").write_text("LLM = 1\n")
    fine = "outrider.cluster.app:build_app, outrider.cluster.app.build_app, outrider.cluster.router. outrider.v1.X"
    assert module_problems(fine + ", outrider.cluster.LLM", "page", tmp_path) == []
    gone = "outrider.cluster.app:build, outrider.cluster.router.fleet, outrider.proto.x, outrider.cluster.app.Thing"
    assert len(module_problems(gone, "page", tmp_path)) == 4


def test_folders_and_modules_without_a_suffix_are_looked_up(tmp_path: Path) -> None:
    (tmp_path / "cluster" / "router").mkdir(parents=True)
    (tmp_path / "cluster" / "app.py").touch()
    fine = "cluster/router/, `cluster/app`, cluster/x.py, my/cluster/x, cluster/x-y.yaml and https://x.org/cluster/x"
    assert folder_problems(fine, "page", tmp_path) == []
    assert folder_problems("in cluster/gateway.", "page", tmp_path) == ["page: cluster/gateway is not there"]


def test_what_a_module_is_said_to_have_is_looked_up() -> None:
    sources = {"a/price.py": "SLOW = 1", "b/price.py": "def knee(): ..."}
    fine = "`SLOW` or `knee` in `price.py`, `knee` in b/price.py, `x_y` in other.py, SLOWER in price.py"
    assert within_problems(fine, "page", sources) == []
    gone = "`SLOW` in `b/price.py`; `knee`, `STALL` and `x_y` in [price.py](../a/price.py)"
    found = within_problems(gone, "page", sources)
    assert found == [
        "page: SLOW is not in b/price.py",
        *(f"page: {name} is not in a/price.py" for name in ("STALL", "knee", "x_y")),
    ]


def test_headings_are_looked_up(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# Title\n\n## The trap\n")
    assert heading_problems('see a.md, "The trap", and `a.md`, "Title"', "page", tmp_path) == []
    assert heading_problems('a.md, "Words"', "page", tmp_path) == ['page: a.md has no heading "Words"']


PYTHON = '''
"""The module says a.md,
"The trap"."""
NAME = "no prose.py"  # but this.py

@option("--x", help="as in x.yaml " f"and {NAME} y.yaml")
def f():
    """Do as g.py does."""
    raise ValueError("neither.py")
'''


def test_prose_of_a_module_is_its_comments_docstrings_and_help() -> None:
    said = prose("x.py", PYTHON)
    assert 'a.md, "The trap".' in said
    assert all(name in said for name in ("this.py", "x.yaml", "y.yaml", "g.py"))
    assert "prose.py" not in said
    assert "neither.py" not in said


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.yaml", "file: no.py # said.py"),
        ("Makefile", "test: no.py  ## said.py"),
        ("x.proto", 'import "no.proto"; // said.py'),
        ("x.css", "@import no.css; /* as\nsaid.py */"),
        ("page.md", "said.py"),
    ],
)
def test_prose_of_other_files_is_their_comments(name: str, text: str) -> None:
    said = prose(name, text)
    assert "said.py" in said
    assert "no." not in said


def test_data_says_nothing() -> None:
    assert prose("x.json", '{"a": "x.py"}') == ""
