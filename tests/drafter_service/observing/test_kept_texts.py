"""Samples of sessions that may be kept, and nothing of any other."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.engine.learning_messages import ServedSample, SetLearning
from outrider.drafter_service.engine.payloads import handle_payload
from outrider.drafter_service.observing import kept_texts
from outrider.drafter_service.observing.engine_learning import EngineLearning
from outrider.drafter_service.observing.stable_share import is_in_share
from outrider.verifier_service.messages.draft import (
    DRAFT_PROB_SCALE,
    Close,
    DraftNeeds,
    History,
    SparseRow,
    States,
)
from support.clock import Clock
from tiny.scripted_drafter import ScriptedDrafter, commit, open_, say, scripted_engine

PROMPT, NEW = (1, 2, 3), (40, 41, 42, 43, 44)
ALL = SetLearning(call_id="s", sample_share=1.0)
CLOSE = Close(request_id="r")


class Kept:
    """A draft engine whose samples are taken."""

    def __init__(self, needs: DraftNeeds = DraftNeeds(), set_: SetLearning | None = ALL, **limits: float) -> None:
        self.clock = Clock()
        self.engine: DraftEngine = scripted_engine(ScriptedDrafter(needs=needs), self.clock, **limits)
        self.learning = EngineLearning(self.engine, lambda folder: ScriptedDrafter())
        if set_ is not None:
            self.learning.set(set_)

    def say(self, *messages: object) -> None:
        say(self.engine, *messages)

    def samples(self) -> list[ServedSample]:
        return self.learning.take_samples()[0]

    def sample(self, *messages: object) -> ServedSample:
        self.say(*messages)
        (sample,) = self.samples()
        return sample


def states(position: int, *values: float, width: int = 1, dtype: str = "float32") -> States:
    data = struct.pack(f"<{len(values)}f", *values)
    return States(request_id="r", position=position, dtype=dtype, width=width, data=data)


def state_values(sample: ServedSample) -> list[list[float]]:
    flat = torch.frombuffer(bytearray(sample.states), dtype=torch.bfloat16).float()
    return flat.view(len(sample.state_positions), sample.state_width).tolist()


def row(*pairs: tuple[int, int]) -> SparseRow:
    return SparseRow(token_ids=tuple(each for each, _ in pairs), weights=tuple(each for _, each in pairs))


def test_a_closed_session_that_may_be_kept_is_a_sample():
    kept = Kept()
    sample = kept.sample(open_("r", PROMPT, cache_salt="s"), commit("r", 3), commit("r", 3, NEW), CLOSE)
    assert sample == ServedSample(request_id="r", token_ids=PROMPT + NEW, num_prompt_tokens=3, cache_salt="s")
    assert kept.samples() == [], "once"


def test_without_leave_or_learner_there_is_none():
    kept = Kept()
    kept.say(open_("r", PROMPT, may_learn=False), commit("r", 3, NEW), CLOSE)
    assert kept.samples() == []
    kept = Kept(set_=None)
    kept.say(open_("r", PROMPT), commit("r", 3, NEW), CLOSE)
    assert kept.samples() == []
    kept.learning.set(ALL)
    kept.say(open_("r", PROMPT), commit("r", 3, NEW))
    kept.learning.set(SetLearning(call_id="s"))
    kept.say(CLOSE)
    kept.learning.set(ALL)
    assert kept.samples() == [], "it was switched off meanwhile"


def test_only_a_verifier_that_is_done_leaves_a_sample():
    kept = Kept(max_sessions=1)
    begin = (open_("r", PROMPT), commit("r", 3, NEW))
    kept.say(*begin)
    kept.engine.forget_peer("v")
    kept.say(*begin)
    kept.clock.now_s += 11.0
    kept.say()
    assert kept.engine.counters.num_expired_sessions == 1
    kept.say(*begin, open_("other", PROMPT))
    assert kept.engine.counters.num_evicted_sessions == 1
    kept.say(*begin, commit("r", 99))  # a gap: it is resynced
    kept.say(*begin, commit("r", 8, (1 << 20,)), CLOSE)  # refused
    kept.say(open_("r", PROMPT), CLOSE)
    kept.say(open_("r", PROMPT), commit("r", 3, NEW[:3]), CLOSE)  # too short
    assert kept.samples() == []
    assert kept.sample(*begin, CLOSE).token_ids == PROMPT + NEW


def test_what_a_resync_brings_counts_as_prompt():
    kept = Kept()
    kept.say(open_("r", PROMPT), commit("r", 3, NEW))
    sample = kept.sample(open_("r", PROMPT + NEW), commit("r", 8, NEW), CLOSE)
    assert (sample.num_prompt_tokens, sample.token_ids) == (8, PROMPT + NEW + NEW)


def test_long_texts_are_cut():
    kept = Kept(DraftNeeds(taps=(0,)), replace(ALL, max_sample_tokens=8))
    kept.say(open_("r", PROMPT), states(0, *range(12)), commit("r", 3, NEW + NEW))
    sample = kept.sample(CLOSE)
    assert sample.token_ids == PROMPT + NEW
    assert sample.state_positions == tuple(range(8))
    kept.say(open_("r", NEW), commit("r", 5, NEW + NEW), CLOSE)
    assert kept.samples() == [], "of the text after the prompt too little is left"


def test_the_share_is_chosen_by_the_request_and_may_change():
    kept = Kept(set_=replace(ALL, sample_share=0.5))
    names = [f"request {index}" for index in range(40)]
    for name in names:
        kept.say(open_(name, PROMPT), commit(name, 3, NEW), Close(request_id=name))
    chosen = {name for name in names if is_in_share(name, 0.5, purpose="sample")}
    assert 10 < len(chosen) < 30
    assert {sample.request_id for sample in kept.samples()} == chosen
    for name in names:
        kept.say(open_(name, PROMPT), commit(name, 3, NEW))
        kept.learning.set(replace(ALL, sample_share=0.1))
        kept.say(Close(request_id=name))
        kept.learning.set(replace(ALL, sample_share=0.5))
    fewer = {name for name in names if is_in_share(name, 0.1, purpose="sample")}
    assert {sample.request_id for sample in kept.samples()} == fewer


# --- states ---


def test_states_come_as_bfloat16_and_those_that_are_missing_are_left_out():
    kept = Kept(DraftNeeds(taps=(0,)))
    nan, third = float("nan"), 1 / 3
    sample = kept.sample(
        open_("r", PROMPT), states(0, nan, nan, nan, nan, width=2), commit("r", 3), states(2, third, 7, 8, 9, width=2),
        *(commit("r", 3, NEW), CLOSE),
    )  # fmt: skip
    assert (sample.state_positions, sample.state_width) == ((2, 3), 2)
    assert state_values(sample) == [[float(torch.tensor(third).bfloat16()), 7.0], [8.0, 9.0]]


def test_all_states_missing_are_none():
    kept = Kept(DraftNeeds(taps=(0,)))
    sample = kept.sample(open_("r", PROMPT), states(0, float("nan")), commit("r", 3, NEW), CLOSE)
    assert (sample.state_positions, sample.state_width, sample.states) == ((), 0, b"")


def test_a_drafter_of_the_last_state_has_those_of_its_asks():
    kept = Kept(DraftNeeds(taps=(0,), last_state_only=True), replace(ALL, max_sample_tokens=9))
    nan = float("nan")
    kept.say(open_("r", PROMPT), states(1, 1.0), commit("r", 3), states(1, 1.5), commit("r", 3, NEW[:2]))
    kept.say(states(3, nan), commit("r", 5, NEW[2:3]), states(3, 3.0, 4.0), commit("r", 6, NEW[3:]))
    kept.say(states(8, 8.0), states(9, 9.0), states(-3, 1.0), states(50, 1.0), commit("r", 8, NEW))
    sample = kept.sample(CLOSE)
    assert (sample.state_positions, state_values(sample)) == ((1, 4, 8), [[1.0], [4.0], [8.0]])
    kept.say(open_("r", PROMPT), states(6, 1.0), commit("r", 3, NEW[:4]), CLOSE)
    assert kept.samples()[0].state_positions == (6,)
    kept.say(open_("r", PROMPT), states(7, 1.0), commit("r", 3, NEW[:4]), CLOSE)
    assert kept.samples()[0].state_positions == (), "of a token that never came"


def test_a_sample_too_large_for_a_frame_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch):
    kept = Kept(DraftNeeds(taps=(0,)))
    conversation = (open_("r", PROMPT), states(0, *range(8), width=2), commit("r", 3, NEW), CLOSE)
    size = kept.sample(*conversation).num_bytes
    assert size == 4 * (8 + 4) + 2 * 2 * 4
    for limit, num_dropped in ((size, 0), (size - 1, 1), (15, 1)):
        monkeypatch.setattr(kept_texts, "MAX_SAMPLE_BYTES", limit)
        kept.say(*conversation)
        assert [len(kept.samples()), num_dropped] == [1 - num_dropped, num_dropped]
        kept.say(*conversation)
        assert kept.learning.take_samples()[1] == num_dropped
        assert kept.learning.take_samples()[1] == 0


# --- rows ---

TOP = DraftNeeds(num_top=2)
ROWS = (row((40, 50_000), (7, 10_000), (8, 5_000)), row((41, DRAFT_PROB_SCALE)))


def topped() -> Kept:
    kept = Kept()
    kept.engine.needs = TOP
    kept.learning.set(SetLearning(call_id="s"))
    kept.learning.set(ALL)
    return kept


def test_rows_of_every_token_after_the_prompt_are_kept():
    more = tuple(row((each, 3), (1, 1)) for each in NEW[2:])
    sample = topped().sample(
        open_("r", PROMPT), commit("r", 3), commit("r", 3, NEW[:2], target_rows=ROWS), commit("r", 5),
        *(commit("r", 5, NEW[2:], target_rows=more), CLOSE),
    )  # fmt: skip
    assert sample.num_top == 2
    ids, weights = (np.frombuffer(each, "<i4").reshape(-1, 2).tolist() for each in (sample.top_ids, sample.top_weights))
    assert ids == [[40, 7], [41, -1], [42, 1], [43, 1], [44, 1]]
    assert weights == [[50_000, 10_000], [DRAFT_PROB_SCALE, 0], [3, 1], [3, 1], [3, 1]]
    assert sample.num_bytes == 4 * 8 + 2 * 4 * 10


@pytest.mark.parametrize(
    "bad",
    [
        (),
        (row((1, 1)),),
        (row((1, 1)),) * 3,
        (row((100, 1)),) * 2,
        (row((-1, 1)),) * 2,
        (row((1, 0)),) * 2,
        (row((1, DRAFT_PROB_SCALE), (2, 1)),) * 2,
        (SparseRow(token_ids=(1, 2), weights=(1,)),) * 2,
    ],
)
def test_a_token_without_a_usable_row_costs_all_rows_and_nothing_else(bad: tuple[SparseRow, ...]):
    good = tuple(row((each, 3)) for each in NEW)
    sample = topped().sample(
        *(open_("r", PROMPT), commit("r", 3, NEW, target_rows=good), commit("r", 8, NEW[:2], target_rows=bad)),
        *(commit("r", 10, NEW, target_rows=good), CLOSE),
    )
    assert (sample.num_top, sample.top_ids, sample.top_weights) == (0, b"", b"")
    assert sample.token_ids == PROMPT + NEW + NEW[:2] + NEW


def test_rows_are_cut_with_the_text():
    kept = topped()
    kept.learning.set(replace(ALL, max_sample_tokens=8))
    good = tuple(row((each, 3)) for each in NEW)
    kept.say(open_("r", PROMPT), commit("r", 3, NEW, target_rows=good), commit("r", 8, NEW, target_rows=good), CLOSE)
    (sample,) = kept.samples()
    assert np.frombuffer(sample.top_ids, "<i4").reshape(-1, 2)[:, 0].tolist() == list(NEW)


def test_rows_that_a_smaller_bound_has_cut_are_not_kept():
    kept = topped()
    good = tuple(row((each, 3)) for each in NEW)
    kept.learning.set(replace(ALL, max_sample_tokens=8))
    kept.say(open_("r", PROMPT), commit("r", 3, NEW, target_rows=good), commit("r", 8, NEW, target_rows=good))
    kept.learning.set(ALL)
    sample = kept.sample(CLOSE)
    assert (sample.token_ids, sample.num_top, sample.top_ids) == (PROMPT + NEW + NEW, 0, b"")


def test_rows_that_nobody_asked_for_are_not_kept():
    good = tuple(row((each, 3)) for each in NEW)
    assert Kept().sample(open_("r", PROMPT), commit("r", 3, NEW, target_rows=good), CLOSE).num_top == 0


# --- rollouts ---


def test_a_rollouts_sample_names_the_targets_weights():
    history = History(key="k", num_prompt_tokens=3, weight_version="policy 7")
    sample = Kept().sample(open_("r", PROMPT, history=history), commit("r", 3, NEW), CLOSE)
    assert sample.weight_version == "policy 7"


def test_drafters_that_remember_rollouts_make_no_samples_of_them():
    """Their samples are handed over by salt, and rollouts are remembered by key."""
    kept = Kept(DraftNeeds(history=True))
    history = History(key="k", num_prompt_tokens=3)
    kept.say(open_("r", PROMPT, history=history), commit("r", 3, NEW), CLOSE)
    assert kept.samples() == []
    assert kept.sample(open_("r", PROMPT), commit("r", 3, NEW), CLOSE).token_ids == PROMPT + NEW


def test_a_frame_that_does_not_decode_ends_a_session_without_harm():
    kept = Kept()
    kept.say(open_("r", PROMPT), commit("r", 3, NEW))
    handle_payload(kept.engine, "v", b"\x92\xa6Commit\x81\xaarequest_id\xa1r")
    kept.engine.check_integrity()
    assert [sample.token_ids for sample in kept.samples()] == [PROMPT + NEW]
