"""What a draft engine does for its pool's learner: samples, counts, a drafter in the shadow. At first: nothing.

Nothing here changes any draft that is answered.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection
from typing import NamedTuple

import torch

from outrider.drafter_service.engine.drafter import Ask, Drafter, SessionKey
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.engine.learning_messages import (
    FIRST_VERSION,
    ServedSample,
    SetLearning,
    TrialCounts,
    VersionCounts,
)
from outrider.drafter_service.engine.sessions import Session
from outrider.drafter_service.observing.counted_rounds import CountedRounds
from outrider.drafter_service.observing.kept_texts import KeptTexts
from outrider.drafter_service.observing.shadow import Shadow
from outrider.verifier_service.messages.draft import Commit, Draft, Open, States

BuildDrafter = Callable[[str], Drafter]  # from a folder; "": the checkpoint that the pool started with


class LearningReport(NamedTuple):
    """The part of a `DrafterUpdate` that comes with the load."""

    trial: TrialCounts | None = None
    versions: tuple[VersionCounts, ...] = ()
    shadow_error: str = ""


class EngineLearning:
    """The `SessionObserver` of an engine whose pool learns, while its learner wants anything."""

    def __init__(self, engine: DraftEngine, build_shadow: BuildDrafter) -> None:
        """`build_shadow` may raise anything: whatever is wrong with a folder."""
        self._engine, self._build_shadow = engine, build_shadow
        self._forget_all()

    def _forget_all(self) -> None:
        self._engine.observer = None
        self._texts = KeptTexts(self._engine.needs, self._engine.vocab_size)
        self._rounds = CountedRounds(self._serving)
        self._shadow: Shadow | None = None
        self._shadow_source = ("", "")  # folder and version
        self._shadow_error = ""

    @property
    def _serving(self) -> str:
        return self._engine.weight_version or FIRST_VERSION

    # --- what the learner wants ---

    def set(self, message: SetLearning) -> None:
        """Do from now on what a message says. Raises `ValueError` if the shadow cannot be built: there is none then."""
        source = (message.shadow_folder, message.shadow_version)
        if not (message.sample_share > 0 or any(source)):
            self._drop_shadow()
            self._forget_all()
            return
        self._texts.sample_share, self._texts.max_sample_tokens = message.sample_share, message.max_sample_tokens
        self._engine.observer = self
        self._shadow_error = ""
        if self._shadow is None or source != self._shadow_source:
            self._drop_shadow()
            if any(source):
                self._shadow = self._built(message)
                self._shadow_source = source
        if self._shadow is not None:
            self._shadow.share = message.shadow_share

    def _built(self, message: SetLearning) -> Shadow:
        try:
            drafter = self._build_shadow(message.shadow_folder)
        except Exception as error:  # whatever is wrong with the folder, what serves goes on
            raise ValueError(f"shadow {message.shadow_version}: {str(error) or repr(error)}") from error
        found, wanted = ((each.vocab_size, each.needs.taps) for each in (drafter, self._engine))
        if found != wanted:
            raise ValueError(f"shadow {message.shadow_version}: vocab_size and taps {found}, those that serve {wanted}")
        share, version = message.shadow_share, message.shadow_version
        return Shadow(drafter, serving=self._serving, version=version, share=share)

    def take_samples(self) -> tuple[list[ServedSample], int]:
        """Return the samples since the last time, and how many were too large for a frame."""
        return self._texts.take()

    def report(self) -> LearningReport:
        """Return the counts as they are."""
        if self._engine.observer is None:
            return LearningReport()
        shadow = self._shadow
        return LearningReport(None if shadow is None else shadow.counts, self._rounds.counts, self._shadow_error)

    # --- spare time ---

    def has_work(self) -> bool:
        """Return whether a round waits for the shadow, while nothing is asked for."""
        return self._shadow is not None and self._shadow.has_work() and not self._engine.has_work()

    def draft_in_shadow(self) -> None:
        """Run one step of the shadow; one that raises is dropped, and the next report says why."""
        self._guard(Shadow.draft)

    def _guard(self, act: Callable[[Shadow], None]) -> None:
        """Do something with the shadow, if there is one, that never ends the engine."""
        has_failed = False
        try:
            if self._shadow is not None:
                act(self._shadow)
        except Exception as error:  # a candidate may be broken in any way
            has_failed, self._shadow_error = True, f"{type(error).__name__}: {error}"
        if has_failed:  # and the error, which holds the shadow, is gone
            self._drop_shadow()

    def _drop_shadow(self) -> None:
        """Free the shadow's memory."""
        if self._shadow is None:
            return
        self._shadow, self._shadow_source = None, ("", "")
        gc.collect()  # modules refer to themselves
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # --- what the engine tells ---

    def open(self, session: Session, message: Open) -> None:
        self._end(session.key)
        self._texts.open(session, message)

    def take_state(self, session: Session, message: States) -> None:
        self._texts.take_state(session, message)

    def commit(self, session: Session, message: Commit) -> None:
        self._texts.commit(session, message)
        self._rounds.commit(session)

    def answer(self, session: Session, ask: Ask, draft: Draft, *, was_ahead: bool) -> None:
        twice = None if self._shadow is None else self._shadow.observe(ask, draft, was_ahead=was_ahead)
        self._rounds.answer(session, ask.length, draft, None if twice is None else twice.take_text)

    def close(self, session: Session) -> None:
        self._texts.close(session)
        self._end(session.key)

    def drop(self, session: Session) -> None:
        self._texts.drop(session.key)
        self._end(session.key)

    def _end(self, key: SessionKey) -> None:
        self._rounds.end(key)
        self._guard(lambda shadow: shadow.end(key))

    def take_version(self, version: str) -> None:
        """Count for a new version. The shadow of this very version has nothing to show any more."""
        self._rounds.take_version(version)
        if self._shadow is None:
            return
        if self._shadow.version == version:
            self._drop_shadow()
        else:
            self._shadow.take_serving(version)

    def check_integrity(self, keys: Collection[SessionKey]) -> None:
        """Raise `AssertionError` if anything is kept of a session that is not in `keys`."""
        waiting = set() if self._shadow is None else self._shadow.keys
        assert self._texts.keys | self._rounds.keys | waiting <= set(keys), "notes of a session that is gone"
