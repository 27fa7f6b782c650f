"""The step loop against the fake runner, whose tokens are known, with drafts that the test writes."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from fakes.engine_bench import PROMPT, EngineBench, Pace, greedy_tokens, make_request, tokens_of
from fakes.runner import next_token
from outrider.verifier_service.messages.draft import (
    FINAL_TAP,
    ROOT,
    Close,
    Commit,
    Draft,
    DrafterEvent,
    DraftNeeds,
    Open,
    Resync,
    States,
    VerifierMessage,
)
from outrider.verifier_service.messages.request import (
    DisabledReason,
    FinishReason,
    LogitBias,
    SpeculationPlan,
    TokenOrigin,
)
from support import parts

EXPECTED = greedy_tokens(40)
WRONG = {token_id: (token_id + 1) % 97 for token_id in range(97)}


def bench_before_draft(**options) -> EngineBench:
    """A bench whose request "a" has its first token and waits for its first draft."""
    of_bench = ("eos_token_ids", "drafters", "needs", "max_tree_nodes")
    bench = EngineBench(**{key: options.pop(key) for key in of_bench if key in options})
    assert bench.add(draft_length=4, **options) is None
    assert bench.step_one().token_ids == EXPECTED[:1]
    assert bench.step() is None, "held until its draft or its deadline"
    return bench


@pytest.fixture(params=Pace, ids=lambda pace: pace.name.lower(), autouse=True)
def pace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine here is one whose logits are there at once, one whose are late, one that runs ahead."""
    monkeypatch.setattr(EngineBench, "pace", request.param)


def test_the_scripts_tokens_are_distinct():
    assert len(set(EXPECTED[:6])) == 6, "or the stop tokens below would come earlier than meant"


NEVER_SAID = next(token_id for token_id in range(97) if token_id not in EXPECTED)
STOP_2, EOS_2 = {"stop_token_ids": (EXPECTED[2],)}, {"eos_token_ids": (96, EXPECTED[2])}
STOP_4 = {"stop_token_ids": (EXPECTED[4],)}


@pytest.mark.parametrize(
    ("options", "draft", "num_tokens", "reason"),
    [
        ({"stop_token_ids": (EXPECTED[1],)}, EXPECTED[1:5], 1, FinishReason.STOP),
        (STOP_2, EXPECTED[1:5], 2, FinishReason.STOP),
        (STOP_4, EXPECTED[1:5], 4, FinishReason.STOP),
        ({"stop_token_ids": (NEVER_SAID,)}, (EXPECTED[1], NEVER_SAID), 2, None),
        ({"max_tokens": 4}, EXPECTED[1:3], 3, FinishReason.LENGTH),
        ({"max_tokens": 3, **STOP_2}, EXPECTED[1:2], 2, FinishReason.STOP),
        (EOS_2, EXPECTED[1:5], 2, FinishReason.STOP),
        ({**EOS_2, **STOP_4}, EXPECTED[1:5], 2, FinishReason.STOP),
        ({**EOS_2, "ignore_eos": True}, EXPECTED[1:5], 5, None),
        ({**EOS_2, "ignore_eos": True, **STOP_4}, EXPECTED[1:5], 4, FinishReason.STOP),
        ({**EOS_2, "ignore_eos": True, "min_tokens": 5}, EXPECTED[1:5], 5, None),
        ({**EOS_2, "min_tokens": 2}, EXPECTED[1:3], 2, FinishReason.STOP),
    ],
)
def test_an_output_ends_at_the_first_token_that_ends_it(options: dict, draft, num_tokens: int, reason):
    bench = bench_before_draft(**options)
    bench.drafts.answer(draft)
    output = bench.step_one()
    assert (output.token_ids, output.finish_reason) == (EXPECTED[1 : 1 + num_tokens], reason)
    assert bench.engine.has_work() == (reason is None)
    if reason is not None:
        assert bench.engine.scheduler.kv_usage == 0.0
        assert bench.drafts.sent[-1] == ("d", Close(request_id="a"))


