"""Read `speculative_config`, vLLM's object with our keys besides, from JSON, YAML or a Serve application."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

from pydantic import ValidationError

from outrider.cluster.common.hints import did_you_mean
from outrider.cluster.common.options import complaint
from outrider.drafter_service.service.methods import METHOD_ALIASES, Method
from outrider.drafter_service.service.plugins import PLUGIN_GROUP, installed_plugins
from outrider.drafter_service.service.speculative_config import SpeculativeConfig

TABLE_KEY = "num_speculative_tokens_per_batch_size"  # rows of three numbers: the option checks them
# keys that are options of their own, and how those are called
OPTION_OF_KEY = {
    "model": "draft_model",
    "num_speculative_tokens": "num_speculative_tokens",
    "draft_tensor_parallel_size": "draft_tensor_parallel_size",
    TABLE_KEY: "draft_length_by_batch_size",
}
# the rest of vLLM's keys: refused by name rather than as typing errors
UNSERVED_KEYS = frozenset({"disable_by_batch_size", "max_model_len", "revision", "quantization"})
_OURS = frozenset({*(method.value for method in Method), *METHOD_ALIASES})


def split_options(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keys that are options of their own, under the options' names, and the other keys.

    Raises `ValueError` naming a key whose value no option takes.
    """
    for key in OPTION_OF_KEY.keys() - {TABLE_KEY}:
        if isinstance(value := values.get(key, ""), bool) or not isinstance(value, str | int):
            raise ValueError(f"{key!r} must be text or a whole number")
    options = {OPTION_OF_KEY[key]: value for key, value in values.items() if key in OPTION_OF_KEY}
    return options, {key: value for key, value in values.items() if key not in OPTION_OF_KEY}


def _installed_names() -> set[str]:
    return {plugin.name for plugin in installed_plugins()}


def parse_speculative_config(
    values: Mapping[str, Any], plugin_names: Callable[[], Collection[str]] = _installed_names
) -> SpeculativeConfig:
    """Build the configuration; raises `ValueError` naming the key, with the closest match for an unknown one.

    A method that is none of ours must be one of `plugin_names`, which is called only for such a method.
    """
    values = _with_plugin(values, plugin_names)
    for key in sorted(UNSERVED_KEYS & values.keys()):
        raise ValueError(f"speculative_config: {key!r} is not supported")
    try:
        return SpeculativeConfig(**values)
    except ValidationError as error:
        known = [*(field.name for field in dataclasses.fields(SpeculativeConfig)), *OPTION_OF_KEY, *UNSERVED_KEYS]
        raise ValueError(f"speculative_config: {complaint(error, known, 'key')}") from error


def _with_plugin(values: Mapping[str, Any], plugin_names: Callable[[], Collection[str]]) -> Mapping[str, Any]:
    """Replace the name of a plug-in's method by `plugin`, and put the name into the key `plugin`.

    `{"method": "plugin", "plugin": NAME}` means the same, also where NAME is a method of ours. Raises `ValueError` for
    a name that is not installed, and for more than one plug-in.
    """
    methods, given = values.get("methods"), values.get("plugin")
    parts = methods if isinstance(methods, list | tuple) else ()
    foreign = [name for name in (values.get("method"), *parts) if isinstance(name, str) and name not in _OURS]
    names = {*foreign, *([given] if isinstance(given, str) else [])}
    if not names:
        return values
    installed = plugin_names()
    for name in sorted(names.difference(installed)):
        key = "methods: " if name in parts else "plugin: " if name == given else ""
        hint = did_you_mean(name, [*(method.value for method in Method), *installed])
        raise ValueError(
            f"speculative_config: {key}unknown method {name!r}{hint} "
            f"(installed entry points of the group {PLUGIN_GROUP} were searched as well)"
        )
    if len(names) > 1:
        raise ValueError(f"speculative_config: plugin: at most one, not {' and '.join(sorted(names))}")
    found = {**values, "plugin": names.pop()}
    if values.get("method") in foreign:
        found["method"] = Method.PLUGIN.value
    if parts:
        found["methods"] = [Method.PLUGIN.value if name in foreign else name for name in parts]
    return found
