from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fakes.backend import EOS, SPACED_DECODERS, SPACED_WORDS, build_tokenizer, spaced_ids, spaced_tokenizer
from outrider.cluster.gateway.detokenizer import Detokenizer, IncrementalDecoder, StopStringFinder, silent_token_ids

TOKENIZER = build_tokenizer()


def decode_incrementally(tokenizer, ids, **kwargs):
    decoder = IncrementalDecoder(tokenizer, **kwargs)
    return "".join([decoder.push(id_) for id_ in ids] + [decoder.flush()])


@given(st.text(max_size=60))
@example("\ufffd" * 40)
@example("日本語" * 20)
@example("👩‍👩‍👧‍👦 é é")
def test_any_text_survives(text):
    assert decode_incrementally(TOKENIZER, TOKENIZER.encode(text)) == text


@given(st.lists(st.integers(2, len(TOKENIZER) - 1), max_size=80))
def test_any_tokens_give_the_text_of_the_whole(ids):
    assert decode_incrementally(TOKENIZER, ids) == TOKENIZER.decode(ids)


SPACED = {kind: spaced_tokenizer(kind) for kind in SPACED_DECODERS}
PIECES = st.sampled_from([*SPACED_WORDS, "€", "日", "😀", "\ufffd"])


@settings(max_examples=60)
@pytest.mark.parametrize("kind", SPACED)
@given(prompt=st.lists(PIECES, max_size=20), pieces=st.lists(PIECES, max_size=30), skips=st.booleans())
def test_text_goes_on_where_the_prompts_ends(kind, prompt, pieces, skips):
    tokenizer, prompt_ids, ids = SPACED[kind], spaced_ids(*prompt), spaced_ids(*pieces)
    silent_ids = silent_token_ids(tokenizer) if skips else frozenset()
    text = decode_incrementally(tokenizer, ids, silent_ids=silent_ids, prompt_ids=prompt_ids)
    whole = tokenizer.decode(prompt_ids + ids, skip_special_tokens=skips)
    assert tokenizer.decode(prompt_ids, skip_special_tokens=skips) + text == whole


@given(st.text(max_size=20), st.text(max_size=40))
@example("a\ufffd", "\ufffdb")
@example("日本語" * 9, "日")
def test_bytes_go_on_where_the_prompts_end(prompt, text):
    ids, num_bytes = TOKENIZER.encode(prompt + text), len(prompt.encode())
    for num_prompt in {0, num_bytes // 3, len(ids) // 2, len(ids)}:
        before = TOKENIZER.decode(ids[:num_prompt])
        told = decode_incrementally(TOKENIZER, ids[num_prompt:], prompt_ids=ids[:num_prompt])
        # a prompt of token ids may end within a character, which is then the text's
        assert prompt + text in (before + told, before.rstrip("\ufffd") + told)


@pytest.mark.parametrize("kind", SPACED)
@pytest.mark.parametrize("prompt", ["▁a", "a", "€", "€" * 30, "[/INST]", "\n"])
@pytest.mark.parametrize("num_within", [1, 2])
def test_a_character_may_be_split_between_prompt_and_text(kind, prompt, num_within):
    character = spaced_ids("日")
    before = spaced_ids("▁a", prompt)
    told = decode_incrementally(
        SPACED[kind],
        [*character[num_within:], *spaced_ids("€", "▁bee")],
        prompt_ids=[*before, *character[:num_within]],
    )
    assert told == "日€ bee"


def test_a_text_of_its_own_begins_without_the_space_that_its_decoder_drops():
    ids = spaced_ids("▁bee", "▁a")
    silent_ids = silent_token_ids(SPACED["sentencepiece"])
    assert decode_incrementally(SPACED["sentencepiece"], ids) == "bee a"
    prompt_ids = spaced_ids("<s>")  # that has no text to go on with
    assert decode_incrementally(SPACED["sentencepiece"], ids, silent_ids=silent_ids, prompt_ids=prompt_ids) == "bee a"


def test_a_stop_string_begins_with_the_texts_first_space_and_not_in_the_prompt():
    tokenizer, prompt_ids, ids = SPACED["sentencepiece"], spaced_ids("▁a", "b"), spaced_ids("b", "▁bee", ".")
    stopped = Detokenizer(tokenizer, prompt_ids=prompt_ids, stop=("bb", "b bee"))
    assert (stopped.push(ids), stopped.stop_string) == (["", ""], "b bee")
    spaced = Detokenizer(tokenizer, prompt_ids=prompt_ids, stop=(" bee",))
    assert (spaced.push(ids[1:]), spaced.stop_string) == ([""], " bee")


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
