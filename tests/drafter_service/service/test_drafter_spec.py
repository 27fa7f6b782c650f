"""What follows from a drafter's specification."""

from __future__ import annotations

from outrider.drafter_service.service.drafter_spec import DrafterSpec
from outrider.drafter_service.service.speculative_config import Method, SpeculativeConfig
from outrider.verifier_service.model.config import ModelConfig

TARGET, DRAFT = ModelConfig(path="target"), ModelConfig(path="draft")


def spec(model: ModelConfig | None, **options: object) -> DrafterSpec:
    return DrafterSpec(model=model, target=TARGET, speculative=SpeculativeConfig(**options))


def test_a_draft_model_drafts_in_its_own_vocabulary():
    assert spec(DRAFT, method=Method.DRAFT_MODEL).vocabulary == DRAFT


def test_what_translates_or_is_no_whole_model_drafts_in_the_targets():
    assert spec(DRAFT, method=Method.DRAFT_MODEL, vocabulary="text").vocabulary == TARGET
    assert spec(DRAFT, method=Method.EAGLE3).vocabulary == TARGET
    assert spec(None, method=Method.NGRAM).vocabulary == TARGET
