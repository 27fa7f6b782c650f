"""Rounds drafted twice: scores, spare time, pairs of versions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from outrider.drafter_service.engine.drafter import Ask, SessionKey
from outrider.drafter_service.engine.learning_messages import SetLearning, TrialCounts
from outrider.drafter_service.observing.engine_learning import EngineLearning
from outrider.drafter_service.observing.shadow import MAX_WAITING_ROUNDS, Shadow, score
from outrider.drafter_service.observing.stable_share import is_in_share
from outrider.verifier_service.messages.draft import (
    DRAFT_PROB_SCALE,
    ROOT,
    Close,
    Draft,
    DraftNeeds,
    DraftSampling,
    SparseRow,
)
from tiny.scripted_drafter import PEER, ScriptedDrafter, commit, counting, open_, say, scripted_engine

PROMPT = (1, 2, 3)
TRIAL = SetLearning(call_id="s", shadow_folder="/f", shadow_version="v1", shadow_share=1.0)


def wrong(ask: Ask) -> Draft:
    return ask.answer((99,) * ask.length)


def half(ask: Ask) -> Draft:
    """Draft two right tokens and then wrong ones."""
    draft = counting(ask)
    return replace(draft, token_ids=draft.token_ids[:2] + (99,) * (len(draft.token_ids) - 2))


class Trial:
    """An engine with a drafter in the shadow."""

    def __init__(
        self,
        shadow: Callable[[Ask], Draft] = half,
        serving: Callable[[Ask], Draft] = counting,
        needs: DraftNeeds = DraftNeeds(),
    ) -> None:
        self.shadow = ScriptedDrafter(shadow, needs=needs, max_model_len=30)
        self.engine = scripted_engine(ScriptedDrafter(serving, needs=needs))
        self.built: list[str] = []
        self.learning = EngineLearning(self.engine, self.build)
        self.learning.set(TRIAL)

    def build(self, folder: str) -> ScriptedDrafter:
        self.built.append(folder)
        return self.shadow

    def say(self, *messages: object) -> None:
        say(self.engine, *messages)

    def rest(self) -> int:
        """Let the shadow draft all that waits; return how many rounds it was asked for."""
        num_before = len(self.shadow.asks)
        while self.learning.has_work():
            self.learning.draft_in_shadow()
        return len(self.shadow.asks) - num_before

    @property
    def counts(self) -> TrialCounts:
        trial = self.learning.report().trial
        assert trial is not None
        return trial


def trial_counts(num_rounds: int, serving: float, shadow: float, squared: float) -> TrialCounts:
    return TrialCounts(
        serving="v0",
        shadow="v1",
        num_rounds=num_rounds,
        serving_score=serving,
        shadow_score=shadow,
        squared_difference=squared,
    )


# --- scores ---


def test_point_masses_score_the_tokens_that_they_name():
    draft = Draft(request_id="r", round_id=1, position=0, token_ids=(1, 2, 3))
    assert score(draft, (1, 2, 9, 9)) == 2
    tree = replace(draft, token_ids=(7, 1, 2), parents=(ROOT, ROOT, 1))
    assert score(tree, (1, 2)) == 2


def test_drawn_drafts_score_the_probability_of_the_first_token_that_came():
    rows = (SparseRow(token_ids=(5, 6), weights=(3 * DRAFT_PROB_SCALE // 4, DRAFT_PROB_SCALE // 4)),) * 2
    drawn = Draft(request_id="r", round_id=1, position=0, token_ids=(6, 5), draft_probs=rows)
    assert [score(drawn, text) for text in ((5, 5), (6, 5), (7, 5))] == [0.75, 0.25, 0.0]
    tree = replace(drawn, token_ids=(6, 5, 5), parents=(ROOT, 0, ROOT))
    assert score(tree, (5,)) == 0.75, "the root's row is that of the first child"


# --- rounds ---


def test_both_drafts_of_a_round_are_judged_by_the_same_text():
    trial = Trial()
    trial.say(open_("r", PROMPT), commit("r", 3))
    assert trial.rest() == 1
    trial.say(commit("r", 3, (4, 5, 6), max_length=0))
    assert trial.counts == trial_counts(0, 0, 0, 0), "the fourth token has not come"
    trial.say(commit("r", 6, (9,), max_length=0))
    assert trial.counts == trial_counts(1, 3, 2, 1)
    trial.say(commit("r", 7), commit("r", 7))
    trial.rest()
    trial.say(commit("r", 7, (10,), max_length=0), Close(request_id="r"))
    assert trial.counts == trial_counts(2, 4, 3, 1), "the end of the session cuts the text of both"


def test_text_may_come_before_the_shadow_has_drafted():
    trial = Trial()
    trial.say(open_("r", PROMPT), commit("r", 3), commit("r", 3, (4, 5, 6, 7), max_length=0))
    trial.say(open_("q", PROMPT), commit("q", 3))
    trial.say(commit("q", 3, (4, 5, 6, 7)))
    assert trial.counts.num_rounds == 0
    assert trial.rest() == 2, "one that was superseded was not answered"
    assert trial.counts == trial_counts(1, 4, 2, 4)


def test_a_session_that_ends_takes_its_waiting_rounds_along():
    trial = Trial()
    trial.say(open_("r", PROMPT), commit("r", 3))
    trial.say(commit("r", 3, (4, 5, 6, 7), max_length=0), Close(request_id="r"))
    assert trial.rest() == 0
    assert trial.counts.num_rounds == 0
    assert SessionKey(PEER, "r") in trial.shadow.released


def test_what_the_shadow_is_asked_is_a_snapshot():
    states = torch.zeros(2, 1)
    trial = Trial(needs=DraftNeeds(taps=(0,)))
    trial.say(open_("r", PROMPT, cache_salt="salt", sampling=DraftSampling(temperature=0.5)), commit("r", 3))
    session = next(iter(trial.engine._sessions))
    session.token_ids += [7, 8]
    session.states._states = states
    trial.learning.draft_in_shadow()
    (ask,) = trial.shadow.asks
    assert (ask.token_ids, ask.states, ask.length) == (PROMPT, None, 4)
    assert (ask.cache_salt, ask.sampling) == ("salt", DraftSampling(temperature=0.5))


def test_the_oldest_of_many_rounds_is_dropped_and_one_session_is_asked_for_one_round_at_once():
    trial = Trial()
    names = [str(index) for index in range(MAX_WAITING_ROUNDS - 1)]
    for name in names:
        trial.say(open_(name, PROMPT), commit(name, 3))
    trial.say(commit("0", 3, (4,)), commit("1", 3, (4,)))
    assert trial.learning.has_work()
    trial.learning.draft_in_shadow()
    asked = [(ask.key.request_id, len(ask.token_ids)) for ask in trial.shadow.asks]
    assert asked == [*((name, 3) for name in names[1:]), ("0", 4)], "the oldest of 0 is gone, 1's newer one waits"
    trial.learning.draft_in_shadow()
    assert [(ask.key.request_id, len(ask.token_ids)) for ask in trial.shadow.asks[len(asked) :]] == [("1", 4)]
    assert not trial.learning.has_work()


def test_a_shorter_answer_is_followed_by_a_draft_as_short():
    trial = Trial(counting, serving=lambda ask: replace(counting(ask), token_ids=counting(ask).token_ids[:2]))
    trial.say(open_("r", PROMPT), commit("r", 3))
    trial.rest()
    assert [ask.length for ask in trial.shadow.asks] == [2]
    trial.say(commit("r", 3, (4, 5, 6, 7), max_length=0))
    assert trial.counts == trial_counts(1, 2, 2, 0)


def test_rounds_that_cannot_be_compared_are_not_drafted_twice():
    trial = Trial(serving=lambda ask: ask.answer())
    trial.say(open_("r", PROMPT), commit("r", 3))
    assert trial.rest() == 0, "an empty answer"
    trial = Trial()
    trial.say(open_("r", (1,) * 27), commit("r", 27), open_("q", (1,) * 28), commit("q", 28))
    trial.rest()
    assert [len(ask.token_ids) for ask in trial.shadow.asks] == [27], "beyond the context of the shadow"
    ask = trial.shadow.asks[0]
    for taps, is_drafted in (((), True), ((1,), False)):
        drafter = ScriptedDrafter(needs=DraftNeeds(taps=taps))
        shadow = Shadow(drafter, serving="v0", version="v1", share=1.0)
        assert (shadow.observe(ask, counting(ask), was_ahead=True) is not None) == is_drafted
        assert shadow.observe(ask, counting(ask), was_ahead=False) is not None


def test_a_share_of_the_sessions_is_drafted_twice():
    trial = Trial()
    trial.learning.set(replace(TRIAL, shadow_share=0.3))
    names = [f"request {index}" for index in range(40)]
    for name in names:
        trial.say(open_(name, PROMPT), commit(name, 3))
        trial.rest()
        trial.say(Close(request_id=name))
    drafted = [ask.key.request_id for ask in trial.shadow.asks]
    assert drafted == [name for name in names if is_in_share(name, 0.3, purpose="shadow")]
    assert trial.built == ["/f"], "another share is no other shadow"


def test_only_spare_time_is_spent():
    trial = Trial()
    trial.say(open_("r", PROMPT), commit("r", 3))
    assert trial.learning.has_work()
    trial.engine.handle(PEER, commit("r", 3, (4,)))
    assert not trial.learning.has_work(), "a draft is asked for"


# --- versions ---


def test_another_serving_version_begins_another_trial():
    trial = Trial()
    trial.say(open_("r", PROMPT), commit("r", 3))
    trial.rest()
    trial.say(open_("q", PROMPT), commit("q", 3))
    trial.engine.take_version("v2")
    assert trial.counts == TrialCounts(serving="v2", shadow="v1")
    trial.say(commit("r", 3, (4, 5, 6, 7), max_length=0), commit("q", 3, (4, 5, 6, 7), max_length=0))
    assert trial.rest() == 0
    assert trial.counts.num_rounds == 0, "the rounds of the pair before"
    trial.say(commit("r", 7))
    trial.rest()
    trial.say(commit("r", 7, (8, 9, 10, 11), max_length=0))
    assert (trial.counts.num_rounds, trial.counts.serving) == (1, "v2")


def test_a_shadow_that_comes_to_serve_ends_as_shadow():
    trial = Trial()
    trial.engine.take_version("v1")
    assert trial.learning.report().trial is None
    trial.learning.set(replace(TRIAL, shadow_folder="", shadow_version="v0"))
    assert trial.counts == TrialCounts(serving="v1", shadow="v0")
    assert trial.built == ["/f", ""], "without a folder: the checkpoint that the pool started with"


@pytest.mark.parametrize("change", [{"shadow_folder": "/g"}, {"shadow_version": "v2"}])
def test_another_shadow_begins_another_trial(change: dict[str, str]):
    trial = Trial()
    trial.learning.set(replace(TRIAL, **change))
    assert len(trial.built) == 2
    assert (trial.counts.shadow, trial.counts.num_rounds) == (change.get("shadow_version", "v1"), 0)
