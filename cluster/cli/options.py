"""Options of the command line, made from the configuration's fields. Importing them loads no torch and no Ray."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import click

from outrider.cluster.cli.usage import usage_errors
from outrider.cluster.common.options import Json
from outrider.cluster.config.config_file import read_config_file, read_speculative_config
from outrider.cluster.config.known_models import DEFAULT_MODEL
from outrider.cluster.config.service_config import MODEL_OPTIONS, ServiceConfig

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


def config_option(name: str, *flags: str, **changes: Any) -> Decorator:
    """Return the option of the command line for one of the configuration's: type, default and help are the field's.

    `flags` are its names where they are not `name`; `changes` are click's own settings.
    """
    field = ServiceConfig.option_fields()[name]
    kinds = [kind for kind in get_args(field.annotation) if kind is not NoneType]
    is_optional = NoneType in get_args(field.annotation)
    kind: Any = kinds[0] if is_optional else field.annotation
    flag, default = f"--{name.replace('_', '-')}", field.default
    settings: dict[str, Any] = {"help": field.description, "default": default}
    if Json in field.metadata:
        settings |= {"default": json.dumps(default), "metavar": "JSON"}
    elif kind is bool:
        flag = f"{flag}/--no{flag[1:]}" if default else flag
        settings["is_flag"] = True
    elif get_origin(kind) is Literal:
        settings["type"] = click.Choice(get_args(kind))
    else:
        kind = get_args(kind)[0] if is_optional and get_args(kind) else kind
        settings |= {"type": kind} if kind in (int, float) else {"default": None if is_optional else str(default)}
    settings["show_default"] = bool(default)
    return click.option(*(flags or (flag, *_SHORT.get(name, ()))), name, **settings | changes)


def with_options(decorators: Iterable[Decorator]) -> Decorator:
    """Return a decorator that adds options in their order."""
    return lambda command: functools.reduce(lambda found, add: add(found), reversed([*decorators]), command)


def config_options(names: Iterable[str]) -> Decorator:
    """Return a decorator that adds options of the configuration; those that have no help are none here."""
    fields = ServiceConfig.option_fields()
    return with_options(config_option(name) for name in names if fields[name].description is not None)


model_options = with_options([*_FIRST_OPTIONS, config_options(MODEL_OPTIONS)])


def configure(**options: Any) -> ServiceConfig:
    """Build the configuration; a bad value is a usage error."""
    with usage_errors():
        return ServiceConfig(**options)
