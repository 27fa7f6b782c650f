"""An operator's and a trainer's doors to learners: who is asked, what is refused, what is not there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from fakes.fleet_snapshots import busy_fleet
from outrider.cluster.api.learner_routes import PATH, add_learner_actions, add_learner_status
from outrider.cluster.api.openai.endpoints import prepare
from outrider.cluster.api.rollouts.trainer_routes import PATH as REWARD_PATH
from outrider.cluster.api.rollouts.trainer_routes import add_reward_routes
from outrider.cluster.gateway.learner_control import LearnerControl
from outrider.drafter_service.learning.messages import Action, Answer
from tiny.played_learners import PlayedLearner


class Door:
    """An application over played learners."""

    def __init__(self, *pools: str) -> None:
        self.learners = {pool: PlayedLearner() for pool in pools}
        self.snapshot = busy_fleet()
        control = LearnerControl(self.learners, lambda: self.snapshot)
        self.app = FastAPI()
        prepare(self.app)
        add_learner_status(self.app, control)
        add_learner_actions(self.app, control)
        add_reward_routes(self.app, control)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://gateway")

    async def post(self, action: str, **body: Any) -> httpx.Response:
        return await self.client.post(f"{PATH}/{action}", json=body)


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    door = Door("default")
    async with door.client:
        yield door


@pytest.fixture
async def several() -> AsyncIterator[Door]:
    door = Door("default", "look")
    async with door.client:
        yield door


async def test_what_each_learner_is_at_is_shown(door: Door):
    (learner,) = (await door.client.get(PATH)).json()["data"]
    assert (learner["pool"], learner["phase"], learner["serving"]) == ("default", "watch", "v4")
    door.snapshot = replace(door.snapshot, learners=())
    assert (await door.client.get(PATH)).json() == {"object": "list", "data": []}


@pytest.mark.parametrize("action", list(Action))
async def test_every_action_reaches_the_learner(door: Door, action: Action):
    folder = {"folder": "/f"} if action in (Action.PUBLISH, Action.EXPORT) else {}
    answer = await door.post(action.value, **folder)
    assert answer.json() == {"object": "learner.answer", "pool": "default", "message": "done"}
    assert door.learners["default"].asked == [(action, folder.get("folder", ""))]


async def test_a_body_may_be_missing_where_one_pool_learns(door: Door):
    assert (await door.client.post(f"{PATH}/pause")).status_code == 200


async def test_of_several_pools_one_must_be_named(several: Door):
    answer = await several.post("pause")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "pool")
    assert "default, look" in answer.json()["error"]["message"]
    assert (await several.post("pause", pool="look")).json()["pool"] == "look"
    assert several.learners["default"].asked == []
    assert several.learners["look"].asked == [(Action.PAUSE, "")]


@pytest.mark.parametrize(
    ("action", "body", "param"),
    [
        ("publish", {}, "folder"),
        ("export", {"folder": ""}, "folder"),
        ("pause", {"folder": "/f"}, "folder"),
        ("pause", {"pool": "other"}, "pool"),
        ("pause", {"pol": "default"}, "pol"),
        ("pause", {"pool": 5}, "pool"),
    ],
)
async def test_what_is_wrong_is_named_and_nobody_is_asked(door: Door, action: str, body: dict[str, Any], param: str):
    answer = await door.post(action, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert door.learners["default"].asked == []


async def test_no_other_action_is_there(door: Door):
    assert (await door.post("train")).status_code == 404


async def test_a_learner_that_refuses_or_is_dead_is_an_error_in_words(door: Door):
    door.learners["default"].answer = Answer(call_id="", error="there is no folder /f")
    refused = await door.post("publish", folder="/f")
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "the learner of pool default: there is no folder /f"
    door.learners["default"].is_dead = True
    dead = await door.post("pause")
    assert dead.status_code == 503
    assert dead.json()["error"]["message"].startswith("the learner of pool default does not answer: RayActorError")


@pytest.mark.parametrize(
    ("body", "rewards"),
    [
        ({"request_id": "cmpl-1", "reward": 1}, {"cmpl-1": 1.0}),
        ({"request_id": "cmpl-1-0", "reward": -0.5}, {"cmpl-1-0": -0.5}),
        ({"rewards": {"a": 1.0, "b": 0}}, {"a": 1.0, "b": 0.0}),
    ],
)
async def test_rewards_go_to_all_learners(several: Door, body: dict[str, Any], rewards: dict[str, float]):
    answer = await several.client.post(REWARD_PATH, json=body)
    assert answer.json() == {"object": "reward", "num_rewards": len(rewards), "num_learners": 2}
    assert [learner.rewards for learner in several.learners.values()] == [rewards, rewards]


async def test_a_dead_learner_keeps_no_reward_from_another(several: Door):
    several.learners["default"].is_dead = True
    answer = await several.client.post(REWARD_PATH, json={"rewards": {"a": 1.0}})
    assert answer.json()["num_learners"] == 1
    assert several.learners["look"].rewards == {"a": 1.0}


@pytest.mark.parametrize(
    "body",
    [
        "{}",
        '{"request_id": "a"}',
        '{"request_id": "a", "reward": "good"}',
        '{"request_id": "a", "reward": 1, "rewards": {}}',
        '{"rewards": {"a": 1e999}}',
        '{"rewards": [1]}',
    ],
)
async def test_what_is_no_reward_is_refused(door: Door, body: str):
    answer = await door.client.post(REWARD_PATH, content=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error"), answer.text
    assert door.learners["default"].rewards == {}


async def test_where_nothing_learns_rewards_are_for_nobody():
    door = Door()
    async with door.client:
        answer = await door.client.post(REWARD_PATH, json={"rewards": {"a": 1.0}})
        assert answer.json()["num_learners"] == 0
        assert (await door.post("pause")).json()["error"]["message"] == "pool must be one that learns: there is none"
