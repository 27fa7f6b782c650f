"""Values that people give, as the types that options have."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError


def typed_value(key: str, value: Any, kind: Any, *, is_json: bool = False) -> Any:
    """Return an option's value, or the JSON text of one, as its type.

    Raises `ValueError` naming the key, but not the value, which may be secret.
    """
    adapter = TypeAdapter(kind, config=ConfigDict(hide_input_in_errors=True))
    try:
        return adapter.validate_json(value) if is_json else adapter.validate_python(value)
    except ValidationError as error:
        problem = error.errors(include_input=False, include_url=False)[0]["msg"]
        raise ValueError(f"{key}: {problem}") from error
