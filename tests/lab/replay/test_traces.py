from __future__ import annotations

import gzip
import json
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest

from outrider.drafter_service.engine.drafter import Ask, SessionKey
from outrider.lab.replay.machine import MachineFit, PublishedMachine, Walk, recorded_drafts
from outrider.lab.replay.traces import LOOK_UPS, Trace, TraceError, count_accepted, drafted_places, read_traces
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


def trace(prompt: Sequence[int], generated: Sequence[int], **recorded: list[int]) -> Trace:
    return Trace(prompt_ids=list(prompt), generated_ids=list(generated), recorded=recorded)


def result(*token_ids: int, parents: tuple[int, ...] | None = None, **fields: tuple[float, ...]) -> Draft:
    return Draft(request_id="r", round_id=1, position=1, token_ids=token_ids, parents=parents, **fields)  # type: ignore[arg-type]


def test_a_draft_is_seen_at_every_position():
    drafter = ConstantDrafter((7, 7, 7))
    (places,) = drafted_places(lambda _: drafter, [trace([1], [7, 7, 3, 4, 7])], 3)
    assert places == [(3, 2), (3, 1), (3, 0), (3, 0), (3, 1)]
    assert drafter.texts == [[1], [1, 7], [1, 7, 7], [1, 7, 7, 3], [1, 7, 7, 3, 4]]
    assert drafter.released == [drafter.asks[0].key]


def test_requests_have_sessions_and_lists_of_their_own():
    drafter = ConstantDrafter(())
    drafted_places(lambda _: drafter, [trace([1], [5, 6]), trace([1], [5])], 3)
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


def test_what_was_drafted_is_walked_through():
    walk = Walk.of("x", [[(4, 2), (4, 0), (4, 0), (0, 0), (4, 4)], [(2, 1), (4, 4)]])
    # 3 tokens, then 1, then 1 of 5, at the end; 2 tokens
    assert (walk.num_tokens, walk.num_rounds, walk.num_drafts, walk.num_draft_tokens) == (7, 4, 3, 10)
    assert walk.by_position(3) == [3 / 4, 1 / 4, 0.0]


def test_a_step_of_the_published_machine_reads_the_context_and_waits_for_one_eagle_and_no_look_up():
    machine = PublishedMachine(1000.0, MachineFit())
    assert machine.step_s(4, 4) == pytest.approx(5.886e-3 + 4 * 2.101e-5 + 4000 * 3.926e-8 + 1.207e-3)
    assert machine.draft_s("eagle", 4, 2) == pytest.approx(2.135e-3 + 8 * 8.41e-7 + 4000 * 2.378e-9)
    assert machine.draft_s("ngram", 4, 2) < 1e-4


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


def test_recorded_drafts_are_eagles_and_what_our_look_ups_find(tmp_path: Path):
    path = tmp_path / "traces.jsonl"
    text = [10, 11, 12, 13] * 4
    path.write_text(line(generated_token_ids=text, acc_eagle={"acc_len": [3, 9] * 8}))
    recorded, context = recorded_drafts(path, 4)
    assert recorded["eagle"][0][:2] == [(4, 2), (4, 4)]
    assert {*recorded} == {"eagle", *LOOK_UPS}
    assert all(recorded[name][0][8] == (4, 4) for name in ("ngram", "suffix")), "it has said so before"
    assert context == 1 + len(text) / 2
    path.write_text(line())
    with pytest.raises(TraceError, match="a request has no acc_eagle"):
        recorded_drafts(path, 4)
