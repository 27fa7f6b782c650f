"""How many of the target's updates each drafter with weights of its own has not followed, and what that costs.

    target     start ----- v1 ----------- v2 ------------ v3
    drafter A  start                  v2                               1 behind: its v2 is the target's v2
    drafter B  start ---------- own ----------------------------       2 behind: none since its own update
    look-up    (no weights of its own)                                 never behind

Any draft is verified exactly, so such a drafter costs acceptance and no token.
"""

from __future__ import annotations

import collections
import logging
from dataclasses import dataclass, field

from outrider.verifier_service.messages.draft import DrafterEvent

logger = logging.getLogger(__name__)

MIN_DRAFT_TOKENS = 100  # from which acceptance says something
MAX_DRAFTERS = 256  # that are remembered, connected or not
MAX_VERSIONS = 64


@dataclass(slots=True)
class Acceptance:
    """Draft tokens that were verified, and those of them that were accepted."""

    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def __str__(self) -> str:
        if not self.num_draft_tokens:
            return "not measured"
        return f"{self.num_accepted_tokens / self.num_draft_tokens:.2f}"


@dataclass(slots=True)
class _Follower:
    """A drafter with weights of its own."""

    version: str  # of its weights
    num_followed: int  # updates of the target when its weights were new
    is_up: bool = True
    is_told: bool = True  # a warning was given since the target's last update, or none is due
    fitting: Acceptance = field(default_factory=Acceptance)  # when it was last not behind
    recent: Acceptance = field(default_factory=Acceptance)  # since its or the target's last update


class FollowedUpdates:
    """Compares the versions that drafters tell with the target's, and warns of drafters that are behind.

    One warning for each drafter and update of the target, once there is something to say of acceptance.
    """

    def __init__(self) -> None:
        self._num_updates = 0
        self._versions: collections.deque[str] = collections.deque(maxlen=MAX_VERSIONS)  # the target's, latest last
        self._followers: dict[str, _Follower] = {}

    def num_behind(self, drafter_id: str) -> int | None:
        """Return how many updates of the target a drafter has not followed; None: it has no weights of its own."""
        follower = self._followers.get(drafter_id)
        return None if follower is None else self._num_updates - follower.num_followed

    def hear(self, event: DrafterEvent) -> None:
        """Note a version that a drafter tells, and whether the drafter is there."""
        follower = self._followers.get(event.drafter_id)
        if follower is not None:
            follower.is_up = event.is_up
        version = event.weight_version
        if version is None or (follower is not None and follower.version == version):
            return
        num_followed = self._num_updates
        if not version:
            num_followed = 0  # it has begun anew
        elif follower is None and version in self._versions:
            num_followed -= list(reversed(self._versions)).index(version)
        self._followers.pop(event.drafter_id, None)
        self._followers[event.drafter_id] = _Follower(version, num_followed)
        if len(self._followers) > MAX_DRAFTERS:
            del self._followers[next(iter(self._followers))]

    def take_version(self, version: str) -> None:
        """Note an update of the target. A drafter whose own weights are called so already is not behind."""
        for drafter_id, follower in self._followers.items():
            self._tell(drafter_id, follower)
        for follower in self._followers.values():
            if follower.num_followed == self._num_updates:
                follower.fitting = follower.recent
            follower.recent, follower.is_told = Acceptance(), False
            if follower.version == version:
                follower.num_followed = self._num_updates + 1
        self._num_updates += 1
        self._versions.append(version)

    def observe(self, drafter_id: str, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Count a drafter's tokens that were verified; warn if it is time to."""
        follower = self._followers.get(drafter_id)
        if follower is None:
            return
        follower.recent.num_draft_tokens += num_draft_tokens
        follower.recent.num_accepted_tokens += num_accepted_tokens
        if follower.recent.num_draft_tokens >= MIN_DRAFT_TOKENS:
            self._tell(drafter_id, follower)

    def _tell(self, drafter_id: str, follower: _Follower) -> None:
        """Warn of a drafter that is behind, once after each update of the target."""
        num_behind = self._num_updates - follower.num_followed
        if follower.is_told or not follower.is_up or not num_behind:
            return
        follower.is_told = True
        logger.warning(
            "drafter %s has weights of its own that are %d updates of the target behind; acceptance %s before, %s now",
            *(drafter_id, num_behind, follower.fitting, follower.recent),
        )
