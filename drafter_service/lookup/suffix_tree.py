"""A counted suffix tree over many texts, built online, bounded in depth, from which the oldest text can be taken out.

Ukkonen's algorithm (1995) over truncated suffixes: every suffix of a text is in the tree with its first `max_depth`
tokens, and each node counts the suffixes that run through it. An edge's label is a span of a text:

            label = source[begin : begin + length]           "the cat" occurred twice, so its node counts 2
    root ──┬── "the cat" ──┬── " sat on…"                    a leaf's label goes on to the end of its text
           └── "dog…"      └── " ran…"

Instead of following suffix links, which nodes that disappear would break, the next suffix is found from the root by
the labels' lengths alone, in at most `max_depth` hops: an append costs amortised O(max_depth), a draft O(match).
Labels point into the newest text that runs through them, so taking out the oldest text leaves none that points to it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(slots=True, eq=False)
class Node:
    """An edge and its end; a leaf's label may be cut short by the end of its text, which may still grow."""

    source: list[int]
    begin: int
    length: int
    count: int = 0  # suffixes that run through this node, or end at it
    children: dict[int, Node] | None = None  # by the first token of their labels; None: a leaf


class Place(NamedTuple):
    """A point of the tree: `offset` tokens down the edge of a node, reached by matching `depth` tokens."""

    node: Node
    offset: int
    depth: int

    def likeliest(self) -> Follower | None:
        """Return the most frequent next token; among equals the one further on in its text.

        Below a leaf the only occurrence goes on in its text, beyond the tree's depth as well.
        """
        node = self.node
        if node.children is None or self.offset < node.length:
            at = node.begin + self.offset
            if at == len(node.source):
                return None
            return Follower(node.source[at], 1.0, Place(node, self.offset + 1, self.depth + 1))
        child = max(node.children.values(), key=_rank, default=None)
        return None if child is None else self._follower(child)

    def followers(self, max_number: int) -> list[Follower]:
        """Return the most frequent next tokens, likeliest first."""
        node = self.node
        if node.children is None or self.offset < node.length:
            only = self.likeliest()
            return [] if only is None else [only]
        return [self._follower(child) for child in heapq.nlargest(max_number, node.children.values(), key=_rank)]

    def _follower(self, child: Node) -> Follower:
        return Follower(child.source[child.begin], child.count / self.node.count, Place(child, 1, self.depth + 1))


class Follower(NamedTuple):
    """A token that followed what was matched, in which share of the occurrences, and the place after it."""

    token_id: int
    share: float
    place: Place


