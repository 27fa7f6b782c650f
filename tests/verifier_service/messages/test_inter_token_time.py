from __future__ import annotations

from dataclasses import replace

import pytest

from fakes.engine_bench import EngineBench, greedy_tokens, make_request
from outrider.verifier_service.messages.inter_token_time import RECENT_TOKENS, InterTokenTime


def test_tokens_that_come_together_share_the_time_since_those_before():
    time = InterTokenTime(30.0)
    time.observe(11, 100.0)
    assert time.recent_ms is None
    time.observe(14, 100.06)
    assert time.recent_ms == pytest.approx(20.0)


def test_a_step_that_commits_nothing_only_lets_time_pass():
    time = InterTokenTime(30.0)
    for num_tokens, now_s in ((11, 1.0), (12, 1.02), (12, 1.05), (13, 1.06)):
        time.observe(num_tokens, now_s)
    assert 20.0 < time.recent_ms < 40.0
    known, last, kept = 20.0, 40.0, 1.0 - 1.0 / RECENT_TOKENS
    assert time.recent_ms == pytest.approx(last + kept * (known - last))


@pytest.mark.parametrize("num_together", [1, 4])
def test_what_is_recent_is_counted_in_tokens_not_in_steps(num_together: int):
    time = InterTokenTime(30.0)
    time.observe(11, 0.0)
    time.observe(31, 2.0)  # 100 ms a token
    now_s = 2.0
    for num_tokens in range(31 + num_together, 31 + RECENT_TOKENS + 1, num_together):
        now_s += 0.010 * num_together
        time.observe(num_tokens, now_s)
    assert time.recent_ms == pytest.approx(10.0 + 90.0 * (1.0 - 1.0 / RECENT_TOKENS) ** RECENT_TOKENS)


@pytest.mark.parametrize(("num_accepted", "expected_ms"), [(0, 100.0), (3, 25.0)])
def test_drafts_that_are_accepted_make_it_shorter(num_accepted: int, expected_ms: float):
    bench = EngineBench()
    request = make_request("a", draft_length=num_accepted, drafter_id="d")
    bench.engine.add(replace(request, target_inter_token_ms=30.0))
    bench.step()
    if num_accepted:
        bench.drafts.answer(greedy_tokens(1 + num_accepted)[1:])
    bench.now_s += 0.1
    assert len(bench.step_one().token_ids) == 1 + num_accepted
    assert bench.engine.requests["a"].inter_token_time.recent_ms == pytest.approx(expected_ms)


def test_a_prompt_in_chunks_is_no_time_between_tokens():
    bench = EngineBench(max_num_batched_tokens=8)
    bench.engine.add(replace(make_request("a", prompt=range(20)), target_inter_token_ms=30.0))
    outputs = []
    for _ in range(4):  # three chunks, the last of which brings the first token
        outputs.append(bench.step())
        bench.now_s += 0.1
    assert [len(output) for output in outputs] == [0, 0, 1, 1]
    bench.now_s += 0.2
    bench.step()
    first_ms, last_ms = 100.0, 300.0
    recent_ms = bench.engine.requests["a"].inter_token_time.recent_ms
    assert recent_ms == pytest.approx(first_ms + (last_ms - first_ms) / RECENT_TOKENS)


@pytest.mark.parametrize("target_ms", [0.0, -1.0, 60_001.0, float("inf"), float("nan")])
def test_a_target_out_of_range_is_refused_by_name(target_ms: float):
    with pytest.raises(ValueError, match=r"^target_inter_token_ms must be in"):
        replace(make_request(), target_inter_token_ms=target_ms)
