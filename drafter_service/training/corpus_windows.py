"""Training text: documents from files and folders, one stream of tokens, windows drawn from it.

    files, folders ─> documents, shuffled ─┬─ training stream ──> windows, a function of seed and step alone
                                           └─ held-out stream ──> windows side by side, and prompts, for the figures

Every plain text begins with an end-of-text token. In a conversation only the assistant's tokens count: users' tokens
are never drafted. A step's windows depend on seed and step only, so that a resumed run sees the same data.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from outrider.drafter_service.training.shards import SUFFIX, Conversation, read_shard
from outrider.verifier_service.chat_template import ArgumentsError, ChatWriter

HELD_OUT_SHARE = 0.02
TEXT_PROMPT_TOKENS = 32  # prompt length of plain text


@dataclass(frozen=True, slots=True)
class Windows:
    """Parts of a stream, of equal length."""

    token_ids: Tensor  # int64 [rows, window]
    counted: Tensor  # bool [rows, window]; False: a token that is never drafted
    starts: Tensor | None = None  # int64 [rows]; begin of each, if windows are repeated

    def split(self, rows: int) -> Iterator[Windows]:
        """Yield batches of `rows` windows."""
        for token_ids, counted in zip(self.token_ids.split(rows), self.counted.split(rows), strict=True):
            yield Windows(token_ids, counted)


@dataclass(frozen=True, slots=True)
class TokenStream:
    """Concatenated documents."""

    token_ids: Tensor  # int32 [num_tokens]
    counted: Tensor | None = None  # bool [num_tokens]; None: all tokens count
    starts: Tensor | None = None  # int64, ascending: begins of conversations, the first is 0; None: there are none

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, part: slice) -> TokenStream:
        """Return a part; of conversations, it begins with one."""
        begin, end, _ = part.indices(len(self))
        starts = self.starts
        return TokenStream(
            self.token_ids[begin:end],
            None if self.counted is None else self.counted[begin:end],
            None if starts is None else starts[(starts >= begin) & (starts < end)] - begin,
        )

    def batch(self, step: int, *, rows: int, window: int, seed: int) -> Windows:
        """Draw the windows of one step, as a function of seed and step.

        A conversation's windows begin a multiple of the window length after its start, as served prompts begin at it.
        So there are few distinct windows, and they are repeated.
        """
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        drawn = torch.randint(len(self) - window + 1, (rows,), generator=generator)
        if self.starts is not None:
            begun = self.starts[torch.searchsorted(self.starts, drawn, right=True) - 1]
            drawn = begun + (drawn - begun) // window * window
        return self._cut(drawn, window)

    def windows(self, window: int, *, limit: int) -> Windows:
        """Return at most `limit` windows without overlap, spread evenly over the stream."""
        starts = torch.arange(0, len(self) - window + 1, window)
        if self.starts is not None:
            starts = _spaced(self.starts, window, len(self))
        return self._cut(starts[torch.linspace(0, len(starts) - 1, min(limit, len(starts))).long()], window)

    def _cut(self, starts: Tensor, window: int) -> Windows:
        indices = starts[:, None] + torch.arange(window)  # [rows, window]
        counted = torch.ones_like(indices, dtype=torch.bool) if self.counted is None else self.counted[indices]
        return Windows(self.token_ids[indices].long(), counted, None if self.starts is None else starts)

    def counts(self, vocab_size: int) -> Tensor:
        """Return how often each token occurs: int64 [vocab_size]."""
        return torch.bincount(self.token_ids.long(), minlength=vocab_size)

    def digest(self) -> str:
        """Return a fingerprint, by which a resumed run checks its text."""
        return hashlib.sha256(self.token_ids.numpy().tobytes()).hexdigest()[:16]


def _spaced(starts: Tensor, window: int, num_tokens: int) -> Tensor:
    """Return the starts, of ascending ones, whose windows are within the stream and do not overlap."""
    chosen: list[int] = []
    for start in starts.tolist():
        if start + window <= num_tokens and (not chosen or start - chosen[-1] >= window):
            chosen.append(start)
    return torch.tensor(chosen or [0])


@dataclass(frozen=True, slots=True)
class Document:
    """A text or a conversation, as token ids."""

    token_ids: Sequence[int]
    counted: Sequence[bool] | None = None  # whether a token is the assistant's; None: plain text, all count

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The tokens of a conversation before its first answer."""
        assert self.counted is not None
        return tuple(self.token_ids[: self.counted.index(True)])


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training text and held-out text."""

    training: TokenStream
    held_out: TokenStream
    prompts: tuple[tuple[int, ...], ...] = ()  # held-out prompts, as a client sends them


def load_corpus(
    tokenizer: PreTrainedTokenizerBase, text: Sequence[Path], held_out: Sequence[Path], *, window: int, seed: int = 0
) -> Corpus:
    """Read and tokenise the text; without `held_out`, the last documents in shuffled order are held out.

    Raises:
        ValueError: there is too little text for a single window, or a file cannot be read.
    """
    documents = _shuffled(read_documents(text, tokenizer), seed)
    if held_out:
        kept_back: Sequence[Document] = _shuffled(read_documents(held_out, tokenizer), seed)
        training, held_out_stream = encode(documents), encode(kept_back)
    else:
        training, held_out_stream, kept_back = _split(encode(documents), documents, window)
    corpus = Corpus(training, held_out_stream, _prompts(held_out_stream, kept_back, window))
    for name, part in (("--text", corpus.training), ("--held-out", corpus.held_out)):
        if len(part) < window:
            raise ValueError(f"{name}: {len(part)} tokens are less than one window of {window}")
    return corpus


def _shuffled(documents: Iterable[Document], seed: int) -> list[Document]:
    shuffled = list(documents)
    random.Random(seed).shuffle(shuffled)
    return shuffled


def _split(
    stream: TokenStream, documents: Sequence[Document], window: int
) -> tuple[TokenStream, TokenStream, Sequence[Document]]:
    """Hold out the stream's end; return both parts, and the documents that are entirely in the second."""
    cut = len(stream) - max(window, int(len(stream) * HELD_OUT_SHARE))
    if stream.starts is not None:  # the held-out part begins with a conversation
        cut = int(stream.starts[max(0, int(torch.searchsorted(stream.starts, cut, right=True)) - 1)])
    ends = itertools.accumulate(len(document.token_ids) for document in documents)
    kept_back = [each for each, end in zip(documents, ends, strict=True) if end - len(each.token_ids) >= cut]
    return stream[:cut], stream[cut:], kept_back


