"""The whole service with other drafters than a draft model: in the verifier's process, and heads that read states."""

from __future__ import annotations

import pytest

from live_service import LiveService, live_service, wait_for
from outrider.drafter_service.embedded import held_out_prompts
from outrider.verifier_service.drafting import LOCAL_DRAFTER_ID

pytestmark = pytest.mark.service

REPEATED = "def first(items):\n    return items[0]\n\n\n" * 3  # that lookups find something in
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


def test_a_drafter_in_the_verifiers_own_process_needs_no_pool():
    options = {"method": "ngram", "location": "verifier"}
    with live_service(speculative_config=options, wait_for_drafts=False) as service:
        service.wait_for_fleet(1, 0)
        assert accepted_of_streams(service, REPEATED) > 10
        (verifier,) = service.call("Router", "snapshot").verifiers
        assert verifier.report.own_draft_length == service.config.num_speculative_tokens
        assert verifier.default_plan.drafter_id == LOCAL_DRAFTER_ID
        assert verifier.report.drafters_up == ()


def test_several_pools_draft_for_one_verifier_and_new_requests_go_where_tokens_come_fastest():
    """A pool that has not been tried is; in the end both are known, and whoever drafted, the tokens are the same."""
    pools = ({"name": "lookup", "method": "ngram", "prompt_lookup_min": 1},)
    with live_service(drafter_pools=pools, speculation="always") as service:
        service.wait_for_fleet(1, 2)
        names = {state.report.pool for state in service.call("Router", "snapshot").drafters}
        assert names == {"default", "lookup"}

        def are_known() -> bool:
            accepted_of_streams(service, REPEATED)
            (verifier,) = service.call("Router", "snapshot").verifiers
            return sum(drafter.accepted_per_round is not None for drafter in verifier.report.round_trips) == 2

        wait_for(are_known, timeout_s=120)
        (verifier,) = service.call("Router", "snapshot").verifiers
        assert max(drafter.accepted_per_round for drafter in verifier.report.round_trips) > 0.2


@pytest.mark.parametrize("method", ["eagle3"])
def test_a_pool_of_heads_reads_the_targets_states_over_the_link(method: str):
    options = {"method": method, "num_tree_nodes": 12}
    with live_service(speculative_config=options) as service:
        service.wait_for_fleet(1, 1)
        assert accepted_of_streams(service, PROMPT) > 10
        service.wait_until_idle()
