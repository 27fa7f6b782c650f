"""A model runner with known logits that reads its context through the block tables, so that wrong KV shows."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.messages.tree import VerifiedTokens
from outrider.verifier_service.model.paged_metadata import fill_placeholders
from outrider.verifier_service.model.state_pool import StatePool
from outrider.verifier_service.sampling.entries import VerificationEntry
from outrider.verifier_service.sampling.unread import UnreadTokens
from outrider.verifier_service.sampling.verification import PendingVerification, Verification, begin, draw_uniforms

_MASK = (1 << 61) - 1


def next_token(context: list[int], vocab_size: int) -> int:
    """Return the greedy continuation: a hash of the whole context, every token and its place counted."""
    value = len(context)
    for token_id in context:
        value = (value * 1_000_003 + token_id + 1) & _MASK
    return (value >> 7) % vocab_size


def continuation(context: list[int], length: int, vocab_size: int) -> tuple[int, ...]:
    """Return `length` greedy tokens after `context`."""
    tokens = list(context)
    for _ in range(length):
        tokens.append(next_token(tokens, vocab_size))
    return tuple(tokens[len(context) :])


def confidence(vocab_size: int) -> float:
    """Return the probability of the next token, as a greedy drafter computes it."""
    logits = torch.tensor([[10.0, *[0.0] * (vocab_size - 1)]])
    return float((logits[:, :1] - logits.logsumexp(dim=1, keepdim=True)).exp())


def closed(batch: ScheduledBatch, chosen: torch.Tensor | None) -> ScheduledBatch:
    """Return a batch whose placeholders are those that were chosen."""
    if chosen is None:
        return batch
    token_ids = torch.tensor(batch.token_ids)
    fill_placeholders(token_ids, chosen)
    return replace(batch, token_ids=token_ids.tolist())


class FakeRunner:
    """KV is the token id itself, kept by slot; `batches` records every forward. A token's state is its id, too."""

    def __init__(self, *, vocab_size: int = 97, max_model_len: int = 64, num_blocks: int = 64, block_size: int = 4):
        self.vocab_size, self.max_model_len = vocab_size, max_model_len
        self.num_blocks, self.block_size = num_blocks, block_size
        self.states: StatePool | None = None
        self.eos_token_ids: tuple[int, ...] = ()
        self.batches: list[ScheduledBatch] = []
        self._kv = [-1] * (num_blocks * block_size)

    def keep_states(self) -> None:
        self.states = StatePool(num_blocks=self.num_blocks, block_size=self.block_size, width=1, dtype=torch.float32)

    def execute(self, batch: ScheduledBatch, chosen: torch.Tensor | None = None) -> torch.Tensor:
        batch = closed(batch, chosen)
        self.batches.append(batch)
        moved = [self._kv[source] for source in batch.move_sources]
        for target, token_id in zip(batch.move_targets, moved, strict=True):
            self._kv[target] = token_id
        copied = [self._kv[source * self.block_size :][: self.block_size] for source in batch.copy_sources]
        for target, block in zip(batch.copy_targets, copied, strict=True):
            self._kv[target * self.block_size : (target + 1) * self.block_size] = block
        for token_id, slot in zip(batch.token_ids, batch.slot_mapping, strict=True):
            self._kv[slot] = token_id
        if self.states is not None:
            self.states.copy_blocks(batch.copy_sources, batch.copy_targets)
            self.states.write(batch.slot_mapping, torch.tensor(batch.token_ids)[:, None])
        contexts: list[list[int]] = []
        trees = batch.tree_parents or [[]] * len(batch.block_tables)
        sequences = zip(batch.query_lengths, batch.context_lengths, batch.block_tables, trees, strict=True)
        for query, context, table, parents in sequences:
            assert len(table) == -(-context // self.block_size), "table does not cover the context exactly"
            kv = [self._kv[table[i // self.block_size] * self.block_size + i % self.block_size] for i in range(context)]
            first = context - len(parents)  # of the tree's own places
            contexts += [kv[: end + 1] for end in range(context - query, first)]
            paths: list[list[int]] = []
            for parent, token_id in zip(parents, kv[first:], strict=True):
                paths.append([*(kv[:first] if parent < 0 else paths[parent]), token_id])
            contexts += paths
        assert batch.positions == [len(context) - 1 for context in contexts], "positions"
        assert max(batch.positions) < self.max_model_len, "beyond the model's context"
        return self.rows_after([contexts[index] for index in batch.logits_indices])

    def rows_after(self, contexts: Sequence[list[int]]) -> torch.Tensor:
        """Return what follows whole contexts: float32 [num_contexts, vocab_size]."""
        logits = torch.zeros(len(contexts), self.vocab_size)
        for row, context in enumerate(contexts):
            logits[row, next_token(context, self.vocab_size)] = 10.0
        return logits


def noisy_row(context: Sequence[int], vocab_size: int) -> torch.Tensor:
    """Return logits of their own for every context: float32 [vocab_size]."""
    generator = torch.Generator().manual_seed(hash(tuple(context)) & 0xFFFF_FFFF)
    return 2 * torch.randn(vocab_size, generator=generator)


class NoisyRunner(FakeRunner):
    """Its rows are laws, not point masses."""

    def rows_after(self, contexts: Sequence[list[int]]) -> torch.Tensor:
        rows = [noisy_row(context, self.vocab_size) for context in contexts]
        return torch.stack(rows) if rows else torch.zeros(0, self.vocab_size)


class TimedRunner(FakeRunner):
    """Steps take what a curve says of their tokens, and so much per position of KV that they read."""

    def __init__(self, curve: Callable[[int], float], *, context_s: float = 0.0, **sizes: int) -> None:
        super().__init__(**sizes)
        self.now_s, self.curve, self._context_s = 0.0, curve, context_s

    def execute(self, batch: ScheduledBatch, chosen: torch.Tensor | None = None) -> torch.Tensor:
        self.now_s += self.curve(batch.num_tokens) + self._context_s * sum(batch.context_lengths)
        return super().execute(batch)


class LateRunner(FakeRunner):
    """A device: it does what it was told in order, as far as `arrive` says.

    Logits are there at once, and mean nothing before their step has arrived.
    """

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self._steps: deque[list[Callable[[], object]]] = deque()  # what is still to be done in each
        self.num_early = 0  # steps that were launched while another ran

    @property
    def is_running(self) -> bool:
        return bool(self._steps)

    def execute(self, batch: ScheduledBatch, chosen: torch.Tensor | None = None) -> torch.Tensor:
        assert len(self._steps) < 3, "more than two steps, and one that nobody waits for any more"
        assert (min(batch.token_ids) < 0) <= (chosen is not None), "nobody closes the placeholders"
        self.num_early += self.is_running
        late = torch.full((len(batch.logits_indices), self.vocab_size), float("nan"))
        sent = copy.deepcopy(batch)  # what the scheduler does to its lists later is too late

        def forward() -> None:
            late.copy_(super(LateRunner, self).execute(sent, chosen))

        self._steps.append([forward])
        return late

    def arrive(self, num_left: int = 0) -> None:
        """Let all steps end but the last `num_left`."""
        assert len(self._steps) > num_left, "nothing runs"
        while len(self._steps) > num_left:
            for do in self._steps.popleft():
                do()

    def verify(
        self,
        logits: torch.Tensor,
        entries: Sequence[VerificationEntry],
        rng: torch.Generator,
        rows: Sequence[int] | None = None,
        unread: UnreadTokens | None = None,
    ) -> Verification:
        """As `begin` on a device, in the order of the last step that was launched."""
        if not entries:
            return begin(logits, entries, rng, rows)
        return LateVerification(self._steps[-1], logits, entries, rng, rows, unread)


class LateVerification:
    """A device's verification that judges when its step arrives."""

    def __init__(
        self,
        step: list[Callable[[], object]],
        logits: torch.Tensor,
        entries: Sequence[VerificationEntry],
        rng: torch.Generator,
        rows: Sequence[int] | None,
        unread: UnreadTokens | None,
    ) -> None:
        uniforms = draw_uniforms(entries, rng)
        every_row = slice(None) if rows is None else list(rows)

        def judge(judged: torch.Tensor) -> PendingVerification:
            return PendingVerification(judged, entries, uniforms, unread)

        self.chosen = judge(torch.zeros_like(logits)[every_row]).chosen  # places, and memory that is filled later
        self.chosen.numbers.fill_(-1)
        self._step = step
        step.append(lambda: self._take(judge(logits[every_row])))

    def _take(self, pending: PendingVerification) -> None:
        self._pending = pending
        self.chosen.numbers.copy_(pending.chosen.numbers)

    @property
    def corrected(self) -> frozenset[int]:
        return self._pending.corrected

    def collect(self) -> list[VerifiedTokens]:
        return self._pending.collect()
