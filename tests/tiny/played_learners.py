"""Deployment handles of learners, played: what they were asked, and what they answer."""

from __future__ import annotations

import asyncio
from typing import Any

from ray.exceptions import RayActorError

from outrider.drafter_service.learning.messages import Action, Answer


class PlayedLearner:
    """A learner's deployment handle."""

    def __init__(self) -> None:
        self.asked: list[tuple[Action, str]] = []
        self.rewards: dict[str, float] = {}
        self.answer = Answer(call_id="", text="done")
        self.is_dead = False
        self.ask, self.reward = _Method(self._ask), _Method(self._reward)

    def _ask(self, action: Action, folder: str) -> Answer:
        self._require_life()
        self.asked.append((action, folder))
        return self.answer

    def _reward(self, rewards: dict[str, float]) -> None:
        self._require_life()
        self.rewards |= rewards

    def _require_life(self) -> None:
        if self.is_dead:
            raise RayActorError


class _Method:
    def __init__(self, call: Any) -> None:
        self._call = call

    async def remote(self, *arguments: Any) -> Any:
        await asyncio.sleep(0)
        return self._call(*arguments)
