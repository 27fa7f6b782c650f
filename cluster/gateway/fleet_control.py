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

from outrider.cluster.common.errors import InvalidRequest, RequestFailed, Unavailable
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
    is_paused: bool  # one runs no steps, at least
    num_requests: int = 0  # aborted by the call, or kept
    num_missing_tensors: int = 0  # of an update that is half here

    @property
    def weight_version(self) -> str:
        """The version of all replicas, or theirs in order, joined by commas."""
        return ",".join(dict.fromkeys(self.weight_versions))


class FleetControl:
    """Calls every verifier of the fleet, or every drafter, at the same time; each call may be repeated.

    A call that fails at one replica is an error that names it; the others have done what was asked. Then the same call
    again does the rest. Raises `Unavailable` without a replica or if one cannot be reached, `InvalidRequest` if one
    refuses.
    """

    def __init__(
        self, router: Router, call_verifier: Call, call_drafter: Call, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._router, self._call_verifier, self._call_drafter = router, call_verifier, call_drafter
        self._wall_clock, self._asked_s = wall_clock, 0.0

    @classmethod
    def over_links(cls, router: Router, credentials: LinkCredentials | None) -> FleetControl:
        """Call replicas over gRPC, with the links' credentials."""
        verifiers = functools.partial(_call, link_pb2_grpc.VerifierLinkStub, credentials)
        return cls(router, verifiers, functools.partial(_call, link_pb2_grpc.DrafterLinkStub, credentials))

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
        version = weight_version or await self._next_version()
        return await self._on_all(
            lambda call_id, _: UpdateWeights(call_id=call_id, folder=folder, weight_version=version)
        )

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
        reports = await self._ready()
        num_ranks = sum(report.num_ranks for report in reports)
        if rank_offset < 1 or world_size < rank_offset + num_ranks:
            expected = f"rank_offset >= 1 and {num_ranks} ranks from there on, not {rank_offset} of {world_size}"
            raise InvalidRequest(f"world_size must leave room for the verifiers: {expected}", "world_size")
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
            ),
        )

    async def leave_group(self, group_name: str) -> FleetResult:
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
        version = weight_version or await self._next_version()
        return await self._on_all(
            lambda call_id, _: UpdateWeights(
                call_id=call_id,
                names=tuple(names),
                dtypes=tuple(dtypes),
                shapes=tuple(tuple(shape) for shape in shapes),
                group_name=group_name,
                is_flattened=is_flattened,
                weight_version=version,
            )
        )

    async def update_drafters(self, folder: str, weight_version: str | None = None) -> FleetResult:
        """Give drafters in pools, or where there are none those in verifiers, weights of their own from a folder."""

        def message(call_id: str, _: int) -> UpdateDraftWeights:
            return UpdateDraftWeights(call_id=call_id, folder=folder, weight_version=weight_version)

        await self._router.refresh()
        snapshot = self._router.snapshot
        reports = [] if snapshot is None else [state.report for state in snapshot.drafters if not state.report.draining]
        if not reports:
            return await self._on_all(message)
        return await _together(
            [
                (f"drafter {report.drafter_id}", self._call_drafter(report.endpoint, message(_new_id(), 0)))
                for report in reports
            ]
        )

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
        is_paused=any(result.is_paused for result in results),
        num_requests=sum(result.num_requests for result in results),
        num_missing_tensors=max(result.num_missing_tensors for result in results),
    )


def _checked(name: str, answer: ControlResult | BaseException) -> ControlResult:
    """Return a replica's result; raises its error."""
    if isinstance(answer, ConnectionError):
        raise Unavailable(f"{name} cannot be reached: {answer}") from answer
    if isinstance(answer, BaseException):
        raise RequestFailed(f"{name}: {answer!r}") from answer
    if answer.error is not None:
        raise InvalidRequest(f"{name}: {answer.error}")
    return answer