def test_the_models_maximum_length_ends_a_request():
    prompt = tuple(range(60))
    bench = EngineBench(max_model_len=64)
    bench.add(prompt=prompt, max_tokens=100, draft_length=4)
    outputs = [bench.step_one()]
    assert bench.drafts.last_ask()[1].max_length == 2
    bench.drafts.answer(greedy_tokens(3, prompt)[1:])
    outputs.append(bench.step_one())
    assert tokens_of(outputs) == greedy_tokens(4, prompt)
    assert outputs[-1].finish_reason is FinishReason.LENGTH


# --- requests that are refused ---


def test_a_duplicate_id_is_refused_and_the_first_request_goes_on():
    bench = EngineBench()
    bench.add(max_tokens=4)
    bench.step()
    failure = bench.add(prompt=(1, 1), max_tokens=9)
    assert failure.finish_reason is FinishReason.ERROR
    assert failure.request_id == "a"
    assert "request_id" in failure.error
    assert tokens_of(bench.finish()["a"]) == EXPECTED[1:4]
    assert bench.add(max_tokens=1) is None, "a finished request's id is free again"


@pytest.mark.parametrize(
    ("prompt", "named"),
    [((5, 97), "prompt_token_ids"), ((-1,), "prompt_token_ids"), ((), "prompt"), (range(64), "64 tokens")],
)
def test_an_impossible_prompt_is_answered_at_once_and_leaves_nothing(prompt, named: str):
    bench = EngineBench(max_model_len=64)
    failure = bench.add(prompt=prompt)
    assert (failure.token_ids, failure.finish_reason) == ((), FinishReason.ERROR)
    assert named in failure.error
    assert not bench.engine.has_work()
    assert bench.step() is None
    assert bench.add() is None, "its id is free"


def test_the_vocabularys_edges_are_inside():
    bench = EngineBench()
    assert bench.add(prompt=(0, 96), max_tokens=2) is None
    assert tokens_of(bench.finish()["a"]) == greedy_tokens(2, (0, 96))


# --- cancelling ---


def test_cancelling_a_held_request_frees_everything_and_its_late_draft_is_stale():
    bench = bench_before_draft()
    assert bench.engine.idle_s() == pytest.approx(1.0)
    bench.engine.cancel("a")
    assert not bench.engine.has_work()
    assert bench.engine.idle_s() is None
    assert bench.engine.scheduler.kv_usage == 0.0
    assert bench.drafts.sent[-1] == ("d", Close(request_id="a"))
    bench.drafts.answer(EXPECTED[1:3])
    assert bench.step() is None
    assert bench.engine.drafting.num_stale_drafts == 1
    bench.engine.cancel("a")
    bench.engine.cancel("never seen")


# --- speculation ---


def test_counters_tell_positions_apart():
    bench = bench_before_draft(max_tokens=30)
    bench.drafts.answer((EXPECTED[1], EXPECTED[2], WRONG[EXPECTED[3]]))  # 2 of 3: tokens 1, 2, recovered 3
    bench.step()
    bench.drafts.answer((EXPECTED[4],))  # 1 of 1: token 4, bonus 5
    bench.step()
    bench.drafts.answer((WRONG[EXPECTED[6]], EXPECTED[7]))  # 0 of 2: recovered 6
    bench.step()
    bench.drafts.answer(EXPECTED[7:11])  # 4 of 4
    metrics = bench.step_one().speculation
    assert metrics.num_accepted_per_position == [3, 2, 1, 1]
    assert (metrics.num_drafts, metrics.num_draft_tokens, metrics.num_accepted_tokens) == (4, 10, 7)
    assert (metrics.num_empty_rounds, metrics.num_cut_tokens) == (0, 0)
    assert metrics.mean_acceptance_length == pytest.approx(1 + 7 / 4)
    assert metrics.enabled


