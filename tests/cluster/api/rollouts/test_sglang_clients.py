"""Others that speak SGLang's native set: TorchRL, AReaL, verl, and SGLang's own client."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import requests

from fakes.trainers.sglang import (
    AsyncSGLang,
    RuntimeEndpoint,
    SGLangCollectiveTransport,
    areal_bodies,
    verl_body,
)
from tiny.rollout_service import Reference, RolloutService

PROMPT = [7, 20, 31, 8, 99, 120]


def post(service: RolloutService, path: str, body: dict[str, Any]) -> Any:
    answer = requests.post(f"{service.url}/{path}", json=body)
    answer.raise_for_status()
    return answer.json() if answer.content else None


def load_of(service: RolloutService) -> dict[str, Any]:
    answer = requests.get(f"{service.url}/get_load")
    answer.raise_for_status()
    (load,) = answer.json()
    return dict(load)


def test_torchrl_connects_and_generates(service: RolloutService, old: Reference):
    engine = AsyncSGLang.connect(service.url)
    assert (engine.get_tp_size(), engine.get_dp_size()) == (1, 1)
    outputs = engine.generate(input_ids=[PROMPT, [11, 12]], return_logprobs=True, temperature=0.0, max_tokens=6)
    assert [output["output_ids"] for output in outputs] == [old.greedy(PROMPT, 6), old.greedy([11, 12], 6)]
    assert [item[1] for item in outputs[0]["meta_info"]["output_token_logprobs"]] == outputs[0]["output_ids"]
    assert engine.flush_cache() is True


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
def test_torchrl_pauses_until_nothing_runs(service: RolloutService, mode: str):
    transport = SGLangCollectiveTransport(
        service.url, master_address="127.0.0.1", master_port=1, rank=0, world_size=2, timeout=20.0, pause_mode=mode
    )
    outputs: list[Any] = []
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 240, "temperature": 0.0, "ignore_eos": True}}
    thread = threading.Thread(target=lambda: outputs.append(post(service, "generate", body)))
    thread.start()
    deadline_s = time.monotonic() + 20.0
    while not load_of(service)["num_running_reqs"] and time.monotonic() < deadline_s:
        time.sleep(0.01)
    transport._pause_generation_for_update("policy")
    load = load_of(service)
    assert (load["num_running_reqs"], load["num_reqs"]) == (0, 0 if mode == "abort" else 1)
    transport._continue_generation_after_update("policy")
    thread.join(30.0)
    assert outputs[0]["meta_info"]["finish_reason"]["type"] == ("abort" if mode == "abort" else "length")


def test_areal_generates_scores_and_updates(service: RolloutService, old: Reference, new: Reference):
    bodies = areal_bodies(PROMPT, str(service.new))
    output = post(service, "generate", bodies["generate"])
    assert [item[1] for item in output["meta_info"]["output_token_logprobs"]] == old.greedy(PROMPT, 8)
    scored = post(service, "generate", bodies["score"])["meta_info"]["input_token_logprobs"]
    assert [item[1] for item in scored] == PROMPT[2:]
    assert [float(item[0]) for item in scored[-3:]] == pytest.approx(old.logprobs(PROMPT)[-3:], abs=1e-4)
    assert post(service, "update_weights_from_disk", bodies["update"])["success"] is True
    output = post(service, "generate", bodies["generate"])
    assert output["output_ids"] == new.greedy(PROMPT, 8)
    assert output["meta_info"]["weight_version"] == "1", "it names no version: they are numbered"


def test_areals_port_is_a_text(service: RolloutService):
    group = {"master_address": "127.0.0.1", "master_port": "1", "rank_offset": 1, "world_size": 2, "pp_rank": 0}
    answer = requests.post(f"{service.url}/init_weights_update_group", json=group | {"backend": "mpi"})
    assert (answer.status_code, answer.json()["success"]) == (400, False)
    assert "backend must be one of" in answer.json()["message"], "the port is read"


def test_verl_names_every_field(service: RolloutService, old: Reference):
    assert post(service, "generate", verl_body(PROMPT))["output_ids"] == old.greedy(PROMPT, 8)
    assert post(service, "abort_request", {"rid": "", "abort_all": True}) is None
    refused = requests.post(f"{service.url}/update_weights_from_tensor", json={"serialized_named_tensors": []})
    assert refused.status_code == 400
    assert "pickled" in refused.json()["error"]["message"]


def test_sglangs_own_client(service: RolloutService):
    endpoint = RuntimeEndpoint(service.url)
    assert endpoint.get_model_name() == str(service.old)
    assert endpoint.get_server_info()["tp_size"] == 1
    endpoint.cache_prefix("0 1")
    endpoint.flush_cache()
