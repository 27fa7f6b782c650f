"""How the laboratory shows what it found: one report, as a table for the terminal, a page of Markdown, and JSON.

# heading
`command`, date: title (the machine and the work)
**section**
| cells |
- notes
definitions
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import click

from outrider.cluster.common.terminal import NOTHING, console_of, markdown_table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

FORMAT_VERSION = 1
BEFORE = "- before: "
T = TypeVar("T")
_FILES = {"json": None, "markdown": None, "plot": "PNG."}


def files(*kinds: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds `--json`, `--markdown` or `--plot` of a file; arguments are named json_file, …."""

    def decorated(command: Callable[..., Any]) -> Callable[..., Any]:
        for kind in reversed(kinds):
            path = click.Path(dir_okay=False, writable=True, path_type=Path)
            command = click.option(f"--{kind}", f"{kind}_file", type=path, help=_FILES[kind])(command)
        return command

    return decorated


def number(value: float | None, digits: int, scale: float = 1.0, unit: str = "") -> str:
    """Write a figure; `NOTHING` where there is none."""
    return NOTHING if value is None else f"{value * scale:,.{digits}f}{unit}"


@dataclass(frozen=True)  # without slots: `Column[Row](…)` would not be made
class Column(Generic[T]):
    """A heading and how a row's value is written under it."""

    heading: str
    cell: Callable[[T], str]
    is_text: bool = False  # stands left, as the first column does


@dataclass(frozen=True)
class Section(Generic[T]):
    """Rows that belong together."""

    title: str
    rows: Sequence[T]


@dataclass(frozen=True, kw_only=True)
class Report(Generic[T]):
    """Everything that is shown."""

    title: str  # the machine and the work
    columns: Sequence[Column[T]]
    sections: Sequence[Section[T]]
    notes: Sequence[str] = ()
    heading: str = ""  # of the page
    command: str = ""
    definitions: str = ""
    document: Mapping[str, Any] = field(default_factory=dict)  # for programs, beside version and definitions

    def to_table(self) -> RenderableType:
        """Draw for a terminal: a table, its sections under their titles, and the notes."""
        from rich.console import Group
        from rich.text import Text

        table = table_of(self.columns, (), self.title)
        for section in self.sections:
            if section.title:
                table.add_row(Text(section.title, style="bold"))
            for row in section.rows:
                table.add_row(*(column.cell(row) for column in self.columns))
            table.add_section()
        return Group(table, *(Text(note) for note in self.notes))

    def to_markdown(self, before: str = "") -> str:
        """Write a page, in place of what it was before."""
        made = f"`{self.command}`, {time.strftime('%Y-%m-%d')}: {self.title}" if self.command else self.title
        lines = [*([f"# {self.heading}", ""] if self.heading else []), made, ""]
        for section in self.sections:
            lines += [f"**{section.title}**", ""] if section.title else []
            lines += [*markdown_of(self.columns, section.rows), ""]
        lines += [f"- {note}" for note in self.notes]
        if self.definitions:
            lines += ["", "```", self.definitions, "```"]
        lines += [f"{BEFORE}{line.removeprefix(BEFORE)}" for line in before.splitlines() if self._is_history(line)]
        return "\n".join(lines) + "\n"

    def _is_history(self, line: str) -> bool:
        return line.startswith(BEFORE) or (bool(self.command) and line.startswith(f"`{self.command}`, "))

    def to_json(self) -> dict[str, Any]:
        """Describe it for programs."""
        definitions = {"definitions": self.definitions} if self.definitions else {}
        return {"format_version": FORMAT_VERSION, **definitions, **self.document}

    def show(self, width: int, json_file: Path | None = None, markdown_file: Path | None = None) -> None:
        """Print the table and write the files that are asked for."""
        console_of(width).print(self.to_table())
        before = markdown_file.read_text() if markdown_file is not None and markdown_file.exists() else ""
        write(json_file, self.to_json, markdown_file, lambda: self.to_markdown(before))


def write(
    json_file: Path | None,
    to_json: Callable[[], Any],
    markdown_file: Path | None = None,
    to_markdown: Callable[[], str] = str,
) -> None:
    """Write the files that are asked for."""
    if json_file is not None:
        json_file.write_text(json.dumps(to_json(), indent=2) + "\n")
    if markdown_file is not None:
        markdown_file.write_text(to_markdown())


def show_page(page: str, width: int, markdown_file: Path | None = None) -> None:
    """Print a page of Markdown as it is, and write it where that is asked for."""
    page = page.rstrip("\n")
    console_of(width).print(page, highlight=False, markup=False)
    write(None, dict, markdown_file, lambda: f"{page}\n")


def table_of(columns: Sequence[Column[T]], rows: Iterable[T], title: str | None) -> Table:
    """Draw one line per row for a terminal."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", caption_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column.heading, justify="left" if _is_left(place, column) else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(column.cell(row) for column in columns))
    return table


def markdown_of(columns: Sequence[Column[T]], rows: Iterable[T]) -> list[str]:
    """Return the lines of a Markdown table."""
    num_left = sum(_is_left(place, column) for place, column in enumerate(columns))
    cells = ([column.cell(row) for column in columns] for row in rows)
    return markdown_table([column.heading for column in columns], cells, num_left=num_left)


def _is_left(place: int, column: Column[Any]) -> bool:
    return place == 0 or column.is_text


def definitions_of(module_doc: str | None) -> str:
    """Return what follows the first paragraph of a module's docstring."""
    return (module_doc or "").partition("\n\n")[2].strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where it was measured."""

    cpu: str
    num_cores: int  # that this process may use
    memory_bytes: int
    load_average: float  # over the minute before the start: what else was running
    python: str
    torch: str
    transformers: str

    def __str__(self) -> str:
        return (
            f"{self.cpu}, {self.num_cores} cores, {self.memory_bytes / 2**30:.0f} GiB, "
            f"load {self.load_average:.1f} at the start; Python {self.python}, torch {self.torch}, "
            f"transformers {self.transformers}"
        )


def describe_machine() -> Machine:
    """Say where we are."""
    from importlib.metadata import version

    return Machine(
        cpu=_cpu_name(),
        num_cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        load_average=os.getloadavg()[0],
        python=platform.python_version(),
        torch=version("torch"),
        transformers=version("transformers"),
    )


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
