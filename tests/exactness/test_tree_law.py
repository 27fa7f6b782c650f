"""The law under draft trees, through the whole engine, and the mistakes with trees that must show.

The target is the one of `markov_target`; the drafter knows laws of its own, far from the target's, and draws trees
of seven nodes: three children of the root, then two, one and one. 12,000 tokens per case, alpha 1e-5: honest
trees pass, and each planted mistake is caught by the very same comparison, all but one with p < 1e-28.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from exactness.drafter_cells import SERVED, Bench, Cell, Place, Shape, drive
from exactness.drafter_runs import (
    ALPHA,
    LAW_PROMPT,
    NUM_LAW_TOKENS,
    NUM_TOKENS_PER_LAW_REQUEST,
    MarkovRuns,
    law_requests,
)
from fakes.scripted import random_laws, sparse_row
from outrider.drafter_service.engine.drafter import Ask, DraftEngineConfig, SessionKey
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.service.local_client import LocalDraftClient
from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, ROOT, Draft, DraftNeeds, SparseRow
from outrider.verifier_service.messages.request import AcceptanceRule
from tiny.markov_target import VOCAB_SIZE, count_transitions, transition_p_value

NUM_CHILDREN = {ROOT: 3, 0: 2, 1: 1, 2: 1}
NUM_NODES = sum(NUM_CHILDREN.values())
pytestmark = pytest.mark.timeout(3600)


@dataclass(frozen=True, slots=True)
class Tree:
    """What was drawn: rows[i] is that of the i-th parent with children, in the order of first children."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    rows: tuple[SparseRow, ...] | None

    @property
    def inner(self) -> list[int]:
        return list(dict.fromkeys(self.parents))

    def weight(self, node: int) -> int:
        """Return the weight of a node's token in the row that it was drawn from."""
        assert self.rows is not None
        row = self.rows[self.inner.index(self.parents[node])]
        return row.weights[row.token_ids.index(self.token_ids[node])]

    def pruned(self, is_kept: Callable[[int], bool]) -> Tree:
        """Leave out the nodes that are not kept, and all below them."""
        new_index = {ROOT: ROOT}
        for node, parent in enumerate(self.parents):
            if parent in new_index and is_kept(node):
                new_index[node] = len(new_index) - 1
        kept = [node for node in new_index if node != ROOT]
        parents = [self.parents[node] for node in kept]
        rows = None
        if self.rows is not None:
            by_parent = dict(zip(self.inner, self.rows, strict=True))
            rows = tuple(by_parent[parent] for parent in dict.fromkeys(parents))
        return Tree(tuple(self.token_ids[n] for n in kept), tuple(new_index[p] for p in parents), rows)


DrawSiblings = Callable[[SparseRow, int, random.Random], list[int]]


def without_replacement(row: SparseRow, count: int, rng: random.Random) -> list[int]:
    """Draw by a race: each token's time is exponential with its weight as rate, and the first ones are drawn."""
    times = [rng.expovariate(weight) for weight in row.weights]
    return [row.token_ids[index] for index in sorted(range(len(times)), key=times.__getitem__)[:count]]


def repeats_dropped(row: SparseRow, count: int, rng: random.Random) -> list[int]:
    """Draw with replacement and send what is new: whether there is a next sibling depends on earlier ones alone."""
    return list(dict.fromkeys(rng.choices(row.token_ids, row.weights, k=count)))


def repeats_exchanged(row: SparseRow, count: int, rng: random.Random) -> list[int]:
    """Mistake: draw with replacement, send the likeliest other token for a repeat, and say that it was without."""
    siblings: list[int] = []
    for token_id in rng.choices(row.token_ids, row.weights, k=count):
        others = (other for other in row.token_ids if other not in siblings)
        siblings.append(next(others) if token_id in siblings else token_id)
    return siblings


def likeliest_beside_the_first(row: SparseRow, count: int, rng: random.Random) -> list[int]:
    """Mistake: draw the first sibling, and take the likeliest others as if they had been drawn too."""
    first = without_replacement(row, 1, rng)
    return [*first, *(token_id for token_id in row.token_ids if token_id not in first)][:count]


def likeliest_first(row: SparseRow, count: int, rng: random.Random) -> list[int]:
    """Mistake: send siblings in another order than that in which they were drawn."""
    return sorted(without_replacement(row, count, rng), key=row.token_ids.index)