class SuffixTree:
    """One text grows at its end (`append`); `close` ends it and begins the next."""

    def __init__(self, max_depth: int) -> None:
        if max_depth < 2:
            raise ValueError("max_depth must be at least 2: a token and what follows it")
        self._max_depth = max_depth
        self._root = Node([], 0, 0, children={})
        self._text: list[int] = []
        # the longest suffix of the text that occurred before, text[head:]: longer ones are in the tree and counted,
        # this and shorter ones are not counted yet
        self._head = 0
        self._path = [self._root]  # the nodes that lead to it
        self._offset = 0  # tokens of the last one's label that it takes

    @property
    def max_depth(self) -> int:
        return self._max_depth

    @property
    def token_ids(self) -> list[int]:
        """Return the growing text; to be read only."""
        return self._text

    def append(self, token_id: int) -> None:
        """Let the text grow by a token."""
        tokens = self._text
        tokens.append(token_id)
        end = len(tokens)
        while self._head < end:
            if self._step(token_id):
                if end - self._head == self._max_depth:  # a whole truncated suffix that was there before
                    self._count_head()
                    self._seek(end)
                return
            self._branch(end - 1)
            self._count_head()
            self._seek(end - 1)

    def close(self) -> list[int]:
        """End the text, count what is left of its suffixes, and return it."""
        text = self._text
        while self._head < len(text):
            if self._is_within_edge():
                self._split()
            self._count_head()
            self._seek(len(text))
        self._text, self._head = [], 0
        return text

    def remove(self, text: list[int]) -> None:
        """Take out the oldest text, as `close` returned it: O(tokens · max_depth)."""
        for begin in range(len(text)):
            end = min(begin + self._max_depth, len(text))
            node, at = self._root, begin
            while at < end:
                children = node.children
                assert children is not None
                child = children[text[at]]
                child.count -= 1
                if child.count == 0:  # and so is all below it
                    del children[text[at]]
                    break
                at += child.length
                node = child

    def is_empty(self) -> bool:
        return not self._root.children and not self._text

    def longest_repeat(self) -> Place | None:
        """Return the place of the longest suffix of the growing text that occurred before."""
        depth = len(self._text) - self._head
        return Place(self._path[-1], self._offset, depth) if depth else None

    def longest_match(self, tokens: list[int]) -> Place | None:
        """Return the place of the longest suffix of `tokens` that occurs, shorter than the tree is deep.

        Every suffix of what occurs occurs too, so the length is found by bisection.
        """
        best: Place | None = None
        low, high = 0, min(len(tokens), self._max_depth - 1)  # `low` tokens match, more than `high` do not
        while low < high:
            middle = (low + high + 1) // 2
            place = self._find(tokens[len(tokens) - middle :])
            if place is None:
                high = middle - 1
            else:
                low, best = middle, place
        return best

    # --- growth ---

    def _step(self, token_id: int) -> bool:
        """Go down by one token, if the tree does."""
        node = self._path[-1]
        if self._offset < node.length:
            at = node.begin + self._offset
            if at == len(node.source) or node.source[at] != token_id:
                return False
            self._offset += 1
            return True
        child = None if node.children is None else node.children.get(token_id)
        if child is None:
            return False
        self._path.append(child)
        self._offset = 1
        return True

    def _is_within_edge(self) -> bool:
        node = self._path[-1]
        return self._offset < node.length and node.begin + self._offset < len(node.source)

    def _branch(self, end: int) -> None:
        """Add a leaf for text[head:] at the place of text[head:end]."""
        if self._is_within_edge():
            self._split()
        node = self._path[-1]
        if node.children is None:  # a leaf cut short by the end of its text
            node.length = self._offset
            node.children = {}
        leaf = Node(self._text, end, self._max_depth - (end - self._head))
        node.children[self._text[end]] = leaf
        self._path.append(leaf)

    def _split(self) -> None:
        """Put a node where the path ends, within an edge."""
        parent, node = self._path[-2:]
        upper = Node(node.source, node.begin, self._offset, node.count)
        node.begin += self._offset
        node.length -= self._offset
        upper.children = {node.source[node.begin]: node}
        assert parent.children is not None
        parent.children[upper.source[upper.begin]] = upper
        self._path[-1] = upper

    def _count_head(self) -> None:
        """Count text[head:], which ends at a node, and go on to the next suffix; labels come to lie in this text."""
        at = self._head
        for node in self._path[1:]:
            node.count += 1
            node.source, node.begin = self._text, at
            at += node.length
        self._head += 1

    def _seek(self, end: int) -> None:
        """Find text[head:end], which is in the tree: only the labels' lengths are looked at."""
        tokens = self._text
        node, at, offset = self._root, self._head, 0
        self._path = [node]
        while at < end:
            assert node.children is not None
            node = node.children[tokens[at]]
            self._path.append(node)
            offset = min(node.length, end - at)
            at += offset
        self._offset = offset

    # --- search ---

    def _find(self, tokens: list[int]) -> Place | None:
        node, at, end, length = self._root, 0, len(tokens), 0
        while at < end:
            child = None if node.children is None else node.children.get(tokens[at])
            if child is None:
                return None
            node, length = child, min(child.length, end - at)
            if node.source[node.begin : node.begin + length] != tokens[at : at + length]:
                return None
            at += length
        return Place(node, length, end) if end else None

    def nodes(self) -> Iterator[tuple[Node, int]]:
        """Yield every node but the root, with the number of tokens before its label."""
        stack = [(child, 0) for child in (self._root.children or {}).values()]
        while stack:
            node, depth = stack.pop()
            yield node, depth
            stack += [(child, depth + node.length) for child in (node.children or {}).values()]

    def check_integrity(self) -> None:
        """Raise `AssertionError` if counts, labels and children contradict each other."""
        for node, depth in self.nodes():
            assert node.count > 0, "a node that no suffix runs through"
            assert 0 <= node.begin < len(node.source), "a label outside its text"
            if node.children is None:
                assert depth + node.length == self._max_depth, "a leaf that ends before the tree's depth"
                continue
            assert depth + node.length < self._max_depth, "a node below the tree's depth"
            assert node.begin + node.length <= len(node.source), "an inner label cut by the end of its text"
            assert node.count >= sum(child.count for child in node.children.values()), "suffixes out of nowhere"
            for token_id, child in node.children.items():
                assert child.source[child.begin] == token_id, "a child under another's token"


def _rank(node: Node) -> tuple[int, int]:
    return node.count, node.begin
