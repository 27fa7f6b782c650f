"""Make of a JSON schema, as tools bring them, one that a grammar can hold.

Schemas come from many writers: zod, pydantic, OpenAPI, drafts 3 to 2020-12, by hand. What only describes is dropped: it
would fill the grammar. Older and other spellings are translated. What no grammar can hold is left out, constraint by
constraint: a schema that cannot be compiled is taken apart, and the smallest part that is to blame goes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Schema = dict[str, Any]
ErrorOf = Callable[[str], str | None]  # why no grammar can hold a schema, as JSON; None: one can

MAX_TRIED_CHARS = 1_000_000  # of one schema and its parts, a second or two: beyond it, all of a part goes at once
MAX_PATTERN_SIZE = 20_000  # characters that a pattern may count: beyond it, no answer is matched in time
DEFINITIONS = ("$defs", "definitions")
_ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "examples", "example", "$comment", "$schema", "deprecated", "readOnly"),
        *("writeOnly", "contentEncoding", "contentMediaType", "contentSchema", "discriminator", "xml", "externalDocs"),
        *("markdownDescription", "enumDescriptions", "errorMessage", "propertyOrdering", "nullable"),
    )
)
_BY_NAME = ("properties", "patternProperties", *DEFINITIONS)
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")
# in the order in which they are tried to be left out; keywords that are not here come between the two
_FIRST_OUT = ("pattern", "format", "patternProperties", "propertyNames", "not", "if", "then", "else", "contains")
_LAST_OUT = (
    *("minProperties", "maxProperties", "required", "additionalProperties", "enum", "const", "$ref"),
    *("oneOf", "anyOf", "allOf", "prefixItems", "items", "type", "properties"),
)
_TYPES = {
    **dict.fromkeys(("string", "str"), "string"),
    **dict.fromkeys(("number", "float", "double", "decimal"), "number"),
    **dict.fromkeys(("integer", "int", "long"), "integer"),
    **dict.fromkeys(("boolean", "bool"), "boolean"),
    **dict.fromkeys(("array", "list"), "array"),
    **dict.fromkeys(("object", "dict", "map"), "object"),
    **dict.fromkeys(("null", "none"), "null"),
}


@dataclass(slots=True)
class FittedSchema:
    """A schema that a grammar can hold, and what was left out for it: "pattern of /properties/to", with the reason."""

    schema: Schema
    left_out: list[tuple[str, str]] = field(default_factory=list)


def fitted(schema: Schema, error_of: ErrorOf) -> FittedSchema:
    """Return a schema of which `error_of` says nothing; the empty schema if nothing else is left."""
    found = FittedSchema(_translated(schema))
    if _error(found.schema, error_of) is None:
        return found
    fitter = _Fitter(error_of, found)
    for key in DEFINITIONS:
        if isinstance(parts := found.schema.get(key), dict):
            found.schema[key] = {name: fitter.fit(part, f"/{key}/{name}") for name, part in parts.items()}
    found.schema = fitter.fit(found.schema, "")
    if (reason := _error(found.schema, error_of)) is not None:  # each part can be held, and all together cannot
        found.left_out.append(("all of the schema", reason))
        found.schema = {}
    return found


class _Fitter:
    """Takes one schema apart."""

    def __init__(self, error_of: ErrorOf, found: FittedSchema) -> None:
        self._error_of, self._found = error_of, found
        self._num_chars = 0
        # a part is tried alone: what it refers to allows anything there, and has its own trial
        named = {key: found.schema.get(key) for key in DEFINITIONS}
        self._context = {key: dict.fromkeys(parts, True) for key, parts in named.items() if isinstance(parts, dict)}

    def fit(self, schema: Any, place: str) -> Any:
        """Return a schema that can be held at its place."""
        if isinstance(schema, bool) or (reason := self._reason(schema)) is None:
            return schema
        if not isinstance(schema, dict) or self._num_chars > MAX_TRIED_CHARS:
            self._leave_out("all", place, reason)
            return {}
        fixed = dict(schema)
        for key, name, child in _children(schema):
            whole = self.fit(child, f"{place}/{key}" + ("" if name is None else f"/{name}"))
            if name is None:
                fixed[key] = whole
            elif whole is not child:
                fixed[key] = type(fixed[key])(fixed[key])  # a copy
                fixed[key][name] = whole
        return self._without_keywords(fixed, place)

    def _without_keywords(self, schema: Schema, place: str) -> Schema:
        """Leave out one keyword if that is enough, else one after another."""
        reason = self._reason(schema)
        order = [key for key in _order(schema) if key not in DEFINITIONS]
        for key in order if reason is not None else ():
            trial = {other: value for other, value in schema.items() if other != key}
            if self._reason(trial) is None:
                self._leave_out(key, place, reason)
                return trial
        for key in order:
            if reason is None:
                break
            self._leave_out(key, place, reason)
            schema = {other: value for other, value in schema.items() if other != key}
            reason = self._reason(schema)
        return schema

    def _reason(self, schema: Any) -> str | None:
        if not isinstance(schema, dict):
            return "a schema is an object or a boolean"
        if self._num_chars > MAX_TRIED_CHARS:
            return "the schema has too many parts that no grammar can hold"
        own = {key: self._context[key] for key in schema if key in self._context}  # the root's, each tried alone
        return _error({**self._context, **schema, **own}, self._counted)

    def _counted(self, text: str) -> str | None:
        self._num_chars += len(text)
        return self._error_of(text)

    def _leave_out(self, key: str, place: str, reason: str | None) -> None:
        self._found.left_out.append((f"{key} of {place or '/'}", reason or ""))


def _error(schema: Schema, error_of: ErrorOf) -> str | None:
    large = next((pattern for pattern in _patterns(schema) if pattern_size(pattern) > MAX_PATTERN_SIZE), None)
    return error_of(json.dumps(schema)) if large is None else f"a pattern that counts too much: {large}"


def _patterns(schema: Schema) -> Iterator[str]:
    if isinstance(pattern := schema.get("pattern"), str):
        yield pattern
    for key, name, part in _children(schema):
        if key == "patternProperties":
            yield name
        if isinstance(part, dict):
            yield from _patterns(part)


def _children(schema: Schema) -> Iterator[tuple[str, Any, Any]]:
    """Yield the parts of a schema: keyword, name or index within it (None: it is the part itself), part."""
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, dict):
            yield from ((key, name, part) for name, part in value.items())
        elif key in _LISTS and isinstance(value, list):
            yield from ((key, index, part) for index, part in enumerate(value))
        elif key in _SINGLE and not isinstance(value, list):
            yield key, None, value


def _order(schema: Mapping[str, Any]) -> list[str]:
    between = [key for key in schema if key not in _FIRST_OUT and key not in _LAST_OUT]
    return [key for key in (*_FIRST_OUT, *between, *_LAST_OUT) if key in schema]


def _translated(schema: Any) -> Any:
    """Return a schema without descriptions, in the spelling of draft 2020-12 as far as it matters."""
    if not isinstance(schema, dict):
        return schema
    said = {
        key: value
        for key, value in schema.items()
        if key not in _ANNOTATIONS and not key.startswith("x-") and (value is not None or key == "const")
    }
    if "x-guidance" in schema:
        said["x-guidance"] = schema["x-guidance"]
    for bound in ("Minimum", "Maximum"):  # draft 4
        exclusive = said.get(f"exclusive{bound}")
        if isinstance(exclusive, bool):
            del said[f"exclusive{bound}"]
            if exclusive and bound.lower() in said:
                said[f"exclusive{bound}"] = said.pop(bound.lower())
    if isinstance(said.get("required"), bool):  # draft 3: of a property, and said again at its object below
        del said["required"]
    if isinstance(said.get("type"), str):
        said["type"] = _TYPES.get(said["type"].lower(), said["type"])
    if isinstance(said.get("pattern"), str):
        said["pattern"] = _pattern(said["pattern"])
    for key, name, part in list(_children(said)):
        if name is None:
            said[key] = _translated(part)
        else:
            if said[key] is schema.get(key):
                said[key] = type(said[key])(said[key])  # a copy
            said[key][name] = _translated(part)
    _require_as_told(schema, said)
    return _or_null(said) if schema.get("nullable") is True else said


def _require_as_told(schema: Schema, said: Schema) -> None:
    """Require what says so itself (draft 3)."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return
    told = [name for name, part in properties.items() if isinstance(part, dict) and part.get("required") is True]
    listed = said.get("required")
    if told and isinstance(listed, list | None):
        said["required"] = list(dict.fromkeys([*(listed or ()), *told]))


