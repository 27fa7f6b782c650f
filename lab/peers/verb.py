"""`outrider bench peers`: our engine beside others that anybody could install, on one checkpoint, in one run.

    each peer in a process of its own: loaded, then waiting for its turn
    for each repeat, for each load, for each peer: the same prompts, so many at a time, greedy, exactly so many tokens
    a load of `--first-token` has one long prompt a repeat, and a new one each time

Nothing heavy is imported before the verb runs.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.cluster.common.extras import require_extra
from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import numbers, show_progress
from outrider.lab.report import describe_machine, files

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outrider.lab.peers.measure import Load
    from outrider.lab.peers.process import Peer
    from outrider.lab.peers.report import PeersResult
    from outrider.verifier_service.model.config import ModelConfig

DEFAULT_ENVIRONMENTS = Path("build/peers")
PLAIN_WIDTH = 200


def _lengths(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """Read an option's lengths, which may be none."""
    lengths = numbers(context, parameter, value) if value else ()
    if any(length < 1 for length in lengths):
        raise click.BadParameter("expected lengths of 1 or more")
    return lengths


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("model")
@click.option(
    "--environments",
    type=click.Path(file_okay=False, path_type=Path),
    default=DEFAULT_ENVIRONMENTS,
    show_default=True,
    help="Where `make peers` has put the others.",
)
@click.option("--draft-model", type=click.Path(exists=True, path_type=Path), help="For the peers that draft with one.")
@click.option("--dtype", type=click.Choice(("bfloat16", "float32")), default="bfloat16", show_default=True)
@click.option("--threads", "num_threads", type=click.IntRange(1), help="Of every peer. Default: one for each core.")
@click.option("--concurrency", "concurrencies", default="1,4,16", show_default=True, callback=numbers)
@click.option("--num-prompts", type=click.IntRange(1, 64), default=16, show_default=True, help="Of a load, at least.")
@click.option("--max-tokens", type=click.IntRange(1), default=64, show_default=True, help="Of every prompt, exactly.")
@click.option("--prefix/--no-prefix", default=False, show_default=True, help="Also with a shared document in front.")
@click.option(
    "--first-token",
    "first_token_lengths",
    default="",
    callback=_lengths,
    help="Also the time to the first token of prompts of so many tokens, say 512,2048; at most the model's limit - 1.",
)
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Figures are their medians.")
@click.option("--only", multiple=True, help="A peer's name, or the beginning of several; may be given several times.")
@files("json", "markdown", "plot")
def peers(
    model: str, json_file: Path | None, markdown_file: Path | None, plot_file: Path | None, **options: Any
) -> None:
    """Measure MODEL beside transformers, vLLM, OpenVINO and llama.cpp: a folder, a GGUF file or `smollm2`."""
    if plot_file is not None:
        require_extra("plots", "--plot")
    from outrider.lab.peers.process import PeerError
    from outrider.lab.peers.report import report_of

    try:
        result = _run(model, **options)
    except (PeerError, ValueError, OSError) as error:  # OSError: no such model
        raise click.ClickException(str(error)) from error
    report_of(result).show(PLAIN_WIDTH, json_file, markdown_file)
    if plot_file is not None:
        from outrider.lab.peers.plot import plot

        plot(result, plot_file)


def _run(model: str, *, num_threads: int | None, repeats: int, **options: Any) -> PeersResult:
    import os

    from outrider.cluster.config.known_models import path_of
    from outrider.lab.bench.pairs import measure_read_speed, streamed_weight_bytes
    from outrider.lab.peers.measure import measure
    from outrider.lab.peers.process import PeerError, PeerProcess
    from outrider.lab.peers.report import PeerFacts, PeersResult
    from outrider.verifier_service.model.config import ModelConfig

    config = ModelConfig(path=path_of(model), dtype=options["dtype"])
    threads = num_threads or len(os.sched_getaffinity(0))
    loads = _loads(config, options)
    loads += _first_token_loads(config, options["first_token_lengths"], repeats, loads)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outrider-peers-")))
        chosen, missing = _peers(model, config, loads, folder, options)
        on_run = stack.enter_context(show_progress(len(chosen) * len(loads) * (repeats + 1)))
        processes: list[PeerProcess] = []
        for number, peer in enumerate(chosen):
            log = folder / f"{number}.log"
            try:
                process = PeerProcess(peer, num_threads=threads, log=log, clock=time.perf_counter)
            except PeerError as error:  # others are worth a row nevertheless
                missing[peer.name] = str(error)
            else:
                processes.append(stack.enter_context(process))
        if not processes:
            raise PeerError("; ".join(missing.values()))
        measured = measure(processes, loads, repeats=repeats, on_run=on_run)
        return PeersResult(
            machine=str(describe_machine()),
            num_threads=threads,
            dtype=config.dtype,
            loads=tuple(loads),
            repeats=repeats,
            measured=measured,
            peers=tuple(PeerFacts(p.name, p.version, p.ready_s, p.peak_memory_bytes()) for p in processes),
            missing=missing,
            weights_read_s=streamed_weight_bytes(config) / measure_read_speed(time.perf_counter),
        )


