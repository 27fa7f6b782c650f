"""A second drafter in the shadow: it drafts rounds that the serving one has answered, and nobody is sent its drafts.

Both drafts of a round are judged by the same text. The shadow drafts in spare time alone, from a snapshot of the ask,
by random numbers of its own.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.drafter_service.engine.draft_tree import num_named
from outrider.drafter_service.engine.drafter import Ask, Drafter, SessionKey
from outrider.drafter_service.engine.learning_messages import TrialCounts
from outrider.drafter_service.engine.spare_time import MAX_AHEAD_TOKENS
from outrider.drafter_service.observing.stable_share import is_in_share
from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, Draft

MAX_WAITING_ROUNDS = 8  # for the shadow's draft; the oldest is dropped for a newer one


def score(draft: Draft, text: Sequence[int]) -> float:
    """Return a draft's score by the text that followed, which is not empty: see `TrialCounts`."""
    if not draft.draft_probs:
        return num_named(draft, text)
    row = draft.draft_probs[0]  # that of the root
    weights = dict(zip(row.token_ids, row.weights, strict=True))
    return weights.get(text[0], 0) / DRAFT_PROB_SCALE


@dataclass(slots=True)
class Trial:
    """The counts of one pair of versions, as they grow."""

    counts: TrialCounts

    def add(self, serving_score: float, shadow_score: float) -> None:
        counts = self.counts
        self.counts = replace(
            counts,
            num_rounds=counts.num_rounds + 1,
            serving_score=counts.serving_score + serving_score,
            shadow_score=counts.shadow_score + shadow_score,
            squared_difference=counts.squared_difference + (shadow_score - serving_score) ** 2,
        )


@dataclass(slots=True)
class _TwiceDrafted:
    """A round with the serving drafter's answer; it is scored once the shadow's draft and the text are there."""

    trial: Trial
    serving: Draft
    shadow: Draft | None = None
    text: Sequence[int] | None = None

    def take_text(self, text: Sequence[int]) -> None:
        self.text = text
        self._score()

    def take_draft(self, draft: Draft) -> None:
        self.shadow = draft
        self._score()

    def _score(self) -> None:
        if self.shadow is not None and self.text:
            self.trial.add(score(self.serving, self.text), score(self.shadow, self.text))


class Shadow:
    """The drafter in the shadow, the rounds that wait for it, and the trial of its version."""

    def __init__(self, drafter: Drafter, *, serving: str, version: str, share: float) -> None:
        """`share` of the sessions are drafted for."""
        self.version, self.share = version, share
        self._drafter = drafter
        self._trial = Trial(TrialCounts(serving=serving, shadow=version))
        self._waiting: collections.deque[tuple[Ask, _TwiceDrafted]] = collections.deque()  # oldest first

    @property
    def counts(self) -> TrialCounts:
        return self._trial.counts

    @property
    def keys(self) -> set[SessionKey]:
        """The sessions of the rounds that wait."""
        return {ask.key for ask, _ in self._waiting}

    def take_serving(self, version: str) -> None:
        """Begin a trial against another serving version; rounds of the old pair count no more."""
        self._trial = Trial(TrialCounts(serving=version, shadow=self.version))
        self._waiting.clear()

    def observe(self, ask: Ask, answer: Draft, *, was_ahead: bool) -> _TwiceDrafted | None:
        """Let a round wait for its second draft; None: this round is not drafted twice.

        A chain is drafted as long as the answer is: running ahead answers with shorter ones. Where the drafter reads
        states, an answer that was drafted ahead began without the last of them, which would be no fair comparison.
        """
        is_unfair = was_ahead and bool(self._drafter.needs.taps)
        if is_unfair or not answer.token_ids or not is_in_share(ask.key.request_id, self.share, purpose="shadow"):
            return None
        length = len(answer.token_ids) if answer.parents is None else ask.length
        if len(ask.token_ids) + length > self._drafter.max_model_len + 1:
            return None
        snapshot = replace(ask, token_ids=list(ask.token_ids), length=length, history=None)
        if len(self._waiting) == MAX_WAITING_ROUNDS:
            self._waiting.popleft()
        round_ = _TwiceDrafted(self._trial, answer)
        self._waiting.append((snapshot, round_))
        return round_

    def has_work(self) -> bool:
        return bool(self._waiting)

    def draft(self) -> None:
        """Run one step of the drafter over the rounds that wait, the oldest of each session."""
        asks: dict[SessionKey, Ask] = {}
        for ask, _ in self._waiting:
            asks.setdefault(ask.key, ask)
        max_num_tokens = max(MAX_AHEAD_TOKENS, *(ask.max_nodes for ask in asks.values()))  # a level in one step
        drafts = {
            draft.round_id: draft for draft in self._drafter.draft([*asks.values()], max_num_tokens=max_num_tokens)
        }
        waiting, self._waiting = self._waiting, collections.deque()
        for ask, round_ in waiting:
            if ask.ask_id in drafts:
                round_.take_draft(drafts[ask.ask_id])
            else:
                self._waiting.append((ask, round_))

    def end(self, key: SessionKey) -> None:
        """Forget a session: its rounds that wait are not drafted any more."""
        if any(ask.key == key for ask, _ in self._waiting):
            self._waiting = collections.deque(each for each in self._waiting if each[0].key != key)
        self._drafter.release(key)
