from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from fakes.drafter_play import KEY, draft_after, key, paths_of, play
from outrider.drafter_service.lookup.suffix_drafter import SuffixConfig, SuffixDrafter


def make(**limits: float) -> SuffixDrafter:
    return SuffixDrafter(vocab_size=1000, config=SuffixConfig(**limits))  # type: ignore[arg-type]


def finish(drafter: SuffixDrafter, prompt: list[int], response: list[int], name: str = "past", salt: str = "") -> None:
    """Let one request live and end."""
    draft_after(drafter, prompt, key=key(name), cache_salt=salt)
    draft_after(drafter, prompt + response, key=key(name), cache_salt=salt)
    drafter.release(key(name))


def test_the_most_frequent_token_after_the_longest_match_is_drafted():
    tokens = [1, 2, 50, 1, 2, 60, 8, 1, 2, 50, 9, 2, 70, 2, 70, 2, 70, 2, 70, 1, 2]
    assert draft_after(make(), tokens, length=1).token_ids == (50,)  # [2] alone is followed by 70


def test_a_draft_is_no_longer_than_its_match_allows():
    tokens = [*range(100, 120), 1, 2, 3, *range(200, 220), 1, 2, 3]
    for factor, expected in ((1.0, 3), (2.5, 7), (0.1, 1)):
        drafter = make(max_spec_factor=factor, min_token_prob=0.0)
        assert draft_after(drafter, tokens, length=16).token_ids == tuple(range(200, 200 + expected))


def test_a_draft_ends_where_it_becomes_unlikely():
    tokens = [1, 5, 1, 6, 1, 7, 1, 8, 1]
    assert draft_after(make(min_token_prob=0.2), tokens).token_ids == ()
    assert draft_after(make(min_token_prob=0.05), tokens).token_ids[:1] == (8,)
    likely = draft_after(make(min_token_prob=0.05, max_spec_factor=9), [3, 4, 5, 3, 4, 5, 3, 4], length=16)
    assert likely.confidences is not None
    survival = 1.0
    for confidence in likely.confidences:
        survival *= confidence
    assert survival >= 0.05


def test_a_loop_is_drafted_beyond_the_end_of_the_text():
    result = draft_after(make(min_token_prob=0.0, max_spec_factor=9), [9, 1, 2, 3, 1, 2, 3], length=8)
    assert result.token_ids == (1, 2, 3, 1, 2, 3, 1, 2)


def test_past_responses_are_drafted_from_and_prompts_are_not():
    drafter = make()
    finish(drafter, [10, 11, 12], [20, 21, 22, 23])
    drafter.check_integrity([])
    assert draft_after(drafter, [5, 20, 21]).token_ids == (22, 23)
    assert draft_after(drafter, [5, 10, 11], key=key("another")).token_ids == ()


@pytest.mark.parametrize("max_nodes", [0, 8])
def test_nothing_leaks_between_salts(max_nodes: int):
    drafter = make(min_token_prob=0.0, min_tree_prob=0.0)
    finish(drafter, [1], [20, 21, 22, 23], salt="mine")
    finish(drafter, [1], [20, 21, 30, 31], name="theirs", salt="theirs")
    for salt, expected in (("mine", {22, 23}), ("theirs", {30, 31}), ("", set()), ("else", set())):
        result = draft_after(drafter, [5, 20, 21], key=key(salt), cache_salt=salt, max_nodes=max_nodes)
        assert set(result.token_ids) == expected
    drafter.check_integrity([key(salt) for salt in ("mine", "theirs", "", "else")])


def test_a_key_that_comes_again_with_another_salt_is_another_session():
    drafter = make()
    finish(drafter, [1], [7, 8, 9, 10], salt="a")
    assert draft_after(drafter, [5, 7, 8], key=key("r"), cache_salt="a").token_ids[:1] == (9,)
    assert draft_after(drafter, [5, 7, 8], key=key("r"), cache_salt="b").token_ids == ()
    finish(drafter, [2], [7, 8, 11, 12], salt="b")
    drafter.release(key("r"))
    assert draft_after(drafter, [6, 7, 8], key=key("s"), cache_salt="b").token_ids[:1] == (11,)


def test_the_oldest_responses_are_forgotten_by_number():
    drafter = make(max_cached_requests=2)
    for first in (20, 30, 40):
        finish(drafter, [1], [first, first + 1, first + 2], name=str(first), salt="a" if first == 20 else "b")
        drafter.check_integrity([])
    found = {first: draft_after(drafter, [5, first], key=key("new"), cache_salt="b").token_ids for first in (30, 40)}
    assert found == {30: (31, 32), 40: (41, 42)}
    assert draft_after(drafter, [5, 20], key=key("old"), cache_salt="a").token_ids == ()
    assert drafter._past._trees.keys() == {"b"}


