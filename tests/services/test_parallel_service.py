"""A service of several ranks, several drafters and several gateways."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fakes.collected import collect
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
    service = shared_ray.service(tensor_parallel_size=2, num_drafters=2, num_gateways=2)
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
