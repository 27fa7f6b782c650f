"""Drafters of other packages: entry points of one group, and their arguments.

A package declares `my-drafter = "its_module:build"` in the group `outrider.drafters`; `{"method": "my-drafter"}`
selects it. It must be installed on every node with a gateway, verifier or drafter. It imports `drafter_service.plugin`.
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
    """The argument of a plug-in's factory. Fields may be added; none is removed or changes its meaning."""

    name: str  # the entry point's
    options: Mapping[str, Any]  # `plugin_config`; the plug-in checks it and raises `ValueError` naming the option
    vocab_size: int  # the target's: token ids are in [0, vocab_size)
    max_model_len: int  # longest sequence in tokens
    num_speculative_tokens: int  # longest draft of any ask
    num_tree_nodes: int  # largest tree of any ask; 0: chains only
    seed: int  # for random drafts
    device: str  # torch's name of this process's device
    target: str  # the target's folder: config.json and the tokenizer's files


DrafterFactory = Callable[[PluginContext], "Drafter"]


@cache  # a scan of every installed package; configurations are read many times
def installed_plugins() -> tuple[EntryPoint, ...]:
    """Return the installed entry points, as of the first call."""
    return tuple(entry_points(group=PLUGIN_GROUP))


def load_factory(name: str, plugins: Iterable[EntryPoint]) -> DrafterFactory:
    """Import a plug-in; raises `ValueError` naming it and the cause."""
    found = [plugin for plugin in plugins if plugin.name == name]
    if len(found) != 1:
        number = f"{len(found)} packages have" if found else "no installed package has"
        raise ValueError(f"plugin: {number} an entry point {name!r} of the group {PLUGIN_GROUP}")
    try:
        factory = found[0].load()
    except Exception as error:  # an import may raise anything
        raise ValueError(f"plugin {name!r}: {found[0].value} cannot be imported: {described(error)}") from error
    if not callable(factory):
        raise ValueError(f"plugin {name!r}: {found[0].value} is no factory of drafters but a {type(factory).__name__}")
    return factory


def described(error: Exception) -> str:
    """Return an error as one line."""
    return f"{type(error).__name__}: {error}"
