"""The running choices of one prompt: their tokens become text as they come, their chunks are merged."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from outrider.cluster.common.background import is_being_cancelled
from outrider.cluster.common.errors import OutriderError, RequestFailed
from outrider.cluster.gateway.detokenizer import Detokenizer, NoText
from outrider.cluster.gateway.kv_transfer import KeptOutput
from outrider.cluster.gateway.request_parser import ValidRequest
from outrider.cluster.gateway.text_codec import TextCodec
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

ItemT = TypeVar("ItemT")

_COLUMNS = ("texts", "token_ids", "origins", "logprobs", "weight_versions")


class Backend(Protocol):
    """A gateway's way to the verifiers: routing, streams and failover are behind it."""

    async def generate(self, request: GenerationRequest, hear: Callable[[RequestOutput], None]) -> None:
        """Tell `hear` of committed tokens, the last with a finish reason, then return.

        Cancelling the call cancels the generation. What `hear` is told is its own from then on.
        """
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpan:
    """The tokens `start` to `end` of a choice, without `end`, were drawn from weights of one version."""

    version: str
    start: int
    end: int


@dataclass(slots=True, kw_only=True)  # not frozen: one per choice and step
class GatewayChunk:
    """One choice's new tokens since its last chunk, in columns.

    A token is held back until its text is final (see detokenizer.py): tokens and text always match. A choice's last
    chunk has a finish reason, a usage, and the speculation metrics that the engine sent.
    """

    request_id: str
    index: int
    texts: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    origins: tuple[TokenOrigin, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # empty: the request asked for none
    weight_versions: tuple[str, ...] = ()  # of the weights that drew each; empty: unknown
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # on one chunk, if the request asked for them
    finish_reason: FinishReason | None = None
    stop_string: str | None = None  # that ended the choice
    usage: Usage | None = None
    speculation: SpeculationMetrics | None = None
    kv_transfer_params: dict[str, Any] | None = None  # on the last one, where the prompt's KV is kept

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def tokens(self) -> tuple[OutputToken, ...]:
        rows = zip(self.token_ids, self.texts, self.origins, self.logprobs or (None,) * len(self.texts), strict=True)
        return tuple(OutputToken(id=id_, text=text, origin=origin, logprobs=own) for id_, text, origin, own in rows)

    @property
    def weight_spans(self) -> list[WeightSpan]:
        """The versions of the weights that drew the tokens, as runs of tokens."""
        runs = itertools.groupby(enumerate(self.weight_versions), key=lambda item: item[1])
        places = [(version, [index for index, _ in run]) for version, run in runs]
        return [WeightSpan(version=version, start=own[0], end=own[-1] + 1) for version, own in places]


def merged(chunks: list[GatewayChunk]) -> list[GatewayChunk]:
    """Join each choice's chunks into one; choices are in the order of their first chunk."""
    if len(chunks) == 1:
        return chunks
    parts: dict[int, list[GatewayChunk]] = {}
    for chunk in chunks:
        parts.setdefault(chunk.index, []).append(chunk)
    return [joined(part) for part in parts.values()]


def joined(chunks: Sequence[GatewayChunk]) -> GatewayChunk:
    """Return consecutive chunks of one choice as one."""
    if len(chunks) == 1:
        return chunks[0]
    columns: dict[str, Any] = {
        name: tuple(itertools.chain.from_iterable(getattr(chunk, name) for chunk in chunks)) for name in _COLUMNS
    }
    return dataclasses.replace(
        chunks[-1],
        **columns,
        prompt_logprobs=next((chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs is not None), None),
    )


@dataclass(slots=True, kw_only=True)
class Choice:
    """One running choice: what it has published, and when."""

    request_id: str
    index: int
    message: GenerationRequest
    silent_stop_ids: frozenset[int]  # tokens that end the choice and are left out of its text
    detokenizer: Detokenizer | NoText
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
    # of tokens whose text is not final
    _ids: list[int] = field(default_factory=list)
    _origins: list[TokenOrigin] = field(default_factory=list)
    _logprobs: list[TokenLogprobs] = field(default_factory=list)
    _versions: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        request: ValidRequest,
        index: int,
        message: GenerationRequest,
        text: TextCodec | None,
        end_ids: Collection[int],
        *,
        metrics: GatewayMetrics,
        clock: Callable[[], float],
        started_s: float,
        tells_cached: bool = True,
    ) -> Choice:
        """Return a request's choice before its first output. `text`: None where nobody reads any.

        `end_ids`: the model's end-of-sequence tokens.
        """
        sampling = request.sampling
        stop_ids = frozenset((*sampling.stop_token_ids, *(() if sampling.ignore_eos else end_ids)))
        return cls(
            request_id=request.request_id,
            index=index,
            message=message,
            silent_stop_ids=frozenset() if request.include_stop else stop_ids,
            detokenizer=NoText() if text is None else request.detokenizer(text),
            is_prompt_only=request.is_prompt_only,
            metrics=metrics,
            clock=clock,
            started_s=started_s,
            tells_cached=tells_cached,
        )

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
            self._hold(output)
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
        silent = [""] * (len(self._ids) - len(texts))  # the text of a stop token
        return self._chunk(texts + silent, reason, prompt_logprobs)

    def _chunk(
        self,
        texts: Sequence[str],
        reason: FinishReason | None,
        prompt_logprobs: tuple[TokenLogprobs | None, ...] | None,
    ) -> GatewayChunk:
        num_tokens = min(len(texts), len(self._ids))
        self._count(num_tokens)
        chunk = GatewayChunk(
            request_id=self.request_id,
            index=self.index,
            texts=tuple(texts[:num_tokens]),
            token_ids=_taken(self._ids, num_tokens),
            origins=_taken(self._origins, num_tokens),
            logprobs=_taken(self._logprobs, num_tokens),
            weight_versions=_taken(self._versions, num_tokens),
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            stop_string=self.detokenizer.stop_string,
            kv_transfer_params=self.kv_transfer_params,
        )
        if reason is not None:
            chunk.speculation = self.speculation
            chunk.usage = Usage(
                num_prompt_tokens=len(self.message.prompt_token_ids),
                num_completion_tokens=self.num_completion_tokens,
                num_cached_tokens=self.num_cached_tokens if self.tells_cached else 0,
            )
        return chunk

    def _hold(self, output: RequestOutput) -> None:
        self._ids += output.token_ids
        self._origins += output.origins
        self._logprobs += output.logprobs or ()
        self._versions += [output.weight_version] * len(output.token_ids)

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


