"""How much of the engine's own work asynchronous scheduling hides: a device is played, by a thread that sleeps.

    python tests/benchmarks/device/async_scheduling.py            # a table in Markdown, after a minute

The engine is the real one: it schedules, commits, asks and encodes what it has to say. Its runner's forwards take what
they are said to take, and no time of the host. What a step takes beyond its forward was not hidden.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from outrider.cluster.common.terminal import markdown_table
from outrider.cluster.offline.engine import NoDrafters
from outrider.verifier_service.drafting.coordinator import CoordinatorConfig, DraftCoordinator
from outrider.verifier_service.engine.engine import VerifierEngine
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.messages.engine import EngineUpdate
from outrider.verifier_service.messages.request import GenerationRequest, SamplingParams
from outrider.verifier_service.messages.tree import VerifiedTokens
from outrider.verifier_service.messages.wire import encode
from outrider.verifier_service.sampling.device_verification import ChosenTokens
from outrider.verifier_service.sampling.entries import VerificationEntry
from outrider.verifier_service.scheduling.kv_cache import BlockPool
from outrider.verifier_service.scheduling.scheduler import Scheduler, SchedulerConfig

STREAMS = (1, 16, 64, 256)
FORWARDS_S = (0.005, 0.010)
NUM_STEPS = 100
WARM_STEPS = 5
MAX_MODEL_LEN = 4096
TOKEN = 5  # that every row chooses


class PlayedDevice:
    """A runner whose forwards end so long after one another, each with the same token in every row."""

    vocab_size, max_model_len, block_size, num_blocks = 100, MAX_MODEL_LEN, 16, 1 << 16
    eos_token_ids: tuple[int, ...] = ()
    states = None

    def __init__(self, forward_s: float) -> None:
        self._forward_s = forward_s
        self._stream = ThreadPoolExecutor(1)
        self._last: Future[None] = self._stream.submit(lambda: None)

    def execute(self, batch: ScheduledBatch, chosen: torch.Tensor | None = None) -> torch.Tensor:
        self._last = self._stream.submit(time.sleep, self._forward_s)
        return torch.empty(len(batch.logits_indices), self.vocab_size)

    def verify(
        self,
        logits: torch.Tensor,
        entries: Sequence[VerificationEntry],
        rng: torch.Generator,
        rows: Sequence[int] | None = None,
    ) -> PlayedVerification:
        return PlayedVerification(self._last, len(entries))

    def close(self) -> None:
        self._stream.shutdown()


@dataclass(frozen=True, slots=True)
class PlayedVerification:
    """Ends with its forward."""

    forward: Future[None]
    num_entries: int
    corrected: frozenset[int] = frozenset()

    @property
    def chosen(self) -> ChosenTokens:
        return ChosenTokens(torch.full((self.num_entries,), TOKEN), range(self.num_entries))

    def collect(self) -> list[VerifiedTokens]:
        self.forward.result()
        return [VerifiedTokens([TOKEN], ())] * self.num_entries


def step_s(streams: int, forward_s: float, *, is_async: bool, num_steps: int = NUM_STEPS) -> float:
    """Return the median time of a step in which so many requests decode."""
    device = PlayedDevice(forward_s)
    limits = {"max_model_len": device.max_model_len, "vocab_size": device.vocab_size}
    engine = VerifierEngine(
        device,
        Scheduler(
            SchedulerConfig(max_num_batched_tokens=1 << 14, **limits), BlockPool(device.num_blocks, device.block_size)
        ),
        DraftCoordinator(NoDrafters(), CoordinatorConfig(**limits)),
        clock=time.monotonic,
        generator=torch.Generator(),
        runs_apart=True,
        async_scheduling=is_async,
        verify=device.verify,
    )
    for index in range(streams):
        request = GenerationRequest(
            request_id=str(index),
            prompt_token_ids=tuple(range(32)),
            sampling=SamplingParams(temperature=0.0, max_tokens=MAX_MODEL_LEN - 64),
            cache_salt=str(index),
        )
        assert engine.add(request) is None
    untold: list[bytes] = []
    outputs = ()
    times: list[float] = []
    begin_s = time.monotonic()
    for _ in range(WARM_STEPS + num_steps):
        said = EngineUpdate(outputs=outputs)
        outputs = tuple(engine.step(lambda said=said: untold.append(encode(said))) or ())
        assert len(outputs) == streams
        untold.clear()
        now_s = time.monotonic()
        times.append(now_s - begin_s)
        begin_s = now_s
    device.close()
    return statistics.median(times[WARM_STEPS:])


def rows(num_steps: int = NUM_STEPS, streams: Sequence[int] = STREAMS) -> list[list[str]]:
    """Return a row for each number of streams and length of a forward."""
    table = []
    for forward_s in FORWARDS_S:
        for count in streams:
            in_turn_s, async_s = (
                step_s(count, forward_s, is_async=is_async, num_steps=num_steps) for is_async in (False, True)
            )
            beyond = [1e3 * (one - forward_s) for one in (in_turn_s, async_s)]
            ratio = in_turn_s / async_s
            table.append([f"{1e3 * forward_s:.0f} ms", str(count), *(f"{ms:.1f} ms" for ms in beyond), f"{ratio:.2f}"])
    return table


if __name__ == "__main__":
    torch.set_num_threads(1)
    headings = ("forward", "streams", "beyond it, in turn", "asynchronous", "tokens/s, asynchronous / in turn")
    sys.stdout.write("\n".join(markdown_table(headings, rows())) + "\n")
