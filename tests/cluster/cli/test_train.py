"""`outrider train-drafter`: what it refuses, what it shows, and that asking for help loads nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from outrider.cluster.cli.train import train_drafter
from outrider.drafter_service.service.methods import TRAINED
from tiny.training import write_target, write_text

SMALL = ("--rows", "4", "--window", "16", "--device", "cpu")


def test_help_loads_neither_torch_nor_rich() -> None:
    code = "import sys, outrider.cluster.cli.train; print({'torch', 'rich', 'transformers'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
    help_text = CliRunner().invoke(train_drafter, ["--help"]).output
    methods = "draft-model|tidar|medusa|mlp-speculator|eagle|eagle3|mtp|parallel-draft|dflash"
    assert methods in "".join(help_text.lower().split())
    own = {name for record in TRAINED.values() for name in record.trained_with}
    assert all(f"--{name.replace('_', '-')}" in help_text for name in own)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    write_target(folder / "target")
    write_text(folder / "text")
    return folder


def invoke(place: Path, method: str, *options: str) -> tuple[int, str]:
    files = ("--target", f"{place}/target", "--text", f"{place}/text", "--output", f"{place}/{method}")
    done = CliRunner().invoke(train_drafter, [method, *files, *SMALL, *options])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def test_a_drafter_is_trained_and_its_acceptance_shown_by_position(place: Path) -> None:
    figures_file = place / "figures.json"
    options = ("--draft-vocab-size", "200", "--taps", "0,1,3", "--num-speculative-tokens", "2", "--objective", "streak")
    code, output = invoke(place, "eagle3", "--steps", "2", "--json", str(figures_file), *options)
    assert code == 0, output
    figures = json.loads(figures_file.read_text())
    assert figures["objective"] == "streak"
    assert [row["position"] for row in figures["held_out"]["positions"]] == [0, 1]
    first = figures["held_out"]["positions"][0]
    cells = ["1", *(f"{first[name]:.3f}" for name in ("greedy", "chain", "rejection"))]
    assert cells in [line.replace("│", " ").split() for line in output.splitlines()]
    assert "tokens per verification of" in output
    assert "2 steps, 128 tokens" in " ".join(output.split())
    config = json.loads((place / "eagle3" / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 3]
    assert config["draft_vocab_size"] == 200


@pytest.mark.parametrize(
    ("method", "option", "field"),
    [
        ("mlp-speculator", ("--hidden-size", "24"), ("inner_dim", 24)),
        ("dflash", ("--num-layers", "1"), ("block_size", 5)),
        ("dflash", ("--taps", "0,3"), ("aux_hidden_state_layer_ids", [0, 3])),
        ("parallel-draft", ("--num-layers", "1"), ("num_hidden_layers", 1)),
    ],
)
def test_a_methods_own_option_is_in_its_config(
    place: Path, method: str, option: tuple[str, ...], field: tuple[str, object]
) -> None:
    name = f"{method}{option[0]}"
    code, output = invoke(place, method, "--steps", "1", "--output", str(place / name), *option)
    assert code == 0, output
    config = json.loads((place / name / "config.json").read_text())
    assert config[field[0]] == field[1]


def test_a_run_that_stopped_goes_on_when_it_is_told_to(place: Path) -> None:
    assert invoke(place, "medusa", "--steps", "1")[0] == 0
    code, output = invoke(place, "medusa", "--steps", "2")
    assert code == 2
    assert "a run stopped here; resume it" in " ".join(output.split())
    code, output = invoke(place, "medusa", "--steps", "2", "--resume")
    assert (code, "2 steps, 128 tokens" in " ".join(output.split())) == (0, True), output


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (
            "medusa",
            ("--hidden-size", "64"),
            "--hidden-size is an option of draft-model, mlp-speculator and parallel-draft alone",
        ),
        (
            "eagle3",
            ("--num-layers", "2"),
            "--num-layers is an option of draft-model, medusa, parallel-draft and dflash alone",
        ),
        ("draft-model", ("--draft-vocab-size", "9"), "--draft-vocab-size is an option of medusa and eagle3 alone"),
        ("draft-model", ("--taps", "1,2,3"), "--taps is an option of eagle3 and dflash alone"),
        (
            "medusa",
            ("--init-from", "."),
            "--init-from is an option of draft-model, tidar, eagle3 and parallel-draft alone",
        ),
        ("eagle", ("--taps", "1"), "--taps is an option of eagle3 and dflash alone"),
        ("dflash", ("--taps", "9"), "taps: 9 is no layer of a target with 4 layers"),
        ("eagle3", ("--taps", "1,x"), "expected layer numbers with commas between them"),
        ("eagle3", ("--taps", "1,2,9"), "taps: 9 is no layer of a target with 4 layers"),
        ("eagle3", ("--window", "5"), "window: 5 tokens leave no root"),
        ("eagle3", ("--window", "99999"), "--text: "),
        ("draft-model", ("--hidden-size", "9"), "hidden_size must be a multiple of 8"),
        ("eagle3", ("--text", "nowhere"), "'nowhere' does not exist"),
        ("eagle9", (), "'eagle9' is not one of"),
        (
            "draft-model",
            ("--objective", "streak"),
            "objective: streak weighs a draft position by the survival of those",
        ),
        ("medusa", ("--objective", "streak", "--num-speculative-tokens", "1"), "this medusa learns one position"),
        ("medusa", ("--objective", "ce_streak"), "'ce_streak' is not one of 'ce', 'tv', 'streak'"),
    ],
)
def test_a_wrong_input_is_named(place: Path, method: str, options: tuple[str, ...], message: str) -> None:
    code, output = invoke(place, method, "--steps", "1", *options)
    assert code == 2
    assert message in " ".join(output.split())


def test_a_folder_without_a_model_is_named(place: Path) -> None:
    code, output = invoke(place, "medusa", "--target", str(place / "text"), "--steps", "1")
    assert code == 2
    assert "text holds no model" in " ".join(output.split())