def _prompts(stream: TokenStream, documents: Sequence[Document], window: int) -> tuple[tuple[int, ...], ...]:
    """Return the prompts of conversations; without conversations, the beginnings of windows."""
    conversations = [document for document in documents if document.counted is not None and any(document.counted)]
    if conversations:
        return tuple(document.prompt_ids for document in conversations)
    if len(stream) < window:
        return ()
    beginnings = stream.windows(window, limit=len(stream)).token_ids[:, :TEXT_PROMPT_TOKENS]
    return tuple(tuple(row) for row in beginnings.tolist())


def read_documents(paths: Iterable[Path], tokenizer: PreTrainedTokenizerBase) -> Iterator[Document]:
    """Yield every document in files and folders, in path order.

    A file of UTF-8 text is one document. Each line of a .jsonl file is one: an object with `text`, or with `messages`
    for the tokenizer's chat template. A shard of `outrider generate-corpus` has many. In folders, files that are not
    text are skipped.
    """
    chats = ChatWriter(tokenizer)
    for path in paths:
        if path.is_dir():
            for file in sorted(p for p in path.rglob("*") if p.is_file()):
                yield from _documents_of(file, tokenizer, chats, is_named=False)
        elif path.is_file():
            yield from _documents_of(path, tokenizer, chats, is_named=True)
        else:
            raise ValueError(f"{path}: no such file or folder")


def _documents_of(
    path: Path, tokenizer: PreTrainedTokenizerBase, chats: ChatWriter, *, is_named: bool
) -> Iterator[Document]:
    if path.suffix == SUFFIX:
        yield from map(_answered, read_shard(path))
        return
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        if is_named:
            raise ValueError(f"{path}: not UTF-8 text") from error
        return
    if path.suffix != ".jsonl":
        yield _plain(text, tokenizer)
        return
    # not at Unicode's line separators, which may stand within JSON
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _document_of_line(line, tokenizer, chats, f"{path}:{number}")


def _answered(conversation: Conversation) -> Document:
    counted = [False] * len(conversation.prompt_ids) + [True] * len(conversation.answer_ids)
    return Document([*conversation.prompt_ids, *conversation.answer_ids], counted)


def _plain(text: str, tokenizer: PreTrainedTokenizerBase) -> Document:
    opening = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    token_ids: Any = tokenizer(text, add_special_tokens=False)["input_ids"]
    return Document(opening + token_ids)


def _document_of_line(line: str, tokenizer: PreTrainedTokenizerBase, chats: ChatWriter, place: str) -> Document:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON: {error}") from error
    if isinstance(record, dict) and isinstance(record.get("text"), str):
        return _plain(record["text"], tokenizer)
    if isinstance(record, dict) and isinstance(record.get("messages"), list):
        try:
            return _conversation(record["messages"], tokenizer, chats)
        except ArgumentsError as error:
            raise ValueError(f"{place}: {error}") from error
    raise ValueError(f"{place}: an object with `text` or `messages` was expected")


def _conversation(messages: Sequence[Any], tokenizer: PreTrainedTokenizerBase, chats: ChatWriter) -> Document:
    """Render messages by the chat template and mark the assistant's tokens.

    A message's tokens are the difference of two renderings, with and without it; the answer's opening is not among
    them.
    """

    def written(count: int, *, opens_answer: bool = False) -> str:
        return chats.write(messages[:count], add_generation_prompt=opens_answer)

    text = written(len(messages))
    spans: list[tuple[int, int]] = []
    for index, message in enumerate(messages):
        if message.get("role") == "assistant":
            before, after = written(index, opens_answer=True), written(index + 1)
            if text.startswith(before) and text.startswith(after):
                spans.append((len(before), len(after)))
    found: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    counted = [any(begin <= start < end for begin, end in spans) for start, _ in found["offset_mapping"]]
    return Document(found["input_ids"], counted)


def encode(documents: Sequence[Document]) -> TokenStream:
    """Concatenate documents to a stream."""
    token_ids: list[int] = []
    counted: list[bool] = []
    starts: list[int] = []
    for document in documents:
        if document.counted is not None or not starts:
            starts.append(len(token_ids))
        token_ids += document.token_ids
        counted += [True] * len(document.token_ids) if document.counted is None else document.counted
    if all(document.counted is None for document in documents):
        return TokenStream(torch.tensor(token_ids, dtype=torch.int32))
    return TokenStream(torch.tensor(token_ids, dtype=torch.int32), torch.tensor(counted), torch.tensor(starts))


def frequent_ids(stream: TokenStream, vocab_size: int, num_ids: int) -> Tensor:
    """Return the most frequent tokens' ids in ascending order, ties and unseen ones by id: int64 [num_ids]."""
    order = stream.counts(vocab_size).argsort(descending=True, stable=True)
    return order[:num_ids].sort().values
