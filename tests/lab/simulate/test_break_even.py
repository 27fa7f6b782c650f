"""Where drafters of their own begin to pay: the table against its own arithmetic, and what the verb prints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from outrider.cluster.cli.main import main
from outrider.lab.simulate import break_even
from outrider.lab.simulate.accelerators import ACCELERATORS
from outrider.lab.simulate.break_even import BreakEven, study_break_even
from outrider.lab.simulate.figures import LatencyBounds
from outrider.lab.simulate.load import LengthLaw
from outrider.lab.simulate.system import LoadLaw, System

SYSTEM = replace(
    System.of(ACCELERATORS["H100"], target_params=70e9, draft_params=1e9),
    num_speculative_tokens=2,
    draft_accelerator=replace(ACCELERATORS["H100"], name="L40S"),  # as fast, at a price of its own
)
LOAD = LoadLaw(lengths=LengthLaw(num_prompt_tokens=512, num_output_tokens=1024), acceptance=0.7)
BOUNDS = LatencyBounds(tpot_s=0.02)


@pytest.fixture(autouse=True)
def few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(break_even, "ACCEPTANCES", (0.5, 0.7))
    monkeypatch.setattr(break_even, "LINKS_MS", (0.5, 10.0))
    monkeypatch.setattr(break_even, "POOL_SIZES", (2, 4))


def study(drafter_price: float) -> BreakEven:
    return study_break_even(replace(SYSTEM, prices_per_hour={"H100": 2.0, "L40S": drafter_price}), LOAD, BOUNDS)


def test_drafters_pay_below_the_break_even_price_and_not_above_it() -> None:
    ratio = study(1.0).ratios[0.7][0.5]
    assert ratio is not None
    for factor in (0.5, 2.0):
        found = study(2.0 * ratio * factor)
        best = max(layout.worth.per_price for layout in found.layouts[2:])
        assert (found.layouts[1].worth.per_price > best) is (factor < 1.0)
        assert found.price_ratio == pytest.approx(ratio * factor)


def test_prices_move_no_break_even() -> None:
    assert study(0.1).ratios == study(10.0).ratios


def test_the_verb_prints_the_table(tmp_path: Path) -> None:
    json_file = tmp_path / "found.json"
    arguments = ["simulate", "--study", "break-even", "--draft-accelerator", "L40S", "--num-speculative-tokens", "2"]
    arguments += ["--slo-tpot-ms", "15", "--price-per-hour", "H100=2", "--price-per-hour", "L40S=0.5"]
    result = CliRunner().invoke(main, [*arguments, "--json", str(json_file)])
    assert result.exit_code == 0, result.output
    for text in (
        "per verifier device",
        "per price/h",
        "drafters on H100",
        "drafters on L40S",
        "co-located",
        "link 10 ms",
    ):
        assert text in result.output
    assert "it costs 0.25" in result.output
    assert set(json.loads(json_file.read_text())["ratios"]) == {"0.5", "0.7"}
