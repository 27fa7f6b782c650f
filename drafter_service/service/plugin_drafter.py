"""Drafters of other packages, with the protocol enforced: an error names the plug-in.

In a pool, the error ends the drafter's process, as with any drafter, and another one replaces it. In a verifier, it
only ends drafting (`LocalDraftClient`). A draft's contents are checked by the verifier, as all drafts are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from typing import Any

from outrider.drafter_service.engine.drafter import Ask, Drafter, SessionKey
from outrider.drafter_service.service.plugins import PluginContext, described, load_factory
from outrider.verifier_service.messages.draft import Draft, DraftNeeds
from outrider.verifier_service.messages.wire import decode, encode

MAX_SILENT_CALLS = 1_000  # in a row, of one drafter; a long prompt takes some hundred
_METHODS = ("draft", "release", "check_integrity")


class PluginFailedError(RuntimeError):
    """A plug-in has raised, or broken the protocol; it is not called again."""


def build_plugin(context: PluginContext, plugins: Iterable[EntryPoint]) -> Drafter:
    """Build a plug-in's drafter; raises `ValueError` naming the plug-in and the problem."""
    factory = load_factory(context.name, plugins)
    try:
        drafter = factory(context)
        problem = _problem(drafter)
    except Exception as error:  # its code may raise anything
        raise ValueError(f"plugin {context.name!r}: it could not be built: {described(error)}") from error
    if problem is not None:
        raise ValueError(f"plugin {context.name!r}: {problem}")
    return PluginDrafter(context.name, drafter)


def _problem(drafter: Any) -> str | None:
    """Return why an object is no drafter; None: it is one."""
    lacking = [name for name in _METHODS if not callable(getattr(drafter, name, None))]
    if lacking:
        return f"its factory made a {type(drafter).__name__}, which has no {', '.join(lacking)}"
    for name in ("vocab_size", "max_model_len"):
        if type(value := getattr(drafter, name, None)) is not int or value < 1:
            return f"its drafter's {name} must be a positive whole number"
    if not isinstance(needs := getattr(drafter, "needs", None), DraftNeeds):
        return "its drafter's needs must be DraftNeeds"
    if needs.taps:
        return "its drafter's needs.taps name hidden states of the target, which plug-ins cannot have"
    return None


class PluginDrafter:
    """A `Drafter` around a plug-in's; its errors and invalid answers are raised as `PluginFailedError`."""

    def __init__(self, name: str, drafter: Drafter) -> None:
        self.vocab_size, self.max_model_len, self.needs = drafter.vocab_size, drafter.max_model_len, drafter.needs
        self._name = name
        self._drafter = drafter
        self._num_silent_calls = 0

    def draft(self, asks: Sequence[Ask], *, max_num_tokens: int) -> list[Draft]:
        with self._blamed():
            results = _checked(asks, self._drafter.draft(asks, max_num_tokens=max_num_tokens))
            self._num_silent_calls = 0 if results else self._num_silent_calls + 1
            if self._num_silent_calls >= MAX_SILENT_CALLS:  # in a verifier it would block steps forever
                raise RuntimeError(f"{MAX_SILENT_CALLS} calls of draft() without an answer")
        return results

    def release(self, key: SessionKey) -> None:
        with self._blamed():
            self._drafter.release(key)

    def check_integrity(self, keys: Collection[SessionKey]) -> None:
        self._drafter.check_integrity(keys)

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # its code may raise anything
            raise PluginFailedError(f"plugin {self._name!r}: {described(error)}") from error


def _checked(asks: Sequence[Ask], drafts: Iterable[Draft]) -> list[Draft]:
    """Return the answers, checked: at most one per ask, of the declared types, as if decoded from a link."""
    unanswered = {(ask.key.request_id, ask.ask_id) for ask in asks}
    checked: list[Draft] = []
    for draft in drafts:
        answered = draft.request_id, draft.round_id
        if answered not in unanswered:
            raise ValueError(f"an answer to {answered}, which was not asked or is answered already")
        unanswered.discard(answered)
        checked.append(decode(encode(draft), (Draft,)))
    return checked
