from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fake_runner import FakeRunner, continuation
from outrider.drafter_service.engine import DraftEngine, DraftEngineConfig
from outrider.drafter_service.model_drafter import ModelDrafter, num_common, share_budget
from outrider.verifier_service.drafting import (
    DRAFT_PROB_SCALE,
    Commit,
    Draft,
    DraftSampling,
    Open,
    check_draft,
)

GREEDY = DraftSampling(temperature=0.0)


def engine_over(runner: FakeRunner, *, budget: int = 64) -> DraftEngine:
    drafter = ModelDrafter(runner, torch.Generator().manual_seed(0))
    config = DraftEngineConfig(max_num_batched_tokens=budget, max_draft_length=8)
    return DraftEngine(drafter, clock=lambda: 0.0, config=config)


def open_(engine: DraftEngine, tokens: Sequence[int], name: str = "r", sampling: DraftSampling = GREEDY) -> None:
    engine.handle("v", Open(request_id=name, sampling=sampling, token_ids=tuple(tokens)))


def ask(engine: DraftEngine, position: int, new: Sequence[int], *, length: int, name: str = "r", round_id: int = 1):
    message = Commit(request_id=name, round_id=round_id, position=position, token_ids=tuple(new), max_length=length)
    engine.handle("v", message)


def run(engine: DraftEngine, max_steps: int = 500) -> dict[str, Draft]:
    drafts: dict[str, Draft] = {}
    for _ in range(max_steps):
        if not engine.has_work():
            return drafts
        for _, message in engine.step():
            assert isinstance(message, Draft), message
            drafts[message.request_id] = message
        engine.check_integrity()
    raise AssertionError("drafts do not become complete")


def test_a_draft_is_the_models_greedy_continuation():
    runner = FakeRunner()
    engine = engine_over(runner)
    open_(engine, [1, 2, 3])
    ask(engine, 3, [], length=4)
    assert run(engine)["r"].token_ids == continuation([1, 2, 3], 4, runner.vocab_size)
    assert [batch.num_tokens for batch in runner.batches] == [3, 1, 1, 1], "the last drafted token is not computed"


def test_requests_of_two_verifiers_share_every_forward():
    runner = FakeRunner()
    engine = engine_over(runner)
    for peer in ("v1", "v2"):
        engine.handle(peer, Open(request_id="r", sampling=GREEDY, token_ids=(1, 2)))
        engine.handle(peer, Commit(request_id="r", round_id=1, position=2, token_ids=(), max_length=3))
    run(engine)
    assert [batch.query_lengths for batch in runner.batches] == [[2, 2], [1, 1], [1, 1]]


def test_catching_up_and_drafting_are_one_batch():
    runner = FakeRunner()
    engine = engine_over(runner, budget=8)
    open_(engine, [1], "drafting")
    ask(engine, 1, [], length=6, name="drafting")
    engine.step()
    long_prompt = list(range(20))
    open_(engine, long_prompt, "late")
    ask(engine, 20, [], length=1, name="late")
    drafts = run(engine)
    assert drafts["drafting"].token_ids == continuation([1], 6, runner.vocab_size)
    assert drafts["late"].token_ids == continuation(long_prompt, 1, runner.vocab_size)
    assert [batch.query_lengths for batch in runner.batches[1:4]] == [[1, 7], [1, 7], [1, 6]]


@pytest.mark.parametrize("num_accepted", [0, 1, 4, 5])
def test_accepted_tokens_keep_their_kv_and_rejected_ones_lose_it(num_accepted: int):
    runner = FakeRunner()
    engine = engine_over(runner)
    prompt = [5, 6, 7]
    open_(engine, prompt)
    ask(engine, 3, [], length=5)
    drafted = list(run(engine)["r"].token_ids)
    new = [*drafted[:num_accepted], (drafted[num_accepted] + 1) % 97 if num_accepted < 5 else 11]
    runner.batches.clear()
    ask(engine, 3, new, length=4, round_id=2)
    assert run(engine)["r"].token_ids == continuation(prompt + new, 4, runner.vocab_size)
    expected = 2 if num_accepted == 5 else 1  # the last drafted token was never computed
    assert runner.batches[0].num_tokens == expected


def test_asking_again_at_the_same_place_computes_the_last_token_again():
    runner = FakeRunner()
    engine = engine_over(runner)
    open_(engine, [5, 6, 7])
    for round_id in (1, 2):
        ask(engine, 3, [], length=3, round_id=round_id)
        assert run(engine)["r"].token_ids == continuation([5, 6, 7], 3, runner.vocab_size)
    ask(engine, 3, [], length=3, round_id=2)  # even under a round id used before
    assert run(engine)["r"].token_ids == continuation([5, 6, 7], 3, runner.vocab_size)


def test_a_superseded_round_half_drafted_leaves_no_trace():
    runner = FakeRunner()
    engine = engine_over(runner)
    open_(engine, [5, 6, 7])
    ask(engine, 3, [], length=8)
    engine.step()
    engine.step()
    ask(engine, 3, [1, 2], length=2, round_id=2)
    assert run(engine)["r"].token_ids == continuation([5, 6, 7, 1, 2], 2, runner.vocab_size)


