"""A verifier without Ray, gateway or router: its engine is a process, its shell and links are an event loop here.

What a `VerifierReplica` is made of, put together for drills of drafters and links: the engine's own loop and host,
links over gRPC.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from fakes.played_fleet import outputs_at
from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.offline.engine import RankProcesses
from outrider.cluster.replicas.engine_host import EngineHost
from outrider.cluster.router.fleet import DrafterReport
from outrider.verifier_service.engine.factory import run_verifier_rank
from outrider.verifier_service.engine.service import RequestTable
from outrider.verifier_service.engine.verifier_spec import VerifierSpec
from outrider.verifier_service.links.link_pool import LinkPool
from outrider.verifier_service.messages.engine import FROM_ENGINE, EngineLoad, EngineReady, EngineUpdate
from outrider.verifier_service.messages.link import DrafterEndpoint, Hello
from outrider.verifier_service.messages.request import GenerationRequest, SamplingParams, SpeculationPlan
from outrider.verifier_service.model.ranks import PipeListener
from outrider.verifier_service.model.tokenizer import load_tokenizer
from services.live_service import Streamed, wait_for
from tiny.forking import FORKING

CALL_TIMEOUT_S = 60.0
ResultT = TypeVar("ResultT")


class ProcessRanks:
    """The one rank of a verifier as a process, for an `EngineHost` that is given actors elsewhere."""

    def __init__(self, spec: VerifierSpec) -> None:
        self._processes = RankProcesses(run_verifier_rank, spec, 1, first_rank=0, context=FORKING)
        self._listener = PipeListener(self._processes.rank(0, 1).shell_address)

    async def connect(self) -> Connection:
        with self._listener:
            self._processes.start()
            return await asyncio.to_thread(self._listener.accept, self._processes.are_alive)

    def ended(self) -> bool:
        return not self._processes.are_alive()

    def stop(self) -> None:
        self._processes.close()


class LocalVerifier:
    """One verifier of the embedded target; drafts are pinned on, by whichever drafter there is a link to."""

    def __init__(self) -> None:
        self._config = ServiceConfig(num_drafters=0, check_integrity=True, kv_cache_memory_bytes=64 << 20)
        self._tokenizer = load_tokenizer(self._config.verifier_spec.model)
        self._ids = itertools.count()
        self._load: EngineLoad | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="local-verifier", daemon=True)
        self._thread.start()
        self._await(self._start())

    async def _start(self) -> None:
        self._host = EngineHost(
            on_message=self._on_update,
            on_failure=lambda reason: self._table.fail(reason),
            timeout_s=self._config.engine_timeout_s,
        )
        self._table = RequestTable(self._host.send)
        ready: EngineReady = await self._host.start(ProcessRanks(self._config.verifier_spec), FROM_ENGINE)
        hello = Hello(
            verifier_id="local",
            epoch=time.time_ns(),
            vocab_size=ready.vocab_size,
            vocab_fingerprint=ready.vocab_fingerprint,
        )
        self._links = LinkPool(hello, self._host.send)
        self._host.on_close(self._links.close)

    def _on_update(self, update: EngineUpdate) -> None:
        self._table.deliver(update.outputs)
        if update.relays:  # there are some once there are links
            self._links.send(update.relays)
        self._load = update.load or self._load

    def close(self) -> None:
        self._await(self._host.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _await(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(CALL_TIMEOUT_S)

    # --- what a router would tell it ---

    def report_drafter(self, report: DrafterReport) -> None:
        endpoint = DrafterEndpoint(drafter_id=report.drafter_id, endpoint=report.endpoint, epoch=report.epoch)
        self._await(self._links.hold([endpoint]))

    def remove_drafter(self, drafter_id: str) -> None:
        self._await(self._links.hold([]))

    # --- what a client would ask ---

    def stream(
        self,
        prompt: str,
        *,
        max_tokens: int,
        on_chunk: Callable[[int], None] = lambda _: None,
        timeout_s: float = 60.0,
        disable_spec_decode: bool = False,
        ignore_eos: bool = False,
        return_token_ids: bool = True,
        **sampling: Any,
    ) -> Streamed:
        """Stream a completion, as `LiveService.stream` does; `timeout_s` bounds each pause."""
        assert return_token_ids, "there is no gateway to make text of them"
        request = GenerationRequest(
            request_id=str(next(self._ids)),
            prompt_token_ids=tuple(self._tokenizer(prompt)["input_ids"]),
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, **{"temperature": 0.0, **sampling}),
            plan=SpeculationPlan(draft_length=0 if disable_spec_decode else 4, is_pinned=True),
        )
        streamed = Streamed()
        outputs = outputs_at(self._table, request)
        while (output := self._await(_next(outputs, timeout_s))) is not None:
            streamed.arrivals_s.append(time.monotonic())
            streamed.token_ids += output.token_ids
            streamed.finish_reason = output.finish_reason or streamed.finish_reason
            streamed.speculation = {"num_drafts": output.speculation.num_drafts}
            on_chunk(len(streamed.arrivals_s))
        return streamed

    def wait_for_fleet(self, num_verifiers: int, num_drafters: int) -> None:
        assert num_verifiers == 1
        wait_for(lambda: len(self._links.linked_drafters) == num_drafters, CALL_TIMEOUT_S)

    def wait_for_drafts(self) -> None:
        wait_for(lambda: self.stream("import os\n", max_tokens=8).speculation["num_drafts"] > 0, CALL_TIMEOUT_S)

    def wait_until_idle(self) -> None:
        """Wait until neither a request nor a KV block is held."""
        wait_for(self._is_idle, CALL_TIMEOUT_S)

    def _is_idle(self) -> bool:
        load = self._load
        return load is not None and load.num_running + load.num_waiting + load.kv_usage == 0


async def _next(outputs: AsyncGenerator[Any], timeout_s: float) -> Any:
    """Return the next output; None after the last one."""
    async with asyncio.timeout(timeout_s):
        async for output in outputs:
            if output is not None:  # None: the engine has the request
                return output
    return None