def test_a_draft_that_is_late_or_empty_is_a_round_without_one():
    bench = bench_before_draft()
    bench.now_s += bench.engine.idle_s()
    output = bench.step_one()
    assert output.token_ids == EXPECTED[1:2]
    assert output.speculation.num_empty_rounds == 1
    bench.drafts.answer(())
    output = bench.step_one()
    assert output.token_ids == EXPECTED[2:3]
    assert (output.speculation.num_empty_rounds, output.speculation.num_drafts) == (2, 0)
    assert output.speculation.mean_acceptance_length is None
    assert bench.engine.drafting.fallbacks == {"timeout": 1}


def test_a_request_without_speculation_counts_no_rounds_and_asks_nobody():
    bench = EngineBench()
    bench.add(max_tokens=3, draft_length=0)
    metrics = bench.finish()["a"][-1].speculation
    assert not metrics.enabled
    assert (metrics.num_drafts, metrics.num_empty_rounds) == (0, 0)
    assert not bench.drafts.sent


def test_losing_the_drafter_lets_a_held_request_go_on():
    bench = bench_before_draft(max_tokens=5)
    bench.drafts.events.append(DrafterEvent(drafter_id="d", is_up=False))
    outputs = [bench.step_one(), *bench.finish()["a"]]
    assert bench.now_s == 0.0, "nothing waited for a deadline"
    assert tokens_of(outputs) == EXPECTED[1:5]
    assert outputs[-1].speculation.disabled_reason == "drafter_unavailable"


def test_plans_are_followed_from_the_next_ask_on():
    bench = bench_before_draft(drafter_id="d", drafters=("d", "e"))
    bench.engine.set_plans(
        {"a": SpeculationPlan(drafter_id="e", draft_length=2), "gone": SpeculationPlan(draft_length=9)}
    )
    bench.drafts.answer(EXPECTED[1:4])
    assert bench.step_one().token_ids == EXPECTED[1:5], "the round that was on its way still counts"
    drafter_id, ask = bench.drafts.last_ask()
    assert (drafter_id, ask.max_length) == ("e", 2)
    assert [(to, type(message)) for to, message in bench.drafts.sent[-3:]] == [("d", Close), ("e", Open), ("e", Commit)]
    assert bench.engine.requests.keys() == {"a"}


def test_a_plan_of_length_zero_turns_speculation_off_and_says_why():
    bench = bench_before_draft(max_tokens=6)
    bench.engine.set_plans({"a": SpeculationPlan(disabled_reason=DisabledReason.LOAD)})
    bench.drafts.answer(EXPECTED[1:2])
    num_sent = len(bench.drafts.sent)
    outputs = [bench.step_one(), *bench.finish()["a"]]
    assert tokens_of(outputs) == EXPECTED[1:6]
    assert outputs[-1].speculation.disabled_reason == "load"
    assert [type(message) for _, message in bench.drafts.sent[num_sent:]] == [Close]


# --- where tokens came from ---


@pytest.mark.parametrize(
    ("draft", "options", "num_accepted", "last", "finish_reason"),
    [
        (EXPECTED[1:4], {}, 3, TokenOrigin.BONUS, None),
        ((*EXPECTED[1:3], WRONG[EXPECTED[3]]), {}, 2, TokenOrigin.RECOVERED, None),
        ((WRONG[EXPECTED[1]],), {}, 0, TokenOrigin.RECOVERED, None),
        ((), {}, 0, TokenOrigin.PLAIN, None),
        (EXPECTED[1:4], {"stop_token_ids": (EXPECTED[2],)}, 2, TokenOrigin.ACCEPTED, FinishReason.STOP),
        (EXPECTED[1:4], {"stop_token_ids": (EXPECTED[4],)}, 3, TokenOrigin.BONUS, FinishReason.STOP),
        (
            (EXPECTED[1], WRONG[EXPECTED[2]], 0),
            {"stop_token_ids": (EXPECTED[2],)},
            1,
            TokenOrigin.RECOVERED,
            FinishReason.STOP,
        ),
        (EXPECTED[1:4], {"max_tokens": 5}, 3, TokenOrigin.BONUS, FinishReason.LENGTH),
    ],
)
def test_an_output_says_where_its_tokens_came_from(draft, options, num_accepted: int, last, finish_reason):
    bench = bench_before_draft(**options)
    bench.drafts.answer(draft)
    output = bench.step_one()
    assert output.finish_reason is finish_reason
    assert (output.num_draft_tokens, output.num_accepted_tokens) == (len(draft), num_accepted)
    num_others = len(output.token_ids) - 1
    assert output.origins == (*[TokenOrigin.ACCEPTED] * num_others, last)
    assert output.speculation.num_accepted_tokens == num_accepted
    assert sum(output.speculation.num_accepted_per_position) == num_accepted


