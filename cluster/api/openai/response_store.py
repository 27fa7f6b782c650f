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
        self._items: dict[str, dict[str, Any]] = {}  # of the stored responses' output, by id
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, response: dict[str, Any], messages: Sequence[dict[str, Any]]) -> None:
        """Store a response and its chat."""
        num_bytes = len(json.dumps(response)) + len(json.dumps(list(messages)))
        self._stored[response["id"]] = StoredResponse(response=response, messages=messages, num_bytes=num_bytes)
        self._items |= {item["id"]: item for item in response.get("output", ())}
        self._num_bytes += num_bytes
        while len(self._stored) > self._max_responses or self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._stored)))

    def get(self, response_id: str, field: str | None = None) -> StoredResponse:
        """Return a stored response; raises `ResponseNotFound` naming the field with its id."""
        if response_id not in self._stored:
            raise ResponseNotFound(response_id, field)
        self._stored.move_to_end(response_id)
        return self._stored[response_id]

    def item(self, item_id: str) -> dict[str, Any]:
        """Return an item of a stored response's output; raises `ResponseNotFound`."""
        if item_id not in self._items:
            raise ResponseNotFound(item_id, "input")
        return self._items[item_id]

    def remove(self, response_id: str) -> None:
        """Delete a response; raises `ResponseNotFound`."""
        self.get(response_id)
        self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        dropped = self._stored.pop(response_id)
        self._num_bytes -= dropped.num_bytes
        for item in dropped.response.get("output", ()):
            del self._items[item["id"]]
