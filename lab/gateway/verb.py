"""`outrider bench gateway`: what a served token and a served request cost in processor time, by process.

    outrider's own service, whose verifier plays its model   gateway, HTTP proxy, router, verifier's shell, rank, raylet
    or, with --url, any server that speaks OpenAI's HTTP     its first process and their descendants, by name
    beside each load                                         a bare server that sends the same bytes

The client is a process of its own; its time is not counted. lab/gateway/figures.py has the formulas. Nothing heavy is
imported before the verb runs.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import numbers, show_progress
from outrider.lab.line_process import ProcessEnded
from outrider.lab.report import describe_machine, files, show_page, write

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from outrider.lab.gateway.loads import Door, Load
    from outrider.lab.gateway.measure import Server
    from outrider.lab.gateway.report import GatewayResult

PLAIN_WIDTH = 240
OPEN_FILES = 16384  # of every process, if they may be so many: each stream is a socket


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option("--streams", "num_streams", default="1,16,64,256,1024", show_default=True, callback=numbers)
@click.option("--tokens", "num_tokens", default=128, show_default=True, help="A stream; fewer where streams are many.")
@click.option("--clients", "num_clients", default="1,16,64", show_default=True, callback=numbers)
@click.option("--requests", "num_requests", default=256, show_default=True, help="Of one token, all clients together.")
@click.option("--door", "doors", type=click.Choice(("http", "grpc", "both")), default="both", show_default=True)
@click.option(
    "--variants/--no-variants",
    "has_variants",
    default=True,
    show_default=True,
    help="64 streams with log probabilities, usage, as chats, with tools, too.",
)
@click.option("--floor/--no-floor", "has_floor", default=True, show_default=True, help="Measure bare servers, too.")
@click.option("--repeats", type=click.IntRange(1), default=1, show_default=True, help="Figures are their medians.")
@click.option(
    "--gateways",
    "num_gateways",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Of our own service; they share the streams as the kernel shares connections.",
)
@click.option("--step-ms", type=click.FloatRange(0), default=6.0, show_default=True, help="A step of the played model.")
@click.option("--model", help="Lends its tokenizer. Default: the embedded one. With --url: what the server calls it.")
@click.option("--url", help="Instead of our own service, a server that runs: http://HOST:PORT.")
@click.option("--pid", type=click.IntRange(1), help="The first process of --url; its descendants are counted, too.")
@files("json", "markdown")
def gateway(json_file: Path | None, markdown_file: Path | None, **options: Any) -> None:
    """Measure what a served token and request cost in processor time, by process, beside a model that is played."""
    from outrider.cluster.replicas.serving import DeployError
    from outrider.lab.gateway.measure import MeasureError
    from outrider.lab.gateway.report import to_json, to_markdown

    try:
        result = _run(**options)
    except (MeasureError, ProcessEnded, DeployError, ValueError, OSError) as error:  # OSError: no such model
        raise click.ClickException(str(error)) from error
    table = to_markdown(result)
    show_page(table, PLAIN_WIDTH, markdown_file)
    write(json_file, lambda: to_json(result))


def _run(
    *,
    doors: str,
    num_streams: tuple[int, ...],
    num_tokens: int,
    num_clients: tuple[int, ...],
    num_requests: int,
    has_variants: bool,
    has_floor: bool,
    repeats: int,
    num_gateways: int,
    step_ms: float,
    model: str | None,
    url: str | None,
    pid: int | None,
) -> GatewayResult:
    """Measure what the options say. Raises `ValueError` or `OSError` naming the option that is bad."""
    from outrider.lab.gateway.loads import all_loads
    from outrider.lab.gateway.measure import Options, measure
    from outrider.lab.gateway.report import GatewayResult

    if url is not None and num_gateways > 1:
        raise ValueError("gateways: they are our own service's; --url names a server that runs")
    loads = all_loads(
        _doors(doors, url, pid),
        num_streams=num_streams,
        num_tokens=num_tokens,
        num_clients=num_clients,
        num_requests=num_requests,
        has_variants=has_variants,
    )
    options = Options(loads=tuple(loads), repeats=repeats, step_s=step_ms / 1e3, has_floor=has_floor)
    machine = str(describe_machine())
    raise_open_files()
    with contextlib.ExitStack() as stack:
        if url is None:
            server = stack.enter_context(_own_server(model, loads, num_gateways, options.step_s))
            shown = f"{num_gateways} gateway{'s' if num_gateways > 1 else ''}, {server.model}'s tokenizer"
            words = f"Outrider, {shown}, steps of {step_ms:g} ms without a model, no drafts"
        else:
            server = running_server(url, pid, model)
            words = f"{url}, {server.model}"
        on_run = stack.enter_context(show_progress(2 + len(loads) * repeats))
        rest_s, figures = measure(server, options, on_run)
    return GatewayResult(machine=machine, server=words, repeats=repeats, rest_s=rest_s, figures=tuple(figures))


def _doors(doors: str, url: str | None, pid: int | None) -> list[Door]:
    from outrider.lab.gateway.loads import Door

    if url is None:
        if pid is not None:
            raise ValueError("pid: it is that of --url, which is not given")
        return list(Door) if doors == "both" else [Door(doors)]
    if doors == Door.GRPC:
        raise ValueError("door: grpc is our own service's; at --url it is http")
    return [Door.HTTP]


def running_server(url: str, pid: int | None, model: str | None) -> Server:
    """Return the server that runs at a URL. Raises `ValueError` naming the option that is missing or bad."""
    from urllib.parse import urlsplit

    from outrider.lab.gateway.loads import Door
    from outrider.lab.gateway.measure import Server
    from outrider.lab.gateway.processes import processor_s

    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.path.rstrip("/") not in ("", "/v1"):
        raise ValueError(f"url: http://HOST:PORT is expected, not {url!r}")
    if pid is None:
        raise ValueError("pid: --url needs it: the server's first process, whose descendants are counted")
    if model is None:
        raise ValueError("model: --url needs it: what the server calls its model")
    try:
        processor_s(pid)
    except OSError as error:
        raise ValueError(f"pid: there is no process {pid}") from error
    port = 80 if parts.port is None else parts.port
    return Server(host=parts.hostname, ports={Door.HTTP: port}, model=model, first=pid, counts_first=True)


@contextlib.contextmanager
def _own_server(model: str | None, loads: Sequence[Load], num_gateways: int, step_s: float) -> Iterator[Server]:
    """Run our own service, whose verifier plays."""
    from outrider.lab.gateway.loads import Door
    from outrider.lab.gateway.measure import Server
    from outrider.lab.gateway.played_service import played_config, played_service, played_spec

    max_num_seqs = max(load.num_clients for load in loads)
    config = played_config(model=model, max_num_seqs=max_num_seqs, num_gateways=str(num_gateways))
    spec = played_spec(config, step_s=step_s)
    with played_service(config, spec, lambda phase: click.echo(phase, err=True)) as running:
        ports = {Door.HTTP: running.port, Door.GRPC: running.grpc_port}
        yield Server(host=running.host, ports=ports, model=running.model.name, first=os.getpid(), counts_first=False)


def raise_open_files() -> None:
    """Let this process, and all that it starts, have a socket for every stream, as far as the system lets it."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files(soft, hard, resource.RLIM_INFINITY), hard))


def open_files(soft: int, hard: int, unlimited: int) -> int:
    """Return how many open files to allow, given both limits of the system: no fewer than now."""
    if unlimited in (soft, hard):
        return soft if soft == unlimited else max(soft, OPEN_FILES)
    return max(soft, min(OPEN_FILES, hard))
