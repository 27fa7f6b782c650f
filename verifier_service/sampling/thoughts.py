"""A form that holds from the end of a thought on, and a bound on the thought, under speculation.

As in grammar.py, rows are masked and drafts are never cut: the row after each draft token is the one that holds if all
tokens before it are committed, so the mark that ends a thought may lie anywhere within a draft. Marks are found in the
tokens' bytes, as who reads the text finds them, in whichever tokens they are written.

    START     nothing, or a part of the opening, is written: the form's first tokens are allowed, and the opening's
    THOUGHT   all is allowed, but no token that ends the thought and has more than white space behind the mark
    FORM      the grammar holds, from the first token behind the mark, or from the first one of all
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from llguidance import LLTokenizer

from outrider.verifier_service.messages.draft import ROOT
from outrider.verifier_service.messages.thought import Thought
from outrider.verifier_service.sampling.token_rows import ALL_TOKENS, has_token, row_of


class Form(Protocol):
    """What a thought is followed by; grammar.py has the real one, and what its members mean."""

    @property
    def may_be_empty(self) -> bool: ...

    @property
    def error(self) -> str | None: ...

    def allowed(
        self, output_token_ids: Sequence[int], draft_token_ids: Sequence[int], parents: Sequence[int]
    ) -> np.ndarray: ...

    def forced_ids(self, output_token_ids: Sequence[int]) -> tuple[int, ...]: ...


class _Part(enum.Enum):
    START = enum.auto()
    THOUGHT = enum.auto()
    END = enum.auto()  # the token ended the thought: what follows is the form's
    FORM = enum.auto()
    NONE = enum.auto()  # the token may not stand there


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an output stands behind a token."""

    part: _Part
    num_matched: int = 0  # bytes of the next mark that the output ends with
    num_tokens: int = 0  # of the thought


_FORM, _NONE = _Place(_Part.FORM), _Place(_Part.NONE)


class TokenBytes:
    """The bytes of a model's tokens; reading them takes tenths of a second where there are many."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self.of_id = [tokenizer.decode_bytes([token_id]) for token_id in range(tokenizer.vocab_size)]
        self.num_words = -(-tokenizer.vocab_size // 32)

    def __getitem__(self, token_id: int) -> bytes:
        """Return a token's bytes; of an id that is none, what no mark has."""
        return self.of_id[token_id] if 0 <= token_id < len(self.of_id) else b""

    def ids(self, fits: Callable[[bytes], bool]) -> list[int]:
        """Return the tokens whose bytes fit."""
        return [token_id for token_id, text in enumerate(self.of_id) if fits(text)]


