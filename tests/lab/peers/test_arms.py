"""Which engines are compared: what a model has of its own decides which of our own modes there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.lab.peers.arms import BASELINE, all_peers


def peers_of(head: Path | None) -> dict[str, dict]:
    found, _ = all_peers(
        Path("absent"),
        model=Path("model"),
        draft_model=None,
        head=head,
        half_gguf=None,
        dtype="float32",
        max_num_seqs=4,
        max_model_len=64,
    )
    return {peer.name: peer.options for peer in found}


def test_a_shipped_head_is_measured_alone_and_beside_look_ups():
    peers = peers_of(Path("head"))
    assert (peers["Outrider EAGLE-3"]["method"], peers["Outrider EAGLE-3"]["draft_model"]) == ("eagle3", "head")
    both = peers["Outrider look-up or EAGLE-3"]
    assert (both["method"], both["methods"], both["draft_model"]) == ("hybrid", ["ngram", "eagle3"], "head")
    assert both["speculation"] == peers["Outrider EAGLE-3"]["speculation"] == "auto"


@pytest.mark.parametrize("name", ["Outrider EAGLE-3", "Outrider look-up or EAGLE-3", "vLLM", "Outrider draft model"])
def test_what_is_not_there_is_not_measured(name: str):
    peers = peers_of(None)
    assert name not in peers
    assert peers[BASELINE]["speculation"] == "off"
