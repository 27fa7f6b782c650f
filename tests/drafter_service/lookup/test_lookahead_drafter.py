from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from fakes.drafter_play import KEY, draft_after, paths_of, play
from outrider.drafter_service.engine.drafter import SessionKey
from outrider.drafter_service.lookup.lookahead_drafter import LookaheadConfig, LookaheadDrafter, NgramPool
from outrider.verifier_service.messages.draft import ROOT


def make(**sizes: int) -> LookaheadDrafter:
    return LookaheadDrafter(vocab_size=1000, rng=random.Random(0), config=LookaheadConfig(**sizes))


def by_place(tokens: Sequence[int]) -> int:
    """A target whose next token hangs on its place alone: text never repeats, Jacobi iteration finds it at once."""
    return random.Random(len(tokens)).randrange(1000)


def by_last(tokens: Sequence[int]) -> int:
    return tokens[-1] % 7 + len(tokens) % 2


def test_jacobi_iteration_finds_what_no_text_has_shown():
    played = play(make(), by_place, [1, 2, 3], 60, max_nodes=48)
    assert played.mean_acceptance_length > 2.5
    assert max(played.num_accepted) >= 3  # an n-gram without its first token
    assert sum(play(make(), by_place, [1, 2, 3], 60, max_nodes=0).num_accepted) == 0  # no window, no n-grams


@pytest.mark.parametrize("sizes", [{"ngram": 2}, {"ngram": 3, "window": 4}, {"ngram": 6, "window": 12}])
def test_windows_of_other_sizes_find_n_grams_too(sizes: dict[str, int]):
    played = play(make(**sizes), by_place, [1, 2, 3], 60, length=16, max_nodes=150)
    assert max(played.num_accepted) >= sizes["ngram"] - 1


@pytest.mark.parametrize("num_verified", [0, 1, 3, 7, 12, 20])
def test_drafts_that_were_cut_before_verification_do_no_harm(num_verified: int):
    whole = play(make(), by_place, [1, 2, 3], 60, max_nodes=40)
    cut = play(make(), by_place, [1, 2, 3], 60, max_nodes=40, num_verified=num_verified)
    assert sum(cut.num_accepted) <= sum(whole.num_accepted)
    assert num_verified < 12 or sum(cut.num_accepted) > 0


def test_columns_without_predictions_bring_no_n_grams():
    drafter, paths = known_window()
    num_predicted = 2 + paths.index([101, 111, 121])  # after the root and all nodes up to this one
    draft_after(drafter, [1, 2, 900], length=8, max_nodes=24, predicted_ids=(500,) * num_predicted)
    pool, window = drafter._sessions[KEY].pool, drafter._sessions[KEY].window
    assert [pool.tails(token_id) for token_id in (2, 101, 102)] == [[(110, 120, 500)], [(111, 121, 500)], []]
    assert window[2][:2] == [500, 500]
    assert window[2][2] in (1, 2, 900)


def test_the_window_hangs_below_the_pool_s_branches_as_the_paper_draws_it():
    drafter = make(window=3, ngram=4)
    first = draft_after(drafter, [1, 2, 3, 1, 2, 3, 1], length=8, max_nodes=24)
    (r1, r2), window = (2, 3), drafter._sessions[KEY].window
    (_, a1, a2), (b0, b1, b2), (c0, c1, c2) = window
    expected = {(r1,), (r1, r2), (r1, r2, 1)}  # the pool's n-gram after 1
    expected |= {(a1,), (a1, a2), (b0,), (b0, c0), (a1, b1), (a1, b1, c1), (a1, a2, b2), (a1, a2, b2, c2)}
    assert {tuple(path) for path in paths_of(first)} == expected
    assert paths_of(first)[:3] == [[r1], [r1, r2], [r1, r2, 1]]


def known_window() -> tuple[LookaheadDrafter, list[list[int]]]:
    """Return a drafter that drafted after [1, 2] over a window of known tokens, and the draft's paths."""
    drafter = make(window=3, ngram=4)
    draft_after(drafter, [1, 2], length=8, max_nodes=24)
    drafter._sessions[KEY].window = [[0, 101, 102], [110, 111, 112], [120, 121, 122]]
    return drafter, paths_of(draft_after(drafter, [1, 2], length=8, max_nodes=24))


