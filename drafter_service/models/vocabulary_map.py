"""Let a model draft in another vocabulary: the tokens that both know, matched by their strings.

Token-level intersection (Timor et al. 2025, arXiv 2502.05202): the draft's law is the model's, restricted to the shared
tokens and renormalised *before* anything is drawn, so that rows, trees and the noise of seeded requests are all in the
target's ids and exactness needs nothing further.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from outrider.verifier_service.engine.runners import Runner
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.model.state_pool import StatePool

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPACE_MARKS = ("Ġ", "▁")  # how byte-level BPE and sentencepiece write a leading space


class TextTokenizer(Protocol):
    """Text to ids and back, without special tokens added or dropped on the way."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class FileTokenizer:
    """A `TextTokenizer` from a checkpoint's tokenizer.json."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def from_folder(cls, folder: Path) -> FileTokenizer:
        """Read a tokenizer; raises `ValueError` where the checkpoint has none in this format."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{folder} has no tokenizer.json")
        from tokenizers import Tokenizer

        return cls(Tokenizer.from_file(str(path)))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def vocabulary(self) -> dict[str, int]:
        """Return every token's string as the tokenizer writes it, with its id."""
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        return vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyMap:
    """Which draft token stands for each token of the target; -1: none does."""

    draft_ids: tuple[int, ...]  # one per target id

    def __post_init__(self) -> None:
        if max(self.draft_ids, default=-1) < 0:
            raise ValueError("the vocabularies of target and drafter share no token")

    @classmethod
    def of(
        cls, target: Mapping[str, int], draft: Mapping[str, int], *, target_vocab_size: int, draft_vocab_size: int
    ) -> VocabularyMap:
        """Match tokens by string, whatever sign either side writes for a leading space.

        The sizes are those of the models: ids of padding have no string, and ids beyond a model are left out.
        """
        target_mark, draft_mark = _space_mark(target), _space_mark(draft)
        known = {_normal(token, draft_mark): id_ for token, id_ in draft.items() if id_ < draft_vocab_size}
        draft_ids = [-1] * target_vocab_size
        for token, id_ in target.items():
            if id_ < target_vocab_size:
                draft_ids[id_] = known.get(_normal(token, target_mark), -1)
        return cls(draft_ids=tuple(draft_ids))

    @property
    def num_shared(self) -> int:
        return sum(id_ >= 0 for id_ in self.draft_ids)

    def is_shared(self, token_id: int) -> bool:
        return self.draft_ids[token_id] >= 0


def _space_mark(vocabulary: Mapping[str, int]) -> str:
    """Guess a vocabulary's sign for a space: the one that more of its tokens begin with."""
    return max(SPACE_MARKS, key=lambda mark: sum(token.startswith(mark) for token in vocabulary))


def _normal(token: str, mark: str) -> str:
    return token.replace(mark, " ")


class MappedRunner:
    """A `Runner` of another vocabulary that reads and answers in the target's ids.

    Input ids from the target's vocabulary size on are the model's own, shifted by it: what has no counterpart. Logits
    are the target's vocabulary wide, -inf for what the model does not know.
    """

    def __init__(self, runner: Runner, vocabulary: VocabularyMap) -> None:
        if max(vocabulary.draft_ids) >= runner.vocab_size:
            raise ValueError(f"draft_ids must lie below the draft model's vocabulary of {runner.vocab_size}")
        self.target_vocab_size = len(vocabulary.draft_ids)
        self.vocab_size = self.target_vocab_size + runner.vocab_size
        self.max_model_len = runner.max_model_len
        self.num_blocks, self.block_size = runner.num_blocks, runner.block_size
        self.eos_token_ids: tuple[int, ...] = ()
        self.states: StatePool | None = None
        self._runner = runner
        self._draft_ids = (*vocabulary.draft_ids, *range(runner.vocab_size))
        self._columns = torch.tensor(vocabulary.draft_ids)  # [target_vocab_size]

    def execute(self, batch: ScheduledBatch, chosen: torch.Tensor | None = None) -> torch.Tensor:
        """Run the model: float32 logits [num_rows, target_vocab_size]."""
        token_ids = [token_id if token_id < 0 else self._draft_ids[token_id] for token_id in batch.token_ids]
        assert all(own >= 0 or given < 0 for own, given in zip(token_ids, batch.token_ids, strict=True)), (
            "a token that the draft model does not know"
        )
        if chosen is not None:  # drafted here, and so known
            self._columns = self._columns.to(chosen.device)
            chosen = self._columns.index_select(0, chosen).clamp(min=0)
        mapped = dataclasses.replace(batch, token_ids=token_ids)
        logits = self._runner.execute(mapped, chosen)  # [num_rows, draft_vocab_size]
        self._columns = self._columns.to(logits.device)
        shared = logits.index_select(1, self._columns.clamp(min=0))
        return shared.masked_fill_(self._columns < 0, float("-inf"))
