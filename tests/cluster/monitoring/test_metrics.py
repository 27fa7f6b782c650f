from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from fakes.backend import FakeBackend, build_gateway, says
from outrider.cluster.common.errors import Overloaded
from outrider.cluster.gateway.request_parser import RequestInput
from outrider.cluster.monitoring.metrics import GatewayMetrics
from outrider.verifier_service.messages.request import SpeculationMetrics

SPECULATION = SpeculationMetrics(
    enabled=True, num_drafts=2, num_draft_tokens=6, num_accepted_tokens=3, num_accepted_per_position=[2, 1]
)


def value(gateway, name, **labels):
    return gateway.metrics.registry.get_sample_value(name, {"model_name": "tiny", "engine": "0", **labels})


async def run(gateway, **fields):
    return [chunk async for chunk in gateway.generate(await gateway.parse(RequestInput(**fields)))]


@pytest.mark.parametrize("prefix", ["outrider_", "vllm:"])
async def test_a_finished_request_is_counted_once_under_both_names(tokenizer, prefix):
    gateway = build_gateway(FakeBackend(lambda _: says(tokenizer, "xyz"), speculation=SPECULATION), tokenizer)
    await run(gateway, prompt=[5, 6], n=2, max_tokens=7)
    assert value(gateway, f"{prefix}prompt_tokens_total") == 2
    assert value(gateway, f"{prefix}generation_tokens_total") == 6
    assert value(gateway, f"{prefix}request_success_total", finished_reason="length") == 2
    assert value(gateway, f"{prefix}time_to_first_token_seconds_count") == 2
    assert value(gateway, f"{prefix}inter_token_latency_seconds_count") == 4
    assert value(gateway, f"{prefix}e2e_request_latency_seconds_count") == 2
    assert value(gateway, f"{prefix}request_prompt_tokens_sum") == 2
    assert value(gateway, f"{prefix}request_params_n_sum") == 2
    assert value(gateway, f"{prefix}request_params_max_tokens_sum") == 7
    assert value(gateway, f"{prefix}spec_decode_num_drafts_total") == 4
    assert value(gateway, f"{prefix}spec_decode_num_draft_tokens_total") == 12
    assert value(gateway, f"{prefix}spec_decode_num_accepted_tokens_total") == 6
    assert value(gateway, f"{prefix}spec_decode_num_accepted_tokens_per_pos_total", position="0") == 4
    assert value(gateway, f"{prefix}spec_decode_num_accepted_tokens_per_pos_total", position="1") == 2


async def test_latencies_come_from_the_clock(tokenizer):
    gateway = build_gateway(FakeBackend(lambda _: says(tokenizer, "xyz")), tokenizer)
    await run(gateway, prompt=[5])
    # every reading of the ticking clock is a second: arrival 1, tokens 2, 3, 4, end 5
    assert value(gateway, "outrider_time_to_first_token_seconds_sum") == 1
    assert value(gateway, "outrider_inter_token_latency_seconds_sum") == 2
    assert value(gateway, "outrider_e2e_request_latency_seconds_sum") == 4


async def test_failures_and_cancellations_are_told_apart(tokenizer):
    gateway = build_gateway(FakeBackend(lambda _: [[5], Overloaded("full")]), tokenizer)
    with pytest.raises(Overloaded):
        await run(gateway, prompt=[5])
    assert value(gateway, "outrider_gateway_request_failures_total", reason="Overloaded") == 1
    assert value(gateway, "outrider_request_success_total", finished_reason="abort") is None
    chunks = gateway.generate(await gateway.parse(RequestInput(prompt=[5])))
    await anext(chunks)
    assert value(gateway, "outrider_gateway_requests_in_progress") == 1
    await chunks.aclose()
    assert value(gateway, "outrider_gateway_requests_in_progress") == 0
    assert value(gateway, "outrider_request_success_total", finished_reason="abort") == 1


async def test_the_text_is_valid_and_aliases_can_be_left_out(tokenizer):
    gateway = build_gateway(FakeBackend(lambda _: [[5]]), tokenizer)
    await run(gateway, request_id="secret-id", prompt=[5])
    text = generate_latest(gateway.metrics.registry).decode()
    names = [family.name for family in text_string_to_metric_families(text)]
    assert len(names) == len(set(names))
    assert "vllm:request_success" in names
    assert "secret-id" not in text
    samples = {sample.name for metric in gateway.metrics.registry.collect() for sample in metric.samples}
    assert not {name for name in samples if name.startswith("vllm:") and name.endswith("_created")}
    bare = CollectorRegistry()
    GatewayMetrics(bare, model_name="tiny", vllm_aliases=False)
    assert b"vllm:" not in generate_latest(bare)
