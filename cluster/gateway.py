"""The gateway: wire input becomes a `ValidRequest`, its n choices run at a backend, their tokens become text.

Knows nothing of HTTP, gRPC or Ray; those shells only translate.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from outrider.cluster.detokenizer import Detokenizer, silent_token_ids
from outrider.cluster.errors import InvalidRequest, ModelNotFound, OutriderError, RequestFailed
from outrider.cluster.metrics import GatewayMetrics
from outrider.verifier_service.request import (
    FinishReason,
    GenerationRequest,
    RequestOutput,
    SamplingParams,
    SpeculationMetrics,
)

logger = logging.getLogger(__name__)

MAX_CHOICES = 128  # of one prompt, as OpenAI
MAX_STOP_STRINGS = 4  # as OpenAI
MAX_STOP_STRING_CHARS = 1024  # the search for a partial stop string is quadratic in it
DEFAULT_MAX_TOKENS = 16  # of a completion, as OpenAI


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What clients may know of the served model."""

    name: str
    max_model_len: int  # prompt and output together
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    created: int  # Unix time


class Backend(Protocol):
    """Where a gateway sends requests: routing, verifier link and failover live behind it."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[RequestOutput]:
        """Yield committed tokens, the last with a finish reason; `aclose()` of the iterator cancels the generation."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestInput:
    """One prompt as some wire format brought it: typed, nothing checked. None: not given."""

    prompt: str | Sequence[int]
    prompt_field: str = "prompt"  # the prompt's name on the wire, for errors
    request_id: str | None = None
    add_special_tokens: bool = True  # False where a chat template has already written them
    default_max_tokens: int | None = DEFAULT_MAX_TOKENS  # None: the rest of the context
    n: int | None = None
    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # 0 and -1: off
    min_p: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool | None = None
    disable_spec_decode: bool | None = None
    num_speculative_tokens: int | None = None  # a cap; 0: off


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidRequest:
    """One prompt that can be served as it stands; only `Gateway.parse` makes one."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    n: int
    stop: tuple[str, ...]
    sampling: SamplingParams

    def choices(self) -> list[GenerationRequest]:
        """Return one request per choice; the choice index keeps seeded choices apart."""
        return [
            GenerationRequest(
                request_id=self.request_id if self.n == 1 else f"{self.request_id}-{index}",
                prompt_token_ids=self.prompt_token_ids,
                sampling=dataclasses.replace(self.sampling, choice_index=index),
            )
            for index in range(self.n)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one choice."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayChunk:
    """What one step added to one choice.

    Text may trail its tokens: an unfinished character, or what may become a stop string, is held back.
    The last chunk of a choice has a finish reason and a usage, and speculation metrics where the engine sent them.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    speculation: SpeculationMetrics | None = None


