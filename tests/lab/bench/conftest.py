"""What the benches measure in their tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fakes.backend import build_tokenizer
from tiny.models import make_checkpoint


@pytest.fixture(scope="module")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A pair whose drafter is the target with one weight changed: often right, not always."""
    target, draft = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft")
    make_checkpoint(target)
    model = make_checkpoint(draft)
    with torch.no_grad():
        model.lm_head.weight.mul_(1 + 0.5 * torch.rand(model.lm_head.weight.shape, generator=torch.manual_seed(0)))
    model.save_pretrained(draft)
    build_tokenizer().save_pretrained(target)
    return target, draft
