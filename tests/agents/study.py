"""`make study NAME=agents`: real agents and libraries against our service, and the page of what each could do."""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import click

from agents.command_lines import AGENTS, Agent
from agents.environment import ENVIRONMENT, version_of
from agents.packages import PACKAGES, Package
from agents.script import agents_config, agents_spec
from agents.words import COLUMNS
from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import markdown_table
from outrider.lab.gateway.played_service import played_service
from outrider.lab.report import describe_machine, files, show_page

PLAIN_WIDTH = 160
NUM_AT_ONCE = 2
Client = Agent | Package
CLIENTS: tuple[Client, ...] = (*AGENTS, *PACKAGES)
INTRODUCTION = """\
# Agents and their libraries

Real clients, each in the version that `make agents` installs, against our own service around a model that is played:
gateway, router, grammars and readers are the real ones. An agent brings its own system prompt and all its tools.

- *first turn*: its request is taken and answered; *streamed*: in pieces.
- *tool call*: the model's call arrives as one, with its arguments; *tool result*: what the tool found is taken in the
  next request, and the turn ends.
- *structured output*: a JSON schema of the client's is followed, by whichever means the client has.
- *reasoning*: a thought is told from text, and agents send it back as one.
- *error recognised*: a model that is not served, and a prompt beyond the context, end in the client's own words or
  classes for them.
"""


@click.command(context_settings=CONTEXT_SETTINGS)
@files("markdown")
def agents(markdown_file: Path | None) -> None:
    """Ask our service with real agents and libraries: what each could do, as docs/results/agents.md."""
    if not (ENVIRONMENT / ".ready").is_file():
        raise click.ClickException(f"no agents are in {ENVIRONMENT}: make agents installs them")
    config = agents_config()
    with played_service(config, agents_spec(config)) as running, tempfile.TemporaryDirectory() as folder:
        places = [Path(folder) / str(number) for number in range(len(CLIENTS))]
        with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
            tried = threads.map(partial(_tried, f"http://{running.host}:{running.port}"), CLIENTS, places)
            found = list(zip(CLIENTS, tried, strict=True))
    text = page(found, version_of, datetime.date.today())
    show_page(text, PLAIN_WIDTH, markdown_file)


def _tried(server: str, client: Client, folder: Path) -> Mapping[str, str]:
    folder.mkdir()
    tried = client.tries(server, folder)
    for column, failure in tried.items():
        click.echo(f"{client.package} ({client.api}), {column}: {failure or 'yes'}", err=True)
    return tried


def page(found: Sequence[tuple[Client, Mapping[str, str]]], version: Callable[[str], str], day: datetime.date) -> str:
    """Return the page of what each client could do."""
    headings = ("client", "version", "API", *COLUMNS)
    table = markdown_table(headings, (_row(client, tried, version) for client, tried in found), num_left=len(headings))
    lacking = [
        f"- {client.package} ({client.api}), {column}: it {why}."
        for client, _ in found
        for column, why in client.lacks.items()
    ]
    made = f"`make study NAME=agents`, {day}, {describe_machine()}."
    return "\n".join([INTRODUCTION, made, "", *table, "", "\\- : the client has no such thing.", "", *lacking])


def _row(client: Client, tried: Mapping[str, str], version: Callable[[str], str]) -> Sequence[str]:
    shown = {column: "**no**" if failure else "yes" for column, failure in tried.items()}
    return (client.package, version(client.package), client.api, *(shown.get(column, "-") for column in COLUMNS))
