"""Phases: shared-out time, what is done is not done again, other settings are refused; by a clock that is moved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.lab.head.phases import Phase, Record, run_phases


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Work:
    """Phases that take as long as they are told to, with the limits that they were given."""

    def __init__(self, **takes_s: float) -> None:
        self.clock, self.takes_s, self.limits_s = Clock(), takes_s, {}
        self.said: list[str] = []

    def phases(self) -> list[Phase]:
        return [
            Phase(name=name, does=f"does {name}", share=share, work=lambda limit_s, name=name: self._do(name, limit_s))
            for name, share in (("a", 0.5), ("b", 0.3), ("c", 0.2))
        ]

    def _do(self, name: str, limit_s: float) -> dict[str, str]:
        self.limits_s[name] = limit_s
        self.clock.now_s += self.takes_s[name]
        return {"result": f"made {name}"}

    def run(self, path: Path, *, minutes: float = 1.0, model: str = "m") -> bool:
        record = Record.open(path, {"model": model})
        return run_phases(self.phases(), record, minutes=minutes, say=self.said.append, clock=self.clock)


def test_each_gets_its_share_of_what_is_left(tmp_path: Path):
    work = Work(a=10, b=40, c=1)
    assert work.run(tmp_path / "figures.json")
    assert work.limits_s == pytest.approx({"a": 30, "b": 50 * 0.3 / 0.5, "c": 10})
    assert work.said[:2] == ["a: does a; 30 s for it", "a: made a (10.0 s)"]
    written = json.loads((tmp_path / "figures.json").read_text())["phases"]
    assert {name: (each["does"], each["seconds"]) for name, each in written.items()} == {
        "a": ("does a", 10),
        "b": ("does b", 40),
        "c": ("does c", 1),
    }


def test_without_time_nothing_is_begun_and_the_next_start_goes_on(tmp_path: Path):
    work = Work(a=70, b=5, c=1)
    assert not work.run(tmp_path / "figures.json")
    assert list(work.limits_s) == ["a"]
    assert work.said[-1] == "b: no time is left; the same command goes on here"
    again = Work(a=70, b=5, c=1)
    assert again.run(tmp_path / "figures.json", minutes=0.5)
    assert again.limits_s == pytest.approx({"b": 30 * 0.3 / 0.5, "c": 25})
    assert again.said[0] == "a: done before, made a (70.0 s)"
    third = Work()
    assert third.run(tmp_path / "figures.json")
    assert third.limits_s == {}


def test_another_models_folder_is_refused(tmp_path: Path):
    Work(a=1, b=1, c=1).run(tmp_path / "figures.json")
    with pytest.raises(ValueError, match=r"^model: other does not go on with what .*figures.json has, which is of m"):
        Work().run(tmp_path / "figures.json", model="other")
