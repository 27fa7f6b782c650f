"""The connection from another engine to a drafter pool: a thread follows the pool's directory and holds the links.

No failure here delays a step: without the directory, the links stay; without links, there are no drafts. A failure is
logged, counted and retried.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence

import grpc

from outrider.cluster.router.fleet import Directive, VerifierReport
from outrider.proto.link_pb2 import Frame
from outrider.proto.link_pb2_grpc import DrafterDirectoryStub
from outrider.verifier_service.links.grpc_channel import LinkCredentials, metadata_of, open_channel
from outrider.verifier_service.links.link_pool import LinkPool
from outrider.verifier_service.messages.engine import LinkEvent, Relay
from outrider.verifier_service.messages.link import Hello, frame_of
from outrider.verifier_service.messages.wire import WireError, decode, encode

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.25
ANSWER_TIMEOUT_S = 2.0  # of the directory, for one report
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.2, 5.0


class PoolConnection:
    """The `Drafters` of `HostedDrafting`; a separate thread does everything that blocks."""

    def __init__(
        self,
        address: str,
        hello: Hello,
        *,
        report: Callable[[tuple[str, ...]], VerifierReport | None],
        follow: Callable[[Directive], None],
        credentials: LinkCredentials | None = None,
        max_backoff_s: float = MAX_BACKOFF_S,
    ) -> None:
        """`report` is called a few times a second, with the drafters that have links; None: no report now.

        Both callables run in the connection's thread. `max_backoff_s`: longest pause after a failure.
        """
        self.num_failures = 0  # of the directory's stream
        self.last_error: str | None = None  # of the last failure
        self._address = address
        self._hello = hello
        self._report = report
        self._follow = follow
        self._credentials = credentials
        self._arrived: queue.SimpleQueue[LinkEvent] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._links: LinkPool | None = None
        self._end: asyncio.Event | None = None
        self._stopping = threading.Event()
        self._max_backoff_s = max_backoff_s
        self._thread = threading.Thread(target=self._run, name="outrider pool connection", daemon=True)

    @property
    def linked_drafters(self) -> tuple[str, ...]:
        return () if self._links is None else self._links.linked_drafters

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Close the links and end the thread."""
        self._stopping.set()
        self.begin_again()
        self._thread.join(timeout=5.0)

    def begin_again(self) -> None:
        """Close every link, so that drafters free their sessions, and reopen them."""
        if (end := self._end) is not None:
            self._call(end.set)

    # --- for the engine's thread ---

    def send(self, relays: Sequence[Relay]) -> None:
        links = self._links
        if links is not None:
            self._call(lambda: links.send(relays))

    def wait(self, timeout_s: float) -> list[LinkEvent]:
        arrived: list[LinkEvent] = []
        with contextlib.suppress(queue.Empty):
            arrived.append(self._arrived.get(timeout=timeout_s) if timeout_s > 0 else self._arrived.get_nowait())
            while True:
                arrived.append(self._arrived.get_nowait())
        return arrived

    def _call(self, function: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and all links with it
            if self._loop is not None:
                self._loop.call_soon_threadsafe(function)

    # --- the thread ---

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                asyncio.run(self._keep())
            except Exception:
                logger.exception("the connection to the drafters at %s has failed; it begins again", self._address)
                self._lose("it failed")
                self._stopping.wait(self._max_backoff_s)

    async def _keep(self) -> None:
        """Hold links to the directory's drafters until stopped; raises a failure."""
        end = self._end = asyncio.Event()
        links = self._links = LinkPool(self._hello, self._arrived.put, self._credentials)
        self._loop = asyncio.get_running_loop()
        if self._stopping.is_set():  # stopped before the loop existed
            end.set()
        following = asyncio.ensure_future(self._follow_forever(links))
        ended = asyncio.ensure_future(end.wait())
        try:
            await asyncio.wait([following, ended], return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
        finally:
            for task in (following, ended):
                task.cancel()
            await asyncio.gather(following, ended, return_exceptions=True)
            await links.close()  # reports every connected drafter as gone
            self._links = self._loop = None

    async def _follow_forever(self, links: LinkPool) -> None:
        backoff_s = MIN_BACKOFF_S
        while True:
            begin_s = time.monotonic()
            try:
                async with open_channel(self._address, self._credentials) as channel:
                    await self._follow_once(DrafterDirectoryStub(channel), links)
            except grpc.aio.AioRpcError as error:
                self._lose(f"{error.code().name}: {error.details()}")
            except (TimeoutError, WireError, ConnectionError, asyncio.InvalidStateError) as error:
                self._lose(f"{type(error).__name__}: {error}")
            if time.monotonic() - begin_s > self._max_backoff_s:
                backoff_s = MIN_BACKOFF_S
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, self._max_backoff_s)

    def _lose(self, reason: str) -> None:
        self.num_failures += 1
        if reason != self.last_error:  # log a repeated failure once
            logger.warning("the directory of drafters at %s is not reached: %s", self._address, reason)
        self.last_error = reason

    async def _follow_once(self, directory: DrafterDirectoryStub, links: LinkPool) -> None:
        """Report and follow on one stream, until it ends."""
        call = directory.Follow(metadata=metadata_of(self._credentials))
        async with contextlib.aclosing(self._answers(call)) as answers:
            async for directive in answers:
                self.last_error = None
                self._follow(directive)
                await links.hold(directive.drafters)
                links.check()
                await asyncio.sleep(REPORT_INTERVAL_S)

    async def _answers(self, call: grpc.aio.StreamStreamCall) -> AsyncGenerator[Directive, None]:
        """Send reports; yield the directory's answers."""
        try:
            while True:
                if (report := self._report(self.linked_drafters)) is not None:
                    async with asyncio.timeout(ANSWER_TIMEOUT_S):
                        await call.write(self._frame(encode(report)))
                        frame = await call.read()
                    if frame is grpc.aio.EOF:
                        raise ConnectionError(f"the stream has ended: {await call.details()}")
                    yield decode(frame.payload, (Directive,))
                else:
                    await asyncio.sleep(REPORT_INTERVAL_S / 10)
        finally:
            call.cancel()

    def _frame(self, payload: bytes) -> Frame:
        return frame_of(self._hello.verifier_id, self._hello.epoch, payload)
