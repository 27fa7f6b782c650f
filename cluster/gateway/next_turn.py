"""Prefill of the next turn: after a chat's answer, the chat goes into the prefix cache as its next request will begin.

    answered   |<- prompt ->|<- answer, as it was generated ->|
    next turn  |<- the same, by the template ->|<- end of answer, begin of user ->|<- what the user will say ->| …
               |<------------- computed ahead: the same for all texts ----------->|

The cache has the prompt and the answer already. What it lacks is where the template writes a past answer in other
tokens than were generated: thoughts are left out, spaces are stripped, the same text has other tokens. The request is
a background request: it runs while its verifier is idle, and nothing waits for it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from outrider.cluster.common.errors import OutriderError
from outrider.cluster.gateway.request_parser import ModelInfo, ValidRequest
from outrider.cluster.gateway.text_codec import TextCodec
from outrider.cluster.monitoring.metrics import GatewayMetrics
from outrider.verifier_service.messages.request import GenerationRequest, RequestOutput, SamplingParams

logger = logging.getLogger(__name__)

PATIENCE_S = 30.0  # for an idle verifier: later the client has come back or reads for long
MAX_IN_FLIGHT = 64  # per gateway; chats that end beyond it are left out
PROBES = ("a", "\n1")  # what users may say: they begin with tokens that merge differently with those before
_ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, num_speculative_tokens=0, ignore_eos=True)


class PrefillBackend(Protocol):
    """A gateway's way to the verifier that the next turn will go to."""

    async def prefill(self, request: GenerationRequest) -> RequestOutput | None:
        """Have a prompt's KV computed and cached; return the output, None if no verifier was asked."""
        ...


class NextTurnPrefill:
    """Sends the beginnings of next turns, each in a task of its own."""

    def __init__(
        self,
        model: ModelInfo,
        text: TextCodec,
        backend: PrefillBackend,
        metrics: GatewayMetrics,
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._model, self._text = model, text
        self._backend, self._metrics = backend, metrics
        self._patience_s = patience_s
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(
        self, request: ValidRequest, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any], said: str
    ) -> None:
        """Start to prefill what follows an answer, unless nothing may be kept of it.

        `messages` and `fields` rendered the prompt (see `TextCodec.render_chat_now`), `said` is the answer's content.
        """
        if not request.is_kept or request.n > 1:  # of several choices the client goes on from one
            return
        if len(self._tasks) >= MAX_IN_FLIGHT:
            self._metrics.next_turn_ended("skipped")
            return
        chat = [*messages, {"role": "assistant", "content": said}]
        task = asyncio.get_running_loop().create_task(self._prefill(request, chat, fields))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settle(self) -> None:
        """Wait for all that have begun."""
        await asyncio.gather(*self._tasks)

    async def close(self) -> None:
        """Cancel all that have begun."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _prefill(
        self, request: ValidRequest, chat: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]
    ) -> None:
        outcome, num_tokens = "skipped", 0
        try:
            async with asyncio.timeout(self._patience_s):
                ids = await asyncio.to_thread(next_turn_tokens, self._text, chat, fields)
                if 0 < len(ids) < self._model.max_model_len:
                    output = await self._backend.prefill(_request_of(request, ids))
                    if output is not None:
                        outcome, num_tokens = "done", len(ids) - output.num_cached_tokens
        except TimeoutError:
            outcome = "late"
        except OutriderError as error:
            outcome = "failed"
            logger.info("request %s: its next turn was not prefilled: %s", request.request_id, error)
        except Exception:  # a bug: the answer is there, and nobody awaits this task
            outcome = "failed"
            logger.exception("request %s: its next turn was not prefilled", request.request_id)
        self._metrics.next_turn_ended(outcome, num_tokens)


def next_turn_tokens(text: TextCodec, chat: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the first tokens of a chat's next turn: those that do not depend on what the user will say.

    Raises `InvalidRequest` if the chat does not fit the template.
    """
    prompts = (text.render_chat_now([*chat, {"role": "user", "content": probe}], **fields) for probe in PROBES)
    chats = (text.encode_now(prompt, add_special_tokens=False) for prompt in prompts)
    shared = itertools.takewhile(lambda ids: len(set(ids)) == 1, zip(*chats, strict=False))
    return tuple(ids[0] for ids in shared)


def _request_of(request: ValidRequest, prompt_token_ids: tuple[int, ...]) -> GenerationRequest:
    """Return the background request that computes a prompt's KV where the chat's KV is, under the same salt."""
    return GenerationRequest(
        request_id=request.request_id,
        prompt_token_ids=prompt_token_ids,
        sampling=_ONE_TOKEN,
        cache_salt=request.message.cache_salt,
        history_key="",
        adapter=request.adapter,
        session_id=request.message.session_id,
        is_background=True,
    )
