"""The verb on a tiny checkpoint, with the engines that this environment has."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from outrider.cluster.cli.main import main
from outrider.drafter_service import embedded

OURS = ("Outrider off", "Outrider off, again", "Outrider adaptive", "Outrider fixed")
OTHERS = ("transformers", "transformers look-up", "Outrider draft model", "transformers assisted")


# a process takes ten seconds to start, so that the long list is a soak's
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("only", "names"),
    [
        (("Outrider off", "transformers assisted"), (*OURS[:2], OTHERS[-1])),
        pytest.param((), OURS + OTHERS, marks=pytest.mark.soak),
    ],
    ids=["some", "all"],
)
def test_engines_of_this_environment_make_the_same_tokens(tmp_path, monkeypatch, only, names):
    monkeypatch.setattr("outrider.lab.peers.verb._loads", lambda *_: [tiny_load()])
    found, page = tmp_path / "found.json", tmp_path / "page.md"
    pair = [str(embedded.target_path()), "--draft-model", str(embedded.draft_path())]
    arguments = [*pair, "--dtype", "float32", "--repeats", "1", "--threads", "1", "--first-token", "20,99999,88888"]
    picture = tmp_path / "bars.png"
    outputs = ["--json", str(found), "--markdown", str(page), "--environments", str(tmp_path), "--plot", str(picture)]
    chosen = [option for name in only for option in ("--only", name)]
    result = CliRunner().invoke(main, ["bench", "peers", *arguments, *outputs, *chosen])
    assert result.exit_code == 0, result.output
    read = json.loads(found.read_text())
    assert tuple(peer["name"] for peer in read["peers"]) == names
    assert [sample["load"] for sample in read["samples"][len(names) :]] == [
        *["first token of 20, ms"] * len(names),
        *["first token of 2047, ms"] * len(names),  # what the model has room for
    ]
    assert page.read_text().count("100% |") == len(names), page.read_text()
    assert read["missing"].keys() == {
        *("vLLM", "vLLM look-up", "vLLM draft model", "vLLM from our pool"),
        *("OpenVINO", "OpenVINO look-up", "llama.cpp"),
    }
    assert picture.read_bytes().startswith(b"\x89PNG")


def tiny_load():
    from outrider.lab.peers.measure import Load

    prompts = tuple((5 + n, 80, 90, 5 + n, 80) for n in range(2))
    return Load(name="tiny", concurrency=2, prompts=prompts, max_tokens=6)
