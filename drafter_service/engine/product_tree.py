"""The best part of a tree in which every node of one depth has the same children: rows that do not see each other."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from outrider.drafter_service.engine.draft_sampler import Children
from outrider.drafter_service.engine.draft_tree import ChosenNodes, DraftTree
from outrider.verifier_service.messages.draft import ROOT


def best_of_product(levels: Sequence[Children], forced_ids: Sequence[int], *, max_nodes: int) -> ChosenNodes:
    """Find the best `max_nodes` nodes, forced tokens first, of the tree in which every node has the same children.

    `levels` are the children at each depth after the forced tokens, likeliest first. Of the candidates only the best
    unused child of each node is looked at: O(max_nodes log max_nodes).
    """
    tree = DraftTree()
    last = ROOT
    for token_id in forced_ids[:max_nodes]:
        last = tree.add(last, token_id, 1.0)
    num_forced = len(tree)
    candidates = [(-levels[0].probs[0], last, 0)] if levels else []  # (- score, parent, rank among its children)
    while candidates and len(tree) < max_nodes:
        _, parent, rank = heapq.heappop(candidates)
        depth = 0 if parent == ROOT else tree.depths[parent] + 1
        above = 1.0 if parent == ROOT else tree.scores[parent]
        level, *below = levels[depth - num_forced :][:2]
        node = tree.add(parent, level.token_ids[rank], level.probs[rank])
        if rank + 1 < len(level.probs):
            heapq.heappush(candidates, (-above * level.probs[rank + 1], parent, rank + 1))
        if below:
            heapq.heappush(candidates, (-tree.scores[node] * below[0].probs[0], node, 0))
    return tree.best(max_nodes)
