"""The running choices of one prompt: one task each; their tokens become text, their chunks are merged."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from outrider.cluster.common.background import is_being_cancelled
from outrider.cluster.common.errors import OutriderError, RequestFailed
from outrider.cluster.gateway.detokenizer import Detokenizer
from outrider.cluster.gateway.kv_transfer import KeptOutput
from outrider.cluster.monitoring.metrics import GatewayMetrics
from outrider.verifier_service.messages.request import (
    FinishReason,
    GenerationRequest,
    RequestOutput,
    SpeculationMetrics,
    TokenLogprobs,
    TokenOrigin,
)

logger = logging.getLogger(__name__)
request_logger = logging.getLogger("outrider.request")


class Backend(Protocol):
    """A gateway's way to the verifiers: routing, streams and failover are behind it."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[RequestOutput]:
        """Yield committed tokens, the last with a finish reason; `aclose()` of the iterator cancels the generation."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one choice."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputToken:
    """One token of a choice. If a character is split over several tokens, it is the text of the last one."""

    id: int
    text: str
    origin: TokenOrigin
    logprobs: TokenLogprobs | None = None  # if the request asked for them
    weight_version: str = ""  # of the weights that drew it; empty: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpan:
    """The tokens `start` to `end` of a choice, without `end`, were drawn from weights of one version."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayChunk:
    """One choice's new tokens since its last chunk.

    A token is held back until its text is final (see detokenizer.py): tokens and text always match. A choice's last
    chunk has a finish reason, a usage, and the speculation metrics that the engine sent.
    """

    request_id: str
    index: int
    tokens: tuple[OutputToken, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # on one chunk, if the request asked for them
    finish_reason: FinishReason | None = None
    stop_string: str | None = None  # that ended the choice
    usage: Usage | None = None
    speculation: SpeculationMetrics | None = None
    kv_transfer_params: dict[str, Any] | None = None  # on the last one, where the prompt's KV is kept

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token.id for token in self.tokens)

    @property
    def weight_spans(self) -> list[WeightSpan]:
        """The versions of the weights that drew the tokens, as runs of tokens."""
        runs = itertools.groupby(enumerate(self.tokens), key=lambda item: item[1].weight_version)
        places = [(version, [index for index, _ in run]) for version, run in runs]
        return [WeightSpan(version=version, start=own[0], end=own[-1] + 1) for version, own in places]

    @property
    def origins(self) -> tuple[TokenOrigin, ...]:
        return tuple(token.origin for token in self.tokens)


def merged(chunks: Iterable[GatewayChunk]) -> list[GatewayChunk]:
    """Join each choice's chunks into one; choices are in the order of their first chunk."""
    parts: dict[int, list[GatewayChunk]] = {}
    for chunk in chunks:
        parts.setdefault(chunk.index, []).append(chunk)
    return [joined(part) for part in parts.values()]


def joined(chunks: Sequence[GatewayChunk]) -> GatewayChunk:
    """Return consecutive chunks of one choice as one."""
    if len(chunks) == 1:
        return chunks[0]
    return dataclasses.replace(
        chunks[-1],
        tokens=tuple(token for chunk in chunks for token in chunk.tokens),
        prompt_logprobs=next((chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs is not None), None),
    )


