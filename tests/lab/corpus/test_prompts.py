"""Templated prompts: many, of many kinds, and none of those that figures are taken from."""

from __future__ import annotations

import json
from collections import Counter

from fakes.grams import grams_of
from outrider.lab.chat_prompts import PROMPTS
from outrider.lab.corpus.prompts import kinds, templated_prompt, words

NUM_PROMPTS = 3000


def test_they_are_of_many_kinds_in_turn_and_seldom_twice_the_same():
    prompts = [templated_prompt(number, 0) for number in range(NUM_PROMPTS)]
    counts = Counter(prompt.kind for prompt in prompts)
    assert counts.keys() == kinds().keys()
    assert len(counts) >= 6
    assert set(counts.values()) == {NUM_PROMPTS // len(counts)}
    assert len({prompt.text for prompt in prompts}) > 0.9 * NUM_PROMPTS
    assert not any("{" in prompt.text for prompt in prompts)


def test_every_template_and_word_can_be_drawn():
    text = " ".join(templated_prompt(number, 0).text for number in range(20_000))
    assert [word for place in words().values() for word in place if word not in text] == []


def test_the_prompts_of_figures_are_of_other_kinds_and_share_no_run_of_words():
    rows = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    assert not kinds().keys() & {row["kind"] for row in rows}
    learnt = {gram for number in range(20_000) for gram in grams_of_words(templated_prompt(number, 0).text)}
    assert not learnt & {gram for row in rows for gram in grams_of_words(row["prompt"])}
    # short ones have no run of so many words: they are not learnt as they are either
    texts = {templated_prompt(number, 0).text for number in range(20_000)}
    assert not texts & {row["prompt"] for row in rows}


def grams_of_words(text: str) -> list[tuple[str, ...]]:
    return grams_of(text.lower().split())
