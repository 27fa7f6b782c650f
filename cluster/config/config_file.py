"""Options that come in a file (`--config`) or as vLLM's JSON (`--speculative-config`), as defaults of the command line.

Which one wins: an option on the command line, then --speculative-config, then the file, then the option's own default.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import yaml

from outrider.cluster.common.hints import did_you_mean
from outrider.cluster.config.speculative_options import parse_speculative_config, split_options

NULL_TAG, INT_TAG, TEXT_TAG = (f"tag:yaml.org,2002:{kind}" for kind in ("null", "int", "str"))


def read_config_file(context: click.Context, parameter: click.Parameter, path: Path | None) -> None:
    """Make a YAML file's values the defaults of this command's options; keys are their names with - or _.

    An unknown key, or one given twice, is a usage error; null leaves an option at its default.
    """
    if path is None:
        return
    try:
        entries = _entries(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, OSError) as error:
        raise click.BadParameter(f"{path}: {error}", context, parameter) from error
    options = _options_by_name(context.command, without=parameter)
    defaults: dict[str, Any] = {}
    for key, value in entries:
        option = options.get(key.replace("-", "_"))
        if option is None or option.name is None:
            raise click.BadParameter(f"{path}: unknown option {key!r}{did_you_mean(key, options)}", context, parameter)
        if option.name in defaults:
            raise click.BadParameter(f"{path}: {key!r} is given twice", context, parameter)
        defaults[option.name] = _as_typed(value, option)
    context.default_map = {**defaults, **(context.default_map or {})}


def read_speculative_config(context: click.Context, parameter: click.Parameter, text: str | None) -> dict[str, Any]:
    """Return vLLM's `speculative_config` without the keys that are options; those become the options' defaults."""
    if text is None:
        return {}
    try:
        values = _json_object(text)
        options, rest = split_options(values)
        parse_speculative_config(rest)
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from error
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in options.items()}
    context.default_map = {**(context.default_map or {}), **texts}
    return rest


def read_pools(
    context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]
) -> tuple[dict[str, Any], ...]:
    """Return the objects of further drafter pools."""
    try:
        return tuple(map(_json_object, texts))
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from error


def _json_object(text: str) -> dict[str, Any]:
    """Read an object; raises `ValueError` saying what is wrong."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError("expected a JSON object")
    return value


def _entries(text: str) -> list[tuple[str, Any]]:
    """Return the keys and values of a YAML mapping; raises `ValueError` for anything else.

    A scalar stays the text that stands there, as if typed on the command line; within lists and mappings only what YAML
    would make 63 of, a range `1:3`.
    """
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        raise ValueError("expected options, one `name: value` a line")
    _keep_ranges(root)
    constructor = yaml.constructor.SafeConstructor()
    return [
        (str(key.value), value.value if isinstance(value, yaml.ScalarNode) else constructor.construct_document(value))
        for key, value in root.value
        if value.tag != NULL_TAG
    ]


def _keep_ranges(node: yaml.Node) -> None:
    """Let whole numbers to the base of 60 be the text that they are written as."""
    if isinstance(node, yaml.ScalarNode):
        if node.tag == INT_TAG and ":" in node.value:
            node.tag = TEXT_TAG
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            _keep_ranges(key)
            _keep_ranges(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _keep_ranges(item)


def _options_by_name(command: click.Command, *, without: click.Parameter) -> dict[str, click.Parameter]:
    """Return the parameters under their long names, spelled with _."""
    return {
        spelling.removeprefix("--").replace("-", "_"): parameter
        for parameter in command.params
        if parameter is not without
        for spelling in parameter.opts
        if isinstance(parameter, click.Argument) or spelling.startswith("--")
    }


def _as_typed(value: Any, option: click.Parameter) -> Any:
    if getattr(option, "multiple", False):
        return [_as_text(item) for item in (value if isinstance(value, list) else [value])]
    return _as_text(value)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
