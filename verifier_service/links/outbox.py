"""Messages that wait for a stream; those that have come meanwhile share a frame, since a frame costs more."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

from outrider.proto.link_pb2 import Frame
from outrider.verifier_service.messages.link import take_together
from outrider.verifier_service.messages.wire import encode


class Outbox:
    """A queue of encoded messages, for one event loop."""

    def __init__(self, sender: str = "") -> None:
        self._sender = sender
        self._waiting: deque[bytes] = deque()
        self._news = asyncio.Event()

    def put(self, message: Any) -> None:
        """Queue a message."""
        self._waiting.append(encode(message))
        self._news.set()

    async def frames(self) -> AsyncGenerator[Frame]:
        """Yield frames of what was put, in order, forever."""
        while True:
            await self._news.wait()
            payload, *more = take_together(self._waiting)
            if not self._waiting:
                self._news.clear()
            yield Frame(sender=self._sender, payload=payload, more=more)
