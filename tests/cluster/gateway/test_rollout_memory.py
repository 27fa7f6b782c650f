"""What a gateway remembers of rollouts: who is sent what, bounds, and whom it finds nothing for."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.cluster.gateway.rollout_memory import MAX_CARRIED_TOKENS, MIN_COUNTED, MemoryLimits, RolloutMemory
from outrider.drafter_service.lookup.suffix_drafter import SuffixConfig
from outrider.verifier_service.messages.history import PastResponse, filed_under, name_of, prompt_hash
from outrider.verifier_service.messages.request import FinishReason, GenerationRequest, RequestOutput

PROMPT = (1, 2)


def request(prompt: Sequence[int] = PROMPT, **fields: object) -> GenerationRequest:
    return GenerationRequest(request_id="r", prompt_token_ids=tuple(prompt), **fields)


def output(
    *token_ids: int, version: str = "1", finish_reason: FinishReason | None = FinishReason.STOP
) -> RequestOutput:
    return RequestOutput(request_id="r", token_ids=token_ids, weight_version=version, finish_reason=finish_reason)


class Bench:
    def __init__(self, **limits: int) -> None:
        self.memory = RolloutMemory(MemoryLimits(**limits))

    def run(
        self, verifier: str, *response: int, drafters: Sequence[str] = (), version: str = "1", **fields: object
    ) -> list[tuple[int, ...]]:
        """Run a sample to its end; return the responses that its request took along."""
        with self.memory.sampling(request(**fields), verifier, frozenset(drafters)) as sample:
            sample.hear(output(*response, version=version))
        self.memory.check_integrity()
        return [one.token_ids for one in sample.request.history]

    def known(self) -> list[list[int]]:
        return [one.token_ids for one in self.memory.exported()]


# --- it follows the request ---


def test_a_request_takes_along_what_its_verifier_lacks_and_nothing_twice():
    bench = Bench()
    assert bench.run("a", 7, 8) == []
    assert bench.run("a", 7, 9) == [], "it ended there"
    assert bench.run("b", 7, 10) == [(7, 8), (7, 9)], "oldest first"
    assert bench.run("b", 7, 11) == []
    assert bench.run("a", 7, 12) == [(7, 10), (7, 11)]
    assert bench.run("a", 7, 13, prompt=(1, 3)) == []


def test_samples_that_run_side_by_side_take_it_along_once():
    bench = Bench()
    bench.run("a", 7, 8)
    with (
        bench.memory.sampling(request(), "b") as first,
        bench.memory.sampling(request(), "b") as second,
        bench.memory.sampling(request(), "c") as elsewhere,
    ):
        assert [len(one.request.history) for one in (first, second, elsewhere)] == [1, 0, 1]


def test_what_never_began_was_not_delivered():
    bench = Bench()
    bench.run("a", 7, 8)
    with pytest.raises(RuntimeError), bench.memory.sampling(request(), "b"):
        raise RuntimeError("refused")
    bench.memory.check_integrity()
    assert bench.known() == [[7, 8]]
    assert bench.run("b", 7, 9) == [(7, 8)]


def test_a_cancelled_sample_counts_as_far_as_it_came():
    bench = Bench()
    with contextlib.suppress(GeneratorExit), bench.memory.sampling(request(), "a") as sample:
        sample.hear(output(7, 8, finish_reason=None))
        raise GeneratorExit
    assert bench.known() == [[7, 8]]
    assert bench.run("a", 7, 9) == []


def test_a_lost_verifier_has_nothing_and_the_sample_counts_where_it_ends():
    bench = Bench()
    bench.run("a", 7, 8)
    with bench.memory.sampling(request(), "a") as sample:
        sample.hear(output(7, 9, finish_reason=None))
        sample.lose()
    assert bench.known() == [[7, 8]]
    with bench.memory.sampling(request(output_token_ids=(7, 9)), "b") as sample:
        assert [one.token_ids for one in sample.request.history] == [(7, 8)]
        sample.hear(output(10))
        sample.lose()
    assert bench.known() == [[7, 8], [7, 9, 10]], "lost behind the last output: that is none"
    assert bench.run("b", 7, 11) == []
    assert bench.run("a", 7, 12) == [(7, 8), (7, 9, 10), (7, 11)], "its engine may be another one"


def test_a_drafter_that_newly_came_up_gets_all_of_it():
    bench = Bench()
    bench.run("a", 7, 8, drafters=["d"])
    assert bench.run("a", 7, 9, drafters=["d"]) == []
    assert bench.run("a", 7, 10, drafters=["d", "e"]) == [(7, 8), (7, 9)]
    assert bench.run("a", 7, 11, drafters=["e"]) == []
    assert bench.run("a", 7, 12, drafters=["d", "e"]) == [(7, 8), (7, 9), (7, 10), (7, 11)]


def test_what_drafters_forget_is_sent_again():
    assert MemoryLimits().max_drafter_tokens == SuffixConfig().max_cached_tokens
    assert MemoryLimits().max_drafter_responses == SuffixConfig().max_cached_requests
    assert MemoryLimits().num_versions == SuffixConfig().max_versions
    for limits in ({"max_drafter_tokens": 7}, {"max_drafter_responses": 3}):
        bench = Bench(**limits)
        for key in "pq":
            bench.run("a", 7, 8, history_key=key)
        assert bench.run("a", 7, 9, history_key="p") == []
        assert bench.run("a", 7, 9, history_key="r") == [], "which made the drafters drop q"
        assert bench.run("a", 7, 10, history_key="p") == [], "and now r"
        assert bench.run("a", 7, 10, history_key="q") == [(7, 8)]


def test_drafters_that_keep_nothing_are_sent_nothing():
    bench = Bench(max_drafter_responses=0)
    bench.run("a", 7, 8)
    assert bench.run("b", 7, 9) == []


def test_one_request_takes_along_so_much_and_the_next_ones_the_rest():
    bench = Bench()
    half = MAX_CARRIED_TOKENS // 2
    for first in (7, 8, 9):
        bench.run("a", first, *[5] * (half - 1))
    assert [tokens[0] for tokens in bench.run("b", 10, 11)] == [8, 9], "the newest first"
    assert [tokens[0] for tokens in bench.run("b", 10, 12)] == [7]
    bench.run("a", 7, *[5] * MAX_CARRIED_TOKENS, history_key="long")
    assert [len(tokens) for tokens in bench.run("b", 10, 12, history_key="long")] == [MAX_CARRIED_TOKENS]


# --- versions ---


def test_versions_fall_out_beyond_the_window_and_ages_are_told():
    bench = Bench(num_versions=2)
    bench.run("a", 7, 8, version="1")
    bench.run("a", 7, 9, version="2")
    with bench.memory.sampling(request(), "b") as sample:
        assert sample.request.history == (
            PastResponse(token_ids=(7, 8), age=1),
            PastResponse(token_ids=(7, 9), age=0),
        )
    bench.run("a", 7, 8, version="3", history_key="other")
    assert bench.known() == [[7, 9], [7, 8]]
    assert bench.run("c", 7, 10, version="3") == [(7, 9)]


# --- bounds ---


@pytest.mark.parametrize("limits", [{"max_keys": 2}, {"max_tokens": 2 * MIN_COUNTED}])
def test_the_key_that_was_not_used_for_longest_goes_first(limits: dict[str, int]):
    bench = Bench(**limits)
    for key in "pq":
        bench.run("a", 7, 8, 9, 10, history_key=key)
    with bench.memory.sampling(request(history_key="p"), "a"):
        pass
    bench.run("a", 7, 8, 9, history_key="r")
    assert [name_of(one.key) for one in bench.memory.exported()] == [{"history_key": "p"}, {"history_key": "r"}]


def test_of_one_key_the_oldest_response_goes_first():
    for limits in ({"max_responses": 2}, {"max_tokens": 2 * MIN_COUNTED}):
        bench = Bench(**limits)
        for last in (8, 9, 10):
            bench.run("a", 7, last)
        assert bench.known() == [[7, 9], [7, 10]]


def test_short_responses_count_as_what_they_take_in_memory():
    bench = Bench(max_tokens=10 * MIN_COUNTED)
    for number in range(200):
        bench.memory.record(f"k{number}", [7, 8])
        bench.memory.check_integrity()
    assert len(bench.known()) == 10
    bench.memory.record("long", [7] * (3 * MIN_COUNTED))
    assert len(bench.known()) == 8


def test_what_is_exported_is_what_was_there_when_it_was_asked_for():
    bench = Bench()
    for last in (8, 9):
        bench.run("a", 7, last)
    exported = bench.memory.exported()
    first = next(exported)
    bench.run("a", 7, 10)
    bench.memory.clear()
    assert [one.token_ids for one in (first, *exported)] == [[7, 8], [7, 9]]


@given(st.integers(0, 1 << 30))
def test_bounds_and_books_hold_whatever_happens(seed: int):
    chance = random.Random(seed)
    bench = Bench(
        num_versions=2,
        max_responses=3,
        max_keys=3,
        max_tokens=5 * MIN_COUNTED,
        max_drafter_responses=4,
        max_drafter_tokens=20,
    )
    for _ in range(40):
        tokens = [chance.randrange(9) for _ in range(chance.randrange(12))]
        fields = {"history_key": chance.choice(["", None, *"pqrs"]), "version": chance.choice("123")}
        if chance.random() < 0.2:
            with bench.memory.sampling(request(), chance.choice("ab")) as sample:
                sample.lose()
            bench.memory.check_integrity()
        else:
            bench.run(chance.choice("ab"), *tokens, drafters=chance.choice(["", "d", "de"]), **fields)
    exported = list(bench.memory.exported())
    bench.memory.clear()
    bench.memory.check_integrity()
    assert bench.known() == []
    for one in exported:
        bench.memory.record(one.key, one.token_ids, one.weight_version)
    assert list(bench.memory.exported()) == exported, "what goes out comes in again"


# --- privacy ---


def test_what_was_declined_is_nowhere_and_gets_nothing():
    bench = Bench()
    bench.run("a", 7, 8)
    assert bench.run("b", 7, 9, history_key="") == []
    assert bench.run("b", 7, 10, history_key="") == []
    assert bench.known() == [[7, 8]]


def test_keys_never_see_each_other_nor_prompts_keys():
    bench = Bench()
    names = [None, "k", "l", f"prompt {prompt_hash(PROMPT)}", prompt_hash(PROMPT), "key k"]
    assert len({filed_under(name, PROMPT) for name in names}) == len(names)
    for place, name in enumerate(names):
        assert bench.run("a", 7, 10 + place, history_key=name) == []
    for place, name in enumerate(names):
        assert bench.run("b", 7, 20, history_key=name) == [(7, 10 + place)]


def test_a_salt_is_no_border_of_rollouts():
    bench = Bench()
    bench.run("a", 7, 8, cache_salt="policy 1")
    assert bench.run("b", 7, 9, cache_salt="policy 2") == [(7, 8)]
