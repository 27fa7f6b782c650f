"""A tool's parameters one by one, for families that do not write them as one JSON object.

In a tag, a string is unquoted if its schema is plain enough for a grammar to enforce; any other value is JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from outrider.cluster.replies.tools import Tool

Schema = Mapping[str, Any]
_DEFINITIONS = ("$defs", "definitions")
_ANNOTATIONS = {*_DEFINITIONS, "title", "description", "default", "examples"}
_UNIONS = ("anyOf", "oneOf")
_NOT_PLAIN = {"pattern", "format", "allOf", "not", "if", "$ref", *_UNIONS}
MAX_REFERENCES = 8  # in a chain


def parameter_schemas(tool: Tool) -> dict[str, Schema]:
    """Return each parameter's schema, with the definitions it may refer to, in the schema's order."""
    properties: Mapping[str, Any] = tool.parameters.get("properties") or {}
    others = {key: True for key in tool.parameters.get("required", ()) if key not in properties}
    shared = {key: tool.parameters[key] for key in _DEFINITIONS if key in tool.parameters}
    return {
        key: {**shared, **({} if schema is True else schema)}
        for key, schema in {**properties, **others}.items()
        if schema is not False
    }


def plain_strings(schema: Schema) -> list[Schema]:
    """Return a schema's alternatives that an unquoted string can follow."""
    return [branch for branch in branches(schema) if _is_plain(branch)]


def branches(schema: Schema) -> list[Schema]:
    """Return a schema's alternatives, by its list of types or by a single union."""
    whole = _resolved(schema, schema)
    for union in _UNIONS:
        if union in whole and whole.keys() <= {union, *_ANNOTATIONS}:
            return [_resolved(branch, schema) for branch in whole[union]]
    if isinstance(whole.get("type"), list):
        return [{**whole, "type": kind} for kind in whole["type"]]
    return [whole]


def tagged_value(text: str, schema: Schema) -> Any:
    """Return the value of a tag's text."""
    if plain_strings(schema):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    may_be_string = any(branch.get("type") == "string" for branch in branches(schema))
    return text if may_be_string and not isinstance(value, str) else value


def _is_plain(schema: Schema) -> bool:
    if schema.keys() & _NOT_PLAIN:
        return False
    if "enum" in schema or "const" in schema:
        choices = schema["enum"] if "enum" in schema else [schema["const"]]
        return all(isinstance(choice, str) for choice in choices)
    return schema.get("type") == "string" or schema.keys() <= _ANNOTATIONS


def _resolved(schema: Any, root: Schema) -> Schema:
    """Follow references within the definitions; one that leads nowhere stays unresolved."""
    found = schema
    for _ in range(MAX_REFERENCES):
        if not isinstance(found, Mapping) or "$ref" not in found:
            break
        _, _, path = str(found["$ref"]).partition("#/")
        found = root
        for key in path.split("/"):
            found = found.get(key) if isinstance(found, Mapping) else None
    if isinstance(found, Mapping) and "$ref" not in found:
        return found
    return schema if isinstance(schema, Mapping) else {}