def _peers(
    model: str, config: ModelConfig, loads: Sequence[Load], folder: Path, options: Mapping[str, Any]
) -> tuple[list[Peer], dict[str, str]]:
    """Choose who is measured, and say why the others are not; writes what they read into `folder`."""
    from outrider.cluster.config.known_models import drafter_paths
    from outrider.drafter_service.service.speculative_config import Method
    from outrider.lab.peers.arms import all_peers
    from outrider.verifier_service.formats.gguf import is_gguf
    from outrider.verifier_service.model.architectures import resolve_folder

    half: Path | None = None
    if is_gguf(config.path):
        require_extra("gguf", config.path)
        from outrider.lab.peers.half_gguf import write_half_gguf

        half = folder / "half.gguf"
        write_half_gguf(Path(config.path), half)
    head = drafter_paths(model).get(Method.EAGLE3)
    longest = max(len(prompt) + load.max_tokens for load in loads for prompt in load.prompts)
    found, missing = all_peers(
        options["environments"],
        model=resolve_folder(config),
        draft_model=options["draft_model"],
        head=head,
        half_gguf=half,
        dtype=config.dtype,
        max_num_seqs=max(load.concurrency for load in loads),
        max_model_len=min(longest + 1, _limit(config)),
    )
    only = options["only"]
    return [peer for peer in found if not only or peer.name.startswith(tuple(only))], missing


def _loads(config: ModelConfig, options: Mapping[str, Any]) -> list[Load]:
    from outrider.lab.chat_prompts import chat_encoder, chat_prompts
    from outrider.lab.peers.measure import Load, prefixed_prompts
    from outrider.verifier_service.model.tokenizer import load_tokenizer

    tokenizer: Any = load_tokenizer(config)
    kinds = {"chat": chat_prompts(chat_encoder(tokenizer))}
    if options["prefix"]:
        kinds["shared prefix"] = prefixed_prompts(tokenizer.encode, kinds["chat"])
    return [
        Load(
            name=f"{kind}, {concurrency} at a time",
            concurrency=concurrency,
            prompts=tuple(prompts[: max(options["num_prompts"], concurrency)]),
            max_tokens=options["max_tokens"],
        )
        for kind, prompts in kinds.items()
        for concurrency in options["concurrencies"]
    ]


def _limit(config: ModelConfig) -> int:
    """Return how many tokens a sequence of the model may have."""
    from outrider.verifier_service.model.architectures import read_description, resolve_description
    from outrider.verifier_service.model.settled import own_limit

    return own_limit(read_description(resolve_description(config), config))


def _first_token_loads(config: ModelConfig, lengths: Sequence[int], repeats: int, others: Sequence[Load]) -> list[Load]:
    """Return a load for every length that leaves room for a token; their prompts begin as none of the others' do."""
    from outrider.lab.peers.measure import Load, long_prompts
    from outrider.verifier_service.model.tokenizer import load_tokenizer

    tokenizer: Any = load_tokenizer(config)
    encode = partial(tokenizer.encode, add_special_tokens=False, verbose=False)  # it would warn of the length
    limit = _limit(config)
    fitting = dict.fromkeys(min(length, limit - 1) for length in lengths)
    taken = {prompt[0] for load in others for prompt in load.prompts}
    prompts = iter(long_prompts(encode, [length for length in fitting for _ in range(repeats + 1)], taken))
    return [
        Load(
            name=f"first token of {length}, ms",
            concurrency=1,
            prompts=tuple(itertools.islice(prompts, repeats + 1)),
            max_tokens=1,
            is_first_token=True,
        )
        for length in fitting
    ]
