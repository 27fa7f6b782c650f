"""Drafting for an engine that verifies by itself, against drafters in memory and in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fakes.hosted.engine import MAX_MODEL_LEN, NEVER, VOCAB_SIZE, HostedEngine, continued, messages_of, num_drafted
from outrider.cluster.hosted.drafting import MIN_WAIT_S, HostedConfig
from outrider.cluster.router.fleet import Directive
from outrider.verifier_service.messages.draft import Close, Commit, Draft, Open, Resync
from outrider.verifier_service.messages.engine import EngineLoad
from outrider.verifier_service.messages.request import DisabledReason, SpeculationPlan

PROMPT = (3, 1, 4)


@pytest.fixture
def engine() -> HostedEngine:
    """An engine with one drafter that answers at once and is right."""
    engine = HostedEngine()
    engine.pool.come_up("d")
    return engine


def drafting_engine(step_s: float = 0.02) -> HostedEngine:
    """An engine whose request "a" has a draft to be verified next."""
    engine = HostedEngine()
    engine.step_s = lambda num_tokens: step_s
    engine.pool.come_up("d")
    engine.add()
    engine.steps(4)
    assert len(engine.running["a"].draft) == engine.config.num_speculative_tokens
    engine.pool.take()
    return engine


def loaded(engine: HostedEngine) -> EngineLoad:
    load = engine.drafting.refresh_load(lambda: engine.running)
    assert load is not None
    return load


# Drafts, and when they come.


def test_what_is_proposed_is_what_the_drafter_said_after_all_that_was_committed(engine: HostedEngine):
    engine.add()
    engine.steps(3)
    draft = engine.step()["a"]
    assert draft == continued(engine.running["a"].token_ids, 4)
    before = len(engine.running["a"].token_ids)
    engine.step()
    assert len(engine.running["a"].token_ids) == before + 5


def test_a_session_opens_in_the_background_and_nothing_waits_for_it(engine: HostedEngine):
    engine.pool.opening_s = 0.5
    engine.add()
    assert not num_drafted(engine.steps(20))
    assert set(engine.waited_s) == {0.0}
    opening, *commits = engine.pool.take()
    assert isinstance(opening, Open)
    assert opening.token_ids == (*PROMPT, *continued(PROMPT, 1))
    assert len(commits) == 1, "a drafter that reads a prompt is asked once"


def test_a_prompt_that_was_read_meanwhile_leads_to_drafts_without_being_told_again(engine: HostedEngine):
    engine.pool.opening_s = 0.3
    engine.add()
    engine.steps(30)
    assert len(engine.running["a"].draft) == 4
    assert len(messages_of(engine.pool.take(), Open)) == 1


def test_a_prompt_that_is_never_read_costs_no_step_any_time_and_the_drafter_is_asked_again():
    engine = HostedEngine(opening_s=0.2)
    engine.pool.come_up("d")
    engine.pool.opening_s = NEVER
    engine.add()
    assert not num_drafted(engine.steps(40))
    assert set(engine.waited_s) == {0.0}
    assert 3 <= len(messages_of(engine.pool.take(), Commit)) <= 6
    assert loaded(engine).counters.fallbacks["timeout"] >= 2


def test_a_late_draft_is_an_empty_one_and_its_step_waits_to_the_deadline_alone():
    engine = drafting_engine()
    engine.pool.answer_s = 0.08  # earlier rounds took 2 ms
    assert engine.step()["a"] == []
    assert engine.waited_s[-1] == pytest.approx(MIN_WAIT_S)
    engine.clock.now_s += 1.0
    assert len(engine.step()["a"]) == 0 or engine.waited_s[-1] <= 0.1
    load = loaded(engine)
    assert load.counters.num_stale_drafts == 1
    assert load.counters.fallbacks == {"timeout": 1}


def test_a_drafter_that_has_become_slower_is_waited_for_again_once_that_is_known():
    engine = drafting_engine(step_s=0.3)
    engine.pool.answer_s = 0.06
    drafted = [num_drafted([engine.step()]) for _ in range(20)]
    assert not drafted[0]
    assert drafted[-1] == 4


def test_a_drafter_that_is_silent_costs_a_few_deadlines_and_then_nothing():
    engine = drafting_engine()
    engine.pool.answer_s = NEVER
    assert not num_drafted(engine.steps(40))
    assert sum(wait_s > 0.0 for wait_s in engine.waited_s[-40:]) <= 8, "its circuit opens"
    assert sum(engine.waited_s[-40:]) < 0.8
    assert engine.drafting.num_undrafted[DisabledReason.DRAFTER_TIMEOUT] > 20


def test_a_drafter_that_was_silent_drafts_again():
    engine = drafting_engine()
    engine.pool.answer_s = NEVER
    engine.steps(10)
    engine.pool.answer_s = 0.002
    engine.clock.now_s += 3.0
    assert num_drafted(engine.steps(40)) > 0


@pytest.mark.parametrize(
    "spoil",
    [
        lambda draft: b"garbage",
        lambda draft: replace(draft, token_ids=(*draft.token_ids, 1, 2, 3, 4, 5)),
        lambda draft: replace(draft, token_ids=(-1,)),
        lambda draft: replace(draft, token_ids=(VOCAB_SIZE,)),
        lambda draft: replace(draft, position=draft.position - 1),
        lambda draft: replace(draft, round_id=draft.round_id - 1),
        lambda draft: replace(draft, request_id="other"),
        lambda draft: replace(draft, parents=(-1,) * len(draft.token_ids)),
        lambda draft: replace(draft, token_ids=()),
        lambda draft: Resync(request_id="other"),
    ],
)
def test_a_malformed_or_stale_draft_is_an_empty_one(spoil: Callable[[Draft], Draft | bytes]):
    engine = drafting_engine()
    engine.pool.spoil = spoil
    assert not num_drafted(engine.steps(3))


def test_tokens_beyond_the_engines_own_vocabulary_are_never_handed_to_it():
    """A drafter's vocabulary may be padded; the engine's embedding has no row for these."""
    engine = HostedEngine()
    engine.pool.come_up("d", vocab_size=VOCAB_SIZE + 31)
    engine.add()
    engine.steps(3)
    engine.pool.spoil = lambda draft: replace(draft, token_ids=(*draft.token_ids[:2], VOCAB_SIZE + 3, 1))
    draft = engine.step()["a"]
    assert draft == continued(engine.running["a"].token_ids, 2)
    engine.pool.spoil = lambda draft: replace(draft, token_ids=(VOCAB_SIZE,) * len(draft.token_ids))
    assert engine.step()["a"] == []


def test_without_any_drafter_nothing_waits_and_the_reason_is_told():
    engine = HostedEngine()
    engine.add()
    engine.steps(5)
    assert set(engine.waited_s) == {0.0}
    assert engine.drafting.num_undrafted == {DisabledReason.DRAFTER_UNAVAILABLE: 5}


def test_a_drafter_that_goes_away_ends_the_wait_and_another_takes_over():
    engine = drafting_engine()
    engine.pool.come_up("e")
    engine.pool.answer_s = NEVER
    engine.step()
    engine.pool.answer_s = 0.002
    engine.pool.go_away("d")
    assert engine.step()["a"] == []
    assert engine.waited_s[-1] == 0.0
    engine.steps(20)
    assert len(engine.running["a"].draft) == 4
    assert {drafter_id for drafter_id, _ in engine.pool.sessions} == {"e"}


def test_a_drafter_that_lost_a_session_is_told_the_whole_prefix_again_within_the_deadline():
    engine = drafting_engine()
    engine.pool.forget("a")
    assert len(engine.step()["a"]) == 4, "there was time for it"
    reopened = messages_of(engine.pool.take(), Open)
    assert [message.token_ids for message in reopened] == [tuple(engine.running["a"].token_ids)]


def test_all_drafts_of_a_step_are_waited_for_together():
    engine = HostedEngine()
    engine.pool.come_up("d")
    for index in range(5):
        engine.add(f"r{index}", (index, 2, 3))
    engine.steps(4)
    assert all(len(sequence.draft) == 4 for sequence in engine.running.values())
    assert engine.waited_s[-1] == pytest.approx(0.002)


# What an engine does besides.


def test_tokens_committed_without_a_call_are_caught_up():
    engine = drafting_engine()
    engine.steps(3, proposes=False)
    draft = engine.step()["a"]
    assert draft == continued(engine.running["a"].token_ids, 4)
    (commit,) = messages_of(engine.pool.take(), Commit)
    assert commit.position + len(commit.token_ids) == len(engine.running["a"].token_ids)


def test_a_draft_that_was_verified_without_a_call_is_not_taken_for_a_later_one():
    engine = drafting_engine()
    before = loaded(engine).counters
    engine.step(proposes=False)
    engine.running["a"].draft = [0, 0, 0, 0]  # an engine's own placeholder
    engine.step()
    after = loaded(engine).counters
    assert after.num_draft_tokens == before.num_draft_tokens


def test_a_step_after_one_without_a_call_is_not_taken_for_a_slow_one():
    engine = drafting_engine()
    before = loaded(engine).counters.step_s
    engine.steps(10, proposes=False)
    engine.step()
    after = loaded(engine).counters.step_s
    assert after.total - before.total < 0.05


def test_an_idle_engine_is_not_taken_for_a_slow_one():
    engine = drafting_engine()
    engine.drop("a")
    before = loaded(engine).counters.step_s
    engine.clock.now_s += 60.0
    engine.add("b")
    engine.step()
    assert loaded(engine).counters.step_s.total - before.total < 0.05


def test_an_id_that_is_used_again_is_another_request(engine: HostedEngine):
    engine.add(prompt=(9, 8, 7, 6))
    engine.steps(5)
    engine.drop("a", is_told=False)
    engine.pool.take()
    engine.add(prompt=PROMPT)
    engine.steps(3)
    closed, opened, *_ = engine.pool.take()
    assert isinstance(closed, Close)
    assert isinstance(opened, Open)
    assert opened.token_ids[:3] == PROMPT
    assert engine.num_described == 2
    engine.steps(20)
    assert len(engine.running["a"].draft) == 4


def test_a_request_is_described_once(engine: HostedEngine):
    engine.add()
    engine.steps(10)
    assert engine.num_described == 1


def test_a_prompt_that_is_read_in_chunks_is_not_drafted_for(engine: HostedEngine):
    engine.chunk = 4
    engine.add(prompt=range(11))
    engine.steps(2)
    assert engine.pool.take() == []
    engine.steps(3)
    assert len(engine.running["a"].draft) == 4


def test_a_preempted_request_reads_its_tokens_again_and_goes_on_in_its_session():
    engine = drafting_engine()
    engine.preempt("a")
    engine.chunk = 3
    num_tokens = len(engine.running["a"].token_ids)
    assert engine.step()["a"] == []
    assert len(engine.running["a"].token_ids) == num_tokens
    assert engine.pool.take() == []
    engine.steps(8)
    assert len(engine.running["a"].draft) > 0
    assert messages_of(engine.pool.take(), Open) == []


def test_a_request_that_sits_a_step_out_keeps_its_draft(engine: HostedEngine):
    engine.add()
    engine.add("b", (5, 5))
    engine.steps(4)
    before = loaded(engine).counters.num_accepted_tokens
    engine.step({"b"})
    engine.step({"a"})
    assert loaded(engine).counters.num_accepted_tokens == before + 8


def test_finished_requests_are_closed_and_forgotten():
    engine = drafting_engine()
    engine.drop("a")
    engine.add("b")
    engine.step()
    assert messages_of(engine.pool.take(), Close) == [Close(request_id="a")]
    assert engine.drafting.coordinator.request_ids == {"b"}
    assert engine.drafting.pricing.request_ids <= {"b"}


def test_requests_that_vanish_without_a_step_are_closed_by_the_next_report():
    engine = drafting_engine()
    engine.drop("a", is_told=False)
    assert loaded(engine).num_running == 0
    assert engine.pool.take() == [Close(request_id="a")]
    assert engine.drafting.coordinator.request_ids == set()
    assert engine.drafting.pricing.request_ids == set()


def test_there_is_no_report_in_the_middle_of_a_call(engine: HostedEngine):
    engine.add()
    engine.steps(3)
    reports: list[EngineLoad | None] = []
    engine.pool.spoil = lambda draft: (reports.append(engine.drafting.refresh_load(lambda: engine.running)), draft)[1]
    engine.step()
    assert reports == [None]
    assert loaded(engine).num_running == 1


def test_fewer_verified_tokens_than_were_handed_out_are_what_counts():
    engine = drafting_engine()
    before = loaded(engine).counters
    engine.step(num_verified=2)
    after = loaded(engine).counters
    assert after.num_draft_tokens - before.num_draft_tokens == 2
    assert after.num_accepted_tokens - before.num_accepted_tokens == 2
    engine.step(num_verified=0)
    assert loaded(engine).counters.num_draft_tokens == after.num_draft_tokens


def test_what_was_verified_and_accepted_is_counted():
    engine = drafting_engine()
    engine.pool.is_right = lambda position: position % 2 == 0
    engine.step()
    before = loaded(engine).counters
    engine.step()
    after = loaded(engine).counters
    assert after.num_drafts - before.num_drafts == 1
    assert after.num_draft_tokens - before.num_draft_tokens == 4
    assert after.num_accepted_tokens - before.num_accepted_tokens in (0, 1)
    assert after.num_committed_tokens - before.num_committed_tokens in (1, 2)


# What a request says of its drafts.


def test_a_request_that_wants_no_drafts_gets_none(engine: HostedEngine):
    engine.add(num_speculative_tokens=0)
    assert not num_drafted(engine.steps(6))
    assert engine.pool.take() == []
    assert engine.drafting.num_undrafted == {DisabledReason.REQUEST_OPT_OUT: 6}


@pytest.mark.parametrize(("cap", "length"), [(2, 2), (99, 4)])
def test_a_cap_bounds_drafts(engine: HostedEngine, cap: int, length: int):
    engine.add(num_speculative_tokens=cap)
    engine.steps(4)
    assert len(engine.running["a"].draft) == length


def test_drafts_end_where_the_output_does(engine: HostedEngine):
    engine.add(max_tokens=12)
    engine.steps(12)
    assert engine.outputs["a"] == [*PROMPT, *continued(PROMPT, 12)]
    assert loaded(engine).counters.num_accepted_tokens == loaded(engine).counters.num_draft_tokens


def test_drafts_end_where_the_context_does(engine: HostedEngine):
    prompt = [5] * (MAX_MODEL_LEN - 10)
    engine.add(prompt=prompt)
    engine.steps(12)
    assert engine.outputs["a"] == [*prompt, *continued(prompt, 10)]


@pytest.mark.parametrize("is_right", [False, True])
def test_nothing_is_drafted_after_a_stop_token_even_within_a_draft(engine: HostedEngine, is_right: bool):
    engine.pool.is_right = lambda position: is_right
    stop = continued(PROMPT, 6)[-1]
    engine.add(stop_token_ids=frozenset({stop}))
    steps = engine.steps(6)
    assert "a" in engine.outputs
    assert [step for step in steps if step][-1] == {"a": []}
    assert all(stop not in commit.token_ids for commit in messages_of(engine.pool.take(), Commit))


# What the router says.


def directive(draft_length: int, drafter_id: str | None = "d", **plans: SpeculationPlan) -> Directive:
    plan = SpeculationPlan(drafter_id=drafter_id, draft_length=draft_length)
    return Directive(plans=plans, default_plan=plan, drafters=())


def test_the_routers_default_plan_is_for_requests_that_come(engine: HostedEngine):
    engine.add()
    engine.step()
    engine.drafting.follow(directive(2))
    engine.add("b", (7, 7))
    engine.steps(4)
    assert {request_id: len(one.draft) for request_id, one in engine.running.items()} == {"a": 4, "b": 2}


def test_the_routers_plans_reach_running_requests_and_switch_them_off_and_on():
    engine = drafting_engine()
    off = SpeculationPlan(disabled_reason=DisabledReason.LOAD)
    engine.drafting.follow(directive(4, a=off, gone=off))
    assert engine.step()["a"] == []
    assert engine.pool.take() == [Close(request_id="a")]
    assert engine.drafting.num_undrafted[DisabledReason.LOAD] == 1
    engine.drafting.follow(directive(4, a=SpeculationPlan(drafter_id="d", draft_length=3)))
    engine.steps(20)
    assert len(engine.running["a"].draft) == 3


def test_a_plan_moves_a_request_to_another_drafter():
    engine = drafting_engine()
    engine.pool.come_up("e")
    engine.drafting.follow(directive(4, a=SpeculationPlan(drafter_id="e", draft_length=4)))
    engine.steps(3)
    assert set(engine.pool.sessions) == {("e", "a")}
    assert len(engine.running["a"].draft) == 4


def test_no_plan_makes_drafts_longer_than_the_engine_has_room_for(engine: HostedEngine):
    """The pool's longest draft is an option of the pool."""
    engine.drafting.follow(directive(16, a=SpeculationPlan(drafter_id="d", draft_length=16)))
    engine.add()
    engine.steps(6)
    assert len(engine.running["a"].draft) == 4