# --- trees ---

#          right  wrong  right wrong  right
PARENTS = (ROOT, ROOT, 0, 0, 2)
TREE = (EXPECTED[1], WRONG[EXPECTED[1]], EXPECTED[2], WRONG[EXPECTED[2]], EXPECTED[3])
RIGHT_LAST = (1, 0, 3, 2, 4)  # the same tree, its right nodes after their wrong siblings: node 2's KV moves, and 4's
RIGHT_LAST_PARENTS = (ROOT, ROOT, 1, 1, 3)


def test_a_trees_right_path_is_committed_and_what_follows_is_right_too():
    bench = bench_before_draft(max_tree_nodes=5, max_tokens=12)
    ask = bench.drafts.last_ask()[1]
    assert (ask.max_length, ask.max_nodes) == (4, 5)
    bench.drafts.answer([TREE[node] for node in RIGHT_LAST], RIGHT_LAST_PARENTS)
    output = bench.step_one()
    assert output.token_ids == EXPECTED[1:5]
    assert (output.num_draft_tokens, output.num_accepted_tokens) == (5, 3)
    assert output.origins == (*[TokenOrigin.ACCEPTED] * 3, TokenOrigin.BONUS)
    assert output.speculation.num_accepted_per_position == [1, 1, 1], "positions, not nodes"
    assert tokens_of(bench.finish()["a"]) == EXPECTED[5:12]
    assert bench.runner.batches[2].move_sources == [5, 7, 8]


def test_a_token_recovered_within_a_tree_is_no_bonus():
    bench = bench_before_draft(max_tree_nodes=5)
    bench.drafts.answer([TREE[0], TREE[1], TREE[3]], [ROOT, ROOT, 0])
    output = bench.step_one()
    assert output.token_ids == EXPECTED[1:3]
    assert output.origins == (TokenOrigin.ACCEPTED, TokenOrigin.RECOVERED)
    bench.drafts.answer([EXPECTED[3], WRONG[EXPECTED[3]], 0], [ROOT, ROOT, 1])
    output = bench.step_one()
    assert output.token_ids == EXPECTED[3:5]
    assert output.origins == (TokenOrigin.ACCEPTED, TokenOrigin.BONUS), "another branch goes on, this one does not"
    assert output.speculation.num_accepted_per_position == [2, 0]


@pytest.mark.parametrize(("stop", "num_tokens", "num_accepted"), [(1, 1, 1), (2, 2, 2), (3, 3, 3), (4, 4, 3)])
def test_a_stop_token_on_a_trees_path_ends_the_output_there(stop: int, num_tokens: int, num_accepted: int):
    bench = bench_before_draft(max_tree_nodes=5, stop_token_ids=(EXPECTED[stop],), logprobs=0)
    bench.drafts.answer([TREE[node] for node in RIGHT_LAST], RIGHT_LAST_PARENTS)
    output = bench.step_one()
    assert (output.token_ids, output.finish_reason) == (EXPECTED[1 : 1 + num_tokens], FinishReason.STOP)
    assert output.num_accepted_tokens == num_accepted
    assert [entry.logprob for entry in output.logprobs] == pytest.approx(
        [expected_logprob([*PROMPT, *EXPECTED[:length]], EXPECTED[length]) for length in range(1, 1 + num_tokens)]
    )


