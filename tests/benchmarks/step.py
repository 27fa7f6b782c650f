"""`make study NAME=step`: a load step on a running server. Nothing heavy is imported before the verb runs."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.cluster.common.server_options import CONTEXT_SETTINGS, server_options

if TYPE_CHECKING:
    from benchmarks.step_trace import StepOptions, StepTrace
    from outrider.cluster.client.openai_client import Server
    from outrider.lab.bench.load import Ask, Prompt


@click.command(context_settings=CONTEXT_SETTINGS)
@server_options
@click.option("--concurrency", type=click.IntRange(2), default=64, show_default=True, help="Streams under load.")
@click.option("--alone-s", type=click.FloatRange(1), default=8.0, show_default=True, help="Seconds before and after.")
@click.option("--load-s", type=click.FloatRange(1), default=12.0, show_default=True)
@click.option("--max-tokens", type=click.IntRange(1), default=48, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True)
@click.option("--markdown", "markdown_file", type=click.Path(dir_okay=False, writable=True, path_type=Path))
def step(
    concurrency: int,
    alone_s: float,
    load_s: float,
    max_tokens: int,
    temperature: float,
    markdown_file: Path | None,
    **connection: Any,
) -> None:
    """Go from one stream to many and back, with speculation off and then on: decisions, recovery, first tokens."""
    from benchmarks.step_trace import StepOptions, to_markdown
    from outrider.cluster.client.openai_client import Server, ServerError
    from outrider.lab.bench.serve import read_prompts

    options = StepOptions(concurrency=concurrency, alone_s=alone_s, load_s=load_s)
    fields = {"max_tokens": max_tokens, "temperature": temperature, "ignore_eos": True}
    try:
        off, on = asyncio.run(_run(Server(**connection), read_prompts(None, 16), options, fields))
    except (ServerError, OSError) as error:
        raise click.ClickException(str(error)) from error
    title = (
        f"`make study NAME=step`: 1, {concurrency} and 1 streams for {alone_s:g}, {load_s:g} and {alone_s:g} s, "
        f"{max_tokens} tokens a request, temperature {temperature:g}; {time.strftime('%Y-%m-%d')}."
    )
    page = to_markdown(title, off, on)
    click.echo(page)
    if markdown_file is not None:
        markdown_file.write_text(page)


async def _run(
    server: Server, prompts: tuple[Prompt, ...], options: StepOptions, fields: dict[str, Any]
) -> tuple[StepTrace, StepTrace]:
    from benchmarks.step_trace import run_step
    from outrider.cluster.client.openai_client import first_model, open_client
    from outrider.lab.bench.load import Reply
    from outrider.lab.bench.serve import stream_reply

    async with open_client(server) as client:
        model = await first_model(client)

        async def read_load() -> dict[str, Any]:
            response = await client.get("/load")
            response.raise_for_status()
            return dict(response.json())

        def asking(**more: Any) -> Ask:
            async def ask(prompt: Prompt) -> Reply:
                body = {"model": model, "prompt": prompt, "stream_options": {"include_usage": True}, **fields, **more}
                return await stream_reply(client, body, time.perf_counter)

            return ask

        for prompt in prompts:  # both runs find them in the prefix cache
            await asking(max_tokens=1)(prompt)
        off = await run_step(asking(num_speculative_tokens=0), read_load, prompts, options, clock=time.perf_counter)
        return off, await run_step(asking(), read_load, prompts, options, clock=time.perf_counter)
