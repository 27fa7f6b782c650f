"""Grow drafts level by level: which nodes get children next, how many, and which of them make up the draft.

A chain is a tree whose nodes have one child each. Two policies:

- *Best first* (EAGLE-2, Li et al. 2024): the likeliest candidates of each level get children, the best nodes of all
  levels are the draft. Its tokens are point masses, so the choice may look at anything.
- *Drawn*: children are drawn from their parent's row and all of them are kept. The shape is fixed before the first is
  drawn (as in Sequoia, Chen et al. 2024, and SpecInfer, Miao et al. 2024): a node's place in it, its parent's row and
  nothing else decide how many children it has.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from outrider.drafter_service.engine.draft_sampler import (
    Children,
    ChildrenOnDevice,
    ReadBack,
    first_ids,
    launch_children,
    read_levels,
    select_rows,
)
from outrider.drafter_service.engine.draft_tree import ChosenNodes, DraftTree
from outrider.drafter_service.engine.drafter import Ask
from outrider.verifier_service.gpu.transfers import CopyBack
from outrider.verifier_service.messages.batch import placeholder_token
from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, ROOT, Draft, SparseRow, require
from outrider.verifier_service.messages.request import GREEDY_TEMPERATURE
from outrider.verifier_service.messages.tree import chain_parents

FIRST_CHANCE = 0.6  # of a drawn first child to be accepted, as shapes assume it …
SIBLING_RATIO = 0.25  # … and of each sibling that is tried after it, relative to the one before


class Growth(Protocol):
    """A draft in the making; it is complete when no node wants children."""

    tree: DraftTree
    frontier: list[int]  # the nodes whose children are wanted next; at first the last forced token, or ROOT
    is_drawn: bool  # whether children are to be drawn at random where the request allows it
    is_chain: bool  # whether every node has one child

    @property
    def num_children(self) -> int:
        """The most children that a node of the frontier can use."""

    @property
    def chain_left(self) -> int:
        """How many tokens of a chain are to follow."""

    def grow(self, found: Sequence[Children]) -> None:
        """Add the children of the frontier, in its order, and move it one level down."""

    def chosen(self) -> ChosenNodes:
        """Return the nodes of the draft as far as it has grown."""

    def rows(self) -> tuple[SparseRow, ...]:
        """Return what the draft's tokens were drawn from, as `Draft` carries it; none for point masses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeConfig:
    """How trees are grown.

    `top_k`: the likeliest tokens, best first, as point masses. `sampled`: the same, but where a request samples without
    a seed its tokens are drawn without replacement, in a fixed shape: such a target seldom draws a point mass.
    """

    method: str = "top_k"
    branching: int = 4  # children of one node

    def __post_init__(self) -> None:
        require(self.method in ("top_k", "sampled"), "method", "top_k or sampled")
        require(self.branching >= 1, "branching", "positive")


DEFAULT_TREES = TreeConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRules:
    """How tokens are chosen from logits."""

    rng: torch.Generator  # of the host; it draws unseeded drafts
    vocab_size: int  # drafts are made of the first ids: those that the target knows, too
    top_n: int = 32  # tokens of a row on the wire
    trees: TreeConfig = DEFAULT_TREES
    read_back: ReadBack = CopyBack  # waits for what lies where the logits are


def start_growth(ask: Ask, trees: TreeConfig, *, vocab_size: int, max_nodes: int | None = None) -> Growth:
    """Start a chain, or a tree where the ask allows one.

    Forced tokens end before the first from `vocab_size` on. `max_nodes` limits trees further than the ask does.
    """
    forced_ids = list(itertools.takewhile(lambda token_id: token_id < vocab_size, ask.forced_ids))
    num_nodes = ask.max_nodes if max_nodes is None else min(ask.max_nodes, max_nodes)
    has_rows = draws_rows(ask)
    if not num_nodes:
        return ChainGrowth(forced_ids, depth=ask.length, has_rows=has_rows)
    shape = {"depth": ask.length, "max_nodes": num_nodes, "branching": trees.branching}
    if has_rows and trees.method == "sampled":
        return DrawnGrowth(forced_ids, has_rows=has_rows, **shape)
    return BestFirstGrowth(forced_ids, **shape)


def draws_rows(ask: Ask) -> bool:
    """Return whether an ask's tokens may be drawn from rows: greedy and seeded requests take the likeliest."""
    return ask.sampling.temperature > GREEDY_TEMPERATURE and ask.sampling.seed is None


def chain_growth(ask: Ask, depth: int) -> ChainGrowth:
    """Start a chain: greedy and seeded requests take the likeliest tokens, others draw theirs from rows."""
    return ChainGrowth(ask.forced_ids, depth=depth, has_rows=draws_rows(ask))


