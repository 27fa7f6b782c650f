"""A pool of drafters on a thread of this process, without Ray: a directory, the real router, drafters that know it all.

Each drafter answers with the tokens that plain decoding makes, as far as it was told them, or misbehaves on demand.
"""

from __future__ import annotations

import asyncio
import enum
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import grpc

from outrider.cluster.replicas.directory_servicer import DirectoryServicer
from outrider.cluster.router.fleet import Directive, DrafterReport, FleetSnapshot, RouterPolicy, VerifierReport
from outrider.cluster.router.router import RouterCore
from outrider.drafter_service.service.service import DrafterLinkServicer
from outrider.proto.link_pb2_grpc import add_DrafterDirectoryServicer_to_server, add_DrafterLinkServicer_to_server
from outrider.verifier_service.messages.draft import (
    Close,
    Commit,
    Draft,
    DraftNeeds,
    Open,
    Resync,
    States,
    VerifierMessage,
)
from outrider.verifier_service.messages.drafter_load import DrafterLoad
from outrider.verifier_service.messages.link import CHANNEL_OPTIONS, VERIFIER_MESSAGES, DrafterIdentity
from outrider.verifier_service.messages.tensor_route import TensorRoute
from outrider.verifier_service.messages.wire import decode, encode
from support import parts

REPORT_INTERVAL_S = 0.2
MAX_DRAFT_LENGTH = 8
ResultT = TypeVar("ResultT")


class Mood(enum.Enum):
    """How a drafter behaves."""

    GOOD = "good"
    WRONG = "wrong"  # no token is right
    GARBAGE = "garbage"  # frames that are no messages
    TOO_LONG = "too long"  # more than was asked for
    SLOW = "slow"  # later than any deadline
    SILENT = "silent"
    FORGETFUL = "forgetful"  # wants every prefix again


class KnowingDrafter:
    """An `EnginePort` that answers inside `submit`, or later where it is slow."""

    def __init__(self, continuations: Sequence[Sequence[int]], vocab_size: int, slow_s: float = 0.5) -> None:
        self.mood = Mood.GOOD
        self.num_drafts = 0
        self.texts = [tuple(text) for text in continuations]  # prompts and what follows them
        self._vocab_size = vocab_size
        self._slow_s = slow_s
        self.sessions: dict[str, list[int]] = {}
        self.prompts: dict[str, list[int]] = {}  # by request, of those that have gone, too
        self.states: dict[str, list[States]] = {}  # the same, as they came
        self._deliver: dict[str, Callable[[bytes], None]] = {}

    def submit(self, peer: str, payload: bytes) -> None:
        for message in parts.singly([decode(payload, VERIFIER_MESSAGES)]):
            self._take(peer, message)

    def _take(self, peer: str, message: VerifierMessage) -> None:
        match message:
            case Open(request_id=request_id, token_ids=token_ids):
                self.sessions[request_id] = list(token_ids)
                self.prompts.setdefault(request_id, list(token_ids))
            case Commit() as commit:
                self._commit(peer, commit)
            case Close(request_id=request_id):
                self.sessions.pop(request_id, None)
            case States() as states:
                self.states.setdefault(states.request_id, []).append(states)

    def _commit(self, peer: str, commit: Commit) -> None:
        prefix = self.sessions.get(commit.request_id)
        if prefix is None or len(prefix) != commit.position or self.mood is Mood.FORGETFUL:
            self.sessions.pop(commit.request_id, None)
            self._deliver[peer](encode(Resync(request_id=commit.request_id)))
            return
        prefix.extend(commit.token_ids)
        if commit.max_length == 0 or self.mood is Mood.SILENT:
            return
        self.num_drafts += 1
        if self.mood is Mood.GARBAGE:
            self._deliver[peer](b"\xc1 no message")
            return
        answer = encode(self._draft(commit, prefix))
        if self.mood is Mood.SLOW:
            threading.Timer(self._slow_s, self._say, (peer, answer)).start()
        else:
            self._say(peer, answer)

    def _say(self, peer: str, answer: bytes) -> None:
        if (deliver := self._deliver.get(peer)) is not None:
            deliver(answer)

    def _draft(self, commit: Commit, prefix: list[int]) -> Draft:
        known = next((text for text in self.texts if list(text[: len(prefix)]) == prefix), ())
        token_ids = known[len(prefix) : len(prefix) + commit.max_length]
        if self.mood is Mood.WRONG:
            token_ids = tuple((token_id + 1) % self._vocab_size for token_id in token_ids)
        if self.mood is Mood.TOO_LONG:
            token_ids = (0,) * (commit.max_length + 1)
        return Draft(
            request_id=commit.request_id, round_id=commit.round_id, position=len(prefix), token_ids=tuple(token_ids)
        )

    def peer_gone(self, peer: str) -> None:
        self.sessions.clear()

    def subscribe(self, peer: str, deliver: Callable[[bytes], None]) -> None:
        self._deliver[peer] = deliver

    def unsubscribe(self, peer: str) -> None:
        self._deliver.pop(peer, None)

    def open_tensors(self, peer: str, route: TensorRoute) -> None:
        raise AssertionError("nobody offered a channel")

    def load(self) -> DrafterLoad:
        return DrafterLoad(num_sessions=len(self.sessions))


