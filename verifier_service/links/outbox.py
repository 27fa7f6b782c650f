"""Messages that wait for a stream; those that have come meanwhile share a frame, since a frame costs more."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

from outrider.proto.link_pb2 import Frame
from outrider.verifier_service.messages.link import frame_of, take_together
from outrider.verifier_service.messages.wire import encode


class Outbox:
    """A queue of encoded messages, for one event loop."""

    def __init__(self, sender: str = "", epoch: int = 0) -> None:
        self._sender, self._epoch = sender, epoch
        self._waiting: deque[bytes] = deque()
        self._news = asyncio.Event()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, message: Any) -> None:
        """Queue a message."""
        self.put_encoded(encode(message))

    def put_encoded(self, payload: bytes) -> None:
        """Queue a message that is encoded."""
        self._waiting.append(payload)
        self._news.set()

    def close(self) -> None:
        """Let `frames` end after what was put."""
        self._is_closed = True
        self._news.set()

    async def frames(self) -> AsyncGenerator[Frame]:
        """Yield frames of what is put, in order, until the outbox is closed."""
        while True:
            await self._news.wait()
            while self._waiting:
                payload, *more = take_together(self._waiting)
                yield frame_of(self._sender, self._epoch, payload, more)
            if self._is_closed:
                return
            self._news.clear()
