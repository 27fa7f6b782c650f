"""A counted suffix tree over many texts: built online, bounded in depth; the oldest text can be removed.

Ukkonen's algorithm (1995) over truncated suffixes: the tree has the first `max_depth` tokens of every suffix, and each
node counts the suffixes through it. An edge's label is a span of a text:

            label = source[begin : begin + length]           "the cat" occurred twice, so its node counts 2
    root ──┬── "the cat" ──┬── " sat on…"                    a leaf's label extends to the end of its text
           └── "dog…"      └── " ran…"

There are no suffix links, which removed nodes would break. The next suffix is found from the root by the labels'
lengths alone, in at most `max_depth` hops: an append costs amortised O(max_depth), a draft O(match). Labels refer to
the newest text with these tokens, so no label refers to the oldest text once that is removed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(slots=True, eq=False)
class Node:
    """An edge and its lower end; a leaf's label may end with its text, which may still grow."""

    source: list[int]
    begin: int
    length: int
    count: int = 0  # suffixes that pass through this node or end at it
    children: dict[int, Node] | None = None  # by the first token of their labels; None: a leaf


class Place(NamedTuple):
    """A point in the tree: `offset` tokens down a node's edge, after a match of `depth` tokens."""

    node: Node
    offset: int
    depth: int

    def likeliest(self) -> Follower | None:
        """Return the most frequent next token; among equals, the later one in its text.

        On a leaf's edge there is one occurrence: its text gives the next token, also beyond the tree's depth.
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
    """A token after the match: its share of the occurrences, and the place after it."""

    token_id: int
    share: float
    place: Place


class SuffixTree:
    """The newest text grows (`append`); `close` ends it and begins the next."""

    def __init__(self, max_depth: int) -> None:
        if max_depth < 2:
            raise ValueError("max_depth must be at least 2: a token and what follows it")
        self._max_depth = max_depth
        self._root = Node([], 0, 0, children={})
        self._text: list[int] = []
        # text[head:] is the longest suffix that occurred before: longer suffixes are in the tree and counted, this and
        # shorter ones are not counted yet
        self._head = 0
        self._path = [self._root]  # the nodes from the root to that suffix
        self._offset = 0  # tokens down the last node's edge

    @property
    def max_depth(self) -> int:
        return self._max_depth

    @property
    def token_ids(self) -> list[int]:
        """The growing text; read-only."""
        return self._text

    def append(self, token_id: int) -> None:
        """Append a token to the growing text."""
        tokens = self._text
        tokens.append(token_id)
        end = len(tokens)
        while self._head < end:
            if self._step(token_id):
                if end - self._head == self._max_depth:  # a whole truncated suffix occurred before
                    self._count_head()
                    self._seek(end)
                return
            self._branch(end - 1)
            self._count_head()
            self._seek(end - 1)

    def close(self) -> list[int]:
        """End the text, count its remaining suffixes, and return it."""
        text = self._text
        while self._head < len(text):
            if self._is_within_edge():
                self._split()
            self._count_head()
            self._seek(len(text))
        self._text, self._head = [], 0
        return text

    def remove(self, text: list[int]) -> None:
        """Remove the oldest text, as returned by `close`: O(tokens · max_depth)."""
        for begin in range(len(text)):
            end = min(begin + self._max_depth, len(text))
            node, at = self._root, begin
            while at < end:
                children = node.children
                assert children is not None
                child = children[text[at]]
                child.count -= 1
                if child.count == 0:  # so are all nodes below it
                    del children[text[at]]
                    break
                at += child.length
                node = child

    def is_empty(self) -> bool:
        return not self._root.children and not self._text

    def longest_repeat(self) -> Place | None:
        """Return the place of the growing text's longest suffix that occurred before."""
        depth = len(self._text) - self._head
        return Place(self._path[-1], self._offset, depth) if depth else None

    def longest_match(self, tokens: list[int]) -> Place | None:
        """Return the place of the longest suffix of `tokens` in the tree, shorter than the tree's depth.

        If a suffix occurs, so do all shorter ones: the length is found by bisection.
        """
        best: Place | None = None
        low, high = 0, min(len(tokens), self._max_depth - 1)  # `low` tokens match; more than `high` do not
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
        """Move down by one token; return whether the tree has it."""
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
        if node.children is None:  # a leaf that ended with its text
            node.length = self._offset
            node.children = {}
        leaf = Node(self._text, end, self._max_depth - (end - self._head))
        node.children[self._text[end]] = leaf
        self._path.append(leaf)

    def _split(self) -> None:
        """Insert a node within an edge, at the end of the path."""
        parent, node = self._path[-2:]
        upper = Node(node.source, node.begin, self._offset, node.count)
        node.begin += self._offset
        node.length -= self._offset
        upper.children = {node.source[node.begin]: node}
        assert parent.children is not None
        parent.children[upper.source[upper.begin]] = upper
        self._path[-1] = upper

    def _count_head(self) -> None:
        """Count text[head:], which ends at a node, and move on to the next suffix; labels now refer to this text."""
        at = self._head
        for node in self._path[1:]:
            node.count += 1
            node.source, node.begin = self._text, at
            at += node.length
        self._head += 1

    def _seek(self, end: int) -> None:
        """Find text[head:end], which is in the tree, by the labels' lengths alone."""
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
        """Yield every node except the root, with the number of tokens above its edge."""
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
