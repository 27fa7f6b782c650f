"""examples/two_pools.yaml: Serve takes it, and we take its options. tests/services/test_methods_service.py runs it."""

from __future__ import annotations

from pathlib import Path

import yaml
from ray.serve.schema import ServeDeploySchema

from outrider.cluster.config.pool_options import checkpoint_of
from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.scaling.autoscaling import FIRST_POOL
from outrider.drafter_service import embedded
from outrider.drafter_service.service.speculative_config import Method

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "two_pools.yaml"


def test_serve_takes_it_and_two_pools_come_of_it() -> None:
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(EXAMPLE.read_text())).applications
    assert application.import_path == "outrider.cluster.app:build_app"
    config = ServiceConfig(**application.args)
    pools = config.pools
    assert {name: pool.speculative.method for name, pool in pools.items()} == {
        FIRST_POOL: Method.EAGLE3,
        "lookup": Method.NGRAM,
    }
    assert [str(pool.num_drafters) for pool in pools.values()] == ["1", "1"]
    head = embedded.drafter_paths()[Method.EAGLE3]
    assert checkpoint_of(pools[FIRST_POOL].speculative, config.model.model) == str(head), "nothing is downloaded"
    assert checkpoint_of(pools["lookup"].speculative, config.model.model) is None
