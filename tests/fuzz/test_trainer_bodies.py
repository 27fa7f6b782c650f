"""Every door of trainers and of learners against arbitrary bodies: no 500, no exception, and what is refused is named.

The fleet is played: it checks that what a verifier would be told can be told, and answers that it was done.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
from fastapi import FastAPI
from hypothesis import example, given
from hypothesis import strategies as st

from fakes.backend import FakeBackend, build_gateway, build_tokenizer
from fakes.reports import verifier_report
from fuzz.budget import examples
from fuzz.json_bodies import NAMES, bodies_with_one_wrong_place, plausible_bodies, spoilt_bodies
from fuzz.tally import TALLY
from fuzz.test_http_bodies import check_answer, few_tokens, refuse_constant
from outrider.cluster.api.learner_routes import add_learner_actions, add_learner_status
from outrider.cluster.api.openai.endpoints import build_api
from outrider.cluster.api.request_ids import RequestIdMiddleware
from outrider.cluster.api.rollouts.doors import TrainerDoors
from outrider.cluster.api.rollouts.trainer_routes import add_trainer_routes
from outrider.cluster.gateway.fleet_control import FleetControl
from outrider.cluster.gateway.learner_control import WITH_FOLDER, LearnerControl
from outrider.cluster.gateway.rollout_memory import MemoryLimits, RolloutMemory
from outrider.cluster.peers.every_gateway import EveryGateway
from outrider.cluster.router.fleet import FleetSnapshot, VerifierState
from outrider.drafter_service.learning.messages import Action, Answer
from outrider.verifier_service.messages.engine import CONTROLS, Control, ControlResult
from outrider.verifier_service.messages.request import SpeculationPlan
from outrider.verifier_service.messages.wire import decode, encode
from support.waiting import healthy

GROUP = {"master_address": "127.0.0.1", "master_port": 7, "rank_offset": 1, "world_size": 3, "group_name": "g"}
BUCKET = {"names": ["w"], "dtypes": ["float32"], "shapes": [[2, 3]], "group_name": "g"}
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {
        "input_ids": [[5, 6], [7]],
        "sampling_params": [{"max_new_tokens": 2, "stop": ["a"], "logit_bias": {"5": 1.0}}, {"max_new_tokens": 1}],
        "return_logprob": [True, False],
        "logprob_start_len": [0, -1],
        "top_logprobs_num": [2, 0],
        "rid": ["a", "b"],
        "extra_key": "policy",
    },
    "/inference/v1/generate": {
        "token_ids": [5, 6],
        "sampling_params": {"max_tokens": 2, "logprobs": 1, "prompt_logprobs": 1, "seed": 3},
        "stream": False,
        "priority": 0,
    },
    "/update_weights_from_disk": {"model_path": "f", "weight_version": "7", "load_format": None, "flush_cache": True},
    "/update_weights_from_distributed": {**BUCKET, "weight_version": "7", "load_format": "flattened_bucket"},
    "/update_weights": {"weight_dir": "/weights/step_7"},
    "/init_weights_update_group": {**GROUP, "backend": "gloo"},
    "/destroy_weights_update_group": {"group_name": "g"},
    "/pause_generation": {"mode": "in_place"},
    "/abort_request": {"rid": "a", "abort_all": False},
    "/abort_requests": {"request_ids": ["a"]},
    "/v1/rollouts/history": {
        "history_key": "k",
        "responses": [[5, 6], [7]],
        "weight_version": "7",
        "opens_version": True,
    },
    "/v1/rollouts/reward": {"rewards": {"a": 1.0, "b": -2}},
    **{
        f"/v1/learner/{action.value}": {"pool": "drafters", **({"folder": "f"} if action in WITH_FOLDER else {})}
        for action in Action
    },
}
PATHS = tuple(BODIES)
FIELDS = sorted({name for body in BODIES.values() for name in body} | {"request_id", "reward", "prompt_ids", "text"})
TRAINERS_NAMES = st.sampled_from(FIELDS) | NAMES


class PlayedFleet:
    """Two verifiers that do whatever they are told."""

    def __init__(self) -> None:
        states = [
            VerifierState(report=verifier_report(name), reported_s=0.0, default_plan=SpeculationPlan())
            for name in ("a", "b")
        ]
        self.snapshot: FleetSnapshot | None = FleetSnapshot(verifiers=tuple(states), drafters=(), decided_at_s=0.0)

    async def refresh(self) -> None:
        pass

    async def call(self, endpoint: str, message: Control) -> ControlResult:
        assert decode(encode(message), CONTROLS) == message
        return ControlResult(call_id=message.call_id, weight_version="7", weight_digest="d")


class PlayedLearner:
    """The handle of a learner that does whatever it is told."""

    class Call:
        def __init__(self, answer: Any) -> None:
            self._answer = answer

        async def remote(self, *arguments: Any) -> Any:
            return self._answer

    ask = Call(Answer(call_id="", text="done"))
    reward = Call(None)


def build_app() -> FastAPI:
    memory = RolloutMemory(MemoryLimits(max_tokens=1 << 12))
    gateway = build_gateway(FakeBackend(few_tokens), build_tokenizer(), rollouts=True, learns=True, memory=memory)
    played = PlayedFleet()
    learners = LearnerControl({"drafters": PlayedLearner()}, lambda: played.snapshot)
    app = build_api(gateway, healthy)
    doors = TrainerDoors(
        every=EveryGateway(gateway),
        fleet=FleetControl(played, played.call, played.call),
        is_healthy=healthy,
        model_path="m",
        tensor_parallel_size=1,
        learners=learners,
    )
    add_trainer_routes(app, doors)
    add_learner_status(app, learners)
    add_learner_actions(app, learners)
    return app


APP = build_app()


def check(path: str, answer: httpx.Response, target: str) -> None:
    """Check an answer; SGLang's own doors say what failed in a form of theirs."""
    content_type = answer.headers.get("content-type", "").partition(";")[0]
    if answer.status_code == 400 and answer.json().keys() == {"success", "message", "num_paused_requests"}:
        assert path in SGLANGS
        refusal = json.loads(answer.content, parse_constant=refuse_constant)
        assert refusal["success"] is False
        assert refusal["message"]
        TALLY.count(target, "400")
        return
    check_answer(answer.status_code, answer.content, content_type, target)