class ThoughtMarks:
    """What tokens mean between the marks of one model."""

    def __init__(self, tokens: TokenBytes, opening: str, closing: str) -> None:
        self.tokens, self.opening, self.closing = tokens, opening.encode(), closing.encode()
        self._falls = _falls(self.closing)
        # the only ones that may end a thought with text behind the mark
        self._crossing = tokens.ids(lambda text: bool(text.partition(self.closing[-1:])[2].strip()))
        self.opening_row = lru_cache(len(self.opening))(self._opening_row)
        self.thought_row = lru_cache(len(self.closing))(self._thought_row)
        self.closing_row = lru_cache(len(self.closing))(self._closing_row)

    def after(self, place: _Place, token_id: int) -> _Place:
        """Return the place behind one more token; of a form, what the grammar says of it is not asked."""
        match place.part:
            case _Part.START:
                text = self.opening[: place.num_matched] + self.tokens[token_id]
                if text.startswith(self.opening):
                    return self._thinking(_Place(_Part.THOUGHT), text[len(self.opening) :])
                is_more = len(text) > place.num_matched and self.opening.startswith(text)
                return _Place(_Part.START, len(text)) if is_more else _FORM
            case _Part.THOUGHT:
                thinking = _Place(_Part.THOUGHT, place.num_matched, place.num_tokens + 1)
                return self._thinking(thinking, self.tokens[token_id])
            case _Part.END:
                return _FORM
        return place

    def _thinking(self, place: _Place, text: bytes) -> _Place:
        num_matched = place.num_matched
        for index, byte in enumerate(text):
            while num_matched and self.closing[num_matched] != byte:
                num_matched = self._falls[num_matched]
            num_matched += self.closing[num_matched] == byte
            if num_matched == len(self.closing):
                return _NONE if text[index + 1 :].strip() else _Place(_Part.END)
        return _Place(_Part.THOUGHT, num_matched, place.num_tokens)

    def _opening_row(self, num_written: int) -> np.ndarray:
        """Return the tokens that go on with the opening: int32 [num_words]."""
        place, first = _Place(_Part.START, num_written), self.opening[num_written : num_written + 1]
        begun = self.tokens.ids(lambda text: text.startswith(first))
        ids = [id_ for id_ in begun if self.after(place, id_).part not in (_Part.FORM, _Part.NONE)]
        return row_of(ids, self.tokens.num_words)

    def _thought_row(self, num_matched: int) -> np.ndarray:
        """Return the tokens that may stand in a thought: int32 [num_words]."""
        place = _Place(_Part.THOUGHT, num_matched)
        barred = [token_id for token_id in self._crossing if self.after(place, token_id) is _NONE]
        row: np.ndarray = ~row_of(barred, self.tokens.num_words)
        return row

    def _closing_row(self, num_matched: int) -> np.ndarray:
        """Return the one token that has most of what is left of the closing: int32 [num_words]."""
        rest = self.closing[num_matched:]
        fitting = self.tokens.ids(lambda text: bool(text) and rest.startswith(text))
        if not fitting:  # these tokens cannot write the mark
            return self.thought_row(num_matched)
        return row_of([max(fitting, key=self._length)], self.tokens.num_words)

    def _length(self, token_id: int) -> int:
        return len(self.tokens[token_id])


