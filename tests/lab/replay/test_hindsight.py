"""What the best method and length would have brought: cases whose best is known."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from outrider.lab.replay.hindsight import Hindsight

RIGHT, WRONG = [(4, 4)] * 30, [(4, 0)] * 30


@dataclass
class PlayedMachine:
    row_s: float = 0.0
    level_s: float = 0.05

    def step_s(self, num_rows: int, num_requests: int) -> float:
        return 1.0 + self.row_s * num_rows

    def draft_s(self, method: str, num_requests: int, longest: int) -> float:
        return self.level_s * longest


def bound_of(machine: PlayedMachine | None = None, num_requests: int = 2, **recorded: list[list[tuple[int, int]]]):
    return Hindsight(recorded, machine or PlayedMachine(), 4).bound(num_requests)


def test_what_is_always_right_is_drafted_as_long_as_may_be():
    found = bound_of(good=[RIGHT, RIGHT], bad=[WRONG, WRONG])
    assert found.fixed_name == "good, 4"
    assert found.fixed == pytest.approx(5 / 1.2, rel=0.01)
    assert found.per_request == found.one_method == found.per_step == found.fixed
    assert found.by_method["bad"] == pytest.approx(1 / 1.2, rel=0.01)


def test_what_never_pays_is_off():
    found = bound_of(bad=[WRONG])
    assert (found.fixed, found.fixed_name, found.per_step) == (1.0, "none", pytest.approx(1.0))
    dear = bound_of(PlayedMachine(level_s=2.0), good=[[(4, 1)] * 30])
    assert (dear.fixed_name, dear.per_step) == ("none", pytest.approx(1.0))


def test_requests_that_differ_want_a_method_each():
    found = bound_of(PlayedMachine(row_s=0.2), num_requests=1, a=[RIGHT, WRONG], b=[WRONG, RIGHT])
    assert found.per_request > 1.5 * found.fixed


def test_places_that_differ_are_known_step_by_step():
    turns = [(4, 1), (4, 0), (4, 0)] * 10  # every second step is right, whatever was drafted before
    found = bound_of(PlayedMachine(row_s=0.2, level_s=0.3), num_requests=1, a=[turns])
    assert found.one_method > 1.1 * found.per_request


def test_two_methods_in_one_step_beat_either():
    turns, others = [(4, 4), (4, 0)] * 15, [(4, 0), (4, 4)] * 15
    found = bound_of(PlayedMachine(row_s=0.05), num_requests=4, a=[turns, others], b=[others, turns])
    assert found.per_step > 1.1 * found.one_method


def test_a_tree_is_paid_for_by_its_nodes_and_known_by_its_path():
    found = bound_of(PlayedMachine(row_s=0.5), num_requests=1, tree=[[(12, 2)] * 30])
    assert found.by_method["tree"] == pytest.approx(3 * 1.5 / (1 + 13 * 0.5 + 0.2), rel=0.02)
    assert found.per_step == pytest.approx(3 * 1.5 / (1 + 3 * 0.5 + 0.1), rel=0.02)


def test_requests_without_a_position_of_each_method_are_left_out():
    with pytest.raises(ValueError, match="no request has recorded drafts of a and b"):
        bound_of(a=[RIGHT], b=[[]])