class Gateway:
    """Tokenise, fan out n choices, detokenise incrementally, find stop strings, count."""

    def __init__(
        self,
        model: ModelInfo,
        tokenizer: Any,  # transformers.PreTrainedTokenizerBase, which has no types
        backend: Backend,
        metrics: GatewayMetrics,
        clock: Callable[[], float],  # monotonic, seconds
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.metrics = metrics
        self._backend = backend
        self._clock = clock
        self._silent_ids = silent_token_ids(tokenizer)
        self._running: dict[str, _Generation] = {}

    def check_model_name(self, name: str | None) -> None:
        if name is not None and name != self.model.name:
            raise ModelNotFound(name)

    def parse(self, request: RequestInput) -> ValidRequest:
        """Turn wire input into a request that can be served, or raise `InvalidRequest` naming the field."""
        prompt_token_ids = self._prompt_token_ids(request)
        num_choices = 1 if request.n is None else request.n
        _require(1 <= num_choices <= MAX_CHOICES, "n", f"in [1, {MAX_CHOICES}]")
        return ValidRequest(
            request_id=request.request_id or uuid.uuid4().hex,
            prompt_token_ids=prompt_token_ids,
            n=num_choices,
            stop=_stop_strings(request.stop),
            sampling=self._sampling(request, self.model.max_model_len - len(prompt_token_ids)),
        )

    def _prompt_token_ids(self, request: RequestInput) -> tuple[int, ...]:
        field = request.prompt_field
        if isinstance(request.prompt, str):
            ids = tuple(self.tokenizer.encode(request.prompt, add_special_tokens=request.add_special_tokens))
        else:
            ids = tuple(request.prompt)
            self._require_in_vocabulary(ids, field)
        _require(bool(ids), field, "at least one token: it is empty, and the tokenizer adds none")
        limit = self.model.max_model_len
        if len(ids) >= limit:
            raise InvalidRequest(
                f"{field} has {len(ids)} tokens; with at least one of output they must fit in {limit}", field
            )
        return ids

    def _require_in_vocabulary(self, ids: Sequence[int], field: str) -> None:
        in_bounds = all(0 <= id_ < self.model.vocab_size for id_ in ids)
        _require(in_bounds, field, f"token ids in [0, {self.model.vocab_size})")

    def _sampling(self, request: RequestInput, num_free_tokens: int) -> SamplingParams:
        stop_token_ids = tuple(request.stop_token_ids or ())
        self._require_in_vocabulary(stop_token_ids, "stop_token_ids")
        given = {
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": 0 if request.top_k == -1 else request.top_k,
            "min_p": request.min_p,
            "seed": request.seed,
            "ignore_eos": request.ignore_eos,
            "num_speculative_tokens": 0 if request.disable_spec_decode else request.num_speculative_tokens,
        }
        set_fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        max_tokens = _max_tokens(request, num_free_tokens)
        try:
            return SamplingParams(max_tokens=max_tokens, stop_token_ids=stop_token_ids, **set_fields)
        except ValueError as error:  # its text begins with the field's name
            raise InvalidRequest(str(error), field=str(error).split(" ", 1)[0]) from error

    async def generate(self, request: ValidRequest) -> AsyncIterator[GatewayChunk]:
        """Yield the chunks of all choices, interleaved as they come. Closing the iterator cancels every choice.

        Raises an `OutriderError` when a choice fails; the others are cancelled then.
        """
        generation = self._begin(request)
        try:
            while generation.unfinished:
                for chunk in await generation.next_chunks():
                    yield chunk
        except OutriderError as error:
            self.metrics.request_failed(type(error).__name__)
            raise
        finally:
            del self._running[request.request_id]
            self.metrics.request_ended()
            await generation.close()

    def abort(self, request_id: str) -> bool:
        """Finish a running request with the reason "abort"; return whether it was running."""
        generation = self._running.get(request_id)
        if generation is not None:
            generation.abort()
        return generation is not None

    def _begin(self, request: ValidRequest) -> _Generation:
        taken = {id_ for generation in self._running.values() for id_ in generation.backend_ids}
        choices = request.choices()
        if request.request_id in self._running or any(choice.request_id in taken for choice in choices):
            raise InvalidRequest(f"request id {request.request_id!r} is already running", "request_id")
        self.metrics.request_began(len(request.prompt_token_ids))
        started_s = self._clock()
        generation = _Generation(
            [self._choice(index, choice, request, started_s) for index, choice in enumerate(choices)], self._backend
        )
        self._running[request.request_id] = generation
        return generation

    def _choice(self, index: int, message: GenerationRequest, request: ValidRequest, started_s: float) -> _Choice:
        eos = () if request.sampling.ignore_eos else self.model.eos_token_ids
        return _Choice(
            request_id=request.request_id,
            index=index,
            message=message,
            stop_ids=frozenset((*request.sampling.stop_token_ids, *eos)),
            detokenizer=Detokenizer(self.tokenizer, stop=request.stop, silent_ids=self._silent_ids),
            metrics=self.metrics,
            clock=self._clock,
            started_s=started_s,
        )


@dataclass(slots=True, kw_only=True)
class _Choice:
    """One choice under way: what has been published of it, and when."""

    request_id: str
    index: int
    message: GenerationRequest
    stop_ids: frozenset[int]
    detokenizer: Detokenizer
    metrics: GatewayMetrics
    clock: Callable[[], float]
    started_s: float
    previous_s: float | None = None
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    speculation: SpeculationMetrics | None = None

    def absorb(self, output: RequestOutput) -> GatewayChunk:
        """Turn one output of the backend into a chunk; its finish reason, or a stop string, makes it the last."""
        if output.finish_reason is FinishReason.ERROR:
            raise RequestFailed(output.error or "the engine failed")
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        self.speculation = output.speculation or self.speculation
        shown = output.token_ids
        if output.finish_reason is FinishReason.STOP and shown and shown[-1] in self.stop_ids:
            shown = shown[:-1]  # a stop token ends the text and is no part of it
        new = self.detokenizer.push(shown)
        if new.stopped:
            token_ids = output.token_ids[: new.num_tokens]
            return self._counted(self.final_chunk(new.text, token_ids, FinishReason.STOP))
        if output.finish_reason is None:
            return self._counted(self._chunk(new.text, output.token_ids))
        rest = self.detokenizer.flush()
        reason = FinishReason.STOP if rest.stopped else output.finish_reason
        return self._counted(self.final_chunk(new.text + rest.text, output.token_ids, reason))

    def final_chunk(self, text: str, token_ids: tuple[int, ...], reason: FinishReason) -> GatewayChunk:
        if reason is FinishReason.ABORT:
            text += self.detokenizer.flush().text
        usage = Usage(
            num_prompt_tokens=len(self.message.prompt_token_ids),
            num_completion_tokens=self.num_completion_tokens + len(token_ids),
            num_cached_tokens=self.num_cached_tokens,
        )
        chunk = self._chunk(text, token_ids)
        return dataclasses.replace(chunk, finish_reason=reason, usage=usage, speculation=self.speculation)

    def count_finish(self, reason: FinishReason) -> None:
        self.metrics.choice_finished(reason.value, since_arrival_s=self.clock() - self.started_s)

    def _chunk(self, text: str, token_ids: tuple[int, ...]) -> GatewayChunk:
        return GatewayChunk(request_id=self.request_id, index=self.index, text=text, token_ids=token_ids)

    def _counted(self, chunk: GatewayChunk) -> GatewayChunk:
        self.num_completion_tokens += len(chunk.token_ids)
        if chunk.token_ids:
            now_s = self.clock()
            self.metrics.tokens_published(
                len(chunk.token_ids),
                since_arrival_s=now_s - self.started_s,
                since_previous_s=None if self.previous_s is None else now_s - self.previous_s,
            )
            self.previous_s = now_s
        return chunk


class _Generation:
    """The choices of one prompt: a task each, their chunks merged in one queue.

    The queue is unbounded on purpose: a slow client holds at most `max_tokens` chunks here and no KV in a verifier.
    """

    def __init__(self, choices: Sequence[_Choice], backend: Backend) -> None:
        self.unfinished = {choice.index: choice for choice in choices}
        self.backend_ids = [choice.message.request_id for choice in choices]
        self._choices = choices
        self._queue: asyncio.Queue[GatewayChunk | OutriderError | None] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._run(choice, backend)) for choice in choices]

    async def next_chunks(self) -> list[GatewayChunk]:
        """Wait for the next chunk of any choice; once aborted, return the last chunk of every unfinished one."""
        item = await self._queue.get()
        if isinstance(item, OutriderError):
            self.unfinished.clear()
            raise item
        if item is None:
            chunks = [choice.final_chunk("", (), FinishReason.ABORT) for choice in self.unfinished.values()]
        else:
            chunks = [item]
        for chunk in chunks:
            if chunk.finish_reason is not None:
                self.unfinished.pop(chunk.index).count_finish(chunk.finish_reason)
        return chunks

    def abort(self) -> None:
        self._queue.put_nowait(None)

    async def close(self) -> None:
        """Cancel what still runs, wait until its backend iterators are closed, and count what was left."""
        for choice in self.unfinished.values():
            choice.count_finish(FinishReason.ABORT)
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, Exception):
                logger.error("a backend stream failed while it was closed", exc_info=result)
        for choice in self._choices:
            if choice.speculation is not None:
                choice.metrics.speculation_ended(choice.speculation)

    async def _run(self, choice: _Choice, backend: Backend) -> None:
        try:
            async with _closing(backend.generate(choice.message)) as outputs:
                async for output in outputs:
                    chunk = choice.absorb(output)
                    self._queue.put_nowait(chunk)
                    if chunk.finish_reason is not None:
                        return
            raise RequestFailed("the backend ended the stream without a finish reason")
        except OutriderError as error:
            self._queue.put_nowait(error)
        except Exception as error:  # a fault of ours: told to the log, not to the client
            logger.exception("request %s failed", choice.message.request_id)
            failure = RequestFailed("internal error")
            failure.__cause__ = error
            self._queue.put_nowait(failure)


