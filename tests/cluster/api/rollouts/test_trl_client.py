"""TRL at the doors: what it asks before it begins, completions by token ids, pause and resume around an update."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import requests

from fakes.trainers.trl import GenerationClient, VLLMClient, completion_body
from tiny.rollout_service import Reference, RolloutService
from tiny.trained_fleet import MAX_MODEL_LEN

PROMPT = [7, 20, 31, 8, 99, 120]


@pytest.fixture
def client(service: RolloutService) -> Any:
    return VLLMClient(service.url, server_timeout=5.0)


def complete(service: RolloutService, **options: Any) -> tuple[list[int], list[float]]:
    """Return what TRL's worker reads: tokens and their log probabilities."""
    answer = requests.post(f"{service.url}/v1/completions", json=completion_body(PROMPT, **options))
    answer.raise_for_status()
    choice = answer.json()["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def test_what_the_trainer_asks_before_it_begins(client: Any):
    client.wait_for_server_ready(poll_interval_s=0.1)
    assert client.get_max_model_len() == MAX_MODEL_LEN
    assert client.get_dtype().removeprefix("torch.") == "float32"
    assert client.get_world_size() == 1
    info = client.get_server_info()
    assert info["lora_config"] is None, "the weights are sent whole"
    assert info["parallel_config"]["data_parallel_size"] == 1


def test_completions_have_the_drawn_laws_log_probabilities(service: RolloutService, old: Reference):
    token_ids, logprobs = complete(service, temperature=0.6)
    assert logprobs == pytest.approx(old.logprobs(PROMPT + token_ids, 0.6)[len(PROMPT) - 1 :], abs=1e-4)
    assert complete(service, temperature=0.6) == (token_ids, pytest.approx(logprobs, abs=1e-4)), "by a seed of 63 bits"
    assert complete(service, temperature=0.0)[0] == old.greedy(PROMPT, 16)


def test_a_request_is_frozen_and_goes_on(service: RolloutService, client: Any, old: Reference):
    client.pause(timeout=20)
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(complete(service, temperature=0.0)))
    thread.start()
    client.pause(timeout=20)
    assert requests.get(f"{service.url}/is_paused").json() == {"is_paused": True}
    assert not answers
    client.resume(timeout=20)
    thread.join(20.0)
    assert answers[0][0] == old.greedy(PROMPT, 16)


def test_the_pickled_transfer_is_refused_by_name_and_a_folder_is_taken(
    service: RolloutService, client: Any, old: Reference, new: Reference
):
    where = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "packed": True}
    client.pause(timeout=20)
    for call in (
        lambda: client.init_weight_transfer_engine(where, timeout=20),
        lambda: client.start_weight_update(timeout=20),
        lambda: client.update_weights({"names": [], "dtype_names": [], "shapes": []}, timeout=20),
        lambda: client.finish_weight_update(timeout=20),
    ):
        with pytest.raises(Exception, match=r"Request failed: 400.*pickled.*weight_dir"):
            call()
    body = {"weight_dir": str(service.new)}
    assert requests.post(f"{service.url}/update_weights", json=body).json()["weight_version"] == "1"
    client.resume(timeout=20)
    assert complete(service, temperature=0.0)[0] == new.greedy(PROMPT, 16) != old.greedy(PROMPT, 16)


def test_the_generation_client_reads_ids_where_others_read_texts(service: RolloutService, old: Reference):
    client, other = GenerationClient(service.url), [11, 12]
    assert client.get_server_info()["weight_transfer_config"] is None, "it says so before it opens NCCL"
    said = client.generate([PROMPT, other], n=2, temperature=0.0, top_k=0, max_tokens=6, logprobs=2)
    assert said["prompt_ids"] == [PROMPT, other]
    expected = [old.greedy(PROMPT, 6)] * 2 + [old.greedy(other, 6)] * 2
    assert said["completion_ids"] == expected
    assert [[entry[0] for entry in own] for own in said["logprob_token_ids"]] == expected, "the likeliest first"
    assert {len(entry) for own in said["logprobs"] for entry in own} == {2}
    scored = client.get_sequence_logprobs([PROMPT + said["completion_ids"][0]], [len(PROMPT)], top_logprobs=3)
    best = [entry[0] for entry in said["logprobs"][0]]
    assert [entry[0] for entry in scored["actual_logprobs"][0]] == pytest.approx(best, abs=1e-4)