def test_predictions_follow_every_row_and_only_who_needs_them_gets_them():
    bench = bench_before_draft(max_tree_nodes=5, needs=DraftNeeds(predictions=True))
    # who drafts is chosen before a step is read that the next one might have followed unread
    known = EXPECTED[:1] if EngineBench.pace is Pace.ASYNC else ()
    assert bench.drafts.last_ask()[1].predicted_ids == known
    bench.drafts.answer([TREE[node] for node in RIGHT_LAST], RIGHT_LAST_PARENTS)
    bench.step()
    after = [[], [TREE[1]], [TREE[0]], [TREE[0], TREE[3]], [TREE[0], TREE[2]], [TREE[0], TREE[2], TREE[4]]]
    context = [*PROMPT, EXPECTED[0]]
    predicted_ids = bench.drafts.last_ask()[1].predicted_ids
    assert predicted_ids == tuple(next_token([*context, *path], 97) for path in after)
    bench = bench_before_draft(max_tree_nodes=5)
    bench.drafts.answer(TREE, PARENTS)
    bench.step()
    assert bench.drafts.last_ask()[1].predicted_ids == ()


def test_predictions_of_long_ago_are_not_told():
    """The drafter that needs them comes back after another: what was predicted before is about other tokens."""
    bench = bench_before_draft(needs=DraftNeeds(predictions=True), drafter_id="d")
    bench.drafts.answer(EXPECTED[1:2])
    bench.drafts.events.append(DrafterEvent(drafter_id="plain"))
    bench.engine.set_plans({"a": SpeculationPlan(drafter_id="plain", draft_length=2)})
    bench.step()
    assert bench.drafts.last_ask()[0] == "plain"
    bench.drafts.answer(EXPECTED[3:4])
    bench.engine.set_plans({"a": SpeculationPlan(drafter_id="d", draft_length=2)})
    bench.step()
    drafter_id, ask = bench.drafts.last_ask()
    assert (drafter_id, ask.predicted_ids) == ("d", ())


@dataclass
class WildDrafts:
    """A `DraftClient` whose drafter answers with random trees, some of them late, some never, and loses sessions.

    It holds what it is told against the truth: commits without a gap, every token's state once and in order.
    """

    rng: random.Random
    needs: DraftNeeds
    tokens: dict[str, list[int]] = field(default_factory=dict)
    states: dict[str, list[int]] = field(default_factory=dict)
    events: list[DrafterEvent] = field(default_factory=list)
    late: list[DrafterEvent] = field(default_factory=list)
    num_trees: int = 0

    def send(self, drafter_id: str, messages: Sequence[VerifierMessage]) -> None:
        for message in parts.singly(messages):
            self._take(message)

    def poll(self) -> list[DrafterEvent]:
        events, self.events = self.events, []
        if self.late and self.rng.random() < 0.5:
            events.append(self.late.pop())
        return events

    def _take(self, message: VerifierMessage) -> None:
        match message:
            case Open():
                self.tokens[message.request_id] = list(message.token_ids)
                self.states[message.request_id] = []
            case States():
                values = [int(value) for value in torch.frombuffer(bytearray(message.data), dtype=torch.float32)]
                known = self.states[message.request_id]
                if self.needs.last_state_only:
                    assert len(values) == 1
                    known[:] = [*self.tokens[message.request_id][: message.position], *values]
                else:
                    assert message.position == len(known), "a gap in the states"
                    known.extend(values)
            case Commit():
                self._commit(message)
            case Close():
                del self.tokens[message.request_id], self.states[message.request_id]

    def _commit(self, ask: Commit) -> None:
        tokens = self.tokens[ask.request_id]
        assert ask.position == len(tokens), "a gap in the tokens"
        tokens += ask.token_ids
        if not self.needs.last_state_only:  # a preempted request's states may be away when it opens again
            assert self.states[ask.request_id] in ([], tokens[:-1]), "the states are not the tokens'"
        elif self.states[ask.request_id]:
            assert self.states[ask.request_id][-1] == tokens[-2], "not the state of the token before the last"
        fate = self.rng.random()
        if fate < 0.1:
            self.events.append(self._said(Resync(request_id=ask.request_id)))
        elif fate < 0.9:
            (self.late if fate < 0.2 else self.events).append(self._said(self._draft(ask, tokens)))

    def _draft(self, ask: Commit, tokens: Sequence[int]) -> Draft:
        self.num_trees += ask.max_nodes > 0
        paths: list[list[int]] = []
        parents: list[int] = []
        for _ in range(self.rng.randint(0, ask.max_nodes)):
            parent = self.rng.randint(ROOT, len(paths) - 1)
            above = [] if parent == ROOT else paths[parent]
            right = next_token([*tokens, *above], 97)
            path = [*above, right if self.rng.random() < 0.7 else self.rng.randrange(97)]
            if len(path) <= ask.max_length and path not in paths:
                paths.append(path)
                parents.append(parent)
        return Draft(
            request_id=ask.request_id,
            round_id=ask.round_id,
            position=len(tokens),
            token_ids=tuple(path[-1] for path in paths),
            parents=tuple(parents),
        )

    @staticmethod
    def _said(message: Draft | Resync) -> DrafterEvent:
        return DrafterEvent(drafter_id="d", message=message)