def _taken(column: list[ItemT], num_tokens: int) -> tuple[ItemT, ...]:
    """Take the first items of a column."""
    if num_tokens >= len(column):
        taken = tuple(column)
        column.clear()
    else:
        taken = tuple(column[:num_tokens])
        del column[:num_tokens]
    return taken


class Generation:
    """The choices of one prompt: a call of the backend each, but one for all beams; their chunks merged.

    A slow client holds no KV in a verifier, and at most `max_tokens` tokens per choice here: it gets all that arrived
    meanwhile as one chunk per choice.
    """

    def __init__(self, choices: Sequence[Choice], backend: Backend, interval: int) -> None:
        """`interval`: after its first token, a choice's news are told once there are so many tokens, or its end."""
        self.choices = choices
        self.unfinished = {choice.index: choice for choice in choices}
        self.backend_ids = [choice.message.request_id for choice in choices]
        self._arrived: list[GatewayChunk] = []
        self._error: OutriderError | None = None
        self._is_aborted = False
        self._news = asyncio.Event()
        self._interval = interval
        self._num_untold = dict.fromkeys(self.unfinished, interval)  # tokens of each choice
        self._whole: set[int] = set()  # choices whose last chunk has arrived
        calling = [choice for choice in choices if choice.index == 0 or choice.message.sampling.beams is None]
        self._calls = {choice.index: asyncio.create_task(self._run(choice, backend)) for choice in calling}

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
            arrived += [choice.aborted_chunk() for index, choice in self.unfinished.items() if index not in self._whole]
        chunks = merged(arrived)
        for chunk in chunks:
            if chunk.finish_reason is not None:
                self.unfinished.pop(chunk.index).count_finish(chunk.finish_reason)
        return chunks

    def abort(self) -> None:
        self._is_aborted = True
        self._news.set()

    async def close(self) -> None:
        """Cancel the running calls, wait until all have ended, and count the choices' ends."""
        for choice in self.unfinished.values():
            choice.count_finish(FinishReason.ABORT)
        for index, call in self._calls.items():
            if index not in self._whole:  # else it ends by itself
                call.cancel()
        for result in await asyncio.gather(*self._calls.values(), return_exceptions=True):
            if isinstance(result, Exception):
                logger.error("a call of the backend failed while it was closed", exc_info=result)
        for choice in self.choices:
            if choice.speculation is not None:
                choice.metrics.speculation_ended(choice.speculation)

    async def _run(self, choice: Choice, backend: Backend) -> None:
        try:
            await backend.generate(choice.message, functools.partial(self._hear, choice))
            if choice.index not in self._whole:
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

    def _hear(self, choice: Choice, output: RequestOutput) -> None:
        if choice.message.sampling.beams is None:
            self._take(choice, output)
        else:  # its only output: what was found, or why nothing was
            for each, beam in zip(self.choices, output.beams or itertools.repeat(output), strict=False):
                self._take(each, beam)

    def _take(self, choice: Choice, output: RequestOutput) -> None:
        if self._error is not None or choice.index in self._whole:  # the request has ended, or the choice
            return
        chunk = choice.absorb(output)
        self._arrived.append(chunk)
        self._num_untold[choice.index] += len(chunk.token_ids)
        if chunk.finish_reason is not None:
            self._whole.add(choice.index)
            if output.finish_reason is None:  # by a stop string: the backend does not know
                self._calls[choice.index].cancel()
        elif self._num_untold[choice.index] < self._interval:
            return
        self._num_untold[choice.index] = 0
        self._news.set()

    def _fail(self, error: OutriderError) -> None:
        self._error = self._error or error
        self._news.set()


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
