"""The responses that rollouts draft from, over HTTP: given, taken out as JSON lines, and forgotten.

/v1/rollouts/history   POST   a JSON object, or a line of JSON for each: what GET answers comes in again
                       GET    all responses, one a line, those of older weights first
                       DELETE forgets them
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from pydantic import Field

from outrider.cluster.api.openai.endpoints import MAX_BODY_BYTES, read_json
from outrider.cluster.api.openai.protocol import ModelBody, TokenIds, parse_body, parse_json
from outrider.cluster.common.api_keys import PARTITION_CHARS, shown_key
from outrider.cluster.common.errors import BodyTooLarge, BodyTooSlow, InvalidRequest, require_field
from outrider.cluster.gateway.gateway import Gateway
from outrider.cluster.gateway.request_parser import MAX_HISTORY_KEY_CHARS, MAX_LABEL_CHARS
from outrider.cluster.gateway.rollout_memory import Exported, RolloutMemory
from outrider.cluster.peers.every_gateway import EveryGateway
from outrider.verifier_service.messages.history import filed_under, filed_under_hash, name_of

PATH = "/v1/rollouts/history"
LINES = "application/jsonl"
LINE_TYPES = frozenset({LINES, "application/x-ndjson"})


class HistoryBody(ModelBody):
    """Responses of one key. GET names a prompt by its hash: the gateway does not keep prompts.

    `partition`: of an API key, as GET answered it; None: that of the key which came with the call.
    """

    partition: str | None = None
    prompt_ids: TokenIds | None = None
    history_key: str | None = None
    prompt_hash: str | None = None
    responses: Annotated[list[TokenIds], Field(fail_fast=True)]
    weight_version: str | None = None
    opens_version: bool | None = (
        None  # true: a version that is not known becomes the newest, as GET says of its first line
    )

    @property
    def key(self) -> str:
        """The key of their history; raises `InvalidRequest` unless exactly one field names it."""
        partition = shown_key.get().partition if self.partition is None else self.partition
        is_name = self.partition is None or re.fullmatch(f"[0-9a-f]{{{PARTITION_CHARS}}}", partition) is not None
        require_field(is_name, "partition", "as GET answered it")
        names = [name for name in ("prompt_ids", "history_key", "prompt_hash") if getattr(self, name) is not None]
        if len(names) != 1:
            field = names[-1] if names else "prompt_ids"
            raise InvalidRequest(f"{field}: name one of prompt_ids, history_key and prompt_hash", field)
        if self.history_key is not None:
            is_key = 1 <= len(self.history_key) <= MAX_HISTORY_KEY_CHARS
            require_field(is_key, names[0], f"1 to {MAX_HISTORY_KEY_CHARS} characters")
        elif self.prompt_hash is not None:
            is_hash = re.fullmatch("[0-9a-f]{32}", self.prompt_hash) is not None
            require_field(is_hash, names[0], "as GET answered it")
            return filed_under_hash(self.prompt_hash, partition)
        require_field(self.prompt_ids != [], names[0], "at least one token")
        return filed_under(self.history_key, self.prompt_ids or (), partition)


def add_history_routes(app: FastAPI, every: EveryGateway) -> None:
    """Add the routes of gateways with memories, of which each has what all have heard."""
    gateway, memory = every.own, every.own.memory
    assert memory is not None, "a service that is not for rollouts"

    @app.post(PATH)
    async def give(request: Request) -> dict[str, Any]:
        num_responses = 0
        if not _has_lines(request):
            num_responses = _take_in(await read_json(request), gateway, memory)
        else:
            async for number, line in _read_lines(request):
                try:
                    num_responses += _take_in(parse_json(line), gateway, memory)
                except InvalidRequest as error:
                    raise InvalidRequest(f"line {number}: {error}", error.field) from error
        return {"object": "history", "num_responses": num_responses}

    @app.get(PATH)
    async def take_out() -> StreamingResponse:
        return StreamingResponse(_lines(memory.exported()), media_type=LINES)

    @app.delete(PATH)
    async def forget() -> dict[str, Any]:
        await every.forget_history()
        return {"object": "history", "deleted": True}


def _take_in(body: object, gateway: Gateway, memory: RolloutMemory) -> int:
    """Put the responses of one body into the memory; return how many it has."""
    history = parse_body(body, HistoryBody)
    gateway.check_model_name(history.model)
    gateway.require_in_vocabulary(history.prompt_ids or (), "prompt_ids")
    for response in history.responses:
        gateway.require_in_vocabulary(response, "responses")
    key, version = history.key, history.weight_version
    is_name = version is None or len(version) <= MAX_LABEL_CHARS
    require_field(is_name, "weight_version", f"at most {MAX_LABEL_CHARS} characters")
    is_known = version is None or history.opens_version or memory.knows(version)
    require_field(is_known, "weight_version", "a known one, or come with opens_version true: then it is the newest")
    for response in history.responses:
        memory.record(key, response, version)
    return len(history.responses)


def _lines(responses: Iterable[Exported]) -> Iterator[str]:
    last = None
    for one in responses:
        version: dict[str, Any] = {} if one.weight_version is None else {"weight_version": one.weight_version}
        opens = {"opens_version": True} if one.weight_version not in (None, last) else {}
        last = one.weight_version
        yield json.dumps({**name_of(one.key), **version, **opens, "responses": [one.token_ids]}) + "\n"


def _has_lines(request: Request) -> bool:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() in LINE_TYPES


async def _read_lines(request: Request) -> AsyncIterator[tuple[int, bytes]]:
    """Yield a body's lines and their numbers, from 1, as they come; a line is as long as another body may be."""
    timeout_s, rest, number = request.app.state.body_timeout_s, bytearray(), 0
    parts = aiter(request.stream())
    while True:
        try:
            async with asyncio.timeout(timeout_s):
                part = await anext(parts, None)
        except TimeoutError:
            raise BodyTooSlow(f"the body must go on within {timeout_s:g} s") from None
        rest += b"\n" if part is None else part
        if len(rest) > MAX_BODY_BYTES:
            raise BodyTooLarge(f"a line must have at most {MAX_BODY_BYTES} bytes")
        if part is None or b"\n" in part:
            *lines, rest = rest.split(b"\n")
            for line in lines:
                number += 1
                if line.strip():
                    yield number, bytes(line)
        if part is None:
            return
