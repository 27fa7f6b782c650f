"""Load a model's tokenizer, and fingerprint its vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.verifier_service.formats.gguf import local_path
from outrider.verifier_service.messages.link import vocab_fingerprint
from outrider.verifier_service.model.config import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer."""
    from transformers import AutoTokenizer  # imported here: it imports torch, which takes seconds in every replica

    return AutoTokenizer.from_pretrained(
        local_path(model.path), revision=model.revision, trust_remote_code=model.trust_remote_code
    )


def end_token_id(model: ModelConfig) -> int | None:
    """Return the id of the tokenizer's end-of-sequence token; None without one, or without a tokenizer."""
    try:
        tokenizer = load_tokenizer(model)
    except (OSError, ValueError):
        return None
    token, id_ = tokenizer.eos_token, tokenizer.eos_token_id
    return id_ if token is not None and tokenizer.convert_ids_to_tokens(id_) == token else None


def fingerprint_of(model: ModelConfig) -> str:
    """Return the fingerprint of a model's vocabulary; empty without a tokenizer."""
    try:
        return vocab_fingerprint(load_tokenizer(model).get_vocab())
    except (OSError, ValueError):
        return ""
