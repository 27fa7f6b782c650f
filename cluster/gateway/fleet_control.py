"""What a trainer asks of all replicas at once, between two steps of each: pause, go on, new weights."""

from __future__ import annotations

import asyncio
import functools
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc

from outrider.cluster.common.errors import Conflict, InvalidRequest, RequestFailed, Unavailable
from outrider.cluster.common.security import LOOPBACK_HOSTS
from outrider.cluster.router.fleet import FleetSnapshot, FleetWeights, VerifierReport
from outrider.proto import link_pb2, link_pb2_grpc
from outrider.verifier_service.links.grpc_channel import LinkCredentials, metadata_of, open_channel
from outrider.verifier_service.messages.engine import (
    AskState,
    ContinueGeneration,
    Control,
    ControlResult,
    DestroyWeightsGroup,
    FlushCache,
    InitWeightsGroup,
    PauseGeneration,
    PauseMode,
    UpdateDraftWeights,
    UpdateWeights,
)
from outrider.verifier_service.messages.wire import WireError, decode, encode

ORDER_STEP_S = 1e-3  # between the numbers of two orders
REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.PERMISSION_DENIED)  # of a replica that was reached
Call = Callable[[str, Control], Awaitable[ControlResult]]  # endpoint and message; raises `ConnectionError`
MAX_VERSION_CHARS = 128
Stub = Callable[[grpc.aio.Channel], link_pb2_grpc.VerifierLinkStub | link_pb2_grpc.DrafterLinkStub]


async def _call(stub: Stub, credentials: LinkCredentials | None, endpoint: str, message: Control) -> ControlResult:
    """Send one control message, and wait for its result; a pause may wait for long requests."""
    async with open_channel(endpoint, credentials) as channel:
        try:
            frame = link_pb2.Frame(payload=encode(message))
            answer = await stub(channel).Control(frame, metadata=metadata_of(credentials))
            result: ControlResult = decode(answer.payload, (ControlResult,))
        except grpc.aio.AioRpcError as error:
            if error.code() in REFUSALS:
                return ControlResult(call_id=message.call_id, error=str(error.details()))
            raise ConnectionError(str(error.details())) from error
        except WireError as error:
            raise ConnectionError(str(error)) from error
    return result


class Router(Protocol):
    """What is known of the fleet."""

    @property
    def snapshot(self) -> FleetSnapshot | None:
        """The fleet as it was last heard."""
        ...

    async def refresh(self) -> None:
        """Bring `snapshot` up to date, where the router answers."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetResult:
    """What the replicas answered together."""

    weight_versions: tuple[str, ...]  # one per replica
    weight_digests: tuple[str, ...]  # of the tensors that they took last; "": those that they started with
    is_paused: bool  # one runs no steps, at least
    num_requests: int = 0  # aborted by the call, or kept
    num_missing_tensors: int = 0  # of an update that is half here

    @property
    def weight_version(self) -> str:
        """The version of all replicas, or theirs in order, joined by commas."""
        return ",".join(dict.fromkeys(self.weight_versions))

    @property
    def weight_digest(self) -> str:
        """The digest of all replicas' weights, or theirs in order, joined by commas."""
        return ",".join(dict.fromkeys(self.weight_digests))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLimits:
    """Which trainers verifiers connect to, and for how long they wait for one."""

    hosts: tuple[str, ...] = LOOPBACK_HOSTS  # that a call may name as `master_address`
    timeout_s: float = 45.0  # of the rendezvous, and of each bucket


