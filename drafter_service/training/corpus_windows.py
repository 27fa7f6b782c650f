"""Text to learn from: documents out of files and folders, one stream of tokens, windows drawn from it.

    files, folders ─> documents, shuffled ─┬─ training stream ──> windows, a function of seed and step alone
                                           └─ held-out stream ──> windows side by side, for the figures

An end-of-text token stands before every document. Since a step's windows depend on nothing but seed and step, a run
that was stopped goes on with the very data it would have seen.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

HELD_OUT_SHARE = 0.02
BATCH_DOCUMENTS = 64  # tokenised in one call


@dataclass(frozen=True, slots=True)
class TokenStream:
    """Documents one after another, each after an end-of-text token where the tokenizer has one."""

    token_ids: Tensor  # int32 [num_tokens]

    def __len__(self) -> int:
        return len(self.token_ids)

    def batch(self, step: int, *, rows: int, window: int, seed: int) -> Tensor:
        """Draw the windows of one step, a function of seed and step alone: int64 [rows, window]."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self) - window + 1, (rows,), generator=generator).tolist()
        return torch.stack([self.token_ids[start : start + window] for start in starts]).long()

    def windows(self, window: int, *, limit: int) -> Tensor:
        """Return at most `limit` windows spread evenly over the stream, none overlapping: int64 [rows, window]."""
        num_windows = len(self) // window
        rows = self.token_ids[: num_windows * window].view(num_windows, window)
        chosen = torch.linspace(0, num_windows - 1, min(limit, num_windows)).long()
        return rows[chosen].long()

    def counts(self, vocab_size: int) -> Tensor:
        """Return how often each token occurs: int64 [vocab_size]."""
        return torch.bincount(self.token_ids.long(), minlength=vocab_size)

    def digest(self) -> str:
        """Return a fingerprint, so that a resumed run can tell that it learns from the same text."""
        return hashlib.sha256(self.token_ids.numpy().tobytes()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Corpus:
    """What is learnt from, and what the figures are taken from."""

    training: TokenStream
    held_out: TokenStream


def load_corpus(
    tokenizer: PreTrainedTokenizerBase, text: Sequence[Path], held_out: Sequence[Path], *, window: int, seed: int = 0
) -> Corpus:
    """Read and tokenise the text; without `held_out`, its last documents in shuffled order are kept back.

    Raises:
        ValueError: there is too little text for a single window, or a file cannot be read.
    """
    stream = encode(tokenizer, read_documents(text, tokenizer), seed=seed)
    if held_out:
        corpus = Corpus(stream, encode(tokenizer, read_documents(held_out, tokenizer), seed=seed))
    else:
        num_kept_back = max(window, int(len(stream) * HELD_OUT_SHARE))
        corpus = Corpus(TokenStream(stream.token_ids[:-num_kept_back]), TokenStream(stream.token_ids[-num_kept_back:]))
    for name, part in (("--text", corpus.training), ("--held-out", corpus.held_out)):
        if len(part) < window:
            raise ValueError(f"{name}: {len(part)} tokens are less than one window of {window}")
    return corpus


def read_documents(paths: Iterable[Path], tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield every document below some files and folders, in path order.

    A file of UTF-8 text is one document. A line of a .jsonl file is one: an object with `text`, or with `messages`,
    to which the tokenizer's chat template is applied. Of folders, files that are not text are passed over.
    """
    for path in paths:
        if path.is_dir():
            for file in sorted(p for p in path.rglob("*") if p.is_file()):
                yield from _documents_of(file, tokenizer, is_named=False)
        elif path.is_file():
            yield from _documents_of(path, tokenizer, is_named=True)
        else:
            raise ValueError(f"{path}: no such file or folder")


def _documents_of(path: Path, tokenizer: PreTrainedTokenizerBase, *, is_named: bool) -> Iterator[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        if is_named:
            raise ValueError(f"{path}: not UTF-8 text") from error
        return
    if path.suffix != ".jsonl":
        yield text
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield _document_of_line(line, tokenizer, f"{path}:{number}")


def _document_of_line(line: str, tokenizer: PreTrainedTokenizerBase, place: str) -> str:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON: {error}") from error
    if isinstance(record, dict) and isinstance(record.get("text"), str):
        return record["text"]
    if isinstance(record, dict) and isinstance(record.get("messages"), list):
        return str(tokenizer.apply_chat_template(record["messages"], tokenize=False))
    raise ValueError(f"{place}: an object with `text` or `messages` was expected")


def encode(tokenizer: PreTrainedTokenizerBase, documents: Iterable[str], *, seed: int = 0) -> TokenStream:
    """Return one stream of the documents in shuffled order."""
    shuffled = list(documents)
    random.Random(seed).shuffle(shuffled)
    opening = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    stream: list[int] = []
    for start in range(0, len(shuffled), BATCH_DOCUMENTS):
        batch = shuffled[start : start + BATCH_DOCUMENTS]
        for ids in tokenizer(batch, add_special_tokens=False)["input_ids"]:
            stream += opening
            stream += ids
    return TokenStream(torch.tensor(stream, dtype=torch.int32))


def frequent_ids(stream: TokenStream, vocab_size: int, num_ids: int) -> Tensor:
    """Return the most frequent tokens' ids in ascending order, ties and unseen ones by id: int64 [num_ids]."""
    order = stream.counts(vocab_size).argsort(descending=True, stable=True)
    return order[:num_ids].sort().values
