from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.drafter_service.heads.eagle import EagleHead
from outrider.drafter_service.heads.head_layer import HeadError
from outrider.verifier_service.formats.checkpoint import StateDictSource
from outrider.verifier_service.messages.draft import FINAL_TAP
from tiny.heads import HIDDEN_SIZE, eagle_head, llama_layer, randomised

TOKENS = torch.tensor([[5, 9, 2, 44, 31, 8]])
STATES = torch.randn(1, 6, HIDDEN_SIZE, generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def outputs(head: EagleHead) -> torch.Tensor:
    output, feedback = head(TOKENS, head.combine(STATES), torch.arange(6)[None])
    assert torch.equal(output, feedback), "what it predicts from takes the place of the target's state"
    return head.logits(output)


def saved_without(head: EagleHead, folder: Path, *names: str) -> dict[str, torch.Tensor]:
    head.borrowed = frozenset(names)
    head.save(folder)
    return {name: head.get_parameter(name).data for name in names}


def test_it_reads_the_targets_final_states() -> None:
    assert eagle_head().taps == (FINAL_TAP,)


def test_the_output_embedding_comes_from_the_target(tmp_path: Path) -> None:
    head = eagle_head()
    lent = saved_without(head, tmp_path, "lm_head.weight")
    again = EagleHead.from_folder(tmp_path, target=StateDictSource(lent))
    assert torch.equal(outputs(again), outputs(head))
    assert again.borrowed == {"lm_head.weight"}


def test_a_target_with_tied_embeddings_lends_its_embedding_twice(tmp_path: Path) -> None:
    head = eagle_head()
    head.lm_head.weight.data = head.embed_tokens.weight.data
    lent = saved_without(head, tmp_path, "lm_head.weight", "embed_tokens.weight")
    target = StateDictSource({"model.embed_tokens.weight": lent["embed_tokens.weight"]})
    assert torch.equal(outputs(EagleHead.from_folder(tmp_path, target=target)), outputs(head))


def test_a_bias_of_the_projection_is_kept(tmp_path: Path) -> None:
    head = EagleHead(llama_layer(), has_fc_bias=True)
    randomised(head, 4)
    head.save(tmp_path)
    assert torch.equal(outputs(EagleHead.from_folder(tmp_path)), outputs(head))


def test_a_norm_before_its_attention_has_no_place(tmp_path: Path) -> None:
    eagle_head().save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"layers.0.input_layernorm.weight": torch.ones(16)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"'layers.0.input_layernorm.weight' has no place"):
        EagleHead.from_folder(tmp_path)


def test_several_layers_are_refused() -> None:
    with pytest.raises(HeadError, match="num_hidden_layers: 2"):
        EagleHead(llama_layer(num_hidden_layers=2))