def wild_bench(rng: random.Random, needs: DraftNeeds) -> tuple[EngineBench, WildDrafts]:
    """A small engine before wild drafts."""
    bench = EngineBench(
        needs=needs,
        max_tree_nodes=rng.choice((3, 7)),
        max_num_batched_tokens=rng.choice((5, 12, 64)),
        num_blocks=rng.choice((12, 17, 40)),
        block_size=rng.choice((1, 3, 4)),
    )
    wild = WildDrafts(rng, needs, events=bench.drafts.poll())
    bench.drafts.send, bench.drafts.poll = wild.send, wild.poll
    return bench, wild


@pytest.mark.parametrize("needs", [DraftNeeds(taps=(FINAL_TAP,)), DraftNeeds(taps=(FINAL_TAP,), last_state_only=True)])
@pytest.mark.parametrize("seed", range(10))
def test_random_trees_change_no_token_and_states_are_always_the_tokens(seed: int, needs: DraftNeeds):
    """Small pools, chunks, prefixes in common, several choices of one prompt, cancellations."""
    rng = random.Random(seed)
    bench, wild = wild_bench(rng, needs)
    num_tokens_at_most = bench.runner.num_blocks * bench.runner.block_size
    prompts: dict[str, tuple[int, ...]] = {}
    tokens: dict[str, tuple[int, ...]] = {}
    lengths: dict[str, int] = {}
    while len(prompts) < 16 or bench.engine.has_work():
        if len(prompts) < 16 and rng.random() < 0.5:
            prompt = tuple(range(1, rng.randint(2, 9)))
            for _ in range(rng.choice((1, 1, 3))):
                name = str(len(prompts))
                lengths[name] = rng.randint(1, min(16, num_tokens_at_most - len(prompt)))
                request = make_request(name, prompt=prompt, max_tokens=lengths[name], draft_length=4)
                assert bench.engine.add(dataclasses.replace(request, group_id=str(prompt))) is None
                prompts[name] = prompt
        if bench.engine.requests and rng.random() < 0.02:
            name = rng.choice(sorted(bench.engine.requests))
            bench.engine.cancel(name)
            lengths[name] = len(tokens.get(name, ()))
        outputs = bench.step()
        bench.engine.check_integrity()
        if outputs is None:
            bench.now_s += bench.engine.idle_s() or 0.0
        for output in outputs or []:
            tokens[output.request_id] = tokens.get(output.request_id, ()) + output.token_ids
    for name, prompt in prompts.items():
        assert tokens.get(name, ()) == greedy_tokens(lengths[name], prompt)
    assert wild.num_trees > 10
    assert not wild.tokens


def test_the_wild_scenarios_preempt_move_and_share():
    """Or the property above would say little."""
    num_preemptions = num_moves = num_copies = num_resyncs = 0
    for seed in range(16):
        rng = random.Random(seed)
        bench, _ = wild_bench(rng, DraftNeeds())
        for index in range(8):
            request = make_request(str(index), prompt=range(1, 8), max_tokens=12 - bench.runner.block_size)
            request = dataclasses.replace(request, group_id="g", plan=SpeculationPlan(draft_length=4))
            bench.engine.add(request)
        bench.finish(2000)
        num_preemptions += bench.engine.scheduler.num_preemptions
        num_moves += sum(len(batch.move_sources) for batch in bench.runner.batches)
        num_copies += sum(len(batch.copy_sources) for batch in bench.runner.batches)
        num_resyncs += bench.engine.drafting.num_resyncs
    assert min(num_preemptions, num_moves, num_copies, num_resyncs) > 10


