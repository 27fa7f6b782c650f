"""What packages with drafters bring: factories behind entry points, some of them broken."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from importlib.metadata import EntryPoint

from outrider.drafter_service.plugin import Ask, Draft, Drafter, DraftNeeds, PluginContext, SessionKey
from outrider.drafter_service.service.plugins import PLUGIN_GROUP

Answer = Callable[[Sequence[Ask]], list[Draft]]


def answer(ask: Ask, *token_ids: int, **fields: object) -> Draft:
    return ask.answer(token_ids, **fields)  # type: ignore[arg-type]


def repeat_first(asks: Sequence[Ask]) -> list[Draft]:
    """Guess that everything is the first token again."""
    return [answer(ask, *[ask.token_ids[0]] * ask.length) for ask in asks]


class FakeDrafter:
    """A plug-in's drafter that answers as it is told to."""

    def __init__(
        self,
        context: PluginContext,
        answer_all: Answer = repeat_first,
        *,
        needs: DraftNeeds | None = None,
        release_error: Exception | None = None,
    ) -> None:
        self.context = context
        self.vocab_size, self.max_model_len = context.vocab_size, context.max_model_len
        self.needs = needs or DraftNeeds()
        self.released: list[SessionKey] = []
        self._answer_all = answer_all
        self._release_error = release_error

    def draft(self, asks: Sequence[Ask], *, max_num_tokens: int) -> list[Draft]:
        return self._answer_all(asks)

    def release(self, key: SessionKey) -> None:
        if self._release_error is not None:
            raise self._release_error
        self.released.append(key)

    def check_integrity(self, keys: Collection[SessionKey]) -> None:
        """Nothing is held."""


def build(context: PluginContext) -> Drafter:
    return FakeDrafter(context)


def without_licence(context: PluginContext) -> Drafter:
    raise OSError(f"no licence for {context.name}")


def reading_states(context: PluginContext) -> Drafter:
    return FakeDrafter(context, needs=DraftNeeds(taps=(1,)))


def knowing_predictions(context: PluginContext) -> Drafter:
    return FakeDrafter(context, needs=DraftNeeds(predictions=True))


def needy(context: PluginContext) -> Drafter:
    return FakeDrafter(context, needs="everything")  # type: ignore[arg-type]


def without_vocabulary(context: PluginContext) -> Drafter:
    drafter = FakeDrafter(context)
    drafter.vocab_size = 0
    return drafter


def something_else(context: PluginContext) -> object:
    return context.options


NO_FACTORY = 7


def entry_point(name: str, attribute: str = "build", module: str = __name__) -> EntryPoint:
    return EntryPoint(name=name, value=f"{module}:{attribute}", group=PLUGIN_GROUP)


class MadeEntryPoint:
    """An entry point whose factory is made in the test."""

    def __init__(self, name: str, factory: Callable[[PluginContext], Drafter]) -> None:
        self.name, self.value = name, "made:here"
        self._factory = factory

    def load(self) -> Callable[[PluginContext], Drafter]:
        return self._factory
