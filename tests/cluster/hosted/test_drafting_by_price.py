"""Drafting for another engine by the step times that are seen, and whatever order things happen in."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from fakes.hosted.engine import NEVER, HostedEngine, free_steps, num_drafted
from outrider.cluster.hosted.seen_steps import MIN_SAMPLES
from outrider.cluster.router.fleet import Directive
from outrider.verifier_service.messages.draft import Draft
from outrider.verifier_service.messages.request import DisabledReason, SpeculationPlan


def compute_bound(num_tokens: int) -> float:
    """Eight tokens are free, each after that costs as much as it is."""
    return 0.02 * max(1.0, num_tokens / 8)


def dear(num_tokens: int) -> float:
    return 0.01 * num_tokens


def half_right(position: int) -> bool:
    return position % 2 == 0


def priced_engine(step_s: Callable[[int], float], num_requests: int = 1) -> HostedEngine:
    """An engine in the middle of some long outputs that has seen enough steps to price them."""
    engine = HostedEngine()
    engine.step_s = step_s
    engine.pool.is_right = half_right
    engine.pool.come_up("d")
    for index in range(num_requests):
        engine.add(f"r{index}", (index, 1, 2))
    engine.steps(40)
    assert engine.drafting.step_times, "too few steps were seen"
    return engine


def test_tokens_that_cost_nothing_are_drafted():
    engine = priced_engine(free_steps)
    assert num_drafted(engine.steps(20)) >= 40


def test_tokens_that_cost_what_they_bring_are_not_drafted_and_the_reason_is_the_load():
    engine = priced_engine(dear)
    before = engine.drafting.num_undrafted[DisabledReason.LOAD]
    assert num_drafted(engine.steps(40)) <= 8, "a probe now and then at most"
    assert engine.drafting.num_undrafted[DisabledReason.LOAD] - before > 30


def test_drafts_that_are_never_right_are_not_drafted_for_long_even_where_they_are_free():
    engine = HostedEngine()
    engine.pool.answer_s = 0.015
    engine.pool.is_right = lambda position: False
    engine.pool.come_up("d")
    engine.add(prompt=(1, 2, 3, 4, 5, 6))
    engine.steps(80)
    assert num_drafted(engine.steps(40)) <= 12
    reasons = engine.drafting.num_undrafted
    assert reasons[DisabledReason.LOW_ACCEPTANCE] + reasons[DisabledReason.LOAD] > 40


def test_speculation_goes_off_when_many_requests_make_tokens_dear_and_comes_back():
    engine = priced_engine(compute_bound)
    alone = num_drafted(engine.steps(20))
    assert alone >= 20
    for index in range(31):
        engine.add(f"other{index}", (index, 5, 6))
    engine.steps(60)
    crowded = num_drafted(engine.steps(20)) / 32
    assert crowded < alone / 10
    for index in range(31):
        engine.drop(f"other{index}")
    engine.steps(100)
    assert num_drafted(engine.steps(20)) >= alone / 2


def test_steps_that_are_all_alike_are_told_apart_by_a_few_without_drafts():
    """A drafter that always gives a whole draft for a lone request makes every step as large as the last."""
    engine = priced_engine(free_steps)
    assert 1 <= engine.drafting.num_undrafted[DisabledReason.WARMUP] <= MIN_SAMPLES
    assert {1, 5} <= {point.num_tokens for point in engine.drafting.step_times}


def test_a_router_that_waits_for_step_times_is_told_some_by_drafting():
    engine = HostedEngine()
    engine.pool.come_up("d")
    off = SpeculationPlan(disabled_reason=DisabledReason.WARMUP)
    engine.drafting.follow(Directive(plans={}, default_plan=off, drafters=()))
    engine.add()
    engine.steps(40)
    assert engine.drafting.step_times


def test_the_reports_price_and_step_times_are_there_once_steps_were_seen():
    engine = HostedEngine()
    engine.pool.come_up("d")
    engine.add()
    engine.step()
    load = engine.drafting.refresh_load(lambda: engine.running)
    assert load is not None
    assert (load.price, engine.drafting.step_times) == (None, ())
    engine.steps(30)
    load = engine.drafting.refresh_load(lambda: engine.running)
    assert load is not None
    assert load.price is not None
    assert (load.num_running, load.num_decoding) == (1, 1)
    assert [drafter.drafter_id for drafter in load.drafters] == ["d"]


class Disorder:
    """Do anything to an engine, its router and its pool, in any order."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.engine = HostedEngine(num_speculative_tokens=self.rng.choice((1, 3, 8)), opening_s=0.3)
        self.num_added = 0

    def run(self, num_moves: int) -> None:
        for _ in range(num_moves):
            self.rng.choice(
                (self.add, self.add, self.leave, self.drafters, self.pool, self.router, self.engine_itself)
            )()
            for _ in range(self.rng.randrange(10)):
                self.step()

    def step(self) -> None:
        rng, engine = self.rng, self.engine
        some = {one for one in engine.running if rng.random() < 0.8} if rng.random() < 0.3 else None
        engine.chunk = rng.choice((2, 5, 512))
        num_verified = rng.choice((*[None] * 6, 0, 1, 2))
        engine.step(some, num_verified=num_verified, proposes=rng.random() < 0.9)

    def add(self) -> None:
        self.num_added += 1
        request_id = f"r{self.rng.randrange(12)}"  # ids are used again
        if request_id in self.engine.running:
            return
        prompt = [self.rng.randrange(97) for _ in range(self.rng.randrange(1, 30))]
        cap = self.rng.choice((None, None, 0, 2, 1 << 80))
        stop = frozenset(self.rng.sample(range(97), self.rng.choice((0, 0, 3))))
        max_tokens = self.rng.choice((1, 7, 300))
        self.engine.add(request_id, prompt, max_tokens=max_tokens, num_speculative_tokens=cap, stop_token_ids=stop)

    def leave(self) -> None:
        if not self.engine.running:
            return
        request_id = self.rng.choice(list(self.engine.running))
        if self.rng.random() < 0.5:
            self.engine.preempt(request_id)
        else:
            self.engine.drop(request_id, is_told=self.rng.random() < 0.5)

    def drafters(self) -> None:
        move = self.rng.choice((*[self.engine.pool.come_up] * 4, self.engine.pool.go_away))
        move(self.rng.choice(("d", "e")))

    def pool(self) -> None:
        pool, rng = self.engine.pool, self.rng
        pool.answer_s = rng.choice((0.0, 0.001, 0.002, 0.002, 0.002, 0.03, 0.3, NEVER))
        pool.opening_s = rng.choice((0.0, 0.0, 0.1, 0.1, 1.0, NEVER))
        pool.is_right = rng.choice((half_right, lambda position: True, lambda position: False))
        spoils: tuple[Callable[[Draft], Draft | bytes], ...] = (
            *[lambda draft: draft] * 8,
            lambda draft: b"\x00",
            lambda draft: replace(draft, token_ids=(96,) * (len(draft.token_ids) + 1)),
            lambda draft: replace(draft, round_id=draft.round_id + 1),
        )
        pool.spoil = rng.choice(spoils)
        pool.forget(f"r{rng.randrange(12)}")

    def router(self) -> None:
        def plan() -> SpeculationPlan:
            length = self.rng.choice((0, 2, 40, 40, 40))
            drafter_id = self.rng.choice((None, "d", "e", "gone"))
            reason = DisabledReason.LOAD if length == 0 else None
            is_pinned = self.rng.random() < 0.7  # or the price would end nearly all of it
            return SpeculationPlan(
                drafter_id=drafter_id, draft_length=length, disabled_reason=reason, is_pinned=is_pinned
            )

        plans = {request_id: plan() for request_id in [*self.engine.running, "gone"]}
        self.engine.drafting.follow(Directive(plans=plans, default_plan=plan(), drafters=()))

    def engine_itself(self) -> None:
        engine, rng = self.engine, self.rng
        engine.step_s = rng.choice((free_steps, free_steps, free_steps, compute_bound, dear))
        engine.clock.now_s += rng.choice((0.0, 0.5, 20.0))
        assert engine.drafting.refresh_load(lambda: engine.running) is not None

    def end(self) -> None:
        """Drop all requests, and let the engine say so."""
        self.engine.pool.answer_s = self.engine.pool.opening_s = 0.001
        for request_id in list(self.engine.running):
            self.engine.drop(request_id, is_told=self.rng.random() < 0.5)
        self.engine.step()
        assert self.engine.drafting.refresh_load(lambda: ()) is not None


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_no_draft_is_too_long_no_step_waits_too_long_and_nothing_is_kept_of_what_is_gone(seed: int):
    """What each step may do is asserted by the played engine itself, after every one."""
    disorder = Disorder(seed)
    disorder.run(150)
    disorder.end()
    drafting = disorder.engine.drafting
    assert drafting.coordinator.request_ids == set()
    assert drafting.pricing.request_ids == set()
    assert disorder.engine.pool.sessions == {}, "a drafter keeps a session that is over"
    assert drafting.stats.num_accepted_tokens <= drafting.stats.num_draft_tokens


def test_disorder_drafts_at_all():
    engines = [Disorder(seed) for seed in range(3)]
    for disorder in engines:
        disorder.run(150)
    assert sum(disorder.engine.drafting.stats.num_accepted_tokens for disorder in engines) > 50
