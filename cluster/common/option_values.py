"""Option values, converted to their types."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError


def typed_value(key: str, value: Any, kind: Any, *, is_json: bool = False) -> Any:
    """Convert an option's value, or its JSON text, to a type.

    Raises `ValueError` naming the key, but not the value, which may be secret.
    """
    adapter = TypeAdapter(kind, config=ConfigDict(hide_input_in_errors=True))
    try:
        return adapter.validate_json(value) if is_json else adapter.validate_python(value)
    except ValidationError as error:
        problem = error.errors(include_input=False, include_url=False)[0]["msg"]
        raise ValueError(f"{key}: {problem}") from error
