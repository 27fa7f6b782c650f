"""What may be configured of a pool alone."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.cluster.config.drafters_config import DraftersConfig
from outrider.drafter_service import embedded
from outrider.drafter_service.service.drafter_spec import common_state_taps
from outrider.drafter_service.service.speculative_config import Method


def config_of(**options: Any) -> DraftersConfig:
    return DraftersConfig(**{"model": "m", **options})


def test_a_draft_model_makes_a_pool_and_no_verifier_takes_part():
    config = config_of(draft_model="d", num_drafters="1:3", draft_tensor_parallel_size=2)
    assert list(config.pools) == ["default"]
    assert config.num_ranks == 3 * 2, "the target's ranks are the other engine's"
    assert config.num_shells == 3 + 1, "and a directory"


def test_a_first_pool_without_replicas_leaves_the_others():
    config = config_of(draft_model="d", num_drafters=0, drafter_pools=[{"name": "look", "method": "ngram"}])
    assert list(config.pools) == ["look"]


def test_look_ups_need_no_checkpoint_of_their_own():
    config = config_of(speculative_config={"method": "ngram"})
    assert config.speculative.method is Method.NGRAM
    assert config.num_ranks == 1


def test_further_pools_stand_beside_the_first():
    config = config_of(draft_model="d", num_drafters=2, drafter_pools=[{"name": "look", "method": "ngram"}])
    assert list(config.pools) == ["default", "look"]
    assert (config.num_ranks, config.num_shells) == (3, 4)


def test_heads_say_which_of_the_targets_states_they_read():
    head = config_of(
        model=str(embedded.target_path()),
        draft_model=str(embedded.drafter_paths()[Method.EAGLE3]),
        speculative_config={"method": "eagle3"},
    )
    assert len(common_state_taps(head.drafter_specs)) == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "draft_model: nothing would draft"),
        ({"draft_model": "d", "num_drafters": 0}, "draft_model: nothing would draft"),
        ({"draft_model": "d", "num_speculative_tokens": 0}, "draft_model: nothing would draft"),
        ({"speculative_config": {"method": "ngram", "location": "verifier"}}, "draft_model: nothing would draft"),
        ({"draft_model": "d", "speculative_config": {"method": "ngam"}}, "did you mean 'ngram'"),
        ({"draft_model": "d", "num_verifiers": 0}, "num_verifiers must be"),
        ({"draft_model": "d", "num_drafter": 1}, "did you mean 'num_drafters'"),
        ({"draft_model": "d", "num_gateways": 2}, "unknown option 'num_gateways'"),
        ({"draft_model": "d", "tensor_parallel_size": 2}, "unknown option 'tensor_parallel_size'"),
        ({"draft_model": "d", "draft_tensor_parallel_size": 0}, "draft_tensor_parallel_size"),
        ({"draft_model": "d", "max_num_seqs": 0}, "max_num_seqs"),
        ({"draft_model": "d", "link_ssl_certfile": "c.pem"}, "link_ssl_"),
        (
            {"draft_model": "d", "host": "0.0.0.0"},
            "host: at 0.0.0.0 whoever comes could link to drafters; add",
        ),
        ({"draft_model": "d", "internal_host": "auto"}, "internal_host: at auto whoever comes could link to drafters"),
    ],
)
def test_a_bad_value_is_named(options: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        config_of(**options)
