"""A vocabulary of given bytes for grammars, and brute force over it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

from llguidance import LLTokenizer, TokenizerWrapper

from outrider.verifier_service.messages.draft import ROOT

# A forced text may be written in every way, so that brute force over bytes is right.
UNFORCED = '%llguidance {"no_forcing": true}\n'


class ByteTokens:
    """What llguidance asks of a tokenizer that it does not know; it cuts text greedily. The first token is the end."""

    eos_token_id, bos_token_id = 0, None

    def __init__(self, tokens: Sequence[bytes], special_token_ids: Sequence[int] = (0,)) -> None:
        self.tokens, self.special_token_ids = tokens, special_token_ids

    def __call__(self, text: bytes | str) -> list[int]:
        rest = text if isinstance(text, bytes) else text.encode()
        ids = []
        while rest:
            fitting = (id_ for id_, token in enumerate(self.tokens) if rest.startswith(token))
            ids.append(max(fitting, key=lambda id_: len(self.tokens[id_])))
            rest = rest[len(self.tokens[ids[-1]]) :]
        return ids

    def load(self) -> LLTokenizer:
        return LLTokenizer(TokenizerWrapper(self))


def allowed_ids(
    prefix: Sequence[int],
    tokens: Sequence[bytes],
    ends: Collection[int],
    *,
    is_whole: Callable[[bytes], bool],
    is_prefix: Callable[[bytes], bool],
) -> set[int] | None:
    """Return what may follow some tokens, found by trying them all; None: they do not fit themselves."""
    text = b""
    for index, token_id in enumerate(prefix):
        if token_id in ends:
            return set(ends) if is_whole(text) and all(id_ in ends for id_ in prefix[index:]) else None
        if not 0 <= token_id < len(tokens) or not is_prefix(text + tokens[token_id]):
            return None
        text += tokens[token_id]
    following = {i for i, token in enumerate(tokens) if i not in ends and is_prefix(text + token)}
    return following | (set(ends) if is_whole(text) else set())


def matches(pattern: bytes) -> Callable[[bytes], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    """Return the nodes from below the root to one of a tree."""
    path = []
    while node != ROOT:
        path.append(node)
        node = parents[node]
    return path[::-1]
