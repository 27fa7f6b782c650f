"""Rollouts: what earlier and running samples of a prompt bring to its next ones, and to nobody else's."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.drafter_play import draft_after, key
from outrider.drafter_service.lookup.prompt_history import PromptHistories, SavedHistories, SavedResponse
from outrider.drafter_service.lookup.suffix_drafter import SuffixConfig, SuffixDrafter
from outrider.verifier_service.messages.draft import Draft, History
from outrider.verifier_service.messages.history import PastResponse
from outrider.verifier_service.messages.wire import encode

PROMPT = [1, 2]
RESPONSE = [20, 21, 22, 23, 24, 25]


def make(**limits: int) -> SuffixDrafter:
    return SuffixDrafter(vocab_size=1000, config=SuffixConfig(min_token_prob=0.0, **limits))


def history(name: str, version: str = "") -> History:
    return History(key=name, num_prompt_tokens=len(PROMPT), weight_version=version)


def past(*responses: list[int], age: int = 0) -> list[PastResponse]:
    return [PastResponse(token_ids=tuple(response), age=age) for response in responses]


def drafted(drafter: SuffixDrafter, name: str, output: list[int], version: str = "", session: str = "new") -> Draft:
    return draft_after(drafter, PROMPT + output, key=key(session), history=history(name, version))


def end(drafter: SuffixDrafter, name: str, response: list[int], version: str = "") -> None:
    """Let a sample run and end, as the draft engine tells."""
    drafted(drafter, name, response, version, session="past")
    drafter.remember(history(name, version), response)
    drafter.release(key("past"))


@pytest.mark.parametrize("max_nodes", [0, 8])
def test_a_prompts_next_sample_drafts_from_its_earlier_ones_and_no_other_prompt_does(max_nodes: int):
    drafter = make()
    end(drafter, "p", RESPONSE)
    end(drafter, "q", [20, 21, 30, 31])
    drafter.check_integrity([])
    for name, expected in (("p", {22, 23, 24, 25}), ("q", {30, 31}), ("r", set()), ("", set())):
        tokens = [*PROMPT, 20, 21]
        draft = draft_after(drafter, tokens, key=key(name), history=history(name), max_nodes=max_nodes)
        assert set(draft.token_ids) == expected
    assert draft_after(drafter, [*PROMPT, 20, 21], key=key("salted"), cache_salt="p").token_ids == ()


def test_running_samples_of_a_prompt_see_one_another_and_others_do_not():
    drafter = make()
    drafted(drafter, "p", RESPONSE, session="ahead")
    assert drafted(drafter, "p", [20, 21], session="behind").token_ids[:3] == (22, 23, 24)
    assert drafted(drafter, "q", [20, 21], session="other").token_ids == ()
    drafted(drafter, "", RESPONSE, session="declined")
    assert drafted(drafter, "", [20, 21], session="also declined").token_ids == ()
    drafter.check_integrity([key(name) for name in ("ahead", "behind", "other", "declined", "also declined")])
    drafter.release(key("ahead"))
    assert drafted(drafter, "p", [20, 21], session="later").token_ids == (), "it left without an end"


def test_salted_requests_are_not_found_by_key_nor_rollouts_by_salt():
    drafter = make()
    draft_after(drafter, PROMPT, key=key("salted"), cache_salt="p")
    draft_after(drafter, PROMPT + RESPONSE, key=key("salted"), cache_salt="p")
    assert drafted(drafter, "p", [20, 21]).token_ids == (), "while it runs"
    drafter.release(key("salted"))
    assert drafted(drafter, "p", [20, 21], session="second").token_ids == (), "after its end"
    end(drafter, "p", [40, 41, 42, 43])
    assert draft_after(drafter, [*PROMPT, 40, 41], key=key("other"), cache_salt="p").token_ids == ()


def test_versions_fall_out_beyond_the_window():
    drafter = make(max_versions=2)
    end(drafter, "p", RESPONSE, "1")
    end(drafter, "p", [30, 31, 32, 33], "2")
    assert drafted(drafter, "p", [20, 21], "2", session="a").token_ids[:1] == (22,)
    end(drafter, "other", [40, 41, 42], "3")
    assert drafted(drafter, "p", [20, 21], "3", session="b").token_ids == (), "of version 1"
    assert drafted(drafter, "p", [30, 31], "3", session="c").token_ids[:1] == (32,)
    assert drafted(drafter, "p", [30, 31], "4", session="d").token_ids == ()
    assert drafted(drafter, "other", [40], "4", session="e").token_ids[:1] == (41,)


def test_a_sample_that_outlives_a_change_of_weights_counts_as_of_the_new_ones():
    drafter = make(max_versions=1)
    drafted(drafter, "q", [], "2", session="another")
    drafter.remember(history("p", "2"), RESPONSE)
    assert drafted(drafter, "p", [20, 21], "2").token_ids[:1] == (22,)


@pytest.mark.parametrize("limits", [{"max_cached_requests": 2}, {"max_cached_tokens": 13}])
def test_the_key_that_was_not_used_for_longest_goes_first(limits: dict[str, int]):
    drafter = make(**limits)
    end(drafter, "a", [20, 21, 22, 23, 24, 25])
    end(drafter, "b", [30, 31, 32, 33, 34, 35])
    drafted(drafter, "a", [20, 21])
    end(drafter, "c", [40, 41, 42, 43, 44, 45])
    drafter.check_integrity([key("new")])
    found = {
        name: drafted(drafter, name, [first, first + 1], session=name).token_ids[:1]
        for name, first in (("a", 20), ("b", 30), ("c", 40))
    }
    assert found == {"a": (22,), "b": (), "c": (42,)}


def test_of_the_only_key_the_oldest_response_goes_first():
    drafter = make(max_cached_requests=2)
    for first in (20, 30, 40):
        end(drafter, "p", [first, first + 1, first + 2])
    drafter.check_integrity([])
    assert drafted(drafter, "p", [20], session="a").token_ids == ()
    assert drafted(drafter, "p", [30], session="b").token_ids == (31, 32)


def test_histories_are_seeded_exported_and_loaded():
    drafter, other = make(), make()
    drafter.seed(history("p", "7"), past(RESPONSE))
    end(drafter, "q", [30, 31, 32], "8")
    other.seed(history("gone"), past(RESPONSE))
    other.load(drafter.export())
    other.check_integrity([])
    assert drafted(other, "p", [20, 21], "8", session="a").token_ids == (22, 23, 24, 25)
    assert drafted(other, "q", [30], "8", session="b").token_ids == (31, 32)
    assert drafted(other, "gone", [20, 21], "8", session="c").token_ids == ()
    assert other.export() == drafter.export()


def test_a_seed_brings_what_is_not_there_and_nothing_twice():
    drafter, twin = make(), make()
    end(drafter, "p", RESPONSE, "2")
    end(twin, "p", RESPONSE, "2")
    for _ in range(2):
        drafter.seed(history("p", "2"), past([30, 31, 32], RESPONSE, [30, 31, 32]))
    twin.seed(history("p", "2"), past([30, 31, 32], [30, 31, 32]))
    drafter.check_integrity([])
    assert drafter.export() == twin.export(), "as often as it was said at a time"
    assert drafted(drafter, "p", [30], "2").token_ids[:2] == (31, 32)


def test_what_is_seeded_ages_like_what_ended_here():
    drafter = make(max_versions=3)
    drafter.seed(history("p", "5"), past([20, 21, 22], age=3) + past([30, 31, 32], age=2) + past([40, 41, 42], age=1))
    for version, found in (("5", [(), (31,), (41,)]), ("6", [(), (), (41,)]), ("7", [(), (), ()])):
        drafts = [drafted(drafter, "p", [first], version, session=f"{first}") for first in (20, 30, 40)]
        assert [draft.token_ids[:1] for draft in drafts] == found, version
        drafter.check_integrity([key("20"), key("30"), key("40")])


def test_what_is_seeded_behind_newer_responses_stays_as_long_as_they():
    """A tree's texts leave it in the order in which they came."""
    drafter = make(max_versions=2)
    end(drafter, "p", RESPONSE, "1")
    drafter.seed(history("p", "1"), past([30, 31, 32], age=1))
    drafter.check_integrity([])
    assert drafted(drafter, "p", [30], "2", session="a").token_ids[:1] == (31,)
    assert drafted(drafter, "p", [30], "3", session="b").token_ids == ()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        encode(SavedHistories(["1", "1"], {})),
        encode(SavedHistories(["1"], {"p": [SavedResponse(1, [5, 6])]})),
        encode(SavedHistories(["1"], {"p": [SavedResponse(-1, [5, 6])]})),
        encode(SavedHistories(["1", "2"], {"p": [SavedResponse(1, [5, 6]), SavedResponse(0, [5, 6])]})),
        encode(SavedHistories(["1"], {"p": [SavedResponse(0, [5, 1000])]})),
    ],
)
def test_what_cannot_be_loaded_is_refused_and_changes_nothing(payload: bytes):
    drafter = make()
    drafter.seed(history("p"), past(RESPONSE))
    before = drafter.export()
    with pytest.raises(ValueError):  # noqa: PT011  # of the wire, or of what it carries
        drafter.load(payload)
    with pytest.raises(ValueError, match="outside"):
        drafter.seed(history("p"), past([5, 6], [-1, 5]))
    assert drafter.export() == before


@given(st.integers(0, 1 << 30))
def test_books_hold_whatever_happens(seed: int):
    chance = random.Random(seed)
    histories = PromptHistories(max_tree_depth=6, max_responses=5, max_tokens=40, num_versions=2)
    for _ in range(40):
        name, version = chance.choice("abc"), chance.choice("123")
        if chance.random() < 0.3:
            histories.use(name, version)
        elif chance.random() < 0.3:
            responses = [[chance.randrange(3) for _ in range(chance.randrange(12))] for _ in range(2)]
            histories.seed(name, version, past(*responses, age=chance.randrange(3)))
        else:
            histories.add(name, version, [chance.randrange(3) for _ in range(chance.randrange(12))])
        histories.check_integrity()
    again = PromptHistories(max_tree_depth=6, max_responses=5, max_tokens=40, num_versions=2)
    again.load(histories.export(), 3)
    again.check_integrity()
    assert again.export() == histories.export()
