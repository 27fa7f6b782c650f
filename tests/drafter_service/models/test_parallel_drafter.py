from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes.drafter_play import ask_of, draft_of
from fakes.runner import FakeRunner, next_token
from outrider.drafter_service.engine.paged_drafter import PagedDrafter
from outrider.drafter_service.models.parallel_drafter import parse_mask_token_id
from outrider.drafter_service.service.drafter_spec import DrafterSpec
from outrider.drafter_service.service.drafters import build_drafter
from outrider.drafter_service.service.speculative_config import Method, SpeculativeConfig
from outrider.verifier_service.messages.draft import (
    DraftNeeds,
)
from outrider.verifier_service.model.config import ModelConfig
from tiny.drafters import parallel_drafter
from tiny.models import make_checkpoint


def drafter_of(runner: FakeRunner) -> PagedDrafter[Any]:
    return parallel_drafter(runner, torch.Generator().manual_seed(0), mask_token_id=96)


def test_only_what_is_new_is_computed() -> None:
    runner = FakeRunner()
    drafter = drafter_of(runner)
    draft_of(drafter, ask_of(range(20), length=4))
    draft_of(drafter, ask_of([*range(20), 30, 31], length=4, ask_id=2))
    draft_of(drafter, ask_of([*range(10), 50], length=3, ask_id=3))
    other = [*range(5), 60, 61, 62]
    result = draft_of(drafter, ask_of(other, length=1, ask_id=4))
    assert result.token_ids == (next_token(other, 97),)
    assert [batch.num_tokens for batch in runner.batches] == [20 + 3, 3 + 3, 1 + 2, 3]
    assert runner.batches[1].token_ids == [19, 30, 31, 96, 96, 96]
    assert runner.batches[1].positions == list(range(19, 25))
    assert runner.batches[1].logits_indices == [2, 3, 4, 5]


def test_forced_tokens_alone_need_no_forward() -> None:
    runner = FakeRunner()
    result = draft_of(drafter_of(runner), ask_of([1, 2], length=2, forced_ids=(5, 6, 7)))
    assert result.token_ids == (5, 6)
    assert runner.batches == []
    result = draft_of(drafter_of(runner), ask_of([1, 2], length=2, forced_ids=(5, 97)))
    assert result.token_ids == (5, next_token([1, 2, 5], 97)), "what the draft model does not know is not forced on it"


def test_the_mask_token_is_found_as_vllm_finds_it() -> None:
    assert parse_mask_token_id({"pard_token": 3}, 10) == 3
    assert parse_mask_token_id({"ptd_token_id": 4, "mask_token_id": None}, 10) == 4
    assert parse_mask_token_id({"pard_token": 3, "mask_token_id": 0}, 10) == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "pard_token: the model's config names no mask token"),
        ({"pard_token": 10}, "pard_token: 10 is no token of a vocabulary of 10"),
        ({"mask_token_id": True}, "mask_token_id: True"),
        ({"mask_token_id": "<mask>"}, "mask_token_id: '<mask>'"),
    ],
)
def test_a_config_without_a_mask_token_is_refused(config: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_mask_token_id(config, 10)


def test_it_is_built_from_a_configuration(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, vocab_size=97)
    model = ModelConfig(path=str(tmp_path), device="cpu")
    speculative = SpeculativeConfig(method=Method.PARALLEL_DRAFT, num_tree_nodes=6)
    spec = DrafterSpec(model=model, target=model, speculative=speculative)
    assert spec.loads_model
    with pytest.raises(ValueError, match="pard_token: the model's config names no mask token"):
        build_drafter(spec, runner=FakeRunner())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "pard_token": 90}))
    runner = FakeRunner()
    drafter = build_drafter(spec, runner=runner)
    assert drafter.needs == DraftNeeds()
    drafter.draft([ask_of([4, 5], length=3)], max_num_tokens=64)
    assert runner.batches[0].token_ids == [4, 5, 90, 90]


# --- through the engine ---
