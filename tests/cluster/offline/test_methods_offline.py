"""Drafters of several kinds in a process of their own: tokens, states and predictions cross a pipe as on a link."""

from __future__ import annotations

from typing import Any

import pytest

from fakes.collected import collect
from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.offline.engine import OfflineEngine
from outrider.drafter_service.embedded import held_out_prompts
from outrider.verifier_service.messages.request import GenerationRequest, RequestOutput, SamplingParams, SpeculationPlan
from outrider.verifier_service.model.tokenizer import load_tokenizer

SAMPLINGS = {"greedy": {"temperature": 0.0}, "coupled": {"temperature": 0.8, "seed": 4}}


def requests(draft_length: int) -> list[GenerationRequest]:
    tokenizer = load_tokenizer(ServiceConfig().verifier_spec.model)
    prompts = (held_out_prompts()[0], "def first(items):\n    return items[0]\n\n\n" * 3)
    return [
        GenerationRequest(
            request_id=f"{index} {name}",
            prompt_token_ids=tuple(tokenizer(prompt)["input_ids"][:120]),
            sampling=SamplingParams(max_tokens=64, ignore_eos=True, **sampling),
            plan=SpeculationPlan(draft_length=draft_length),
        )
        for index, prompt in enumerate(prompts)
        for name, sampling in SAMPLINGS.items()
    ]


def generate(config: ServiceConfig, draft_length: int) -> tuple[dict[str, list[int]], int]:
    """Return every request's tokens, and how many drafted ones were accepted."""
    batch = requests(draft_length)
    with OfflineEngine(config, drafter_process=True) as engine:
        outputs: list[RequestOutput] = list(engine.generate(batch))
        engine.engine.check_integrity()
    results = list(collect(batch, outputs))
    tokens = {result.request.request_id: result.token_ids for result in results}
    return tokens, sum(result.speculation.num_accepted_tokens for result in results)


@pytest.fixture(scope="module")
def plain() -> dict[str, list[int]]:
    return generate(ServiceConfig(num_drafters=0), 0)[0]


@pytest.mark.soak  # a process takes seconds to start; the pipe itself: test_engine.py, what crosses it: exactness
@pytest.mark.parametrize(
    "options",
    [
        {"method": "ngram"},
        {"method": "lookahead", "num_tree_nodes": 8},
        {"method": "medusa"},
        {"method": "eagle3", "num_tree_nodes": 8},
        {"method": "hybrid", "methods": ["suffix", "eagle3"]},
    ],
    ids=lambda options: options["method"],
)
def test_a_drafter_far_away_changes_no_token(plain: dict[str, list[int]], options: dict[str, Any]):
    tokens, num_accepted = generate(ServiceConfig(speculative_config=options), 4)
    assert tokens == plain
    assert num_accepted > 0