SGLANGS = tuple(path for path in PATHS if path.startswith(("/update_weights_from", "/init_", "/destroy_")))


async def send(path: str, content: bytes, target: str, headers: dict[str, str] | None = None) -> None:
    transport = httpx.ASGITransport(RequestIdMiddleware(APP))
    async with httpx.AsyncClient(transport=transport, base_url="http://g") as client:
        check(path, await client.post(path, content=content, headers=headers), target)
        kept = await client.get("/v1/rollouts/history")
    assert kept.status_code == 200
    for line in kept.text.splitlines():
        json.loads(line, parse_constant=refuse_constant)


def test_every_body_is_good_as_it_stands() -> None:
    """Else the targets below would try refusals alone."""

    async def statuses() -> dict[str, int]:
        transport = httpx.ASGITransport(APP)
        async with httpx.AsyncClient(transport=transport, base_url="http://g") as client:
            return {path: (await client.post(path, json=body)).status_code for path, body in BODIES.items()}

    found = asyncio.run(statuses())
    assert set(found.values()) == {200}, found


@examples(300)
@given(st.sampled_from(PATHS).flatmap(lambda p: st.tuples(st.just(p), plausible_bodies(p, BODIES, TRAINERS_NAMES))))
@example(("/update_weights_from_disk", b'{"model_path": "f", "weight_version": "' + b"9" * 5000 + b'"}'))
def test_plausible_bodies_of_trainers(request: tuple[str, bytes]) -> None:
    asyncio.run(send(*request, "HTTP: trainers, plausible bodies"))


@examples(400)
@given(st.sampled_from(PATHS).flatmap(lambda p: st.tuples(st.just(p), bodies_with_one_wrong_place(p, BODIES))))
def test_trainers_bodies_with_one_wrong_place(request: tuple[str, bytes]) -> None:
    asyncio.run(send(*request, "HTTP: trainers, one wrong place"))


@examples(200)
@given(
    st.sampled_from(PATHS).flatmap(lambda p: st.tuples(st.just(p), spoilt_bodies(p, BODIES) | st.binary(max_size=60))),
    st.sampled_from(("application/json", "application/jsonl", "text/plain")),
)
def test_spoilt_bodies_of_trainers(request: tuple[str, bytes], content_type: str) -> None:
    asyncio.run(send(*request, "HTTP: trainers, spoilt bodies", {"content-type": content_type}))
