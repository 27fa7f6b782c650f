"""Load tokenizers, and tell whether two models speak the same vocabulary."""

from __future__ import annotations

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from outrider.cluster.config import ServiceConfig
from outrider.drafter_service.speculative_config import WHOLE_MODELS
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
    """Return the vocabulary in which drafts are made; empty: not known, a model that came without a tokenizer.

    Whatever is no model of its own, or speaks another vocabulary and translates, drafts in the target's.
    """
    spec = config.drafter_spec
    assert spec is not None
    if spec.speculative.method not in WHOLE_MODELS or spec.speculative.vocabulary != "same" or spec.model is None:
        return target_vocabulary_fingerprint(config)
    try:
        return vocab_fingerprint(load_tokenizer(spec.model).get_vocab())
    except OSError:
        return ""
