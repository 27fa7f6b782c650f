"""Our speculator in a played V2 runner of vLLM: what is verified, what it costs, and that no token changes."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fakes.hosted.engine import MAX_MODEL_LEN, NEVER, VOCAB_SIZE, Clock, continued, messages_of
from fakes.hosted.v2_runner import BLOCK_SIZE, HIDDEN_SIZE, OwnSpeculator, V2Runner
from fakes.hosted.v2_scheduler import VERSION, V2Engine
from outrider.cluster.hosted.vllm_scheduled import ScheduledRequests
from outrider.cluster.hosted.vllm_settings import CAP_KEY, UntriedVersionError
from outrider.cluster.hosted.vllm_speculator import PoolSpeculator, attach
from outrider.verifier_service.messages.draft import Close
from outrider.verifier_service.messages.request import Request, SamplingParams, SpeculationPlan

PROMPT = (3, 1, 4, 1, 5, 9)
K = 4


def engine(*drafter_ids: str, **options: Any) -> V2Engine:
    play = V2Engine(num_speculative_tokens=K, **options)
    play.pool.come_up(*(drafter_ids or ("one",)))
    return play


def num_drafted(scheduled: Any) -> dict[str, int]:
    return {request_id: len(draft) for request_id, draft in scheduled.scheduled_spec_decode_tokens.items()}


def check_books(play: V2Engine) -> None:
    """Hold our counts against the runner's own."""
    stats = play.plugin.drafting.stats
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (play.runner.num_verified, play.runner.num_accepted)


# Tokens.


def test_drafts_that_are_right_are_all_accepted_and_save_steps():
    play = engine()
    play.add(prompt=PROMPT, max_tokens=40)
    num_steps = play.run()
    assert play.scheduler.outputs["a"] == [*PROMPT, *continued(PROMPT, 40)]
    assert num_steps < 40 / 3
    assert 0 < play.runner.num_accepted == play.runner.num_verified
    check_books(play)


@pytest.mark.parametrize(
    ("is_right", "share"),
    [(lambda position: False, 0.0), (lambda position: position % 3 != 0, None), (lambda position: position < 30, None)],
    ids=["wrong", "partly", "at first"],
)
def test_drafts_that_are_wrong_cost_verifications_and_no_token(is_right: Any, share: float | None):
    play = engine()
    play.pool.is_right = is_right
    for name in "abc":
        play.add(name, prompt=[*PROMPT, ord(name)], max_tokens=60)
    play.run()
    for name in "abc":
        assert play.scheduler.outputs[name] == [*PROMPT, ord(name), *continued([*PROMPT, ord(name)], 60)]
    assert play.runner.num_verified > play.runner.num_accepted
    assert share is None or play.runner.num_accepted == share * play.runner.num_verified
    check_books(play)


def test_a_step_has_each_requests_own_length_and_nothing_of_who_has_no_draft():
    play = engine()
    play.add("all", prompt=PROMPT)
    play.add("two", prompt=[*PROMPT, 7], extra_args={CAP_KEY: 2})
    play.add("none", prompt=[*PROMPT, 8], extra_args={CAP_KEY: 0})
    play.add("seeded", prompt=[*PROMPT, 9], temperature=0.8, seed=5)
    play.add("greedy with a seed", prompt=[*PROMPT, 10], seed=5)
    steps = [play.step() for _ in range(6)]
    assert num_drafted(steps[0]) == {}
    assert num_drafted(steps[-1]) == {"all": 4, "two": 2, "greedy with a seed": 4}
    assert steps[-1].total_num_scheduled_tokens == 5 + 3 + 1 + 1 + 5
    play.run()
    check_books(play)


def test_a_prompt_in_parts_is_not_drafted_for_before_it_is_read():
    play = engine()
    play.scheduler.chunk = 4
    play.add("long", prompt=[*PROMPT, *PROMPT], max_tokens=20)
    play.add("short", prompt=(2, 7), max_tokens=20)
    steps = [play.step() for _ in range(3)]
    assert [one.num_scheduled_tokens["long"] for one in steps] == [4, 4, 4]
    assert all("long" not in num_drafted(one) for one in steps)
    assert num_drafted(steps[2])["short"] == K
    assert num_drafted(play.step())["long"] == K
    play.run()
    assert play.scheduler.outputs["long"] == [*PROMPT, *PROMPT, *continued([*PROMPT, *PROMPT], 20)]
    check_books(play)


