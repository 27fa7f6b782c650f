from __future__ import annotations

import json
import math

import pytest

from fakes.backend import SPACED_WORDS, spaced_tokenizer
from outrider.cluster.common.errors import RequestFailed
from outrider.cluster.gateway.logprobs_format import ShownToken, chat_logprobs, completion_logprobs, prompt_logprobs
from outrider.cluster.gateway.text_codec import TextCodec
from outrider.verifier_service.messages.request import TokenLogprobs


def entry(tokenizer, text, top):
    (id_,) = tokenizer.encode(text)
    ids = tuple(tokenizer.encode(other)[0] for other, _ in top)
    logprobs = tuple(logprob for _, logprob in top)
    return TokenLogprobs(token_id=id_, logprob=-3.0, rank=3, top_token_ids=ids, top_logprobs=logprobs)


def test_each_shape_shows_so_many_alternatives_and_the_token(tokenizer):
    codec = TextCodec(tokenizer)
    one = entry(tokenizer, "a", [("b", -0.5), ("c", -1.0)])
    (shown,) = completion_logprobs(
        [ShownToken(id=one.token_id, text="a", logprobs=one)], codec, num_top=1, first_offset=0
    )["top_logprobs"]
    assert shown == {"b": -0.5, "a": -3.0}
    shown = [ShownToken(id=one.token_id, text="a", logprobs=one)]
    (item,) = chat_logprobs(shown, codec, num_top=1, first_offset=0)["content"]
    assert item["token"] == "a"
    assert [top["token"] for top in item["top_logprobs"]] == ["b"]
    first, second = prompt_logprobs([None, one], codec, num_top=1)
    assert first is None
    assert [(item["decoded_token"], item["rank"]) for item in second.values()] == [("a", 3), ("b", 1)]


def test_the_token_is_shown_once_where_it_is_among_the_likeliest(tokenizer):
    codec = TextCodec(tokenizer)
    one = TokenLogprobs(token_id=5, logprob=-0.5, rank=1, top_token_ids=(5,), top_logprobs=(-0.5,))
    (by_id,) = prompt_logprobs([one], codec, num_top=1)
    assert list(by_id) == ["5"]
    assert by_id["5"]["rank"] == 1


def test_everything_is_json(tokenizer):
    codec = TextCodec(tokenizer)
    one = TokenLogprobs(token_id=5, logprob=-math.inf, rank=9, top_token_ids=(6,), top_logprobs=(-math.inf,))
    shapes = [
        completion_logprobs([ShownToken(id=5, text="x", logprobs=one)], codec, num_top=1, first_offset=3),
        chat_logprobs([ShownToken(id=5, text="x", logprobs=one)], codec, num_top=1, first_offset=3),
        prompt_logprobs([one], codec, num_top=1),
    ]
    assert json.dumps(shapes, allow_nan=False).count("-9999.0") == 7


def test_offsets_go_on_where_the_text_was(tokenizer):
    codec = TextCodec(tokenizer)
    tokens = [ShownToken(id=5, text=text, logprobs=None) for text in ("ab", "", "c")]
    assert completion_logprobs(tokens, codec, num_top=0, first_offset=7)["text_offset"] == [7, 9, 9]


def test_tokens_are_named_by_their_ids_if_asked(tokenizer):
    codec = TextCodec(tokenizer)
    one = TokenLogprobs(token_id=5, logprob=-0.5, rank=2, top_token_ids=(6,), top_logprobs=(-0.25,))
    tokens = [ShownToken(id=5, text="x", logprobs=one)]
    shown = completion_logprobs(tokens, codec, num_top=1, first_offset=0, as_ids=True)
    assert (shown["tokens"], shown["top_logprobs"]) == (["token_id:5"], [{"token_id:6": -0.25, "token_id:5": -0.5}])
    (item,) = chat_logprobs(tokens, codec, num_top=1, first_offset=0, as_ids=True)["content"]
    assert (item["token"], item["top_logprobs"][0]["token"]) == ("token_id:5", "token_id:6")


def test_what_is_not_a_number_is_an_error_in_every_shape(tokenizer):
    codec = TextCodec(tokenizer)
    own = TokenLogprobs(token_id=5, logprob=math.nan, rank=1, top_token_ids=(6,), top_logprobs=(-1.0,))
    top = TokenLogprobs(token_id=5, logprob=-1.0, rank=2, top_token_ids=(6,), top_logprobs=(math.nan,))
    for one in (own, top):
        for shape in (
            lambda one: completion_logprobs(
                [ShownToken(id=5, text="x", logprobs=one)], codec, num_top=1, first_offset=0
            ),
            lambda one: chat_logprobs([ShownToken(id=5, text="x", logprobs=one)], codec, num_top=1, first_offset=0),
            lambda one: prompt_logprobs([one], codec, num_top=1),
        ):
            with pytest.raises(RequestFailed, match="not a number"):
                shape(one)


def test_of_two_tokens_with_one_text_the_likelier_is_shown():
    """A letter, and its byte."""
    codec = TextCodec(spaced_tokenizer())
    letter, byte = SPACED_WORDS.index("a"), len(SPACED_WORDS) + ord("a")
    one = TokenLogprobs(token_id=letter, logprob=-3.0, rank=2, top_token_ids=(byte,), top_logprobs=(-0.5,))
    shown = completion_logprobs([ShownToken(id=letter, text="a", logprobs=one)], codec, num_top=1, first_offset=0)
    assert shown["top_logprobs"] == [{"a": -0.5}]
