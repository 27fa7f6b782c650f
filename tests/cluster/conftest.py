"""What the gateway's tests share."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from fakes.backend import build_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()
