"""The time of a drafter's next forward, by a cost model that is profiled at start and refitted by every forward.

Forwards of a draft model are steps like a verifier's, and have a cost model of the same kind. Heads are not profiled:
the estimate is the median of their recent forwards.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from outrider.verifier_service.engine.step_profile import measure_step_profile
from outrider.verifier_service.pricing.cost_model import CostModel, StepShape, StepTimeModel

if TYPE_CHECKING:
    import torch

    from outrider.verifier_service.engine.runners import Runner
    from outrider.verifier_service.messages.batch import ScheduledBatch

NUM_TIMED_FORWARDS = 15  # in the median, which a few long prefills do not move
MAX_PROFILED_TOKENS = 64  # steps of a drafter are small: a token or two of each session, once the prompt is computed


class MeteredRunner:
    """A draft model's runner that keeps the shapes of the forwards since `take_shapes`."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.vocab_size, self.max_model_len = runner.vocab_size, runner.max_model_len
        self.num_blocks, self.block_size = runner.num_blocks, runner.block_size
        self.eos_token_ids, self.states = runner.eos_token_ids, runner.states
        self._shapes: list[StepShape] = []

    def execute(self, batch: ScheduledBatch, chosen: torch.Tensor | None = None) -> torch.Tensor:
        """As the runner's own."""
        self._shapes.append(StepShape(batch.num_tokens, sum(batch.context_lengths)))
        return self._runner.execute(batch, chosen)

    def take_shapes(self) -> list[StepShape]:
        """Return the shapes of the forwards since the last call."""
        shapes, self._shapes = self._shapes, []
        return shapes


class ForwardCost:
    """Times forwards and estimates the next one."""

    def __init__(self, clock: Callable[[], float], runner: MeteredRunner | None = None) -> None:
        """Profile the steps of `runner`, which must be idle; None: there is no cost model, only recent times."""
        self._clock = clock
        self._runner = runner
        self._recent_s: deque[float] = deque(maxlen=NUM_TIMED_FORWARDS)
        self._model: CostModel | None = None
        if runner is None:
            return
        profile = measure_step_profile(runner, MAX_PROFILED_TOKENS, clock)
        runner.take_shapes()
        if len(profile.step_times) > 1:
            self._model = CostModel(StepTimeModel.from_points(profile.step_times), context=profile.context)

    @contextlib.contextmanager
    def timed(self, count: Callable[[], int] | None = None) -> Iterator[None]:
        """Time forwards that are read together, with all that the drafter does for them.

        `count` returns how many forwards have run so far; None: this is one.
        """
        before = 0 if count is None else count()
        begin_s = self._clock()
        yield
        seconds = self._clock() - begin_s
        shapes = [] if self._runner is None else self._runner.take_shapes()
        if num_forwards := 1 if count is None else count() - before:
            self._recent_s.append(seconds / num_forwards)
        if self._model is None or not shapes:
            return
        expected_s = [self._model.seconds(shape) for shape in shapes]
        for shape, own_s in zip(shapes, expected_s, strict=True):  # the time is split as the model expected it
            self._model.observe(shape, seconds * own_s / sum(expected_s))

    def next_s(self, num_context_tokens: int) -> float | None:
        """Return the time of a forward for one session of `num_context_tokens`; None: no forward was timed yet."""
        if self._model is not None:
            return self._model.seconds(StepShape(1, num_context_tokens))
        return statistics.median(self._recent_s) if self._recent_s else None
