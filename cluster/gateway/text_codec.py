"""The gateway's tokenizer: whole texts in threads, and single tokens for log probabilities."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from outrider.cluster.common.errors import InvalidRequest
from outrider.cluster.gateway.byte_decoder import REPLACEMENT_CHARACTER, TokenBytes, bytes_of_piece, token_bytes_of
from outrider.cluster.gateway.detokenizer import Detokenizer, silent_token_ids
from outrider.verifier_service.chat_template import ArgumentsError, ChatWriter
from outrider.verifier_service.messages.draft import require

NUM_THREADS = 2  # tokenise in parallel: the tokenizer releases the GIL
# done at once, in a fifth of a millisecond: beside a busy event loop a thread waits 5 ms for each of its turns
MAX_SHORT_CHARS, MAX_SHORT_MESSAGES = 512, 8
MAX_BAD_WORDS = 128  # as vLLM
MAX_BAD_WORD_CHARS = 1024  # as a stop string

ResultT = TypeVar("ResultT")
TokenSequence = tuple[int, ...]


class TextCodec:
    """Convert between text, chats and tokens. Threads take long texts, so that none delays other streams."""

    def __init__(self, tokenizer: Any) -> None:  # transformers.PreTrainedTokenizerBase, which has no types
        self._tokenizer = tokenizer
        self._chats = ChatWriter(tokenizer)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenizer")
        self._silent_ids = silent_token_ids(tokenizer)
        self._max_token_chars = max(len(piece) for piece in tokenizer.get_vocab())
        self.token_text = functools.cache(self._token_text)
        self.token_bytes = functools.cache(self._token_bytes)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model's tokenizer has a chat template."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    async def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Return a text's token ids."""
        if len(text) <= MAX_SHORT_CHARS:
            return self.encode_now(text, add_special_tokens=add_special_tokens)
        return await self._in_thread(functools.partial(self.encode_now, text, add_special_tokens=add_special_tokens))

    def encode_now(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Return a text's token ids, in this thread."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False))

    async def word_sequences(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences of bad words; raises `ValueError` naming `bad_words`."""
        return await self._in_thread(functools.partial(self.word_sequences_now, words))

    def word_sequences_now(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences of bad words, in this thread."""
        return word_sequences(words, functools.partial(self.encode_now, add_special_tokens=False))

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of tokens."""
        silent_ids = self._silent_ids if skip_special_tokens else frozenset()
        return await self._in_thread(lambda: self._decode_now([id_ for id_ in token_ids if id_ not in silent_ids]))

    async def save(self, folder: Path) -> None:
        """Write the tokenizer's files into a folder."""
        await self._in_thread(functools.partial(self._tokenizer.save_pretrained, folder))

    @property
    def response_template(self) -> dict[str, Any] | None:
        """The tokenizer's template by which the model's answers are read, if it has one."""
        return getattr(self._tokenizer, "response_template", None)

    @functools.cached_property
    def special_ids(self) -> dict[str, int]:
        """The tokens that the tokenizer marks as special: their ids, by text."""
        added = self._tokenizer.added_tokens_decoder
        return {token.content: id_ for id_, token in added.items() if token.special}

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> str:
        """Render messages by the model's chat template; raises `InvalidRequest` if they do not fit it."""
        if not self.has_chat_template:
            raise InvalidRequest(
                "messages: this model's tokenizer has no chat template; use /v1/completions", "messages"
            )
        if _is_short(messages) and not fields.get("tools"):
            return self.render_chat_now(messages, **fields)
        return await self._in_thread(functools.partial(self.render_chat_now, messages, **fields))

    def render_chat_now(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> str:
        """Render messages by a chat template, in this thread; raises `InvalidRequest`.

        `fields` are `apply_chat_template`'s (`tools`; `add_generation_prompt`, by default true; `chat_template`, in
        place of the model's) or the template's own.
        """
        fields = {"add_generation_prompt": True, **fields}
        try:
            return self._chats.write(messages, **fields)
        except ArgumentsError as error:
            raise InvalidRequest(f"messages: {error}", "messages") from error
        except Exception as error:  # a template may raise anything: these messages do not fit it
            raise InvalidRequest(f"messages do not fit the model's chat template: {error}", "messages") from error

    def is_longer_than(self, text: str, num_tokens: int) -> bool:
        """Return whether a text's length alone proves that it has more than `num_tokens`."""
        return len(text) > num_tokens * self._max_token_chars

    def detokenizer(
        self,
        *,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> Detokenizer:
        """Return a detokenizer for one choice; `prompt_ids`: of the prompt whose text the choice's goes on with."""
        return Detokenizer(
            self._tokenizer,
            self._bytes_of_tokens,
            silent_ids=self._silent_ids if skip_special_tokens else frozenset(),
            prompt_ids=prompt_ids,
            stop=stop,
            include_stop=include_stop,
            min_tokens=min_tokens,
        )

    async def token_texts(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> list[str]:
        """Return the text that each token adds to the whole text."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return await self._in_thread(lambda: detokenizer.push(token_ids) + detokenizer.flush())

    def pieces(self, token_ids: Sequence[int]) -> list[str | None]:
        """Return the tokenizer's pieces; None: an id beyond the tokenizer's vocabulary."""
        return list(self._tokenizer.convert_ids_to_tokens(list(token_ids)))

    def _token_text(self, token_id: int, *, is_first: bool = False) -> str:
        """Return a token's text within a text, or as its first: some decoders drop the space before that."""
        if token_id >= len(self._tokenizer):
            return ""
        before = [] if is_first else self._anchor
        return self._decode_now([*before, token_id])[len(self._decode_now(before)) :]

    def _token_bytes(self, token_id: int, *, is_first: bool = False) -> tuple[int, ...] | None:
        """Return the UTF-8 bytes of a token's text, which may be a part of a character; None: unknown."""
        text = self._token_text(token_id, is_first=is_first)
        if REPLACEMENT_CHARACTER not in text:
            return tuple(text.encode())
        piece = self.pieces([token_id])[0] or ""
        if piece.startswith("<0x") and piece.endswith(">"):  # byte fallback
            return (int(piece[3:-1], 16),)
        found = bytes_of_piece(piece)
        return None if found is None else tuple(found)

    @functools.cached_property
    def _bytes_of_tokens(self) -> TokenBytes | None:
        return token_bytes_of(self._tokenizer)

    @functools.cached_property
    def _anchor(self) -> list[int]:
        return list(self._tokenizer.encode("a", add_special_tokens=False))

    def _decode_now(self, token_ids: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    async def _in_thread(self, work: Callable[[], ResultT]) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _is_short(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a template renders a chat in no time: few messages, of few characters, without calls."""
    if len(messages) > MAX_SHORT_MESSAGES or any("tool_calls" in message for message in messages):
        return False
    return sum(len(message.get("content") or "") for message in messages) <= MAX_SHORT_CHARS


def check_bad_words(words: Sequence[str]) -> None:
    """Raise `ValueError` naming `bad_words` if there are too many, or one is blank or too long."""
    require(len(words) <= MAX_BAD_WORDS, "bad_words", f"at most {MAX_BAD_WORDS} texts")
    fits = all(word.strip() and len(word) <= MAX_BAD_WORD_CHARS for word in words)
    require(fits, "bad_words", f"texts of 1 to {MAX_BAD_WORD_CHARS} characters, not of white space alone")


def word_sequences(words: Sequence[str], encode: Callable[[str], TokenSequence]) -> tuple[TokenSequence, ...]:
    """Return each word's tokens at the beginning of a text, and after a space; raises `ValueError`.

    The sequence after a space is left out if it ends in the other one, which then bars both. (vLLM leaves it out in
    more cases, if the two differ in length or begin with the same token: there such a word can still appear.)
    """
    sequences: list[TokenSequence] = []
    for word in words:
        bare = encode(word.lstrip())
        require(bool(bare), "bad_words", "texts that the tokenizer has tokens for")
        spaced = encode(f" {word.lstrip()}")
        sequences.append(bare)
        if spaced[-len(bare) :] != bare:
            sequences.append(spaced)
    return tuple(dict.fromkeys(sequences))
