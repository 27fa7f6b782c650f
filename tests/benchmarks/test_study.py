"""The studies have a verb each, and the verbs of `outrider bench` that they once were say where they went."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from benchmarks.study import STUDIES, study
from outrider.lab.cli import bench


@pytest.mark.parametrize("name", [command.name for command in STUDIES])
def test_a_study_explains_itself_and_its_old_verb_refuses_with_a_hint(name: str):
    shown = CliRunner().invoke(study, [name, "--help"])
    assert shown.exit_code == 0
    assert "Usage: study" in shown.output
    assert name in CliRunner().invoke(study, ["--help"]).output.split("Commands:")[1]
    refused = CliRunner().invoke(bench.bench, [name, "--repeats", "1"])
    assert refused.exit_code == 2
    assert f"make study NAME={name}" in refused.output


def test_the_hints_are_for_all_studies_and_no_verb_has_their_name():
    assert {command.name for command in STUDIES} == {*bench.STUDIES}
    assert not bench.bench.commands.keys() & {*bench.STUDIES}
