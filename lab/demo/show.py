"""Run the demo: start the service, play the acts, stop, and close with a table."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence

import click
import grpc
from ray._private import worker
from rich.console import Console

from outrider.cluster.client.openai_client import ServerError
from outrider.cluster.config.known_models import is_embedded
from outrider.cluster.config.machine import is_small, usable_cores
from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.gateway.text_codec import TextCodec
from outrider.cluster.replicas.serving import running_service
from outrider.lab.demo.answers import show_answers
from outrider.lab.demo.ask import Client, Wish, open_clients
from outrider.lab.demo.burst import show_burst
from outrider.lab.demo.comparison import Comparison
from outrider.lab.demo.fleet import Fleet
from outrider.lab.demo.kill import Kill, show_kill
from outrider.lab.demo.questions import Question, questions_for
from outrider.lab.demo.table import closing_table
from outrider.lab.demo.waiting import show_phases
from outrider.lab.same_tokens import Reference, compare, plain_decoding, require_same
from outrider.verifier_service.model.ranks import free_ports
from outrider.verifier_service.model.tokenizer import load_tokenizer

WAVES = (16, 64)
FIRST_DRAFTER_S = 60.0
DRAIN_TIMEOUT_S = 3.0  # when it stops all streams have ended
WARM_UP_TOKENS = 16  # what comes first takes longer, drafts or not
# it drafts from what was said before, and needs neither a checkpoint nor a core
STAND_IN = {"method": "suffix"}


def run(config: ServiceConfig, console: Console, waves: Sequence[int] = WAVES) -> None:
    """Serve on free ports and play all acts.

    Raises `click.ClickException` where the service did not keep its word, `ValueError` for what cannot be played.
    """
    if "RAY_ADDRESS" in os.environ:  # there a process's number may be a stranger's on this machine
        raise ValueError("the demo kills a process of its own, on a Ray of its own: unset RAY_ADDRESS")
    begin_s = time.monotonic()
    port, grpc_port = free_ports(2)
    config = with_drafter(config, num_cores=usable_cores())
    config = config.with_options(port=port, grpc_port=grpc_port, drain_timeout_s=DRAIN_TIMEOUT_S)
    with _quiet_ray(), contextlib.ExitStack() as service:
        with show_phases() as on_phase:
            service.enter_context(running_service(config, on_phase))
            addresses = f"http://{config.address(port)} and grpc {config.address(grpc_port)}"
            on_phase(f"serving {config.model.name} on {addresses}")
        start_s = time.monotonic() - begin_s
        try:
            acts = asyncio.run(_acts(config, console, waves))
        except (ServerError, grpc.RpcError) as error:
            raise click.ClickException(str(error)) from error
        with show_phases() as on_phase:
            on_phase("stopping")
            service.close()
            on_phase("stopped")
    took = f"{time.monotonic() - begin_s:.0f} s in all, {start_s:.0f} s of them until the service was up"
    close(console, *acts, took=took, load=plain_decoding(config.verifier_spec.model))


def close(
    console: Console, comparisons: Sequence[Comparison], kill: Kill, *, took: str, load: Callable[[], Reference]
) -> None:
    """Print the table, then what drafts changed; raise `click.ClickException` where they may not."""
    console.print(closing_table(comparisons, kill))
    console.print(f"\n{took}", highlight=False)
    tally = compare([*(pair for comparison in comparisons for pair in comparison.pairs), kill.pair], load)
    console.print(f"drafts on and off: {tally}", highlight=False)
    require_same(tally)


async def _acts(config: ServiceConfig, console: Console, waves: Sequence[int]) -> tuple[list[Comparison], Kill]:
    """Play the acts against a service that runs."""
    codec = TextCodec(load_tokenizer(config.verifier_spec.model))
    questions, fleet = questions_for(config.model.model, codec), Fleet(config)
    async with open_clients(config, codec) as (http, over_grpc):
        if not await fleet.wait_for_drafter(FIRST_DRAFTER_S):
            raise click.ClickException(f"no drafter was there within {FIRST_DRAFTER_S:.0f} s")
        await http.ask(questions.over_http[0], Wish(max_tokens=WARM_UP_TOKENS))
        asked: list[tuple[Client, Sequence[Question]]]
        asked = [(http, questions.over_http), (over_grpc, questions.over_grpc)]
        remembers = STAND_IN["method"] in config.speculative.all_methods
        comparisons = await show_answers(console, asked, questions.edits, knows_answers=remembers)
        comparisons += await show_burst(console, http, questions.burst, waves)
        kill = await show_kill(console, http, fleet, questions.long)
    return comparisons, kill


@contextlib.contextmanager
def _quiet_ray() -> Iterator[None]:
    """Keep Ray from writing into the answers that a process has died: the demo kills one, and says so itself."""
    worker._worker_logs_enabled = False
    try:
        yield
    finally:
        worker._worker_logs_enabled = True


def with_drafter(config: ServiceConfig, *, num_cores: int) -> ServiceConfig:
    """Return a service that has a drafter pool; raises `ValueError` where one of another kind was asked for.

    On a small machine look-ups draft where nobody says: whatever computes drafts there takes the verifier's cores.
    """
    is_free = not config.drafters[0].is_named and not is_embedded(config.model.model)
    if is_free and (is_small(config, num_cores=num_cores) or not config.pools):
        config = config.with_options(speculative_config=STAND_IN)
    if not config.pools:
        raise ValueError("the demo kills a drafter of a pool: there must be one")
    return config