def test_the_oldest_responses_are_forgotten_by_size():
    drafter = make(max_cached_tokens=7)
    for first in (20, 30, 40):
        finish(drafter, [1], [first, first + 1, first + 2], name=str(first))
        drafter.check_integrity([])
    assert draft_after(drafter, [5, 20], key=key("a")).token_ids == ()
    assert draft_after(drafter, [5, 30], key=key("b")).token_ids == (31, 32)
    finish(drafter, [1], list(range(100, 120)), name="long")
    assert draft_after(drafter, [5, 117], key=key("c")).token_ids == (118, 119)
    assert draft_after(drafter, [5, 110], key=key("d")).token_ids == ()


def test_without_a_cache_nothing_is_remembered():
    drafter = make(max_cached_requests=0)
    finish(drafter, [1], [20, 21, 22])
    assert draft_after(drafter, [5, 20, 21]).token_ids == ()


def test_other_tokens_under_the_same_key_begin_anew_and_the_old_response_is_remembered():
    drafter = make()
    draft_after(drafter, [1, 2])
    draft_after(drafter, [1, 2, 20, 21, 22])
    assert draft_after(drafter, [8, 9, 20, 21]).token_ids == (22,)
    drafter.check_integrity([KEY])


def test_the_better_of_the_two_trees_is_drafted_from():
    drafter = make(min_token_prob=0.0)
    for name in "abcdefgh":
        finish(drafter, [1], [7, 20, 21, 22, 23], name=name)
    mixed = [20, 21, 50, 20, 21, 51, 20, 21, 52, 6, 7, 20, 21]  # here something else follows each time
    assert draft_after(drafter, mixed, key=key("past wins")).token_ids[:2] == (22, 23)
    sure = [*[3, 20, 21, 60, 61, 62] * 4, 3, 20, 21]
    assert draft_after(drafter, sure, key=key("own wins")).token_ids[:3] == (60, 61, 62)


def test_forced_tokens_come_first_and_are_matched_on():
    drafter = make(min_token_prob=0.0)
    tokens = [5, 6, 7, 8, 9, 1, 5]
    result = draft_after(drafter, tokens, length=4, forced_ids=(6, 7))
    assert result.token_ids == (6, 7, 8, 9)
    assert result.confidences is not None
    assert result.confidences[:2] == (1.0, 1.0)
    assert draft_after(drafter, tokens, length=1, forced_ids=(6, 7)).token_ids == (6,)
    assert draft_after(drafter, tokens, length=4, max_nodes=4, forced_ids=(6, 7)).token_ids == (6, 7, 8, 9)
    assert draft_after(drafter, tokens, length=4, forced_ids=(700, 800)).token_ids == (700, 800)
    assert draft_after(drafter, [4, 3], length=5, forced_ids=(3,), key=key("end")).token_ids[:3] == (3, 3, 3)


def test_a_tree_holds_the_likeliest_branches_of_both_sources():
    drafter = make()
    finish(drafter, [1], [20, 21, 30, 31])
    tokens = [20, 21, 40, 41, 20, 21, 50, 51, 20, 21]
    paths = paths_of(draft_after(drafter, tokens, length=2, max_nodes=9))
    assert {(30,), (30, 31), (40,), (40, 41), (50,), (50, 51)} <= {tuple(path) for path in paths}
    assert len(draft_after(drafter, tokens, length=2, max_nodes=3).token_ids) == 3


def test_unlikely_branches_are_left_out_of_a_tree():
    tokens = [token for other in range(10, 40) for token in (1, other)] + [1]
    assert draft_after(make(min_tree_prob=0.2), tokens, max_nodes=64).token_ids == ()
    assert draft_after(make(min_tree_prob=0.0), tokens, max_nodes=64).token_ids


def language(tokens: Sequence[int]) -> int:
    """A target that repeats itself with variations: what follows hangs on two tokens and slowly on the place."""
    return random.Random(f"{tokens[-2:]} {len(tokens) // 60}").randrange(6)


@pytest.mark.parametrize("max_nodes", [0, 12])
def test_drafts_follow_a_text_that_repeats_itself(max_nodes: int):
    played = play(make(), language, [1, 2, 3], 150, max_nodes=max_nodes)
    assert played.mean_acceptance_length > 3


def test_confidences_are_calibrated():
    drafter = make(min_token_prob=0.0)
    rng = random.Random(5)
    played = play(drafter, lambda tokens: tokens[-1] % 3 if rng.random() < 0.5 else rng.randrange(3), [0, 1, 2], 300)
    half = played.drafts[100:], played.num_accepted[100:]
    claimed = sum(draft.confidences[0] for draft in half[0] if draft.confidences)
    right = sum(number > 0 for number in half[1])
    assert claimed == pytest.approx(right, rel=0.2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tree_depth", 1),
        ("max_cached_requests", -1),
        ("max_spec_factor", 0.0),
        ("min_token_prob", 1.5),
        ("min_tree_prob", -0.1),
        ("max_cached_tokens", -1),
    ],
)
def test_limits_that_make_no_sense_are_refused_by_name(field: str, value: float):
    with pytest.raises(ValueError, match=field):
        make(**{field: value})
