"""Words as a model's tokens write them, and what is no word."""

from __future__ import annotations

import pytest

from outrider.cluster.gateway.text_codec import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    TextCodec,
    check_bad_words,
    word_sequences,
)

TOKENS = {
    "dog": (1,),
    " dog": (2,),
    "fox": (3, 4),
    " fox": (5,),
    ",": (6,),
    " ,": (7, 6),
    "owl": (8, 9),
    " owl": (8, 9),
}


@pytest.mark.parametrize(
    ("words", "sequences"),
    [
        (["dog"], ((1,), (2,))),
        (["fox"], ((3, 4), (5,))),  # of another number of tokens, which vLLM would leave open
        ([","], ((6,),)),  # the second way ends with the first
        (["owl"], ((8, 9),)),
        (["  dog", "dog"], ((1,), (2,))),
        (["dog", ","], ((1,), (2,), (6,))),
        ([], ()),
    ],
)
def test_a_word_is_barred_at_the_beginning_and_behind_a_space(words, sequences):
    assert word_sequences(words, TOKENS.__getitem__) == sequences


def test_a_tokenizer_that_knows_no_token_of_a_word_is_told():
    with pytest.raises(ValueError, match=r"^bad_words must be texts that the tokenizer has tokens for"):
        word_sequences(["x"], lambda _: ())


@pytest.mark.parametrize("words", [[""], [" \n"], ["a" * (MAX_BAD_WORD_CHARS + 1)], ["a"] * (MAX_BAD_WORDS + 1)])
def test_what_is_no_word_is_refused_by_name(words):
    check_bad_words(["a" * MAX_BAD_WORD_CHARS, *["a"] * (MAX_BAD_WORDS - 1)])
    with pytest.raises(ValueError, match=r"^bad_words must be "):
        check_bad_words(words)


async def test_both_ways_are_written_by_the_models_tokenizer(tokenizer):
    codec = TextCodec(tokenizer)
    found = await codec.word_sequences(["quick"])
    assert found == codec.word_sequences_now(["quick"])
    assert [tokenizer.decode(ids) for ids in found] == ["quick", " quick"]
