"""What is checked of a draft before it is verified: of one, and of a frame of chains by comparing arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from outrider.verifier_service.messages.columns import Int64s
from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, ROOT, Draft, Drafts, SparseRow

Bools = npt.NDArray[np.bool_]


def check_draft(draft: Draft, *, draft_vocab_size: int, max_length: int, max_nodes: int = 0) -> str | None:
    """Return what is wrong with a draft, or None if it may be verified.

    A tree may have `max_nodes` tokens (0: only chains) and depth `max_length`. Wrong draft_probs would bias sampling
    silently, so rows are checked: unique ids within the drafter's vocabulary, positive weights with the right sum, the
    drawn ids among them. An id beyond the *target's* vocabulary (padding) is valid: it is verified, with target
    probability 0.
    """
    if problem := _check_shape(draft, max_length, max_nodes):
        return problem
    if any(not 0 <= token_id < draft_vocab_size for token_id in draft.token_ids):
        return "draft token id outside the vocabulary"
    if draft.confidences is not None:
        if len(draft.confidences) != len(draft.token_ids):
            return "confidences and token_ids differ in length"
        if any(not 0.0 <= confidence <= 1.0 for confidence in draft.confidences):  # also catches NaN
            return "confidence outside [0, 1]"
    return None if draft.draft_probs is None else _check_rows(draft, draft.draft_probs, draft_vocab_size)


def _check_shape(draft: Draft, max_length: int, max_nodes: int) -> str | None:
    num_tokens, parents = len(draft.token_ids), draft.parents
    limit = max_length if parents is None else max_nodes
    if parents is not None and max_nodes == 0:
        return "parents, where a chain was asked for"
    if num_tokens > limit:
        return f"draft of {num_tokens} tokens, {limit} were asked for"
    if parents is None:
        return None
    if len(parents) != num_tokens:
        return "parents and token_ids differ in length"
    depths: list[int] = []  # from 1
    for index, parent in enumerate(parents):
        if not ROOT <= parent < index:
            return "a parent is no earlier token"
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    if depths and max(depths) > max_length:
        return f"draft {max(depths)} tokens deep, {max_length} were asked for"
    if len(set(zip(parents, draft.token_ids, strict=True))) != num_tokens:
        return "the same token twice after one parent"
    return None


def _check_rows(draft: Draft, rows: Sequence[SparseRow], draft_vocab_size: int) -> str | None:
    if draft.parents is None:
        if len(rows) != len(draft.token_ids):
            return "draft_probs and token_ids differ in length"
        drawn: Sequence[Sequence[int]] = [(token_id,) for token_id in draft.token_ids]
    else:
        children: dict[int, list[int]] = {}  # by parent, in the order of first children, as the rows
        for parent, token_id in zip(draft.parents, draft.token_ids, strict=True):
            children.setdefault(parent, []).append(token_id)
        if len(rows) != len(children):
            return "draft_probs are not one per parent"
        drawn = list(children.values())
    problems = (_check_row(row, token_ids, draft_vocab_size) for row, token_ids in zip(rows, drawn, strict=True))
    return next(filter(None, problems), None)


def _check_row(row: SparseRow, drawn_ids: Sequence[int], draft_vocab_size: int) -> str | None:
    if len(row.token_ids) != len(row.weights) or len(set(row.token_ids)) != len(row.token_ids):
        return "draft_probs ids are not unique or do not match their weights"
    if any(not 0 <= id_ < draft_vocab_size for id_ in row.token_ids):
        return "draft_probs id outside the vocabulary"
    if any(weight <= 0 for weight in row.weights) or sum(row.weights) != DRAFT_PROB_SCALE:
        return "draft_probs weights do not sum to one"
    if any(token_id not in row.token_ids for token_id in drawn_ids):
        return "the drawn token is not in its draft_probs"
    return None


def check_drafts(frame: Drafts, *, draft_vocab_size: int, max_lengths: Int64s) -> Bools:
    """Return which rows of a frame `check_draft` would complain of, bool [num_rows]; max_lengths [num_rows]."""
    bad = frame.lengths > max_lengths
    wrong = _outside(frame.token_ids, draft_vocab_size)
    if len(frame.confidences):
        wrong |= ~((frame.confidences >= 0.0) & (frame.confidences <= 1.0))  # NaN is in no range
    if frame.has_rows:
        wrong |= _bad_rows(frame, draft_vocab_size)
    bad[np.repeat(np.arange(len(frame)), frame.lengths)[wrong]] = True
    return bad


def _bad_rows(frame: Drafts, draft_vocab_size: int) -> Bools:
    """Return which tokens' rows are wrong, bool [num_tokens]; see `_check_row`."""
    ids, weights, num_tokens = frame.row_ids, frame.row_weights, len(frame.token_ids)
    owners = np.repeat(np.arange(num_tokens), frame.row_sizes)
    wrong = _outside(ids, draft_vocab_size) | (weights <= 0)
    keys = np.sort((owners << 32) | ids.view(np.uint32))  # equal ids of a row are neighbours
    repeated = keys[1:][keys[1:] == keys[:-1]] >> 32
    bad: Bools = np.bincount(owners, weights, num_tokens) != DRAFT_PROB_SCALE
    bad[owners[wrong]] = bad[repeated] = True
    return bad | (np.bincount(owners, ids == frame.token_ids[owners], num_tokens) == 0)


def _outside(token_ids: npt.NDArray[np.integer], vocab_size: int) -> Bools:
    outside: Bools = (token_ids < 0) | (token_ids >= vocab_size)
    return outside
