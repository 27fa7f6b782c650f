"""Drafters of other packages: entry points of one group, and what each is called with.

A package declares `my-drafter = "its_module:build"` in the group `outrider.drafters`; `{"method": "my-drafter"}` asks
for it. It must be installed wherever a gateway, verifier or drafter runs. Its side of this is `drafter_service.plugin`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.drafter_service.engine.engine import Drafter

PLUGIN_GROUP = "outrider.drafters"


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginContext:
    """What a plug-in's factory is called with. Fields may be added; none is removed or changes its meaning."""

    name: str  # the entry point's
    options: Mapping[str, Any]  # `plugin_config`; the plug-in checks it and raises `ValueError` naming the option
    vocab_size: int  # the target's: token ids are in [0, vocab_size)
    max_model_len: int  # longest sequence in tokens
    num_speculative_tokens: int  # longest draft that is ever asked for
    num_tree_nodes: int  # largest tree that is ever asked for; 0: chains alone
    seed: int  # of whatever it draws at random
    device: str  # where this process's models are, as torch names it
    target: str  # the target's folder: config.json and the tokenizer's files


DrafterFactory = Callable[[PluginContext], "Drafter"]


@cache  # a scan of every installed package; configurations are read many times
def installed_plugins() -> tuple[EntryPoint, ...]:
    """Return the entry points that were there when this was first asked."""
    return tuple(entry_points(group=PLUGIN_GROUP))


def load_factory(name: str, plugins: Iterable[EntryPoint]) -> DrafterFactory:
    """Import a plug-in; raises `ValueError` naming it and the cause."""
    found = [plugin for plugin in plugins if plugin.name == name]
    if len(found) != 1:
        number = f"{len(found)} packages have" if found else "no installed package has"
        raise ValueError(f"plugin: {number} an entry point {name!r} of the group {PLUGIN_GROUP}")
    try:
        factory = found[0].load()
    except Exception as error:  # whatever importing it raises
        raise ValueError(f"plugin {name!r}: {found[0].value} cannot be imported: {described(error)}") from error
    if not callable(factory):
        raise ValueError(f"plugin {name!r}: {found[0].value} is no factory of drafters but a {type(factory).__name__}")
    return factory


def described(error: Exception) -> str:
    """Return an error as one line."""
    return f"{type(error).__name__}: {error}"
