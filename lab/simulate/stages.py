"""Where drafts pay on a model in pipeline stages, or with its experts over devices: steady states, by arithmetic.

Stages. Requests form groups; a group is in one stage at a time, and its next round begins once the last has ended:

    off        without drafts
    between    the last stage's device drafts for a group when its round has ended
    own stage  a device of its own drafts for one group while the stages verify others (as in SHIP): one stage more
    ahead      the same, and a group's next rounds begin behind the one that runs, on the guess that all of it is right;
               a wrong token voids those behind it. So guesses fill what would be bubbles

Each way has the number of groups and the draft length that are best for it, and is compared with the best of *off* on
the same stages, whose devices are one fewer than with a drafter's own. The devices of one tensor-parallel target are
cut into 1, 2 and 4 stages. Every request is alike; prompts are not there.

Experts. Each of E devices has its share of every layer's experts and of the requests; each token takes some experts,
drawn uniformly. A device reads the experts that a row of the step takes, once, and the slowest one sets the time. What
goes between devices is as in a ring of their links. A drafter takes the time of a dense model on one device, for the
requests that this has.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.lab.simulate.accelerators import (
    ALL_REDUCE_LATENCY_S,
    BYTES_PER_PARAM,
    COMPUTE_EFFICIENCY,
    MEMORY_EFFICIENCY,
    STEP_OVERHEAD_S,
    Accelerator,
    StepTiming,
)
from outrider.lab.simulate.kv import acceptance_length
from outrider.lab.simulate.load import LengthLaw
from outrider.lab.simulate.system import System

OFF, BETWEEN, OWN_STAGE, AHEAD = "off", "between", "own stage", "ahead"
WAYS = (BETWEEN, OWN_STAGE, AHEAD)
STAGES, DEVICES = (1, 2, 4), (8, 16, 32)  # of experts as many as hold them
LOADS = (1, 4, 16, 64, 256)  # requests that decode
ACCEPTANCES = (0.5, 0.7, 0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """The best state of one way: on so many stages (or devices, of experts), with so many requests."""

    parts: int
    way: str
    num_requests: int
    acceptance: float
    tokens_per_s: float
    ratio: float  # over `off` there
    draft_length: int
    num_groups: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StagesStudy:
    """Both tables."""

    stages: tuple[StageRow, ...]
    experts: tuple[StageRow, ...]


def study_stages(system: System, lengths: LengthLaw) -> StagesStudy:
    """Find every way's best state at every load and acceptance."""
    context = lengths.num_prompt_tokens + lengths.num_output_tokens / 2
    pipelines = [Pipeline.of(system, num_stages, context) for num_stages in STAGES]
    mixtures = [ExpertDevices(accelerator=system.accelerator, num_devices=count, context=context) for count in DEVICES]
    draft = StepTiming.roofline(system.drafters_on, system.draft, system.draft_tensor_parallel_size)
    most = system.num_speculative_tokens
    return StagesStudy(
        stages=tuple(
            pipeline.best(way, num_requests, acceptance, most)
            for pipeline, num_requests, acceptance, way in itertools.product(pipelines, LOADS, ACCEPTANCES, WAYS)
        ),
        experts=tuple(
            devices.best(draft, num_requests, acceptance, most)
            for devices, num_requests, acceptance in itertools.product(mixtures, LOADS, ACCEPTANCES)
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A target in stages, each on a device (or a tensor-parallel group) of its own, and a draft model on another."""

    num_stages: int
    stage: StepTiming  # of one of them
    draft: StepTiming
    hop_s: float  # from a stage to the next
    hop_row_s: float  # the same, of each row
    link_s: float  # from the last stage to the drafter and back
    context: float

    @classmethod
    def of(cls, system: System, num_stages: int, context: float) -> Pipeline:
        """Cut a system's target into stages on the same devices; all stages have the overhead of one step together."""
        target = system.target
        part = replace(
            target,
            num_params=target.num_params / num_stages,
            num_layers=target.num_layers / num_stages,
            kv_bytes_per_token=target.kv_bytes_per_token / num_stages,
        )
        timing = StepTiming.roofline(system.accelerator, part, max(1, system.tensor_parallel_size // num_stages))
        is_whole = num_stages == 1
        return cls(
            num_stages=num_stages,
            stage=replace(timing, overhead_s=timing.overhead_s - STEP_OVERHEAD_S * (1 - 1 / num_stages)),
            draft=StepTiming.roofline(system.drafters_on, system.draft, system.draft_tensor_parallel_size),
            hop_s=0.0 if is_whole else ALL_REDUCE_LATENCY_S,
            hop_row_s=0.0 if is_whole else target.hidden_size * BYTES_PER_PARAM / system.accelerator.link_bytes_per_s,
            link_s=system.link_s,
            context=context,
        )

    def best(self, way: str, num_requests: int, acceptance: float, most: int) -> StageRow:
        """Return the best state of a way with drafts of at most `most` tokens; lengths of 0 are `off`."""
        groups = range(1, min(2 * self.num_stages + 1, num_requests) + 1)
        off = max(self.rate(OFF, num_requests, count, 0, acceptance) for count in groups)
        found = {
            (count, length): self.rate(way, num_requests, count, length, acceptance)
            for count, length in itertools.product(groups, range(1, most + 1))
        }
        num_groups, length = max(found, key=found.__getitem__)
        return StageRow(
            parts=self.num_stages,
            way=way,
            num_requests=num_requests,
            acceptance=acceptance,
            tokens_per_s=found[num_groups, length],
            ratio=found[num_groups, length] / off,
            draft_length=length,
            num_groups=num_groups,
        )

    def rate(self, way: str, num_requests: int, num_groups: int, length: int, acceptance: float) -> float:
        """Return tokens per second where so many requests run in groups, with drafts of one length."""
        in_group = num_requests / num_groups
        rows = in_group * (1 + length)
        stage_s = self.stage.seconds(rows, in_group * self.context) + self.hop_s + self.hop_row_s * rows
        draft_s = length * self.draft.seconds(in_group, in_group * self.context)
        pass_s = self.num_stages * stage_s
        tokens = num_requests * acceptance_length(acceptance, length)
        if way == OFF:
            return num_requests / max(pass_s, num_groups * stage_s)
        if way == BETWEEN:
            return tokens / max(pass_s + draft_s, num_groups * (stage_s + draft_s))
        slot_s = num_groups * max(stage_s, draft_s)  # from a group's launch to its next, where nothing is waited for
        round_s = max(pass_s + draft_s + self.link_s, slot_s)
        if way == OWN_STAGE:
            return tokens / round_s
        # a run of rounds that are right to their ends, and the guess of the token behind each, ends with a wrong token
        goes_on = acceptance ** (length + 1)
        rounds = 1 / (1 - goes_on)
        run_tokens = num_requests * acceptance_length(acceptance, length) * rounds
        return run_tokens / (round_s + (rounds - 1) * min(slot_s, round_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertDevices:
    """A mixture of experts over devices; by default of Qwen3-235B-A22B's sizes (its config.json), in bf16."""

    accelerator: Accelerator
    num_devices: int
    context: float
    num_layers: int = 94
    hidden_size: int = 4096
    num_experts: int = 128
    experts_per_token: int = 8
    params_per_expert: float = 3 * 4096 * 1536
    shared_params: float = 94 * 4096 * (2 * 8192 + 2 * 512) + 2 * 151936 * 4096  # attention, embedding and head
    kv_bytes_per_token: float = 94 * 2 * 4 * 128 * BYTES_PER_PARAM

    def step_s(self, num_rows: float, num_requests: float) -> float:
        """Return the seconds of a step; its rows and requests are spread evenly, experts as they are drawn."""
        own_rows, own_requests = num_rows / self.num_devices, num_requests / self.num_devices
        read = self.shared_params + self.num_layers * self.params_per_expert * self.taken(num_rows)
        active = self.shared_params + self.num_layers * self.experts_per_token * self.params_per_expert
        memory_s = BYTES_PER_PARAM * read + self.kv_bytes_per_token * own_requests * self.context
        memory_s /= MEMORY_EFFICIENCY * self.accelerator.bytes_per_s
        compute_s = 2 * active * own_rows / (COMPUTE_EFFICIENCY * self.accelerator.flops_per_s)
        return max(memory_s, compute_s) + STEP_OVERHEAD_S + self._exchange_s(own_rows)

    def taken(self, num_rows: float) -> float:
        """Return how many experts of a layer the rows take on one device, on average."""
        share = 1 - (1 - self.experts_per_token / self.num_experts) ** num_rows
        return share * self.num_experts / self.num_devices

    def _exchange_s(self, own_rows: float) -> float:
        """Return the seconds in which rows go to their experts and back, layer by layer."""
        if self.num_devices == 1:
            return 0.0
        away = own_rows * self.experts_per_token * (1 - 1 / self.num_devices)
        bytes_ = away * self.hidden_size * BYTES_PER_PARAM
        return 2 * self.num_layers * (ALL_REDUCE_LATENCY_S + bytes_ / self.accelerator.link_bytes_per_s)

    def best(self, draft: StepTiming, num_requests: int, acceptance: float, most: int) -> StageRow:
        """Return the best draft length: each device drafts for its own requests, in front of each step."""
        off = num_requests / self.step_s(num_requests, num_requests)
        own = max(1.0, num_requests / self.num_devices)

        def rate(length: int) -> float:
            draft_s = length * draft.seconds(own, own * self.context)
            step_s = self.step_s(num_requests * (1 + length), num_requests)
            return num_requests * acceptance_length(acceptance, length) / (draft_s + step_s)

        length = max(range(1, most + 1), key=rate)
        return StageRow(
            parts=self.num_devices,
            way=BETWEEN,
            num_requests=num_requests,
            acceptance=acceptance,
            tokens_per_s=rate(length),
            ratio=rate(length) / off,
            draft_length=length,
            num_groups=1,
        )


def lines_of(rows: Sequence[StageRow]) -> list[list[StageRow]]:
    """Return the rows of each way and acceptance on so many parts, by their loads."""
    keys = dict.fromkeys((row.parts, row.way, row.acceptance) for row in rows)
    return [[row for row in rows if (row.parts, row.way, row.acceptance) == key] for key in keys]
