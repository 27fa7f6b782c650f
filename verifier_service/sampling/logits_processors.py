"""Change a target's logits before tokens are drawn or drafts are judged: biases, bad words, minimum length, penalties.

Semantics are those of vLLM and OpenAI. In this order, and all before temperature and truncation:

    logit_bias          added
    min_tokens          end-of-sequence and stop tokens get -inf while the output is shorter
    bad_words           the last token of a sequence gets -inf where the output ends with the others
    repetition_penalty  divides a positive logit, multiplies another, of tokens in prompt or output
    frequency_penalty   subtracted once per occurrence in the output
    presence_penalty    subtracted if the output has the token
    structured          tokens that the grammar does not allow get -inf; if the steps above leave no token that it
                        allows, they are undone for this row
    allowed_token_ids   all others get -inf, likewise; where the grammar allows none of them, they give way

The row after a draft token counts that token and its ancestors as output: they are, whenever the row is used.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch.nn.functional import embedding

from outrider.verifier_service.gpu.transfers import upload
from outrider.verifier_service.messages.draft import ROOT
from outrider.verifier_service.messages.request import SamplingParams
from outrider.verifier_service.messages.tree import depths
from outrider.verifier_service.sampling.bad_words import BadWords


class TokenMask(Protocol):
    """What a grammar allows; grammar.py has the real one."""

    def allowed(
        self, output_token_ids: Sequence[int], draft_token_ids: Sequence[int], parents: Sequence[int]
    ) -> np.ndarray:
        """Return which tokens may follow the output and each draft token: uint8 [num_rows, num_bytes], low bit first.

        Every row allows at least one token.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitEdits:
    """Changes to the rows of one request: the same ids in every row, none of them twice.

    A logit x becomes (x + bias) / divisor - penalty; if x + bias is negative, (x + bias) * divisor - penalty. After
    that, tokens that are not `allowed` become -inf.
    """

    token_ids: np.ndarray  # int64 [num_ids], in the target's vocabulary
    biases: np.ndarray  # float32 [num_rows, num_ids]; -inf: never this token
    divisors: np.ndarray  # float32 [num_rows, num_ids]
    penalties: np.ndarray  # float32 [num_rows, num_ids]
    allowed: np.ndarray | None = None  # uint8 [num_rows, num_bytes], low bit first: one bit per token; None: all

    def of_rows(self, rows: Sequence[int]) -> LogitEdits:
        """Return the changes to some of the rows, in the order of `rows`."""
        index = list(rows)
        return LogitEdits(
            token_ids=self.token_ids,
            biases=self.biases[index],
            divisors=self.divisors[index],
            penalties=self.penalties[index],
            allowed=None if self.allowed is None else self.allowed[index],
        )