def test_a_preempted_request_resumes_with_what_it_had():
    play = engine()
    play.add("a", prompt=PROMPT, max_tokens=50)
    play.add("b", prompt=[*PROMPT, 2], max_tokens=50)
    for _ in range(4):
        play.step()
    sessions = dict(play.pool.sessions)
    play.scheduler.preempt("a")
    play.step(only=("b",))
    assert "a" in play.requests.ids(), "it is vLLM's still"
    assert play.pool.sessions.keys() == sessions.keys(), "and its session is kept"
    resumed = play.step()
    assert num_drafted(resumed) == {"b": K}, "its draft went with its KV"
    assert num_drafted(play.step())["a"] == K
    play.run()
    assert play.scheduler.outputs["a"] == [*PROMPT, *continued(PROMPT, 50)]
    check_books(play)


def test_less_of_a_draft_is_verified_where_vllm_says_so():
    """vLLM's dynamic K: what lies beyond it in the tensor is -1."""
    play = engine()
    play.scheduler.num_spec_tokens = 2
    play.add(prompt=PROMPT, max_tokens=30)
    steps = [play.step() for _ in range(5)]
    assert max(num_drafted(one).get("a", 0) for one in steps) == 2
    play.run()
    assert play.scheduler.outputs["a"] == [*PROMPT, *continued(PROMPT, 30)]
    check_books(play)


def test_a_request_that_fills_its_context_ends_there():
    play = engine()
    play.add(prompt=PROMPT, max_tokens=MAX_MODEL_LEN)
    play.run()
    assert play.scheduler.outputs["a"] == [*PROMPT, *continued(PROMPT, MAX_MODEL_LEN - len(PROMPT))]
    check_books(play)


# Failures.


@pytest.mark.parametrize("is_known", [True, False], ids=["in mid-stream", "from the start"])
def test_without_a_drafter_nothing_is_verified_and_no_token_changes(is_known: bool):
    play = V2Engine(num_speculative_tokens=K)
    if is_known:
        play.pool.come_up("one")
    play.add(prompt=PROMPT, max_tokens=30)
    play.step()
    play.step()
    if is_known:
        play.pool.go_away("one")
    play.step()  # with the draft that was there
    assert num_drafted(play.step()) == {}
    play.run()
    assert play.scheduler.outputs["a"] == [*PROMPT, *continued(PROMPT, 30)]
    check_books(play)


def test_a_drafter_that_is_late_is_no_draft():
    play = engine()
    play.add(prompt=PROMPT, max_tokens=30)
    play.step()
    play.pool.answer_s = NEVER
    play.step()
    play.step()
    assert num_drafted(play.step()) == {}
    play.run()
    assert play.scheduler.outputs["a"] == [*PROMPT, *continued(PROMPT, 30)]
    check_books(play)


def test_a_lost_mirror_is_read_from_the_runners_books():
    """The plug-in begins again after a failure of its own: it then asks for all of a text, from the device."""
    play = engine()
    play.add(prompt=PROMPT, max_tokens=40)
    for _ in range(4):
        play.step()
    play.plugin.drafting._close(["a"])
    play.pool.take()
    play.step()
    (opened,) = [message for message in play.pool.take() if hasattr(message, "token_ids") and message.token_ids[:6]]
    assert list(opened.token_ids[: len(PROMPT)]) == list(PROMPT)
    play.run()
    assert play.scheduler.outputs["a"] == [*PROMPT, *continued(PROMPT, 40)]
    assert play.runner.num_accepted == play.runner.num_verified, "what it was told is what there is"


# Requests that leave.


def test_sessions_close_when_requests_end_and_when_they_are_aborted():
    play = engine()
    play.add("ends", prompt=PROMPT, max_tokens=4)
    play.add("aborted", prompt=[*PROMPT, 2])
    play.add("stays", prompt=[*PROMPT, 3])
    for _ in range(4):
        play.step()
    play.scheduler.abort("aborted")
    play.step()
    closed = messages_of(play.pool.take(), Close)
    assert {message.request_id for message in closed} == {"ends", "aborted"}
    assert play.requests.ids() == ["stays"]


