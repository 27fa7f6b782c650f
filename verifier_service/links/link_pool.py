"""A verifier's links: one per drafter that the router names; their events go to the engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable

from outrider.verifier_service.links.drafter_link import DrafterLink
from outrider.verifier_service.links.grpc_channel import LinkCredentials
from outrider.verifier_service.messages.engine import LinkEvent, PeerState, Relay
from outrider.verifier_service.messages.link import DrafterEndpoint, Hello


class LinkPool:
    """Keeps a link to every drafter of the fleet."""

    def __init__(
        self,
        hello: Hello,
        send_to_engine: Callable[[LinkEvent], None],
        credentials: LinkCredentials | None = None,
    ) -> None:
        self._hello = hello
        self._credentials = credentials
        self._send_to_engine = send_to_engine
        self._links: dict[DrafterEndpoint, DrafterLink] = {}
        self._num_old_bad_frames = 0  # of closed links
        self._lock = asyncio.Lock()  # `hold` and `close` may run at once while a replica drains

    @property
    def num_bad_frames(self) -> int:
        """Return the malformed frames that links dropped since start; malformed drafts are counted by the engine."""
        return self._num_old_bad_frames + sum(link.counters.num_bad_frames for link in self._links.values())

    @property
    def linked_drafters(self) -> tuple[str, ...]:
        return tuple(link.drafter_id for link in self._links.values() if link.is_up)

    async def hold(self, drafters: Iterable[DrafterEndpoint]) -> None:
        """Open links to new drafters and incarnations; close old incarnations, and unnamed ones that are down.

        A live link to an unnamed drafter stays: a router that has just started names none yet.
        """
        async with self._lock:
            await self._hold(set(drafters))

    async def _hold(self, wanted: set[DrafterEndpoint]) -> None:
        renewed = {endpoint.drafter_id for endpoint in wanted}
        for endpoint in self._links.keys() - wanted:
            if endpoint.drafter_id in renewed or not self._links[endpoint].is_up:
                await self._drop(endpoint)
        for endpoint in wanted - self._links.keys():
            self._links[endpoint] = link = DrafterLink(
                endpoint.endpoint,
                drafter_id=endpoint.drafter_id,
                hello=self._hello,
                on_event=self._send_to_engine,
                credentials=self._credentials,
            )
            link.start()

    async def _drop(self, endpoint: DrafterEndpoint) -> None:
        link = self._links.pop(endpoint)
        self._num_old_bad_frames += link.counters.num_bad_frames
        was_up = link.is_up
        await link.stop()
        if was_up:
            with contextlib.suppress(ConnectionError):  # the engine is gone
                self._send_to_engine(PeerState(peer=endpoint.drafter_id, is_up=False))

    def send(self, relays: Iterable[Relay]) -> None:
        """Send the engine's messages; those for a drafter without a link are lost, as for a drafter that is down."""
        by_drafter: dict[str, list[bytes]] = {}
        for relay in relays:
            by_drafter.setdefault(relay.peer, []).append(relay.payload)
        for link in self._links.values():
            if payloads := by_drafter.get(link.drafter_id):
                link.send(payloads)

    def check(self) -> None:
        """Raise `RuntimeError` if a link's task has ended: it would never reconnect."""
        for link in self._links.values():
            link.check()

    async def close(self) -> None:
        async with self._lock:
            for endpoint in list(self._links):
                await self._drop(endpoint)
