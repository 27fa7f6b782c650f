"""What operators ask of the pools' learners, over HTTP.

/v1/learner            GET   what each is at: phase, samples, versions
/v1/learner/ACTION     POST  pause, resume, rollback, publish, export
                             {"pool": which, where several learn; "folder": of publish and export}
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request

from outrider.cluster.api.openai.endpoints import read_json
from outrider.cluster.api.openai.protocol import ModelBody, parse_body
from outrider.cluster.gateway.learner_control import LearnerControl
from outrider.drafter_service.learning.messages import Action

PATH = "/v1/learner"


class LearnerBody(ModelBody):
    pool: str | None = None
    folder: str | None = None


def add_learner_status(app: FastAPI, learners: LearnerControl) -> None:
    """Add the route that only shows."""

    @app.get(PATH)
    async def status() -> dict[str, Any]:
        return {"object": "list", "data": learners.status}


def add_learner_actions(app: FastAPI, learners: LearnerControl) -> None:
    """Add the routes that change what serves: not for everyone."""
    for action in Action:
        _add_action(app, learners, action)


def _add_action(app: FastAPI, learners: LearnerControl, action: Action) -> None:
    @app.post(f"{PATH}/{action.value}")
    async def act(request: Request) -> dict[str, Any]:
        body = parse_body(await read_json(request, empty={}), LearnerBody)
        pool, done = await learners.ask(action, body.pool, body.folder)
        return {"object": "learner.answer", "pool": pool, "message": done}
