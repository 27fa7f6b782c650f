"""A drafter without a model whose drafts follow from a function, and a draft engine in front of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from outrider.drafter_service.engine.drafter import Ask, DraftEngineConfig, SessionKey
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.verifier_service.messages.draft import Commit, Draft, DraftNeeds, DraftSampling, Open
from support.clock import Clock

VOCAB_SIZE = 100
GREEDY = DraftSampling(temperature=0.0)
PEER = "v"
Guess = Callable[[Ask], Draft]


def counting(ask: Ask) -> Draft:
    """Draft last + 1, last + 2, ..."""
    return ask.answer(tuple((ask.token_ids[-1] + 1 + index) % VOCAB_SIZE for index in range(ask.length)))


@dataclass
class ScriptedDrafter:
    """A `Drafter` that answers an ask in the `num_steps`th call."""

    guess: Guess = counting
    needs: DraftNeeds = DraftNeeds()
    vocab_size: int = VOCAB_SIZE
    max_model_len: int = 1000
    num_steps: int = 1
    asks: list[Ask] = field(default_factory=list)  # as they were asked
    ages: Counter[int] = field(default_factory=Counter)  # calls so far, by ask
    released: list[SessionKey] = field(default_factory=list)

    def draft(self, asks: Sequence[Ask], *, max_num_tokens: int) -> list[Draft]:
        self.asks += [replace(ask, token_ids=tuple(ask.token_ids)) for ask in asks]
        self.ages.update(ask.ask_id for ask in asks)
        return [self.guess(ask) for ask in asks if self.ages[ask.ask_id] >= self.num_steps]

    def release(self, key: SessionKey) -> None:
        self.released.append(key)

    def check_integrity(self, keys: Collection[SessionKey]) -> None:
        """Nothing is kept."""


def scripted_engine(drafter: ScriptedDrafter, clock: Clock | None = None, **limits: float) -> DraftEngine:
    config = DraftEngineConfig(**{"max_sessions": 8, "session_ttl_s": 10.0, "max_draft_length": 8, **limits})
    return DraftEngine(drafter, clock=clock or Clock(), config=config, has_weights=True)


def open_(request_id: str, token_ids: Sequence[int], **fields: object) -> Open:
    values: dict[str, object] = {"sampling": GREEDY, "may_learn": True, **fields}
    return Open(request_id=request_id, token_ids=tuple(token_ids), **values)  # type: ignore[arg-type]


def commit(request_id: str, position: int, token_ids: Sequence[int] = (), **fields: object) -> Commit:
    values: dict[str, object] = {"round_id": 1, "max_length": 4, **fields}
    return Commit(request_id=request_id, position=position, token_ids=tuple(token_ids), **values)  # type: ignore[arg-type]


def say(engine: DraftEngine, *messages: object, peer: str = PEER) -> list[Draft]:
    """Tell an engine something; return what it says, its books being in order."""
    for message in messages:
        engine.handle(peer, message)  # type: ignore[arg-type]
    said = [message for _, message in engine.step()]
    engine.check_integrity()
    return said  # type: ignore[return-value]
