from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from fakes.backend import EOS, build_tokenizer
from outrider.cluster.gateway.detokenizer import Detokenizer, IncrementalDecoder, StopStringFinder, silent_token_ids

TOKENIZER = build_tokenizer()


def decode_incrementally(tokenizer, ids, **kwargs):
    decoder = IncrementalDecoder(tokenizer, **kwargs)
    return "".join([decoder.push(id_) for id_ in ids] + [decoder.flush()])


def spaced_tokenizer() -> PreTrainedTokenizerFast:
    """A sentencepiece-like tokenizer: the decoder drops the first space, bytes fall back to tokens of their own."""
    words = ["<unk>", "▁", "▁a", "▁bee", "b", ".", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Tokenizer(models.WordLevel({word: id_ for id_, word in enumerate(words)}, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@given(st.text(max_size=60))
@example("\ufffd" * 40)
@example("日本語" * 20)
@example("👩‍👩‍👧‍👦 é é")
def test_any_text_survives(text):
    assert decode_incrementally(TOKENIZER, TOKENIZER.encode(text)) == text


@given(st.lists(st.integers(2, len(TOKENIZER) - 1), max_size=80))
def test_any_tokens_give_the_text_of_the_whole(ids):
    assert decode_incrementally(TOKENIZER, ids) == TOKENIZER.decode(ids)


@settings(max_examples=60)
@given(st.lists(st.sampled_from([[1], [2], [3], [4], [5], [6 + 0xE2, 6 + 0x82, 6 + 0xAC]]), max_size=30))
def test_leading_spaces_and_byte_fallback(pieces):
    tokenizer = SPACED
    ids = [id_ for piece in pieces for id_ in piece]
    assert decode_incrementally(tokenizer, ids) == tokenizer.decode(ids)


SPACED = spaced_tokenizer()


def test_an_unfinished_character_is_held_back_and_a_finished_one_is_not():
    decoder = IncrementalDecoder(TOKENIZER)
    ids = TOKENIZER.encode("😀")
    assert len(ids) == 4
    assert [decoder.push(id_) for id_ in ids] == ["", "", "", "😀"]


def test_flush_shows_what_never_became_a_character():
    decoder = IncrementalDecoder(TOKENIZER)
    assert decoder.push(TOKENIZER.encode("😀")[0]) == ""
    assert decoder.flush() == "\ufffd"


def test_special_tokens_and_padding_ids_have_no_text():
    ids = [*TOKENIZER.encode("a"), TOKENIZER.eos_token_id, len(TOKENIZER) + 5, *TOKENIZER.encode("b")]
    assert decode_incrementally(TOKENIZER, ids, silent_ids=silent_token_ids(TOKENIZER)) == "ab"
    assert decode_incrementally(TOKENIZER, ids) == f"a{EOS}b"


class CountingTokenizer:
    """Count the tokens that are decoded."""

    def __init__(self, tokenizer):
        self._tokenizer, self.num_decoded = tokenizer, 0

    def __len__(self):
        return len(self._tokenizer)

    def decode(self, ids, **kwargs):
        self.num_decoded += len(ids)
        return self._tokenizer.decode(ids, **kwargs)


@pytest.mark.parametrize("text", ["abc 日本 " * 200, "\ufffd" * 700])
def test_work_per_token_does_not_grow_with_the_text(text):
    tokenizer = CountingTokenizer(TOKENIZER)
    ids = TOKENIZER.encode(text)
    assert decode_incrementally(tokenizer, ids) == text
    assert tokenizer.num_decoded < 60 * len(ids)


@given(
    st.lists(st.text("ab", max_size=3), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
    st.integers(0, 4),
)
def test_stop_strings_in_tokens_are_those_of_the_whole(texts, stop, include, min_tokens):
    finder = StopStringFinder(tuple(stop), include=include, min_tokens=min_tokens)
    shown: list[str] = []
    for num_tokens, text in enumerate(texts, start=1):
        shown += finder.push(text)
        expected = whole_text(texts[:num_tokens], stop, include, min_tokens)
        assert finder.found == (expected is not None)
        if expected is not None:
            assert "".join(shown) == expected
            assert len(shown) == num_tokens
            return
        held = "".join(texts[len(shown) : num_tokens])
        assert shown == texts[: len(shown)], "whole tokens are published"
        could_end = any(s.startswith(held[i:]) for s in stop for i in range(len(texts[len(shown)]))) if held else True
        assert could_end, "and only those are held back whose text may become part of a stop string"
    assert shown + finder.flush() == texts


def whole_text(texts, stop, include, min_tokens):
    """Return the text up to a stop string that the last token completes, or None; looks at all of it every time."""
    text, num_new_chars = "".join(texts), len(texts[-1])
    if len(texts) <= min_tokens:
        return None
    matches = [
        (start, start + len(s))
        for s in stop
        for start in range(len(text))
        if text.startswith(s, start) and start + len(s) > len(text) - num_new_chars
    ]
    return text[: min(matches)[1 if include else 0]] if matches else None


def test_tokens_behind_a_stop_string_are_not_used():
    ids = TOKENIZER.encode("a.") + TOKENIZER.encode("\n") + TOKENIZER.encode("zz")
    detokenizer = Detokenizer(TOKENIZER, stop=(".\n",))
    assert detokenizer.push(ids) == ["a", "", ""]
    assert detokenizer.stopped


def test_what_was_held_back_for_a_stop_string_comes_at_the_end():
    detokenizer = Detokenizer(TOKENIZER, stop=("xyz",))
    assert detokenizer.push(TOKENIZER.encode("axy")) == ["a"]
    assert detokenizer.flush() == ["x", "y"]


def test_a_token_of_an_unfinished_character_waits_for_its_text():
    ids = TOKENIZER.encode("a😀b")
    detokenizer = Detokenizer(TOKENIZER)
    assert [detokenizer.push([id_]) for id_ in ids] == [["a"], [], [], [], ["", "", "", "😀"], ["b"]]
    unfinished = Detokenizer(TOKENIZER)
    assert unfinished.push(ids[:3]) == ["a"]
    assert unfinished.flush() == ["", "\ufffd"]


@given(st.lists(st.integers(2, len(TOKENIZER) - 1), max_size=40), st.lists(st.integers(1, 5), max_size=10))
def test_every_token_gets_its_text_once_and_in_order(ids, sizes):
    detokenizer = Detokenizer(TOKENIZER, stop=("zq",))
    texts, left = [], ids
    for size in [*sizes, len(ids)]:
        texts += detokenizer.push(left[:size])
        left = left[size:]
        assert len(texts) <= len(ids) - len(left)
    texts += detokenizer.flush()
    if not detokenizer.stopped:
        assert len(texts) == len(ids)
        assert "".join(texts) == TOKENIZER.decode(ids)
