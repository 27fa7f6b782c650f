"""The scheduler's decision for one step, and the packed batch made of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outrider.verifier_service.messages.batch import ScheduledBatch, slots_of
from outrider.verifier_service.messages.draft import ROOT, Draft
from outrider.verifier_service.messages.request import Request
from outrider.verifier_service.messages.tree import depths
from outrider.verifier_service.scheduling.masks import PlacedMasks, Tree

MAX_PROMPT_ROWS = 256  # logits rows per step for prompt_logprobs; a row is as wide as the vocabulary


@dataclass(slots=True)  # not frozen: one per request and step, and frozen takes 2.4 times as long
class ScheduledRequest:
    """One request's share of a step.

    token_ids  |<-- computed -->|<------------- num_new_tokens -------------->|
                                |<- to the end ->|<-- `draft` -->|<- `masks` -> |   both only if the step `samples`
    """

    request: Request
    num_new_tokens: int  # draft and masks included
    draft: Draft | None  # to verify in this step, possibly cut; never empty
    samples: bool  # the step computes the request's last token and so samples the next
    num_prompt_rows: int = 0  # logits rows for prompt_logprobs, before the sampled ones, from num_computed_tokens on
    masks: PlacedMasks | None = None  # their logits rows come after the sampled ones


@dataclass(slots=True)
class StepPlan:
    """A schedule under construction."""

    budget: int  # remaining tokens
    items: list[ScheduledRequest] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # KV blocks (source, target)
    num_prompt_rows_left: int = MAX_PROMPT_ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One step. `batch` shares the requests' block tables: it is valid until the first `commit`."""

    items: tuple[ScheduledRequest, ...]  # in the batch's order
    preempted: tuple[Request, ...]  # back in the waiting queue, least senior first
    # logits_indices: each item's prompt rows, then, if it samples, its last 1 + len(draft), then those of its masks
    batch: ScheduledBatch


def first_nodes(draft: Draft, *, max_nodes: int, max_depth: int) -> Draft:
    """Return a draft's first `max_nodes` tokens, up to the first at depth `max_depth` (children of the root: 0).

    Only counts and shape decide: cutting a sampled draft so does not change the law.
    """
    if draft.parents is None:
        num_kept = min(len(draft.token_ids), max_nodes, max_depth)
    else:
        fitting = itertools.takewhile(lambda depth: depth < max_depth, depths(draft.parents))
        num_kept = min(max_nodes, sum(1 for _ in fitting))
    if num_kept >= len(draft.token_ids):
        return draft
    parents = None if draft.parents is None else draft.parents[:num_kept]
    num_rows = num_kept if parents is None else len(set(parents))
    return replace(
        draft,
        token_ids=draft.token_ids[:num_kept],
        draft_probs=None if draft.draft_probs is None else draft.draft_probs[:num_rows],
        parents=parents,
        confidences=None if draft.confidences is None else draft.confidences[:num_kept],
    )


def kept_nodes(draft: Draft, nodes: Sequence[int]) -> Draft:
    """Return a tree of point masses with only `nodes`, which are ascending and contain their parents."""
    assert draft.parents is not None
    assert draft.draft_probs is None, "which drawn nodes are verified must not depend on what was drawn"
    if len(nodes) == len(draft.token_ids):
        return draft
    new_index = {ROOT: ROOT} | {node: index for index, node in enumerate(nodes)}
    return replace(
        draft,
        token_ids=tuple(draft.token_ids[node] for node in nodes),
        parents=tuple(new_index[draft.parents[node]] for node in nodes),
        confidences=None if draft.confidences is None else tuple(draft.confidences[node] for node in nodes),
    )


def build_batch(
    items: Sequence[ScheduledRequest],
    *,
    copies: Sequence[tuple[int, int]],
    moves: Sequence[tuple[int, int]],
    block_size: int,
    vocab_size: int,
) -> ScheduledBatch:
    """Pack the items' tokens for one forward pass; block tables must already cover them.

    `copies`: KV blocks (source, target); `moves`: KV slots (source, target).
    """
    numbers: tuple[list[int], ...] = ([], [], [], [])
    token_ids, positions, slot_mapping, logits_indices = numbers
    batch = ScheduledBatch(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slot_mapping,
        query_lengths=[item.num_new_tokens for item in items],
        context_lengths=[item.request.num_computed_tokens + item.num_new_tokens for item in items],
        block_tables=[item.request.block_table for item in items],
        logits_indices=logits_indices,
        move_sources=[source for source, _ in moves],
        move_targets=[target for _, target in moves],
        copy_sources=[source for source, _ in copies],
        copy_targets=[target for _, target in copies],
    )
    trees: list[Tree | None] = []  # of each item; None: a chain
    for item, stop in zip(items, batch.context_lengths, strict=True):
        request, draft = item.request, item.draft
        start, first_row = request.num_computed_tokens, len(token_ids)
        if draft is None and item.masks is None and item.num_new_tokens == 1 and item.samples:  # most items are so
            token_ids.append(request.token_ids[start])
            logits_indices.append(first_row)
            positions.append(start)
            slot_mapping.append(request.block_table[start // block_size] * block_size + start % block_size)
            trees.append(None)
            continue
        logits_indices.extend(range(first_row, first_row + item.num_prompt_rows))
        token_ids.extend(request.token_ids[start:stop])
        num_rows = 1
        if draft is not None:
            num_rows += len(draft.token_ids)
            # A drafter's vocabulary may be padded beyond the target's. A padding id has target probability 0 and is
            # never accepted, but needs a valid embedding at its position.
            token_ids.extend(draft.token_ids)
            if max(draft.token_ids) >= vocab_size:
                token_ids[1 - num_rows :] = [min(token_id, vocab_size - 1) for token_id in draft.token_ids]
        if item.masks is not None:
            num_rows += item.masks.num_tokens
            token_ids.extend([item.masks.blocks.token_id] * item.masks.num_tokens)
        if item.samples:
            logits_indices.extend(range(len(token_ids) - num_rows, len(token_ids)))
        tree = None if item.masks is None and (draft is None or draft.parents is None) else _tree_of(item)
        trees.append(tree)
        positions.extend(range(start, stop) if tree is None else _positions(tree.parents, start, stop))
        slot_mapping.extend(slots_of(request.block_table, range(start, stop), block_size))
    if any(trees):
        _add_trees(batch, trees)
    return batch


def _add_trees(batch: ScheduledBatch, trees: Sequence[Tree | None]) -> None:
    batch.tree_parents.extend([] if tree is None else tree.parents for tree in trees)
    if any(tree is not None and tree.ends for tree in trees):
        batch.tree_ends.extend([] if tree is None else tree.ends for tree in trees)


def _tree_of(item: ScheduledRequest) -> Tree | None:
    """Return the tree of an item's draft and masks; None: a chain."""
    if item.masks is not None:
        assert item.draft is None or item.draft.parents is None, "masks follow a chain"
        return item.masks.tree(0 if item.draft is None else len(item.draft.token_ids))
    parents = None if item.draft is None else item.draft.parents
    return None if parents is None else Tree(list(parents), [])


def _positions(parents: Sequence[int], start: int, stop: int) -> Sequence[int]:
    """Return the positions of tokens that end with a tree, in which the depth counts and not the slot."""
    first = stop - len(parents)
    return [*range(start, first), *(first + depth for depth in depths(parents))]
