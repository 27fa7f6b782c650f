"""All endpoints for trainers, on the application of a gateway; here those of rewards.

A trainer rewards responses, which learners may weigh their samples by (ReSpec, arXiv 2510.26475).

/v1/rollouts/reward    POST  {"request_id": id, "reward": number}, or {"rewards": {id: number}}
"""

from __future__ import annotations

import math
from typing import Any

from fastapi import FastAPI, Request

from outrider.cluster.api.openai.endpoints import read_json
from outrider.cluster.api.openai.protocol import ModelBody, parse_body
from outrider.cluster.api.rollouts.doors import TrainerDoors
from outrider.cluster.api.rollouts.history import add_history_routes
from outrider.cluster.api.rollouts.sglang_routes import add_sglang_routes
from outrider.cluster.api.rollouts.vllm_routes import add_vllm_routes
from outrider.cluster.common.errors import InvalidRequest
from outrider.cluster.gateway.learner_control import LearnerControl

PATH = "/v1/rollouts/reward"


def add_trainer_routes(app: FastAPI, doors: TrainerDoors) -> None:
    """Add what a service with `--rollouts` serves beside OpenAI's endpoints."""
    add_history_routes(app, doors.every)
    add_reward_routes(app, doors.learners)
    add_sglang_routes(app, doors)
    add_vllm_routes(app, doors)


class RewardBody(ModelBody):
    """A response is named by its choice's id: of n > 1 choices, the request's with its index, as `id-0`."""

    request_id: str | None = None
    reward: float | None = None
    rewards: dict[str, float] | None = None

    @property
    def by_id(self) -> dict[str, float]:
        """The rewards by their responses' ids; raises `InvalidRequest` for two forms, and what is not finite."""
        if (self.rewards is None) == (self.request_id is None):
            raise InvalidRequest("rewards: give either them or one request_id with its reward", "rewards")
        if self.request_id is not None and self.reward is None:
            raise InvalidRequest("reward: a number is needed", "reward")
        found = self.rewards if self.rewards is not None else {str(self.request_id): float(self.reward or 0.0)}
        if not all(map(math.isfinite, found.values())):
            raise InvalidRequest("rewards must be finite", "rewards")
        return found


def add_reward_routes(app: FastAPI, learners: LearnerControl) -> None:
    """Add the route; where nothing learns, rewards are for nobody and no error."""

    @app.post(PATH)
    async def reward(request: Request) -> dict[str, Any]:
        rewards = parse_body(await read_json(request), RewardBody).by_id
        return {"object": "reward", "num_rewards": len(rewards), "num_learners": await learners.reward(rewards)}
