"""Options of the command line, made from the configuration's fields. Importing them loads no torch and no Ray."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

import click

from outrider.cluster.cli.usage import usage_errors
from outrider.cluster.common.options import Json
from outrider.cluster.config.config_file import read_config_file, read_speculative_config
from outrider.cluster.config.known_models import DEFAULT_MODEL
from outrider.cluster.config.service_config import MODEL_OPTIONS, ServiceConfig
from outrider.cluster.replies.families import REASONING_FAMILIES, TOOL_FAMILIES

Command = Callable[..., None]
Decorator = Callable[[Command], Command]

_FIRST_OPTIONS = (
    click.argument("model", default=DEFAULT_MODEL),
    click.option(
        "--config",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=read_config_file,
        help="YAML: these options by their names; those on the command line win.",
    ),
    click.option(
        "--speculative-config",
        "-sc",
        metavar="JSON",
        is_eager=True,
        callback=read_speculative_config,
        help='How to draft, as vLLM says it: {"method": "ngram", "prompt_lookup_max": 4}; all: docs/drafters.md.',
    ),
)
_SHORT = {"tensor_parallel_size": ("-tp",)}
_CHOICES: Mapping[str, Iterable[str]] = {"tool_call_parser": TOOL_FAMILIES, "reasoning_parser": REASONING_FAMILIES}


def config_option(name: str, *flags: str, **changes: Any) -> Decorator:
    """Return the command line's form of an option of the configuration: type, default and help are the field's.

    `flags` are its names where they are not `name`; `changes` are further settings of click's.
    """
    field = ServiceConfig.option_fields()[name]
    flag, default, kind = f"--{name.replace('_', '-')}", field.default, _bare(field.annotation)
    settings: dict[str, Any] = {"default": default, "help": field.description, "show_default": bool(default)}
    if Json in field.metadata:
        settings |= {"default": json.dumps(default), "metavar": "JSON"}
    elif kind is bool:
        flag, settings["is_flag"] = f"{flag}/--no{flag[1:]}" if default else flag, True
    elif kind in (int, float):
        settings["type"] = kind
    elif choices := get_args(kind) or _CHOICES.get(name):
        settings["type"] = click.Choice(sorted(choices) if name in _CHOICES else choices)
    else:
        settings["default"] = default and str(default)  # a range of replicas is text here
    return click.option(*(flags or (flag, *_SHORT.get(name, ()))), name, **settings | changes)


def _bare(kind: Any) -> Any:
    """Return a field's type without None and without what restricts it."""
    kinds = [part for part in get_args(kind) if part is not NoneType]
    if NoneType in get_args(kind) or get_origin(kind) is Annotated:
        return _bare(kinds[0])
    return kind


def with_options(decorators: Sequence[Decorator]) -> Decorator:
    """Return a decorator that adds options in their order."""
    return lambda command: functools.reduce(lambda found, add: add(found), reversed(decorators), command)


def config_options(names: Iterable[str]) -> Decorator:
    """Return a decorator that adds options of the configuration, but those that have no help."""
    fields = ServiceConfig.option_fields()
    return with_options([config_option(name) for name in names if fields[name].description is not None])


model_options = with_options([*_FIRST_OPTIONS, config_options(MODEL_OPTIONS)])


def configure(**options: Any) -> ServiceConfig:
    """Build the configuration; a bad value is a usage error."""
    with usage_errors():
        return ServiceConfig(**options)
