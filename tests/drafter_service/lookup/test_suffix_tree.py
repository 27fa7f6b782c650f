from __future__ import annotations

import collections
import random

import pytest

from outrider.drafter_service.lookup.suffix_tree import Node, SuffixTree

Counts = dict[tuple[int, ...], int]


def counts_by_scanning(texts: list[tuple[list[int], int]], max_depth: int) -> Counts:
    """The slow reference: count every prefix of every truncated suffix; (text, how many suffixes of it count)."""
    counts: Counts = collections.Counter()
    for text, num_suffixes in texts:
        for begin in range(num_suffixes):
            suffix = text[begin : begin + max_depth]
            for length in range(1, len(suffix) + 1):
                counts[tuple(suffix[:length])] += 1
    return counts


def counts_of(tree: SuffixTree) -> Counts:
    """Spell out every path of the tree."""
    counts: Counts = {}

    def spell(node: Node, before: list[int]) -> None:
        label = node.source[node.begin : node.begin + node.length]
        for length in range(1, len(label) + 1):
            counts[*before, *label[:length]] = node.count
        for child in (node.children or {}).values():
            spell(child, before + label)

    for child in (tree._root.children or {}).values():
        spell(child, [])
    return counts


def tree_of(*texts: list[int], max_depth: int = 6) -> SuffixTree:
    tree = SuffixTree(max_depth)
    for text in texts:
        for token_id in text:
            tree.append(token_id)
        tree.close()
    return tree


def next_of(tree: SuffixTree, *tokens: int) -> list[tuple[int, float]]:
    place = tree.longest_match(list(tokens))
    assert place is not None
    assert place.depth == len(tokens)
    return [(follower.token_id, follower.share) for follower in place.followers(9)]


@pytest.mark.parametrize("seed", range(60))
def test_it_counts_what_a_scan_counts_while_texts_come_and_go(seed: int):
    rng = random.Random(seed)
    max_depth, num_tokens = rng.randint(2, 7), rng.randint(1, 4)
    tree = SuffixTree(max_depth)
    texts: list[list[int]] = []
    for _ in range(6):
        for _ in range(rng.randint(0, 16)):
            tree.append(rng.randrange(num_tokens))
            tree.check_integrity()
            # the longest repeat and its suffixes wait for what follows: longer ones are counted
            live = (tree.token_ids, len(tree.token_ids) - depth_of(tree))
            expected = counts_by_scanning([(text, len(text)) for text in texts] + [live], max_depth)
            assert counts_of(tree) == expected
        texts.append(tree.close())
        while texts and rng.random() < 0.4:
            tree.remove(texts.pop(0))
            tree.check_integrity()
        assert counts_of(tree) == counts_by_scanning([(text, len(text)) for text in texts], max_depth)
        kept = {id(text) for text in texts}
        assert all(id(node.source) in kept for node, _ in tree.nodes()), "a label in a text that was taken out"
    for text in texts:
        tree.remove(text)
    assert tree.is_empty()


def depth_of(tree: SuffixTree) -> int:
    place = tree.longest_repeat()
    return 0 if place is None else place.depth


@pytest.mark.parametrize("seed", range(30))
def test_the_longest_match_and_the_longest_repeat_are_what_a_scan_finds(seed: int):
    rng = random.Random(seed)
    max_depth = rng.randint(2, 6)
    tree = SuffixTree(max_depth)
    text = [rng.randrange(3) for _ in range(30)]
    for end, token_id in enumerate(text, start=1):
        tree.append(token_id)
        earlier = {tuple(text[i:j]) for i in range(end) for j in range(i + 1, end)}
        lengths = [n for n in range(1, max_depth) if n < end and tuple(text[end - n : end]) in earlier]
        assert depth_of(tree) == max(lengths, default=0)
    tree.close()
    parts = {tuple(text[i:j]) for i in range(30) for j in range(i + 1, 31)}
    for _ in range(20):
        query = [rng.randrange(3) for _ in range(8)]
        place = tree.longest_match(query)
        lengths = [n for n in range(1, max_depth) if tuple(query[-n:]) in parts]
        assert (0 if place is None else place.depth) == max(lengths, default=0)


def test_followers_come_by_their_share_and_equals_by_their_place():
    tree = tree_of([1, 5, 1, 6, 1, 5, 1, 7])
    assert next_of(tree, 1) == [(5, 0.5), (7, 0.25), (6, 0.25)]
    place = tree.longest_match([1])
    assert place is not None
    likeliest = place.likeliest()
    assert likeliest is not None
    assert (likeliest.token_id, likeliest.share, likeliest.place.depth) == (5, 0.5, 2)
    assert len(place.followers(2)) == 2


def test_where_a_text_ends_its_share_of_what_follows_is_missing():
    tree = tree_of([1, 2], [1, 2, 3], [4, 1, 2])
    assert next_of(tree, 1, 2) == [(3, pytest.approx(1 / 3))]
    assert next_of(tree_of([1, 2]), 1, 2) == []


def test_a_single_occurrence_is_followed_beyond_the_depth():
    tree = tree_of(list(range(20)), max_depth=4)
    place = tree.longest_match([3, 4])
    assert place is not None
    followed = []
    while (follower := place.likeliest()) is not None:
        followed.append(follower.token_id)
        place = follower.place
    assert followed == list(range(5, 20))


def test_a_match_is_shorter_than_the_tree_is_deep():
    tree = tree_of(list(range(20)), max_depth=4)
    place = tree.longest_match(list(range(10)))
    assert place is not None
    assert place.depth == 3


def test_an_unknown_last_token_matches_nothing():
    assert tree_of([1, 2, 3]).longest_match([1, 2, 9]) is None
    assert tree_of([1, 2, 3]).longest_match([]) is None
    assert SuffixTree(4).longest_repeat() is None


def test_a_removed_text_leaves_the_others_matches():
    tree = SuffixTree(6)
    texts = []
    for text in ([1, 2, 3, 4], [2, 3, 9]):
        for token_id in text:
            tree.append(token_id)
        texts.append(tree.close())
    tree.remove(texts[0])
    assert next_of(tree, 2, 3) == [(9, 1.0)]
    assert tree.longest_match([4]) is None


def test_its_size_is_linear_in_the_text_whatever_its_depth():
    rng = random.Random(0)
    for text in ([7] * 2000, [1, 2, 3] * 600, [rng.randrange(50) for _ in range(2000)]):
        tree = tree_of(text, max_depth=24)
        assert sum(1 for _ in tree.nodes()) <= 2 * len(text) + 24


def test_wrong_counts_are_noticed():
    tree = tree_of([1, 2, 1, 3])
    next(node for node, _ in tree.nodes() if node.children).count -= 1
    with pytest.raises(AssertionError, match="out of nowhere"):
        tree.check_integrity()


def test_a_tree_of_depth_one_is_refused():
    with pytest.raises(ValueError, match="max_depth"):
        SuffixTree(1)
