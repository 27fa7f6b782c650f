"""The service that is simulated: accelerators and models, and the three ways to lay them out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from outrider.cluster.router.fleet import PolicyMode, RouterPolicy
from outrider.lab.replay.traces import Trace
from outrider.lab.simulate.accelerators import (
    Accelerator,
    ModelShape,
    StepTiming,
    kv_capacity,
    smallest_tensor_parallel_size,
)
from outrider.lab.simulate.drafting import HIT_RATE, DrafterShape
from outrider.lab.simulate.engines import VerifierShape
from outrider.lab.simulate.load import (
    Floats,
    LengthLaw,
    Workload,
    law_workload,
    poisson_arrivals,
    trace_workload,
)
from outrider.lab.simulate.money import PRICES_PER_HOUR, Bill
from outrider.lab.simulate.simulation import FleetShape, LengthMode, SimulationOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLaw:
    """What requests are like: by a law, or recorded ones where there are traces."""

    lengths: LengthLaw = field(default_factory=LengthLaw)
    acceptance: float = 0.7
    concentration: float = 8.0  # how alike requests' acceptance rates are
    traces: tuple[Trace, ...] = ()
    recorded: str = "eagle"

    def workload(self, arrival_s: Floats, random: np.random.Generator) -> Workload:
        if self.traces:
            return trace_workload(arrival_s, self.traces, self.recorded)
        return law_workload(
            arrival_s, self.lengths, random, acceptance=self.acceptance, concentration=self.concentration
        )

    def steady(self, qps: float, num_requests: int, random: np.random.Generator) -> Workload:
        """Return so many requests at a constant rate."""
        return self.workload(poisson_arrivals(qps, num_requests, random), random)


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Target and draft model on named accelerators; a step-time fit may stand in for a roofline."""

    accelerator: Accelerator
    target: ModelShape
    draft: ModelShape
    tensor_parallel_size: int
    draft_tensor_parallel_size: int = 1
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    num_speculative_tokens: int = 8
    link_s: float = 0.5e-3
    hit_rate: float = HIT_RATE
    num_branches: int = 8
    step_fit: StepTiming | None = None
    draft_fit: StepTiming | None = None  # on `drafters_on`
    draft_accelerator: Accelerator | None = None  # of a pool of drafters; None: as the verifiers'
    prices_per_hour: Mapping[str, float] = field(default_factory=lambda: PRICES_PER_HOUR)  # by accelerator

    @property
    def drafters_on(self) -> Accelerator:
        return self.draft_accelerator or self.accelerator

    @classmethod
    def of(
        cls,
        accelerator: Accelerator,
        *,
        target_params: float,
        draft_params: float,
        tensor_parallel_size: int | None = None,
    ) -> System:
        """Take models of Llama 3's proportions, the target on as few accelerators as hold it unless it is said."""
        target = ModelShape.llama_like(target_params)
        size = tensor_parallel_size or smallest_tensor_parallel_size(accelerator, target)
        return cls(
            accelerator=accelerator,
            target=target,
            draft=ModelShape.llama_like(draft_params),
            tensor_parallel_size=size,
        )

    def plain(self, num_verifiers: int) -> FleetShape:
        """Return a fleet without drafters."""
        return FleetShape(
            verifier=self._verifier(kv_capacity(self.accelerator, self.target, self.tensor_parallel_size)),
            num_verifiers=num_verifiers,
            accelerators_per_verifier=self.tensor_parallel_size,
        )

    def colocated(self, num_verifiers: int) -> FleetShape:
        """Return a fleet whose verifiers draft themselves, on their own accelerators between two steps."""
        size = self.tensor_parallel_size
        # per token of context both models keep KV
        both = replace(self.target, kv_bytes_per_token=self.target.kv_bytes_per_token + self.draft.kv_bytes_per_token)
        shape = self._verifier(kv_capacity(self.accelerator, both, size, other_bytes=self.draft.weight_bytes))
        own = self._draft_timing(self.accelerator, size)
        return FleetShape(
            verifier=replace(shape, own_drafter=own, own_draft_length=self.num_speculative_tokens),
            num_verifiers=num_verifiers,
            accelerators_per_verifier=size,
        )

    def disaggregated(self, num_verifiers: int, num_drafters: int, num_cells: int = 1) -> FleetShape:
        """Return a fleet with a pool of drafters; raise `ValueError` where the draft model does not fit on one."""
        size = self.draft_tensor_parallel_size
        kv_capacity(self.drafters_on, self.draft, size, option="draft_tensor_parallel_size")
        return replace(
            self.plain(num_verifiers),
            drafter=DrafterShape(
                timing=self._draft_timing(self.drafters_on, size),
                link_s=self.link_s,
                hit_rate=self.hit_rate,
                num_branches=self.num_branches,
                max_draft_length=self.num_speculative_tokens,
            ),
            num_drafters=num_drafters,
            num_cells=num_cells,
            accelerators_per_drafter=size,
        )

    def bill(self, fleet: FleetShape) -> Bill:
        """Return what a fleet of this system consists of and costs."""
        return Bill(
            num_verifier_devices=fleet.num_verifiers * fleet.accelerators_per_verifier,
            num_drafter_devices=fleet.num_drafters * fleet.accelerators_per_drafter,
            verifier_price=self.prices_per_hour[self.accelerator.name],
            drafter_price=self.prices_per_hour[self.drafters_on.name],
        )

    def _draft_timing(self, accelerator: Accelerator, size: int) -> StepTiming:
        if self.draft_fit is not None and accelerator == self.drafters_on:
            return self.draft_fit
        return StepTiming.roofline(accelerator, self.draft, size)

    def _verifier(self, kv_tokens: int) -> VerifierShape:
        return VerifierShape(
            timing=self.step_fit or StepTiming.roofline(self.accelerator, self.target, self.tensor_parallel_size),
            kv_tokens=kv_tokens,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to decide draft lengths."""

    name: str
    options: SimulationOptions


def arms(num_speculative_tokens: int) -> list[Arm]:
    """Return off, fixed lengths, the service's own way, and an oracle."""
    fixed = [length for length in (2, 4, 8) if length <= num_speculative_tokens]
    pinned = [
        Arm(
            f"K = {length}",
            SimulationOptions(
                policy=RouterPolicy(mode=PolicyMode.ALWAYS, max_draft_length=length), lengths=LengthMode.PLANNED
            ),
        )
        for length in fixed
    ]
    return [off_arm(), *pinned, adaptive_arm(num_speculative_tokens), oracle_arm(num_speculative_tokens)]


def off_arm() -> Arm:
    return Arm("off", SimulationOptions(policy=RouterPolicy(mode=PolicyMode.OFF), lengths=LengthMode.PLANNED))


def adaptive_arm(num_speculative_tokens: int) -> Arm:
    policy = RouterPolicy(max_draft_length=num_speculative_tokens)
    return Arm("adaptive", SimulationOptions(policy=policy, lengths=LengthMode.PRICED))


def oracle_arm(num_speculative_tokens: int) -> Arm:
    policy = RouterPolicy(mode=PolicyMode.ALWAYS, max_draft_length=num_speculative_tokens)
    return Arm("oracle", SimulationOptions(policy=policy, lengths=LengthMode.ORACLE))