# --- what changes logits ---


def test_an_end_that_comes_before_min_tokens_is_no_token():
    bench = bench_before_draft(min_tokens=3, max_tokens=4, **EOS_2)
    bench.drafts.answer(EXPECTED[1:3])
    output = bench.step_one()
    assert output.token_ids == (EXPECTED[1], 0), "all others are equally unlikely: the lowest id"
    assert (output.finish_reason, output.num_accepted_tokens) == (None, 1)


def test_requests_with_and_without_processors_share_a_step():
    bench = EngineBench()
    bench.add("a", max_tokens=4, logit_bias=(LogitBias(token_id=7, bias=100.0),))
    bench.add("b", max_tokens=4)
    bench.add("c", max_tokens=4, frequency_penalty=2.0, logit_bias=(LogitBias(token_id=7, bias=21.0),))
    outputs = bench.finish()
    assert tokens_of(outputs["a"]) == (7,) * 4
    assert tokens_of(outputs["b"]) == EXPECTED[:4]
    unbiased = next_token([*PROMPT, *[7] * 6], 97)
    assert tokens_of(outputs["c"]) == (7,) * 4
    bench.add("c", max_tokens=7, frequency_penalty=2.0, logit_bias=(LogitBias(token_id=7, bias=21.0),))
    assert tokens_of(bench.finish()["c"]) == (*[7] * 6, unbiased), "21 - 6 * 2 < 10; counts begin anew with a request"
    bench.add("a", max_tokens=4)
    assert tokens_of(bench.finish()["a"]) == EXPECTED[:4], "nothing is left of an earlier request's processor"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"logit_bias": (LogitBias(token_id=97, bias=1.0),)}, "logit_bias"),
        ({"logit_bias": (LogitBias(token_id=-1, bias=1.0),)}, "logit_bias"),
        ({"min_tokens": 1, "stop_token_ids": tuple(range(97))}, "min_tokens"),
        ({"bad_words": ((5,), (3, 97))}, "bad_words"),
        ({"bad_words": tuple((3, id_) for id_ in range(97))}, "bad_words"),
        ({"min_tokens": 1, "stop_token_ids": tuple(range(96)), "bad_words": ((96,),)}, "bad_words"),
        ({"prompt": (1,) * 150_000, "prompt_logprobs": 20}, "prompt_logprobs"),
    ],
)
def test_what_cannot_be_done_with_logits_is_refused_by_name(options, named: str):
    bench = EngineBench()
    failure = bench.add(**options)
    assert failure.error.startswith(named)
    assert bench.add() is None, "its id is free"


# --- logprobs ---


def expected_logprob(context: list[int], token_id: int) -> float:
    """The fake target's: logit 10 for its next token, 0 for the others."""
    logits = torch.zeros(97)
    logits[next_token(context, 97)] = 10.0
    return torch.log_softmax(logits, dim=0)[token_id].item()


def test_logprobs_are_of_the_committed_tokens_only_and_before_any_processing():
    bench = bench_before_draft(logprobs=0, logit_bias=(LogitBias(token_id=EXPECTED[3], bias=-50.0),))
    bench.drafts.answer(EXPECTED[1:5])
    output = bench.step_one()
    assert output.token_ids == (*EXPECTED[1:3], 0)
    assert [entry.token_id for entry in output.logprobs] == list(output.token_ids)
    contexts = [[*PROMPT, *EXPECTED[:length]] for length in (1, 2, 3)]
    expected = [expected_logprob(*pair) for pair in zip(contexts, output.token_ids, strict=True)]
    assert [entry.logprob for entry in output.logprobs] == pytest.approx(expected)
    assert [entry.rank for entry in output.logprobs] == [1, 1, 2]
    assert output.prompt_logprobs is None


