"""`make study NAME=invariance`: does a row's number depend on its company, product by product, on every path?

A path is a set of instructions that our kernels are compiled for, or torch's operators ("0"): OUTRIDER_CPU_KERNELS. It
is chosen once per process, so that each is measured in a process of its own: `python -m benchmarks.invariance --json`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click

from benchmarks.invariance.company import Finding
from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import NOTHING, markdown_table
from outrider.lab.report import describe_machine, files, show_page
from outrider.verifier_service.cpu import kernels
from outrider.verifier_service.cpu.isa import VARIABLE, Isa, chosen_isas, permit_tiles

TORCH = "0"
TESTS = Path(__file__).parents[2]
# threads that wait for each other with a core each would wait long beside other work
ENVIRONMENT = {"PYTHONPATH": str(TESTS), "OMP_WAIT_POLICY": "passive"}
PLAIN_WIDTH = 240
INVARIANT = "invariant"


def own_paths() -> list[str]:
    """Return the paths that this processor can take with our kernels, the fullest instructions first."""
    paths: list[str] = []
    for isa in Isa:
        try:
            chosen_isas(kernels._cpu_info(), isa, permit_tiles)
        except ValueError:
            continue
        paths.append(isa.value)
    return paths


def measured(path: str, *, is_brief: bool) -> list[Finding]:
    """Measure a path in a process of its own. Raises `RuntimeError` if that took another one."""
    command = [sys.executable, "-m", "benchmarks.invariance", "--json", *["--brief"][:is_brief]]
    environment = {**os.environ, VARIABLE: path, **ENVIRONMENT}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout)
    if (found["isa"] or TORCH) != path:
        raise RuntimeError(f"{path} was asked for and {found['isa'] or TORCH} measured: is there a C++ compiler?")
    return [Finding(**finding) for finding in found["findings"]]


def to_table(by_path: dict[str, list[Finding]]) -> str:
    """Write a Markdown table: a row for each product and dtype, a column for each path."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for path, findings in by_path.items():
        for finding in findings:
            rows.setdefault((finding.product, finding.dtype), {})[path] = finding.seen or INVARIANT
    headings = ("product", "dtype", *("torch's operators" if path == TORCH else path for path in by_path))
    lines = [(*key, *(seen.get(path, NOTHING) for path in by_path)) for key, seen in rows.items()]
    return "\n".join(markdown_table(headings, lines, num_left=len(headings)))


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option(
    "--path", "paths", multiple=True, help="One of OUTRIDER_CPU_KERNELS' values; again for more. Default: all."
)
@click.option("--brief", "is_brief", is_flag=True, help="Small shapes and fewer batches, as the tests take them.")
@files("markdown")
def invariance(paths: tuple[str, ...], is_brief: bool, markdown_file: Path | None) -> None:
    """Compare rows with themselves in other company; fails where one differs that the service says does not."""

    by_path = {path: measured(path, is_brief=is_brief) for path in paths or (*own_paths(), TORCH)}
    page = f"{describe_machine()}\n\n{to_table(by_path)}"
    show_page(page, PLAIN_WIDTH, markdown_file)
    if broken := sum(bool(own.is_promised and own.seen) for findings in by_path.values() for own in findings):
        raise click.ClickException(f"{broken} products depend on the batch that are said not to")
