"""Read `speculative_config`, vLLM's object with our keys besides, from JSON, YAML or a Serve application."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from outrider.cluster.common.hints import did_you_mean
from outrider.cluster.common.option_values import typed_value
from outrider.cluster.router.autoscaling import FIRST_POOL
from outrider.drafter_service.service.plugins import PLUGIN_GROUP, installed_plugins
from outrider.drafter_service.service.speculative_config import Location, Method, SpeculativeConfig

_TABLE_KEY = "num_speculative_tokens_per_batch_size"  # rows of three numbers: the option checks them
# keys that are options of their own, and how those are called
OPTION_OF_KEY = {
    "model": "draft_model",
    "num_speculative_tokens": "num_speculative_tokens",
    "draft_tensor_parallel_size": "draft_tensor_parallel_size",
    _TABLE_KEY: "draft_length_by_batch_size",
}
# the rest of vLLM's keys: refused by name rather than as typing errors
UNSERVED_KEYS = frozenset({"disable_by_batch_size", "max_model_len", "revision", "quantization"})
# keys of a further drafter pool that are options of the first one's, and those that are of the whole service
_POOL_KEYS = frozenset({"num_drafters", "drafter_resources", "drafter_labels"})
_SHARED_KEYS = frozenset({"rejection_sample_method", "state_dtype", "tensor_transport"})
_ALIASES = {"mtp_eagle": "mtp", "pard": "parallel_draft", "draft": "draft_model"}
_OURS = frozenset({*(method.value for method in Method), *_ALIASES})


def split_options(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part the keys that are options of their own, under the options' names, from the others.

    Raises `ValueError` naming a key whose value no option takes.
    """
    for key in OPTION_OF_KEY.keys() - {_TABLE_KEY}:
        if isinstance(value := values.get(key, ""), bool) or not isinstance(value, str | int):
            raise ValueError(f"{key!r} must be text or a whole number")
    options = {OPTION_OF_KEY[key]: value for key, value in values.items() if key in OPTION_OF_KEY}
    return options, {key: value for key, value in values.items() if key not in OPTION_OF_KEY}


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """A further drafter pool: its name, its values of the first one's options, and its `speculative_config`."""

    name: str
    options: dict[str, Any]
    speculative_config: dict[str, Any]


def parse_pool(values: Mapping[str, Any], shared: Mapping[str, Any]) -> PoolOptions:
    """Read a drafter pool: a `speculative_config` with a `name` and what may be said of any pool.

    `shared` is the `speculative_config` of the service, some keys of which hold for all pools. Raises `ValueError`.
    """
    name = values.get("name")
    if not isinstance(name, str) or not name.isidentifier() or name == FIRST_POOL:
        raise ValueError(f"drafter_pools: name must be a word other than {FIRST_POOL!r}, not {name!r}")
    rest = {key: value for key, value in values.items() if key != "name"}
    try:
        if taken := _SHARED_KEYS & rest.keys() or {_TABLE_KEY} & rest.keys():
            raise ValueError(f"{min(taken)!r} is of the whole service")
        placed = {key: rest.pop(key) for key in _POOL_KEYS & rest.keys()}
        options, rest = split_options(rest)
        config = {**{key: shared[key] for key in _SHARED_KEYS & shared.keys()}, **rest}
        if parse_speculative_config(config).location is not Location.POOL:
            raise ValueError("location: a drafter in the verifier is no pool")
    except ValueError as error:
        raise ValueError(f"drafter_pools: {name}: {error}") from error
    return PoolOptions(name, placed | options, config)


def _installed_names() -> set[str]:
    return {plugin.name for plugin in installed_plugins()}


def parse_speculative_config(
    values: Mapping[str, Any], plugin_names: Callable[[], Collection[str]] = _installed_names
) -> SpeculativeConfig:
    """Build the configuration; raises `ValueError` naming the key, with the closest match for an unknown one.

    A method that is none of ours is one of `plugin_names`, which is called where there is such a one alone.
    """
    kinds = get_type_hints(SpeculativeConfig)
    values = _with_plugin(values, plugin_names)
    known = [*kinds, *OPTION_OF_KEY, *UNSERVED_KEYS]
    parsed: dict[str, Any] = {}
    for key, value in values.items():
        if key in UNSERVED_KEYS:
            raise ValueError(f"speculative_config: {key!r} is not supported")
        if key not in kinds:
            raise ValueError(f"speculative_config: unknown key {key!r}{did_you_mean(key, known)}")
        parse = _PARSERS.get(key)
        parsed[key] = typed_value(f"speculative_config: {key}", value, kinds[key]) if parse is None else parse(value)
    try:
        return SpeculativeConfig(**parsed)
    except ValueError as error:
        raise ValueError(f"speculative_config: {error}") from error


def _with_plugin(values: Mapping[str, Any], plugin_names: Callable[[], Collection[str]]) -> Mapping[str, Any]:
    """Put `plugin` in the place of a method that is none of ours, and its name beside it.

    `{"method": "plugin", "plugin": NAME}` means the same, also where NAME is a method of ours. Raises `ValueError` for
    a name that nobody has, and for more than one.
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


def _method(value: Any) -> Method:
    name = _ALIASES.get(value, value) if isinstance(value, str) else ""
    if name not in set(Method):
        raise ValueError(f"speculative_config: unknown method {value!r}")
    return Method(name)


def _plugin_config(value: Any) -> str:
    """Return a plug-in's options as text, the same for equal ones."""
    if not isinstance(value, Mapping):
        raise ValueError("speculative_config: plugin_config: must be an object of the plug-in's own options")
    try:
        return json.dumps(dict(value), sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"speculative_config: plugin_config: {error}") from error


_PARSERS: Mapping[str, Callable[[Any], Any]] = {"method": _method, "plugin_config": _plugin_config}