def test_who_left_in_a_step_without_tokens_is_told_with_the_next():
    play = engine()
    play.add("a", prompt=PROMPT, max_tokens=4)
    play.run()
    assert play.step().total_num_scheduled_tokens == 0
    assert play.requests.ids() == []
    play.add("b", prompt=PROMPT)
    play.step()
    assert play.plugin.told[-1][1] == {"a"}


def test_an_id_that_comes_again_is_another_request():
    play = engine()
    play.add("a", prompt=PROMPT, max_tokens=30)
    play.step()
    play.step()
    play.scheduler.abort("a")
    play.add("a", prompt=(8, 8, 8), max_tokens=10, extra_args={CAP_KEY: 1})
    play.step()
    play.step()
    assert num_drafted(play.step()) == {"a": 1}
    play.run()
    assert play.scheduler.outputs["a"] == [8, 8, 8, *continued([8, 8, 8], 10)]


# What is no step of ours.


def test_a_dummy_run_asks_nobody_and_touches_no_books():
    play = engine()
    play.add(prompt=PROMPT)
    play.step()
    scheduled = SimpleNamespace(
        total_num_scheduled_tokens=3, num_scheduled_tokens={"_dummy_": 3}, scheduled_spec_decode_tokens={}
    )
    play.runner.execute_model(scheduled, dummy_run=True)  # nothing else is in it: ours would stumble over that
    batch = SimpleNamespace(req_ids=["_dummy_"], num_reqs=1)
    drafts = play.speculator.propose(
        *(batch, {}, {}, torch.zeros(3, 2), None, torch.ones(1, dtype=torch.int32), torch.zeros(1)),
        *(None, None, None, None),
        dummy_run=True,
    )
    assert drafts.tolist() == [[0] * K]
    assert len(play.plugin.told) == 1


def test_while_vllm_warms_up_no_drafter_is_asked():
    play = engine()
    with play.speculator.resting():
        play.add("_warmup_0_", prompt=PROMPT, max_tokens=4)
        play.run()
        play.step()
    assert not play.plugin.told
    assert not play.pool.sent
    play.add(prompt=PROMPT)
    play.step()
    play.step()
    assert num_drafted(play.step()) == {"a": K}


def test_a_grammar_is_shown_the_draft_and_no_filling():
    play = engine()
    play.add("a", prompt=PROMPT, extra_args={CAP_KEY: 2})
    play.add("b", prompt=PROMPT, extra_args={CAP_KEY: 0})
    for _ in range(3):
        play.step()
    scheduled = play.scheduler.schedule()
    scheduled.has_structured_output_requests = True
    play.runner.execute_model(scheduled)
    sampled = play.runner.sample_tokens(None)
    shown = play.runner.take_draft_token_ids()
    text = [*play.scheduler.requests["a"].token_ids, *sampled["a"]]
    assert dict(zip(shown.req_ids, shown.draft_token_ids, strict=True)) == {"a": continued(text, 2), "b": []}


# Hidden states.


def states_of(play: V2Engine, request_id: str, stop: int) -> torch.Tensor:
    """Return the kept states [stop, taps * HIDDEN_SIZE] of a request."""
    assert play.states is not None
    request = Request(
        request_id=request_id,
        sampling=SamplingParams(),
        token_ids=[0] * stop,
        num_prompt_tokens=1,
        plan=SpeculationPlan(),
        arrival_s=0.0,
        block_table=play.requests[request_id].blocks,
    )
    data = b"".join(bytes(message.data) for message in play.states.messages(request, 0, stop))
    return torch.frombuffer(bytearray(data), dtype=torch.float32).view(stop, -1)


def test_states_are_those_of_every_committed_token_whatever_was_rejected():
    play = engine(state_taps=(5, -1, 2))
    assert play.runner.model.layers == (2, 5)
    play.pool.is_right = lambda position: position % 4 != 0
    play.scheduler.chunk = BLOCK_SIZE + 1
    play.add("a", prompt=[*PROMPT, *PROMPT])
    play.add("b", prompt=PROMPT)
    for _ in range(8):
        play.step()
    for request_id in "ab":
        stop = len(play.scheduler.requests[request_id].token_ids) - 1
        index = play.runner.req_states.req_id_to_index[request_id]
        found = states_of(play, request_id, stop).view(stop, 3, HIDDEN_SIZE)
        hidden = torch.tensor([[index, position] for position in range(stop)], dtype=torch.float32)
        torch.testing.assert_close(found, torch.stack([hidden + 5000, hidden, hidden + 2000], dim=1))


