"""Read `speculative_config`, vLLM's object with our keys besides, from JSON, YAML or a Serve application."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from outrider.cluster.common.hints import did_you_mean
from outrider.cluster.router.autoscaling import FIRST_POOL
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
        if (taken := _SHARED_KEYS & rest.keys() or {_TABLE_KEY} & rest.keys()):
            raise ValueError(f"{min(taken)!r} is of the whole service")
        placed = {key: rest.pop(key) for key in _POOL_KEYS & rest.keys()}
        options, rest = split_options(rest)
        config = {**{key: shared[key] for key in _SHARED_KEYS & shared.keys()}, **rest}
        if parse_speculative_config(config).location is not Location.POOL:
            raise ValueError("location: a drafter in the verifier is no pool")
    except ValueError as error:
        raise ValueError(f"drafter_pools: {name}: {error}") from error
    return PoolOptions(name, placed | options, config)


def parse_speculative_config(values: Mapping[str, Any]) -> SpeculativeConfig:
    """Build the configuration; raises `ValueError` naming the key, with the closest match for an unknown one."""
    kinds = get_type_hints(SpeculativeConfig)
    known = [*kinds, *OPTION_OF_KEY, *UNSERVED_KEYS]
    parsed: dict[str, Any] = {}
    for key, value in values.items():
        if key in UNSERVED_KEYS:
            raise ValueError(f"speculative_config: {key!r} is not supported")
        if key not in kinds:
            raise ValueError(f"speculative_config: unknown key {key!r}{did_you_mean(key, known)}")
        parsed[key] = _method(value) if key == "method" else _parsed(key, value, kinds[key])
    try:
        return SpeculativeConfig(**parsed)
    except ValueError as error:
        raise ValueError(f"speculative_config: {error}") from error


def _method(value: Any) -> Method:
    name = _ALIASES.get(value, value) if isinstance(value, str) else ""
    if name not in set(Method):
        hint = did_you_mean(str(value), [method.value for method in Method])
        raise ValueError(f"speculative_config: unknown method {value!r}{hint}")
    return Method(name)


def _parsed(key: str, value: Any, kind: Any) -> Any:
    try:
        return TypeAdapter(kind, config=ConfigDict(hide_input_in_errors=True)).validate_python(value)
    except ValidationError as error:
        problem = error.errors(include_input=False, include_url=False)[0]["msg"]
        raise ValueError(f"speculative_config: {key}: {problem}") from error
