"""The chats behind `previous_response_id` of /v1/responses: each gateway's latest, within bounds.

A response stays where it was made, and its id names that gateway: another one asks there. It ends with its gateway.
The ids of its items name the response.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.cluster.common.errors import ResponseNotFound

MAX_RESPONSES = 4096
MAX_BYTES = 64 << 20
_ID = "resp_"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A response, and the chat that ends with it."""

    response: dict[str, Any]
    messages: Sequence[dict[str, Any]]  # without instructions, which apply to one response
    num_bytes: int

    @classmethod
    def of(cls, response: dict[str, Any], messages: Sequence[dict[str, Any]]) -> StoredResponse:
        num_bytes = len(json.dumps(response)) + len(json.dumps(list(messages)))
        return cls(response=response, messages=messages, num_bytes=num_bytes)

    @property
    def packed(self) -> bytes:
        """As it goes to another gateway."""
        return json.dumps([self.response, list(self.messages)]).encode()

    @classmethod
    def unpacked(cls, packed: bytes) -> StoredResponse:
        """Return what another gateway has packed."""
        return cls.of(*json.loads(packed))


class ResponseStore:
    """One gateway's latest responses, by id; the least recently used goes first."""

    def __init__(self, *, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._stored

    def put(self, response: dict[str, Any], messages: Sequence[dict[str, Any]]) -> None:
        """Store a response and its chat."""
        stored = self._stored[response["id"]] = StoredResponse.of(response, messages)
        self._num_bytes += stored.num_bytes
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


FetchElsewhere = Callable[[str, str, bool], Awaitable[bytes | None]]  # gateway's id, response's id, is it removed


class Responses:
    """The responses of all gateways: those of this one, and by their ids those of the others."""

    def __init__(self, gateway_id: str = "", fetch: FetchElsewhere | None = None) -> None:
        """`fetch` asks another gateway for a response, as `StoredResponse.packed`; None: there is no other gateway."""
        self.own = ResponseStore()
        self.id_prefix = f"{_ID}{gateway_id}_" if gateway_id else _ID
        self._fetch = fetch

    def put(self, response: dict[str, Any], messages: Sequence[dict[str, Any]]) -> None:
        """Store a response of this gateway and its chat."""
        self.own.put(response, messages)

    async def get(self, response_id: str, field: str | None = None) -> StoredResponse:
        """Return a stored response; raises `ResponseNotFound` naming the field with its id."""
        if response_id not in self.own and (packed := await self._elsewhere(response_id)) is not None:
            return StoredResponse.unpacked(packed)
        return self.own.get(response_id, field)

    async def item(self, item_id: str) -> Mapping[str, Any]:
        """Return an item of a stored response's output; raises `ResponseNotFound`."""
        try:
            items: Sequence[Mapping[str, Any]] = (await self.get(_response_of(item_id))).response["output"]
            return next(item for item in items if item["id"] == item_id)
        except (ResponseNotFound, StopIteration):
            raise ResponseNotFound(item_id, "input") from None

    async def remove(self, response_id: str) -> None:
        """Delete a response; raises `ResponseNotFound`."""
        if response_id in self.own or await self._elsewhere(response_id, is_removed=True) is None:
            self.own.remove(response_id)

    def packed(self, response_id: str, *, is_removed: bool) -> bytes | None:
        """Give another gateway a response of this one, and perhaps remove it; None: it is not here."""
        if response_id not in self.own:
            return None
        packed = self.own.get(response_id).packed
        if is_removed:
            self.own.remove(response_id)
        return packed

    async def _elsewhere(self, response_id: str, *, is_removed: bool = False) -> bytes | None:
        """Ask the gateway that an id names."""
        parts = response_id.split("_")
        if self._fetch is None or len(parts) != 3:
            return None
        return await self._fetch(parts[1], response_id, is_removed)


def id_of_item(kind: str, response_id: str, index: int) -> str:
    """Return the id of an output item: `kind` says what it is, the rest which one of which response."""
    return f"{kind}_{response_id.removeprefix(_ID)}_{index}"


def _response_of(item_id: str) -> str:
    """Return the id of the response that an item's id names."""
    _, _, named = item_id.partition("_")
    return _ID + named.rpartition("_")[0]