@dataclass(slots=True, kw_only=True)
class Choice:
    """One running choice: what it has published, and when."""

    request_id: str
    index: int
    message: GenerationRequest
    silent_stop_ids: frozenset[int]  # tokens that end the choice and are left out of its text
    detokenizer: Detokenizer
    is_prompt_only: bool  # only the prompt's log probabilities are wanted
    metrics: GatewayMetrics
    clock: Callable[[], float]
    started_s: float
    first_s: float | None = None
    previous_s: float | None = None
    finish_reason: FinishReason | None = None
    num_completion_tokens: int = 0
    tells_cached: bool = True  # False: the client is told of no prompt tokens in the prefix cache
    num_cached_tokens: int = 0
    speculation: SpeculationMetrics | None = None
    kv_transfer_params: dict[str, Any] | None = None
    _held: list[OutputToken] = field(default_factory=list)  # tokens whose text is not final

    def absorb(self, output: RequestOutput) -> GatewayChunk:
        """Turn a backend's output into a chunk; a finish reason or a stop string makes it the last one."""
        if output.finish_reason is FinishReason.ERROR:
            raise RequestFailed(output.error or "the engine failed")
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        self.speculation = output.speculation or self.speculation
        if isinstance(output, KeptOutput):
            self.kv_transfer_params = output.params
        reason = output.finish_reason
        texts: list[str] = []
        if self.is_prompt_only:
            reason = FinishReason.LENGTH
        else:
            self._held += tokens_of(output)
            texts = self.detokenizer.push(self._shown(output))
        if self.detokenizer.stopped:
            reason = FinishReason.STOP
        elif reason is not None:
            return self._last_chunk(texts, reason, output.prompt_logprobs)
        return self._chunk(texts, reason, output.prompt_logprobs)

    def aborted_chunk(self) -> GatewayChunk:
        """Return the last chunk of an aborted choice."""
        return self._last_chunk([], FinishReason.ABORT, None)

    def count_finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        self.metrics.choice_finished(reason.value, since_arrival_s=self.clock() - self.started_s)

    def _shown(self, output: RequestOutput) -> tuple[int, ...]:
        ids = output.token_ids
        ends_in_stop = output.finish_reason is FinishReason.STOP and ids and ids[-1] in self.silent_stop_ids
        return ids[:-1] if ends_in_stop else ids

    def _last_chunk(
        self,
        texts: list[str],
        reason: FinishReason,
        prompt_logprobs: tuple[TokenLogprobs | None, ...] | None,
    ) -> GatewayChunk:
        texts = texts + self.detokenizer.flush()
        if self.detokenizer.stopped:
            return self._chunk(texts, FinishReason.STOP, prompt_logprobs)
        silent = [""] * (len(self._held) - len(texts))  # the text of a stop token
        return self._chunk(texts + silent, reason, prompt_logprobs)

    def _chunk(
        self,
        texts: Sequence[str],
        reason: FinishReason | None,
        prompt_logprobs: tuple[TokenLogprobs | None, ...] | None,
    ) -> GatewayChunk:
        tokens = tuple(dataclasses.replace(token, text=text) for token, text in zip(self._held, texts, strict=False))
        del self._held[: len(tokens)]
        self._count(len(tokens))
        usage = Usage(
            num_prompt_tokens=len(self.message.prompt_token_ids),
            num_completion_tokens=self.num_completion_tokens,
            num_cached_tokens=self.num_cached_tokens if self.tells_cached else 0,
        )
        return GatewayChunk(
            request_id=self.request_id,
            index=self.index,
            tokens=tokens,
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            stop_string=self.detokenizer.stop_string,
            usage=usage if reason is not None else None,
            speculation=self.speculation if reason is not None else None,
            kv_transfer_params=self.kv_transfer_params,
        )

    def _count(self, num_tokens: int) -> None:
        if num_tokens == 0:
            return
        self.num_completion_tokens += num_tokens
        now_s = self.clock()
        self.metrics.tokens_published(
            num_tokens,
            since_arrival_s=now_s - self.started_s,
            since_previous_s=None if self.previous_s is None else now_s - self.previous_s,
        )
        self.previous_s = now_s
        self.first_s = now_s if self.first_s is None else self.first_s


def tokens_of(output: RequestOutput) -> list[OutputToken]:
    """Return an output's tokens, without their texts."""
    logprobs = output.logprobs if output.logprobs is not None else (None,) * len(output.token_ids)
    items, version = zip(output.token_ids, output.origins, logprobs, strict=True), output.weight_version
    return [
        OutputToken(id=id_, text="", origin=origin, logprobs=own, weight_version=version) for id_, origin, own in items
    ]