class ChainGrowth:
    """One token after another, each drawn or the likeliest."""

    is_drawn = is_chain = True
    num_children = 1

    def __init__(self, forced_ids: Sequence[int], *, depth: int, has_rows: bool) -> None:
        self.tree = DraftTree()
        _add_forced(self.tree, forced_ids[:depth])
        self._rows = [_certain(token_id) for token_id in forced_ids[:depth]] if has_rows else []
        self._depth = depth
        self._follow()

    def __len__(self) -> int:
        return len(self.tree)

    @property
    def chain_left(self) -> int:
        return self._depth - len(self.tree)

    def grow(self, found: Sequence[Children]) -> None:
        (children,) = found
        self.tree.add(len(self.tree) - 1, children.token_ids[0], children.probs[0])
        if children.row is not None:
            self._rows.append(children.row)
        self._follow()

    def _follow(self) -> None:
        last = len(self.tree) - 1  # ROOT of an empty one
        self.frontier = [last] if last + 1 < self._depth else []

    def chosen(self) -> ChosenNodes:
        tree = self.tree
        return ChosenNodes(
            token_ids=tuple(tree.token_ids), parents=chain_parents(len(tree)), confidences=tuple(tree.probs)
        )

    def rows(self) -> tuple[SparseRow, ...]:
        return tuple(self._rows)


