"""Translate structured output into grammars of llguidance (https://github.com/guidance-ai/llguidance).

All user errors are found here, without a model's tokens, so that a gateway can refuse at once.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits, grammar_from

from outrider.verifier_service.messages.fitted_schema import DEFINITIONS, fitted
from outrider.verifier_service.messages.request import StructuredKind, StructuredOutput

MAX_ERROR_CHARS = 300  # an error may quote the whole grammar
MAX_WARNING_CHARS = 1000  # a schema may have many unknown formats
# Between two parts of a JSON text. Without a bound, a model may produce white space forever.
WHITE_SPACE = r"[ \n\r\t]{1,20}"
# Bounds of numbers whose schema sets none: a model may produce digits forever.
LARGEST_NUMBER = 10**15
FINEST_NUMBER = 1e-9

_OPTIONS = "x-guidance"  # what llguidance calls its own keyword
_SCHEMAS_BY_NAME = {"properties", "patternProperties", "$defs", "definitions"}
_SCHEMA_LISTS = {"anyOf", "oneOf", "allOf", "prefixItems"}
_SCHEMAS = {"items", "additionalProperties"}
_ASCII_CLASSES = {
    "d": "[0-9]",
    "D": "[^0-9]",
    "w": "[0-9A-Za-z_]",
    "W": "[^0-9A-Za-z_]",
    "s": r"[ \t\n\r\f\v]",
    "S": r"[^ \t\n\r\f\v]",
}
# llguidance's warnings about constraints that it leaves out
_UNKNOWN_KEYWORDS, _UNKNOWN_FORMAT, _ONE_OF = "Unimplemented keys: ", "Unknown format: ", "oneOf not fully supported"
_NO_TOKENS = "no tokenizer - can't validate"  # for a grammar that names tokens; not about constraints
_REPEATED = re.compile(r" \(\d+ times\)$")
LARK_MARK = "%llguidance"  # a grammar that begins so is in Lark's syntax

# Bounds of a grammar's cost: some 20 ms to compile, as much for one mask, and some 100 MB.
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


def grammar_text(structured: StructuredOutput) -> str:
    """Return llguidance's grammar of a form; raises `ValueError` naming `structured` if it is invalid."""
    match structured.kind:
        case StructuredKind.JSON_SCHEMA:
            return _of_schema(structured.text, is_lenient=not structured.is_strict)
        case StructuredKind.JSON_OBJECT:
            return _of_schema('{"type": "object"}', is_lenient=False)
        case StructuredKind.REGEX:
            return LLMatcher.grammar_from_regex(with_ascii_classes(structured.text))
        case StructuredKind.GRAMMAR:
            return _of_grammar(structured.text)
        case StructuredKind.CHOICE:
            alternatives = " | ".join(json.dumps(choice) for choice in structured.choices)
            return LLMatcher.grammar_from_lark(f"start: {alternatives}")


@lru_cache(maxsize=256)  # a chat may have 128 tools
def check_structured(structured: StructuredOutput) -> tuple[str, ...]:
    """Return the constraints that the grammar lacks and leaves out: "uniqueItems", 'format "path"'.

    Raises `ValueError` naming `structured` if the form is invalid, as far as that is known without a model. Takes
    milliseconds; results are cached, since many requests repeat a form.
    """
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar_text(structured), limits=LIMITS)
    if is_error:
        raise invalid(structured.kind, messages[0])
    return left_out(structured.kind, messages)


@lru_cache(maxsize=256)
def fitted_schema(text: str, *, is_strict: bool) -> tuple[str, tuple[str, ...]]:
    """Return a JSON schema that a grammar can hold, and what was left out for it: "uniqueItems", "pattern of /items".

    Raises `ValueError` naming `structured` and the place if the schema is strict and not all of it can be held, or if
    nothing of it can. Takes milliseconds, or seconds for a large schema with many such places.
    """
    kind = StructuredKind.JSON_SCHEMA
    schema = _schema_of(text)
    if isinstance(schema, bool):
        return text, ()
    try:
        found = fitted(schema, functools.partial(_schema_error, is_lenient=not is_strict))
    except RecursionError as error:
        raise invalid(kind, "nested too deeply") from error
    is_nothing = not found.schema.keys() - {*DEFINITIONS} and bool(schema)
    if found.left_out and (is_strict or is_nothing):
        name, reason = found.left_out[0]
        raise invalid(kind, f"{name}: {reason}")
    held = json.dumps(found.schema, ensure_ascii=False)
    names = [name for name, _ in found.left_out]
    return held, (*names, *check_structured(StructuredOutput(kind=kind, text=held, is_strict=is_strict)))


def _schema_error(text: str, *, is_lenient: bool) -> str | None:
    """Return why no grammar can hold a schema; None: one can."""
    kind = StructuredKind.JSON_SCHEMA
    try:
        grammar = _of_schema(text, is_lenient=is_lenient)
        is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS)
        if not is_error:
            left_out(kind, messages)
    except ValueError as error:
        return reason_of(error)
    return str(messages[0]) if is_error else None


