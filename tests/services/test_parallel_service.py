"""A service of several ranks and several drafters."""

from __future__ import annotations

import pytest

from fakes.collected import collect
from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.offline.engine import OfflineEngine
from outrider.drafter_service.embedded import held_out_prompts
from outrider.verifier_service.messages.request import GenerationRequest, SamplingParams
from outrider.verifier_service.model.tokenizer import load_tokenizer
from services.live_service import live_service, wait_for

pytestmark = pytest.mark.service

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


def test_two_rank_verifier_goes_on_drafting_when_one_of_two_drafters_dies():
    expected = plain_text()
    with live_service(tensor_parallel_size=2, num_drafters=2) as service:
        wait_for(lambda: len(service.call("Verifier", "drafters_up")) >= 2, timeout_s=60)

        def kill(num_chunks: int) -> None:
            if num_chunks == 5:
                service.kill("Drafter")

        streamed = service.stream(PROMPT, max_tokens=MAX_TOKENS, ignore_eos=True, on_chunk=kill)
        assert streamed.text == expected
        assert streamed.speculation["disabled_reason"] is None, "the other drafter took over"