class FleetControl:
    """Calls every verifier of the fleet, or every drafter, at the same time; each call may be repeated.

    A call that fails at one replica is an error that names it; the others have done what was asked. Then the same call
    again does the rest; of a trainer's group the update begins again. Raises `Unavailable` without a replica or if one
    cannot be reached, `InvalidRequest` if one refuses, `Conflict` for a change of the weights while another goes on.
    """

    def __init__(
        self,
        router: Router,
        call_verifier: Call,
        call_drafter: Call,
        trainers: TrainerLimits | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._router, self._call_verifier, self._call_drafter = router, call_verifier, call_drafter
        self._trainers = trainers or TrainerLimits()
        self._changing: tuple[tuple[object, ...], asyncio.Future[FleetResult]] | None = None
        self._wall_clock, self._asked_s = wall_clock, 0.0
        self._number: str | None = None  # of an update in buckets that names no version and is half here

    @classmethod
    def over_links(
        cls, router: Router, credentials: LinkCredentials | None, trainers: TrainerLimits | None = None
    ) -> FleetControl:
        """Call replicas over gRPC, with the links' credentials."""
        verifiers = functools.partial(_call, link_pb2_grpc.VerifierLinkStub, credentials)
        return cls(router, verifiers, functools.partial(_call, link_pb2_grpc.DrafterLinkStub, credentials), trainers)

    @property
    def verifiers(self) -> Sequence[VerifierReport]:
        """All that do not drain, in a fixed order: their ranks in a trainer's group follow each other so."""
        snapshot = self._router.snapshot
        reports = [] if snapshot is None else [state.report for state in snapshot.verifiers]
        return sorted((report for report in reports if not report.draining), key=lambda report: report.verifier_id)

    async def num_ranks(self) -> int:
        """Return the number of ranks that a trainer's group needs beside the trainer."""
        await self._router.refresh()
        return sum(report.num_ranks for report in self.verifiers)

    @property
    def reported_version(self) -> str:
        """What the newest weights are called, by the verifiers' last reports; "" without a verifier."""
        weights = FleetWeights.of(self.verifiers)
        return "" if weights is None else weights.version

    async def state(self) -> FleetResult:
        """Return what holds now: reports lag behind."""
        return await self._on_all(lambda call_id, _: AskState(call_id=call_id))

    async def pause(self, mode: PauseMode, lease_s: float | None = None) -> FleetResult:
        """Pause, also verifiers that join later; with a lease, for so many seconds unless it is called again."""
        reports = await self._ready()
        asked_s = self._next_order(reports)
        return await self._on(
            reports,
            lambda call_id, _: PauseGeneration(call_id=call_id, mode=mode, lease_s=lease_s, asked_s=asked_s),
        )

    async def resume(self) -> FleetResult:
        reports = await self._ready()
        asked_s = self._next_order(reports)
        return await self._on(reports, lambda call_id, _: ContinueGeneration(call_id=call_id, asked_s=asked_s))

    def _next_order(self, reports: Sequence[VerifierReport]) -> float:
        """Return a number above that of every order to pause or to go on, whatever the clocks of gateways say."""
        told = [self._asked_s, *(report.load.pause_asked_s for report in reports)]
        snapshot = self._router.snapshot
        if snapshot is not None and snapshot.pause is not None:
            told.append(snapshot.pause.asked_s)
        self._asked_s = max(self._wall_clock(), max(told) + ORDER_STEP_S)
        return self._asked_s

    async def flush(self) -> FleetResult:
        """Empty the prefix caches; raises `InvalidRequest` while requests hold KV."""
        return await self._on_all(lambda call_id, _: FlushCache(call_id=call_id))

    async def update_from_folder(self, folder: str, weight_version: str | None = None) -> FleetResult:
        """Take a checkpoint's weights; without a version, under the next number."""
        named = _checked_version(weight_version)

        async def update() -> FleetResult:
            version, self._number = named or await self._next_version(), None
            return _alike(
                await self._on_all(
                    lambda call_id, _: UpdateWeights(call_id=call_id, folder=folder, weight_version=version)
                )
            )

        return await self._change(("folder", folder, named), update)

    async def join_group(
        self,
        *,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
    ) -> FleetResult:
        """Join a trainer's group, whose rank 0 is the trainer; returns once all its ranks are here."""
        if master_address not in self._trainers.hosts:
            expected = f"one of --trainer-hosts, {', '.join(self._trainers.hosts)}"
            raise InvalidRequest(f"master_address must be {expected}", "master_address")
        reports = await self._ready()
        num_ranks = sum(report.num_ranks for report in reports)
        if rank_offset < 1 or world_size < rank_offset + num_ranks:
            expected = f"rank_offset >= 1 and {num_ranks} ranks from there on, not {rank_offset} of {world_size}"
            raise InvalidRequest(f"world_size must leave room for the verifiers: {expected}", "world_size")

        async def join() -> FleetResult:
            return await self._on(
                reports,
                lambda call_id, num_before: InitWeightsGroup(
                    call_id=call_id,
                    master_address=master_address,
                    master_port=master_port,
                    rank_offset=rank_offset + num_before,
                    world_size=world_size,
                    group_name=group_name,
                    backend=backend,
                    timeout_s=self._trainers.timeout_s,
                ),
            )

        where = (master_address, master_port, rank_offset, world_size)
        return await self._change(("group", where, group_name, backend), join)

    async def leave_group(self, group_name: str) -> FleetResult:
        """Leave a trainer's group. What is joined or received at the moment is broken off."""
        self._number = None
        return await self._on_all(lambda call_id, _: DestroyWeightsGroup(call_id=call_id, group_name=group_name))

    async def update_from_group(
        self,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        is_flattened: bool = False,
        weight_version: str | None = None,
    ) -> FleetResult:
        """Receive one bucket of tensors; `num_missing_tensors` says how many the update still lacks."""
        named = _checked_version(weight_version)
        tensors = tuple(names), tuple(dtypes), tuple(tuple(shape) for shape in shapes)

        async def update() -> FleetResult:
            version, self._number = named or self._number or await self._next_version(), None
            updates = self._on_all(
                lambda call_id, _: UpdateWeights(
                    call_id=call_id,
                    names=tensors[0],
                    dtypes=tensors[1],
                    shapes=tensors[2],
                    group_name=group_name,
                    is_flattened=is_flattened,
                    weight_version=version,
                )
            )
            result = _alike(await updates)
            if not named and result.num_missing_tensors:
                self._number = version  # also of the next bucket
            return result

        return await self._change(("bucket", tensors, group_name, is_flattened, named), update)

    async def update_drafters(self, folder: str, weight_version: str | None = None) -> FleetResult:
        """Give drafters in pools, or where there are none those in verifiers, weights of their own from a folder."""
        named = _checked_version(weight_version)

        def message(call_id: str, _: int) -> UpdateDraftWeights:
            return UpdateDraftWeights(call_id=call_id, folder=folder, weight_version=named)

        async def update() -> FleetResult:
            await self._router.refresh()
            snapshot = self._router.snapshot
            states = () if snapshot is None else snapshot.drafters
            reports = [state.report for state in states if not state.report.draining]
            if not reports:
                return await self._on_all(message)
            calls = [(one.drafter_id, self._call_drafter(one.endpoint, message(_new_id(), 0))) for one in reports]
            return await _together([(f"drafter {name}", call) for name, call in calls])

        return await self._change(("drafters", folder, named), update)

    async def _change(self, what: tuple[object, ...], make: Callable[[], Awaitable[FleetResult]]) -> FleetResult:
        """Make a change of weights, or wait for the one that goes on if it is the same.

        Raises `Conflict` if it is another: of two at once, replicas could take one or the other by one name. A change
        goes on without the caller that began it, since the replicas' do.
        """
        if self._changing is None:
            task = asyncio.ensure_future(make())
            self._changing = what, task
            task.add_done_callback(self._end_change)
        elif self._changing[0] != what:
            raise Conflict("another change of the weights goes on; /destroy_weights_update_group breaks a group's off")
        return await asyncio.shield(self._changing[1])

    def _end_change(self, task: asyncio.Future[FleetResult]) -> None:
        self._changing = None
        if not task.cancelled():
            task.exception()  # of a change that nobody waits for any more

    async def _next_version(self) -> str:
        """Return the number after the fleet's highest."""
        versions = (await self.state()).weight_versions
        return str(1 + max((int(version) for version in versions if version.isdecimal()), default=0))

    async def _on_all(self, message: Callable[[str, int], Control]) -> FleetResult:
        """Send each verifier the message of a new call id and of how many ranks come before its own."""
        return await self._on(await self._ready(), message)

    async def _ready(self) -> Sequence[VerifierReport]:
        """Return the verifiers of now."""
        await self._router.refresh()
        if not (reports := self.verifiers):
            raise Unavailable("no verifier is ready")
        return reports

    async def _on(self, reports: Sequence[VerifierReport], message: Callable[[str, int], Control]) -> FleetResult:
        num_before, calls = 0, []
        for report in reports:
            call = self._call_verifier(report.endpoint, message(_new_id(), num_before))
            calls.append((f"verifier {report.verifier_id}", call))
            num_before += report.num_ranks
        return await _together(calls)


def _new_id() -> str:
    return uuid.uuid4().hex


async def _together(calls: Sequence[tuple[str, Awaitable[ControlResult]]]) -> FleetResult:
    """Await the calls of named replicas; raises the first one's error once all have ended."""
    answers = await asyncio.gather(*(call for _, call in calls), return_exceptions=True)
    results = [_checked(name, answer) for (name, _), answer in zip(calls, answers, strict=True)]
    return FleetResult(
        weight_versions=tuple(result.weight_version for result in results),
        weight_digests=tuple(result.weight_digest for result in results),
        is_paused=any(result.is_paused for result in results),
        num_requests=sum(result.num_requests for result in results),
        num_missing_tensors=max(result.num_missing_tensors for result in results),
    )


def _alike(result: FleetResult) -> FleetResult:
    """Return the result of an update; raises `RequestFailed` if replicas have different weights by one name."""
    if not result.num_missing_tensors and len(set(result.weight_digests)) > 1:
        raise RequestFailed(f"weights of different digests are called {result.weight_version}: {result.weight_digest}")
    return result


def _checked_version(version: str | None) -> str | None:
    """Return a name for weights; raises `InvalidRequest` if it cannot stand in answers, logs and lists of names."""
    is_name = version is None or (len(version) <= MAX_VERSION_CHARS and version.isprintable() and "," not in version)
    if not is_name:
        expected = f"at most {MAX_VERSION_CHARS} printable characters without a comma"
        raise InvalidRequest(f"weight_version must be {expected}", "weight_version")
    return version


def _checked(name: str, answer: ControlResult | BaseException) -> ControlResult:
    """Return a replica's result; raises its error."""
    if isinstance(answer, ConnectionError):
        raise Unavailable(f"{name} cannot be reached: {answer}") from answer
    if isinstance(answer, BaseException):
        raise RequestFailed(f"{name}: {answer!r}") from answer
    if answer.error is not None:
        raise InvalidRequest(f"{name}: {answer.error}")
    return answer
