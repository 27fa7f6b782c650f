"""What may not be asked for together."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.config.verifier_main import verifier_main
from outrider.cluster.vllm_engine.spec import VllmSpec
from outrider.verifier_service.engine.verifier_spec import VerifierSpec


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"engine": "sglang"}, "engine must be outrider or vllm"),
        ({"engine_kwargs": {"quantization": "fp8"}}, "engine_kwargs are vLLM's"),
        ({"lora_modules": {"a": "folder"}}, "lora_modules are vLLM's"),
        ({"engine": "vllm", "lora_modules": {"outrider-embedded": "folder"}}, "lora_modules: outrider-embedded is"),
        ({"engine": "vllm", "quantization": "int8"}, "quantization: int8 and fp8 are our own engine's"),
        ({"engine": "vllm", "kv_cache_dtype": "fp8"}, "kv_cache_dtype: our own engine's"),
        ({"engine": "vllm", "num_cached_experts": 8}, "num_cached_experts: our own engine's"),
        ({"engine": "vllm", "check_integrity": True}, "check_integrity: "),
        ({"engine": "vllm", "logprobs_mode": "processed_logprobs"}, "logprobs_mode: "),
        (
            {"logprobs_mode": "processed_logprobs", "speculative_config": {"rejection_sample_method": "typical"}},
            "logprobs_mode: .*rejection_sample_method",
        ),
        ({"engine": "vllm", "engine_kwargs": {"tensor_parallel_size": 2}}, "engine_kwargs: tensor_parallel_size"),
        ({"engine": "vllm", "speculative_config": {"rejection_sample_method": "typical"}}, "rejection_sample_method"),
        ({"engine": "vllm", "next_turn_prefill": True}, "next_turn_prefill: our own engine"),
        ({"next_turn_prefill": True, "enable_prefix_caching": False}, "next_turn_prefill: it needs enable_prefix_ca"),
        ({"engine": "vllm", "speculative_config": {"method": "eagle3", "num_tree_nodes": 8}}, "num_tree_nodes"),
        (
            {"engine": "vllm", "drafter_pools": [{"name": "x", "method": "eagle3", "num_tree_nodes": 8}]},
            "num_tree_nodes",
        ),
        ({"engine": "vllm", "speculative_config": {"method": "suffix", "location": "verifier"}}, "location: vLLM"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_by_name(options: dict[str, Any], complaint: str):
    with pytest.raises(ValueError, match=complaint):
        ServiceConfig(**{"model": "embedded", **options})


def test_vllm_drafts_from_the_pool_that_our_own_engine_would_have():
    config = ServiceConfig(model="embedded", engine="vllm", device="cpu", seed=5, engine_kwargs={"block_size": 32})
    spec = verifier_main(config)
    assert isinstance(spec, VllmSpec)
    assert spec.drafts is not None
    assert (spec.drafts.num_speculative_tokens, spec.seed, spec.engine_kwargs) == (4, 5, {"block_size": 32})
    assert spec.gpu_memory_utilization is None
    assert spec.drafting_from("127.0.0.1:5").drafts.options["pool"] == "127.0.0.1:5"
    assert isinstance(verifier_main(ServiceConfig(model="embedded", device="cpu")), VerifierSpec)


def test_asynchronous_scheduling_is_left_to_vllm_unless_it_is_switched_off():
    config = ServiceConfig(model="embedded", engine="vllm", device="cpu", async_scheduling=False)
    assert verifier_main(config).engine_kwargs == {"async_scheduling": False}


def test_heads_and_pins_are_told_to_the_plug_in():
    config = ServiceConfig(
        model="embedded", engine="vllm", device="cpu", speculation="always", speculative_config={"method": "eagle3"}
    )
    assert verifier_main(config).drafts.options["speculation"] == "always"
    assert verifier_main(config).drafts.options["state_taps"] == list(config.verifier_spec.model.state_taps) != []
    assert verifier_main(config).drafts.options["learn"] is False
    assert verifier_main(config.with_options(learner={})).drafts.options["learn"] is True


def test_a_model_without_a_drafter_of_its_own_is_served_without_drafts():
    """Our own engine looks drafts up in its own process; vLLM's has no such place."""
    config = ServiceConfig(model="some/model", engine="vllm", device="cpu")
    assert verifier_main(config).drafts is None
    assert config.who_drafts == "nobody"
    named = ServiceConfig(model="some/model", engine="vllm", device="cpu", speculative_config={"method": "suffix"})
    assert named.who_drafts == "suffix by 1 drafter"


def test_one_process_gets_the_devices_of_all_ranks():
    def placement(engine: str) -> tuple[int, float]:
        config = ServiceConfig(model="embedded", engine=engine, device="cuda", tensor_parallel_size=4)
        return config.verifier_placement.num_ranks, config.verifier_placement.gpus_per_rank

    assert placement("outrider") == (4, 1.0)
    assert placement("vllm") == (1, 4.0)
