"""What a drafter is told of a request: whether it may learn from it, and whether it may keep anything at all.

Every door of the service, with keys in front; then the wire to a verifier, the coordinator, and the wire to a drafter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import pytest

from fakes.backend import FakeBackend, build_gateway
from fakes.engine_bench import MemoryDrafts
from outrider.cluster.api.authentication import ApiKeyInterceptor, ApiKeyMiddleware
from outrider.cluster.api.grpc_api import start_grpc_server
from outrider.cluster.api.openai.endpoints import build_api
from outrider.cluster.api.rollouts.doors import TrainerDoors
from outrider.cluster.api.rollouts.trainer_routes import add_trainer_routes
from outrider.cluster.common.api_keys import PARTITION_CHARS, ApiKeys, hash_api_key
from outrider.cluster.gateway.journal import Journal
from outrider.cluster.gateway.learner_control import LearnerControl
from outrider.cluster.gateway.rollout_memory import RolloutMemory
from outrider.cluster.peers.every_gateway import EveryGateway
from outrider.proto import generation_pb2 as pb
from outrider.proto import generation_pb2_grpc
from outrider.verifier_service.drafting.coordinator import CoordinatorConfig, DraftCoordinator
from outrider.verifier_service.messages.draft import DrafterEvent, Open
from outrider.verifier_service.messages.link import VERIFIER_MESSAGES
from outrider.verifier_service.messages.request import GenerationRequest, Request, SpeculationPlan
from outrider.verifier_service.messages.wire import decode, encode

KEYS = ApiKeys([hash_api_key("plain"), f"{hash_api_key('never')}:never", f"{hash_api_key('salted')}:salted"])
PLAN = SpeculationPlan(drafter_id="d", draft_length=2)
Send = Callable[..., Awaitable[None]]  # of a key and fields of the body


def opening_of(request: GenerationRequest, *, rollouts: bool) -> Open:
    """Return what a drafter gets of a request that has gone over the wire."""
    longer = dataclasses.replace(request.sampling, max_tokens=8)  # room for a draft
    sent = dataclasses.replace(request, plan=PLAN, sampling=longer)
    request = decode(encode(sent), (GenerationRequest,))
    drafts = MemoryDrafts()
    coordinator = DraftCoordinator(drafts, CoordinatorConfig(vocab_size=400, max_model_len=64, rollouts=rollouts))
    drafts.events = [DrafterEvent(drafter_id="d", vocab_size=400)]
    coordinator.receive({}, 0.0)
    coordinator.ask([Request.of(request, 0.0)], 0.0)
    (opening,) = [message for _, message in drafts.take() if isinstance(message, Open)]
    return decode(encode(opening), VERIFIER_MESSAGES)


class Service:
    """All doors of one gateway; the drafter writes down how sessions are opened."""

    def __init__(self, tokenizer: Any, *, learns: bool = True, rollouts: bool = False) -> None:
        self.rollouts = rollouts
        self.backend = FakeBackend(lambda _: [[5]])
        memory = RolloutMemory() if rollouts else None
        self.gateway = build_gateway(self.backend, tokenizer, learns=learns, rollouts=rollouts, memory=memory)
        self._app = build_api(self.gateway, self._healthy)
        if rollouts:
            fleet: Any = SimpleNamespace(reported_version="")
            doors = TrainerDoors(
                every=EveryGateway(self.gateway),
                fleet=fleet,
                is_healthy=self._healthy,
                model_path="m",
                tensor_parallel_size=1,
                learners=LearnerControl({}, lambda: None),
            )
            add_trainer_routes(self._app, doors)

    async def _healthy(self) -> bool:
        return True

    async def post(self, path: str, key: str, body: dict[str, Any]) -> dict[str, Any]:
        app = ApiKeyMiddleware(self._app, KEYS)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
            answer = await client.post(path, json=body, headers={"x-api-key": key})
        assert answer.status_code == 200, answer.text
        return answer.json()

    @asynccontextmanager
    async def channel(self) -> AsyncIterator[grpc.aio.Channel]:
        running = await start_grpc_server(self.gateway, "127.0.0.1:0", interceptors=[ApiKeyInterceptor(KEYS)])
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel:
                yield channel
        finally:
            await running.server.stop(None)

    def opening(self) -> Open:
        """Return how the last request's session is opened."""
        (request,) = self.backend.requests
        self.backend.requests.clear()
        return opening_of(request, rollouts=self.rollouts)


