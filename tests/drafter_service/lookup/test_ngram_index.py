from __future__ import annotations

import random

import pytest

from outrider.drafter_service.lookup.ngram_index import (
    AGAIN,
    AGAINST,
    CHANGED,
    MAX_MATCH,
    ONCE,
    UNSEEN,
    VOTE_SIZES,
    NgramIndex,
    match_length,
)


def index_of(tokens: list[int], *sizes: int) -> NgramIndex:
    index = NgramIndex(tokens, sizes)
    index.catch_up()
    return index


def test_what_followed_last_is_found_by_the_last_tokens():
    index = index_of([1, 2, 50, 1, 2, 60, 1, 2], 2, 5)
    assert index.last_end([9, 1, 2], 2) == 5
    assert index.last_end([1, 2, 60, 1], 5) is None  # four tokens
    assert index.last_end([2, 50], 2) == 3
    assert index.last_end([60, 9], 2) is None


def test_the_last_token_of_a_text_is_found_once_something_follows_it():
    tokens = [1, 2, 3]
    index = index_of(tokens, 1)
    assert index.last_end([3], 1) is None
    tokens += [4, 5]
    index.catch_up()
    index.catch_up()
    assert index.last_end([3], 1) == 3
    assert index.votes([2, 3], 4) == (ONCE, ONCE, UNSEEN)  # caught up twice, seen once


@pytest.mark.parametrize(
    ("followers", "guess", "vote"),
    [
        ([], 5, UNSEEN),
        ([5], 5, ONCE),
        ([6], 5, AGAINST),
        ([5, 5], 5, AGAIN),
        ([6, 5, 5], 5, AGAIN),
        ([6, 5], 5, CHANGED),
        ([5, 5, 6], 5, AGAINST),
        ([5, 6, 5], 5, CHANGED),
    ],
)
def test_a_vote_says_how_the_last_tokens_went_on(followers: list[int], guess: int, vote: int):
    tokens = [token for number, follower in enumerate(followers) for token in (100 + number, 1, 2, 3, follower)]
    assert index_of([*tokens, 0]).votes([9, 1, 2, 3], guess) == (vote,) * len(VOTE_SIZES)


def test_shorter_contexts_may_say_otherwise():
    tokens = [1, 2, 3, 5, 9, 2, 3, 6, 3, 7, 0]
    assert index_of(tokens).votes([1, 2, 3], 5) == (AGAINST, AGAINST, ONCE)
    assert index_of(tokens).votes([8, 2, 3], 6) == (AGAINST, CHANGED, UNSEEN)
    assert index_of(tokens).votes([3], 7) == (CHANGED, UNSEEN, UNSEEN)


def test_votes_are_those_of_a_scan_of_the_whole_text():
    rng, tokens = random.Random(7), [0]
    index = NgramIndex(tokens, [4])
    for _ in range(300):
        tokens += [rng.randrange(3) for _ in range(rng.randrange(3))]
        index.catch_up()
        index.check_integrity()
        context, guess = tokens[-4:], rng.randrange(3)
        assert index.votes(context, guess) == tuple(by_scanning(tokens, context, size, guess) for size in VOTE_SIZES)


def by_scanning(tokens: list[int], context: list[int], size: int, guess: int) -> int:
    gram = context[-size:]
    found = [tokens[end] for end in range(size, len(tokens)) if tokens[end - size : end] == gram and len(gram) == size]
    if not found:
        return UNSEEN
    if found[-1] != guess:
        return AGAINST
    return ONCE if len(found) == 1 else AGAIN if found[-2] == guess else CHANGED


def test_later_tokens_of_a_copy_are_judged_as_if_those_before_them_were_right():
    index = index_of([1, 2, 3, 4, 5, 0])
    kinds = index.kinds([8, 9, 2, 3], [4, 5, 0, 7], num_matched=2)
    assert kinds == [
        (1, ONCE, ONCE, UNSEEN),  # 2, 3 matched; 9, 2, 3 never stood there
        (1, ONCE, ONCE, ONCE),
        (2, ONCE, ONCE, ONCE),
        (2, UNSEEN, UNSEEN, UNSEEN),
    ]
    assert index.kinds([2, 3], [4], num_matched=MAX_MATCH + 4) == [(MAX_MATCH // 2, ONCE, ONCE, UNSEEN)]


def test_a_match_is_measured_as_far_as_it_counts():
    tokens = [7, 1, 2, 3, 8, 1, 2, 3]
    assert match_length(tokens, 4, 2) == 3
    assert match_length([*range(40), *range(40)], 40, 2) == MAX_MATCH
    assert match_length([1, 2, 1, 2], 2, 1) == 2  # the text begins there


def test_a_wrong_index_is_noticed():
    tokens = [1, 2, 3]
    index = index_of(tokens)
    tokens[0] = 7
    with pytest.raises(AssertionError, match="index"):
        index.check_integrity()
    del tokens[1:]
    with pytest.raises(AssertionError, match="nothing follows"):
        index.check_integrity()
