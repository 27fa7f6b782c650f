"""Load tokenizers, and tell whether two models speak the same vocabulary."""

from __future__ import annotations

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from outrider.cluster.config import ServiceConfig
from outrider.verifier_service.link_messages import vocab_fingerprint
from outrider.verifier_service.model_config import ModelConfig


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer that came with a model."""
    return AutoTokenizer.from_pretrained(
        model.path, revision=model.revision, trust_remote_code=model.trust_remote_code
    )


def target_vocabulary_fingerprint(config: ServiceConfig) -> str:
    return vocab_fingerprint(load_tokenizer(config.verifier_spec.model).get_vocab())


def draft_vocabulary_fingerprint(config: ServiceConfig) -> str:
    """Return the draft model's; empty, which is "not known", when it came without a tokenizer of its own."""
    spec = config.drafter_spec
    assert spec is not None
    try:
        return vocab_fingerprint(load_tokenizer(spec.model).get_vocab())
    except OSError:
        return ""
