"""Structured output of the embedded pair: it parses, and speculation changes no token of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from transformers import AutoTokenizer

from fakes.collected import Result, collect
from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.offline.engine import OfflineEngine
from outrider.drafter_service import embedded
from outrider.verifier_service.messages.request import (
    FinishReason,
    GenerationRequest,
    SamplingParams,
    SpeculationPlan,
    StructuredKind,
    StructuredOutput,
)

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "colour": {"enum": ["red", "green", "dark blue"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "maxItems": 3},
        "parent": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "colour", "sizes", "parent"],
    "additionalProperties": False,
}
CHOICES = ("yes", "no", "not at all")
WANTED = {
    "schema": StructuredOutput(kind=StructuredKind.JSON_SCHEMA, text=json.dumps(SCHEMA)),
    "regex": StructuredOutput(kind=StructuredKind.REGEX, text=r"[A-Z][a-z]{2,9}-[0-9]{3}"),
    "choice": StructuredOutput(kind=StructuredKind.CHOICE, choices=CHOICES),
    "grammar": StructuredOutput(kind=StructuredKind.GRAMMAR, text='root ::= "(" [a-z]{1,5} ("," [a-z]{1,5}){0,3} ")"'),
}
SAMPLING = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 1.0, "seed": 7}, "unseeded": {"temperature": 1.0}}


def check(name: str, text: str) -> None:
    match name:
        case "schema":
            jsonschema.validate(json.loads(text), SCHEMA)
        case "choice":
            assert text in CHOICES
        case "regex":
            assert re.fullmatch(WANTED[name].text, text)
        case "grammar":
            assert re.fullmatch(r"\([a-z]{1,5}(,[a-z]{1,5}){0,3}\)", text)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(embedded.target_path())


@pytest.fixture(scope="module")
def engine() -> Iterator[OfflineEngine]:
    with OfflineEngine(ServiceConfig(kv_cache_memory_bytes=32 << 20)) as opened:
        yield opened


def run(engine: OfflineEngine, tokenizer: Any, draft_length: int, **sampling: Any) -> dict[str, Result]:
    requests = [
        GenerationRequest(
            request_id=name,
            prompt_token_ids=tuple(tokenizer.encode(f"def {name}(self):\n    return ")),
            sampling=SamplingParams(max_tokens=500, structured=wanted, **sampling),
            plan=SpeculationPlan(draft_length=draft_length),
        )
        for name, wanted in WANTED.items()
    ]
    found = {result.request.request_id: result for result in collect(requests, engine.generate(requests))}
    engine.engine.check_integrity()
    return found


@pytest.mark.parametrize("how", SAMPLING)
def test_it_parses_and_speculation_changes_no_token(engine, tokenizer, how):
    plain, drafted = (run(engine, tokenizer, length, **SAMPLING[how]) for length in (0, 5))
    for name in WANTED:
        for result in (plain[name], drafted[name]):
            assert result.finish_reason is FinishReason.STOP, result.error
            check(name, tokenizer.decode(result.token_ids, skip_special_tokens=True))
        if how != "unseeded":
            assert drafted[name].token_ids == plain[name].token_ids
    assert sum(result.speculation.num_accepted_tokens for result in drafted.values()) > 10
    assert sum(result.speculation.num_draft_tokens for result in plain.values()) == 0


def test_what_cannot_be_followed_fails_alone(engine, tokenizer):
    wrong = StructuredOutput(kind=StructuredKind.GRAMMAR, text="start: <|nothing|>")
    requests = [
        GenerationRequest(request_id=name, prompt_token_ids=(5,), sampling=SamplingParams(structured=wanted))
        for name, wanted in (("wrong", wrong), ("right", WANTED["choice"]))
    ]
    found = {result.request.request_id: result for result in collect(requests, engine.generate(requests))}
    assert found["wrong"].finish_reason is FinishReason.ERROR
    assert "structured must be a grammar" in found["wrong"].error
    assert found["right"].finish_reason is FinishReason.STOP
