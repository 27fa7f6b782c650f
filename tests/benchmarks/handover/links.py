"""`make study NAME=apart ARGS=--links`: KV in frames beside KV over a tensor channel.

Three verifiers as they are served, each a shell and an engine in processes of their own, a thread for each rank: one
gives, one takes in frames, one takes over a gloo channel. Their model has the KV of SmolLM2-135M in float32 and is
narrow otherwise, so that steps cost little. The giver has the prompts in its prefix cache, the takers never have them.

    the taker waits   it has asked, and its channel is connected, when the giver gets the request: a prefill elsewhere
    the KV waits      the giver holds the request when the taker hears of it: a verifier that drains

Requests come one at a time, or several at once. A time ends with the taker's last first token: it holds one step of the
taker, and of the giver where the taker waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import uvloop

from fakes.played_fleet import outputs_over
from outrider.cluster.common.terminal import markdown_table
from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.offline.engine import RankProcesses
from outrider.cluster.replicas.engine_shell import EngineShell
from outrider.proto import link_pb2_grpc
from outrider.verifier_service.engine.service import RequestTable, VerifierLinkServicer
from outrider.verifier_service.engine.verifier_spec import VerifierSpec
from outrider.verifier_service.links.control_table import ControlTable
from outrider.verifier_service.links.handover_calls import HandoverCalls
from outrider.verifier_service.messages.engine import FROM_ENGINE, EngineReady, EngineUpdate
from outrider.verifier_service.messages.handover import KVSource
from outrider.verifier_service.messages.link import CHANNEL_OPTIONS
from outrider.verifier_service.messages.request import GenerationRequest, RequestOutput, SamplingParams
from outrider.verifier_service.model.ranks import PipeListener
from tiny.models import make_checkpoint

LOADS = ((1, 64), (1, 512), (1, 1024), (1, 2048), (8, 64), (8, 512))  # requests at once, tokens of each prompt
LAYERS, HEADS, HEAD_DIM = 30, 3, 64  # of SmolLM2-135M's KV
BYTES_PER_TOKEN = 2 * LAYERS * HEADS * HEAD_DIM * 4  # float32
FRAMES, PLACEBO, CHANNEL = "frames", "frames again", "channel"
WAYS = (FRAMES, PLACEBO, CHANNEL)
ORDERS = {True: "the taker waits", False: "the KV waits"}
NUM_BLOCKS, MAX_MODEL_LEN = 400, 4096
CONNECT_S = 0.5  # far longer than a channel needs to connect
SETTLE_S = 0.2  # and than all ends need to hang up
HEADINGS = (
    "order",
    "requests of tokens, MB",
    "way",
    "ms",
    "least, most",
    "MB/s",
    "giver's processor ms",
    "taker's",
    "in the channel",
)
SPAWNING = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Handed:
    """What it took to hand over some requests at once."""

    seconds: float  # until the last one has come
    giver_s: float  # of processors, by the verifier's shell and engine together
    taker_s: float
    frame_bytes: int  # of what the giver's engine sent in frames


def row_of(order: str, load: tuple[int, int], way: str, found: Sequence[Handed]) -> list[str]:
    """Return the medians of several repetitions."""
    num_requests, num_tokens = load
    num_bytes = num_requests * BYTES_PER_TOKEN * num_tokens
    seconds = statistics.median(one.seconds for one in found)
    in_channel = 1.0 - statistics.median(one.frame_bytes for one in found) / num_bytes
    return [
        order,
        f"{num_requests} of {num_tokens:,}, {num_bytes / 1e6:.0f}",
        way,
        f"{1e3 * seconds:.0f}",
        f"{1e3 * min(one.seconds for one in found):.0f}, {1e3 * max(one.seconds for one in found):.0f}",
        f"{num_bytes / 1e6 / seconds:.0f}",
        f"{1e3 * statistics.median(one.giver_s for one in found):.0f}",
        f"{1e3 * statistics.median(one.taker_s for one in found):.0f}",
        f"{max(0.0, in_channel):.0%}",
    ]


# --- a verifier ---


def run_shell(spec: VerifierSpec, study: Connection, frame_bytes: Any) -> None:
    """Serve a verifier until the study hangs up; tells it the endpoint and the processes' ids."""
    uvloop.run(_serve(spec, study, frame_bytes))


async def _serve(spec: VerifierSpec, study: Connection, frame_bytes: Any) -> None:
    ranks, is_ready = RankProcesses(VerifierSpec.run_rank, spec, 1, first_rank=0), asyncio.Event()
    with PipeListener(ranks.rank(0, 1).shell_address) as listener:
        ranks.start()
        pipe = await asyncio.to_thread(listener.accept, ranks.are_alive)

    def hear(message: EngineReady | EngineUpdate) -> None:
        if isinstance(message, EngineReady):
            is_ready.set()
        else:
            frame_bytes.value += sum(len(frame.payload) for frame in message.given)
            table.deliver(message.outputs)
            calls.deliver(message)

    shell = EngineShell(pipe, FROM_ENGINE, on_message=hear, on_failure=lambda reason: table.fail(reason))
    table, calls = RequestTable(shell.send), HandoverCalls(shell.send)
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    servicer = VerifierLinkServicer(table, ControlTable(shell.send), calls)
    link_pb2_grpc.add_VerifierLinkServicer_to_server(servicer, server)
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    shell.start()
    await is_ready.wait()
    study.send((endpoint, [os.getpid(), *ranks.pids]))
    await asyncio.to_thread(study.poll, None)
    await calls.close()
    await server.stop(grace=None)
    shell.close()
    ranks.close()


