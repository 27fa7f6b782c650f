"""Choose the most promising drafter for every request and step.

Drafters of different kinds fail at different places: a suffix match guesses ten tokens of a repeated passage, where a
head guesses two or three; elsewhere it has nothing. Taking the better one at each step is where the upper bound of 4.9
times in "Performance or Illusion?" comes from.

The choice looks at the prefix alone. *Lookups* (n-gram, suffix) are cheap and answer with point masses, which the
prefix determines; their confidences, calibrated by themselves, say how many tokens to expect. What a *model* will
achieve is estimated before it draws anything from its earlier drafts: this request's, starting from what all saw.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from outrider.drafter_service.engine.drafter import Ask, Drafter, SessionKey
from outrider.verifier_service.messages.draft import ROOT, Draft, DraftNeeds

GAIN = 1 / 8  # of the running means
PRIOR_TOKENS = 1.0  # that a model's drafts are thought to win before any was seen
EXPLORE_EVERY = 16  # a session's drafts: so often the model that was not used for longest is


@dataclass(slots=True)
class _Mean:
    """A running mean that starts from a given value."""

    value: float

    def observe(self, value: float) -> None:
        self.value += GAIN * (value - self.value)


@dataclass(slots=True)
class _Used:
    """The draft that answered a session's last ask."""

    name: str
    num_committed: int
    draft: Draft

    def num_accepted(self, token_ids: Sequence[int]) -> int:
        """Count its tokens that the committed ones have followed since."""
        node = ROOT
        parents = self.draft.parents or range(ROOT, len(self.draft.token_ids) - 1)
        position = self.num_committed
        for index, (token_id, parent) in enumerate(zip(self.draft.token_ids, parents, strict=True)):
            if parent == node and position < len(token_ids) and token_ids[position] == token_id:
                node, position = index, position + 1
        return position - self.num_committed


@dataclass(slots=True)
class _Session:
    wins: dict[str, _Mean]  # accepted tokens per draft, by model
    used: _Used | None = None
    num_drafts: int = 0
    last_used: dict[str, int] = field(default_factory=dict)  # the number of each one's last draft
    num_committed: int = 0  # of the ask that is answered next
    pending: tuple[int, str] | None = None  # (ask id, model) that is drafting now


@dataclass(slots=True)
class _Counts:
    """How often each drafter was chosen, and what its drafts won."""

    num_drafts: collections.Counter[str] = field(default_factory=collections.Counter)
    num_accepted: collections.Counter[str] = field(default_factory=collections.Counter)