def test_opening_again_with_another_prefix_keeps_only_what_is_common():
    runner = FakeRunner()
    engine = engine_over(runner)
    open_(engine, [1, 2, 3, 4, 5, 6])
    ask(engine, 6, [], length=2)
    run(engine)
    runner.batches.clear()
    open_(engine, [1, 2, 3, 9, 9])
    ask(engine, 5, [], length=2)
    assert run(engine)["r"].token_ids == continuation([1, 2, 3, 9, 9], 2, runner.vocab_size)
    assert runner.batches[0].num_tokens == 2


def test_drafts_may_reach_one_token_beyond_the_context():
    runner = FakeRunner(max_model_len=6)
    engine = engine_over(runner)
    open_(engine, [1, 2, 3, 4, 5])
    ask(engine, 5, [], length=8)
    assert run(engine)["r"].token_ids == continuation([1, 2, 3, 4, 5], 2, runner.vocab_size)


def test_kv_of_idle_sessions_is_taken_and_computed_again():
    runner = FakeRunner(num_blocks=4)  # 16 tokens
    engine = engine_over(runner)
    for round_id, name in enumerate(["a", "b", "a", "b"]):
        prompt = [ord(name)] * 9
        if round_id < 2:
            open_(engine, [token % 97 for token in prompt], name)
        ask(engine, 9, [], length=3, name=name, round_id=round_id)
        assert run(engine)[name].token_ids == continuation([token % 97 for token in prompt], 3, runner.vocab_size)


def test_asks_that_do_not_fit_together_are_drafted_one_after_the_other():
    runner = FakeRunner(num_blocks=5)  # 20 tokens
    engine = engine_over(runner)
    prompts = {name: [index] * 12 for index, name in enumerate("abc")}
    for name, prompt in prompts.items():
        open_(engine, prompt, name)
        ask(engine, 12, [], length=7, name=name)
    drafts = run(engine)
    assert {name: draft.token_ids for name, draft in drafts.items()} == {
        name: continuation(prompt, 7, runner.vocab_size) for name, prompt in prompts.items()
    }


def test_an_ask_that_never_fits_gets_an_empty_draft_and_holds_nothing():
    runner = FakeRunner(num_blocks=2)
    engine = engine_over(runner, budget=4)
    open_(engine, list(range(12)), "big")
    ask(engine, 12, [], length=2, name="big")
    open_(engine, [1, 2], "small")
    ask(engine, 2, [], length=2, name="small")
    drafts = run(engine)
    assert drafts["big"].token_ids == ()
    assert drafts["small"].token_ids == continuation([1, 2], 2, runner.vocab_size)


def test_sampled_drafts_have_their_full_length_and_honest_rows():
    runner = FakeRunner()
    engine = engine_over(runner)
    open_(engine, [1, 2, 3], sampling=DraftSampling(temperature=1.0))
    ask(engine, 3, [], length=5)
    draft = run(engine)["r"]
    assert len(draft.token_ids) == len(draft.draft_probs or ()) == 5
    assert check_draft(draft, draft_vocab_size=runner.vocab_size, max_length=5) is None
    assert all(sum(row.weights) == DRAFT_PROB_SCALE for row in draft.draft_probs)


@given(st.integers(0, 1 << 30), st.sampled_from([4, 6, 40]), st.sampled_from([3, 64]))
def test_rollbacks_of_many_sessions_draft_as_fresh_ones_would(seed: int, num_blocks: int, budget: int):
    """Commit random prefixes of drafts for several sessions, with too few blocks, in too small steps."""
    rng = random.Random(seed)
    runner = FakeRunner(num_blocks=num_blocks, block_size=4, max_model_len=16)
    engine = engine_over(runner, budget=budget)
    known = {name: [rng.randrange(97) for _ in range(rng.randint(1, 6))] for name in "abc"}
    for name, tokens in known.items():
        open_(engine, tokens, name)
    last = dict.fromkeys(known, ())
    for round_id in range(3):
        for name, tokens in known.items():
            new = [*last[name][: rng.randint(0, len(last[name]))], rng.randrange(97)][: 16 - len(tokens)]
            ask(engine, len(tokens), new, length=4, name=name, round_id=round_id)
            tokens.extend(new)
        for name, draft in run(engine).items():
            last[name] = draft.token_ids
            length = min(4, 17 - len(known[name]))
            assert draft.token_ids == continuation(known[name], length, runner.vocab_size)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 40))
def test_shares_use_the_whole_budget_and_never_starve_the_oldest(num_pending: list[int], budget: int):
    shares = share_budget(num_pending, budget)
    assert sum(shares) == min(budget, sum(num_pending))
    assert shares[0] >= 1
    assert all(share <= pending for share, pending in zip(shares, num_pending, strict=True))


def test_short_asks_go_before_long_ones():
    assert share_budget([50, 1, 30, 2], 16) == [4, 1, 9, 2]


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_num_common_equals_a_plain_count(left: list[int], right: list[int]):
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    assert num_common(left, right) == count