class LogitsProcessor:
    """One request's sampling parameters that change logits, with the counts of its tokens so far.

    Only committed tokens are counted, each once, so a rejected draft or a preemption leaves no trace. `stop_token_ids`
    end the request; end-of-sequence is among them unless the request ignores it.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        *,
        num_prompt_tokens: int,
        stop_token_ids: Iterable[int],
        vocab_size: int,
        mask: TokenMask | None = None,
    ) -> None:
        """`mask`: of a request that has one."""
        assert sampling.has_mask == (mask is not None)
        self._mask = mask
        self._allowed_row = _packed(sampling.allowed_token_ids, vocab_size) if sampling.allowed_token_ids else None
        self._sampling = sampling
        self._num_prompt_tokens = num_prompt_tokens
        self._vocab_size = vocab_size
        self._repeats = sampling.repetition_penalty != 1.0
        self._counts_tokens = self._repeats or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        self._num_counted = 0 if self._repeats else num_prompt_tokens
        self._slots: dict[int, int] = {}  # of a token id in the four arrays
        self._token_ids = array("q")
        self._counts = array("q")  # in the output
        self._is_in_prompt = array("b")
        self._biases = array("f")
        for item in sampling.logit_bias:
            self._biases[self._slot(item.token_id)] += item.bias
        suppressed = stop_token_ids if sampling.min_tokens else ()
        self._stop_slots = [self._slot(token_id) for token_id in suppressed if 0 <= token_id < vocab_size]
        self._bad_words = BadWords(sampling.bad_words) if sampling.bad_words else None
        for token_id in () if self._bad_words is None else self._bad_words.last_ids:
            self._slot(token_id)

    @staticmethod
    def is_needed(sampling: SamplingParams) -> bool:
        """Say whether these parameters change logits at all."""
        penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
        lists = (sampling.logit_bias, sampling.bad_words, sampling.allowed_token_ids)
        changes_some = any(lists) or sampling.min_tokens > 0
        return changes_some or sampling.has_mask or penalties != (0.0, 0.0, 1.0)

    def edits(
        self, token_ids: Sequence[int], draft_token_ids: Sequence[int], parents: Sequence[int] | None = None
    ) -> LogitEdits | None:
        """Return the changes to the rows after the committed `token_ids` (prompt and output) and each draft token.

        `parents` as in `Draft`. Draft ids outside the vocabulary are not counted: the rows after them are never used.
        """
        parents = range(ROOT, len(draft_token_ids) - 1) if parents is None else parents
        sampling, num_rows = self._sampling, len(draft_token_ids) + 1
        num_missing = sampling.min_tokens - (len(token_ids) - self._num_prompt_tokens)
        is_always = self._counts_tokens or sampling.logit_bias or sampling.bad_words or sampling.has_mask
        is_always = is_always or self._allowed_row is not None
        if not (is_always or num_missing > 0):
            return None
        self._count(token_ids)
        new_ids = self._new_ids(draft_token_ids)
        biases = np.tile(_extended(self._biases, len(new_ids)), (num_rows, 1))
        num_drafted = np.array([0, *(depth + 1 for depth in depths(parents))])  # [num_rows] by the time a row counts
        biases[np.ix_(np.flatnonzero(num_drafted < num_missing), np.array(self._stop_slots, dtype=np.int64))] = -np.inf
        if self._bad_words is not None:
            rows = self._bad_words.barred(token_ids, self._num_prompt_tokens, draft_token_ids, parents)
            for row, ids in enumerate(rows):
                biases[row, [self._slots[id_] for id_ in ids]] = -np.inf
        counts = self._output_counts(draft_token_ids, parents, new_ids)
        is_seen = (counts > 0) | (_extended(self._is_in_prompt, len(new_ids)) > 0)
        penalties = sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
        return LogitEdits(
            token_ids=np.concatenate([np.array(self._token_ids), np.array(new_ids, dtype=np.int64)]),
            biases=biases,
            divisors=np.where(is_seen, sampling.repetition_penalty, 1.0).astype(np.float32),
            penalties=penalties.astype(np.float32),
            allowed=self._allowed(token_ids, draft_token_ids, parents),
        )

    def _allowed(
        self, token_ids: Sequence[int], draft_token_ids: Sequence[int], parents: Sequence[int]
    ) -> np.ndarray | None:
        row = self._allowed_row
        if self._mask is None:
            return None if row is None else np.tile(row, (len(draft_token_ids) + 1, 1))
        rows = self._mask.allowed(token_ids[self._num_prompt_tokens :], draft_token_ids, parents)
        if row is None:
            return rows
        both = rows & _widened(row[None], rows.shape[1])
        return np.where(both.any(axis=1, keepdims=True), both, rows)

    def _new_ids(self, draft_token_ids: Sequence[int]) -> list[int]:
        """Return the draft's ids that have no slot: until they are committed, their columns follow the slots'."""
        if not self._counts_tokens:
            return []
        return [id_ for id_ in dict.fromkeys(draft_token_ids) if id_ < self._vocab_size and id_ not in self._slots]

    def _output_counts(
        self, draft_token_ids: Sequence[int], parents: Sequence[int], new_ids: Sequence[int]
    ) -> np.ndarray:
        """Count each id in the output before each row: int64 [num_rows, num_ids]."""
        counts = np.tile(_extended(self._counts, len(new_ids)), (len(draft_token_ids) + 1, 1))
        new_columns = {id_: len(self._counts) + index for index, id_ in enumerate(new_ids)}
        for row, (id_, parent) in enumerate(zip(draft_token_ids, parents, strict=True), start=1):
            counts[row] = counts[parent + 1]  # ROOT's row is the first
            column = self._slots.get(id_, new_columns.get(id_))
            if column is not None:
                counts[row, column] += 1
        return counts

    def _count(self, token_ids: Sequence[int]) -> None:
        """Take in what was committed since the last call."""
        if not self._counts_tokens:
            return
        for index in range(self._num_counted, len(token_ids)):
            slot = self._slot(token_ids[index])
            if index < self._num_prompt_tokens:
                self._is_in_prompt[slot] = 1
            else:
                self._counts[slot] += 1
        self._num_counted = len(token_ids)

    def _slot(self, token_id: int) -> int:
        slot = self._slots.setdefault(token_id, len(self._token_ids))
        if slot == len(self._token_ids):
            self._token_ids.append(token_id)
            self._counts.append(0)
            self._is_in_prompt.append(0)
            self._biases.append(0.0)
        return slot


@dataclass(frozen=True, slots=True, kw_only=True)
class SentEdits:
    """The edits of a step on the logits' device, sent before the logits are there."""

    cells: torch.Tensor  # int64 [num_cells] row * vocab_size + token id
    biases: torch.Tensor  # float32 [num_cells], as the next two
    divisors: torch.Tensor
    penalties: torch.Tensor
    masked_rows: torch.Tensor  # int64 [num_masked_rows]
    allowed: torch.Tensor  # uint8 [num_masked_rows, num_bytes]
    may_bar_all: bool  # whether edits may bar every token that a mask allows

    @classmethod
    def of(cls, edits: Sequence[tuple[int, LogitEdits]], vocab_size: int, device: torch.device) -> SentEdits:
        masked = [(row, edit, edit.allowed) for row, edit in edits if edit.allowed is not None]
        width = max((mask.shape[1] for _, _, mask in masked), default=0)  # a tokenizer may have more than the model
        parts = [
            np.concatenate([_cells(first_row, edit, vocab_size) for first_row, edit in edits]),
            np.concatenate([edit.biases.ravel() for _, edit in edits]),
            np.concatenate([edit.divisors.ravel() for _, edit in edits]),
            np.concatenate([edit.penalties.ravel() for _, edit in edits]),
            np.concatenate([np.arange(row, row + len(mask)) for row, _, mask in masked] or [np.zeros(0, np.int64)]),
            np.concatenate([_widened(mask, width) for _, _, mask in masked] or [np.zeros((0, 0), np.uint8)]),
        ]
        cells, biases, divisors, penalties, masked_rows, allowed = upload(parts, device)
        return cls(
            cells=cells,
            biases=biases,
            divisors=divisors,
            penalties=penalties,
            masked_rows=masked_rows,
            allowed=allowed,
            may_bar_all=any(bool(np.isneginf(edit.biases).any()) for _, edit, _ in masked),
        )

    def applied(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the edited logits float32 [num_rows, vocab_size]."""
        assert (logits.dtype, logits.ndim) == (torch.float32, 2), (logits.dtype, logits.shape)
        edited = logits.clone(memory_format=torch.contiguous_format)
        flat = edited.view(-1)
        values = flat.index_select(0, self.cells) + self.biases  # [num_cells]
        values = torch.where(values > 0.0, values / self.divisors, values * self.divisors) - self.penalties
        flat.index_copy_(0, self.cells, values)
        if len(self.masked_rows):
            self._mask(edited, logits)
        return edited

    def _mask(self, edited: torch.Tensor, logits: torch.Tensor) -> None:
        """Bar what is not allowed, in place; if a row's edits bar every allowed token, they are undone first."""
        bits = torch.arange(256, device=logits.device).unsqueeze(1) >> torch.arange(8, device=logits.device) & 1
        of_byte = torch.zeros(256, 8, device=logits.device).masked_fill_(bits == 0, -torch.inf)
        # looking bytes up and adding is the fastest way
        barring = embedding(self.allowed.int(), of_byte).flatten(1)[:, : logits.shape[1]]  # [num_masked, vocab_size]
        values = edited.index_select(0, self.masked_rows) + barring
        if self.may_bar_all:
            is_dead = values.amax(dim=1, keepdim=True) == -torch.inf  # [num_masked_rows, 1]
            values = torch.where(is_dead, logits.index_select(0, self.masked_rows) + barring, values)
        edited.index_copy_(0, self.masked_rows, values)


def _cells(first_row: int, edit: LogitEdits, vocab_size: int) -> np.ndarray:
    rows = np.arange(first_row, first_row + len(edit.biases), dtype=np.int64)[:, None]
    cells: np.ndarray = (rows * vocab_size + edit.token_ids).ravel()
    return cells


def _packed(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """Return a row of a mask that allows these tokens: uint8 [num_bytes], low bit first."""
    bits = np.zeros(vocab_size, dtype=np.uint8)
    bits[[token_id for token_id in token_ids if 0 <= token_id < vocab_size]] = 1
    row: np.ndarray = np.packbits(bits, bitorder="little")
    return row


def _widened(rows: np.ndarray, num_bytes: int) -> np.ndarray:
    """Return rows of a mask with so many bytes; those that they lacked allow nothing."""
    return rows if rows.shape[1] == num_bytes else np.pad(rows, ((0, 0), (0, num_bytes - rows.shape[1])))


def _extended(values: array[int] | array[float], num_zeros: int) -> np.ndarray:
    own = np.array(values)
    return np.concatenate([own, np.zeros(num_zeros, dtype=own.dtype)])