class Generation:
    """The choices of one prompt: one task each, their chunks merged.

    A slow client holds no KV in a verifier, and at most `max_tokens` tokens per choice here: it gets all that arrived
    meanwhile as one chunk per choice.
    """

    def __init__(self, choices: Sequence[Choice], backend: Backend) -> None:
        self.choices = choices
        self.unfinished = {choice.index: choice for choice in choices}
        self.backend_ids = [choice.message.request_id for choice in choices]
        self._arrived: list[GatewayChunk] = []
        self._error: OutriderError | None = None
        self._is_aborted = False
        self._news = asyncio.Event()
        self._tasks = [asyncio.create_task(self._run(choice, backend)) for choice in choices]

    async def next_chunks(self) -> list[GatewayChunk]:
        """Wait for new chunks; once aborted, return every unfinished choice's last chunk.

        Raises a failed choice's `OutriderError` once all earlier chunks have been returned.
        """
        await self._news.wait()
        arrived, self._arrived = self._arrived, []
        if self._error is None:
            self._news.clear()
        elif not arrived:
            self.unfinished.clear()
            raise self._error
        if self._is_aborted:
            ended = {chunk.index for chunk in arrived if chunk.finish_reason is not None}
            arrived += [choice.aborted_chunk() for index, choice in self.unfinished.items() if index not in ended]
        chunks = merged(arrived)
        for chunk in chunks:
            if chunk.finish_reason is not None:
                self.unfinished.pop(chunk.index).count_finish(chunk.finish_reason)
        return chunks

    def abort(self) -> None:
        self._is_aborted = True
        self._news.set()

    async def close(self) -> None:
        """Cancel the running tasks, wait until their backend iterators are closed, and count the choices' ends."""
        for choice in self.unfinished.values():
            choice.count_finish(FinishReason.ABORT)
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, Exception):
                logger.error("a backend stream failed while it was closed", exc_info=result)
        for choice in self.choices:
            if choice.speculation is not None:
                choice.metrics.speculation_ended(choice.speculation)

    async def _run(self, choice: Choice, backend: Backend) -> None:
        try:
            async with _closing(backend.generate(choice.message)) as outputs:
                async for output in outputs:
                    if self._error is not None:  # another choice failed: the request has ended
                        return
                    chunk = choice.absorb(output)
                    self._arrived.append(chunk)
                    self._news.set()
                    if chunk.finish_reason is not None:
                        return
            raise RequestFailed("the backend ended the stream without a finish reason")
        except OutriderError as error:
            self._fail(error)
        except asyncio.CancelledError:
            if is_being_cancelled():
                raise
            logger.error("the backend cancelled request %s", choice.message.request_id)
            self._fail(RequestFailed("internal error"))
        except Exception as error:  # a bug: logged, but not shown to the client
            logger.exception("request %s failed", choice.message.request_id)
            failure = RequestFailed("internal error")
            failure.__cause__ = error
            self._fail(failure)

    def _fail(self, error: OutriderError) -> None:
        self._error = self._error or error
        self._news.set()


@asynccontextmanager
async def _closing(outputs: AsyncIterator[RequestOutput]) -> AsyncIterator[AsyncIterator[RequestOutput]]:
    """Close a backend's iterator on exit: closing frees the KV and the draft session."""
    try:
        yield outputs
    finally:
        if (aclose := getattr(outputs, "aclose", None)) is not None:
            await aclose()


def log_end(choices: Sequence[Choice], status: str, *, e2e_s: float) -> None:
    """Log a request's end: one record, with its figures as extra fields, never its text."""
    first = [choice.first_s - choice.started_s for choice in choices if choice.first_s is not None]
    known = [choice.speculation for choice in choices if choice.speculation is not None]
    num_draft_tokens = sum(speculation.num_draft_tokens for speculation in known)
    num_accepted_tokens = sum(speculation.num_accepted_tokens for speculation in known)
    fields = {
        "request_id": choices[0].request_id,
        "status": status,  # ok, cancelled, or the error's class
        "num_prompt_tokens": len(choices[0].message.prompt_token_ids),
        "num_completion_tokens": sum(choice.num_completion_tokens for choice in choices),
        "ttft_s": min(first, default=None),
        "e2e_s": e2e_s,
        "finish_reason": ",".join(sorted({choice.finish_reason.value for choice in choices if choice.finish_reason})),
        "acceptance": num_accepted_tokens / num_draft_tokens if num_draft_tokens else None,
    }
    request_logger.info("request %s: %s", fields["request_id"], status, extra=fields)
