"""What follows from a drafter's specification."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.drafter_service.service.drafter_spec import DrafterSpec
from outrider.drafter_service.service.speculative_config import Method, SpeculativeConfig
from outrider.verifier_service.model.config import ModelConfig

TARGET, DRAFT = ModelConfig(path="target"), ModelConfig(path="draft")


def spec(model: ModelConfig | None, **options: object) -> DrafterSpec:
    return DrafterSpec(model=model, target=TARGET, speculative=SpeculativeConfig(**options))


@pytest.mark.parametrize(
    ("options", "reads"),
    [
        ({"method": Method.SUFFIX}, False),
        ({"method": Method.DRAFT_MODEL}, False),
        ({"method": Method.EAGLE3}, True),
        ({"method": Method.HYBRID, "methods": (Method.SUFFIX, Method.DRAFT_MODEL)}, False),
        ({"method": Method.HYBRID, "methods": (Method.SUFFIX, Method.MEDUSA)}, True),
    ],
)
def test_heads_read_tensors_of_the_targets_and_who_has_its_words_alone_does_not(options: dict[str, Any], reads: bool):
    assert spec(DRAFT, **options).reads_target is reads


def test_a_draft_model_drafts_in_its_own_vocabulary():
    assert spec(DRAFT, method=Method.DRAFT_MODEL).vocabulary == DRAFT


def test_what_translates_or_is_no_whole_model_drafts_in_the_targets():
    assert spec(DRAFT, method=Method.DRAFT_MODEL, vocabulary="text").vocabulary == TARGET
    assert spec(DRAFT, method=Method.EAGLE3).vocabulary == TARGET
    assert spec(None, method=Method.NGRAM).vocabulary == TARGET
