"""The gateway's core, without HTTP, gRPC or Ray: those shells only translate."""

from __future__ import annotations

import functools
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from outrider.cluster.common.api_keys import shown_key
from outrider.cluster.common.errors import InvalidRequest, ModelNotFound, OutriderError
from outrider.cluster.gateway.choice import Backend, Choice, GatewayChunk, Generation, joined, log_end
from outrider.cluster.gateway.next_turn import NextTurnPrefill, PrefillBackend
from outrider.cluster.gateway.request_parser import ModelInfo, RequestInput, RequestParser, ValidRequest
from outrider.cluster.gateway.rollout_memory import RolloutMemory
from outrider.cluster.gateway.text_codec import TextCodec
from outrider.cluster.monitoring.metrics import GatewayMetrics

if TYPE_CHECKING:
    from outrider.cluster.gateway.tracing import Tracing


class Gateway:
    """Serve prompts: check one, run its n choices at the backend, turn their tokens into text, count.

    RequestInput ── parse ──▶ ValidRequest ── generate ──▶ Backend, once per choice ──▶ Choice: tokens to text
    """

    def __init__(
        self,
        model: ModelInfo,
        tokenizer: Any,  # transformers.PreTrainedTokenizerBase, which has no types
        backend: Backend,
        metrics: GatewayMetrics,
        clock: Callable[[], float],  # monotonic, seconds
        *,
        fleet_load: Callable[[], dict[str, Any]] = dict,  # JSON-ready
        tracing: Tracing | None = None,
        memory: RolloutMemory | None = None,  # of rollouts
        prefills: PrefillBackend | None = None,  # None: no next turn is prefilled
        stream_interval: int = 1,
    ) -> None:
        self.model = model
        self.memory = memory
        self.text = TextCodec(tokenizer)
        self.metrics = metrics
        self.next_turn = None if prefills is None else NextTurnPrefill(model, self.text, prefills, metrics)
        self.is_draining = False
        self._stream_interval = stream_interval
        self._parser = RequestParser(model, self.text)
        self._fleet_load = fleet_load
        self._tracing = tracing
        self._backend = backend if tracing is None else tracing.backend(backend)
        self._clock = clock
        self._running: dict[str, Generation] = {}

    @property
    def num_running(self) -> int:
        """The number of prompts that are being generated."""
        return len(self._running)

    def load(self) -> dict[str, Any]:
        """Return this gateway's load, as vLLM's `server_load`, and the fleet's."""
        return {"server_load": self.num_running, **self._fleet_load()}

    @property
    def batch_dependent(self) -> list[str] | None:
        """The parts of any verifier's model that give a token other logits beside other requests; None: unknown."""
        found = [verifier.get("batch_dependent") for verifier in self._fleet_load().get("verifiers", ())]
        if not found or None in found:
            return None
        return sorted({part for parts in found for part in parts})

    def drain(self) -> None:
        """Have the servers accept no new requests from now on.

        The gateway itself refuses none: a request that a server has just accepted must survive a rolling update.
        """
        self.is_draining = True

    def check_model_name(self, name: str | None) -> None:
        if name is not None and name not in (self.model.name, *self.model.adapters):
            raise ModelNotFound(name)

    async def parse(self, request: RequestInput) -> ValidRequest:
        """Check and tokenise wire input of the present call; raises `InvalidRequest` naming the field.

        What may be kept of it, and who shares it, is decided here, for every door: by its `store` and salt, and by the
        key it came with.
        """
        return await self._parser.parse(request, shown_key.get())

    def require_in_vocabulary(self, ids: Iterable[int], field: str) -> None:
        """Raise `InvalidRequest` naming the field unless all ids are in the model's vocabulary."""
        self._parser.require_in_vocabulary(ids, field)

    def generate(self, request: ValidRequest, *, whole: bool = False) -> AsyncIterator[GatewayChunk]:
        """Yield the chunks of all choices as they arrive. Closing the iterator cancels every choice.

        `whole`: nobody streams, so that a choice comes at its end. Raises a failed choice's `OutriderError`, and
        cancels the others.
        """
        generate = functools.partial(self._generate, interval=sys.maxsize if whole else self._stream_interval)
        return generate(request) if self._tracing is None else self._tracing.request(request, generate)

    async def whole(self, request: ValidRequest) -> list[GatewayChunk]:
        """Generate to the end; return each choice as one chunk, in order."""
        parts: dict[int, list[GatewayChunk]] = {}
        async with aclosing(self.generate(request, whole=True)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                parts.setdefault(chunk.index, []).append(chunk)
        return [joined(parts[index]) for index in sorted(parts)]

    async def _generate(self, request: ValidRequest, *, interval: int) -> AsyncIterator[GatewayChunk]:
        started_s = self._clock()
        generation = self._begin(request, started_s, interval)
        status = "cancelled"
        try:
            while generation.unfinished:
                for chunk in await generation.next_chunks():
                    yield chunk
            status = "ok"
        except OutriderError as error:
            status = type(error).__name__
            self.metrics.request_failed(status)
            raise
        finally:
            del self._running[request.request_id]
            self.metrics.request_ended()
            await generation.close()
            log_end(generation.choices, status, e2e_s=self._clock() - started_s)

    def abort(self, request_id: str) -> bool:
        """Finish a running request with the reason "abort"; return whether it was running."""
        generation = self._running.get(request_id)
        if generation is not None:
            generation.abort()
        return generation is not None

    def abort_all(self) -> int:
        """Finish all running requests with the reason "abort"; return their number."""
        for generation in self._running.values():
            generation.abort()
        return len(self._running)

    def _begin(self, request: ValidRequest, started_s: float, interval: int) -> Generation:
        taken = {id_ for generation in self._running.values() for id_ in generation.backend_ids}
        choices = request.choices()
        if request.request_id in self._running or any(choice.request_id in taken for choice in choices):
            raise InvalidRequest(f"request id {request.request_id!r} is already running", "request_id")
        self.metrics.request_began(
            len(request.prompt_token_ids), num_choices=request.n, max_tokens=request.sampling.max_tokens
        )
        begun = [
            Choice.of(
                request,
                index,
                message,
                self.text,
                self.model.eos_token_ids,
                metrics=self.metrics,
                clock=self._clock,
                started_s=started_s,
                tells_cached=self.model.tells_cached,
            )
            for index, message in enumerate(choices)
        ]
        generation = Generation(begun, self._backend, interval)
        self._running[request.request_id] = generation
        return generation
