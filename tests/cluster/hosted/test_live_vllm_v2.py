"""vLLM's V2 model runner itself, its Triton kernels interpreted on the CPU; the pool is played here.

Its tokens are compared with those of the transformers library. The interpreter takes 0.1 s and more a step.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fakes.hosted.vllm_environment import INTERPRETER, needs_vllm
from fakes.played_pool import Mood, PlayedPool
from outrider.drafter_service import embedded
from outrider.lab.peers.process import Peer, PeerError, PeerProcess
from outrider.verifier_service.messages.draft import FINAL_TAP
from support.waiting import wait_until

SCRIPT = Path(__file__).with_name("vllm_v2.py")
PREEMPTED, SEEDED_START = "a request was preempted", 0  # as the script has them
VOCAB_SIZE, PROMPT_LENGTH, MAX_TOKENS, NUM_PROMPTS = 2048, 24, 32, 6
STATE_TAPS = (1, 5, FINAL_TAP)

pytestmark = [
    pytest.mark.soak,  # minutes under the interpreter
    pytest.mark.timeout(900),
    needs_vllm,
]


def prompts() -> list[list[int]]:
    rng = random.Random(8)
    return [[rng.randrange(1, VOCAB_SIZE) for _ in range(PROMPT_LENGTH)] for _ in range(NUM_PROMPTS)]


def seeded_prompts() -> list[list[int]]:
    return [[SEEDED_START, *prompt[1:]] for prompt in prompts()[:2]]


def vllm_v2(log: Path, pool: str, **options: object) -> PeerProcess:
    plugin = {"pool": pool, "speculation": "always", "max_wait_ms": 1000, "state_taps": options.pop("state_taps", ())}
    common = {
        "model": str(embedded.target_path()),
        "max_model_len": 128,
        "num_speculative_tokens": 5,
        # too little room for all, in a step and in the cache: some wait, read prompts in parts, or resume
        "max_num_batched_tokens": 32,
        "block_size": 32,
        "num_blocks": 9,
        "tensor_parallel_size": 1,
        "plugin": plugin,
    }
    peer = Peer(
        name="vLLM V2",
        script=str(SCRIPT),
        interpreter=INTERPRETER,
        options={**common, **options},
    )
    return PeerProcess(peer, num_threads=1, log=log, clock=time.monotonic)


@pytest.fixture(scope="module")
def target() -> AutoModelForCausalLM:
    found = AutoModelForCausalLM.from_pretrained(embedded.target_path(), dtype=torch.float32).eval()
    found.generation_config.eos_token_id = None
    return found


@pytest.fixture(scope="module")
def plain(target) -> list[list[int]]:
    rows = torch.tensor(prompts())
    mask = torch.ones_like(rows)
    return target.generate(rows, attention_mask=mask, do_sample=False, max_new_tokens=MAX_TOKENS)[
        :, PROMPT_LENGTH:
    ].tolist()


def played_pool(plain: list[list[int]]) -> PlayedPool:
    pool = PlayedPool(VOCAB_SIZE)
    texts = [prompt + answer for prompt, answer in zip(prompts(), plain, strict=True)]
    pool.add("first", texts)
    pool.add("second", texts, state_taps=STATE_TAPS)
    return pool


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("drafting") / "log"


@pytest.fixture(scope="module")
def pool(plain) -> Iterator[PlayedPool]:
    played = played_pool(plain)
    yield played
    played.close()


@pytest.fixture(scope="module")
def drafting(pool, log) -> Iterator[PeerProcess]:
    with vllm_v2(log, pool.address, state_taps=STATE_TAPS, warm_up=True) as engine:
        assert not any(drafter.prompts for drafter in pool.drafters.values()), "vLLM's own requests are nobody's"
        engine.run(prompts()[:2], MAX_TOKENS)  # links come up
        yield engine


def counters(pool: PlayedPool):
    (verifier,) = pool.snapshot().verifiers
    return verifier.report.load.counters


def test_drafts_are_accepted_and_change_no_token_whoever_waits_or_is_preempted(drafting, pool, plain, log):
    assert drafting.run(prompts(), MAX_TOKENS).token_ids == plain
    time.sleep(0.5)
    found = counters(pool)
    assert found.num_accepted_tokens > NUM_PROMPTS * MAX_TOKENS / 2, found
    assert found.num_accepted_tokens == found.num_draft_tokens, "a drafter that knows it all is always right"
    assert all(drafter.num_drafts > 0 for drafter in pool.drafters.values())
    assert PREEMPTED in log.read_text()
    drafting.run(prompts()[:1], 4)  # the plug-in learns with a step which requests have left
    wait_until(lambda: sum(len(drafter.sessions) for drafter in pool.drafters.values()) <= 1)


@pytest.mark.parametrize("mood", [mood for mood in Mood if mood is not Mood.GOOD])
def test_drafters_that_misbehave_change_no_token(drafting, pool, plain, mood):
    before = counters(pool)
    for drafter in pool.drafters.values():
        drafter.mood = mood
    answer = drafting.run(prompts()[:2], MAX_TOKENS // 2)
    for drafter in pool.drafters.values():
        drafter.mood = Mood.GOOD
    assert answer.token_ids == [tokens[: MAX_TOKENS // 2] for tokens in plain[:2]]
    if mood is Mood.WRONG:
        time.sleep(0.5)
        after = counters(pool)
        assert after.num_draft_tokens - before.num_draft_tokens > MAX_TOKENS / 2
        assert after.num_accepted_tokens - before.num_accepted_tokens < MAX_TOKENS / 4


def test_a_seeded_request_draws_what_it_draws_without_drafts_whoever_is_drafted_beside_it(drafting, pool, plain):
    alone = drafting.run(seeded_prompts(), MAX_TOKENS // 2).token_ids
    before = counters(pool).num_accepted_tokens
    beside = drafting.run([*prompts()[:2], *seeded_prompts()], MAX_TOKENS // 2).token_ids
    time.sleep(0.5)
    assert counters(pool).num_accepted_tokens > before
    assert beside == [*(tokens[: MAX_TOKENS // 2] for tokens in plain[:2]), *alone]


def test_a_drafter_that_reads_states_gets_the_targets_and_each_of_them_once(drafting, pool, target):
    reader = pool.drafters["second"]
    drafting.run(prompts(), MAX_TOKENS)
    texts = {tuple(text[:PROMPT_LENGTH]): text for text in reader.texts}
    num_read = 0
    for request_id, messages in reader.states.items():
        text = texts.get(tuple(reader.prompts[request_id][:PROMPT_LENGTH]))
        if text is None:
            continue
        rows = torch.cat([torch.frombuffer(bytearray(one.data), dtype=torch.float32) for one in messages])
        rows = rows.view(-1, messages[0].width)
        with torch.no_grad():
            states = target(torch.tensor([text]), output_hidden_states=True).hidden_states
        expected = torch.cat([states[tap][0] for tap in STATE_TAPS], dim=-1)
        stops = [one.position + len(one.data) // (4 * one.width) for one in messages]
        assert [one.position for one in messages] == [0, *stops[:-1]], request_id
        torch.testing.assert_close(rows, expected[: len(rows)], atol=1e-3, rtol=1e-3)
        num_read += 1
    assert num_read >= NUM_PROMPTS / 2


def test_of_two_ranks_one_asks_and_both_verify_the_same(plain, tmp_path):
    played = played_pool(plain)
    with vllm_v2(tmp_path / "log", played.address, tensor_parallel_size=2) as engine:
        engine.run(prompts()[:1], MAX_TOKENS)
        answer = engine.run(prompts()[:3], MAX_TOKENS)
        time.sleep(0.5)
        found = counters(played)
    played.close()
    assert answer.token_ids == plain[:3]
    assert found.num_accepted_tokens == found.num_draft_tokens > MAX_TOKENS, found


def test_a_pool_that_is_not_named_is_asked_for_when_vllm_starts(tmp_path):
    log = tmp_path / "log"
    with pytest.raises(PeerError), vllm_v2(log, "", plugin={"pol": "h:1"}):
        pass
    assert "--additional-config: outrider: " in log.read_text()