def reason_of(error: ValueError) -> str:
    """Return what `invalid` was told, else the error's own words."""
    return str(error).partition("can be followed: ")[2] or str(error).removeprefix("structured ")


def left_out(kind: StructuredKind, warnings: Iterable[str]) -> tuple[str, ...]:
    """Return the constraints that llguidance left out, by its warnings.

    Raises `ValueError` naming `structured` if it left out more than a constraint, such as a reference.
    """
    names: list[str] = []
    for warning in warnings:
        text = _REPEATED.sub("", warning)
        if text.startswith(_UNKNOWN_KEYWORDS):
            keywords = json.loads(text.removeprefix(_UNKNOWN_KEYWORDS))
            if any(keyword.startswith("$") for keyword in keywords):
                raise invalid(kind, text)
            names += keywords
        elif text.startswith(_UNKNOWN_FORMAT):
            names.append(f"format {json.dumps(text.removeprefix(_UNKNOWN_FORMAT), ensure_ascii=False)}")
        elif text.startswith(_ONE_OF):
            names.append("oneOf (followed as anyOf)")
        elif not text.startswith(_NO_TOKENS):
            raise invalid(kind, text)
    return tuple(dict.fromkeys(names))


def warning_of(field: str, names: Sequence[str]) -> str:
    """Return the warning for the user about constraints that were left out."""
    shown = _shortened(", ".join(names), MAX_WARNING_CHARS)
    return f"{field}: the answer may break what the grammar lacks and leaves out: {shown}"


def invalid(kind: StructuredKind, reason: str) -> ValueError:
    """Return the error for an invalid form."""
    shown = _shortened(" ".join(reason.split()), MAX_ERROR_CHARS)
    return ValueError(f"structured must be a {kind} that can be followed: {shown}")


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[:limit] + "…"


def _schema_of(text: str) -> dict[str, Any] | bool:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(StructuredKind.JSON_SCHEMA, f"not JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise invalid(StructuredKind.JSON_SCHEMA, "a schema is an object or a boolean")
    return schema


def _of_schema(text: str, *, is_lenient: bool) -> str:
    return LLMatcher.grammar_from_json_schema(
        json.dumps(with_bounded_numbers(_schema_of(text))),
        defaults={"whitespace_pattern": WHITE_SPACE},
        overrides={"lenient": is_lenient},
    )


def embedded_schema(schema: Mapping[str, Any], *, is_strict: bool = False) -> str:
    """Return a JSON schema to put behind `%json` in a llguidance grammar, with the same bounds as others."""
    options = {"whitespace_pattern": WHITE_SPACE}
    return json.dumps(with_guidance(with_bounded_numbers(dict(schema)), defaults=options, is_lenient=not is_strict))


def with_guidance(schema: Mapping[str, Any], *, defaults: Mapping[str, Any], is_lenient: bool) -> dict[str, Any]:
    """Add llguidance's options to a schema; the schema's own options win over `defaults`."""
    own = schema.get(_OPTIONS)
    options = {**defaults, **(own if isinstance(own, dict) else {}), "lenient": is_lenient}
    return {**schema, _OPTIONS: options}


def with_bounded_numbers(schema: Any) -> Any:
    """Bound the digits of all numbers in a JSON schema, unless the schema bounds them itself."""
    if not isinstance(schema, dict):
        return schema
    bounded = dict(schema)
    for name in bounded.keys() & _SCHEMAS_BY_NAME:
        if isinstance(bounded[name], dict):
            bounded[name] = {key: with_bounded_numbers(value) for key, value in bounded[name].items()}
    for name in bounded.keys() & _SCHEMA_LISTS:
        if isinstance(bounded[name], list):
            bounded[name] = [with_bounded_numbers(value) for value in bounded[name]]
    for name in bounded.keys() & _SCHEMAS:
        bounded[name] = with_bounded_numbers(bounded[name])
    kinds = bounded.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    is_number = "integer" in kinds or "number" in kinds
    if not is_number or bounded.keys() & {"enum", "const"}:
        return bounded
    if not bounded.keys() & {"minimum", "exclusiveMinimum"}:
        bounded["minimum"] = -LARGEST_NUMBER
    if not bounded.keys() & {"maximum", "exclusiveMaximum"}:
        bounded["maximum"] = LARGEST_NUMBER
    if "number" in kinds:
        bounded.setdefault("multipleOf", FINEST_NUMBER)
    return bounded


def with_ascii_classes(pattern: str) -> str:
    r"""Restrict \d, \w and \s of a regular expression to ASCII, as users expect; llguidance's match all of Unicode."""
    return re.sub(r"\\(.)", lambda match: _ASCII_CLASSES.get(match[1], match[0]), pattern, flags=re.DOTALL)


def _of_grammar(text: str) -> str:
    """Translate a grammar in Lark's syntax or in llama.cpp's (GBNF)."""
    if text.startswith(LARK_MARK):
        return LLMatcher.grammar_from_lark(text)
    try:
        return grammar_from("grammar", text)
    except ValueError as error:
        raise invalid(StructuredKind.GRAMMAR, str(error)) from error
