"""What a drafter is told of a request: whether it may learn from it, and whether it may keep anything at all.

Every door of the service, with keys in front; then the wire to a verifier, the coordinator, and the wire to a drafter.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest

from fakes.engine_bench import MemoryDrafts
from outrider.cluster.api.authentication import ApiKeyMiddleware
from outrider.cluster.common.api_keys import PARTITION_CHARS, ApiKeys, hash_api_key
from outrider.cluster.gateway.journal import Journal
from outrider.cluster.gateway.rollout_memory import RolloutMemory
from outrider.verifier_service.drafting.asking import CoordinatorConfig
from outrider.verifier_service.drafting.coordinator import DraftCoordinator
from outrider.verifier_service.messages.draft import DrafterEvent, Open
from outrider.verifier_service.messages.link import VERIFIER_MESSAGES
from outrider.verifier_service.messages.request import GenerationRequest, Request, SpeculationPlan
from outrider.verifier_service.messages.wire import decode, encode
from support.doors import SERVED_DOORS, Call, Completions, Door, Sglang, VllmTokens
from support.stack import Stack

KEYS = ApiKeys([hash_api_key("plain"), f"{hash_api_key('never')}:never", f"{hash_api_key('salted')}:salted"])
PLAN = SpeculationPlan(drafter_id="d", draft_length=2)
COMPLETIONS = Completions()


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

    def __init__(self, *, learns: bool = True, rollouts: bool = False) -> None:
        self.stack = Stack([[5]], learns=learns, rollouts=rollouts, memory=RolloutMemory() if rollouts else None)

    async def ask(self, door: Door, key: str, **fields: Any) -> None:
        await door.send(self.stack, Call(keys=KEYS if key else None, key=key), **fields)

    def opening(self) -> Open:
        """Return how the last request's session is opened."""
        (request,) = self.stack.requests
        self.stack.requests.clear()
        return opening_of(request, rollouts=self.stack.gateway.model.rollouts)


class TokensByVllmsNames(VllmTokens):
    """Say everything among the sampling parameters, as a client may who takes them for a completion's."""

    name = "vllm-http, one dictionary"
    outside: ClassVar[frozenset[str]] = frozenset()


IN_ROLLOUTS = (*SERVED_DOORS, TokensByVllmsNames())
SERVED = tuple(door for door in SERVED_DOORS if not isinstance(door, Sglang | VllmTokens))
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


@pytest.mark.parametrize("door", SERVED, ids=repr)
async def test_every_door_follows_every_rule(door: Door):
    service = Service()
    for key, fields, may_learn, is_kept in RULES:
        await service.ask(door, key, **fields)
        opening = service.opening()
        assert opening.may_learn is may_learn, (key, fields)
        assert (opening.history is None) is is_kept, (key, fields)
        assert opening.history is None or opening.history.key == ""
        shown = KEYS.admit([("x-api-key", key)])
        assert shown is not None
        assert len(shown.partition) == PARTITION_CHARS
        salt = shown.partition + fields.get("cache_salt", "")
        assert opening.cache_salt == salt, "whatever is learned stays within its key and salt"


@pytest.mark.parametrize("door", IN_ROLLOUTS, ids=repr)
async def test_in_rollouts_a_salt_is_a_version_and_closes_nothing(door: Door):
    service = Service(rollouts=True)
    for key, fields, may_learn, is_kept in RULES:
        await service.ask(door, key, **fields)
        opening = service.opening()
        assert opening.may_learn is (may_learn or bool(is_kept and fields.get("cache_salt"))), (key, fields)
        assert opening.history is not None
        assert bool(opening.history.key) is is_kept, (key, fields)


@pytest.mark.parametrize("door", SERVED, ids=repr)
async def test_where_no_pool_learns_no_request_is_learned_from(door: Door):
    service = Service(learns=False)
    for key, fields, _, _ in RULES:
        await service.ask(door, key, **fields)
        assert not service.opening().may_learn, (key, fields)


async def test_without_keys_requests_alone_decide():
    service = Service()
    for fields, may_learn in (({}, True), ({"store": False}, False), ({"cache_salt": "s"}, False)):
        await service.ask(COMPLETIONS, "", **fields)
        assert service.opening().may_learn is may_learn


async def test_a_keys_policy_ends_with_its_call():
    service = Service()
    for key, may_learn in (("plain", True), ("never", False), ("plain", True)) * 2:
        await service.ask(COMPLETIONS, key)
        assert service.opening().may_learn is may_learn


async def test_all_prompts_and_choices_of_a_body_are_alike():
    service = Service()
    for key, may_learn in (("plain", True), ("never", False)):
        await service.ask(COMPLETIONS, key, prompt=["the", "fox"], n=2)
        assert [request.may_learn for request in service.stack.requests] == [may_learn] * 4
        service.stack.requests.clear()


async def test_a_request_that_moves_to_another_verifier_takes_its_permission_along():
    service = Service()
    for key, may_learn in (("plain", True), ("never", False)):
        await service.ask(COMPLETIONS, key)
        (request,) = service.stack.requests
        service.stack.requests.clear()
        moved = Journal(request=request, model=service.stack.gateway.model).continuation("second", PLAN)
        opening = opening_of(moved, rollouts=False)
        assert (opening.may_learn, opening.history is None) == (may_learn, may_learn)


async def test_of_a_key_that_forbids_it_no_response_is_stored():
    service = Service()
    for key, is_stored in (("plain", True), ("never", False)):
        body = {"input": "the", "max_output_tokens": 1, "store": True}
        async with service.stack.client(lambda app: ApiKeyMiddleware(app, KEYS)) as client:
            answer = (await client.post("/v1/responses", json=body, headers={"x-api-key": key})).json()
        assert answer["store"] is is_stored
        async with service.stack.client() as client:
            found = await client.get(f"/v1/responses/{answer['id']}")
        assert found.status_code == (200 if is_stored else 404)
