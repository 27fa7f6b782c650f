"""`make study NAME=vllm-pool ARGS="--pool HOST:PORT"`: vLLM with drafts from a running pool beside vLLM without.

Every engine has the same threads; the pool is another process. Two kinds of prompts: the committed chat prompts, whose
answers repeat nothing, and texts to be copied, whose answers do. Plain vLLM runs twice: their ratio is the noise.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from prometheus_client.parser import text_string_to_metric_families

from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import markdown_table, show_progress
from outrider.cluster.config.known_models import path_of
from outrider.lab.peers.measure import (
    PREFIX,
    Load,
    Sample,
    chat_encoder,
    chat_prompts,
    equal_prompts,
    measure,
    median_speed,
    paired_ratio,
)
from outrider.lab.peers.process import Peer, PeerProcess
from outrider.lab.report import describe_machine
from outrider.verifier_service.model.architectures import resolve_folder
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.tokenizer import load_tokenizer

PLAIN, AGAIN, LOOKUP, FIXED, ADAPTIVE = "vLLM", "vLLM, again", "vLLM look-up", "pool, fixed", "pool, priced"
DRAFT_MODEL = "vLLM draft model"
KINDS = ("chat", "copy")
COPIED_CHARS = 240
COPY = "Copy this text word for word, and write nothing else:\n\n{}"


@dataclass(frozen=True, slots=True)
class Drafted:
    """What one engine did, by the pool's metrics."""

    num_committed_tokens: float
    num_drafts: float
    num_draft_tokens: float
    num_accepted_tokens: float

    def minus(self, other: Drafted) -> Drafted:
        return Drafted(
            self.num_committed_tokens - other.num_committed_tokens,
            self.num_drafts - other.num_drafts,
            self.num_draft_tokens - other.num_draft_tokens,
            self.num_accepted_tokens - other.num_accepted_tokens,
        )

    @property
    def share(self) -> float:
        """The share of requests in steps that had a draft."""
        num_rounds = self.num_committed_tokens - self.num_accepted_tokens
        return self.num_drafts / num_rounds if num_rounds else 0.0