def test_prompt_logprobs_of_a_prompt_preempted_half_way_are_not_doubled():
    bench = EngineBench(num_blocks=7, max_num_batched_tokens=5)
    for name in ("a", "b", "c"):
        bench.add(name, prompt=(1, 2, ord(name) - 90), max_tokens=8)
    prompt = tuple(range(20, 32))
    bench.add("long", prompt=prompt, max_tokens=2, prompt_logprobs=0)
    outputs: dict[str, list] = {}
    num_preemptions = 0
    while bench.engine.has_work():
        if "long" not in outputs:
            num_preemptions = bench.engine.requests["long"].num_preemptions
        for output in bench.step():
            outputs.setdefault(output.request_id, []).append(output)
    assert num_preemptions > 0, "before its first token"
    first, *later = outputs["long"]
    assert first.prompt_logprobs[0] is None
    assert [entry.token_id for entry in first.prompt_logprobs[1:]] == list(prompt[1:])
    expected = [expected_logprob(list(prompt[:length]), prompt[length]) for length in range(1, len(prompt))]
    assert [entry.logprob for entry in first.prompt_logprobs[1:]] == pytest.approx(expected)
    assert all(output.prompt_logprobs is None for output in later)


def test_nothing_is_left_of_the_prompt_logprobs_of_a_cancelled_request():
    bench = EngineBench(max_num_batched_tokens=2)
    bench.add(prompt_logprobs=0)
    assert bench.step() == []
    bench.engine.cancel("a")
    bench.add(max_tokens=1)
    assert bench.finish()["a"][-1].prompt_logprobs is None


# --- what a step says of itself ---


def test_a_traced_request_hears_when_its_step_and_its_draft_were():
    """By the wall clock, which is here 1000 s ahead of the engine's own."""
    bench = EngineBench()
    bench.now_s = 5.0
    execute = bench.runner.execute

    def slow(batch, chosen):
        bench.now_s += 0.25
        return execute(batch, chosen)

    bench.runner.execute = slow
    request = dataclasses.replace(make_request(draft_length=4), trace_parent="00-1-2-01")
    assert bench.engine.add(request) is None
    timing = bench.step_one().timing
    assert (timing.began_s, timing.ended_s) == (1005.0, 1005.25)
    assert (timing.num_scheduled_tokens, timing.drafter_id, timing.draft_asked_s) == (len(PROMPT), None, None)
    bench.drafts.answer(EXPECTED[1:3])
    bench.now_s += 0.5
    bench.add("b")
    timing = next(output for output in bench.step() if output.request_id == "a").timing
    assert (timing.began_s, timing.ended_s) == (1005.75, 1006.0)
    assert timing.num_scheduled_tokens == 3 + len(PROMPT), "of the whole step"
    assert (timing.drafter_id, timing.draft_asked_s, timing.draft_received_s) == ("d", 1005.25, 1005.75)
    bench.now_s += bench.engine.idle_s()
    timing = next(output for output in bench.step() if output.request_id == "a").timing
    assert timing.drafter_id is None, "no draft was verified"


def test_a_request_that_is_not_traced_hears_nothing():
    bench = EngineBench()
    bench.add(max_tokens=1)
    assert bench.step_one().timing is None


def test_a_step_times_itself_and_counts_its_tokens():
    bench = EngineBench()
    execute = bench.runner.execute

    def slow(batch, chosen):
        bench.now_s += 0.25
        return execute(batch, chosen)

    bench.runner.execute = slow
    bench.add(max_tokens=3, draft_length=4)
    bench.step()
    bench.drafts.answer(EXPECTED[1:2])
    bench.step()
    stats = bench.engine.stats
    assert stats.num_steps == 2
    assert stats.num_scheduled_tokens == len(PROMPT) + 2
    assert stats.num_committed_tokens == 3
    assert stats.busy_s == pytest.approx(0.5)


def test_steps_that_run_nothing_are_not_counted():
    bench = bench_before_draft()
    bench.step()
    assert bench.engine.stats.num_steps == 1
