"""A service of several ranks, several drafters and several gateways."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fakes.collected import collect
from outrider.cluster.api.rollouts.history import PATH
from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.offline.engine import OfflineEngine
from outrider.drafter_service.embedded import held_out_prompts
from outrider.verifier_service.messages.request import GenerationRequest, SamplingParams
from outrider.verifier_service.model.tokenizer import load_tokenizer
from services.failures import MAX_PAUSE_S, VERIFIER_RANK_KILLED, Drill, Traffic, require_unharmed
from services.live_service import SharedRay, wait_for

# every replica that was lost starts again, on a busy machine in a minute
pytestmark = [pytest.mark.service, pytest.mark.timeout(600)]

PROMPT = held_out_prompts()[1]
MAX_TOKENS = 120
NUM_CONNECTIONS = 16  # all at one of two gateways: once in 32,768 runs


def plain_text() -> str:
    """The embedded target's greedy text, decoded offline by one rank without a drafter."""
    config = ServiceConfig(num_drafters=0)
    tokenizer = load_tokenizer(config.verifier_spec.model)
    request = GenerationRequest(
        request_id="plain",
        prompt_token_ids=tuple(tokenizer(PROMPT)["input_ids"]),
        sampling=SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True),
    )
    with OfflineEngine(config) as engine:
        (result,) = collect([request], engine.generate([request]))
    return tokenizer.decode(result.token_ids, skip_special_tokens=True)


@pytest.fixture(scope="module")
def drill(shared_ray: SharedRay) -> Drill:
    service = shared_ray.service(tensor_parallel_size=2, num_drafters=2, num_gateways=2, rollouts=True)
    return Drill(service, num_verifiers=1, num_drafters=2, traffic=Traffic(max_tokens=MAX_TOKENS))


def test_a_scrape_shows_what_every_gateway_published(drill: Drill):
    service = drill.service

    def publishers() -> set[str]:
        service.stream(PROMPT, max_tokens=1)
        families = list(text_string_to_metric_families(httpx.get(f"{service.base_url}/metrics").text))
        names = [family.name for family in families]
        assert len(names) == len(set(names)), "each family once"
        (published,) = (family for family in families if family.name == "outrider_generation_tokens")
        return {sample.labels["engine"] for sample in published.samples if sample.name.endswith("_total")}

    wait_for(lambda: len(publishers()) == 2, timeout_s=60)


def test_a_response_is_found_through_every_gateway(drill: Drill):
    url = f"{drill.service.base_url}/v1/responses"
    ids: dict[str, str] = {}  # of one response of each gateway

    def have_both_answered() -> bool:  # every connection is the kernel's choice
        made = httpx.post(url, json={"input": PROMPT, "max_output_tokens": 2}, timeout=60.0).raise_for_status().json()
        ids[made["id"].split("_")[1]] = made["id"]
        return len(ids) == 2

    wait_for(have_both_answered, timeout_s=60)
    for id_ in ids.values():
        assert {httpx.get(f"{url}/{id_}").json().get("id") for _ in range(NUM_CONNECTIONS)} == {id_}


def test_what_a_trainer_asks_of_one_gateway_holds_for_all(drill: Drill):
    url = drill.service.base_url
    with ThreadPoolExecutor(NUM_CONNECTIONS) as threads:
        asked = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True}}
        samples = [
            threads.submit(httpx.post, f"{url}/generate", json={**asked, "rid": f"r{number}"}, timeout=120.0)
            for number in range(NUM_CONNECTIONS)
        ]
        wait_for(lambda: httpx.get(f"{url}/get_load").json()[0]["num_reqs"] == NUM_CONNECTIONS, timeout_s=60)
        for number in range(NUM_CONNECTIONS):
            httpx.post(f"{url}/abort_request", json={"rid": f"r{number}"}, timeout=60.0).raise_for_status()
        reasons = [sample.result().json()["meta_info"]["finish_reason"]["type"] for sample in samples]
    assert reasons == ["abort"] * NUM_CONNECTIONS
    httpx.delete(f"{url}{PATH}").raise_for_status()
    for number in range(NUM_CONNECTIONS):
        httpx.post(f"{url}{PATH}", json={"history_key": str(number), "responses": [[5, 6, 7]]}).raise_for_status()

    def histories() -> set[tuple[str, ...]]:
        return {tuple(sorted(httpx.get(f"{url}{PATH}").text.splitlines())) for _ in range(NUM_CONNECTIONS)}

    wait_for(lambda: [len(lines) for lines in histories()] == [NUM_CONNECTIONS], timeout_s=10)


def test_a_killed_gateway_costs_an_error_that_one_retry_mends(drill: Drill):
    service, expected = drill.service, plain_text()
    drill.wait_until_whole()
    pid, is_killed = service.call("Gateway", "pid"), threading.Event()

    def ask(number: int) -> int:
        """Return how many tries failed: those whose gateway was killed."""
        for num_failed in range(2):
            begun.wait()
            try:
                assert service.stream(PROMPT, max_tokens=MAX_TOKENS, ignore_eos=True).text == expected
                return num_failed
            except httpx.TransportError:
                assert is_killed.is_set(), "nothing else fails"
                # its sockets take connections until the last of its threads has ended
                wait_for(lambda: not psutil.pid_exists(pid), timeout_s=60)
        raise AssertionError("the other gateway did not take it")

    with ThreadPoolExecutor(NUM_CONNECTIONS) as threads:
        begun = threading.Event()
        asked = [threads.submit(ask, number) for number in range(NUM_CONNECTIONS)]
        begun.set()
        wait_for(lambda: httpx.get(f"{service.base_url}/get_load").json()[0]["num_reqs"] > 2, timeout_s=60)
        is_killed.set()
        os.kill(pid, signal.SIGKILL)
        failed = [one.result() for one in asked]
    assert 0 < sum(failed) < NUM_CONNECTIONS
    drill.wait_until_whole()


def test_two_rank_verifier_goes_on_drafting_when_one_of_two_drafters_dies(drill: Drill):
    service, expected = drill.service, plain_text()
    drill.wait_until_whole()

    def kill(num_chunks: int) -> None:
        if num_chunks == 5:
            service.kill("Drafter")

    streamed = service.stream(PROMPT, max_tokens=MAX_TOKENS, ignore_eos=True, on_chunk=kill)
    assert streamed.text == expected
    assert streamed.speculation["disabled_reason"] is None, "the other drafter took over"


def test_a_lost_rank_of_the_only_verifier_loses_nothing(drill: Drill):
    require_unharmed(drill.run(VERIFIER_RANK_KILLED, index=0), max_pause_s=MAX_PAUSE_S)
