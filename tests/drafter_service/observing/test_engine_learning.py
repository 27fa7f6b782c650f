"""What learning leaves behind, what it changes of answers (nothing), and shadows that fail."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from fakes.runner import FakeRunner
from outrider.drafter_service.engine.drafter import Ask, DraftEngineConfig, Drafter, SessionKey
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.engine.learning_messages import ServedSample, SetLearning
from outrider.drafter_service.learning import messages as learner_messages
from outrider.drafter_service.observing import engine_learning
from outrider.drafter_service.observing.engine_learning import EngineLearning
from outrider.verifier_service.messages.draft import (
    Close,
    Draft,
    DraftNeeds,
    DraftSampling,
    States,
)
from tiny.drafters import model_drafter
from tiny.scripted_drafter import ScriptedDrafter, commit, open_, say, scripted_engine

PROMPT, NEW = (1, 2, 3), (40, 41, 42, 43, 44)
BOTH = SetLearning(
    call_id="s", sample_share=1.0, shadow_folder="/f", shadow_version="v1", shadow_share=1.0, max_sample_tokens=100
)
SECRET = (71, 72, 73, 74, 75, 76)
SECRET_STATE = 123.5


def test_the_first_version_is_called_as_the_learner_calls_it():
    assert learner_messages.FIRST_VERSION.name == engine_learning.FIRST_VERSION


# --- privacy ---


def reachable(*roots: object) -> Iterator[object]:
    """Walk all that objects of ours hold; code and modules, which hold everything, are left out."""
    seen: set[int] = set()
    waiting = list(roots)
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, types.ModuleType | type | types.FunctionType | types.CodeType):
            continue
        seen.add(id(each))
        yield each
        waiting += gc.get_referents(each)


def traces(*roots: object) -> list[object]:
    """Return the containers that hold secret tokens, and the tensors and bytes that hold secret states."""
    found: list[object] = []
    state = torch.tensor([SECRET_STATE]).bfloat16().view(torch.uint8).numpy().tobytes()
    for each in reachable(*roots):
        if isinstance(each, list | tuple | set | dict) and not {*SECRET}.isdisjoint(
            [item for item in each if isinstance(item, int)]
        ):
            found.append(each)
        if isinstance(each, torch.Tensor) and (each == SECRET_STATE).any():
            found.append(each)
        if isinstance(each, bytes) and state in each:
            found.append(each)
    return found


def secret_states(position: int) -> States:
    data = torch.full((len(SECRET), 1), SECRET_STATE).numpy().tobytes()
    return States(request_id="secret", position=position, dtype="float32", width=1, data=data)


class Forgetful(ScriptedDrafter):
    """A drafter that does not record what it is asked."""

    def draft(self, asks: Any, *, max_num_tokens: int) -> list[Draft]:
        return [ask.answer((1,) * ask.length) for ask in asks]


@pytest.mark.parametrize("is_drafted", [False, True])
@pytest.mark.parametrize("last_state_only", [False, True])
@pytest.mark.parametrize("may_learn", [False, True])
def test_what_opted_out_is_nowhere(may_learn: bool, last_state_only: bool, is_drafted: bool):
    needs = DraftNeeds(taps=(0,), last_state_only=last_state_only)
    engine = scripted_engine(Forgetful(needs=needs))
    learning = EngineLearning(engine, lambda folder: Forgetful(needs=needs))
    learning.set(BOTH)
    say(engine, open_("secret", SECRET[:2], may_learn=may_learn), secret_states(0))
    say(engine, commit("secret", 2, SECRET[2:]))
    assert traces(engine, learning), "or the walk finds nothing"
    if is_drafted:
        learning.draft_in_shadow()
    say(engine, Close(request_id="secret"))
    say(engine, open_("other", PROMPT))
    assert bool(traces(engine, learning)) == may_learn
    samples, _ = learning.take_samples()
    assert bool(traces(samples)) == may_learn
    del samples
    assert traces(engine, learning) == [], "and what was taken is not kept"


# --- answers ---


class Conversation:
    """A target that agrees with every second token, and an engine that drafts for it."""

    def __init__(self, num_ahead_branches: int, sampling: DraftSampling) -> None:
        rng = torch.Generator().manual_seed(3)
        self.runner = FakeRunner()
        drafter = model_drafter(self.runner, rng, num_ahead_branches=num_ahead_branches)
        ahead = drafter if num_ahead_branches else None
        self.engine = DraftEngine(drafter, clock=lambda: 0.0, config=DraftEngineConfig(), ahead=ahead, has_weights=True)
        self.learning = EngineLearning(self.engine, self.build)
        self.sampling = sampling
        self.shadow_runner: FakeRunner | None = None

    def build(self, folder: str) -> Drafter:
        self.shadow_runner = FakeRunner()
        return model_drafter(self.shadow_runner, torch.Generator().manual_seed(5))

    def play(self, num_rounds: int = 6) -> list[list[Draft]]:
        texts = {name: [4, 8, index] for index, name in enumerate(("a", "b"))}
        for name, text in texts.items():
            self.engine.handle("v", open_(name, text, sampling=self.sampling))
        said: list[list[Draft]] = []
        new: dict[str, tuple[int, ...]] = dict.fromkeys(texts, ())
        for round_id in range(num_rounds):
            for name, text in texts.items():
                self.engine.handle("v", commit(name, len(text) - len(new[name]), new[name], round_id=round_id))
            drafts: list[Draft] = []
            while self.engine.has_work():
                drafts += [message for _, message in self.engine.step()]  # type: ignore[misc]
            while self.engine.has_spare_work():
                self.engine.run_ahead()
            while self.learning.has_work():
                self.learning.draft_in_shadow()
            self.engine.check_integrity()
            said.append(sorted(drafts, key=lambda draft: draft.request_id))
            for draft in drafts:
                new[draft.request_id] = (*draft.token_ids[:2], (round_id * 7 + 5) % 97)
                texts[draft.request_id] += new[draft.request_id]
        return said


@pytest.mark.parametrize("num_ahead_branches", [0, 3])
@pytest.mark.parametrize("temperature", [0.0, 30.0])
def test_learning_changes_no_answer(num_ahead_branches: int, temperature: float):
    sampling = DraftSampling(temperature=temperature)
    wanted = Conversation(num_ahead_branches, sampling).play()
    assert len({draft.token_ids for drafts in wanted for draft in drafts}) > 6
    learning = Conversation(num_ahead_branches, sampling)
    learning.learning.set(BOTH)
    assert learning.play() == wanted
    assert learning.shadow_runner is not None
    assert learning.shadow_runner.batches, "the shadow has drafted"
    trial = learning.learning.report().trial
    assert trial is not None
    assert trial.num_rounds > 4
    if temperature:
        assert trial.serving_score == pytest.approx(trial.shadow_score), "the same laws, whatever was drawn"
    assert trial.squared_difference == pytest.approx(0.0)


def test_a_shadow_on_the_serving_generator_would_be_noticed():
    sampling = DraftSampling(temperature=30.0)
    wanted = Conversation(0, sampling).play()
    planted = Conversation(0, sampling)
    rng = planted.engine._drafter._forward._rules.rng  # type: ignore[attr-defined]
    planted.build = lambda folder: model_drafter(FakeRunner(), rng)  # type: ignore[method-assign]
    planted.learning = EngineLearning(planted.engine, planted.build)
    planted.learning.set(BOTH)
    assert planted.play() != wanted


# --- shadows that fail ---


def failing(ask: Ask) -> Draft:
    raise ArithmeticError("no such device")


def test_a_shadow_that_raises_is_dropped_and_the_report_says_why():
    engine = scripted_engine(ScriptedDrafter())
    learning = EngineLearning(engine, lambda folder: ScriptedDrafter(failing))
    learning.set(BOTH)
    say(engine, open_("r", PROMPT), commit("r", 3))
    learning.draft_in_shadow()
    report = learning.report()
    assert (report.trial, report.shadow_error) == (None, "ArithmeticError: no such device")
    assert len(say(engine, commit("r", 3, NEW))) == 1, "the engine goes on"
    assert learning.report().versions[0].num_rounds == 1
    assert not learning.has_work()
    learning.set(BOTH)
    assert learning.report().shadow_error == ""
    assert learning.report().trial is not None, "told again, it is built again"


def test_a_shadow_that_cannot_let_go_is_dropped():
    class Clinging(ScriptedDrafter):
        def release(self, key: SessionKey) -> None:
            raise KeyError(key)

    engine = scripted_engine(ScriptedDrafter())
    learning = EngineLearning(engine, lambda folder: Clinging())
    learning.set(BOTH)
    say(engine, open_("r", PROMPT))
    assert learning.report().trial is None
    assert "KeyError" in learning.report().shadow_error


def test_a_shadow_that_cannot_be_built_is_refused_and_there_is_none():
    engine = scripted_engine(ScriptedDrafter())

    def build(folder: str) -> Drafter:
        if folder == "/bad":
            raise FileNotFoundError("no config.json")
        return ScriptedDrafter()

    learning = EngineLearning(engine, build)
    learning.set(BOTH)
    with pytest.raises(ValueError, match=r"shadow v2: no config\.json"):
        learning.set(replace(BOTH, shadow_folder="/bad", shadow_version="v2"))
    assert learning.report().trial is None
    assert len(say(engine, open_("r", PROMPT), commit("r", 3, NEW))) == 1
    say(engine, Close(request_id="r"))
    assert len(learning.take_samples()[0]) == 1, "the rest of what was said holds"


@pytest.mark.parametrize("other", [{"vocab_size": 101}, {"needs": DraftNeeds(taps=(2,))}])
def test_a_shadow_of_another_vocabulary_or_that_reads_other_states_is_refused(other: dict[str, Any]):
    learning = EngineLearning(scripted_engine(ScriptedDrafter()), lambda folder: ScriptedDrafter(**other))
    with pytest.raises(ValueError, match="shadow v1: vocab_size and taps"):
        learning.set(BOTH)
    assert learning.report().trial is None


@pytest.mark.parametrize("ending", ["off", "another", "serves", "raises"])
def test_a_dropped_shadow_leaves_no_memory_behind(ending: str):
    engine = scripted_engine(ScriptedDrafter())
    built: list[weakref.ref[ScriptedDrafter]] = []

    def build(folder: str) -> Drafter:
        drafter = ScriptedDrafter(failing if ending == "raises" else ScriptedDrafter().guess)
        drafter.self = drafter  # type: ignore[attr-defined]  # as a module may
        built.append(weakref.ref(drafter))
        return drafter

    learning = EngineLearning(engine, build)
    learning.set(BOTH)
    say(engine, open_("r", PROMPT), commit("r", 3))
    match ending:
        case "off":
            learning.set(SetLearning(call_id="s"))
        case "another":
            learning.set(replace(BOTH, shadow_version="v2"))
        case "serves":
            engine.take_version("v1")
        case "raises":
            learning.draft_in_shadow()
    assert built[0]() is None


def test_texts_reach_a_drafter_that_takes_them_and_no_other():
    class Taking(ScriptedDrafter):
        taken: tuple[ServedSample, ...] = ()

        def take_texts(self, samples: tuple[ServedSample, ...]) -> None:
            self.taken += samples

    sample = ServedSample(request_id="r", token_ids=PROMPT, num_prompt_tokens=1)
    drafter = Taking()
    scripted_engine(drafter).take_texts((sample,))
    assert drafter.taken == (sample,)
    scripted_engine(ScriptedDrafter()).take_texts((sample,))
