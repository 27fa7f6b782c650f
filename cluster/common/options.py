"""Options: frozen models of pydantic, whose errors are one line each that names the field."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from outrider.cluster.common.hints import did_you_mean

_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
# pydantic's types of errors whose texts do not name the field
_WORDS = {
    "greater_than_equal": "must be at least {ge:g}",
    "greater_than": "must be greater than {gt:g}",
    "less_than_equal": "must be at most {le:g}",
    "finite_number": "must be finite",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
}


class Options(BaseModel):
    """Frozen options. Raises `ValueError` naming the field that is wrong, but not its value, which may be secret."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ValueError(complaint(error, type(self).model_fields)) from error


def complaint(error: ValidationError, known: Iterable[str], kind: str = "option") -> str:
    """Return what is wrong in one line; an unknown name comes first, with the closest of the known ones.

    `kind` says what the names are called.
    """
    problems = error.errors(include_input=False, include_url=False)
    first = min(problems, key=lambda problem: problem["type"] not in _UNKNOWN)
    name, context = first["loc"][0] if first["loc"] else "", first.get("ctx", {})
    if first["type"] in _UNKNOWN:
        return f"unknown {kind} {name!r}{did_you_mean(str(name), known)}"
    text = first["msg"]
    if first["type"] == "value_error":
        text = str(context["error"])
    elif first["type"] == "missing" and len(first["loc"]) == 1:
        text = "is missing"
    elif context.get("gt") == 0:
        text = "must be positive"
    elif (words := _WORDS.get(first["type"])) is not None:
        text = words.format(**context).replace("'", "")
    if not name:
        return text
    return f"{name} {text}" if text.startswith(("must ", "is ")) else f"{name}: {text}"


def option(default: Any, text: str = "") -> Any:
    """Return an option of the command line, with its help; a field without one is no option there."""
    return Field(default, description=text)


def json_value(value: Any) -> Any:
    """Return the value of a JSON text, as `serve run module:build_app key=value` passes it; others as they are."""
    if not isinstance(value, str):
        return value
    try:
        return from_json(value)
    except ValueError as error:
        raise ValueError(f"Invalid JSON: {error}") from error


Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Port = Annotated[int, Field(ge=1, le=(1 << 16) - 1)]
Json = BeforeValidator(json_value)
