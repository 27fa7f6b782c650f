"""vLLM itself, in an environment of its own, with drafts from a pool that is played here; fp32, eager, on the CPU.

Its tokens are compared with those of the transformers library: an engine takes most of a minute to start.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM

from fakes.hosted.vllm_environment import INTERPRETER, needs_vllm
from fakes.played_pool import KnowingDrafter, Mood, PlayedPool
from outrider.drafter_service import embedded
from outrider.lab.peers.process import Peer, PeerProcess
from outrider.verifier_service.messages.draft import FINAL_TAP
from support.waiting import wait_until

VOCAB_SIZE, PROMPT_LENGTH, MAX_TOKENS, NUM_PROMPTS = 2048, 24, 48, 8
MAX_MODEL_LEN = 256
STATE_TAPS = (1, 5, FINAL_TAP)

pytestmark = [
    pytest.mark.timeout(600),
    needs_vllm,
]


def prompts() -> list[list[int]]:
    rng = random.Random(8)
    return [[rng.randrange(1, VOCAB_SIZE) for _ in range(PROMPT_LENGTH)] for _ in range(NUM_PROMPTS)]


def vllm(log: Path, pool: str | None = None, **options: object) -> PeerProcess:
    common = {
        "model": str(embedded.target_path()),
        "dtype": "float32",
        "max_num_seqs": 16,
        "max_model_len": MAX_MODEL_LEN,
        "enforce_eager": True,
        "num_speculative_tokens": 6,
        "lookup": False,
        "pool": pool,
    }
    peer = Peer(name="vLLM", script="vllm_worker.py", interpreter=INTERPRETER, options={**common, **options})
    return PeerProcess(peer, num_threads=1, log=log, clock=time.monotonic)


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    """What the target makes of the prompts by itself; no two tokens are so near that another kernel may turn them."""
    target = AutoModelForCausalLM.from_pretrained(embedded.target_path(), dtype=torch.float32).eval()
    target.generation_config.eos_token_id = None
    rows = torch.tensor(prompts())
    found = target.generate(
        rows,
        attention_mask=torch.ones_like(rows),
        do_sample=False,
        max_new_tokens=MAX_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(found.logits).topk(2).values
    assert (best[..., 0] - best[..., 1]).min() > 5e-3
    return found.sequences[:, PROMPT_LENGTH:].tolist()


@pytest.fixture(scope="module")
def pool() -> Iterator[PlayedPool]:
    played = PlayedPool(VOCAB_SIZE)
    yield played
    played.close()


@pytest.fixture(scope="module")
def drafting(pool, plain, tmp_path_factory) -> Iterator[PeerProcess]:
    """A vLLM that drafts from the pool."""
    texts = [prompt + answer for prompt, answer in zip(prompts(), plain, strict=True)]
    pool.add("first", texts)
    pool.add("second", texts, state_taps=STATE_TAPS)
    plugin = {"state_taps": STATE_TAPS}
    with vllm(tmp_path_factory.mktemp("drafting") / "log", pool=pool.address, plugin=plugin) as engine:
        yield engine


def counters(pool: PlayedPool):
    (verifier,) = pool.snapshot().verifiers
    return verifier.report.load.counters


def is_planned(pool: PlayedPool, name: str) -> bool:
    """Tell whether the plug-in has a link to a drafter, and new requests are given to it."""
    (verifier,) = pool.snapshot().verifiers
    return name in verifier.report.linked_drafters and verifier.default_plan.drafter_id == name


def drafters(pool: PlayedPool) -> list[KnowingDrafter]:
    return list(pool.drafters.values())


def test_drafts_from_the_pool_are_accepted_and_change_no_token(drafting, pool, plain):
    drafting.run(prompts()[:1], MAX_TOKENS)  # what steps take is seen, and links come up
    time.sleep(1.0)
    answer = drafting.run(prompts(), MAX_TOKENS)
    assert answer.token_ids == plain
    time.sleep(0.5)
    found = counters(pool)
    assert found.num_accepted_tokens > MAX_TOKENS, found
    assert found.num_accepted_tokens == found.num_draft_tokens, "a drafter that knows it all is always right"
    assert all(drafter.num_drafts > 0 for drafter in drafters(pool)), "sessions spread over the drafters"
    drafting.run(prompts()[:1], MAX_TOKENS)  # the plug-in learns with a step which requests have left
    wait_until(lambda: sum(len(drafter.sessions) for drafter in drafters(pool)) <= 1)


def test_a_drafter_that_reads_states_gets_the_targets_and_each_of_them_once(drafting, pool):
    """The prompts come again: of the second time's, vLLM's prefix cache has most."""
    reader = pool.drafters["second"]
    for _ in range(2):
        drafting.run(prompts(), MAX_TOKENS)
    target = AutoModelForCausalLM.from_pretrained(embedded.target_path(), dtype=torch.float32).eval()
    texts = {tuple(text[:PROMPT_LENGTH]): text for text in reader.texts}
    assert len(reader.states) >= NUM_PROMPTS / 2
    for request_id, messages in reader.states.items():
        rows = torch.cat([torch.frombuffer(bytearray(one.data), dtype=torch.float32) for one in messages])
        rows = rows.view(-1, messages[0].width)
        stops = [one.position + len(one.data) // (4 * one.width) for one in messages]
        assert [one.position for one in messages] == [0, *stops[:-1]], request_id
        text = texts[tuple(reader.prompts[request_id][:PROMPT_LENGTH])]
        with torch.no_grad():
            states = target(torch.tensor([text[: len(rows)]]), output_hidden_states=True).hidden_states
        expected = torch.cat([states[tap][0] for tap in STATE_TAPS], dim=-1)
        torch.testing.assert_close(rows, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("mood", [mood for mood in Mood if mood is not Mood.GOOD])
def test_drafters_that_misbehave_change_no_token(drafting, pool, plain, mood):
    for drafter in drafters(pool):
        drafter.mood = mood
    answer = drafting.run(prompts()[:4], MAX_TOKENS)
    for drafter in drafters(pool):
        drafter.mood = Mood.GOOD
    assert answer.token_ids == plain[:4]


def test_a_request_that_fills_its_context_ends_there_and_ends_nobody_else(drafting, plain):
    """vLLM passes proposers over while one request is nearly as long as it may be: its CPU build ends of that."""
    answer = drafting.run(prompts()[:2], MAX_MODEL_LEN - PROMPT_LENGTH)
    assert [len(tokens) for tokens in answer.token_ids] == [MAX_MODEL_LEN - PROMPT_LENGTH] * 2
    assert [tokens[:MAX_TOKENS] for tokens in answer.token_ids] == plain[:2]
    assert drafting.run(prompts()[:1], MAX_TOKENS).token_ids == plain[:1]


def test_drafters_that_end_in_mid_stream_change_no_token(drafting, pool, plain):
    def end_one_after_another() -> None:
        for name in list(pool.drafters):
            time.sleep(0.1)
            pool.kill(name)

    ending = threading.Thread(target=end_one_after_another)
    ending.start()
    answer = drafting.run(prompts(), MAX_TOKENS)
    ending.join()
    assert answer.token_ids == plain
    before = counters(pool).num_accepted_tokens
    texts = [prompt + text for prompt, text in zip(prompts(), plain, strict=True)]
    newcomer = pool.add("third", texts)
    wait_until(lambda: is_planned(pool, "third"), timeout_s=60.0)
    assert drafting.run(prompts(), MAX_TOKENS).token_ids == plain
    time.sleep(0.5)
    assert newcomer.num_drafts > 0, "a drafter that joins is used"
    assert counters(pool).num_accepted_tokens > before


@pytest.mark.soak  # an engine of two ranks takes half a minute to start
def test_of_two_ranks_one_asks_and_both_verify_the_same(plain, tmp_path):
    played = PlayedPool(VOCAB_SIZE)
    played.add("first", [prompt + text for prompt, text in zip(prompts(), plain, strict=True)])
    with vllm(tmp_path / "log", pool=played.address, tensor_parallel_size=2) as engine:
        engine.run(prompts()[:1], MAX_TOKENS)
        time.sleep(1.0)
        answer = engine.run(prompts(), MAX_TOKENS)
        time.sleep(0.5)
        found = counters(played)
    played.close()
    assert answer.token_ids == plain
    assert found.num_accepted_tokens > MAX_TOKENS, found


@pytest.mark.soak
@pytest.mark.timeout(1900)
@pytest.mark.parametrize(("arguments", "min_drafts"), [([], 1000), (["v2"], 200)], ids=["V1", "V2"])
def test_sampled_tokens_keep_the_targets_distribution_and_a_planted_defect_shows(arguments, min_drafts):
    script, tests = Path(__file__).with_name("vllm_law.py"), Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(tests), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [INTERPRETER, script, *arguments], env=environment, capture_output=True, text=True, timeout=1800
    )
    assert found.returncode == 0, found.stderr[-3000:]
    law = json.loads(found.stdout)
    assert law["num_drafts"] > min_drafts
    assert min(chi_square(counts) for counts in law["honest"]) > 1e-4, law
    assert min(chi_square(counts) for counts in law["planted"]) < 1e-6, law


def chi_square(counts: tuple[list[int], list[float]]) -> float:
    observed, expected = counts
    return float(chisquare(observed, expected, sum_check=False).pvalue)