class ThoughtState:
    """How far one output has come in its thought and, behind it, in its form. It is shown the whole output."""

    def __init__(
        self,
        thought: Thought,
        marks: ThoughtMarks,
        open_form: Callable[[], Form] | None,
        end_token_ids: Sequence[int],
    ) -> None:
        """`open_form` returns the form's state before its first token; None: only the thought is bounded.

        A thought may not end with one of `end_token_ids` where a form must follow that is not empty.
        """
        self._thought, self._marks, self._open_form = thought, marks, open_form
        self._place = _Place(_Part.THOUGHT if thought.is_open else _Part.START)
        self._form = None if open_form is None else open_form()  # before a thought: as if there were none
        self._is_form = True  # what is written so far may be the form's
        self._form_start = 0  # output tokens before the form
        self._num_seen = 0
        num_words = marks.tokens.num_words
        ends = [id_ for id_ in end_token_ids if 0 <= id_ < 32 * num_words]
        bars_ends = self._form is not None and not self._form.may_be_empty
        self._thought_mask: np.ndarray = ~row_of(ends if bars_ends else (), num_words)

    @property
    def error(self) -> str | None:
        """Why the output cannot go on."""
        return None if self._form is None or self._place.part is not _Part.FORM else self._form.error

    def allowed(
        self, output_token_ids: Sequence[int], draft_token_ids: Sequence[int], parents: Sequence[int]
    ) -> np.ndarray:
        """Return which tokens may follow the output and each draft token, as `GrammarState.allowed` does."""
        self._see(output_token_ids)
        if self._place.part in (_Part.FORM, _Part.END):
            return self._form_rows(output_token_ids[self._form_start :], draft_token_ids, parents)
        rows = np.full((len(draft_token_ids) + 1, self._marks.tokens.num_words), ALL_TOKENS, dtype=np.int32)
        form_rows = rows
        if self._place.part is _Part.START and self._form is not None and self._is_form:
            form_rows = self._form.allowed(output_token_ids, draft_token_ids, parents).view(np.int32)
        places: list[_Place] = []
        is_form: list[bool] = []
        rows[0] = self._row(self._place, form_rows[0] if self._is_form else None)
        for node, (token_id, parent) in enumerate(zip(draft_token_ids, parents, strict=True)):
            before, may_be = (self._place, self._is_form) if parent == ROOT else (places[parent], is_form[parent])
            places.append(self._marks.after(before, token_id))
            is_form.append(may_be and has_token(form_rows[parent + 1], token_id))
            if before.part in (_Part.START, _Part.THOUGHT):  # behind an end, the form's rows follow below
                rows[node + 1] = self._row(places[node], form_rows[node + 1] if is_form[node] else None)
            elif before.part is _Part.FORM:
                rows[node + 1] = form_rows[node + 1]
        for node, place in enumerate(places):
            if place.part is _Part.END:
                self._fill_behind(node, rows, draft_token_ids, parents)
        return rows.view(np.uint8)

    def forced_ids(self, output_token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens that must follow the output, as `GrammarState.forced_ids` does."""
        self._see(output_token_ids)
        if self._form is None or self._place.part not in (_Part.FORM, _Part.END):
            return ()
        return self._form.forced_ids(output_token_ids[self._form_start :])

    def _see(self, output_token_ids: Sequence[int]) -> None:
        """Take in what was committed since the last call."""
        for index in range(self._num_seen, len(output_token_ids)):
            if self._place.part in (_Part.FORM, _Part.END):
                self._place = _FORM
                break
            if self._place.part is _Part.START and self._form is not None and self._is_form:
                row = self._form.allowed(output_token_ids[:index], (), ()).view(np.int32)[0]
                self._is_form = has_token(row, output_token_ids[index])
            self._place = self._marks.after(self._place, output_token_ids[index])
            if self._place.part is _Part.END:
                self._form, self._form_start = self._new_form(), index + 1
            elif self._place is _NONE:  # not by our rows: it came from elsewhere, and is taken for the thought's
                self._place = _Place(_Part.THOUGHT)
        self._num_seen = len(output_token_ids)

    def _new_form(self) -> Form | None:
        return None if self._open_form is None else self._open_form()

    def _form_rows(
        self, output_token_ids: Sequence[int], draft_token_ids: Sequence[int], parents: Sequence[int]
    ) -> np.ndarray:
        if self._form is None:
            shape = (len(draft_token_ids) + 1, self._marks.tokens.num_words)
            return np.full(shape, ALL_TOKENS, dtype=np.int32).view(np.uint8)
        return self._form.allowed(output_token_ids, draft_token_ids, parents)

    def _row(self, place: _Place, form_row: np.ndarray | None) -> np.ndarray:
        """Return what may follow a token that is not the form's. `form_row`: what the form allows; None: nothing."""
        match place.part:
            case _Part.START:
                row = self._marks.opening_row(place.num_matched)
                return row if form_row is None else row | form_row
            case _Part.THOUGHT:
                limit = self._thought.max_tokens
                if limit is not None and place.num_tokens >= limit:
                    return self._marks.closing_row(place.num_matched)
                row = self._marks.thought_row(place.num_matched)
                return row & self._thought_mask
            case _Part.FORM if form_row is not None:
                return form_row
        return np.full(self._marks.tokens.num_words, ALL_TOKENS, dtype=np.int32)

    def _fill_behind(self, end: int, rows: np.ndarray, draft_token_ids: Sequence[int], parents: Sequence[int]) -> None:
        """Fill the rows of a draft token that ends the thought, and of all behind it, with the form's."""
        if self._open_form is None:
            return
        nodes = [end]
        for node in range(end + 1, len(parents)):
            if parents[node] in nodes:
                nodes.append(node)
        places = {node: index - 1 for index, node in enumerate(nodes)}  # the end itself is the root
        behind = [draft_token_ids[node] for node in nodes[1:]]
        found = self._open_form().allowed((), behind, [places[parents[node]] for node in nodes[1:]])
        rows[[node + 1 for node in nodes]] = found.view(np.int32)


def _falls(mark: bytes) -> list[int]:
    """Return how many bytes still match, by how many did before one that does not (Knuth, Morris, Pratt)."""
    falls = [0, 0]
    for byte in mark[1:]:
        length = falls[-1]
        while length and mark[length] != byte:
            length = falls[length]
        falls.append(length + (mark[length] == byte))
    return falls
