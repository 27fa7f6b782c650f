"""A drafter of the test's own process that joins a service, and does there whatever it is told to.

It runs the embedded draft model behind the real servicer and reports itself to the router, so the verifier finds it
like any other. A `Fault` changes what it says.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import grpc

from fakes.in_process_port import InProcessPort
from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.router.fleet import DrafterReport
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.service.rank_main import build_draft_engine
from outrider.drafter_service.service.service import DrafterLinkServicer
from outrider.proto import link_pb2_grpc
from outrider.verifier_service.messages.draft import (
    DRAFT_PROB_SCALE,
    ROOT,
    Draft,
    Drafts,
    Resync,
    SparseRow,
    each_draft,
)
from outrider.verifier_service.messages.drafter_load import DrafterLoad
from outrider.verifier_service.messages.link import CHANNEL_OPTIONS, DrafterIdentity
from outrider.verifier_service.messages.wire import decode, encode
from outrider.verifier_service.model.runner import ModelRunner
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup
from outrider.verifier_service.model.tokenizer import fingerprint_of

REPORT_INTERVAL_S = 0.2

Tell = Callable[[bytes], None]


@dataclass(frozen=True)
class Fault:
    """What becomes of each draft on its way out: `change` returns the payloads that are sent in its place."""

    name: str
    change: Callable[[Draft], list[bytes]] = lambda draft: [encode(draft)]
    delay_s: float = 0.0
    vocab_fingerprint: str | None = None  # said in the handshake in place of the true one


def _changed(**fields: Any) -> Callable[[Draft], list[bytes]]:
    return lambda draft: [encode(replace(draft, **fields))]


def _garbage(draft: Draft) -> list[bytes]:
    rng = random.Random(draft.round_id)
    return [encode(replace(draft, token_ids=tuple(rng.randrange(256) for _ in draft.token_ids), draft_probs=None))]


def _bad_sums(draft: Draft) -> list[bytes]:
    rows = tuple(SparseRow(token_ids=(id_,), weights=(DRAFT_PROB_SCALE - 1,)) for id_ in draft.token_ids)
    return [encode(replace(draft, draft_probs=rows))]


def _too_long(draft: Draft) -> list[bytes]:
    return [encode(replace(draft, token_ids=draft.token_ids * 8, draft_probs=None))]


def _tree(parents_of: Callable[[int], list[int]]) -> Callable[[Draft], list[bytes]]:
    """Say that the tokens are a tree, whatever was asked for; `parents_of` their number says of which shape."""

    def change(draft: Draft) -> list[bytes]:
        parents = tuple(parents_of(len(draft.token_ids)))
        return [encode(replace(draft, parents=parents, draft_probs=None))]

    return change


def _too_deep(draft: Draft) -> list[bytes]:
    token_ids = draft.token_ids * 8
    parents = tuple(range(ROOT, len(token_ids) - 1))
    return [encode(replace(draft, token_ids=token_ids, parents=parents, draft_probs=None))]


def _twins(draft: Draft) -> list[bytes]:
    """Say the same token twice after one parent."""
    token_ids = (draft.token_ids[:1] or (0,)) * 2
    return [encode(replace(draft, token_ids=token_ids, parents=(ROOT, ROOT), draft_probs=None))]


def _rows_of_nobody(draft: Draft) -> list[bytes]:
    """Say one row more than there are parents with children."""
    rows = tuple(SparseRow(token_ids=(id_,), weights=(DRAFT_PROB_SCALE,)) for id_ in (*draft.token_ids, 0))
    return [encode(replace(draft, draft_probs=rows))]


def _confidences(value: float, *, more: int = 0) -> Callable[[Draft], list[bytes]]:
    return lambda draft: [encode(replace(draft, confidences=(value,) * (len(draft.token_ids) + more)))]


HONEST = Fault("honest")
# each is met by another part of the verifier: deadlines, the link, what a draft must be before it is verified
FAULTS = (  # one of each kind: late, wrong, unreadable, of another target
    Fault("silent", change=lambda _: []),
    Fault("garbage tokens", change=_garbage),
    Fault("malformed frames", change=lambda draft: [b"\x93" + encode(draft)]),
    Fault("wrong vocabulary", vocab_fingerprint="another tokenizer's"),
)

MORE_FAULTS = (
    Fault("slow", delay_s=3.0),
    Fault("stale rounds", change=_changed(round_id=0)),
    Fault("ids out of range", change=_changed(token_ids=(1 << 40,), draft_probs=None)),
    Fault("too many tokens", change=_too_long),
    Fault("oversized frames", change=lambda draft: [encode(draft) + bytes(64 << 20)]),
    Fault("draft_probs that do not sum", change=_bad_sums),
    Fault("parents in a circle", change=_tree(lambda count: [(index + 1) % count for index in range(count)])),
    Fault("confidences that are no numbers", change=_confidences(float("nan"))),
    Fault("wrong position", change=_changed(position=0)),
    Fault("parents out of range", change=_tree(lambda count: [ROOT - 1 - index for index in range(count)])),
    Fault("parents of another number", change=_tree(lambda count: [ROOT] * (count + 1))),
    Fault("a tree too deep", change=_too_deep),
    Fault("the same sibling twice", change=_twins),
    Fault("draft_probs of another number", change=_rows_of_nobody),
    Fault("confidences of another number", change=_confidences(0.5, more=1)),
)


class FaultyPort:
    """An `EnginePort` whose answers pass through the present fault."""

    def __init__(self, port: InProcessPort) -> None:
        self.fault = HONEST
        self.num_drafts = 0
        self._port = port

    def submit(self, peer: str, payload: bytes) -> None:
        self._port.submit(peer, payload)

    def peer_gone(self, peer: str) -> None:
        self._port.peer_gone(peer)

    def subscribe(self, peer: str, deliver: Tell) -> None:
        self._port.subscribe(peer, lambda payload: self._answer(payload, deliver))

    def unsubscribe(self, peer: str) -> None:
        self._port.unsubscribe(peer)

    def load(self) -> DrafterLoad:
        return self._port.load()

    def _answer(self, payload: bytes, deliver: Tell) -> None:
        message = decode(payload, (Draft, Drafts, Resync))
        if isinstance(message, Resync):
            deliver(payload)
            return
        for draft in each_draft(message):
            self.num_drafts += 1
            for changed in self.fault.change(draft):
                if self.fault.delay_s:
                    threading.Timer(self.fault.delay_s, deliver, (changed,)).start()
                else:
                    deliver(changed)


def _embedded_engine(config: ServiceConfig) -> DraftEngine:
    spec = config.drafter_spec
    assert spec is not None
    assert spec.model is not None
    return build_draft_engine(spec, runner=ModelRunner(spec.model, TensorParallelGroup.single()))


class Directory(Protocol):
    """Where drafters report themselves: a service's router, or whoever holds links in its place."""

    def report_drafter(self, report: DrafterReport) -> None: ...

    def remove_drafter(self, drafter_id: str) -> None: ...


