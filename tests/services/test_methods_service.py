"""The whole service with other drafters than a draft model: in the verifier's process, and heads that read states."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from outrider.drafter_service.embedded import held_out_prompts
from outrider.verifier_service.messages.draft import LOCAL_DRAFTER_ID
from services.live_service import LiveService, SharedRay, wait_for

pytestmark = pytest.mark.service

REPEATED = "def first(items):\n    return items[0]\n\n\n" * 3  # that lookups find something in
TWO_POOLS = Path(__file__).resolve().parents[2] / "examples" / "two_pools.yaml"
DEPLOYMENTS = {"default": "Drafter", "lookup": "Drafter-lookup"}  # of its pools
PROMPT = held_out_prompts()[2]


def accepted_of_streams(service: LiveService, prompt: str) -> int:
    """Stream with and without speculation, greedily and seeded: the tokens are the same. Count the accepted ones."""
    num_accepted = 0
    for sampling in ({"temperature": 0}, {"temperature": 0.8, "seed": 3}):
        body = {"max_tokens": 60, "ignore_eos": True, "return_token_ids": True, **sampling}
        plain = service.stream(prompt, num_speculative_tokens=0, **body)
        drafted = service.stream(prompt, **body)
        assert drafted.token_ids == plain.token_ids
        assert len(plain.token_ids) == 60
        assert plain.speculation["num_drafts"] == 0
        num_accepted += drafted.speculation["num_accepted_tokens"]
    return num_accepted


@pytest.mark.soak  # offline: test_llm.py, test_engine.py; what is reported and planned: tests/cluster/router
def test_a_drafter_in_the_verifiers_own_process_needs_no_pool(shared_ray: SharedRay):
    options = {"method": "ngram", "location": "verifier"}
    service = shared_ray.service(speculative_config=options, wait_for_drafts=False)
    service.wait_for_fleet(1, 0)
    assert accepted_of_streams(service, REPEATED) > 10
    (verifier,) = service.call("Router", "snapshot").verifiers
    assert verifier.report.own_draft_length == service.config.max_draft_length
    assert verifier.default_plan.drafter_id == LOCAL_DRAFTER_ID
    assert verifier.report.drafters_up == ()


def test_a_pool_of_heads_reads_the_targets_states_over_the_link_beside_a_pool_of_lookups(shared_ray: SharedRay):
    """As examples/two_pools.yaml has it. What each brings becomes known; whoever drafted, the tokens are the same."""
    (application,) = yaml.safe_load(TWO_POOLS.read_text())["applications"]
    options = {**application["args"], "drafter_pools": tuple(application["args"]["drafter_pools"])}
    # no warm-up, and first a text in which lookups find something: a pool that is known to bring nothing is left alone
    service = shared_ray.service(**options, wait_for_drafts=False)
    service.wait_for_fleet(1, 2)
    brought: dict[str, float] = {}

    def note(prompt: str) -> None:
        """Keep the most that each pool has brought in a text: what counts is lately, and the next text differs."""
        accepted_of_streams(service, prompt)
        snapshot = service.call("Router", "snapshot")
        pools = {state.report.drafter_id: state.report.pool for state in snapshot.drafters}
        for drafter in snapshot.verifiers[0].report.load.drafters:
            if drafter.accepted_per_round is not None and drafter.drafter_id in pools:
                pool = pools[drafter.drafter_id]
                brought[pool] = max(brought.get(pool, 0.0), drafter.accepted_per_round)

    def are_known() -> bool:
        for prompt in (REPEATED, PROMPT):
            note(prompt)
        if len(brought) == 1:  # the pool that serves better may have all requests: the other one's turn
            service.wait_for_fleet(1, 2)
            service.kill(DEPLOYMENTS[next(iter(brought))])
        return brought.keys() == DEPLOYMENTS.keys()

    wait_for(are_known, timeout_s=120)
    assert brought["default"] > 0.1  # a head that misses the target's states guesses nothing
    assert brought["lookup"] > 0  # how much hangs on which of the texts the router gave it
    service.wait_until_idle()
