"""Texts of sessions that may be learned from: kept while a session runs, made a sample when its verifier closes it.

Tokens and, of most drafters, states are not copied meanwhile: the session has them anyway. What is copied as it comes
is what the session forgets: the rows of the target's law, and the states of a drafter that reads the last one alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from outrider.drafter_service.engine.drafter import SessionKey
from outrider.drafter_service.engine.learning_messages import MAX_SAMPLE_BYTES, ServedSample
from outrider.drafter_service.engine.sessions import Session
from outrider.drafter_service.engine.state_buffer import DTYPES
from outrider.drafter_service.observing.stable_share import is_in_share
from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, Commit, DraftNeeds, Open, SparseRow, States

MIN_NEW_TOKENS = 4  # of a sample: fewer teach nothing
NO_TOKEN = -1  # in a row with fewer tokens than `num_top`


@dataclass(slots=True)
class _TopRows:
    """The target's likeliest tokens at each place after the prompt."""

    ids: array[int] = field(default_factory=lambda: array("i"))
    weights: array[int] = field(default_factory=lambda: array("i"))


@dataclass(slots=True)
class _LastStates:
    """The states that came one by one, and whose they are."""

    positions: list[int] = field(default_factory=list)  # ascending
    rows: list[torch.Tensor] = field(default_factory=list)  # bfloat16 [width]


@dataclass(slots=True)
class _KeptText:
    session: Session
    num_prompt_tokens: int
    top: _TopRows | None  # None: a token came without its row, or none is asked for
    last: _LastStates = field(default_factory=_LastStates)


class KeptTexts:
    """The texts of one drafter's sessions, and the samples that nobody has taken yet."""

    def __init__(self, needs: DraftNeeds, vocab_size: int) -> None:
        self.sample_share, self.max_sample_tokens = 0.0, 0
        self._needs, self._vocab_size = needs, vocab_size
        self._texts: dict[SessionKey, _KeptText] = {}
        self._samples: list[ServedSample] = []
        self._num_dropped = 0

    @property
    def keys(self) -> set[SessionKey]:
        return set(self._texts)

    def open(self, session: Session, message: Open) -> None:
        """Begin to keep a session's text, if that is allowed; of an older session of the same key nothing is left."""
        self.drop(session.key)
        if not message.may_learn or not self._is_sampled(session.key.request_id):
            return
        if self._needs.history and message.history is not None:
            return  # a drafter that remembers rollouts hands them over as `Seed`s, by their keys
        if len(message.token_ids) + MIN_NEW_TOKENS > self.max_sample_tokens:
            return
        top = _TopRows() if self._needs.num_top else None
        self._texts[session.key] = _KeptText(session, len(message.token_ids), top)

    def take_state(self, session: Session, message: States) -> None:
        """Keep the state that a session has in place of its last one, for a drafter that reads the last one alone."""
        text, state = self._texts.get(session.key), session.states.tensor
        if text is None or state is None:
            return
        num_rows = len(message.data) // (message.width * DTYPES[message.dtype].itemsize)
        position, last = message.position + num_rows - 1, text.last
        is_next = 0 <= position < self.max_sample_tokens and (not last.positions or position > last.positions[-1])
        if is_next and (not last.rows or len(last.rows[0]) == state.shape[1]):
            last.positions.append(position)
            last.rows.append(state[0].to(torch.bfloat16))

    def commit(self, session: Session, message: Commit) -> None:
        """Keep the rows of tokens that have been committed."""
        text = self._texts.get(session.key)
        if text is None or text.top is None or not message.token_ids:
            return
        rows = message.target_rows
        if len(rows) != len(message.token_ids) or not all(self._is_usable(row) for row in rows):
            text.top = None
            return
        num_rows = len(text.top.ids) // self._needs.num_top
        for row in rows[: max(0, self.max_sample_tokens - text.num_prompt_tokens - num_rows)]:
            text.top.ids.extend(_filled(row.token_ids, self._needs.num_top, NO_TOKEN))
            text.top.weights.extend(_filled(row.weights, self._needs.num_top, 0))

    def close(self, session: Session) -> None:
        """Make a session's text a sample, where it is long enough; one beyond MAX_SAMPLE_BYTES is dropped."""
        text = self._texts.pop(session.key, None)
        if text is None or not self._is_sampled(session.key.request_id):
            return
        token_ids = tuple(session.token_ids[: self.max_sample_tokens])
        if len(token_ids) - text.num_prompt_tokens < MIN_NEW_TOKENS:
            return
        sample = self._sample(text, token_ids)
        if sample is None or sample.num_bytes > MAX_SAMPLE_BYTES:
            self._num_dropped += 1
        else:
            self._samples.append(sample)

    def drop(self, key: SessionKey) -> None:
        """Forget a session that was not closed by its verifier."""
        self._texts.pop(key, None)

    def take(self) -> tuple[list[ServedSample], int]:
        """Return the samples since the last time, and how many were too large."""
        samples, self._samples = self._samples, []
        num_dropped, self._num_dropped = self._num_dropped, 0
        return samples, num_dropped

    def _is_sampled(self, request_id: str) -> bool:
        return is_in_share(request_id, self.sample_share, purpose="sample")

    def _is_usable(self, row: SparseRow) -> bool:
        """Return whether a row is part of a law over the vocabulary: rows come from outside."""
        if len(row.token_ids) != len(row.weights) or any(not 0 <= each < self._vocab_size for each in row.token_ids):
            return False
        return all(weight > 0 for weight in row.weights) and sum(row.weights) <= DRAFT_PROB_SCALE

    def _sample(self, text: _KeptText, token_ids: tuple[int, ...]) -> ServedSample | None:
        """Return a text as a sample; None: its states alone are too large for a frame."""
        session, num_new = text.session, len(token_ids) - text.num_prompt_tokens
        positions, states = self._states(text, len(token_ids))
        if states is not None and states.numel() * torch.bfloat16.itemsize > MAX_SAMPLE_BYTES:
            return None
        top, num_top = text.top or _TopRows(), self._needs.num_top
        if len(top.ids) < num_new * num_top:  # a row is missing, or rows were cut by an older `max_sample_tokens`
            num_top = 0
        return ServedSample(
            request_id=session.key.request_id,
            token_ids=token_ids,
            num_prompt_tokens=text.num_prompt_tokens,
            cache_salt=session.cache_salt,
            weight_version="" if session.history is None else session.history.weight_version,
            state_width=0 if states is None else states.shape[1],
            state_positions=positions,
            states=b"" if states is None else states.to(torch.bfloat16).view(torch.int16).numpy().tobytes(),
            num_top=num_top,
            top_ids=top.ids[: num_new * num_top].tobytes(),
            top_weights=top.weights[: num_new * num_top].tobytes(),
        )

    def _states(self, text: _KeptText, num_tokens: int) -> tuple[tuple[int, ...], torch.Tensor | None]:
        """Return which of the first `num_tokens` tokens have a state, and the states: [their number, width]."""
        if self._needs.last_state_only:
            positions = tuple(position for position in text.last.positions if position < num_tokens)
            return positions, torch.stack(text.last.rows[: len(positions)]) if positions else None
        if (states := text.session.states.tensor) is None:
            return (), None
        states = states[:num_tokens]
        num_missing = int(states[:, 0].isnan().sum())  # of the first tokens: see `StateBuffer`
        positions = tuple(range(num_missing, len(states)))
        return positions, states[num_missing:] if positions else None


def _filled(values: Sequence[int], length: int, value: int) -> list[int]:
    return [*values[:length], *[value] * (length - len(values))]
