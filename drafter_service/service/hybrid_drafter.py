"""Choose the most promising drafter for every request and step.

Kinds of drafters fail at different places: in a repeated passage a suffix match guesses ten tokens right and a head two
or three; elsewhere the suffix match has none. To choose the better one at each step is the source of the 4.9 times
upper bound in "Performance or Illusion?".

The choice depends on the prefix only. *Lookups* (n-gram, suffix) are cheap, and their point masses follow from the
prefix; their calibrated confidences give the expected tokens. A *model*'s expected tokens are estimated, before it
draws anything, from its earlier drafts: this request's, with the mean over all requests as prior.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from outrider.drafter_service.engine.draft_tree import num_named
from outrider.drafter_service.engine.drafter import Ask, Drafter, Remembers, SessionKey, TakesTexts
from outrider.drafter_service.engine.learning_messages import ServedSample
from outrider.verifier_service.messages.draft import ROOT, Draft, DraftNeeds, History
from outrider.verifier_service.messages.history import PastResponse

GAIN = 1 / 8  # step size of the running means
PRIOR_TOKENS = 1.0  # prior of accepted tokens per draft of a model
EXPLORE_EVERY = 16  # one in 16 drafts of a session is by the least recently used model


@dataclass(slots=True)
class _Mean:
    """A running mean with an initial value."""

    value: float

    def observe(self, value: float) -> None:
        self.value += GAIN * (value - self.value)


@dataclass(slots=True)
class _Used:
    """The answer to a session's last ask."""

    name: str
    num_committed: int
    draft: Draft

    def num_accepted(self, token_ids: Sequence[int]) -> int:
        """Return how many of its tokens were committed since."""
        return num_named(self.draft, token_ids[self.num_committed :])


@dataclass(slots=True)
class _Session:
    wins: dict[str, _Mean]  # accepted tokens per draft, by model
    used: _Used | None = None
    num_drafts: int = 0
    last_used: dict[str, int] = field(default_factory=dict)  # by model: the number of its last draft
    num_committed: int = 0  # in the last ask
    pending: tuple[Ask, str] | None = None  # the running draft's, as its model gets it, and that model


@dataclass(slots=True)
class _Counts:
    """How often each drafter was chosen, and its accepted tokens."""

    num_drafts: collections.Counter[str] = field(default_factory=collections.Counter)
    num_accepted: collections.Counter[str] = field(default_factory=collections.Counter)


class HybridDrafter:
    """A `Drafter` over several others, of one vocabulary."""

    def __init__(self, lookups: Mapping[str, Drafter], models: Mapping[str, Drafter]) -> None:
        """Create from named drafters; at most one may read states, since a verifier taps one set of them."""
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
            history=any(drafter.needs.history for drafter in drafters),
            finds_some=any(drafter.needs.is_found for drafter in self._lookups.values()),
        )
        self.vocab_size = min(drafter.vocab_size for drafter in drafters)
        self.max_model_len = min(drafter.max_model_len for drafter in drafters)
        self._sessions: dict[SessionKey, _Session] = {}
        self._prior = {name: _Mean(PRIOR_TOKENS) for name in self._models}
        self.counts = _Counts()

    @property
    def models(self) -> Mapping[str, Drafter]:
        """The drafters that are no look-ups."""
        return self._models

    def draft(self, asks: Sequence[Ask], *, max_num_tokens: int) -> list[Draft]:
        """Answer asks at once for which a lookup is best; run one step of the others' models."""
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
                    draft = replace(looked_up[ask.key][name], is_found=self._lookups[name].needs.is_found)
                    results.append(self._answered(ask, name, draft))
                    continue
                session.pending = (replace(ask, length=num_computed(ask)), name)
            assert session.pending is not None
            waiting[session.pending[1]].append(session.pending[0])
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

    def remember(self, history: History, response: Sequence[int]) -> None:
        for drafter in self._lookups.values():
            if isinstance(drafter, Remembers):
                drafter.remember(history, response)

    def seed(self, history: History, responses: Sequence[PastResponse]) -> None:
        for drafter in self._lookups.values():
            if isinstance(drafter, Remembers):
                drafter.seed(history, responses)

    def take_texts(self, samples: Sequence[ServedSample]) -> None:
        for drafter in self._lookups.values():
            if isinstance(drafter, TakesTexts):
                drafter.take_texts(samples)

    def check_integrity(self, keys: Collection[SessionKey]) -> None:
        assert self._sessions.keys() <= set(keys), "a choice for a session that is gone"
        for drafter in (*self._lookups.values(), *self._models.values()):
            drafter.check_integrity(keys)

    def _is_fresh(self, ask: Ask) -> bool:
        pending = self._sessions[ask.key].pending
        return pending is None or pending[0].ask_id != ask.ask_id

    def _learn(self, ask: Ask) -> None:
        """Learn from the session's last draft."""
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
        """Return every lookup's answers, by session."""
        found: dict[SessionKey, dict[str, Draft]] = {ask.key: {} for ask in asks}
        for name, drafter in self._lookups.items():
            is_found = drafter.needs.is_found
            left = [ask if is_found else replace(ask, length=num_computed(ask)) for ask in asks]
            left = [ask for ask in left if ask.length]
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
        """Return the name of the drafter with the most expected tokens, and its model; None: a lookup."""
        expected = {name: expected_tokens(result) for name, result in looked_up[ask.key].items()}
        if most := num_computed(ask):
            session.num_drafts += 1
            expected |= {name: min(mean.value, most) for name, mean in session.wins.items()}
        if most and self._models and session.num_drafts % EXPLORE_EVERY == 0:  # or an unused model's mean would stay
            name = min(self._models, key=lambda each: session.last_used.get(each, 0))
        else:
            name = max(expected, key=lambda each: expected[each])
        session.last_used[name] = session.num_drafts
        return name, self._models.get(name)

    def _answered(self, ask: Ask, name: str, draft: Draft) -> Draft:
        session = self._sessions[ask.key]
        session.pending = None
        session.used = _Used(name, session.num_committed, draft)
        self.counts.num_drafts[name] += 1
        return draft


def num_computed(ask: Ask) -> int:
    """Return how long a draft may be that is computed."""
    return ask.length if ask.max_computed is None else min(ask.length, ask.max_computed)


def expected_tokens(draft: Draft) -> float:
    """Return a draft's expected accepted tokens: the sum over nodes of the product of confidences on the path."""
    survivals: list[float] = []
    parents = draft.parents or range(ROOT, len(draft.token_ids) - 1)
    for parent, confidence in zip(parents, draft.confidences or (), strict=False):
        survivals.append(confidence * (1.0 if parent == ROOT else survivals[parent]))
    return sum(survivals)
