"""The profile of a step on the embedded model, and its clock."""

from __future__ import annotations

import itertools
import time

import pytest

from outrider.cluster.offline.engine import OfflineEngine
from outrider.lab.bench import profile as module
from outrider.lab.bench.profile import PARTS, PHASES, PhaseClock, measure


def test_parts_of_a_step_add_up_and_medians_are_taken_over_steps():
    times_s = itertools.chain([0.0, 1.0, 3.0, 4.0], [10.0, 12.0, 13.0], [20.0, 23.0])
    phases = PhaseClock(clock=lambda: next(times_s))
    for names in (("a", "b", "a"), ("a", "b"), ("a",)):
        phases.begin()
        for name in names:
            phases.end(name)
    assert phases.steps == [{"a": 2.0, "b": 2.0}, {"a": 2.0, "b": 1.0}, {"a": 3.0}]
    assert phases.medians_ms(("a", "b")) == {"a": 2000.0, "b": 1000.0}


@pytest.mark.parametrize("method", [None, "ngram"])
def test_every_part_takes_time_and_nothing_is_left_behind(method):
    with OfflineEngine(module._config(2, method=method, num_threads=1, dtype="float32")) as offline:
        own = measure(offline, 2, num_steps=5, clock=time.perf_counter)
        assert list(own.phases) == list(PHASES)
        assert list(own.parts) == list(PARTS)
        assert all(value > 0.0 for value in (*own.phases.values(), *own.parts.values()))
        assert own.step_ms > own.phases["forward"]
        assert 0.0 < own.host_ms < own.step_ms
        assert not offline.engine.requests
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in offline.model.modules())
