"""An engine that launches the next step before one is read: which steps, and that no token tells."""

from __future__ import annotations

import dataclasses
import random

import pytest

from fakes.engine_bench import PROMPT, EngineBench, Pace, greedy_tokens, make_request, tokens_of
from outrider.verifier_service.engine.launched_step import LaunchedStep
from outrider.verifier_service.messages.draft import DrafterEvent
from outrider.verifier_service.messages.engine import StepTime
from outrider.verifier_service.messages.request import (
    DisabledReason,
    FinishReason,
    GenerationRequest,
    LogitBias,
    RequestOutput,
    SpeculationPlan,
)
from outrider.verifier_service.pricing.draft_pricing import DraftPricing
from outrider.verifier_service.pricing.step_lessons import EndedStep
from outrider.verifier_service.sampling import sampler

EXPECTED = greedy_tokens(40)
OFF = SpeculationPlan(disabled_reason=DisabledReason.LOAD)


class AsyncBench(EngineBench):
    pace = Pace.ASYNC


def num_early_of(bench: EngineBench) -> int:
    return bench.runner.num_early


def test_each_step_is_launched_before_the_one_before_it_is_read():
    bench = AsyncBench(drafters=())
    bench.add(max_tokens=6)
    for num_steps in range(1, 6):
        assert bench.step_one().token_ids == (EXPECTED[num_steps - 1],)
        assert bench.runner.is_running, "the next one"
        assert len(bench.runner.batches) == num_steps, "which has not been computed yet"
    output = bench.step_one()
    assert (output.token_ids, output.finish_reason) == (EXPECTED[5:6], FinishReason.LENGTH)
    assert not bench.runner.is_running, "nobody is in a step after its last token"
    assert num_early_of(bench) == 5
    assert bench.step() is None


def test_a_request_that_stops_is_in_the_next_step_for_nothing():
    bench = AsyncBench(drafters=())
    bench.add("a", max_tokens=9, stop_token_ids=(EXPECTED[2],))
    bench.add("b", prompt=(7, 7), max_tokens=9)
    outputs = bench.finish()
    assert tokens_of(outputs["a"]) == EXPECTED[:3]
    assert outputs["a"][-1].finish_reason is FinishReason.STOP
    assert tokens_of(outputs["b"]) == greedy_tokens(9, (7, 7))
    sizes = [len(batch.query_lengths) for batch in bench.runner.batches]
    assert sizes == [2, 2, 2, 2, 1, 1, 1, 1, 1], "one step too many, and no more"
    assert bench.engine.scheduler.kv_usage == 0.0


def test_when_the_last_request_stops_the_step_after_is_dropped():
    bench = AsyncBench(drafters=())
    bench.add("a", stop_token_ids=EXPECTED[:1])
    assert bench.step_one().finish_reason is FinishReason.STOP
    assert not bench.engine.has_work()
    assert bench.step() is None
    bench.add("b", prompt=(7, 7), max_tokens=4)
    outputs = bench.finish()["b"]
    assert tokens_of(outputs) == greedy_tokens(4, (7, 7))


