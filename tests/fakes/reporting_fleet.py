"""A verifier in virtual time that follows a router and reports to it every second."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from fakes.reports import drafter_report, verifier_report
from outrider.cluster.router.fleet import Directive, RouterPolicy, VerifierReport
from outrider.cluster.router.router import RouterCore
from outrider.verifier_service.messages.engine import DrafterPerformance, RequestLoad, StepTime
from outrider.verifier_service.messages.request import SpeculationPlan
from outrider.verifier_service.pricing.cost_model import StepTimeModel

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def profile(step_s: Callable[[int], float]) -> tuple[StepTime, ...]:
    return tuple(StepTime(num_tokens=n, seconds=step_s(n)) for n in COUNTS)


MEMORY_BOUND = profile(lambda n: 0.03)
COMPUTE_BOUND = profile(lambda n: 0.001 * n)
ROOFLINE = profile(lambda n: max(0.03, 0.03 * n / 64))  # turns compute-bound at 64 tokens


def names(count: int, prefix: str = "r") -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]


class Fleet:
    """One verifier, some drafters, a fake clock; requests are named.

    `price`, where it is set, is what the verifier says of its steps, whether it drafts or not. Else it is what one more
    token takes from a step by the profile, `points`, as far as that is known: 0 below the knee, 1 beyond it.
    """

    def __init__(
        self,
        points: tuple[StepTime, ...] = MEMORY_BOUND,
        *,
        policy: RouterPolicy | None = None,
        drafters: Sequence[str] = ("d0",),
        round_trip_s: float = 0.0,
        price: float | None = None,
    ) -> None:
        self.core = RouterCore(policy or RouterPolicy())
        self.now_s = 1000.0
        self.points, self.price = points, price
        self.kv_usage = 0.1
        self.drafters = {drafter_id: drafter_report(drafter_id) for drafter_id in drafters}
        self.up = set(drafters)
        self.round_trips_s = dict.fromkeys(drafters, round_trip_s)
        self.caps: dict[str, int | None] = {}
        self.priorities: dict[str, int] = {}
        self.targets_ms: dict[str, float] = {}  # of the inter-token time
        self.inter_token_ms: dict[str, float] = {}
        self.plans: dict[str, SpeculationPlan] = {}
        self.default_plan = SpeculationPlan()
        self.directive: Directive | None = None

    def add(self, *request_ids: str, cap: int | None = None) -> None:
        for request_id in request_ids:
            self.caps[request_id], self.plans[request_id] = cap, self.default_plan

    def drop(self, *request_ids: str) -> None:
        for request_id in request_ids:
            for held in (self.caps, self.plans):
                del held[request_id]

    def report(self, num_waiting: int = 0) -> VerifierReport:
        num_running = len(self.plans) - num_waiting
        requests = tuple(
            RequestLoad(
                request_id=request_id,
                is_running=index < num_running,
                drafter_id=plan.drafter_id,
                draft_length=plan.draft_length,
                num_speculative_tokens=self.caps[request_id],
                priority=self.priorities.get(request_id, 0),
                target_inter_token_ms=self.targets_ms.get(request_id),
                inter_token_ms=self.inter_token_ms.get(request_id),
            )
            for index, (request_id, plan) in enumerate(self.plans.items())
        )
        return verifier_report(
            verifier_id="v0",
            endpoint="v0:1",
            epoch=1,
            num_running=num_running,
            num_waiting=num_waiting,
            num_decoding=num_running,
            kv_usage=self.kv_usage,
            step_times=self.points,
            requests=requests,
            linked_drafters=tuple(sorted(self.up)),
            drafters=tuple(
                DrafterPerformance(drafter_id=drafter_id, round_trip_s=self.round_trips_s[drafter_id])
                for drafter_id in sorted(self.up & self.round_trips_s.keys())
            ),
            price=self._price(num_running),
            knee=None if self._model is None or math.isinf(self._model.knee()) else self._model.knee(),
        )

    @property
    def _model(self) -> StepTimeModel | None:
        return StepTimeModel.from_points(self.points) if self.points else None

    def _price(self, num_running: int) -> float | None:
        if self.price is not None or self._model is None:
            return self.price
        num_tokens = max(1, num_running)
        return min(1.0, round(num_tokens * self._model.slope(num_tokens) / self._model.t(num_tokens), 6))

    def tick(self, seconds: float, *, with_drafters: bool = True, **report: Any) -> None:
        """Let time pass, then report."""
        self.now_s += seconds
        for drafter in self.drafters.values() if with_drafters else ():
            self.core.report_drafter(drafter, self.now_s)
        self.directive = self.core.report_verifier(self.report(**report), self.now_s)
        self.plans |= self.directive.plans
        self.default_plan = self.directive.default_plan

    def second(self, **report: Any) -> None:
        self.tick(1.0, **report)

    def run(self, seconds: int) -> Fleet:
        for _ in range(seconds):
            self.second()
        return self

    @property
    def lengths(self) -> dict[str, int]:
        return {request_id: plan.draft_length for request_id, plan in self.plans.items()}

    @property
    def reasons(self) -> dict[str, str | None]:
        return {request_id: plan.disabled_reason for request_id, plan in self.plans.items()}