class PlayedPool:
    """Drafters by name, and the directory that names them."""

    def __init__(self, vocab_size: int, policy: RouterPolicy | None = None) -> None:
        self.drafters: dict[str, KnowingDrafter] = {}
        self._vocab_size = vocab_size
        self._core = RouterCore(policy or RouterPolicy(max_draft_length=MAX_DRAFT_LENGTH))
        self._servers: dict[str, grpc.aio.Server] = {}
        self._reports: dict[str, DrafterReport] = {}
        self._num_started = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="played pool", daemon=True)
        self._thread.start()
        self.address = self._run(self._start())

    def add(
        self,
        name: str,
        continuations: Iterable[Sequence[int]] = (),
        *,
        state_taps: tuple[int, ...] = (),
        via: Callable[[str], str] = lambda endpoint: endpoint,
    ) -> KnowingDrafter:
        """Start a drafter, which the directory names from now on; `via` says how it is reached.

        It asks for the target's states of `state_taps`, and keeps them.
        """
        drafter = self.drafters[name] = KnowingDrafter(list(continuations), self._vocab_size)
        endpoint = via(f"127.0.0.1:{self._run(self._serve(name, drafter, state_taps))}")
        self._num_started += 1
        self._reports[name] = DrafterReport(
            drafter_id=name, endpoint=endpoint, epoch=self._num_started, max_draft_length=MAX_DRAFT_LENGTH
        )
        return drafter

    def kill(self, name: str) -> None:
        """End a drafter at once; the directory finds out as it does."""
        del self.drafters[name]
        self._run(self._end(name))

    def snapshot(self) -> FleetSnapshot:
        return self._run(self._snapshot())

    def close(self) -> None:
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(20)

    async def _start(self) -> str:
        self._directory = grpc.aio.server(options=CHANNEL_OPTIONS)
        add_DrafterDirectoryServicer_to_server(DirectoryServicer(self._answer, self._forget), self._directory)
        port = self._directory.add_insecure_port("127.0.0.1:0")
        await self._directory.start()
        self._reporting = asyncio.ensure_future(self._report_forever())
        return f"127.0.0.1:{port}"

    async def _answer(self, report: VerifierReport) -> Directive:
        return self._core.report_verifier(report, time.time())

    async def _forget(self, verifier_id: str) -> None:
        self._core.remove(verifier_id)

    async def _report_forever(self) -> None:
        while True:
            for report in list(self._reports.values()):
                self._core.report_drafter(report, time.time())
            await asyncio.sleep(REPORT_INTERVAL_S)

    async def _serve(self, name: str, drafter: KnowingDrafter, state_taps: tuple[int, ...]) -> int:
        identity = DrafterIdentity(
            drafter_id=name,
            vocab_size=self._vocab_size,
            vocab_fingerprint="",
            max_draft_length=MAX_DRAFT_LENGTH,
            max_model_len=4096,
            needs=DraftNeeds(taps=state_taps),
        )
        server = self._servers[name] = grpc.aio.server(options=CHANNEL_OPTIONS)
        add_DrafterLinkServicer_to_server(DrafterLinkServicer(drafter, identity), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return port

    async def _end(self, name: str) -> None:
        del self._reports[name]
        await self._servers.pop(name).stop(grace=None)

    async def _snapshot(self) -> FleetSnapshot:
        return self._core.snapshot(time.time())

    async def _stop(self) -> None:
        self._reporting.cancel()
        await asyncio.gather(self._reporting, return_exceptions=True)
        for name in list(self._servers):
            await self._end(name)
        await self._directory.stop(grace=None)
