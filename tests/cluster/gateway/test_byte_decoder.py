from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders

from fakes.backend import SPACED_DECODERS, build_tokenizer, spaced_tokenizer
from outrider.cluster.gateway.byte_decoder import ByteDecoder, TokenBytes, token_bytes_of
from outrider.cluster.gateway.detokenizer import silent_token_ids

TOKENIZER = build_tokenizer()
TABLE = token_bytes_of(TOKENIZER)


def told(decoder: ByteDecoder, ids: list[int]) -> str:
    return "".join([decoder.push(id_) for id_ in ids] + [decoder.flush()])


@given(st.lists(st.integers(0, len(TOKENIZER) + 3), max_size=60), st.booleans())
def test_any_tokens_have_the_tokenizers_text(ids: list[int], skips: bool):
    silent_ids = silent_token_ids(TOKENIZER) if skips else frozenset()
    text = told(ByteDecoder(TABLE, silent_ids=silent_ids, prompt_ids=()), ids)
    assert text == TOKENIZER.decode([id_ for id_ in ids if id_ < len(TOKENIZER)], skip_special_tokens=skips)


@given(st.text(max_size=20), st.text(max_size=40))
@example("a\ufffd", "\ufffdb")
@example("日本語" * 9, "日")
@example("a", "\U0001f600")
def test_any_text_goes_on_where_the_prompts_ends(prompt: str, text: str):
    ids = TOKENIZER.encode(prompt + text)
    for cut in range(len(ids) + 1):
        before = b"".join(TABLE[id_] for id_ in ids[:cut]).decode(errors="ignore")
        shown = told(ByteDecoder(TABLE, silent_ids=frozenset(), prompt_ids=ids[:cut]), ids[cut:])
        assert before + shown == prompt + text, "a character that the prompt ends within is the text's"


@given(st.lists(st.binary(min_size=1, max_size=3), max_size=12))
def test_bytes_that_are_no_text_are_replaced_as_the_tokenizer_does(parts: list[bytes]):
    ids = [id_ for part in parts for byte in part for id_ in [TOKENIZER.convert_tokens_to_ids(piece_of(byte))]]
    assert told(ByteDecoder(TABLE, silent_ids=frozenset(), prompt_ids=()), ids) == TOKENIZER.decode(ids)


def piece_of(byte: int) -> str:
    return next(piece for piece in TOKENIZER.get_vocab() if len(piece) == 1 and TABLE_OF_PIECES[piece] == byte)


TABLE_OF_PIECES = {
    piece: TABLE[id_][0] for piece, id_ in TOKENIZER.get_vocab().items() if len(piece) == 1 and len(TABLE[id_]) == 1
}


def test_a_character_of_the_prompt_that_comes_to_nothing_is_not_shown_twice():
    ids = [TOKENIZER.convert_tokens_to_ids(piece_of(byte)) for byte in "日".encode()]
    (space,) = TOKENIZER.encode("a")
    shown = told(ByteDecoder(TABLE, silent_ids=frozenset(), prompt_ids=ids[:2]), [space])
    assert TOKENIZER.decode(ids[:2]) + shown == TOKENIZER.decode([*ids[:2], space])
    assert told(ByteDecoder(TABLE, silent_ids=frozenset(), prompt_ids=ids[:2]), ids[2:]) == "日"


def test_what_is_unfinished_is_told():
    decoder = ByteDecoder(TABLE, silent_ids=frozenset(), prompt_ids=())
    ids = [TOKENIZER.convert_tokens_to_ids(piece_of(byte)) for byte in "日".encode()]
    assert [(decoder.push(id_), decoder.is_unfinished) for id_ in ids] == [("", True), ("", True), ("日", False)]


@pytest.mark.parametrize("kind", SPACED_DECODERS)
def test_tokens_that_are_no_bytes_have_no_table(kind: str):
    assert token_bytes_of(spaced_tokenizer(kind)) is None


def test_a_table_that_the_tokenizer_contradicts_is_not_believed():
    tokenizer = build_tokenizer()

    class Upper(type(tokenizer)):
        def decode(self, *args, **kwargs):
            return super().decode(*args, **kwargs).upper()

    tokenizer.__class__ = Upper
    assert isinstance(tokenizer.backend_tokenizer.decoder, decoders.ByteLevel)
    assert token_bytes_of(tokenizer) is None


def test_pieces_that_were_added_are_their_own_text():
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["a b", "größer"])
    table = TokenBytes(tokenizer)
    assert table[len(tokenizer) - 2] == b"a b"
    ids = random.Random(3).sample(range(len(tokenizer)), len(tokenizer))
    assert b"".join(table[id_] for id_ in ids).decode(errors="replace") == tokenizer.decode(ids)
    assert table[len(tokenizer)] == b""
