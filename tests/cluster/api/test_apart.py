"""Whether one client's texts or counts tell of another's: the embedded target with look-ups, behind keys.

The attacks are those of a review: `typical` at temperature 100 takes whatever is drafted, and the prefix cache counts
how much of a guess was asked before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import httpx
from prometheus_client import CollectorRegistry

from outrider.cluster.api.authentication import ApiKeyMiddleware
from outrider.cluster.api.openai.endpoints import build_api
from outrider.cluster.common.api_keys import ApiKeys, hash_api_key
from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.gateway.gateway import Gateway
from outrider.cluster.gateway.request_parser import ModelInfo
from outrider.cluster.monitoring.metrics import GatewayMetrics
from outrider.cluster.offline.engine import OfflineEngine
from outrider.verifier_service.messages.request import GenerationRequest, RequestOutput, SpeculationPlan
from outrider.verifier_service.model.tokenizer import load_tokenizer

SECRET = "Dear John, password = 'hunter2-7319'; token = 'AKIA5XQ'"
VICTIM = {"prompt": "Write to John, whose account is 4711, about his new password, please.", "max_tokens": 60}


class OneByOne:
    """A backend whose engine runs one request at a time, and drafts four tokens wherever it can."""

    def __init__(self) -> None:
        self.engine = OfflineEngine(ServiceConfig(speculative_config={"method": "suffix", "location": "verifier"}))

    async def generate(self, request: GenerationRequest, hear: Callable[[RequestOutput], None]) -> None:
        plan = SpeculationPlan(draft_length=4, is_pinned=True)
        for output in self.engine.generate([dataclasses.replace(request, plan=plan)]):
            hear(output)


def application(backend: OneByOne, *, shares: bool = False) -> ApiKeyMiddleware:
    engine = backend.engine
    tokenizer = load_tokenizer(engine.config.verifier_spec.model)
    model = ModelInfo(
        name="m",
        max_model_len=engine.max_model_len,
        vocab_size=len(tokenizer),
        eos_token_ids=tuple(engine.eos_token_ids),
        created=0,
        allows_lossy=True,
    )
    metrics = GatewayMetrics(CollectorRegistry(), model_name="m")
    gateway = Gateway(model, tokenizer, backend, metrics, lambda: 0.0)

    async def healthy() -> bool:
        return True

    keys = ApiKeys([hash_api_key(key) for key in ("victim", *ATTACKS)], shares=shares)
    return ApiKeyMiddleware(build_api(gateway, healthy), keys)


async def told(app: ApiKeyMiddleware, key: str, **body: Any) -> dict[str, Any]:
    """Return all that a client is told, but for names and times."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        fields = {"return_token_ids": True, "logprobs": None, **body}
        answer = await client.post("/v1/completions", json=fields, headers={"x-api-key": key})
    assert answer.status_code == 200, answer.text
    return {name: value for name, value in answer.json().items() if name not in ("id", "created")}


REGEX = {"structured_outputs": {"regex": r"password = 'hunter2(.|\n)*"}}
FLAT = {"prompt": "x", "temperature": 100.0, "max_tokens": 24, **REGEX}
ATTACKS: dict[str, dict[str, Any]] = {
    "whatever is drafted is said": {**FLAT, "rejection_sample_method": "typical", "seed": 7},
    "by the standard rule": {**FLAT, "seed": 7},
    "by greedy tokens": {**FLAT, "temperature": 0.0},
    "a guess of the prompt": {"prompt": VICTIM["prompt"], "max_tokens": 1, "temperature": 0.0},
    "a guess of the answer": {"prompt": "my password = 'hunter2-7319'; tok", "max_tokens": 24, "temperature": 0.0},
}


async def all_told(*, after_victim: bool, shares: bool) -> dict[str, dict[str, Any]]:
    """Let a key for each attack try it; with `shares` all keys have one partition."""
    backend = OneByOne()
    with backend.engine:
        app = application(backend, shares=shares)
        if after_victim:
            answer = await told(app, "victim", **VICTIM, structured_outputs={"choice": [SECRET]})
            assert answer["choices"][0]["text"] == SECRET
        answers = {name: await told(app, name, **attack) for name, attack in ATTACKS.items()}
        backend.engine.engine.check_integrity()
    return answers


def counts(answer: dict[str, Any]) -> tuple[int, int, int]:
    """Return the prompt's cached tokens, and how many were drafted and accepted."""
    drafts = answer["metrics"]["speculative_decoding"]
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached, drafts["num_draft_tokens"], drafts["num_accepted_tokens"]


async def test_nothing_that_a_client_is_told_depends_on_another_keys_requests():
    alone = await all_told(after_victim=False, shares=False)
    assert await all_told(after_victim=True, shares=False) == alone


async def test_within_one_partition_counts_tell_but_a_lossy_rule_says_no_text_of_others():
    alone = await all_told(after_victim=False, shares=True)
    after = await all_told(after_victim=True, shares=True)
    lossy = "whatever is drafted is said"
    assert after[lossy] == alone[lossy]
    told_apart = {name for name in ATTACKS if counts(after[name]) != counts(alone[name])}
    assert told_apart >= {"a guess of the prompt", "by the standard rule"}, "else the test above could not fail"
