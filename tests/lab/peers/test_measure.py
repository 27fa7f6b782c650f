"""Who is asked when, and what the figures are made of."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest

from outrider.lab.chat_prompts import PROMPTS, chat_prompts
from outrider.lab.peers.arms import BASELINE, PLACEBO, all_peers
from outrider.lab.peers.measure import (
    NUM_PREFIX_TOKENS,
    PREFIX,
    Load,
    Measured,
    Sample,
    equal_prompts,
    long_prompts,
    measure,
    median_first_token_ms,
    median_speed,
    paired_ratio,
    prefixed_prompts,
)
from outrider.lab.peers.process import Answer, PeerError
from outrider.lab.peers.report import PeerFacts, PeersResult, report_of


@dataclass
class FakePeer:
    name: str
    elapsed_s: float
    asked: list[int] = field(default_factory=list)
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    most: int = 99  # prompts at a time

    def run(self, prompts, max_tokens: int) -> Answer:
        if len(prompts) > self.most:
            raise PeerError(f"{self.name} took {self.most} prompts, not {len(prompts)}")
        self.asked.append(len(prompts))
        self.prompts += prompts
        return Answer(elapsed_s=self.elapsed_s, token_ids=[[len(prompt)] * max_tokens for prompt in prompts])


def load(concurrency: int, num_prompts: int = 4) -> Load:
    prompts = tuple((1,) * (n + 1) for n in range(num_prompts))
    return Load(name=f"{concurrency} at a time", concurrency=concurrency, prompts=prompts, max_tokens=8)


def test_every_repeat_asks_all_of_them_in_an_order_that_turns():
    peers, order = [FakePeer("a", 0.5), FakePeer("b", 1.0)], []
    samples = measure(peers, [load(1), load(3)], repeats=2, on_run=order.append).samples
    assert order == [
        *(f"{peer}, {n} at a time, warm-up" for peer in "ab" for n in (1, 3)),
        *("a, 1 at a time", "b, 1 at a time", "a, 3 at a time", "b, 3 at a time"),
        *("a, 1 at a time", "b, 1 at a time", "a, 3 at a time", "b, 3 at a time"),
    ]
    assert peers[0].asked == [1, 3, *([1] * 4 + [3, 1]) * 2]
    assert median_speed(samples, "a", "1 at a time") == 4 * 8 / 2.0
    assert median_speed(samples, "b", "3 at a time") == 4 * 8 / 2.0
    assert paired_ratio(samples, "a", "b", "1 at a time") == 2.0


def first_token_load(length: int, repeats: int) -> Load:
    prompts = tuple((n + 7,) * length for n in range(repeats + 1))
    return Load(name=f"first of {length}", concurrency=1, prompts=prompts, max_tokens=1, is_first_token=True)


def test_a_first_token_is_of_another_prompt_in_every_repeat():
    peers, loads = [FakePeer(BASELINE, 0.5), FakePeer("slow", 1.0)], (load(1), first_token_load(3, repeats=2))
    measured = measure(peers, loads, repeats=2, on_run=lambda _: None)
    assert [prompt for prompt in peers[0].prompts if prompt in loads[1].prompts] == list(loads[1].prompts)
    assert median_first_token_ms(measured.samples, "slow", "first of 3") == 1000
    facts = (PeerFacts(BASELINE, "0.1", 2.0, None), PeerFacts("slow", "7", 1.0, None))
    page = report_of(page_of(measured, loads, facts)).to_markdown()
    assert "| slow | 7 | 1.0 s | - | 8 (0.50) | 1000 (2.00) | 100% |" in page
    assert "smaller is better here" in page


def test_long_prompts_have_their_lengths_and_no_prefix_in_common():
    lengths, taken = [5, 5, 700], {ord("f"), ord('"')}
    prompts = long_prompts(lambda text: list(map(ord, text)), lengths, taken)
    assert [len(prompt) for prompt in prompts] == lengths
    assert len({prompt[0] for prompt in prompts} - taken) == 3
    with pytest.raises(ValueError, match="too short for 2 prompts"):
        long_prompts(lambda text: [7] * len(text), [5, 5], ())


def test_a_peer_that_fails_a_load_loses_that_figure_alone():
    loads, peers = (load(1), load(4)), [FakePeer(BASELINE, 1.0), FakePeer("weak", 0.5, most=2)]
    measured = measure(peers, loads, repeats=2, on_run=lambda _: None)
    assert measured.failures == {("weak", "4 at a time"): "weak took 2 prompts, not 4"}
    assert [(s.peer, s.load) for s in measured.samples if s.peer == "weak"] == [("weak", "1 at a time")] * 2
    assert len([s for s in measured.samples if s.peer == BASELINE]) == 4
    facts = (PeerFacts(BASELINE, "0.1", 2.0, 10**9), PeerFacts("weak", "7", 1.0, None))
    result = page_of(measured, loads, facts)
    assert "| weak | 7 | 1.0 s | - | 16 (2.00) | - | 100% |" in report_of(result).to_markdown()
    assert "No figure of 'weak' at '4 at a time': weak took 2 prompts, not 4." in report_of(result).to_markdown()
    reason = "weak took 2 prompts, not 4"
    assert report_of(result).to_json()["failures"] == [{"peer": "weak", "load": "4 at a time", "reason": reason}]


def page_of(measured: Measured, loads: tuple[Load, ...], facts: tuple[PeerFacts, ...]) -> PeersResult:
    return PeersResult(
        machine="a machine",
        num_threads=2,
        dtype="bfloat16",
        loads=loads,
        repeats=3,
        measured=measured,
        peers=facts,
        missing={"third": "it is not there"},
        weights_read_s=0.0625,
    )


def test_a_ratio_is_of_the_same_repeat():
    speeds = {"a": (10.0, 100.0, 30.0), "b": (5.0, 50.0, 20.0)}
    samples = [
        Sample(peer=peer, load="l", repeat=repeat, tokens_per_s=speed, token_ids=[[repeat], [9 if peer == "a" else 8]])
        for peer, own in speeds.items()
        for repeat, speed in enumerate(own)
    ]
    assert paired_ratio(samples, "a", "b", "l") == 2.0
    assert median_speed(samples, "a", "l") == 30.0
    assert equal_prompts(samples, "a", "b", "l") == 0.5


def test_the_prompts_are_many_and_of_many_kinds():
    rows = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    assert len(rows) == len({row["prompt"] for row in rows}) == 64
    assert len({row["kind"] for row in rows[:16]}) == 8, "the first ones are as mixed as all"
    assert len(chat_prompts(lambda text: [len(text)])) == 64
    words = prefixed_prompts(lambda text: list(range(len(text) // 4)), [(1, 2)])
    assert len(PREFIX.read_text()) // 4 > NUM_PREFIX_TOKENS
    assert words == [(*range(NUM_PREFIX_TOKENS), 1, 2)]


def test_what_cannot_run_here_is_named(tmp_path):
    (tmp_path / "vllm" / "bin").mkdir(parents=True)
    (tmp_path / "vllm" / "bin" / "python").touch()
    own = {"model": tmp_path, "draft_model": None, "head": None}
    fields = {**own, "dtype": "float32", "max_num_seqs": 4, "max_model_len": 99}
    found, missing = all_peers(tmp_path, half_gguf=None, **fields)
    names = [peer.name for peer in found]
    assert names == [BASELINE, PLACEBO, "Outrider adaptive", "Outrider fixed", "transformers", "vLLM",
                     "transformers look-up", "vLLM look-up"]  # fmt: skip
    needy = {"Outrider draft model", "transformers assisted", "vLLM draft model"}
    assert missing.pop("vLLM from our pool") == "it needs --pool"
    assert missing.keys() == {"OpenVINO", "OpenVINO look-up", "llama.cpp", *needy}
    assert {missing[name] for name in needy} == {"it needs --draft-model"}
    assert "make peers" in missing["OpenVINO"]
    for environment in ("openvino", "llamacpp"):
        (tmp_path / environment / "bin").mkdir(parents=True)
        (tmp_path / environment / "bin" / "python").touch()
    assert "GGUF" in all_peers(tmp_path, half_gguf=None, **fields)[1]["OpenVINO"]
    assert all_peers(tmp_path, half_gguf=tmp_path / "half.gguf", pool="host:1", **fields)[1].keys() == needy


def test_the_page_says_ratios_equal_tokens_and_who_is_missing():
    peers = [FakePeer(BASELINE, 1.0), FakePeer("other", 2.0)]
    loads = (load(1), load(4))
    facts = (PeerFacts(BASELINE, "0.1", 2.0, 10**9), PeerFacts("other", "7", 30.0, 2 * 10**9))
    result = page_of(measure(peers, loads, repeats=3, on_run=lambda _: None), loads, facts)
    page = report_of(result).to_markdown()
    assert "| other | 7 | 30.0 s | 2.00 GB | 4 (0.50) | 16 (0.50) | 100% |" in page
    assert "takes 62.5 ms here" in page
    assert "takes 2.00 times as long" in page
    assert "third was not measured: it is not there." in page
    assert len(report_of(result).to_json()["samples"]) == 2 * 2 * 3
