"""How answered rounds fared, by the version of the drafter's weights that answered them.

A round waits until as many tokens have followed it as it was asked for, or its session ends: only then is the whole
draft judged, also one that came too late for its verification. What a round costs is a few numbers until then.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from outrider.drafter_service.engine.draft_tree import num_named, num_reached
from outrider.drafter_service.engine.drafter import SessionKey
from outrider.drafter_service.engine.learning_messages import VersionCounts
from outrider.drafter_service.engine.sessions import Session
from outrider.verifier_service.messages.draft import Draft

MAX_VERSIONS = 4  # whose counts are kept
MAX_WAITING_ROUNDS = 128  # of a session; more than this are asked for again and again without new text
OnText = Callable[[Sequence[int]], None]  # is told the text after a round; empty: none will follow


@dataclass(slots=True)
class _Tally:
    """The counts of one version, as they grow."""

    counts: VersionCounts

    def add(self, draft: Draft, text: Sequence[int]) -> None:
        counts = self.counts
        self.counts = replace(
            counts,
            num_rounds=counts.num_rounds + 1,
            num_draft_tokens=counts.num_draft_tokens + num_reached(draft, len(text)),
            num_named_tokens=counts.num_named_tokens + num_named(draft, text),
        )


@dataclass(slots=True)
class _Round:
    position: int  # tokens that were committed before the draft
    length: int  # tokens that have to follow
    draft: Draft
    tally: _Tally
    on_text: OnText | None


@dataclass(slots=True)
class _Answered:
    """One session's rounds that are not judged yet, oldest first."""

    token_ids: Sequence[int]  # the session's own, which grow
    rounds: list[_Round] = field(default_factory=list)


class CountedRounds:
    """The rounds of all sessions that wait for their text, and the counts of the last versions."""

    def __init__(self, version: str) -> None:
        self._tallies = collections.deque([_Tally(VersionCounts(version=version))], maxlen=MAX_VERSIONS)
        self._answered: dict[SessionKey, _Answered] = {}

    @property
    def keys(self) -> set[SessionKey]:
        return set(self._answered)

    @property
    def counts(self) -> tuple[VersionCounts, ...]:
        """The counts of the last versions, the present one last."""
        return tuple(tally.counts for tally in self._tallies)

    def take_version(self, version: str) -> None:
        """Begin to count for a version; rounds that wait are still counted for the version that answered them."""
        others = [tally for tally in self._tallies if tally.counts.version != version]
        self._tallies = collections.deque([*others, _Tally(VersionCounts(version=version))], maxlen=MAX_VERSIONS)

    def answer(self, session: Session, length: int, draft: Draft, on_text: OnText | None = None) -> None:
        """Note an answered round of `length`; `on_text` is told the text that has followed."""
        answered = self._answered.setdefault(session.key, _Answered(session.token_ids))
        if len(answered.rounds) == MAX_WAITING_ROUNDS:
            del answered.rounds[0]
        answered.rounds.append(_Round(len(session.token_ids), length, draft, self._tallies[-1], on_text))

    def commit(self, session: Session) -> None:
        """Judge the rounds that enough text has followed."""
        if (answered := self._answered.get(session.key)) is None:
            return
        num_tokens = len(session.token_ids)
        for each in answered.rounds:  # a few: each commit brings a token, and a round waits for at most `length`
            if each.position + each.length <= num_tokens:
                _resolve(each, session.token_ids)
        answered.rounds = [each for each in answered.rounds if each.position + each.length > num_tokens]
        if not answered.rounds:
            del self._answered[session.key]

    def end(self, key: SessionKey) -> None:
        """Judge a session's rounds by the text that there is."""
        answered = self._answered.pop(key, None)
        for each in () if answered is None else answered.rounds:
            assert answered is not None
            _resolve(each, answered.token_ids)


def _resolve(waiting: _Round, token_ids: Sequence[int]) -> None:
    text = token_ids[waiting.position : waiting.position + waiting.length]
    if text:
        waiting.tally.add(waiting.draft, text)
    if waiting.on_text is not None:
        waiting.on_text(text)