class ExternalDrafter:
    """One drafter in this process; its faults change while it serves."""

    def __init__(self, directory: Directory) -> None:
        config = ServiceConfig()
        self._directory = directory
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="external-drafter", daemon=True)
        self._thread.start()
        engine = _embedded_engine(config)
        self._engine_port = InProcessPort(engine)
        self.port = FaultyPort(self._engine_port)
        self._identity = DrafterIdentity(
            drafter_id="",
            vocab_size=engine.vocab_size,
            vocab_fingerprint=fingerprint_of(config.verifier_spec.model),
            max_draft_length=4,
            max_model_len=512,
        )
        self._stopping = threading.Event()
        self._reports: threading.Thread | None = None
        self._server: grpc.aio.Server | None = None
        self.drafter_id = ""
        self._said_fault = HONEST

    @property
    def is_refused(self) -> bool:
        """Tell whether verifiers refuse it at the handshake."""
        return self._said_fault.vocab_fingerprint is not None

    def join(self, fault: Fault, route: Callable[[str], str] = lambda endpoint: endpoint) -> None:
        """Serve and report under a new id; `route` may put a proxy in front of the endpoint."""
        self.leave()
        self.port.fault = self._said_fault = fault
        self.drafter_id = f"external-{time.monotonic_ns()}"
        endpoint = asyncio.run_coroutine_threadsafe(self._serve(fault), self._loop).result(10)
        self._stopping.clear()
        self._reports = threading.Thread(target=self._report, args=(route(endpoint),), daemon=True)
        self._reports.start()

    def leave(self) -> None:
        """Stop reporting and serving; the router is told."""
        if self._reports is None:
            return
        self._stopping.set()
        self._reports.join()
        self._reports = None
        self._directory.remove_drafter(self.drafter_id)
        assert self._server is not None
        asyncio.run_coroutine_threadsafe(self._server.stop(0), self._loop).result(10)

    def close(self) -> None:
        self.leave()
        self._engine_port.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _serve(self, fault: Fault) -> str:
        fingerprint = fault.vocab_fingerprint or self._identity.vocab_fingerprint
        identity = replace(self._identity, drafter_id=self.drafter_id, vocab_fingerprint=fingerprint)
        options = [(name, value) for name, value in CHANNEL_OPTIONS if "message_length" not in name]
        # a liar keeps to no size limit of its own
        self._server = grpc.aio.server(options=[*options, ("grpc.max_send_message_length", -1)])
        link_pb2_grpc.add_DrafterLinkServicer_to_server(DrafterLinkServicer(self.port, identity), self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return f"127.0.0.1:{port}"

    def _report(self, endpoint: str) -> None:
        epoch = time.time_ns()
        while not self._stopping.is_set():
            report = DrafterReport(
                drafter_id=self.drafter_id,
                endpoint=endpoint,
                epoch=epoch,
                max_draft_length=4,
                load=DrafterLoad(mean_draft_s=0.001),
            )
            self._directory.report_drafter(report)
            self._stopping.wait(REPORT_INTERVAL_S)


@contextmanager
def external_drafter(directory: Directory) -> Iterator[ExternalDrafter]:
    drafter = ExternalDrafter(directory)
    try:
        yield drafter
    finally:
        drafter.close()
