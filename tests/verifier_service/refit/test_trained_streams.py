"""The reference of streams whose weights change: what it lets pass, and planted defects that it must show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from outrider.cluster.config.service_config import ServiceConfig
from outrider.drafter_service.embedded import held_out_prompts
from outrider.verifier_service.model.tokenizer import load_tokenizer
from services.failures import SAMPLINGS, outcome_of
from services.live_service import Streamed
from services.trained import FIRST, SECOND, TwoWeights

MAX_TOKENS = 48


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoWeights]:
    weights = TwoWeights(Path(ServiceConfig().model.target_path), tmp_path_factory.mktemp("weights"))
    yield weights
    weights.close()


def stream_of(weights: TwoWeights, sampling: dict[str, Any], spans: Sequence[tuple[str, int]]) -> Streamed:
    """Return a stream that goes from one set of weights to the next as it should."""
    config = ServiceConfig().verifier_spec.model
    prompt = load_tokenizer(config)(held_out_prompts()[0])["input_ids"][:60]
    streamed = Streamed(prompt_token_ids=prompt)
    for name, num_tokens in spans:
        before = tuple(streamed.token_ids)
        streamed.token_ids += weights._decode(name, prompt, before, sampling, MAX_TOKENS)[:num_tokens]
        streamed.weight_versions += [f"{name} 7"] * num_tokens
    return streamed


def num_changed(weights: TwoWeights, sampling: dict[str, Any], streamed: Streamed) -> int:
    expected = weights.drawn(streamed, sampling, MAX_TOKENS)
    outcome = outcome_of("case", [streamed], {0: expected}, 0.0)
    return outcome.num_lost + outcome.num_doubled


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_each_token_is_judged_by_the_weights_that_it_names(weights: TwoWeights, sampling: dict[str, Any]):
    half = MAX_TOKENS // 2
    streamed = stream_of(weights, sampling, [(FIRST, half), (SECOND, half)])
    assert num_changed(weights, sampling, streamed) == 0
    assert num_changed(weights, sampling, stream_of(weights, sampling, [(FIRST, MAX_TOKENS)])) == 0
    planted = {
        "a verifier with old weights by the new name": [f"{FIRST} 7"] * half + [f"{FIRST} 9"] * half,
        "new weights by the old name": [f"{SECOND} 9"] * MAX_TOKENS,
        "a span that ends too late": [f"{FIRST} 7"] * (half + 8) + [f"{SECOND} 9"] * (half - 8),
    }
    for defect, versions in planted.items():
        streamed.weight_versions = versions
        assert num_changed(weights, sampling, streamed) > 0, defect


def test_a_lost_token_and_one_that_comes_twice_show(weights: TwoWeights):
    (sampling, *_) = SAMPLINGS
    for change in (lambda ids: ids[:-1], lambda ids: [*ids[:10], *ids[9:-1]]):
        streamed = stream_of(weights, sampling, [(FIRST, MAX_TOKENS)])
        streamed.token_ids = change(streamed.token_ids)
        streamed.weight_versions = [f"{FIRST} 7"] * len(streamed.token_ids)
        assert num_changed(weights, sampling, streamed) > 0


def test_every_update_has_a_name_of_its_own_and_the_other_weights(weights: TwoWeights):
    bodies = [weights.update() for _ in range(4)]
    assert len({body["weight_version"] for body in bodies}) == 4
    assert [body["model_path"] for body in bodies] == [str(weights.folders[name]) for name in (SECOND, FIRST)] * 2