def _or_null(schema: Schema) -> Schema:
    """Return a schema that also allows null (OpenAPI 3.0)."""
    kind = schema.get("type")
    if isinstance(kind, str) and not schema.keys() & {"$ref", "anyOf", "oneOf", "allOf", "const", *DEFINITIONS}:
        choices = schema.get("enum")
        nulls = {"enum": [*choices, None]} if isinstance(choices, list) and None not in choices else {}
        return {**schema, **nulls, "type": [kind, "null"]}
    return {"anyOf": [schema, {"type": "null"}]} if schema and not schema.keys() & {*DEFINITIONS} else schema


def _pattern(pattern: str) -> str:
    r"""Return a pattern in the grammar's dialect as far as one spelling is another's: `\Z`, `\cA`, `[^]`."""
    spelt = {"Z": r"$", "A": r"^", "z": r"$"}

    def of(match: re.Match[str]) -> str:
        escaped = match[1]
        if escaped.startswith("c") and len(escaped) == 2:
            return rf"\x{ord(escaped[1]) % 32:02x}"
        return spelt.get(escaped, match[0])

    return re.sub(r"\\(c[A-Za-z]|.)", of, pattern.replace("[^]", r"[\s\S]"), flags=re.DOTALL)


def pattern_size(pattern: str) -> int:
    """Return how many characters a pattern counts at most: the largest product of bounds around one place, summed."""
    totals, last, index = [0], 0, 0
    while index < len(pattern):
        char = pattern[index]
        counted = re.compile(r"\{(\d+)(?:,(\d*))?\}").match(pattern, index)
        if counted is not None:
            most = max(int(bound) for bound in counted.groups() if bound)
            totals[-1] += last * (most - 1)
            last *= most
            index = counted.end()
            continue
        if char == "(":
            totals.append(0)
        elif char == ")" and len(totals) > 1:
            last = totals.pop()
            totals[-1] += last
        elif char == "[":
            closed = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL).match(pattern, index)
            index = closed.end() - 1 if closed is not None else index
            last = 1
            totals[-1] += 1
        else:
            index += char == "\\"
            last = 1
            totals[-1] += 1
        index += 1
    return sum(totals)