@asynccontextmanager
async def _closing(outputs: AsyncIterator[RequestOutput]) -> AsyncIterator[AsyncIterator[RequestOutput]]:
    """Close a backend's iterator in any case: that is what frees KV and draft session."""
    try:
        yield outputs
    finally:
        if (aclose := getattr(outputs, "aclose", None)) is not None:
            await aclose()


def _max_tokens(request: RequestInput, num_free_tokens: int) -> int:
    """Return the output's limit; a default shrinks to what is free, a number that was asked for is refused."""
    if request.max_tokens is None:
        default = request.default_max_tokens
        return num_free_tokens if default is None else min(default, num_free_tokens)
    field = request.max_tokens_field
    _require(request.max_tokens >= 1, field, "at least 1")
    _require(request.max_tokens <= num_free_tokens, field, f"at most {num_free_tokens} after this prompt")
    return request.max_tokens


def _stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    _require(len(strings) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings")
    fits = all(1 <= len(string) <= MAX_STOP_STRING_CHARS for string in strings)
    _require(fits, "stop", f"strings of 1 to {MAX_STOP_STRING_CHARS} characters")
    return strings


def _require(condition: bool, field: str, expectation: str) -> None:
    if not condition:
        raise InvalidRequest(f"{field} must be {expectation}", field)