# The configuration.


@pytest.mark.parametrize(
    ("field", "value"),
    [("vocab_size", 0), ("max_model_len", 0), ("num_speculative_tokens", 0), ("max_wait_s", 0.0), ("opening_s", -1.0)],
)
def test_a_bad_figure_is_named(field: str, value: float):
    values = {"vocab_size": 9, "max_model_len": 9, "num_speculative_tokens": 2}
    with pytest.raises(ValueError, match=field):
        HostedConfig(**{**values, field: value})


@pytest.mark.parametrize(
    ("learn", "store", "may_learn"),
    [
        (False, None, False),
        (False, True, False),
        (True, None, False),  # it may be salted: vLLM does not say
        (True, True, True),
        (True, False, False),
        ("all", None, True),
        ("all", True, True),
        ("all", False, False),
    ],
)
def test_a_pool_learns_where_operator_and_client_allow_it(learn: Any, store: bool | None, may_learn: bool):
    engine = HostedEngine(learn=learn)
    engine.pool.come_up("d")
    engine.add(store=store)
    engine.steps(3)
    (opening,) = messages_of(engine.pool.take(), Open)
    assert opening.may_learn is may_learn
    assert (opening.history is not None) is (store is False), "what must not be kept is not remembered either"


def test_the_border_of_a_salt_is_told_to_drafters():
    engine = HostedEngine()
    engine.pool.come_up("d")
    engine.add(cache_salt="s")
    engine.steps(3)
    (opening,) = messages_of(engine.pool.take(), Open)
    assert opening.cache_salt == "s"
