"""The rooms of the house: folders of modules, and the arrows of imports between them, read from the sources.

python tests/rooms.py [CHECKOUT]     files, lines and arrows of every room, as a Markdown table
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# where a user or another engine enters what serves
DOORS = ("cli.serve", "cli.drafters", "cli.check", "cli.learner", "vllm", "hosted.sglang_entry", "app")
_NAMED = re.compile(r'"(outrider\.[\w.]+)(?::\w+)?"')  # what a process is told to run
LAYERS = ("proto", "verifier_service", "drafter_service", "cluster", "lab")  # imports point left only


@dataclass(slots=True)
class Room:
    """One folder: what is in it, and the rooms that it imports."""

    num_files: int = 0
    num_lines: int = 0
    arrows: dict[str, list[str]] = field(default_factory=dict)  # room → "module:line", one for every import


@functools.cache
def parsed(source: str) -> ast.Module:
    """Return a source's tree, which nobody may change: most rules read all sources."""
    return ast.parse(source)


def imported(source: str) -> Iterator[tuple[str, str, int]]:
    """Yield what a source imports: a module, a name from it ("": the module itself) and the line."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "", node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((module, alias.name, node.lineno) for alias in node.names)


def sources(folder: Path) -> list[Path]:
    """List the hand-written modules of a folder."""
    return sorted(path for path in folder.rglob("*.py") if "_pb2" not in path.name)


def module_name(path: Path, root: Path = ROOT) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(("outrider", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def rooms_of(modules: Mapping[str, tuple[str, str]]) -> dict[str, Room]:
    """Return the rooms of `modules`, each a room and a source, with all arrows: also those of typing alone."""
    rooms: dict[str, Room] = {}
    for name, (where, source) in modules.items():
        room = rooms.setdefault(where, Room())
        room.num_files += 1
        room.num_lines += len(source.splitlines())
        for module, attribute, line in imported(source):
            full = f"{module}.{attribute}"  # a module of a package, or something within a module
            target = full if full in modules else module
            if target in modules and (other := modules[target][0]) != where:
                room.arrows.setdefault(other, []).append(f"{name}:{line}")
    return rooms


def read_rooms(root: Path = ROOT) -> dict[str, Room]:
    """Return the rooms of a checkout by their folders, as `cluster/router`."""
    paths = [path for layer in LAYERS for path in sorted((root / layer).rglob("*.py"))]
    return rooms_of({module_name(path, root): (str(path.parent.relative_to(root)), path.read_text()) for path in paths})


def reached(root: Path = ROOT) -> dict[str, int]:
    """Return the hand-written modules that what serves imports, also late, for types or by name, and their lines."""
    paths = {module_name(path, root): path for layer in LAYERS for path in sources(root / layer)}
    texts: dict[str, str] = {}
    left = [f"outrider.cluster.{door}" for door in DOORS]
    while left:
        module = left.pop()
        if module in texts or module not in paths:
            continue
        texts[module] = paths[module].read_text()
        for package, name, _ in imported(texts[module]):
            left += [package, f"{package}.{name}"]
        left += _NAMED.findall(texts[module])
    return {module: len(text.splitlines()) for module, text in texts.items()}


def cycle(arrows: Mapping[str, set[str]]) -> list[str] | None:
    """Return rooms that import each other in a circle, or None."""
    finished: set[str] = set()

    def visit(room: str, path: list[str]) -> list[str] | None:
        if room in path:
            return [*path[path.index(room) :], room]
        if room in finished:
            return None
        found = next((found for other in sorted(arrows.get(room, ())) if (found := visit(other, [*path, room]))), None)
        finished.add(room)
        return found

    return next((found for room in sorted(arrows) if (found := visit(room, []))), None)


def to_markdown(rooms: Mapping[str, Room]) -> str:
    lines = ["| room | files | lines | imports |", "|---|---:|---:|---|"]
    lines += [
        f"| {name} | {room.num_files} | {room.num_lines:,} | {', '.join(sorted(room.arrows))} |"
        for name, room in sorted(rooms.items())
    ]
    num_arrows = sum(len(room.arrows) for room in rooms.values())
    largest = max(room.num_files for room in rooms.values())
    circle = cycle({name: set(room.arrows) for name, room in rooms.items()})
    lines.append(f"\n{len(rooms)} rooms, {num_arrows} arrows, the largest room has {largest} files; circle: {circle}.")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(to_markdown(read_rooms(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT)) + "\n")
