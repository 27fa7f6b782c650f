"""Drafters of a replay: they have tokens where some were recorded, and the service's own hybrid chooses among them.

Nobody knows which tokens are right before they are verified, so a drafted token says no more than where it stands: its
id is its position, and a committed text has that id wherever the draft was right.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from outrider.drafter_service.engine.drafter import Ask, Drafter, SessionKey
from outrider.drafter_service.service.hybrid_drafter import HybridDrafter
from outrider.lab.replay.machine import EAGLE
from outrider.lab.replay.traces import NGRAM
from outrider.verifier_service.messages.draft import Draft, DraftNeeds, DraftSampling

OTHER_TOKEN = -1  # stands where no draft token was right
GREEDY = DraftSampling(temperature=0.0)
NO_BUDGET = 1 << 31  # recorded drafts are computed already


@dataclass(slots=True)
class RecordedDrafter:
    """A `Drafter` with so many tokens for each request as it is told before a step; look-ups tell how sure they are."""

    offered: dict[str, int] = field(default_factory=dict)  # by request
    claims: dict[str, Sequence[float]] = field(default_factory=dict)  # by request
    vocab_size: int = 1
    max_model_len: int = 1 << 31
    needs: DraftNeeds = field(default_factory=DraftNeeds)

    def draft(self, asks: Sequence[Ask], *, max_num_tokens: int) -> list[Draft]:
        return [self._result(ask) for ask in asks]

    def _result(self, ask: Ask) -> Draft:
        request_id, begin = ask.key.request_id, len(ask.token_ids)
        length = min(ask.length, self.offered[request_id])
        claims = self.claims.get(request_id)
        return ask.answer(
            tuple(range(begin, begin + length)),
            confidences=None if claims is None else tuple(claims[:length]),
        )

    def release(self, key: SessionKey) -> None:
        self.offered.pop(key.request_id, None)
        self.claims.pop(key.request_id, None)

    def check_integrity(self, keys: Collection[SessionKey]) -> None:
        assert self.offered.keys() <= {key.request_id for key in keys}, "kept of requests that are gone"


class RecordedPool:
    """The drafter of a batch: one that was recorded, or the hybrid of both."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._parts = {name: RecordedDrafter() for name in names}
        self._drafter: Drafter = self._parts[names[0]]
        if len(names) > 1:
            self._drafter = HybridDrafter({NGRAM: self._parts[NGRAM]}, {EAGLE: self._parts[EAGLE]})
        self._num_asks = 0

    def tell(self, request_id: str, offered: Sequence[int], claims: Sequence[float]) -> None:
        """Say how many tokens each drafter has for a request now, and how sure look-ups are of theirs."""
        for name, length in zip(self.names, offered, strict=True):
            self._parts[name].offered[request_id] = length
            if name == NGRAM:
                self._parts[name].claims[request_id] = claims

    def draft(self, request_id: str, token_ids: Sequence[int], length: int) -> tuple[int, Draft]:
        """Return a draft of at most `length` tokens and the place of its drafter among the names."""
        self._num_asks += 1
        ask = Ask(
            key=SessionKey("replay", request_id),
            ask_id=self._num_asks,
            token_ids=token_ids,
            sampling=GREEDY,
            length=length,
        )
        (result,) = self._drafter.draft([ask], max_num_tokens=NO_BUDGET)
        name = EAGLE if result.confidences is None else NGRAM
        return self.names.index(name), result

    def release(self, request_id: str) -> None:
        self._drafter.release(SessionKey("replay", request_id))
