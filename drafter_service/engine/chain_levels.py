"""Chains of a step as arrays: a batch that is made once and advanced level by level, and one read at the end.

The same chains as `ChainGrowth` grows one by one, with no object for a row or level: whatever a step does for all rows
is an array operation. Rows stay in the order of their asks; a chain that has its length drops out of later levels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from outrider.drafter_service.engine.draft_sampler import (
    BY_LAW,
    ChildrenOnDevice,
    PendingCopy,
    choices_of,
    launch_children,
    select_rows,
)
from outrider.drafter_service.engine.drafter import ChainAnswers, ChainsLaunched
from outrider.drafter_service.engine.tree_growth import DraftRules
from outrider.verifier_service.gpu.transfers import upload
from outrider.verifier_service.messages.batch import ScheduledBatch, placeholder_tokens
from outrider.verifier_service.messages.columns import Chains, Int64s, spans, starts_of
from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, DraftSampling
from outrider.verifier_service.sampling.unread import UnreadChains, UnreadTokens


class ChainBatches:
    """The batches of a step's chains: first the pending tokens of each, then one placeholder of each and level."""

    def __init__(
        self,
        tables: Sequence[list[int]],
        begins: Int64s,
        ends: Int64s,
        num_levels: int,
        block_size: int,
        shifts: Int64s | None = None,
    ) -> None:
        """Of each row: its KV blocks, the places [begin, end) of its pending tokens, and its positions beyond places.

        Without `shifts` a place is a position.
        """
        self._tables, self._begins, self._ends, self._block_size = tables, begins, ends, block_size
        self._shifts = np.zeros_like(begins) if shifts is None else shifts
        self.num_levels = num_levels
        # of each level's placeholder, int64 [num_levels - 1, num_rows]
        self._places = ends + np.arange(num_levels - 1)[:, None]
        self._first_blocks = begins // block_size
        width = int(((ends + num_levels - 2) // block_size - self._first_blocks).max()) + 1
        rows = zip(tables, self._first_blocks.tolist(), strict=True)
        # int64 [num_rows, width] of the tokens of this step; 0 beyond the end of a shorter chain
        self._blocks = np.array([(table[start : start + width] + [0] * width)[:width] for table, start in rows])
        self._slots = self._slots_of(np.arange(len(tables)), self._places)

    def first(self, token_ids: list[int]) -> ScheduledBatch:
        """Return the batch of the pending tokens; the logits after each row's last one are wanted."""
        counts = self._ends - self._begins
        places, rows = spans(self._begins, counts), np.repeat(np.arange(len(counts)), counts)
        return ScheduledBatch(
            token_ids=token_ids,
            positions=(places + self._shifts[rows]).tolist(),
            slot_mapping=self._slots_of(rows, places).tolist(),
            query_lengths=counts.tolist(),
            context_lengths=self._ends.tolist(),
            block_tables=self._tables_of(self._tables, self._ends),
            logits_indices=(counts.cumsum() - 1).tolist(),
        )

    def next(self, rows: Int64s, token_ids: list[int], level: int) -> ScheduledBatch:
        """Return the batch of some rows' placeholders of a level, which is at least 1."""
        places = self._places[level - 1][rows]
        return ScheduledBatch(
            token_ids=token_ids,
            positions=(places + self._shifts[rows]).tolist(),
            slot_mapping=self._slots[level - 1][rows].tolist(),
            query_lengths=[1] * len(rows),
            context_lengths=(places + 1).tolist(),
            block_tables=self._tables_of([self._tables[row] for row in rows.tolist()], places + 1),
            logits_indices=list(range(len(rows))),
        )

    def _slots_of(self, rows: Int64s, places: Int64s) -> Int64s:
        """Return the KV slots of some rows' places, [..., num_rows]."""
        blocks = self._blocks[rows, places // self._block_size - self._first_blocks[rows]]
        slots: Int64s = blocks * self._block_size + places % self._block_size
        return slots

    def _tables_of(self, tables: Sequence[list[int]], contexts: Int64s) -> list[list[int]]:
        stops = (-(-contexts // self._block_size)).tolist()
        return [table[:stop] for table, stop in zip(tables, stops, strict=True)]


class _Opened(NamedTuple):
    """Chains that want another token."""

    rows: Int64s
    wanted: Int64s  # where they stand among the rows of the level before
    places: Int64s  # where their last tokens are …
    numbers: torch.Tensor  # … among these


# Takes a batch and, from the second level on, the numbers that its placeholders are among and where its rows stand
# among those of the level before; returns float32 logits [num_rows, draft_vocab_size].
LevelForward = Callable[[ScheduledBatch, torch.Tensor | None, Int64s | None], torch.Tensor]
# Takes rows, a level, and the tokens before, int64 [num_rows]; returns float32 logits [num_rows, draft_vocab_size], and
# the chances [num_rows] that what is drawn is accepted; None: the laws say it.
LawAfter = Callable[[Int64s, int, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]


_Kind = tuple[Int64s, list[torch.Tensor]]  # of chains: where its tokens stand, row by row, and the numbers found


class ChainLevels:
    """The tokens of a step's chains, chosen level by level where the logits are."""

    def __init__(
        self, samplings: Sequence[DraftSampling], first_positions: Int64s, lengths: Int64s, rules: DraftRules
    ) -> None:
        """Of each row, where its first token stands, and how many tokens it is to have, at least 1."""
        self._samplings, self._positions, self._lengths, self._rules = samplings, first_positions, lengths, rules
        self._choices = choices_of(samplings)
        self._num_levels = int(lengths.max())
        self._rows = np.arange(len(lengths))  # that the next level chooses for
        self._num_launched = 0  # levels
        self._found: list[tuple[Int64s, list[ChildrenOnDevice]]] = []  # with the cells, row by row, that they fill

    def grow(self, batches: ChainBatches, token_ids: list[int], forward: LevelForward) -> ChainsLaunched:
        """Launch all forwards: first that of the pending tokens, then one for each level."""
        self.launch(forward(batches.first(token_ids), None, None))
        for level in range(1, batches.num_levels):
            rows, wanted, places, numbers = self.open()
            self.launch(forward(batches.next(rows, placeholder_tokens(places), level), numbers, wanted))
        return self.send_back()

    def guess(self, logits: torch.Tensor) -> ChainsLaunched:
        """Choose all tokens of all rows at once: logits float32 [num_tokens, draft_vocab_size], row after row."""
        rows = np.repeat(self._rows, self._lengths)
        self._choose(logits, rows, spans(np.zeros_like(self._lengths), self._lengths))
        return self.send_back()

    def along(self, law: LawAfter, previous: torch.Tensor) -> ChainsLaunched:
        """Choose level by level, by laws that follow from the token before: at first `previous`, int64 [num_rows]."""
        self.launch(*law(self._rows, 0, previous))
        for level in range(1, self._num_levels):
            rows, _, places, numbers = self.open()
            previous = numbers.index_select(0, upload([places], numbers.device)[0])
            self.launch(*law(rows, level, previous))
        return self.send_back()

    def launch(self, logits: torch.Tensor, chances: torch.Tensor | None = None) -> None:
        """Choose the next token of every row that wants one: logits float32 [num_such_rows, draft_vocab_size].

        `chances` [num_such_rows] that what is chosen is accepted; None: the laws say it.
        """
        self._choose(logits, self._rows, np.full_like(self._rows, self._num_launched), chances)
        self._num_launched += 1

    def _choose(self, logits: torch.Tensor, rows: Int64s, levels: Int64s, chances: torch.Tensor | None = None) -> None:
        found = launch_children(
            logits,
            [self._samplings[row] for row in rows.tolist()],
            (self._positions[rows] + levels).tolist(),
            self._rules.rng,
            vocab_size=self._rules.vocab_size,
            num_children=1,
            top_n=self._rules.top_n,
            sampled=True,
            choices=self._choices[rows],
        )
        if chances is not None:
            found = [_told(one, chances) for one in found]
        self._found.append((rows * self._num_levels + levels, found))

    def open(self) -> _Opened:
        """Return what the next level's forward computes."""
        _, found = self._found[-1]
        wanted = np.flatnonzero(self._lengths[self._rows] > self._num_launched)
        self._rows = self._rows[wanted]
        if len(found) == 1:
            return _Opened(self._rows, wanted, wanted, found[0].numbers[0].flatten())
        places = np.argsort(np.concatenate([one.rows for one in found]))
        numbers = torch.cat([one.numbers[0].flatten() for one in found])
        return _Opened(self._rows, wanted, places[wanted], numbers)

    def send_back(self) -> ChainsLaunched:
        """Begin to copy the chains to the host: those of point masses, and those that were drawn."""
        kinds: list[_Kind] = []
        for is_drawn in (False, True):
            of_kind = [
                (cells if len(one.rows) == len(cells) else cells[one.rows], one.numbers)
                for cells, found in self._found
                for one in found
                if (len(one.numbers) > 2) == is_drawn
            ]
            if of_kind:
                places, numbers = zip(*of_kind, strict=True)
                kinds.append((np.concatenate(places), [torch.cat(each) for each in zip(*numbers, strict=True)]))
        bits = torch.cat([each.view(torch.int64).flatten() for _, columns in kinds for each in columns])
        return ChainsLaunched(partial(self._unread, kinds), partial(self._read, kinds, self._rules.read_back(bits)))

    def _unread(self, kinds: Sequence[_Kind]) -> UnreadChains:
        *_, (_, (ids, *law)) = kinds
        candidates, weights = law[:2] if len(law) > 1 else (ids[:0], ids[:0])
        numbers = torch.cat([columns[0][:, 0] for _, columns in kinds])
        places = np.argsort(np.concatenate([cells for cells, _ in kinds]))
        return UnreadChains(self._lengths, places, UnreadTokens(numbers, candidates, weights))

    def _read(self, kinds: Sequence[_Kind], copy: PendingCopy) -> list[ChainAnswers]:
        parts = iter(copy.wait().split([each.numel() for _, own in kinds for each in own]))
        answers: list[ChainAnswers] = []
        for places, columns in kinds:
            order = np.argsort(places)
            rows = np.flatnonzero((self._choices == BY_LAW) == (len(columns) > 2))
            found = [next(parts).view(each.dtype).view(each.shape).numpy()[order] for each in columns]
            answers.append(ChainAnswers(rows.tolist(), _chains(self._lengths[rows], *found)))
        return answers


def _told(found: ChildrenOnDevice, chances: torch.Tensor) -> ChildrenOnDevice:
    """Give children the chances that a head says, [num_rows] of all rows."""
    kept = found.numbers[:1] if len(found.numbers) == 2 else found.numbers
    return replace(found, numbers=(*kept, select_rows(chances[:, None].double(), found.rows)))


def _chains(lengths: Int64s, ids: np.ndarray, *others: np.ndarray) -> Chains:
    """Join chains: ids [num_tokens, 1], and their chances likewise, or the rows and weights that they were drawn from.

    The rows come likeliest first, which is what a drawn token's confidence is where its head does not say another;
    weights of 0 are left out.
    """
    if len(others) == 1:
        none = np.zeros(0, np.int32)
        confidences, sizes, row_ids, row_weights = others[0][:, 0], np.zeros(0, np.int64), none, none
    else:
        candidates, weights, *told = others
        is_kept = weights > 0
        confidences = told[0][:, 0] if told else weights[:, 0] / DRAFT_PROB_SCALE
        sizes = is_kept.sum(axis=1)
        row_ids, row_weights = candidates[is_kept].astype(np.int32), weights[is_kept].astype(np.int32)
    return Chains(
        lengths=lengths,
        token_ids=ids[:, 0],
        confidences=confidences,
        row_sizes=sizes,
        row_ids=row_ids,
        row_weights=row_weights,
    )


def tokens_of(chains: Chains) -> list[list[int]]:
    """Return the tokens of each chain."""
    token_ids, starts = chains.token_ids.tolist(), starts_of(chains.lengths)
    ends = (starts + chains.lengths).tolist()
    return [token_ids[start:end] for start, end in zip(starts.tolist(), ends, strict=True)]
