"""Text of byte-level tokens, such as GPT-2's, Llama 3's and Qwen's: a token is bytes, and text is their UTF-8.

To ask the tokenizer for the text of a window of tokens, twice for each new one, takes twelve times as long.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from tokenizers import decoders

REPLACEMENT_CHARACTER = "\ufffd"  # decoded from bytes that are not a character, or not yet
MAX_CHARACTER_BYTES = 4
NUM_CHECKED_TOKENS = 512  # before a table is believed


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of a byte-level piece: a printable byte is itself, others are 256 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def bytes_of_piece(piece: str) -> bytes | None:
    """Return the bytes of a byte-level piece; None: it has a character that stands for none."""
    values = [_BYTE_OF.get(char) for char in piece]
    return None if None in values else bytes(value for value in values if value is not None)


class TokenBytes(dict[int, bytes]):
    """The bytes of a byte-level tokenizer's tokens, looked up once each; ids that it does not have have none."""

    def __init__(self, tokenizer: Any) -> None:  # transformers.PreTrainedTokenizerBase, which has no types
        super().__init__()
        self._tokenizer = tokenizer
        self._vocab_size = len(tokenizer)

    def __missing__(self, token_id: int) -> bytes:
        piece = (self._tokenizer.convert_ids_to_tokens(token_id) if token_id < self._vocab_size else None) or ""
        found = bytes_of_piece(piece)
        self[token_id] = piece.encode() if found is None else found  # what was added to the vocabulary is its own text
        return self[token_id]


def token_bytes_of(tokenizer: Any) -> TokenBytes | None:
    """Return the bytes of a tokenizer's tokens; None: it is not byte-level, or decodes some tokens otherwise."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(getattr(backend, "decoder", None), decoders.ByteLevel):
        return None
    table, size = TokenBytes(tokenizer), len(tokenizer)
    ids = [*range(0, size, max(1, size // NUM_CHECKED_TOKENS)), *sorted(tokenizer.added_tokens_decoder)[-16:]]
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return table if b"".join(table[id_] for id_ in ids).decode(errors="replace") == text else None


class ByteDecoder:
    """Decode a growing sequence of byte-level tokens, as `IncrementalDecoder` does any sequence."""

    def __init__(self, table: TokenBytes, *, silent_ids: frozenset[int], prompt_ids: Sequence[int]) -> None:
        self._table = table
        self._silent_ids = silent_ids
        self._rest = self._end_of(prompt_ids)  # bytes of a character that is not whole
        self._is_prompts = bool(self._rest)  # its first bytes are the prompt's, which shows it as a replacement
        self.is_unfinished = False  # the text ends within a character

    def push(self, token_id: int) -> str:
        """Append one token; return the text that is final now."""
        if token_id in self._silent_ids:
            return ""
        data = self._rest + self._table[token_id]
        text, num_read = codecs.utf_8_decode(data, "replace", False)
        self._rest = data[num_read:]
        self.is_unfinished = bool(self._rest)
        return self._less_the_prompts(text, data) if self._is_prompts else text

    def flush(self) -> str:
        """Return the text that was held back: an unfinished character becomes a replacement character."""
        data, self._rest = self._rest, b""
        text = data.decode(errors="replace")
        return self._less_the_prompts(text, data) if self._is_prompts else text

    def _less_the_prompts(self, text: str, data: bytes) -> str:
        if text:
            self._is_prompts = False
            if text[0] == REPLACEMENT_CHARACTER and not data.startswith(REPLACEMENT_CHARACTER.encode()):
                return text[1:]  # no character came of it
        return text

    def _end_of(self, prompt_ids: Sequence[int]) -> bytes:
        """Return the bytes of a character that a prompt ends within."""
        end = b""
        for token_id in reversed(prompt_ids):
            if len(end) >= MAX_CHARACTER_BYTES:
                break
            if token_id not in self._silent_ids:
                end = self._table[token_id] + end
        return end[codecs.utf_8_decode(end, "replace", False)[1] :]
