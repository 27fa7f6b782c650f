from __future__ import annotations

import gzip
import json
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest

from fakes.drafter_play import KEY, ask_of
from outrider.drafter_service.engine.drafter import Ask, SessionKey
from outrider.lab.replay.traces import (
    Arm,
    Figures,
    SuffixElseNgram,
    Trace,
    TraceError,
    arms,
    count_accepted,
    read_traces,
    recorded_figures,
    replay_arm,
)
from outrider.verifier_service.messages.draft import ROOT, Draft, DraftNeeds


class ConstantDrafter:
    """Drafts the same tokens every time; remembers what it was asked."""

    vocab_size = 100
    max_model_len = 1 << 20
    needs = DraftNeeds()

    def __init__(self, token_ids: tuple[int, ...], parents: tuple[int, ...] | None = None) -> None:
        self.answer = (token_ids, parents)
        self.texts: list[list[int]] = []
        self.asks: list[Ask] = []
        self.released: list[SessionKey] = []

    def draft(self, asks: Sequence[Ask], *, max_num_tokens: int) -> list[Draft]:
        self.asks += asks
        self.texts += [list(ask.token_ids) for ask in asks]
        token_ids, parents = self.answer
        return [ask.answer(token_ids, parents=parents) for ask in asks]

    def release(self, key: SessionKey) -> None:
        self.released.append(key)

    def check_integrity(self, keys: Collection[SessionKey]) -> None:
        """Nothing to contradict."""


class Clock:
    """Each reading is one second after the last."""

    now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def trace(prompt: Sequence[int], generated: Sequence[int], **recorded: list[int]) -> Trace:
    return Trace(prompt_ids=list(prompt), generated_ids=list(generated), recorded=recorded)


def result(*token_ids: int, parents: tuple[int, ...] | None = None, **fields: tuple[float, ...]) -> Draft:
    return Draft(request_id="r", round_id=1, position=1, token_ids=token_ids, parents=parents, **fields)  # type: ignore[arg-type]


def replay(drafter: ConstantDrafter, traces: list[Trace], length: int = 3) -> Figures:
    return replay_arm(Arm("constant", lambda _: drafter), traces, num_speculative_tokens=length, clock=Clock())


def test_each_verification_commits_what_is_right_and_one_token_more():
    drafter = ConstantDrafter((7, 7, 7))
    figures = replay(drafter, [trace([1], [7, 7, 3, 4, 7, 7, 7, 7, 7])])
    assert drafter.texts == [[1], [1, 7, 7, 3], [1, 7, 7, 3, 4], [1, 7, 7, 3, 4, 7, 7, 7, 7]]
    assert (figures.num_tokens, figures.num_verifications) == (9, 4)
    assert figures.mean_acceptance_length == 9 / 4
    assert figures.acceptance_by_position == [3 / 4, 2 / 4, 1 / 4, 0, 0, 0]
    assert figures.drafted == 3
    assert figures.empty == 0
    assert drafter.released == [drafter.asks[0].key]


def test_requests_have_sessions_and_lists_of_their_own():
    drafter = ConstantDrafter(())
    replay(drafter, [trace([1], [5, 6]), trace([1], [5])])
    first, second, third = drafter.asks
    assert first.key == second.key != third.key
    assert first.token_ids is second.token_ids  # a session's list only grows


def test_a_tree_is_accepted_along_the_branch_that_is_right():
    #  5 -> 6 ; 7 -> 8 -> 9
    draft = result(5, 7, 6, 8, 9, parents=(ROOT, ROOT, 0, 1, 3))
    assert count_accepted(draft, [7, 8, 9, 1]) == 3
    assert count_accepted(draft, [5, 8]) == 1
    assert count_accepted(draft, [6]) == 0
    assert count_accepted(draft, [7, 8]) == 2
    assert count_accepted(result(5, 6, 9), [5, 6, 7]) == 2
    assert count_accepted(result(6, 5), [5, 5]) == 0
    assert count_accepted(result(), [5]) == 0


def test_recorded_lengths_are_walked_through():
    figures = recorded_figures([trace([1], [2], eagle=[3, 1, 1, 1, 2]), trace([1], [2], eagle=[2, 9])], "eagle")
    # 3 tokens, then 1, then 1 (of 2, at the end); 2 tokens
    assert (figures.num_tokens, figures.num_verifications) == (7, 4)
    assert figures.num_at_least[:3] == [3, 1, 0]
    assert figures.drafted is None
    assert figures.empty is None
    assert figures.draft_p50_s is None
    assert figures.prompt_token_s is None


def line(**fields: object) -> str:
    return json.dumps({"prompt_token_ids": [1], "generated_token_ids": [2, 3], **fields}) + "\n"


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_traces_are_read_plain_and_zipped(tmp_path: Path, suffix: str):
    path = tmp_path / f"traces{suffix}"
    text = line(acc_eagle={"acc_len": [2, 1]}, id="7") + line() + line()
    path.write_bytes(gzip.compress(text.encode()) if suffix.endswith("gz") else text.encode())
    assert read_traces(path)[0] == trace([1], [2, 3], eagle=[2, 1])
    assert len(read_traces(path)) == 3
    assert len(read_traces(path, 2)) == 2


@pytest.mark.parametrize(
    "bad",
    [
        "{",
        "[]\n",
        '{"prompt_token_ids": [1]}\n',
        line(prompt_token_ids=[]),
        line(generated_token_ids=[-1]),
        line(generated_token_ids=["a"]),
        line(acc_eagle={"acc_len": [0]}),
        line(acc_eagle={}),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path: Path, bad: str):
    path = tmp_path / "traces.jsonl"
    path.write_text(line() + bad)
    with pytest.raises(TraceError, match="line 2"):
        read_traces(path)


def test_the_hybrid_takes_the_draft_that_expects_more():
    hybrid = SuffixElseNgram(100)
    for known in ([1], [1, 20, 21, 22, 23]):
        hybrid.draft([ask_of(known)], max_num_tokens=1)
    hybrid.check_integrity([KEY])
    hybrid.release(KEY)
    hybrid.check_integrity([])
    (from_past,) = hybrid.draft([ask_of([5, 20, 21])], max_num_tokens=1)
    assert from_past.token_ids == (22, 23)  # the n-gram drafter knows nothing of it
    (from_text,) = hybrid.draft([ask_of([1, 2, 3, 4, 5, 1, 2, 3])], max_num_tokens=1)
    assert from_text.token_ids[:2] == (4, 5)


def test_every_arm_gains_on_a_text_that_repeats_itself():
    text = [*range(10, 22), *range(30, 36)]
    traces = [trace([1, *text], text * 3), trace([2, *text], text * 3)]
    for arm in arms(16):
        figures = replay_arm(arm, traces, num_speculative_tokens=8, clock=Clock())
        assert figures.num_tokens == 2 * len(text) * 3
        assert figures.mean_acceptance_length > 3, arm.name
    assert len({arm.name for arm in arms(16)}) == len(arms(16))
