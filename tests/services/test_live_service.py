"""The whole service with real processes, through its public ports. Its failures: test_failures.py."""

from __future__ import annotations

import urllib.request
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.drafter_service.embedded import held_out_prompts
from outrider.proto import generation_pb2, generation_pb2_grpc
from services.live_service import LiveService, SharedRay
from services.load_tools import loaded_service

pytestmark = pytest.mark.service

PROMPT = held_out_prompts()[0]


@pytest.fixture(scope="module")
def service(shared_ray: SharedRay) -> LiveService:
    return loaded_service(shared_ray)


def test_openai_client_streams_and_speculation_does_not_change_greedy_text(service: LiveService):
    client = openai.OpenAI(base_url=f"{service.base_url}/v1", api_key="unused")
    texts = []
    for disable in (True, False):
        stream = client.completions.create(
            model=service.config.model.name,
            prompt=PROMPT,
            max_tokens=64,
            temperature=0,
            stream=True,
            extra_body={"disable_spec_decode": disable},
        )
        texts.append("".join(chunk.choices[0].text for chunk in stream))
    assert texts[0] == texts[1] != ""


def test_openai_chat_and_model_list(service: LiveService):
    client = openai.OpenAI(base_url=f"{service.base_url}/v1", api_key="unused")
    assert [model.id for model in client.models.list()] == [service.config.model.name]
    answer = client.chat.completions.create(
        model=service.config.model.name, messages=[{"role": "user", "content": "def add(a, b):"}], max_tokens=8
    )
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= 8


def test_a_page_of_another_origin_may_ask(service: LiveService):
    asked = {"origin": "http://elsewhere", "access-control-request-method": "POST"}
    answer = httpx.options(f"{service.base_url}/v1/chat/completions", headers=asked)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "*"


def test_opt_out_says_why(service: LiveService):
    speculation = service.stream(PROMPT, max_tokens=16, num_speculative_tokens=0).speculation
    assert speculation["enabled"] is False
    assert speculation["disabled_reason"] == "request_opt_out"
    assert speculation["num_drafts"] == 0


def test_grpc_equals_http(service: LiveService):
    with grpc.insecure_channel(service.grpc_address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert check.status == health_pb2.HealthCheckResponse.SERVING
        sampling = generation_pb2.SamplingParams(max_tokens=64, temperature=0.0)
        request = generation_pb2.GenerateRequest(text=PROMPT, sampling=sampling)
        text = "".join(chunk.text for chunk in generation_pb2_grpc.InferenceStub(channel).Generate(request))
    assert text == service.stream(PROMPT, max_tokens=64).text


def test_metrics_and_health(service: LiveService):
    metrics = urllib.request.urlopen(f"{service.base_url}/metrics").read().decode()
    assert "vllm:generation_tokens_total" in metrics
    assert urllib.request.urlopen(f"{service.base_url}/health").status == 200


@pytest.mark.parametrize("path", ["/health", "/v1/models/none"])
def test_the_request_id_is_echoed_once(service: LiveService, path: str):
    answer = httpx.get(f"{service.base_url}{path}", headers={"X-Request-Id": "mine"})
    assert answer.headers.get_list("x-request-id") == ["mine"]


def test_seeded_text_is_the_same_alone_and_in_company(service: LiveService):
    alone = service.stream(PROMPT, max_tokens=48, temperature=0.8, seed=7).text
    off = service.stream(PROMPT, max_tokens=48, temperature=0.8, seed=7, disable_spec_decode=True).text
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(service.stream, PROMPT, max_tokens=48, temperature=0.8, seed=seed) for seed in range(8)]
        texts = [future.result().text for future in futures]
    assert texts[7] == alone == off
    assert len(set(texts)) == 8


def test_client_that_leaves_frees_kv_and_session(service: LiveService):
    class Leave(Exception):
        pass

    def leave(num_chunks: int) -> None:
        if num_chunks == 3:
            raise Leave

    with pytest.raises(Leave):
        service.stream(PROMPT, max_tokens=800, ignore_eos=True, on_chunk=leave)
    service.wait_until_idle(timeout_s=1.5)  # half a second, the verifier's report of it, and the question