# --- reports: what stands between a drawn tree and what is sent ---


def honest(tree: Tree) -> Tree:
    return tree


def as_point_masses(tree: Tree) -> Tree:
    """Claim nothing; then trees may be cut by whatever was drawn."""
    return replace(only_confident(tree), rows=None)


def only_confident(tree: Tree) -> Tree:
    """Mistake: send only what the drafter itself found likely."""
    return tree.pruned(lambda node: tree.weight(node) >= 0.25 * DRAFT_PROB_SCALE)


def as_many_as_the_first_says(tree: Tree) -> Tree:
    """Mistake: let the first sibling drawn decide how many are sent, itself among them."""
    return _first_siblings(tree, tree.token_ids[0] % 3)


def as_many_more_as_the_first_says(tree: Tree) -> Tree:
    """Let the first sibling decide how many come after it: they are only judged once it was rejected."""
    return _first_siblings(tree, 1 + tree.token_ids[0] % 3)


def _first_siblings(tree: Tree, count: int) -> Tree:
    return tree.pruned(lambda node: tree.parents[node] != ROOT or node < count)


def only_with_likely_children(tree: Tree) -> Tree:
    """Mistake: send a node only if what was drawn after it looks promising."""
    promising = {p for node, p in enumerate(tree.parents) if tree.weight(node) >= 0.3 * DRAFT_PROB_SCALE}
    return tree.pruned(lambda node: tree.parents[node] != ROOT or node in promising)


def claiming_sharper(tree: Tree) -> Tree:
    """Mistake: report rows that are more certain than those drawn from."""
    assert tree.rows is not None
    return replace(tree, rows=tuple(_sharpened(row) for row in tree.rows))


def claiming_others_rows(tree: Tree) -> Tree:
    """Mistake: report the rows in another order than that of first children."""
    assert tree.rows is not None
    return replace(tree, rows=(tree.rows[0], *reversed(tree.rows[1:])))


def _sharpened(row: SparseRow) -> SparseRow:
    weights = np.zeros(VOCAB_SIZE)
    weights[list(row.token_ids)] = np.asarray(row.weights, dtype=np.float64) ** 1.5
    return sparse_row(weights / weights.sum(), len(row.token_ids))


class TreeDrafter:
    """A `Drafter` of known laws: laws [VOCAB_SIZE] * 3."""

    vocab_size = VOCAB_SIZE
    max_model_len = 1 << 20
    needs = DraftNeeds()

    def __init__(self, laws: np.ndarray, draw: DrawSiblings, report: Callable[[Tree], Tree]) -> None:
        pairs = itertools.product(range(VOCAB_SIZE), repeat=2)
        self._rows = {pair: sparse_row(laws[pair], VOCAB_SIZE) for pair in pairs}
        self._draw, self._report = draw, report
        self._rng = random.Random(0)

    def draft(self, asks: Sequence[Ask], *, max_num_tokens: int) -> list[Draft]:
        return [self._answer(ask) for ask in asks]

    def release(self, key: SessionKey) -> None:
        """Nothing is kept."""

    def check_integrity(self, keys: Collection[SessionKey]) -> None:
        """Nothing is kept."""

    def _answer(self, ask: Ask) -> Draft:
        is_tree = ask.max_nodes >= NUM_NODES
        tree = self._tree(ask.token_ids[-2:]) if is_tree else self._chain(ask.token_ids[-2:])
        if ask.sampling.temperature == 0.0 or ask.sampling.seed is not None:
            tree = replace(tree, rows=None)
        elif is_tree:
            tree = self._report(tree)
        return ask.answer(
            tree.token_ids,
            draft_probs=tree.rows,
            parents=tree.parents if is_tree else None,
        )

    def _chain(self, last: Sequence[int]) -> Tree:
        """Draw one token: no tree is asked for where there is room for no more."""
        row = self._rows[last[0], last[1]]
        return Tree(tuple(without_replacement(row, 1, self._rng)), (ROOT,), (row,))

    def _tree(self, last: Sequence[int]) -> Tree:
        token_ids: list[int] = []
        parents: list[int] = []
        rows: list[SparseRow] = []
        first = self._add(last, ROOT, token_ids, parents, rows)
        for node in first:
            self._add((last[-1], token_ids[node]), node, token_ids, parents, rows)
        return Tree(tuple(token_ids), tuple(parents), tuple(rows))

    def _add(
        self, last: Sequence[int], parent: int, token_ids: list[int], parents: list[int], rows: list[SparseRow]
    ) -> range:
        """Draw a node's children; return their indices."""
        row = self._rows[last[0], last[1]]
        drawn = self._draw(row, NUM_CHILDREN[parent], self._rng)
        start = len(token_ids)
        token_ids += drawn
        parents += [parent] * len(drawn)
        rows.append(row)
        return range(start, len(token_ids))