class BestFirstGrowth:
    """The best `max_nodes` nodes by the chance of their whole path, none deeper than `depth`."""

    is_drawn = is_chain = False
    chain_left = 0

    def __init__(self, forced_ids: Sequence[int], *, depth: int, max_nodes: int, branching: int) -> None:
        self.tree = DraftTree()
        self._depth, self._max_nodes, self._branching = depth, max_nodes, branching
        self._beam = max(branching, -(-max_nodes // depth))
        last = _add_forced(self.tree, forced_ids[: min(depth, max_nodes)])
        self.frontier = [last] if len(self.tree) < min(depth, max_nodes) else []

    @property
    def num_children(self) -> int:
        return self._branching

    def grow(self, found: Sequence[Children]) -> None:
        first_new = len(self.tree)
        for parent, children in zip(self.frontier, found, strict=True):
            for token_id, prob in zip(children.token_ids[: self._branching], children.probs, strict=False):
                self.tree.add(parent, token_id, prob)
        # what is not among the best now never will be, and neither will its children
        scores = self.tree.scores
        best = heapq.nsmallest(self._max_nodes, range(len(scores)), key=lambda index: (-scores[index], index))
        is_last = self.tree.depths[first_new] + 1 >= self._depth
        new = [] if is_last else [index for index in best if index >= first_new]
        self.frontier = sorted(new[: self._beam])

    def chosen(self) -> ChosenNodes:
        return self.tree.best(self._max_nodes)

    def rows(self) -> tuple[SparseRow, ...]:
        return ()


class DrawnGrowth:
    """Every child that is drawn, in a fixed shape of at most `max_nodes` nodes.

    Greedy and seeded requests take their likeliest children instead of drawing them, as point masses.
    """

    is_drawn, is_chain = True, False
    chain_left = 0

    def __init__(
        self, forced_ids: Sequence[int], *, depth: int, max_nodes: int, branching: int, has_rows: bool
    ) -> None:
        self.tree = DraftTree()
        forced_ids = forced_ids[: min(depth, max_nodes)]
        last = _add_forced(self.tree, forced_ids)
        self._rows = [_certain(token_id) for token_id in forced_ids] if has_rows else []
        self._shape = fixed_shape(depth - len(forced_ids), max_nodes - len(forced_ids), branching)
        self._place = {last: ROOT}  # of a node in the shape, whose root is the last forced token
        self.frontier = [last] if self._shape[ROOT] else []

    @property
    def num_children(self) -> int:
        return max(len(self._shape[self._place[node]]) for node in self.frontier)

    def grow(self, found: Sequence[Children]) -> None:
        grown: list[int] = []
        for parent, children in zip(self.frontier, found, strict=True):
            places = self._shape[self._place[parent]]
            for place, token_id, prob in zip(places, children.token_ids, children.probs, strict=False):
                node = self.tree.add(parent, token_id, prob)
                self._place[node] = place
                if self._shape[place]:
                    grown.append(node)
            if children.row is not None:
                self._rows.append(children.row)
        self.frontier = grown

    def chosen(self) -> ChosenNodes:
        return self.tree.chosen(range(len(self.tree)))

    def rows(self) -> tuple[SparseRow, ...]:
        return tuple(self._rows)


@functools.lru_cache(maxsize=256)
def fixed_shape(depth: int, max_nodes: int, branching: int) -> dict[int, tuple[int, ...]]:
    """Return the children of each place of the shape with the most accepted tokens to expect, ROOT's among them.

    Chances are guesses that are the same everywhere: of a first child FIRST_CHANCE, of each next one SIBLING_RATIO
    times the one before.
    """
    shape = DraftTree()
    children: dict[int, list[int]] = {ROOT: []}
    candidates = [(-FIRST_CHANCE, ROOT, 0)] if depth > 0 else []  # (- chance of being reached and right, parent, rank)
    while candidates and len(shape) < max_nodes:
        score, parent, rank = heapq.heappop(candidates)
        place = shape.add(parent, rank, FIRST_CHANCE * SIBLING_RATIO**rank)
        children[parent].append(place)
        children[place] = []
        if rank + 1 < branching:
            heapq.heappush(candidates, (score * SIBLING_RATIO, parent, rank + 1))
        if shape.depths[place] + 1 < depth:
            heapq.heappush(candidates, (score * FIRST_CHANCE, place, 0))
    return {place: tuple(found) for place, found in children.items()}


def result_of(ask: Ask, chosen: ChosenNodes, rows: tuple[SparseRow, ...] = ()) -> Draft:
    """Answer an ask by a tree where it asks for one, else by the same nodes as a chain."""
    return ask.answer(
        chosen.token_ids,
        draft_probs=rows or None,
        parents=chosen.parents if ask.max_nodes else None,
        confidences=chosen.confidences,
    )


def answer_of(ask: Ask, growth: Growth) -> Draft:
    """Answer an ask by what its draft has grown to."""
    return result_of(ask, growth.chosen(), growth.rows())


@dataclass(slots=True)
class Growing:
    """A draft whose frontier is to get its children."""

    ask: Ask
    growth: Growth
    first_position: int  # of the draft's first token, for the noise of seeded requests
    num_open: int = 0  # tokens of a chain that were chosen, and are not read yet

    @property
    def positions(self) -> list[int]:
        """Where the children of the frontier stand, or those of the placeholders after it."""
        depths, first = self.growth.tree.depths, self.first_position + self.num_open
        return [first + (0 if node == ROOT else depths[node] + 1) for node in self.growth.frontier]


# Takes placeholders by the index of their chain, the numbers that they are among, and how many placeholders precede
# them in their chains; returns float32 logits [num_tokens, draft_vocab_size].
PlaceholderForward = Callable[[dict[int, int], torch.Tensor, int], torch.Tensor]


class Levels:
    """Levels of drafts that are launched one after another on the logits' device, and read together.

    A chain's next forward needs no token value on the host: it finds the token on the device, as a placeholder. A draft
    that may fork needs its level read before the next level can be laid out.
    """

    def __init__(self, rules: DraftRules) -> None:
        self._rules = rules
        self._levels: list[Sequence[Growing]] = []
        self._found: list[list[ChildrenOnDevice]] = []  # by level

    def launch(self, growing: Sequence[Growing], logits: torch.Tensor) -> None:
        """Choose the children of every node of every frontier: logits float32 [num_nodes, draft_vocab_size]."""
        owners = [each for each in growing for _ in each.growth.frontier]
        positions = [position for each in growing for position in each.positions]
        found: list[ChildrenOnDevice] = []
        for is_drawn in (True, False):
            rows = [row for row, owner in enumerate(owners) if owner.growth.is_drawn == is_drawn]
            if not rows:
                continue
            launched = launch_children(
                select_rows(logits, rows),
                [owners[row].ask.sampling for row in rows],
                [positions[row] for row in rows],
                self._rules.rng,
                vocab_size=self._rules.vocab_size,
                num_children=max(owners[row].growth.num_children for row in rows),
                top_n=self._rules.top_n,
                sampled=is_drawn,
            )
            if len(rows) < len(owners):
                launched = [replace(one, rows=[rows[row] for row in one.rows]) for one in launched]
            found += launched
        self._levels.append(growing)
        self._found.append(found)

    def follow(self, chains: Sequence[Growing], num_following: Sequence[int], forward: PlaceholderForward) -> None:
        """Take the chains of the last level `num_following` tokens further each, one forward for every level."""
        last, num_open = list(range(len(chains))), 0  # the chains of the last level
        while any(num_following[index] > num_open for index in last):
            numbers, places = first_ids(self._found[-1])
            opened = {
                index: placeholder_token(place)
                for index, place in zip(last, places, strict=True)
                if num_following[index] > num_open
            }
            logits = forward(opened, numbers, num_open)
            num_open += 1
            for index in opened:
                chains[index].num_open = num_open
            last = list(opened)
            self.launch([chains[index] for index in last], logits)

    def read(self) -> None:
        """Wait for the device, and let all drafts grow."""
        for growing, found in zip(self._levels, read_levels(self._found, self._rules.read_back), strict=True):
            children = iter(found)
            for each in growing:
                each.growth.grow([next(children) for _ in each.growth.frontier])


def stem_length(tree: DraftTree) -> int:
    """Count the nodes before the first fork: each of them is its parent's only child."""
    forks = (index for index, parent in enumerate(tree.parents) if parent != index - 1)
    first = next(forks, None)
    return len(tree) if first is None else tree.parents[first] + 1


def nodes_to_compute(tree: DraftTree, frontier: Sequence[int], stem: int) -> list[int]:
    """Return the frontier and what lies between it and the stem, in the tree's order."""
    needed: set[int] = set()
    for index in frontier:
        while index >= stem and index not in needed:
            needed.add(index)
            index = tree.parents[index]
    return sorted(needed)


def _add_forced(tree: DraftTree, forced_ids: Sequence[int]) -> int:
    """Start a tree with a chain of tokens that cannot be others; return the last one."""
    last = ROOT
    for token_id in forced_ids:
        last = tree.add(last, token_id, 1.0)
    return last


def _certain(token_id: int) -> SparseRow:
    return SparseRow(token_ids=(token_id,), weights=(DRAFT_PROB_SCALE,))
