"""What the study of vLLM reads and shows, without vLLM."""

from __future__ import annotations

from pathlib import Path

from benchmarks.vllm.pool import ADAPTIVE, DRAFT_MODEL, FIXED, PLAIN, Drafted, drafted, engines

PAGE = """
# TYPE outrider_verify_committed_tokens_total counter
outrider_verify_committed_tokens_total{engine="a",model_name="m"} 100.0
outrider_verify_committed_tokens_total{engine="b",model_name="m"} 7.0
# TYPE outrider_verify_drafts_total counter
outrider_verify_drafts_total{engine="a",model_name="m"} 20.0
# TYPE outrider_verify_accepted_tokens_total counter
outrider_verify_accepted_tokens_total{engine="a",model_name="m"} 60.0
"""


def test_one_engines_counters_are_read_and_the_drafted_share_follows():
    found = drafted(PAGE, "a")
    assert found == Drafted(100.0, 20.0, 0.0, 60.0)
    assert found.share == 0.5, "40 rounds committed 100 tokens"
    assert found.minus(Drafted(60.0, 0.0, 0.0, 20.0)) == Drafted(40.0, 20.0, 0.0, 40.0)
    assert drafted(PAGE, "c").share == 0.0


def test_plain_engines_have_no_pool_and_the_others_differ_in_who_decides():
    found = engines(Path("python"), "host:1", {"state_taps": [1]}, "drafter", {"model": "m"})
    modes = {peer.name: peer.options for peer in found}
    assert "pool" not in modes[PLAIN]
    assert modes[FIXED]["pool"] == modes[ADAPTIVE]["pool"] == "host:1"
    assert modes[FIXED]["plugin"] == {"state_taps": [1], "speculation": "always"}
    assert modes[ADAPTIVE]["plugin"] == {"state_taps": [1]}
    assert modes[DRAFT_MODEL]["draft_model"] == "drafter"
    assert DRAFT_MODEL not in {peer.name for peer in engines(Path("python"), "host:1", {}, None, {})}
