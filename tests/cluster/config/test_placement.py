from outrider.cluster.config.placement import RANK_CPUS, SHELL_CPUS, PoolPlacement
from outrider.cluster.config.service_config import ServiceConfig

SHELL, RANK = {"CPU": SHELL_CPUS}, {"CPU": RANK_CPUS}


def test_a_replica_is_a_shell_and_its_ranks_on_one_node():
    options = PoolPlacement(num_ranks=2).serve_options
    assert options == {"placement_group_bundles": [SHELL, RANK, RANK], "placement_group_strategy": "STRICT_PACK"}


def test_resources_are_asked_for_once_per_replica_and_gpus_per_rank():
    placement = PoolPlacement(num_ranks=2, gpus_per_rank=0.5, resources={"drafter": 1})
    assert placement.serve_options["placement_group_bundles"] == [
        SHELL | {"drafter": 1},
        RANK | {"GPU": 0.5},
        RANK | {"GPU": 0.5},
    ]


def test_each_pool_is_placed_by_its_own_options():
    config = ServiceConfig(
        tensor_parallel_size=2,
        device="cpu",
        verifier_resources='{"big": 1}',
        drafter_labels={"pool": "drafter"},
    )
    placement = config.drafter_placement(config.pools["default"])
    assert config.verifier_placement == PoolPlacement(num_ranks=2, resources={"big": 1})
    assert placement == PoolPlacement(num_ranks=1, labels={"pool": "drafter"})
    assert placement.serve_options["placement_group_bundle_label_selector"] == [{"pool": "drafter"}]
    assert "placement_group_bundle_label_selector" not in config.verifier_placement.serve_options
