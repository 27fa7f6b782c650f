from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fakes.drafter_play import ask_of, draft_of
from outrider.drafter_service.engine.drafter import Ask
from outrider.drafter_service.engine.paged_drafter import PagedDrafter
from outrider.drafter_service.heads.dflash import DFlashHead
from outrider.drafter_service.heads.head_layer import load_heads
from outrider.drafter_service.models.dflash_drafter import DFlashModel
from outrider.drafter_service.service.drafter_spec import DrafterSpec, state_taps
from outrider.drafter_service.service.drafters import build_drafter
from outrider.drafter_service.service.speculative_config import Method, SpeculativeConfig
from outrider.verifier_service.model.config import ModelConfig
from tiny.dflash import BLOCK_SIZE, dflash_head, slow_block
from tiny.drafters import one_pass_drafter
from tiny.heads import VOCAB_SIZE, states_of
from tiny.models import make_checkpoint

PROMPT = [5, 17, 3, 40, 22, 9, 31]
LENGTH = BLOCK_SIZE - 1


def drafter_of(head: DFlashHead, *, num_blocks: int = 64, **options: Any) -> PagedDrafter[Any]:
    model = DFlashModel(head, num_blocks=num_blocks, block_size=4, max_model_len=128)
    return one_pass_drafter(model, torch.Generator().manual_seed(0), **options)


def ask(head: DFlashHead, tokens: Sequence[int], ask_id: int = 1, **fields: Any) -> Ask:
    fields = {"states": states_of(tokens, head), "length": LENGTH, **fields}
    return ask_of(list(tokens), ask_id=ask_id, **fields)


def greedy_chain(head: DFlashHead, tokens: Sequence[int], first: int = 0) -> list[int]:
    return slow_block(head, tokens, states_of(tokens, head, first))[1:].argmax(dim=1).tolist()


def prompt_of(length: int, start: int = 3) -> list[int]:
    return [(7 * i + start) % VOCAB_SIZE for i in range(length)]


# --- what is drafted ---


@pytest.mark.parametrize("num_accepted", [0, 1, 3, 5])
def test_each_round_adds_the_states_of_what_was_committed(num_accepted: int) -> None:
    head = dflash_head()
    drafter = drafter_of(head)
    first = draft_of(drafter, ask(head, PROMPT))
    grown = [*PROMPT, *first.token_ids[:num_accepted], 1]
    with_old_gone = states_of(grown, head)
    with_old_gone[: len(PROMPT) - 1] = 1e6  # what was taken in is not read again
    second = draft_of(drafter, ask(head, grown, ask_id=2, states=with_old_gone))
    assert list(second.token_ids) == greedy_chain(head, grown)
    third = draft_of(drafter, ask(head, [*PROMPT[:4], 2, 50], ask_id=3))  # another text
    assert list(third.token_ids) == greedy_chain(head, [*PROMPT[:4], 2, 50])


def test_a_context_begins_after_the_states_that_are_gone() -> None:
    head = dflash_head()
    tokens = prompt_of(30)
    drafter = drafter_of(head)
    result = draft_of(drafter, ask(head, tokens, states=states_of(tokens, head, 20)))
    assert list(result.token_ids) == greedy_chain(head, tokens, 20)
    assert result.token_ids != tuple(greedy_chain(head, tokens)), "or the gap could not show"
    result = draft_of(drafter, ask(head, [*tokens, 4], ask_id=2, states=states_of([*tokens, 4], head, 20)))
    assert list(result.token_ids) == greedy_chain(head, [*tokens, 4], 20)


def test_a_gap_that_a_context_would_grow_into_makes_it_begin_anew() -> None:
    head = dflash_head()
    tokens = prompt_of(30)
    drafter = drafter_of(head)
    draft_of(drafter, ask(head, tokens[:8]))
    result = draft_of(drafter, ask(head, tokens, ask_id=2, states=states_of(tokens, head, 20)))
    assert list(result.token_ids) == greedy_chain(head, tokens, 20)
    result = draft_of(drafter, ask(head, tokens[:26], ask_id=3, states=states_of(tokens[:26], head, 4)))
    assert list(result.token_ids) == greedy_chain(head, tokens[:26], 20), "what is cached is used"


def test_only_tokens_of_its_vocabulary_are_drafted() -> None:
    head = dflash_head(num_ids=24)
    result = draft_of(drafter_of(head), ask(head, PROMPT))
    assert list(result.token_ids) == greedy_chain(head, PROMPT)
    assert all(token_id < 48 and token_id % 2 == 0 for token_id in result.token_ids)


# --- loading ---


def write(folder: Path, head: DFlashHead, *, without: Sequence[str] = ()) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        **head.description.to_diff_dict(),
        "model_type": "qwen3",
        "block_size": head.config.block_size,
        "dflash_config": {
            "mask_token_id": head.config.mask_token_id,
            "target_layer_ids": [tap - 1 for tap in head.taps],
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.contiguous() for name, tensor in head.state_dict().items() if name not in without}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_loaded_drafter_drafts_as_its_head(tmp_path: Path) -> None:
    head = dflash_head()
    target = tmp_path / "target"
    target.mkdir()
    shared = ("embed_tokens.weight", "lm_head.weight")
    save_file({name: head.state_dict()[name].contiguous() for name in shared}, target / "model.safetensors")
    folder = write(tmp_path / "head", head, without=shared)
    config = ModelConfig(path=str(folder), device="cpu", num_kv_blocks=16, block_size=4, max_model_len=40)
    (loaded,) = load_heads(DFlashHead, [folder], config, target=target, num_target_layers=4)
    model = DFlashModel.sized_by(loaded, config)
    assert (model.num_blocks, model.block_size, model.max_model_len) == (16, 4, 40)
    result = draft_of(one_pass_drafter(model, torch.Generator()), ask(head, PROMPT))
    assert list(result.token_ids) == greedy_chain(head, PROMPT)
    with pytest.raises(ValueError, match=r"'embed_tokens\.weight' is missing"):
        load_heads(DFlashHead, [folder], config)
    with pytest.raises(ValueError, match="tensor_parallel_size: 2"):
        load_heads(DFlashHead, [folder], replace(config, tensor_parallel_size=2))


def test_it_is_built_from_a_configuration(tmp_path: Path) -> None:
    folder = write(tmp_path / "head", dflash_head(), without=("lm_head.weight",))
    make_checkpoint(tmp_path / "target", vocab_size=VOCAB_SIZE, hidden_size=16, num_hidden_layers=3)
    target = ModelConfig(path=str(tmp_path / "target"), device="cpu")
    head = ModelConfig(path=str(folder), device="cpu", num_kv_blocks=16, block_size=4, max_model_len=40)
    spec = DrafterSpec(model=head, target=target, speculative=SpeculativeConfig(method=Method.DFLASH))
    assert state_taps(spec) == build_drafter(spec).needs.taps == (1, 2)
    assert not spec.loads_model
    make_checkpoint(tmp_path / "target", vocab_size=VOCAB_SIZE, hidden_size=16, num_hidden_layers=2)
    with pytest.raises(ValueError, match=r"target_layer_ids .* 2 layers"):
        state_taps(spec)


# --- through the engine ---
