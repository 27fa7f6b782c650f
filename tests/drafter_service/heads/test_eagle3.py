from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.drafter_service.heads.eagle3 import Eagle3Config, Eagle3Head, default_taps, parse_config
from outrider.drafter_service.heads.head_layer import HeadError
from outrider.verifier_service.formats.checkpoint import StateDictSource
from tiny.heads import HIDDEN_SIZE, VOCAB_SIZE, eagle3_head, llama_layer, qwen3_layer

TOKENS = torch.tensor([[5, 9, 2, 44, 31, 8]])
POSITIONS = torch.arange(6)[None]
STATES = torch.randn(1, 6, 3 * HIDDEN_SIZE, generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def outputs(head: Eagle3Head) -> torch.Tensor:
    output, feedback = head(TOKENS, head.combine(STATES), POSITIONS)
    return torch.cat([head.in_target_ids(head.logits(output)), feedback], dim=-1)


@pytest.mark.parametrize("layout", ["original", "speculators"])
@pytest.mark.parametrize(
    ("family", "flags"),
    [
        (llama_layer, {}),
        (llama_layer, {"norm_before_residual": True, "norm_before_fc": True}),
        (qwen3_layer, {"fc_norm": True, "norm_output": True}),
    ],
)
def test_both_formats_give_the_same_head_back(
    tmp_path: Path, layout: Any, family: Callable[[], Any], flags: dict[str, bool]
) -> None:
    head = eagle3_head(layer=family(), **flags)
    head.save(tmp_path, layout=layout)
    again = Eagle3Head.from_folder(tmp_path)
    assert torch.equal(outputs(again), outputs(head))
    assert again.taps == (1, 3, 4)
    assert not again.borrowed
    prefix = "midlayer." if layout == "original" else "layers.0."
    assert f"{prefix}hidden_norm.weight" in load_file(tmp_path / "model.safetensors")


def test_the_two_maps_of_the_vocabulary_agree(tmp_path: Path) -> None:
    head = eagle3_head()
    head.save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["t2d"].nonzero()[:, 0].tolist() == (tensors["d2t"] + torch.arange(40)).tolist()
    assert tensors["t2d"].dtype == torch.bool


def test_ids_outside_the_draft_vocabulary_have_no_chance() -> None:
    head = eagle3_head()
    assert head.target_ids is not None
    logits = outputs(head)[0, :, :VOCAB_SIZE]
    known = logits.isfinite()
    assert known.all(dim=0).nonzero()[:, 0].tolist() == head.target_ids.tolist()
    assert not known.any(dim=0).logical_xor(known.all(dim=0)).any()


def test_a_head_of_the_whole_vocabulary_needs_no_map(tmp_path: Path) -> None:
    config = Eagle3Config(layer=llama_layer(), taps=(1,), draft_vocab_size=VOCAB_SIZE, target_hidden_size=HIDDEN_SIZE)
    head = Eagle3Head(config, target_ids=torch.arange(VOCAB_SIZE))
    assert head.target_ids is None
    head.save(tmp_path)
    assert "d2t" not in load_file(tmp_path / "model.safetensors")
    assert Eagle3Head.from_folder(tmp_path).target_ids is None


def test_a_pair_sees_only_what_came_before_it() -> None:
    head = eagle3_head()
    whole = outputs(head)
    with torch.no_grad():
        output, _ = head(TOKENS[:, :3], head.combine(STATES[:, :3]), POSITIONS[:, :3])
    torch.testing.assert_close(head.in_target_ids(head.logits(output)), whole[:, :3, :VOCAB_SIZE])


def test_every_weight_can_be_trained_but_the_borrowed_embedding() -> None:
    head = eagle3_head(norm_before_fc=True).train().requires_grad_(True)
    head.borrow_embedding(torch.randn(VOCAB_SIZE, HIDDEN_SIZE))
    output, feedback = head(TOKENS, head.combine(STATES), POSITIONS)
    again, _ = head(TOKENS, feedback, POSITIONS + 1)
    (head.logits(output).logsumexp(-1).sum() + head.logits(again).logsumexp(-1).sum()).backward()
    untrained = [name for name, parameter in head.named_parameters() if parameter.grad is None]
    assert untrained == ["embed_tokens.weight"]
    with pytest.raises(HeadError, match=r"embedding has shape \(3, 16\), the head expects \(61, 16\)"):
        head.borrow_embedding(torch.randn(3, HIDDEN_SIZE))


def test_a_borrowed_embedding_is_not_saved_and_taken_from_the_target_again(tmp_path: Path) -> None:
    head = eagle3_head()
    embedding = torch.randn(VOCAB_SIZE, HIDDEN_SIZE)
    head.borrow_embedding(embedding)
    head.save(tmp_path)
    assert "embed_tokens.weight" not in load_file(tmp_path / "model.safetensors")
    target = StateDictSource({"model.embed_tokens.weight": embedding, "lm_head.weight": torch.zeros(1)})
    again = Eagle3Head.from_folder(tmp_path, target=target)
    assert torch.equal(outputs(again), outputs(head))
    assert again.borrowed == {"embed_tokens.weight"}
    with pytest.raises(ValueError, match=r"'embed_tokens.weight' is missing, and no target was given"):
        Eagle3Head.from_folder(tmp_path)
    with pytest.raises(ValueError, match=r"'embed_tokens.weight' is missing, and the target has none"):
        Eagle3Head.from_folder(tmp_path, target=StateDictSource({"lm_head.weight": embedding}))
    narrow = StateDictSource({"model.embed_tokens.weight": embedding[:, :4]})
    with pytest.raises(ValueError, match=r"'model.embed_tokens.weight' has shape \(61, 4\), .* expects \(61, 16\)"):
        Eagle3Head.from_folder(tmp_path, target=narrow)


def test_half_precision_keeps_ids_and_rotary_frequencies_exact(tmp_path: Path) -> None:
    head = eagle3_head()
    head.save(tmp_path)
    half = Eagle3Head.from_folder(tmp_path, dtype="bfloat16")
    assert half.fc.weight.dtype == torch.bfloat16
    assert half.rotary.inv_freq.dtype == torch.float32
    assert half.target_ids is not None
    assert torch.equal(half.target_ids, head.target_ids)


Tensors = dict[str, torch.Tensor]
BROKEN: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "missing": (lambda tensors: tensors.pop("midlayer.mlp.up_proj.weight"), "'midlayer.mlp.up_proj.weight' is missing"),
    "unknown": (
        lambda tensors: tensors.update({"midlayer.extra.weight": torch.zeros(2)}),
        r"'midlayer.extra.weight' has no place",
    ),
    "shape": (
        lambda tensors: tensors.update({"midlayer.self_attn.q_proj.weight": torch.zeros(32, 16)}),
        r"'midlayer.self_attn.q_proj.weight' has shape \(32, 16\), expected \(32, 32\)",
    ),
    "no map": (lambda tensors: tensors.pop("d2t"), r"'d2t' is missing"),
    "map of another size": (lambda tensors: tensors.update({"d2t": torch.zeros(9).long()}), r"'d2t' has shape \(9,\)"),
    "map to one id twice": (
        lambda tensors: tensors.update({"d2t": -torch.arange(40)}),
        "d2t: not 40 different ids below 61",
    ),
    "map beyond the vocabulary": (
        lambda tensors: tensors.update({"d2t": torch.full((40,), 30)}),
        "d2t: not 40 different ids below 61",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_checkpoint_that_does_not_fit_is_named(tmp_path: Path, case: str) -> None:
    change, message = BROKEN[case]
    eagle3_head().save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        Eagle3Head.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers: 2"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({"model_type": "deepseek_v2"}, "model_type: .*'deepseek_v2'"),
        ({"draft_vocab_size": 62}, "draft_vocab_size: 62 of a vocabulary of 61"),
        ({"norm_before_fc": True, "fc_norm": True}, "fc_norm: not together with norm_before_fc"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 9]}}, r"\[2, 9\] of a target with 8 layers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 2]}}, "eagle_aux_hidden_state_layer_ids"),
        ({"logit_scale": 0.5}, "logit_scale: 0.5"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"model_type": "mistral", "sliding_window": 8}, "sliding_window"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"]}, "sliding_window"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic' depends on"),
    ],
)
def test_a_config_that_cannot_be_served_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    eagle3_head().save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(HeadError, match=message):
        parse_config({**config, **change}, num_target_layers=8)


def test_another_speculators_type_is_refused(tmp_path: Path) -> None:
    eagle3_head().save(tmp_path, layout="speculators")
    config = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(HeadError, match="speculators_model_type: 'peagle'"):
        parse_config({**config, "speculators_model_type": "peagle"})


def test_taps_that_are_not_named_are_the_authors() -> None:
    config = {**llama_layer().to_diff_dict(), "model_type": "llama"}
    assert parse_config(config, num_target_layers=32).taps == default_taps(32) == (2, 16, 29)
    with pytest.raises(HeadError, match="eagle_aux_hidden_state_layer_ids: not in the config"):
        parse_config(config)