class HybridDrafter:
    """A `Drafter` over several others, of one vocabulary."""

    def __init__(self, lookups: Mapping[str, Drafter], models: Mapping[str, Drafter]) -> None:
        """Name the drafters; at most one of them may read states, for a verifier taps one set of them."""
        self._lookups, self._models = dict(lookups), dict(models)
        drafters = [*self._lookups.values(), *self._models.values()]
        if len(drafters) < 2:
            raise ValueError("methods: a hybrid chooses among two or more drafters")
        taps = [drafter.needs for drafter in drafters if drafter.needs.taps]
        if len(taps) > 1:
            raise ValueError("methods: at most one of a hybrid's drafters may read hidden states")
        self.needs = DraftNeeds(
            taps=taps[0].taps if taps else (),
            last_state_only=taps[0].last_state_only if taps else False,
            predictions=any(drafter.needs.predictions for drafter in drafters),
        )
        self.vocab_size = min(drafter.vocab_size for drafter in drafters)
        self.max_model_len = min(drafter.max_model_len for drafter in drafters)
        self._sessions: dict[SessionKey, _Session] = {}
        self._prior = {name: _Mean(PRIOR_TOKENS) for name in self._models}
        self.counts = _Counts()

    @property
    def models(self) -> tuple[Drafter, ...]:
        """Those that compute what they draft."""
        return tuple(self._models.values())

    def draft(self, asks: Sequence[Ask], *, max_num_tokens: int) -> list[Draft]:
        """Answer what the lookups answer best at once; give the others' models one step."""
        for ask in asks:
            self._learn(ask)
        fresh = [ask for ask in asks if self._is_fresh(ask)]
        looked_up = self._look_up(fresh, max_num_tokens)
        results: list[Draft] = []
        waiting: dict[str, list[Ask]] = {name: [] for name in self._models}
        for ask in asks:
            session = self._sessions[ask.key]
            if self._is_fresh(ask):
                name, model = self._choose(ask, session, looked_up)
                if model is None:
                    results.append(self._answered(ask, name, looked_up[ask.key][name]))
                    continue
                session.pending = (ask.ask_id, name)
            assert session.pending is not None
            waiting[session.pending[1]].append(ask)
        for name, model_asks in waiting.items():
            if model_asks:
                by_id = {ask.ask_id: ask for ask in model_asks}
                drafted = self._models[name].draft(model_asks, max_num_tokens=max_num_tokens)
                results += [self._answered(by_id[draft.round_id], name, draft) for draft in drafted]
        return results

    def release(self, key: SessionKey) -> None:
        self._sessions.pop(key, None)
        for drafter in (*self._lookups.values(), *self._models.values()):
            drafter.release(key)

    def check_integrity(self, keys: Collection[SessionKey]) -> None:
        assert self._sessions.keys() <= set(keys), "a choice for a session that is gone"
        for drafter in (*self._lookups.values(), *self._models.values()):
            drafter.check_integrity(keys)

    def _is_fresh(self, ask: Ask) -> bool:
        pending = self._sessions[ask.key].pending
        return pending is None or pending[0] != ask.ask_id

    def _learn(self, ask: Ask) -> None:
        """Take in how the session's last draft fared."""
        session = self._sessions.get(ask.key)
        if session is None:
            wins = {name: _Mean(prior.value) for name, prior in self._prior.items()}
            session = self._sessions[ask.key] = _Session(wins)
        session.num_committed = len(ask.token_ids)
        if session.used is None or len(ask.token_ids) <= session.used.num_committed:
            return
        used, session.used = session.used, None
        num_accepted = used.num_accepted(ask.token_ids)
        self.counts.num_accepted[used.name] += num_accepted
        if used.name in self._models:
            session.wins[used.name].observe(num_accepted)
            self._prior[used.name].observe(num_accepted)

    def _look_up(self, asks: Sequence[Ask], max_num_tokens: int) -> dict[SessionKey, dict[str, Draft]]:
        """Ask every lookup: its answers by session."""
        found: dict[SessionKey, dict[str, Draft]] = {ask.key: {} for ask in asks}
        for name, drafter in self._lookups.items():
            left = list(asks)
            while left:
                answered = {draft.round_id: draft for draft in drafter.draft(left, max_num_tokens=max_num_tokens)}
                assert answered, "a lookup that makes no progress"
                for ask in left:
                    if ask.ask_id in answered:
                        found[ask.key][name] = answered[ask.ask_id]
                left = [ask for ask in left if ask.ask_id not in answered]
        return found

    def _choose(
        self, ask: Ask, session: _Session, looked_up: Mapping[SessionKey, Mapping[str, Draft]]
    ) -> tuple[str, Drafter | None]:
        """Return the drafter with the most accepted tokens to expect; its model, or None for a lookup."""
        session.num_drafts += 1
        if self._models and session.num_drafts % EXPLORE_EVERY == 0:  # or its mean would never move again
            name = min(self._models, key=lambda each: session.last_used.get(each, 0))
        else:
            expected = {name: expected_tokens(result) for name, result in looked_up[ask.key].items()}
            expected |= {name: min(mean.value, ask.length) for name, mean in session.wins.items()}
            name = max(expected, key=lambda each: expected[each])
        session.last_used[name] = session.num_drafts
        return name, self._models.get(name)

    def _answered(self, ask: Ask, name: str, draft: Draft) -> Draft:
        session = self._sessions[ask.key]
        session.pending = None
        session.used = _Used(name, session.num_committed, draft)
        self.counts.num_drafts[name] += 1
        return draft


def expected_tokens(draft: Draft) -> float:
    """Return how many tokens a draft wins on average if its confidences are right: the sum over its nodes' paths."""
    survivals: list[float] = []
    parents = draft.parents or range(ROOT, len(draft.token_ids) - 1)
    for parent, confidence in zip(parents, draft.confidences or (), strict=False):
        survivals.append(confidence * (1.0 if parent == ROOT else survivals[parent]))
    return sum(survivals)
