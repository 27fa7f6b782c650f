from __future__ import annotations

import asyncio
import threading

import pytest

from fakes.backend import (
    CALL_TEMPLATES,
    EOS,
    build_tokenizer,
    calls_template,
    chat_of_call,
    spaced_ids,
    spaced_tokenizer,
)
from outrider.cluster.common.errors import InvalidRequest
from outrider.cluster.gateway.text_codec import NUM_THREADS, TextCodec


@pytest.fixture(scope="module")
def spaced() -> TextCodec:
    return TextCodec(spaced_tokenizer())


def test_a_token_keeps_the_space_that_a_decoder_drops_at_the_start(spaced):
    (bee,) = spaced_ids("▁bee")
    assert (spaced.token_text(bee), spaced.token_text(bee, is_first=True)) == (" bee", "bee")
    assert (spaced.token_bytes(bee), spaced.token_bytes(bee, is_first=True)) == (tuple(b" bee"), tuple(b"bee"))


def test_the_bytes_of_a_part_of_a_character(spaced, tokenizer):
    assert spaced.token_bytes(spaced_ids("日")[0]) == (0xE6,)
    codec = TextCodec(tokenizer)
    parts = [codec.token_bytes(id_) for id_ in tokenizer.encode("日 é\n😀")]
    assert bytes(byte for part in parts for byte in part).decode() == "日 é\n😀"


def test_an_id_beyond_the_tokenizers_has_no_text(tokenizer):
    codec = TextCodec(tokenizer)
    assert codec.token_text(len(tokenizer) + 3) == ""
    assert codec.token_bytes(len(tokenizer) + 3) == ()


async def test_texts_of_tokens_concatenate(tokenizer):
    codec = TextCodec(tokenizer)
    ids = [*tokenizer.encode("a日"), tokenizer.eos_token_id]
    assert await codec.token_texts(ids, skip_special_tokens=True) == ["a", "", "日", ""]
    assert await codec.token_texts(ids, skip_special_tokens=False) == ["a", "", "日", EOS]
    assert await codec.decode(ids) == f"a日{EOS}"
    assert await codec.decode(ids, skip_special_tokens=True) == "a日"


async def test_few_texts_are_tokenised_at_a_time(tokenizer):
    class Counting:
        num_running = most = 0

        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def encode(self, text, **_):
            self.num_running += 1
            self.most = max(self.most, self.num_running)
            ids = tokenizer.encode(text * 2000)
            self.num_running -= 1
            return ids

    counting = Counting()
    codec = TextCodec(counting)
    await asyncio.gather(*(codec.encode("the quick ", add_special_tokens=False) for _ in range(8)))
    assert 1 <= counting.most <= 2


async def test_calls_that_nobody_waits_for_leave_the_threads_to_others(tokenizer):
    class Stuck:
        def __init__(self) -> None:
            self.num_begun, self.go_on = 0, threading.Event()

        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def encode(self, text, **_):
            self.num_begun += 1
            self.go_on.wait(10)
            return [7]

    stuck = Stuck()
    codec = TextCodec(stuck)
    calls = [asyncio.create_task(codec.encode("x", add_special_tokens=False)) for _ in range(10)]
    while stuck.num_begun < NUM_THREADS:
        await asyncio.sleep(0.001)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    last = asyncio.create_task(codec.encode("x", add_special_tokens=False))
    await asyncio.sleep(0.01)
    assert stuck.num_begun == NUM_THREADS, "what runs still counts"
    stuck.go_on.set()
    assert await last == (7,)
    assert stuck.num_begun == NUM_THREADS + 1, "what was cancelled does not begin"


def test_a_text_that_is_surely_too_long(tokenizer):
    codec = TextCodec(tokenizer)
    longest = max(map(len, tokenizer.get_vocab()))
    assert codec.is_longer_than("a" * (longest * 4 + 1), 4)
    assert not codec.is_longer_than("a" * (longest * 4), 4)


async def test_calls_that_were_made_before_are_written_in_the_templates_form_or_named():
    joins, walks = (calls_template(CALL_TEMPLATES[kind][0]) for kind in ("joins", "walks"))
    codec = TextCodec(build_tokenizer(joins))
    assert codec.render_chat_now(chat_of_call({"city": "Rom"})).endswith('!{"city": "Rom"}[assistant]')
    codec = TextCodec(build_tokenizer(walks))
    assert (await codec.render_chat(chat_of_call('{"city": "Rom"}'))).endswith("<city>Rom[assistant]")
    with pytest.raises(InvalidRequest, match=r"^messages: tool_calls: function.arguments of 'weather'") as refused:
        await codec.render_chat(chat_of_call("Rom"))
    assert refused.value.field == "messages"
