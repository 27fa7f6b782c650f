"""`LLM` and what it is not to say, or is not held to: with drafts and without, of the embedded pair."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pytest
from pydantic import BaseModel
from transformers import AutoTokenizer

from outrider.cluster import LLM, SamplingParams
from outrider.cluster.offline.prompts import parse_line
from outrider.drafter_service import embedded
from outrider.verifier_service.messages.request import StructuredKind, StructuredOutput

TEXTS = ["import os\n\ndef read(path):\n", "class Point:\n    def __init__(self"]
WORDS = ["self", "return", "def", "(", "path"]
OPTIONS = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.8, "seed": 7}}
SIZES = {"kv_cache_memory_bytes": 32 << 20}


class Tags(BaseModel):
    tags: set[bool]


@pytest.fixture(scope="module")
def llms() -> Iterator[tuple[LLM, LLM]]:
    with LLM(speculation="off", **SIZES) as plain, LLM(speculation="always", **SIZES) as drafted:
        yield plain, drafted


def has(output: Sequence[int], word: Sequence[int]) -> bool:
    return any(list(output[start : start + len(word)]) == list(word) for start in range(len(output)))


@pytest.mark.parametrize("how", OPTIONS)
def test_a_bad_word_never_comes_and_drafts_change_no_token(llms, how):
    tokenizer = AutoTokenizer.from_pretrained(embedded.target_path())
    ways = [tokenizer.encode(before + word, add_special_tokens=False) for word in WORDS for before in ("", " ")]
    sampling = SamplingParams(max_tokens=32, **OPTIONS[how])
    free = [output.outputs[0].token_ids for output in llms[0].generate(TEXTS, sampling)]
    barred = SamplingParams(max_tokens=32, bad_words=WORDS, **OPTIONS[how])
    plain, drafted = ([o.outputs[0].token_ids for o in llm.generate(TEXTS, barred)] for llm in llms)
    assert plain == drafted
    assert any(has(output, way) for output in free for way in ways), "they would have come"
    assert not any(has(output, way) for output in plain for way in ways)


def test_what_an_output_is_not_held_to_is_said(llms):
    lenient = SamplingParams(temperature=0, max_tokens=300, structured_outputs={"json": Tags.model_json_schema()})
    (output,) = llms[0].generate(TEXTS[0], lenient)
    assert output.error is None
    assert all(isinstance(tag, bool) for tag in json.loads(output.outputs[0].text)["tags"])
    assert output.warnings == [
        "structured_outputs: the answer may break what the grammar lacks and leaves out: uniqueItems"
    ]
    assert llms[0].generate(TEXTS[0], SamplingParams(max_tokens=1))[0].warnings == []


def test_where_strict_it_is_refused(llms):
    text = json.dumps(Tags.model_json_schema())
    strict = StructuredOutput(kind=StructuredKind.JSON_SCHEMA, text=text, is_strict=True)
    (output,) = llms[0].generate(TEXTS[0], SamplingParams(structured_outputs=strict))
    assert output.outputs[0].finish_reason == "error"
    assert 'Unimplemented keys: ["uniqueItems"]' in output.error


def test_a_line_may_name_them():
    line = parse_line({"prompt": "a", "bad_words": ["dog"]}, "prompt-0", SamplingParams())
    assert line.sampling.bad_words == ["dog"]