@pytest.mark.parametrize(
    "options",
    [
        {"logprobs": 1},
        {"prompt_logprobs": 0},
        {"presence_penalty": 1.0},
        {"logit_bias": (LogitBias(token_id=1, bias=0.5),)},
        {"min_tokens": 3},
        {"bad_words": ((96, 96),)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_who_wants_more_of_a_row_than_its_token_holds_up_the_launch(options):
    bench = AsyncBench(drafters=())
    bench.add("a", max_tokens=4, **options)
    bench.add("b", prompt=(7, 7), max_tokens=8)
    outputs = bench.finish()
    assert tokens_of(outputs["b"]) == greedy_tokens(8, (7, 7))
    # prompt logprobs are there with the first token; who wants one of the others is in four steps
    assert num_early_of(bench) == (6 if "prompt_logprobs" in options else 3)


def test_a_prediction_is_followed_by_what_was_committed():
    bench = AsyncBench(drafters=())
    message = dataclasses.replace(
        make_request("a", draft_length=3, drafter_id="d", max_tokens=8), prediction_token_ids=EXPECTED[:8]
    )
    assert bench.engine.add(message) is None
    outputs = bench.finish()["a"]
    assert tokens_of(outputs) == EXPECTED[:8]
    assert sum(output.num_accepted_tokens for output in outputs) > 0
    assert num_early_of(bench) == 0


def test_who_drafts_holds_up_the_launch_and_who_stops_drafting_does_not():
    bench = AsyncBench()
    bench.add(max_tokens=12, draft_length=2, drafter_id="d")
    assert bench.step_one().token_ids == EXPECTED[:1]
    bench.drafts.answer(EXPECTED[1:3])
    assert bench.step_one().token_ids == EXPECTED[1:4]
    assert num_early_of(bench) == 0
    bench.engine.set_plans({"a": OFF})
    bench.now_s += bench.engine.idle_s()
    assert tokens_of(bench.finish()["a"]) == EXPECTED[4:12]
    assert num_early_of(bench) > 0


def test_who_begins_to_draft_is_asked_for_after_the_token_that_nobody_followed():
    bench = AsyncBench()
    bench.add(max_tokens=12)
    bench.engine.set_plans({"a": OFF})
    bench.step()
    bench.step()
    bench.engine.set_plans({"a": SpeculationPlan(drafter_id="d", draft_length=2)})
    assert bench.step_one().token_ids == EXPECTED[2:3], "that of the step that ran already"
    assert not bench.runner.is_running
    _, ask = bench.drafts.last_ask()
    assert ask.position + len(ask.token_ids) == len(PROMPT) + 3
    bench.drafts.answer(EXPECTED[3:5])
    assert bench.step_one().token_ids == EXPECTED[3:6]


def test_drafters_are_never_told_a_token_that_stands_open():
    bench = AsyncBench()
    bench.add(max_tokens=30, draft_length=0, drafter_id="d")
    rng = random.Random(0)
    for _ in range(40):
        plan = SpeculationPlan(drafter_id="d", draft_length=rng.choice((0, 0, 2)))
        bench.engine.set_plans({"a": plan})
        bench.step()
        bench.now_s += bench.engine.idle_s() or 0.0
    told = [token_id for _, message in bench.drafts.sent for token_id in getattr(message, "token_ids", ())]
    assert told
    assert min(told) >= 0


def test_a_lost_drafter_and_a_resync_meet_a_step_that_runs():
    bench = AsyncBench()
    bench.add(max_tokens=12, draft_length=2, drafter_id="d")
    bench.step()
    bench.drafts.answer(EXPECTED[1:3])
    bench.step()
    bench.engine.set_plans({"a": SpeculationPlan(drafter_id="d", draft_length=0, disabled_reason=DisabledReason.LOAD)})
    bench.now_s += bench.engine.idle_s()
    bench.step()
    bench.drafts.events.append(DrafterEvent(drafter_id="d", is_up=False))
    assert tokens_of(bench.finish()["a"])[-1] == EXPECTED[11]


class NotingPricing(DraftPricing):
    """Notes what it learns from: how many requests a step had, and how long it took."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[int, float]] = []
        self.num_tokens: list[int] = []

    def learn(self) -> None:
        if (unlearnt := self._unlearnt) is not None:
            step = unlearnt.step if isinstance(unlearnt, EndedStep) else unlearnt
            self.num_tokens.append(step.shape.num_tokens)
            self.noted.append((len(step.outcomes), step.step_s))
        super().learn()


def test_pricing_hears_of_every_step_once_and_how_long_it_took():
    pricing = NotingPricing()
    pricing.use_profile([StepTime(num_tokens=1, seconds=0.5), StepTime(num_tokens=64, seconds=0.5)])
    bench = AsyncBench(drafters=(), pricing=pricing)
    arrive = bench.meanwhile

    def slow() -> None:
        bench.now_s += 0.5
        arrive()

    bench.meanwhile = slow
    bench.add(max_tokens=6)
    bench.finish()
    pricing.learn()
    assert pricing.noted == [(1, 0.5)] * 6
    assert num_early_of(bench) == 3, "a load that is new is learnt from before anybody asks again"
    assert bench.engine.stats.busy_s == 3.0


def test_a_nucleus_that_is_larger_than_it_looked_is_drawn_again_with_the_row_that_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At this temperature nine tenths of the target are more tokens than the candidates: each row is judged again."""
    monkeypatch.setattr(sampler, "NUCLEUS_CANDIDATES", 16)
    sampling = {"temperature": 2.5, "top_p": 0.9, "seed": 3, "max_tokens": 12}
    tokens = {}
    for pace in Pace:
        monkeypatch.setattr(EngineBench, "pace", pace)
        bench = EngineBench(drafters=())
        bench.add("a", **sampling)
        bench.add("b", prompt=(7, 7), max_tokens=12)
        outputs = bench.finish()
        tokens[pace] = tokens_of(outputs["a"])
        assert tokens_of(outputs["b"]) == greedy_tokens(12, (7, 7)), "its own tokens were right"
        if pace is Pace.ASYNC:
            assert num_early_of(bench) > 0
            num_rows = sum(len(batch.query_lengths) for batch in bench.runner.batches)
            assert num_rows > 24, "rows were computed again"
    assert tokens[Pace.ASYNC] == tokens[Pace.LATE] == tokens[Pace.AT_ONCE]


def test_who_is_drawn_again_and_again_is_not_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "NUCLEUS_CANDIDATES", 16)
    bench = AsyncBench(drafters=())
    bench.add("a", temperature=2.5, top_p=0.9, max_tokens=30)
    bench.add("b", prompt=(7, 7), max_tokens=36)
    outputs = bench.finish()
    assert len(tokens_of(outputs["a"])) == 30
    num_steps = len(bench.runner.batches)
    assert num_steps <= 36 + 4
    num_rows = sum(len(batch.query_lengths) for batch in bench.runner.batches)
    assert 66 < num_rows < 66 + 15, "a row in vain for a run of tokens that were drawn again, not for each of them"


def test_a_pause_without_requests_is_no_part_of_a_step() -> None:
    pricing = NotingPricing()
    pricing.use_profile([StepTime(num_tokens=1, seconds=0.5), StepTime(num_tokens=64, seconds=0.5)])
    bench = AsyncBench(drafters=(), pricing=pricing)
    for _ in range(2):
        bench.add(max_tokens=9, stop_token_ids=(EXPECTED[4],))
        bench.finish()
        bench.now_s += 100.0
    pricing.learn()
    assert len(pricing.noted) == 10
    assert max(seconds for _, seconds in pricing.noted) == 0.0
    assert bench.engine.stats.busy_s == 0.0


def test_a_step_in_which_somebody_is_for_nothing_is_a_plain_one_of_the_others() -> None:
    pricing = NotingPricing()
    pricing.use_profile([StepTime(num_tokens=1, seconds=0.5), StepTime(num_tokens=64, seconds=0.5)])
    bench = AsyncBench(drafters=(), pricing=pricing)
    bench.add("a", stop_token_ids=(EXPECTED[2],), max_tokens=9)
    bench.add("b", prompt=(7, 7), max_tokens=9)
    bench.finish()
    pricing.learn()
    assert pricing.num_tokens == [len(PROMPT) + 2, 2, 2, *[1] * 6]


def test_prompt_logprobs_of_a_request_that_is_gone_are_not_the_next_ones() -> None:
    bench = AsyncBench(drafters=())
    bench.add("b", prompt=(7, 7), max_tokens=9)
    bench.step()
    bench.add("a", prompt=range(20), prompt_logprobs=0)
    bench.step()
    bench.engine.cancel("a")
    bench.add("a", prompt_logprobs=0, max_tokens=1)
    found = bench.finish()["a"][0].prompt_logprobs
    assert [entry and entry.token_id for entry in found] == [None, *PROMPT[1:]]


# --- scenarios ---


def random_requests(rng: random.Random, count: int) -> list[GenerationRequest]:
    """Requests that share prompts, some of them siblings, with stops, seeds, limits and priorities."""
    requests: list[GenerationRequest] = []
    for index in range(count):
        prompt = tuple(range(rng.choice((2, 5, 9, 14))))
        kinds = (
            {},
            {"stop_token_ids": tuple(rng.sample(range(97), 12))},
            {"temperature": 9.0, "seed": rng.randrange(9)},
            {"temperature": 9.0, "seed": rng.randrange(9), "top_k": 5},
            {"logprobs": 1},
            {"frequency_penalty": 0.5},
        )
        (sampling,) = rng.choices(kinds, weights=(6, 6, 6, 6, 1, 1))
        message = make_request(str(index), prompt=prompt, max_tokens=rng.randint(1, 20), **sampling)
        group_id = rng.choice((None, f"of {len(prompt)}"))
        requests.append(dataclasses.replace(message, priority=rng.choice((0, 0, -1)), group_id=group_id))
    return requests


def play(seed: int, pace: Pace, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, list[RequestOutput]], EngineBench]:
    """Serve random requests that come and go; who is cancelled, and when, is the same at every pace."""
    rng = random.Random(seed)
    requests = random_requests(rng, 24)
    monkeypatch.setattr(EngineBench, "pace", pace)
    bench = EngineBench(drafters=(), num_blocks=20, max_num_batched_tokens=rng.choice((8, 24)))
    outputs: dict[str, list[RequestOutput]] = {}
    while requests or bench.engine.has_work():
        while requests and len(bench.engine.requests) < rng.randint(1, 8):
            assert bench.engine.add(requests.pop()) is None
        if bench.engine.requests and rng.random() < 0.05:
            bench.engine.cancel(rng.choice(sorted(bench.engine.requests)))
        for output in bench.step() or []:
            outputs.setdefault(output.request_id, []).append(output)
        bench.engine.check_integrity()
        assert all(min(request.token_ids) >= 0 for request in bench.engine.requests.values()), (
            "a token stands open between steps"
        )
    assert bench.engine.scheduler.kv_usage == 0.0
    return outputs, bench


@pytest.mark.parametrize("seed", range(12))
def test_no_token_tells_when_steps_were_launched(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = play(seed, Pace.AT_ONCE, monkeypatch)
    early, _ = play(seed, Pace.ASYNC, monkeypatch)
    for request_id in plain.keys() & early.keys():
        expected, got = tokens_of(plain[request_id]), tokens_of(early[request_id])
        shared = min(len(expected), len(got))  # who is cancelled has got more or less by then
        assert got[:shared] == expected[:shared]
        if plain[request_id][-1].finish_reason and early[request_id][-1].finish_reason:
            assert got == expected


def test_the_scenarios_preempt_share_and_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    num_preemptions = num_hits = num_stops = num_early = 0
    for seed in range(12):
        outputs, bench = play(seed, Pace.ASYNC, monkeypatch)
        num_early += num_early_of(bench)
        num_preemptions += bench.engine.scheduler.num_preemptions
        num_hits += bench.engine.scheduler.num_prefix_hit_tokens
        num_stops += sum(of[-1].finish_reason is FinishReason.STOP for of in outputs.values())
    assert min(num_preemptions, num_hits, num_stops, num_early) > 5


def test_without_what_marks_them_rows_that_followed_a_wrong_token_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "NUCLEUS_CANDIDATES", 16)
    monkeypatch.setattr(LaunchedStep, "corrected", lambda step: set())
    sampling = {"temperature": 2.5, "top_p": 0.9, "seed": 3, "max_tokens": 12}
    tokens = []
    for bench in (AsyncBench(drafters=()), EngineBench(drafters=())):
        bench.add(**sampling)
        tokens.append(tokens_of(bench.finish()["a"]))
    assert tokens[0] != tokens[1]