def test_a_cache_in_several_groups_is_refused_by_name():
    play = engine(state_taps=(-1,), num_kv_cache_groups=2)
    play.add(prompt=PROMPT)
    with pytest.raises(ValueError, match="state_taps: vLLM keeps this model's KV in several groups"):
        play.step()


def test_without_taps_the_model_gives_out_nothing_besides():
    play = engine(state_taps=(-1,))
    assert (play.runner.use_aux_hidden_state_outputs, play.runner.model.layers) == (False, ())


def test_a_model_that_cannot_give_out_its_layers_is_refused_when_it_is_loaded():
    with pytest.raises(ValueError, match="state_taps: vLLM's object does not give out"):
        engine(state_taps=(2,), model=object())


# What is attached, and to what.


class Taught(V2Runner):
    def take_draft_token_ids(self, request_ids: Any = None) -> Any:
        return super().take_draft_token_ids()


class Grown(V2Runner):
    def execute_model(self, scheduler_output: Any, dummy_run: bool = False) -> None:  # type: ignore[override]
        super().execute_model(scheduler_output, None, dummy_run)


@pytest.mark.parametrize(
    ("runner_type", "version", "said"),
    [
        (V2Runner, "0.33.0", "tried with 0.32.x alone"),
        (V2Runner, "0.320.1", "tried with 0.32.x alone"),
        (Taught, VERSION, "take_draft_token_ids takes"),
        (Grown, VERSION, "execute_model takes"),
        (OwnSpeculator, VERSION, "OwnSpeculator has no execute_model"),
    ],
)
def test_what_was_not_tried_is_refused_and_not_touched(runner_type: type, version: str, said: str):
    runner = runner_type(Clock()) if issubclass(runner_type, V2Runner) else runner_type()
    before = dict(vars(runner))
    speculator = PoolSpeculator(
        runner, SimpleNamespace(), ScheduledRequests(), num_speculative_tokens=K, draft_seeded=False
    )
    with pytest.raises(UntriedVersionError, match=said):
        attach(runner, speculator, version, ())
    assert vars(runner) == before


def test_what_is_gone_through_is_passed_on_as_it_was():
    play = engine()
    play.runner.load_model(True, "more", model="given", other=1)
    assert play.runner.loaded == (True, ("more",), "given", {"other": 1})
    assert V2Engine().runner.take_draft_token_ids() is None


# Many at once.


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_greedy_tokens_are_the_targets_own(seed: int):
    rng = random.Random(seed)
    play = engine("one", "two")
    play.pool.is_right = lambda position: position * 7 % 5 != 0
    prompts = {f"r{number}": [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 20))] for number in range(12)}
    waiting, aborted = list(prompts), set()
    play.scheduler.chunk = 7
    while waiting or play.scheduler.requests:
        if waiting and len(play.scheduler.requests) < 6:
            name = waiting.pop()
            cap = rng.choice([None, 0, 1, 3])
            play.add(name, prompts[name], max_tokens=rng.randrange(1, 40), extra_args={CAP_KEY: cap})
        running = list(play.scheduler.requests)
        match rng.randrange(12):
            case 0 if running:
                play.scheduler.preempt(rng.choice(running))
            case 1 if len(running) > 2:
                aborted.add(name := rng.choice(running))
                play.scheduler.abort(name)
            case 2:
                play.pool.go_away("two")
            case 3:
                play.pool.come_up("two")
            case 4 if running:
                play.pool.forget(rng.choice(running))
        some = [name for name in play.scheduler.requests if rng.random() < 0.8]
        play.step(only=some)
    play.step()
    for name, prompt in prompts.items():
        if name not in aborted:
            text = play.scheduler.outputs[name]
            assert text == [*prompt, *continued(prompt, len(text) - len(prompt))]
    assert play.runner.num_accepted > 0
    assert play.requests.ids() == []
    check_books(play)
