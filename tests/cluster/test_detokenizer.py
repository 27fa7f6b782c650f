from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from fake_backend import EOS, build_tokenizer
from outrider.cluster.detokenizer import Detokenizer, IncrementalDecoder, StopStringFinder, silent_token_ids

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


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_strings_in_pieces_are_those_of_the_whole(text, stop):
    finder = StopStringFinder(tuple(stop))
    shown = ""
    for end, char in enumerate(text, start=1):
        shown += finder.push(char)
        if finder.found:
            # the first end of a stop string, and of those that end there the earliest start
            starts = [start for s in stop if (start := text[:end].find(s)) >= 0]
            assert not any(s in text[: end - 1] for s in stop)
            assert shown == text[: min(starts)]
            return
        held = text[len(shown) : end]
        assert text[:end].startswith(shown)
        assert held == "" or any(s.startswith(held) for s in stop)
    assert not any(s in text for s in stop)
    assert shown + finder.flush() == text


def test_tokens_behind_a_stop_string_are_not_used():
    ids = TOKENIZER.encode("a.") + TOKENIZER.encode("\n") + TOKENIZER.encode("zz")
    result = Detokenizer(TOKENIZER, stop=(".\n",)).push(ids)
    assert (result.text, result.num_tokens, result.stopped) == ("a", 3, True)


def test_what_was_held_back_for_a_stop_string_comes_at_the_end():
    detokenizer = Detokenizer(TOKENIZER, stop=("xyz",))
    assert detokenizer.push(TOKENIZER.encode("axy")).text == "a"
    assert detokenizer.flush().text == "xy"
