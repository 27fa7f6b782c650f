"""What operators and trainers ask of the pools' learners."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from outrider.cluster.common.errors import InvalidRequest, Unavailable
from outrider.cluster.common.reports import NoAnswerError, ask
from outrider.cluster.monitoring.learner_load import learner_load
from outrider.cluster.router.fleet import FleetSnapshot
from outrider.drafter_service.learning.messages import Action, Answer

ASK_TIMEOUT_S = 65.0  # longer than a learner's own, whose words say more
REWARD_TIMEOUT_S = 5.0
WITH_FOLDER = (Action.PUBLISH, Action.EXPORT)


class LearnerControl:
    """Calls the learners, and knows what they are at by the router's last snapshot."""

    def __init__(self, learners: Mapping[str, Any], snapshot: Callable[[], FleetSnapshot | None]) -> None:
        """`learners`: their deployments' handles, by their pools' names."""
        self._learners = learners
        self._snapshot = snapshot

    @property
    def status(self) -> list[dict[str, Any]]:
        """JSON-ready; a learner that does not report is left out."""
        snapshot = self._snapshot()
        return [] if snapshot is None else [learner_load(status) for status in snapshot.learners]

    async def ask(self, action: Action, pool: str | None = None, folder: str | None = None) -> tuple[str, str]:
        """Have a pool's learner do something; return the pool, and what was done, in words.

        `pool` may be None where one learns alone. Raises `InvalidRequest` where it or `folder` is wrong, or the learner
        refuses; `Unavailable` without an answer.
        """
        name = self._named(pool)
        if action in WITH_FOLDER and not folder:
            raise InvalidRequest(f"folder: {action} needs one", "folder")
        if action not in WITH_FOLDER and folder:
            raise InvalidRequest(f"folder: {action} takes none", "folder")
        try:
            answer: Answer = await ask(self._learners[name].ask, action, folder or "", timeout_s=ASK_TIMEOUT_S)
        except NoAnswerError as error:
            raise Unavailable(f"the learner of pool {name} does not answer: {error}") from error
        if answer.error is not None:
            raise InvalidRequest(f"the learner of pool {name}: {answer.error}")
        return name, answer.text

    async def reward(self, rewards: Mapping[str, float]) -> int:
        """Tell all learners what a trainer rewarded, by request ids; return how many have heard it."""
        calls = [ask(learner.reward, dict(rewards), timeout_s=REWARD_TIMEOUT_S) for learner in self._learners.values()]
        heard = await asyncio.gather(*calls, return_exceptions=True)
        errors = [error for error in heard if isinstance(error, BaseException)]
        for error in errors:
            if not isinstance(error, NoAnswerError):
                raise error
        return len(heard) - len(errors)

    def _named(self, pool: str | None) -> str:
        pools = sorted(self._learners)
        if pool is None and len(pools) == 1:
            return pools[0]
        if pool not in pools:
            raise InvalidRequest(f"pool must be one that learns: {', '.join(pools) or 'there is none'}", "pool")
        return pool
