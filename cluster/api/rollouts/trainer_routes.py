"""All endpoints for trainers, on the application of a gateway."""

from __future__ import annotations

from fastapi import FastAPI

from outrider.cluster.api.rollouts.doors import TrainerDoors
from outrider.cluster.api.rollouts.history import add_history_routes
from outrider.cluster.api.rollouts.rewards import add_reward_routes
from outrider.cluster.api.rollouts.sglang_routes import add_sglang_routes
from outrider.cluster.api.rollouts.vllm_routes import add_vllm_routes


def add_trainer_routes(app: FastAPI, doors: TrainerDoors) -> None:
    """Add what a service with `--rollouts` serves beside OpenAI's endpoints."""
    add_history_routes(app, doors.every)
    add_reward_routes(app, doors.learners)
    add_sglang_routes(app, doors)
    add_vllm_routes(app, doors)
