"""The verb on a tiny checkpoint, with the engines that this environment has."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from outrider.cluster.cli.main import main
from outrider.drafter_service import embedded


@pytest.mark.timeout(600)
def test_engines_of_this_environment_make_the_same_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr("outrider.cluster.peers.verb._loads", lambda *_: [tiny_load()])
    found, page = tmp_path / "found.json", tmp_path / "page.md"
    pair = [str(embedded.target_path()), "--draft-model", str(embedded.draft_path())]
    arguments = [*pair, "--dtype", "float32", "--repeats", "1", "--threads", "1"]
    picture = tmp_path / "bars.png"
    outputs = ["--json", str(found), "--markdown", str(page), "--environments", str(tmp_path), "--plot", str(picture)]
    result = CliRunner().invoke(main, ["bench", "peers", *arguments, *outputs])
    assert result.exit_code == 0, result.output
    read = json.loads(found.read_text())
    assert [peer["name"] for peer in read["peers"]] == [
        *("Outrider off", "Outrider off, again", "Outrider adaptive", "Outrider fixed"),
        *("transformers", "transformers look-up", "Outrider draft model", "transformers assisted"),
    ]
    assert page.read_text().count("100% |") == 8, page.read_text()
    assert read["missing"].keys() == {
        *("vLLM", "vLLM look-up", "vLLM draft model", "vLLM from our pool"),
        *("OpenVINO", "OpenVINO look-up", "llama.cpp"),
    }
    assert picture.read_bytes().startswith(b"\x89PNG")


def tiny_load():
    from outrider.cluster.peers.measure import Load

    prompts = tuple((5 + n, 80, 90, 5 + n, 80) for n in range(2))
    return Load(name="tiny", concurrency=2, prompts=prompts, max_tokens=6)