class Verifier:
    """A verifier's processes, as the study sees them."""

    def __init__(self, spec: VerifierSpec) -> None:
        self._study, far = SPAWNING.Pipe()
        self._frame_bytes = SPAWNING.Value("q", 0)
        self._process = SPAWNING.Process(target=run_shell, args=(spec, far, self._frame_bytes))
        self._process.start()
        far.close()

    def wait_until_ready(self) -> None:
        """Raises `EOFError` if the verifier ends instead."""
        self.endpoint, pids = self._study.recv()
        self._clocks = [_clock_of(pid) for pid in pids]

    def used(self) -> tuple[float, int]:
        """Return processor seconds of all threads, ended ones included, and bytes given in frames."""
        return sum(map(time.clock_gettime, self._clocks)), self._frame_bytes.value

    async def stream(self, message: GenerationRequest) -> AsyncGenerator[RequestOutput]:
        async with (
            grpc.aio.insecure_channel(self.endpoint, options=CHANNEL_OPTIONS) as channel,
            contextlib.aclosing(outputs_over(link_pb2_grpc.VerifierLinkStub(channel), message)) as outputs,
        ):
            async for output in outputs:
                if output is not None:
                    yield output

    def close(self) -> None:
        self._study.close()
        self._process.join()


def _clock_of(pid: int) -> int:
    """Return the id of a process's clock of processor time."""
    clock = ctypes.c_int()
    error = ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock))
    if error:
        raise OSError(error, os.strerror(error))
    return clock.value


# --- handovers ---


async def hand_over(giver: Verifier, taker: Verifier, name: str, *, num_tokens: int, taker_waits: bool) -> float:
    """Hand a request over, and let both sides forget it; return its seconds."""
    message = GenerationRequest(
        request_id=name,
        prompt_token_ids=tuple(random.Random(num_tokens).choices(range(3, 256), k=num_tokens)),
        sampling=SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True),
    )
    source = KVSource(endpoint=giver.endpoint, request_id=name)
    first = giver.stream(replace(message, hands_over=True))
    rest = taker.stream(replace(message, kv_source=source, cache_salt=name))
    if taker_waits:
        taken = asyncio.ensure_future(anext(rest))
        await asyncio.sleep(CONNECT_S)
        begin_s = time.monotonic()
        await _until_held(first)
    else:
        await _until_held(first)
        begin_s = time.monotonic()
        taken = asyncio.ensure_future(anext(rest))
    output = await taken
    seconds = time.monotonic() - begin_s
    assert output.token_ids, output.error
    for stream in (rest, first):
        await stream.aclose()
    return seconds


async def _until_held(outputs: AsyncIterator[RequestOutput]) -> None:
    async for output in outputs:
        if output.is_held:
            return
    raise AssertionError("the giver did not hold the request")


async def hand_over_all(
    giver: Verifier, taker: Verifier, names: Sequence[str], num_tokens: int, *, taker_waits: bool
) -> Handed:
    """Hand requests of one prompt over at once."""
    (giver_s, frame_bytes), (taker_s, _) = giver.used(), taker.used()
    one = partial(hand_over, giver, taker, num_tokens=num_tokens, taker_waits=taker_waits)
    seconds = max(await asyncio.gather(*map(one, names)))
    await asyncio.sleep(SETTLE_S)
    (giver_end_s, end_bytes), (taker_end_s, _) = giver.used(), taker.used()
    return Handed(seconds, giver_end_s - giver_s, taker_end_s - taker_s, end_bytes - frame_bytes)


async def measure(giver: Verifier, takers: dict[str, Verifier], repeats: int) -> list[list[str]]:
    """Hand over in turns; the first time of each kind does not count."""
    names, rows = map(str, itertools.count()), []
    for (taker_waits, order), load in itertools.product(ORDERS.items(), LOADS):
        found: dict[str, list[Handed]] = {way: [] for way in WAYS}
        for repeat in range(repeats + 1):
            for way in (WAYS[(place + repeat) % len(WAYS)] for place in range(len(WAYS))):
                own = [next(names) for _ in range(load[0])]
                found[way].append(await hand_over_all(giver, takers[way], own, load[1], taker_waits=taker_waits))
        rows += [row_of(order, load, way, found[way][1:]) for way in WAYS]
    return rows


def spec_of(folder: Path, transport: str) -> VerifierSpec:
    """Return a verifier of a checkpoint; with a transport, it takes KV over a channel."""
    config = ServiceConfig(model=str(folder), dtype="float32", threads_per_rank=1, max_num_batched_tokens=256, seed=0)
    model = replace(config.verifier_spec.model, num_kv_blocks=NUM_BLOCKS, kv_cache_memory_bytes=None)
    return replace(
        config.verifier_spec, model=model, max_num_seqs=8, tensor_transport=transport, tensor_host="127.0.0.1"
    )


def table_of_links(repeats: int) -> list[str]:
    """Start the verifiers, measure, and return a table in Markdown."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as closing:
        make_checkpoint(
            Path(folder),
            hidden_size=96,  # in the library a multiple of the heads
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            head_dim=HEAD_DIM,
            max_position_embeddings=MAX_MODEL_LEN,
        )
        giver, by_frames, by_channel = (Verifier(spec_of(Path(folder), way)) for way in ("", "", "gloo"))
        for verifier in (giver, by_frames, by_channel):
            closing.callback(verifier.close)
            verifier.wait_until_ready()
        takers = {FRAMES: by_frames, PLACEBO: by_frames, CHANNEL: by_channel}
        rows = asyncio.run(measure(giver, takers, repeats))
    return markdown_table(HEADINGS, rows, num_left=3)
