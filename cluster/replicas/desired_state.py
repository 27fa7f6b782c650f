"""Brings an engine to the state that is desired of it: weights and pause of its fleet, or its learner's version.

Whoever desires a state says so again and again; an engine that has it, or has just refused it, is left alone.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from outrider.cluster.router.fleet import FleetPause, FleetWeights
from outrider.verifier_service.links.control_table import ControlTable
from outrider.verifier_service.messages.engine import (
    ContinueGeneration,
    ControlResult,
    EngineLoad,
    PauseGeneration,
    PauseMode,
    UpdateDraftWeights,
    UpdateWeights,
)

logger = logging.getLogger(__name__)
FIRST_RETRY_S = 2.0  # after a refusal; then twice as long each time, for a retry delays what is served
LAST_RETRY_S = 60.0

State = TypeVar("State")
StateCall = UpdateWeights | UpdateDraftWeights | PauseGeneration | ContinueGeneration


@dataclass(frozen=True, slots=True)
class Refusal(Generic[State]):
    """A state that the engine could not take."""

    state: State
    error: str
    pause_s: float
    retry_s: float  # by the reconciler's clock


class Reconciler(Generic[State]):
    """Compares a desired state with what an engine has, and makes the call that it lacks."""

    def __init__(
        self,
        control: Callable[[Any], Awaitable[ControlResult]],
        lacking: Callable[[State], StateCall | None],
        clock: Callable[[], float],
        state: State | None = None,
    ) -> None:
        """`lacking` returns the call for a state, whatever its id; None: none is to be made now.

        `state`: what the engine has at first. `control` raises `ConnectionError` with the engine's end.
        """
        self._control, self._lacking, self._clock = control, lacking, clock
        self.state = state  # None: not known, or a call for another broke off
        self.refusal: Refusal[State] | None = None
        self._desired: State | None = None
        self._news = asyncio.Event()

    def want(self, state: State | None) -> None:
        """Note what is desired; None: nothing new."""
        if state is not None:
            self._desired = state
            self._news.set()

    async def run(self) -> None:
        """Bring the engine to what is desired, again and again."""
        while True:
            await self._news.wait()
            self._news.clear()
            assert self._desired is not None
            await self.bring_to(self._desired)

    async def bring_to(self, state: State) -> None:
        """Have the engine take a state, unless it has it or has just refused it."""
        last = self.refusal if self.refusal is not None and self.refusal.state == state else None
        is_too_soon = last is not None and self._clock() < last.retry_s
        call = None if is_too_soon or state == self.state else self._lacking(state)
        if call is None:
            return
        self.state = None
        result = await self._control(replace(call, call_id=uuid.uuid4().hex))
        if result.error is None:
            self.state, self.refusal = state, None
            return
        logger.warning("the engine could not take %s: %s", state, result.error)
        pause_s = FIRST_RETRY_S if last is None else min(2 * last.pause_s, LAST_RETRY_S)
        self.refusal = Refusal(state, result.error, pause_s, self._clock() + pause_s)


def fleet_weights(
    control: ControlTable[ControlResult], load: Callable[[], EngineLoad | None], clock: Callable[[], float]
) -> Reconciler[FleetWeights]:
    """Bring a verifier to its fleet's weights, unless it has got some meanwhile or is being given some.

    `load` is the engine's last report; None: it has not reported.
    """

    def lacking(weights: FleetWeights) -> UpdateWeights | None:
        now = load()
        if now is None or now.weights_taken_s > 0.0 or len(control) > 0:
            return None
        return UpdateWeights(call_id="", folder=weights.folder, weight_version=weights.version)

    return Reconciler(control.call, lacking, clock)


def fleet_pause(control: ControlTable[ControlResult], clock: Callable[[], float]) -> Reconciler[FleetPause]:
    """Have a verifier pause and go on as its fleet; the engine knows which order is the newest."""

    def lacking(pause: FleetPause) -> PauseGeneration | ContinueGeneration:
        if not pause.is_paused:
            return ContinueGeneration(call_id="", asked_s=pause.asked_s)
        return PauseGeneration(call_id="", mode=PauseMode.KEEP, lease_s=pause.lease_left_s, asked_s=pause.asked_s)

    return Reconciler(control.call, lacking, clock)