def drafted(page: str, engine: str) -> Drafted:
    """Read an engine's counters off a page of metrics."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.labels.get("engine") == engine:
                found[sample.name] = sample.value
    return Drafted(
        found.get("outrider_verify_committed_tokens_total", 0.0),
        found.get("outrider_verify_drafts_total", 0.0),
        found.get("outrider_verify_draft_tokens_total", 0.0),
        found.get("outrider_verify_accepted_tokens_total", 0.0),
    )


def copy_prompts(encode: Any, count: int) -> list[tuple[int, ...]]:
    """Return requests to copy pieces of one text, all different."""
    text = PREFIX.read_text()
    step = (len(text) - COPIED_CHARS) // count
    return [tuple(encode(COPY.format(text[i * step : i * step + COPIED_CHARS].strip()))) for i in range(count)]


def engines(
    interpreter: Path, pool: str, plugin: Mapping[str, Any], draft_model: str | None, common: Mapping[str, Any]
) -> list[Peer]:
    """Return vLLM in each of its modes; `plugin` are further options of ours."""
    modes: dict[str, dict[str, Any]] = {
        PLAIN: {},
        AGAIN: {},
        LOOKUP: {"lookup": True},
        FIXED: {"pool": pool, "plugin": {**plugin, "speculation": "always"}},
        ADAPTIVE: {"pool": pool, "plugin": dict(plugin)},
    }
    if draft_model is not None:
        modes[DRAFT_MODEL] = {"draft_model": draft_model}
    return [
        Peer(name=name, script="vllm_worker.py", interpreter=interpreter, options={"lookup": False, **common, **mode})
        for name, mode in modes.items()
    ]


@click.command("vllm-pool", context_settings=CONTEXT_SETTINGS)
@click.argument("model", default="smollm2")
@click.option("--pool", required=True, help='"host:port" of a running `outrider drafters`.')
@click.option("--metrics", required=True, help="URL of its /metrics.")
@click.option("--environment", type=click.Path(exists=True, path_type=Path), required=True, help="Where vLLM is.")
@click.option("--plugin", metavar="JSON", default="{}", help='Further options of ours: {"state_taps": [3, 15, 27]}.')
@click.option("--mode", "modes", multiple=True, help=f"Beside {PLAIN!r} and {FIXED!r}: these alone. Default: all.")
@click.option("--draft-model", help="Folder of a model that vLLM itself drafts with, in one more mode.")
@click.option("--enforce-eager", is_flag=True, help="Compile nothing: for equal tokens, where speed does not matter.")
@click.option("--kind", "kinds", multiple=True, type=click.Choice(KINDS), default=KINDS, help="Of prompts.")
@click.option("--concurrency", "concurrencies", default="1,4,16,64", show_default=True)
@click.option("--num-prompts", type=int, default=16, show_default=True, help="Of a load, at least.")
@click.option("--max-tokens", type=int, default=64, show_default=True)
@click.option("--num-speculative-tokens", type=int, default=4, show_default=True)
@click.option("--threads", "num_threads", type=int, default=1, show_default=True, help="Of every engine.")
@click.option("--repeats", type=int, default=3, show_default=True)
@click.option("--markdown", "page", type=click.Path(dir_okay=False, path_type=Path))
def vllm_pool(model: str, page: Path | None, **options: Any) -> None:
    """Measure vLLM with drafts from a pool beside vLLM without: speed, share of steps drafted, equal tokens."""
    config = ModelConfig(path=path_of(model), dtype="float32")
    loads = _loads(config, options)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        common = {
            "model": str(resolve_folder(config)),
            "dtype": "float32",
            "max_num_seqs": max(load.concurrency for load in loads),
            "max_model_len": 512,
            "num_speculative_tokens": options["num_speculative_tokens"],
            "max_ngram": 3,
            "enforce_eager": options["enforce_eager"],
        }
        interpreter = options["environment"] / "bin" / "python"
        chosen = engines(interpreter, options["pool"], json.loads(options["plugin"]), options["draft_model"], common)
        if options["modes"]:
            chosen = [peer for peer in chosen if peer.name in (PLAIN, FIXED, *options["modes"])]
        processes = [
            stack.enter_context(
                PeerProcess(
                    peer, num_threads=options["num_threads"], log=folder / f"{index}.log", clock=time.perf_counter
                )
            )
            for index, peer in enumerate(chosen)
        ]
        num_runs = len(chosen) * len(loads) * (options["repeats"] + 1)
        on_run = stack.enter_context(show_progress(num_runs))
        rows: dict[tuple[str, str], Drafted] = {}
        samples: list[Sample] = []
        for load in loads:
            before = {process.name: _drafted(options["metrics"], process) for process in processes}
            found = measure(processes, [load], repeats=options["repeats"], on_run=on_run)
            if found.failures:
                raise click.ClickException(str(found.failures))
            samples.extend(found.samples)
            time.sleep(1.0)  # reports come a few times a second
            for process in processes:
                rows[process.name, load.name] = _drafted(options["metrics"], process).minus(before[process.name])
    table = _table(loads, samples, rows, [peer.name for peer in chosen])
    text = f"{describe_machine()}, fp32, {options['num_threads']} thread(s) for each engine\n\n{table}"
    click.echo(text)
    if page is not None:
        page.write_text(text + "\n")


def _loads(config: ModelConfig, options: Mapping[str, Any]) -> list[Load]:
    encode = chat_encoder(load_tokenizer(config))
    loads = []
    for concurrency in (int(part) for part in options["concurrencies"].split(",")):
        count = max(options["num_prompts"], concurrency)
        for kind in options["kinds"]:
            prompts = chat_prompts(encode)[:count] if kind == "chat" else copy_prompts(encode, count)
            while len(prompts) < count:
                prompts = [*prompts, *prompts[: count - len(prompts)]]
            name = f"{kind}, {concurrency} at a time"
            max_tokens = options["max_tokens"]
            loads.append(Load(name=name, concurrency=concurrency, prompts=tuple(prompts), max_tokens=max_tokens))
    return loads


def _drafted(url: str, process: PeerProcess) -> Drafted:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return drafted(answer.read().decode(), f"vllm-{socket.gethostname()}-{process.pid}")


def _table(
    loads: Sequence[Load], samples: Sequence[Sample], rows: Mapping[tuple[str, str], Drafted], names: Sequence[str]
) -> str:
    others = [name for name in names if name != PLAIN]
    pools = [name for name in (FIXED, ADAPTIVE) if name in names]
    drafting = pools[-1]
    headings = ["load", "vLLM tokens/s", *(f"{name} ÷ vLLM" for name in others)]
    headings += [f"steps drafted, {drafting}", "tokens per verification", f"equal: {' and '.join(pools)}"]
    lines = []
    for load in loads:
        row = rows[drafting, load.name]
        ratios = [f"{paired_ratio(samples, name, PLAIN, load.name):.2f}" for name in others]
        per_round = 1.0 + row.num_accepted_tokens / row.num_drafts if row.num_drafts else 1.0
        equal = min(equal_prompts(samples, name, PLAIN, load.name) for name in pools)
        speed = median_speed(samples, PLAIN, load.name)
        lines.append([load.name, f"{speed:.0f}", *ratios, f"{row.share:.0%}", f"{per_round:.2f}", f"{equal:.0%}"])
    table = "\n".join(markdown_table(headings, lines, num_left=1))
    if AGAIN not in names:
        return table
    spread = statistics.median(abs(paired_ratio(samples, AGAIN, PLAIN, load.name) - 1.0) for load in loads)
    return f"{table}\n\nThe placebo's median distance from 1: {spread:.1%}; {os.cpu_count()} cores."
