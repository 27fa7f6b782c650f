"""The service on a Ray cluster of three nodes, deployed and operated as an operator does: by Serve's REST interface."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from outrider.drafter_service.embedded import held_out_prompts
from outrider.verifier_service.messages.request import DisabledReason
from services.live_service import Streamed
from services.raylets import QUICK, Deployed, deployed_service, wait

pytestmark = [pytest.mark.service, pytest.mark.timeout(600)]

NUM_STREAMS = 6
POLICY = {  # so many streams want both verifiers and all three drafters; on a busy machine the price says little
    "requests_per_verifier": 4,
    "sessions_per_drafter": 2,
    "low_price": 1.0,
    "high_price": 2.0,
}
DRAFTERS = {"min_replicas": 0, "initial_replicas": 1, "max_replicas": 3, **QUICK}


@pytest.fixture(scope="module")
def deployed() -> Iterator[Deployed]:
    with deployed_service(
        policy=POLICY,
        router={"mode": "always", "max_draft_length": 4},
        verifiers={"min_replicas": 1, "max_replicas": 2, **QUICK},
        drafters={**DRAFTERS, "downscale_to_zero_delay_s": 600.0},
    ) as deployed:
        yield deployed


def test_pools_are_on_their_own_nodes(deployed: Deployed):
    assert sorted(deployed.cluster.pool_of_node.values()) == ["drafter", "drafter", "verifier"]
    assert deployed.pools("Verifier") == {"verifier"}
    assert deployed.pools("Drafter") == {"drafter"}


def test_serves_proxy_echoes_a_request_id_and_we_do_not_again(deployed: Deployed):
    answer = httpx.get(f"{deployed.service.base_url}/health", headers={"X-Request-Id": "mine"})
    assert answer.headers.get_list("x-request-id") == ["mine"]


class Load:
    """Greedy streams, one after the other on each of some threads, each compared with the text of plain decoding."""

    def __init__(self, deployed: Deployed, prompts: list[str]) -> None:
        self.deployed = deployed
        self.expected = {prompt: deployed.stream(prompt, disable_spec_decode=True).text for prompt in prompts}
        self.streamed: list[Streamed] = []
        self.num_wanted = len(prompts)

    def run(self, index: int) -> None:
        """Stream for as long as so many are wanted; raises what a client would see."""
        prompt = list(self.expected)[index]
        while index < self.num_wanted:
            streamed = self.deployed.stream(prompt)
            assert streamed.text == self.expected[prompt]
            assert streamed.finish_reason == "length"
            self.streamed.append(streamed)


@pytest.mark.soak  # more than a minute; a pool that goes and comes back is tested below
def test_both_pools_follow_a_load_that_rises_and_falls_without_a_lost_or_changed_request(deployed: Deployed):
    load = Load(deployed, held_out_prompts()[:NUM_STREAMS])
    assert deployed.sizes == {"Verifier": 1, "Drafter": 1, "Gateway": 1, "Router": 1}
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        streams = [threads.submit(load.run, index) for index in range(NUM_STREAMS)]
        try:
            wait(lambda: deployed.has(2, 3) or any(stream.done() for stream in streams))
            assert deployed.pools("Verifier") == {"verifier"}
            assert deployed.pools("Drafter") == {"drafter"}
            num_before = len(load.streamed)
            wait(lambda: len(load.streamed) > num_before + 2)
            load.num_wanted = 1  # the rest of the load ends, one stream goes on
            wait(lambda: deployed.has(1, 1) or streams[0].done())
            num_before = len(load.streamed)
            wait(lambda: len(load.streamed) > num_before + 1)
        finally:
            load.num_wanted = 0
        for stream in streams:
            stream.result()
    assert all(streamed.speculation["num_drafts"] > 0 for streamed in load.streamed)
    assert deployed.sizes == {"Verifier": 1, "Drafter": 1, "Gateway": 1, "Router": 1}


def test_a_changed_user_config_changes_plans_and_restarts_nothing(deployed: Deployed):
    prompt = held_out_prompts()[0]
    replica_ids = deployed.replica_ids()
    wait(lambda: more_than_two_tokens_per_draft(deployed.stream(prompt)))  # a busy machine may draft less at first
    manifest = copy.deepcopy(deployed.manifest)
    manifest["applications"][0]["deployments"][0]["user_config"]["max_draft_length"] = 1
    deployed.deploy(manifest)
    wait(lambda: one_token_per_draft(deployed.stream(prompt)))
    assert deployed.replica_ids() == replica_ids


def more_than_two_tokens_per_draft(streamed: Streamed) -> bool:
    return streamed.speculation["num_draft_tokens"] > 2 * streamed.speculation["num_drafts"] > 0


def one_token_per_draft(streamed: Streamed) -> bool:
    return 0 < streamed.speculation["num_draft_tokens"] == streamed.speculation["num_drafts"]


def test_without_requests_there_is_no_drafter_and_with_them_one_comes_back(deployed: Deployed):
    manifest = copy.deepcopy(deployed.manifest)
    drafter = manifest["applications"][0]["deployments"][-1]
    drafter["autoscaling_config"] = DRAFTERS  # the last one goes as soon as others do
    deployed.deploy(manifest)
    wait(lambda: deployed.has(1, 0))
    load = Load(deployed, held_out_prompts()[:1])
    with ThreadPoolExecutor(1) as threads:
        stream = threads.submit(load.run, 0)
        try:
            wait(lambda: deployed.has(1, 1) or stream.done())
            wait(lambda: stream.done() or load.streamed[-1].speculation["num_drafts"] > 0)
        finally:
            load.num_wanted = 0
        stream.result()
    assert load.streamed[0].speculation["num_drafts"] == 0, "it was served without waiting for a drafter"


def test_a_router_left_to_decide_says_why_not_where_it_does_not_speculate(deployed: Deployed):
    manifest = copy.deepcopy(deployed.manifest)
    manifest["applications"][0]["deployments"][0]["user_config"]["mode"] = "auto"
    deployed.deploy(manifest)
    streamed = deployed.stream(held_out_prompts()[1])
    assert streamed.finish_reason == "length"
    reason = streamed.speculation["disabled_reason"]
    assert (reason is None) == (streamed.speculation["num_drafts"] > 0) or reason in set(DisabledReason)