async def completions(service: Service, key: str, **fields: Any) -> None:
    await service.post("/v1/completions", key, {"prompt": "the", "max_tokens": 1, **fields})


async def chat(service: Service, key: str, **fields: Any) -> None:
    messages = [{"role": "user", "content": "the"}]
    await service.post("/v1/chat/completions", key, {"messages": messages, "max_tokens": 1, **fields})


async def responses(service: Service, key: str, **fields: Any) -> None:
    await service.post("/v1/responses", key, {"input": "the", "max_output_tokens": 1, **fields})


async def anthropic(service: Service, key: str, **fields: Any) -> None:
    messages = [{"role": "user", "content": "the"}]
    await service.post("/v1/messages", key, {"messages": messages, "max_tokens": 1, **fields})


async def native(service: Service, key: str, **fields: Any) -> None:
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}, "rid": "r", **fields}
    await service.post("/generate", key, body)


async def tokens(service: Service, key: str, **fields: Any) -> None:
    body = {"token_ids": [5], "sampling_params": {"max_tokens": 1}, **fields}
    await service.post("/inference/v1/generate", key, body)


async def tokens_of_vllms_names(service: Service, key: str, **fields: Any) -> None:
    """Say everything among the sampling parameters, as a client may who takes them for a completion's."""
    body = {"token_ids": [5], "sampling_params": {"max_tokens": 1, **fields}}
    await service.post("/inference/v1/generate", key, body)


async def grpc_unary(service: Service, key: str, **fields: Any) -> None:
    request = pb.GenerateRequest(text="the", sampling=pb.SamplingParams(max_tokens=1), **fields)
    async with service.channel() as channel:
        await generation_pb2_grpc.InferenceStub(channel).GenerateUnary(request, metadata=(("x-api-key", key),))


async def grpc_stream(service: Service, key: str, **fields: Any) -> None:
    request = pb.GenerateRequest(text="the", sampling=pb.SamplingParams(max_tokens=1), **fields)
    async with service.channel() as channel:
        async for _ in generation_pb2_grpc.InferenceStub(channel).Generate(request, metadata=(("x-api-key", key),)):
            pass


async def vllm_grpc(service: Service, key: str, **fields: Any) -> None:
    generated = pytest.importorskip("smg_grpc_proto.generated.vllm_engine_pb2")
    stubs = pytest.importorskip("smg_grpc_proto.generated.vllm_engine_pb2_grpc")
    request = generated.GenerateRequest(
        request_id="r",
        tokenized=generated.TokenizedInput(input_ids=[5]),
        sampling_params=generated.SamplingParams(max_tokens=1),
    )
    names = ((f"x-outrider-{name.replace('_', '-')}", str(value).lower()) for name, value in fields.items())
    async with service.channel() as channel:
        call = stubs.VllmEngineStub(channel).Generate(request, metadata=(("x-api-key", key), *names))
        async for _ in call:
            pass


DOORS = (completions, chat, responses, anthropic, grpc_unary, grpc_stream, vllm_grpc)
TRAINERS_DOORS = (native, tokens, tokens_of_vllms_names)
RULES = [  # key, fields, may it be learned from, may anything be kept
    ("plain", {}, True, True),
    ("plain", {"store": True}, True, True),
    ("plain", {"store": False}, False, False),
    ("plain", {"cache_salt": "s"}, False, True),
    ("plain", {"cache_salt": ""}, True, True),
    ("never", {}, False, False),
    ("never", {"store": True}, False, False),
    ("salted", {}, True, True),
    ("salted", {"cache_salt": "s"}, True, True),
    ("salted", {"cache_salt": "s", "store": False}, False, False),
]


