"""Structured output in the fields of the public interfaces; an error names the client's field.

OpenAI   response_format     {"type": "text" | "json_object" | "json_schema", "json_schema": {"name", "schema", …}}
vLLM     structured_outputs  {"json" | "regex" | "choice" | "grammar" | "json_object": …}
         guided_json, guided_regex, guided_choice, guided_grammar: the same, in older clients
gRPC     json_schema, regex, grammar, choice, json_object

If a schema is not `strict`, constraints that the grammar cannot enforce are left out, and a warning in the answer names
them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from outrider.cluster.common.errors import InvalidRequest, require_field
from outrider.cluster.common.hints import did_you_mean
from outrider.verifier_service.messages.request import StructuredKind, StructuredOutput
from outrider.verifier_service.messages.structured_output import check_structured, fitted_schema, warning_of

OPENAI_FIELDS = (
    *("response_format", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)
MAX_OWN_GRAMMAR_CHARS = 1 << 14  # of a client's regular expression or grammar: reading some takes quadratic time
_GUIDED_KINDS = {
    "guided_json": StructuredKind.JSON_SCHEMA,
    "guided_regex": StructuredKind.REGEX,
    "guided_choice": StructuredKind.CHOICE,
    "guided_grammar": StructuredKind.GRAMMAR,
}
_VLLM_KINDS = {
    "json": StructuredKind.JSON_SCHEMA,
    "regex": StructuredKind.REGEX,
    "choice": StructuredKind.CHOICE,
    "grammar": StructuredKind.GRAMMAR,
    "json_object": StructuredKind.JSON_OBJECT,
}
# Members of vLLM's structured_outputs that would change the result: only null and false are accepted.
_VLLM_SWITCHES = (
    *("disable_fallback", "disable_any_whitespace", "disable_additional_properties"),
    *("whitespace_pattern", "structural_tag"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedStructure:
    """The form that an output must have, and the client's field for it."""

    output: StructuredOutput
    field: str
    warnings: tuple[str, ...] = ()  # constraints that the grammar does not enforce


def message_structure(message: Any, name: str | None) -> dict[str, Any]:
    """Read the form that a protobuf message has in its field `name`; return the fields of a `RequestInput`."""
    if name is None:
        return {}
    value = list(message.choice.choices) if name == "choice" else getattr(message, name)
    structure = structure_of(StructuredKind(name), value, name)
    return {} if structure is None else {"structured": structure.output, "warnings": structure.warnings}


def openai_structure(fields: Mapping[str, Any]) -> NamedStructure | None:
    """Read a body's OPENAI_FIELDS; raises `InvalidRequest` naming the bad one."""
    given = {name: fields[name] for name in OPENAI_FIELDS if fields.get(name) is not None}
    found: list[NamedStructure | None] = []
    for name, value in given.items():
        if name in _GUIDED_KINDS:
            found.append(structure_of(_GUIDED_KINDS[name], value, name))
        else:
            found.append(_of_response_format(value) if name == "response_format" else _of_structured_outputs(value))
    return only(named for named in found if named is not None)


def only(found: Iterable[NamedStructure]) -> NamedStructure | None:
    """Return the only structure, if there is one; raises `InvalidRequest` if there are several."""
    asked = list(found)
    if len(asked) > 1:
        raise InvalidRequest(f"{asked[1].field} and {asked[0].field} cannot both be given", asked[1].field)
    return asked[0] if asked else None


def structure_of(kind: StructuredKind, value: Any, field: str, *, is_strict: bool = False) -> NamedStructure | None:
    """Read one structure; None if a json_object is false."""
    if kind is StructuredKind.JSON_OBJECT:
        require_field(isinstance(value, bool), field, "a boolean")
        return _named(field, lambda: StructuredOutput(kind=kind)) if value else None
    if kind is StructuredKind.CHOICE:
        require_field(
            isinstance(value, list) and all(isinstance(item, str) for item in value), field, "a list of strings"
        )
        return _named(field, lambda: StructuredOutput(kind=kind, choices=tuple(value)))
    if kind is StructuredKind.JSON_SCHEMA and isinstance(value, dict):
        value = json.dumps(value, ensure_ascii=False)
    expectation = "an object or a string" if kind is StructuredKind.JSON_SCHEMA else "a string"
    require_field(isinstance(value, str), field, expectation)
    if kind is StructuredKind.JSON_SCHEMA:
        return _of_schema(value, field, is_strict=is_strict)
    require_field(len(value) <= MAX_OWN_GRAMMAR_CHARS, field, f"at most {MAX_OWN_GRAMMAR_CHARS} characters")
    return _named(field, lambda: StructuredOutput(kind=kind, text=value))


def _of_schema(text: str, field: str, *, is_strict: bool) -> NamedStructure:
    """Read a schema, without what no grammar can hold."""
    with _naming(field):
        StructuredOutput(kind=StructuredKind.JSON_SCHEMA, text=text)  # its length is checked first
        held, names = fitted_schema(text, is_strict=is_strict)
        output = StructuredOutput(kind=StructuredKind.JSON_SCHEMA, text=held, is_strict=is_strict)
    return NamedStructure(output=output, field=field, warnings=(warning_of(field, names),) if names else ())


def _of_response_format(value: Any) -> NamedStructure | None:
    field = "response_format"
    require_field(isinstance(value, dict), field, "an object")
    for name in value.keys() - {"type", "json_schema"}:
        raise InvalidRequest(f"{field}: unknown field {name!r}{did_you_mean(name, ['json_schema'])}", field)
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return structure_of(StructuredKind.JSON_OBJECT, True, field)
        case "json_schema":
            described = value.get("json_schema")
            has_schema = isinstance(described, dict) and isinstance(described.get("schema"), dict)
            require_field(has_schema, field, "an object whose json_schema has an object as schema")
            is_strict = described.get("strict")
            require_field(isinstance(is_strict, bool | None), field, "an object whose json_schema.strict is a boolean")
            return structure_of(StructuredKind.JSON_SCHEMA, described["schema"], field, is_strict=bool(is_strict))
    raise InvalidRequest(f"{field} must be of type text, json_object or json_schema", field)


def _of_structured_outputs(value: Any) -> NamedStructure | None:
    field = "structured_outputs"
    require_field(isinstance(value, dict), field, "an object")
    found: list[NamedStructure | None] = []
    for name, item in value.items():
        if name in _VLLM_KINDS:
            found.append(None if item is None else structure_of(_VLLM_KINDS[name], item, f"{field}.{name}"))
        elif name not in _VLLM_SWITCHES:
            hint = did_you_mean(name, [*_VLLM_KINDS, *_VLLM_SWITCHES])
            raise InvalidRequest(f"{field}: unknown field {name!r}{hint}", field)
        elif item not in (None, False):
            raise InvalidRequest(f"{field}.{name} is not supported", f"{field}.{name}")
    return only(named for named in found if named is not None)


def _named(field: str, make: Callable[[], StructuredOutput]) -> NamedStructure:
    with _naming(field):
        output = make()
        names = check_structured(output)
    return NamedStructure(output=output, field=field, warnings=(warning_of(field, names),) if names else ())


@contextlib.contextmanager
def _naming(field: str) -> Iterator[None]:
    """Name the client's field in errors."""
    try:
        yield
    except ValueError as error:
        raise InvalidRequest(f"{field}{str(error).removeprefix('structured')}", field) from error