def window_after(committed: list[int], *, is_predicted: bool) -> tuple[list[list[int]], list[list[int]], NgramPool]:
    """Return (window after a commit, paths of the draft before it, the pool); the target says 501 + node."""
    drafter, paths = known_window()
    predicted_ids = tuple(range(500, 501 + len(paths))) if is_predicted else ()
    draft_after(drafter, [1, 2, *committed], length=8, max_nodes=24, predicted_ids=predicted_ids)
    session = drafter._sessions[KEY]
    return session.window, paths, session.pool


def test_predictions_become_the_last_row_and_n_grams_of_the_pool():
    window, paths, pool = window_after([900], is_predicted=True)
    bottoms = [500 + 1 + paths.index(path) for path in ([110, 120], [101, 111, 121], [101, 102, 112, 122])]
    assert window == [[900, 111, 112], [120, 121, 122], bottoms]
    assert pool.tails(2) == [(110, 120, bottoms[0])]
    assert pool.tails(101) == [(111, 121, bottoms[1])]
    assert pool.tails(102) == [(112, 122, bottoms[2])]


def test_the_window_moves_on_by_what_was_committed():
    window, paths, _ = window_after([900, 901], is_predicted=True)
    bottoms = [500 + 1 + paths.index(path) for path in ([101, 111, 121], [101, 102, 112, 122])]
    assert window[0][:2] == [901, 112]
    assert window[1][:2] == [121, 122]
    assert window[2][:2] == bottoms
    assert all(row[2] in (1, 2, 900, 901) for row in window), "new cells are tokens of the text"


def test_without_predictions_the_cells_keep_their_places():
    window, _, pool = window_after([900], is_predicted=False)
    assert [row[:2] for row in window] == [[900, 102], [111, 112], [121, 122]]
    assert pool.tails(101) == pool.tails(102) == []


def test_asking_again_at_the_same_place_keeps_the_window():
    drafter = make()
    first = draft_after(drafter, [1, 2, 3], max_nodes=24)
    assert draft_after(drafter, [1, 2, 3], max_nodes=24, predicted_ids=(4,) * 25).token_ids == first.token_ids


@pytest.mark.parametrize(("length", "max_nodes"), [(1, 24), (2, 24), (3, 5), (8, 1), (8, 2), (8, 7), (16, 200)])
def test_the_tree_keeps_to_its_depth_and_nodes(length: int, max_nodes: int):
    played = play(make(), by_last, [1, 2, 3], 40, length=length, max_nodes=max_nodes)
    assert any(draft.token_ids for draft in played.drafts)


def test_a_chain_is_the_latest_n_gram_of_the_text():
    tokens = [1, 2, 3, 4, 1, 5, 6, 7, 8, 1]
    assert draft_after(make(), tokens).token_ids == (5, 6, 7)
    assert draft_after(make(), tokens, length=2, key=SessionKey("p", "short")).token_ids == (5, 6)
    assert draft_after(make(), [1, 2], key=SessionKey("p", "none")).token_ids == ()


def test_forced_tokens_come_first_and_the_pool_goes_on_after_them():
    tokens = [1, 5, 6, 7, 8, 1]
    chain = draft_after(make(), tokens, length=4, forced_ids=(9, 5))
    assert chain.token_ids == (9, 5, 6, 7)
    tree = draft_after(make(), tokens, length=8, max_nodes=24, forced_ids=(9, 5))
    assert tree.token_ids == (9, 5, 6, 7, 8)
    assert tree.parents == (ROOT, 0, 1, 2, 3)
    assert draft_after(make(), tokens, length=1, forced_ids=(9, 5)).token_ids == (9,)


def test_other_tokens_under_the_same_key_begin_anew():
    drafter = make()
    draft_after(drafter, [1, 2, 3, 4, 1])
    assert draft_after(drafter, [1, 7, 8, 9, 1]).token_ids == (7, 8, 9)


def test_the_pool_keeps_the_newest_of_each_token():
    pool = NgramPool(2)
    for tail in (5, 6, 7, 6):
        pool.add([1, tail])
    pool.add([2, 9])
    assert pool.tails(1) == [(6,), (7,)]
    assert pool.tails(2) == [(9,)]
    assert pool.tails(3) == []
    pool.check_integrity(2)
    with pytest.raises(AssertionError, match="length"):
        pool.check_integrity(3)


@pytest.mark.parametrize(("field", "value"), [("window", 0), ("ngram", 1), ("num_guesses", 0)])
def test_sizes_that_make_no_sense_are_refused_by_name(field: str, value: int):
    with pytest.raises(ValueError, match=field):
        make(**{field: value})
