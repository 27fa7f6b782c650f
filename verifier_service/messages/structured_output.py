"""Structured output in the words of llguidance, which parses it: https://github.com/guidance-ai/llguidance.

Everything that a user can get wrong is found here, without a model's tokens, so that a gateway can tell at once.
"""

from __future__ import annotations

import json
from functools import lru_cache

from llguidance import LLMatcher, LLParserLimits, grammar_from

from outrider.verifier_service.messages.request import StructuredKind, StructuredOutput

MAX_ERROR_CHARS = 300  # an error may quote the whole grammar
# Between two parts of a JSON text. Without a bound, a model that likes white space writes nothing else.
WHITE_SPACE = r"[ \n\r\t]{1,20}"

# What a grammar may cost: some 20 ms to compile, as much for one mask, and some 100 MB.
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


def grammar_text(structured: StructuredOutput) -> str:
    """Return llguidance's own description of a form; raises `ValueError` naming `structured` where it sees none."""
    match structured.kind:
        case StructuredKind.JSON_SCHEMA:
            return _of_schema(structured.text)
        case StructuredKind.JSON_OBJECT:
            return _of_schema('{"type": "object"}')
        case StructuredKind.REGEX:
            return LLMatcher.grammar_from_regex(structured.text)
        case StructuredKind.GRAMMAR:
            return _of_grammar(structured.text)
        case StructuredKind.CHOICE:
            alternatives = " | ".join(json.dumps(choice) for choice in structured.choices)
            return LLMatcher.grammar_from_lark(f"start: {alternatives}")


@lru_cache(maxsize=64)
def check_structured(structured: StructuredOutput) -> None:
    """Raise `ValueError` naming `structured` unless it can be followed, as far as that is known without a model.

    Takes milliseconds; the last right ones are remembered, for many requests ask for the same.
    """
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar_text(structured), limits=LIMITS)
    if is_error:
        raise invalid(structured.kind, messages[0])


def invalid(kind: StructuredKind, reason: str) -> ValueError:
    """Return the error of a form that cannot be followed."""
    text = " ".join(reason.split())
    shown = text if len(text) <= MAX_ERROR_CHARS else text[:MAX_ERROR_CHARS] + "…"
    return ValueError(f"structured must be a {kind} that can be followed: {shown}")


def _of_schema(text: str) -> str:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(StructuredKind.JSON_SCHEMA, f"not JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise invalid(StructuredKind.JSON_SCHEMA, "a schema is an object or a boolean")
    return LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": WHITE_SPACE})


def _of_grammar(text: str) -> str:
    """Read a grammar in Lark's syntax or in llama.cpp's (GBNF)."""
    try:
        return grammar_from("grammar", text)
    except ValueError as error:
        raise invalid(StructuredKind.GRAMMAR, str(error)) from error
