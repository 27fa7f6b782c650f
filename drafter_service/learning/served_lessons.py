"""Lessons from what was served, without the target.

After each token of an answer the target's law is known: its likeliest tokens where the verifier told them, else the
token that it committed, as a point mass. Tokens of the prompt are nobody's law. A draft begins only after a token whose
state is known; a head that attends to earlier states sees the consecutive ones, so its window begins after a hole:

    states      - - - 3 4 5 6 - - 9 10 ..        a hit in the prefix cache, and a hole
    spans             [3 .. 7)    [9 .. )        each a window's, of a head that attends
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.drafter_service.learning.reservoir import Kept
from outrider.drafter_service.training.laws import SparseLaw

CONTEXT_SHARE = 0.5  # of a window, at most, before the answer
MAX_TRIES = 8  # per row, for a sample that teaches something


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a student reads of the target beside tokens."""

    state_width: int = 0  # 0: no states
    attends: bool = False  # to the states before: they must be consecutive
    vocab_size: int  # token ids are below it


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedLesson:
    """Windows of served text with what is known of the target's law; rows are padded at their end."""

    token_ids: Tensor  # int64 [rows, window]
    states: Tensor  # float32 [rows, window, width]; 0 where there is none
    has_state: Tensor | None  # bool [rows, window]; None: no states are read
    top_ids: Tensor  # int64 [rows, window, num_top]; -1: no token
    top_weights: Tensor  # float32, the same shape
    counted: Tensor  # bool [rows, window]; whether the token after each is the target's own

    def law(self, vocab_ids: Tensor | None, *, start: int = 0) -> SparseLaw:
        """Return the law after each token from `start` on; no memory of a vocabulary's size."""
        rows = slice(start, None)
        has_state = None if self.has_state is None else self.has_state[:, rows]
        return SparseLaw.of(
            self.top_ids[:, rows], self.top_weights[:, rows], self.counted[:, rows], vocab_ids, has_state
        )


def draw_lesson(
    kept: Sequence[Kept],
    weights: Sequence[float],
    reading: Reading,
    *,
    rows: int,
    window: int,
    num_positions: int,
    rng: random.Random,
    device: torch.device,
) -> ServedLesson | None:
    """Draw windows, samples in proportion to their weights; None: no sample that was drawn teaches anything."""
    drawn: list[tuple[Kept, range]] = []
    for _ in range(rows * MAX_TRIES if kept else 0):
        (each,) = rng.choices(kept, weights)
        if (span := _drawn_span(each, reading, num_positions, rng)) is not None:
            drawn.append((each, _window_in(each, span, window, num_positions, rng)))
        if len(drawn) == rows:
            break
    if not drawn:
        return None
    num_top = max(1, *(each.sample.num_top for each, _ in drawn))
    parts = [_row(each, place, reading, window, num_top) for each, place in drawn]
    token_ids, states, has_state, top_ids, top_weights, counted = (
        torch.from_numpy(np.stack(part)).to(device) for part in zip(*parts, strict=True)
    )
    return ServedLesson(
        token_ids=token_ids,
        states=states.view(torch.bfloat16).float(),
        has_state=has_state if reading.state_width else None,
        top_ids=top_ids,
        top_weights=top_weights,
        counted=counted,
    )


def spans(kept: Kept, reading: Reading) -> list[range]:
    """Return where drafts of a sample may begin, in parts that a window must not cross; () if nothing fits."""
    num_tokens = len(kept.token_ids)
    if num_tokens and int(kept.token_ids.max()) >= reading.vocab_size:
        return []
    if not reading.state_width:
        return [range(num_tokens)]
    if kept.sample.state_width != reading.state_width or not len(kept.state_positions):
        return []
    if not reading.attends:
        return [range(int(kept.state_positions[0]), int(kept.state_positions[-1]) + 1)]
    begins = np.flatnonzero(np.diff(kept.state_positions, prepend=-2) != 1)
    parts = np.split(kept.state_positions, begins[1:])
    return [range(int(part[0]), int(part[-1]) + 1) for part in parts]


def _drawn_span(kept: Kept, reading: Reading, num_positions: int, rng: random.Random) -> range | None:
    """Draw one of a sample's spans by how many of its roots the target's own text follows."""
    first, last = kept.sample.num_prompt_tokens - 2, len(kept.token_ids) - 2  # roots: the token after next is drafted
    found = spans(kept, reading)
    sizes = [max(0, min(span.stop, last) - max(span.start, first)) for span in found]
    return rng.choices(found, sizes)[0] if any(sizes) else None


def _window_in(kept: Kept, span: range, window: int, num_positions: int, rng: random.Random) -> range:
    """Draw a window of a span: at most a share of it is before the answer, and none of it before the span."""
    end = min(len(kept.token_ids), span.stop + num_positions + 1)
    last = max(span.start, end - window)
    context = int(window * CONTEXT_SHARE)
    first = min(max(span.start, kept.sample.num_prompt_tokens - context), last)
    begin = rng.randint(first, last)
    return range(begin, min(end, begin + window))


def _row(kept: Kept, place: range, reading: Reading, window: int, num_top: int) -> tuple[np.ndarray, ...]:
    """Return one window: token ids, states, which there are, the law's ids and weights, and what counts."""
    length, sample = len(place), kept.sample
    token_ids = np.zeros(window, np.int64)
    token_ids[:length] = kept.token_ids[place.start : place.stop]
    states = np.zeros((window, reading.state_width), np.int16)
    has_state = np.zeros(window, bool)
    if reading.state_width:
        first, last = np.searchsorted(kept.state_positions, (place.start, place.stop))
        there = kept.state_positions[first:last] - place.start
        if reading.attends and len(there):  # behind a hole there is nothing to attend to
            there = there[: int(np.argmin(np.append(np.diff(there, prepend=there[0] - 1) == 1, False)))]
        whole = np.frombuffer(sample.states, np.int16).reshape(-1, reading.state_width)
        states[there] = whole[first : first + len(there)]
        has_state[there] = True
    following = np.arange(place.start + 1, place.stop + 1)  # the token after each
    is_own = (following >= sample.num_prompt_tokens) & (following < len(kept.token_ids))
    counted = np.zeros(window, bool)
    counted[:length] = is_own
    top_ids = np.full((window, num_top), -1, np.int64)
    top_weights = np.zeros((window, num_top), np.float32)
    own, rows = following[is_own], np.flatnonzero(is_own)
    top_ids[rows, 0], top_weights[rows, 0] = kept.token_ids[own], 1.0
    if sample.num_top and len(own):
        ids, weights = (np.frombuffer(part, np.int32).reshape(-1, sample.num_top) for part in _tops(kept))
        told = own - sample.num_prompt_tokens
        is_told = (weights[told] * (ids[told] >= 0)).sum(-1) > 0
        top_ids[rows[is_told], : sample.num_top] = ids[told[is_told]]
        top_weights[rows[is_told], : sample.num_top] = weights[told[is_told]]
    return token_ids, states, has_state, top_ids, top_weights, counted


def _tops(kept: Kept) -> tuple[bytes, bytes]:
    return kept.sample.top_ids, kept.sample.top_weights