@pytest.mark.parametrize("door", DOORS)
async def test_every_door_follows_every_rule(tokenizer: Any, door: Send):
    service = Service(tokenizer)
    for key, fields, may_learn, is_kept in RULES:
        await door(service, key, **fields)
        opening = service.opening()
        assert opening.may_learn is may_learn, (key, fields)
        assert (opening.history is None) is is_kept, (key, fields)
        assert opening.history is None or opening.history.key == ""
        shown = KEYS.admit([("x-api-key", key)])
        assert shown is not None
        assert len(shown.partition) == PARTITION_CHARS
        salt = shown.partition + fields.get("cache_salt", "")
        assert opening.cache_salt == salt, "whatever is learned stays within its key and salt"


@pytest.mark.parametrize("door", [*DOORS, *TRAINERS_DOORS])
async def test_in_rollouts_a_salt_is_a_version_and_closes_nothing(tokenizer: Any, door: Send):
    service = Service(tokenizer, rollouts=True)
    for key, fields, may_learn, is_kept in RULES:
        await door(service, key, **fields)
        opening = service.opening()
        assert opening.may_learn is (may_learn or bool(is_kept and fields.get("cache_salt"))), (key, fields)
        assert opening.history is not None
        assert bool(opening.history.key) is is_kept, (key, fields)


@pytest.mark.parametrize("door", DOORS)
async def test_where_no_pool_learns_no_request_is_learned_from(tokenizer: Any, door: Send):
    service = Service(tokenizer, learns=False)
    for key, fields, _, _ in RULES:
        await door(service, key, **fields)
        assert not service.opening().may_learn, (key, fields)


async def test_without_keys_requests_alone_decide(tokenizer: Any):
    service = Service(tokenizer)
    app = httpx.ASGITransport(service._app)
    async with httpx.AsyncClient(transport=app, base_url="http://gateway") as client:
        for fields, may_learn in (({}, True), ({"store": False}, False), ({"cache_salt": "s"}, False)):
            await client.post("/v1/completions", json={"prompt": "the", "max_tokens": 1, **fields})
            assert service.opening().may_learn is may_learn


async def test_a_keys_policy_ends_with_its_call(tokenizer: Any):
    service = Service(tokenizer)
    for key, may_learn in (("plain", True), ("never", False), ("plain", True)) * 2:
        await completions(service, key)
        assert service.opening().may_learn is may_learn


async def test_all_prompts_and_choices_of_a_body_are_alike(tokenizer: Any):
    service = Service(tokenizer)
    for key, may_learn in (("plain", True), ("never", False)):
        await completions(service, key, prompt=["the", "fox"], n=2)
        assert [request.may_learn for request in service.backend.requests] == [may_learn] * 4
        service.backend.requests.clear()


async def test_a_request_that_moves_to_another_verifier_takes_its_permission_along(tokenizer: Any):
    service = Service(tokenizer)
    for key, may_learn in (("plain", True), ("never", False)):
        await completions(service, key)
        (request,) = service.backend.requests
        service.backend.requests.clear()
        moved = Journal(request=request, model=service.gateway.model).continuation("second", PLAN)
        opening = opening_of(moved, rollouts=False)
        assert (opening.may_learn, opening.history is None) == (may_learn, may_learn)


async def test_of_a_key_that_forbids_it_no_response_is_stored(tokenizer: Any):
    service = Service(tokenizer)
    for key, is_stored in (("plain", True), ("never", False)):
        answer = await service.post("/v1/responses", key, {"input": "the", "max_output_tokens": 1, "store": True})
        assert answer["store"] is is_stored
        app = httpx.ASGITransport(service._app)
        async with httpx.AsyncClient(transport=app, base_url="http://gateway") as client:
            found = await client.get(f"/v1/responses/{answer['id']}")
        assert found.status_code == (200 if is_stored else 404)
