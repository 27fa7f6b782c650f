"""The chats behind `previous_response_id` of /v1/responses: one gateway's latest, within bounds."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.cluster.common.errors import ResponseNotFound

MAX_RESPONSES = 4096
MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A response, and the chat that ends with it."""

    response: dict[str, Any]
    messages: Sequence[dict[str, Any]]  # without instructions, which apply to one response
    num_bytes: int


class ResponseStore:
    """One gateway's latest responses, by id; the least recently used goes first. Gateways share none."""

    def __init__(self, *, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, response: dict[str, Any], messages: Sequence[dict[str, Any]]) -> None:
        """Store a response and its chat."""
        num_bytes = len(json.dumps(response)) + len(json.dumps(list(messages)))
        self._stored[response["id"]] = StoredResponse(response=response, messages=messages, num_bytes=num_bytes)
        self._num_bytes += num_bytes
        while len(self._stored) > self._max_responses or self._num_bytes > self._max_bytes:
            _, oldest = self._stored.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def get(self, response_id: str, field: str | None = None) -> StoredResponse:
        """Return a stored response; raises `ResponseNotFound` naming the field with its id."""
        if response_id not in self._stored:
            raise ResponseNotFound(response_id, field)
        self._stored.move_to_end(response_id)
        return self._stored[response_id]

    def remove(self, response_id: str) -> None:
        """Delete a response; raises `ResponseNotFound`."""
        self._num_bytes -= self.get(response_id).num_bytes
        del self._stored[response_id]
