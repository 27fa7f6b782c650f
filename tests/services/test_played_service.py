"""A service whose verifier plays: what a script says goes the whole way, over both doors, and so do calls of tools."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import grpc
import httpx
import pytest

from outrider.cluster.config.service_config import ServiceConfig
from outrider.lab.gateway.played_service import played_spec, scripted
from outrider.lab.gateway.played_spec import MAX_MODEL_LEN, PlayedSpec
from outrider.proto import generation_pb2, generation_pb2_grpc
from outrider.verifier_service.model.tokenizer import load_tokenizer
from services.live_service import LiveService, SharedRay

pytestmark = [pytest.mark.service, pytest.mark.timeout(300)]

CALL = {"name": "find", "arguments": {"path": "a.py"}}
# as the family writes it: the grammar of calls, which is the real one, takes nothing else
ANSWERS = ("Nothing was found.", f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>")
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": PARAMETERS}}]


def script_of(config: ServiceConfig) -> PlayedSpec:
    spec = played_spec(config, step_s=0.001)
    return dataclasses.replace(spec, says=scripted(load_tokenizer(spec.verifier.model), ANSWERS))


@pytest.fixture(scope="module")
def service(shared_ray: SharedRay) -> LiveService:
    options: dict[str, Any] = {"speculation": "off", "num_speculative_tokens": 0, "tool_call_parser": "hermes"}
    return shared_ray.service(wait_for_drafts=False, main=script_of, **options)


def test_a_script_goes_the_whole_way_over_both_doors(service: LiveService) -> None:
    model = service.config.model.name
    with httpx.Client(base_url=service.base_url, timeout=60.0) as client:
        (listed,) = client.get("/v1/models").json()["data"]
        assert listed["max_model_len"] == MAX_MODEL_LEN
        said = client.post("/v1/completions", json={"model": model, "prompt": "find it", "max_tokens": 64}).json()
        assert (said["choices"][0]["text"], said["choices"][0]["finish_reason"]) == (ANSWERS[0], "stop")
        body = {"model": model, "messages": [{"role": "user", "content": "find it"}], "tools": TOOLS, "max_tokens": 64}
        (choice,) = client.post("/v1/chat/completions", json=body).json()["choices"]
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert {**call["function"], "arguments": json.loads(call["function"]["arguments"])} == CALL
    with grpc.insecure_channel(service.grpc_address) as channel:
        stub = generation_pb2_grpc.InferenceStub(channel)
        sampling = generation_pb2.SamplingParams(max_tokens=64)
        chunks = list(stub.Generate(generation_pb2.GenerateRequest(text="find it", sampling=sampling), timeout=60.0))
    assert "".join(chunk.text for chunk in chunks) == ANSWERS[0]
    service.wait_until_idle()