# --- the comparison ---


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Iterator[MarkovRuns]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    bench = Bench()
    yield MarkovRuns(bench, tmp_path_factory.mktemp("markov"))
    bench.close()
    torch.set_num_threads(threads)


def p_value(
    runs: MarkovRuns,
    draw: DrawSiblings = without_replacement,
    report: Callable[[Tree], Tree] = honest,
    num_tokens: int = NUM_LAW_TOKENS,
) -> float:
    """Have trees drawn and sent so, and compare what is committed with the target's laws."""
    laws = random_laws(VOCAB_SIZE, seed=2)[2]
    config = DraftEngineConfig(max_sessions=1 << 12, max_num_batched_tokens=1 << 14, max_tree_nodes=NUM_NODES)
    drafter = DraftEngine(TreeDrafter(laws, draw, report), clock=lambda: 0.0, config=config)
    engine = runs.tree_engine(LocalDraftClient(drafter))
    requests = law_requests(num_requests=num_tokens // NUM_TOKENS_PER_LAW_REQUEST)
    generated = drive(engine, requests)
    assert engine.drafting.fallbacks.total() == 0, engine.drafting.fallbacks
    assert generated.num_accepted_tokens > num_tokens / 8
    outputs = [tokens for name, tokens in generated.token_ids.items() if name.startswith("rejection")]
    return transition_p_value(count_transitions(LAW_PROMPT, outputs), runs.target.laws)


@pytest.mark.parametrize(
    ("draw", "report"),
    [
        (without_replacement, honest),
        (repeats_dropped, honest),
        (without_replacement, as_point_masses),
        (without_replacement, as_many_more_as_the_first_says),
    ],
)
def test_honest_trees_keep_the_law(runs: MarkovRuns, draw: DrawSiblings, report: Callable[[Tree], Tree]) -> None:
    assert p_value(runs, draw, report) >= ALPHA


@pytest.mark.parametrize(
    ("draw", "num_tokens"),
    [
        (repeats_exchanged, 2 * NUM_LAW_TOKENS),
        (likeliest_beside_the_first, NUM_LAW_TOKENS // 2),
        (likeliest_first, NUM_LAW_TOKENS // 2),
    ],
)
def test_siblings_drawn_otherwise_than_declared_are_detected(
    runs: MarkovRuns, draw: DrawSiblings, num_tokens: int
) -> None:
    assert p_value(runs, draw, num_tokens=num_tokens) < ALPHA


@pytest.mark.parametrize(
    "report",
    [only_confident, as_many_as_the_first_says, only_with_likely_children, claiming_sharper, claiming_others_rows],
)
def test_planted_mistakes_are_detected(runs: MarkovRuns, report: Callable[[Tree], Tree]) -> None:
    assert p_value(runs, report=report, num_tokens=NUM_LAW_TOKENS // 2) < ALPHA


# --- other rules of acceptance ---


def draft_model_cell(shape: Shape) -> Cell:
    return next(
        cell
        for cell in SERVED
        if (cell.variant.name, cell.shape, cell.place) == ("draft_model", shape, Place.IN_PROCESS)
    )


@pytest.mark.parametrize("shape", Shape)
def test_block_verification_keeps_the_law_and_accepts_no_less(runs: MarkovRuns, shape: Shape) -> None:
    """Trees are verified as usual under it."""
    blocks, standard = (
        runs.run(draft_model_cell(shape), rule) for rule in (AcceptanceRule.BLOCK, AcceptanceRule.STANDARD)
    )
    assert blocks.p_value >= ALPHA
    assert blocks.acceptance_rate > standard.acceptance_rate - 0.02


@pytest.mark.parametrize("shape", Shape)
def test_typical_acceptance_changes_the_law_and_is_detected(runs: MarkovRuns, shape: Shape) -> None:
    assert runs.run(draft_model_cell(shape), AcceptanceRule.TYPICAL).p_value < ALPHA
