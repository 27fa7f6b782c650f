"""A model's tokenizer, and what it says of the model's vocabulary."""

from __future__ import annotations

import shutil
from pathlib import Path

from outrider.drafter_service.embedded import draft_path, target_path
from outrider.verifier_service.messages.link import vocab_fingerprint
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.tokenizer import fingerprint_of, load_tokenizer

TARGET = ModelConfig(path=str(target_path()))


def test_the_fingerprint_is_that_of_the_tokenizers_vocabulary():
    assert fingerprint_of(TARGET) == vocab_fingerprint(load_tokenizer(TARGET).get_vocab())


def test_models_of_one_vocabulary_have_one_fingerprint():
    assert fingerprint_of(TARGET) == fingerprint_of(ModelConfig(path=str(draft_path())))


def test_a_model_without_a_tokenizer_has_none(tmp_path: Path):
    shutil.copy(target_path() / "config.json", tmp_path)
    assert fingerprint_of(ModelConfig(path=str(tmp_path))) == ""
