"""Checkpoints of every kind of drafter, random and small, for whatever target: exactness does not ask for skill."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config

from outrider.drafter_service.heads.dflash import DFlashConfig, DFlashHead
from outrider.drafter_service.heads.eagle import EagleHead
from outrider.drafter_service.heads.eagle3 import Eagle3Config, Eagle3Head
from outrider.drafter_service.heads.head_files import write_head
from outrider.drafter_service.heads.medusa import MedusaHeads
from outrider.drafter_service.heads.mlp_speculator import MlpSpeculator
from outrider.drafter_service.heads.mtp import MtpHead
from outrider.drafter_service.service.speculative_config import Method

NUM_GUESSES = 4  # of heads that have one part for each draft position
PERTURBATION = 0.1
BORROWED = frozenset({"embed_tokens.weight", "lm_head.weight"})
# (ours, that of the `speculators` library)
MTP_NAMES = (
    ("layer.", ""),
    ("eh_proj.", "input_proj."),
    ("enorm.", "token_layernorm."),
    ("hnorm.", "hidden_layernorm."),
    ("norm.", "final_layernorm."),
)


def head_folder(root: Path, target: Path, method: Method, seed: int = 0) -> Path:
    """Write a random head of a method for a target, unless it is there; return its folder."""
    folder = root / f"{method}-{seed}"
    if not folder.exists():
        folder.mkdir(parents=True)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(100 + seed)
            _WRITERS[method](folder, AutoConfig.from_pretrained(target))
    return folder


def perturbed_draft_model(root: Path, target: Path) -> Path:
    """Write a target with every weight somewhat off: a draft model that is often right."""
    folder = root / "perturbed"
    if not folder.exists():
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += torch.randn(parameter.shape, generator=generator) * parameter.std() * PERTURBATION
        model.save_pretrained(folder)
        shutil.copy(target / "tokenizer.json", folder)
    return folder


def masked_draft_model(root: Path, draft: Path) -> Path:
    """Write a draft model whose config names a mask token, as PARD's do."""
    folder = root / "masked"
    if not folder.exists():
        shutil.copytree(draft, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "pard_token": config["vocab_size"] - 1}))
    return folder


def renumbered_draft_model(root: Path, draft: Path) -> Path:
    """Write a draft model with a tokenizer of its own: the same tokens but for one, under other ids."""
    folder = root / "renumbered"
    if not folder.exists():
        model = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32)
        size = model.config.vocab_size
        order = torch.randperm(size, generator=torch.Generator().manual_seed(1))  # new id -> old id
        with torch.no_grad():
            for weight in {id(w): w for w in (model.get_input_embeddings().weight, model.lm_head.weight)}.values():
                weight.copy_(weight[order].clone())
        model.save_pretrained(folder)
        tokens = list(small_tokens(size))
        tokens[size - 1] = "é"  # the target has another one in its place
        write_tokenizer(folder, [tokens[old] for old in order.tolist()])
    return folder


def small_tokens(size: int) -> str:
    """Return the characters that are the tokens of a small target."""
    return "abcdefghijklmnop"[:size]


def write_tokenizer(folder: Path, tokens: str | list[str]) -> None:
    """Write a tokenizer whose tokens are single characters."""
    tokenizer = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))


def _shape(target: PreTrainedConfig) -> dict[str, object]:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    described = {name: getattr(target, name) for name in names}
    return {
        **described,
        "head_dim": target.head_dim,
        "num_hidden_layers": 1,
        "max_position_embeddings": target.max_position_embeddings,
        "pad_token_id": None,
    }


def _randomise(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape)
        if parameter.ndim == 1:
            parameter.data = ("norm" in name) + 0.2 * noise
        else:
            parameter.data = noise * (0.5 if "embed" in name else 1.5 * parameter.shape[-1] ** -0.5)


def _write_medusa(folder: Path, target: PreTrainedConfig) -> None:
    heads = MedusaHeads(hidden_size=target.hidden_size, vocab_size=target.vocab_size, num_heads=NUM_GUESSES)
    _randomise(heads)
    heads.save(folder)


def _write_mlp_speculator(folder: Path, target: PreTrainedConfig) -> None:
    speculator = MlpSpeculator(emb_dim=target.hidden_size, vocab_size=target.vocab_size, n_predict=NUM_GUESSES)
    _randomise(speculator)
    speculator.save(folder)


def _write_eagle(folder: Path, target: PreTrainedConfig) -> None:
    head = EagleHead(LlamaConfig(**_shape(target)))
    _randomise(head)
    head.borrowed = BORROWED
    head.save(folder)


def _write_eagle3(folder: Path, target: PreTrainedConfig) -> None:
    """Draft all tokens but one, from an early, a middle and the last layer."""
    layer = LlamaConfig(**_shape(target))
    last = target.num_hidden_layers - 1
    config = Eagle3Config(
        layer=layer,
        taps=tuple(sorted({0, last // 2 + 1, last})),
        draft_vocab_size=target.vocab_size - 1,
        target_hidden_size=target.hidden_size,
    )
    head = Eagle3Head(config, target_ids=torch.arange(1, target.vocab_size))
    _randomise(head)
    head.borrowed = frozenset({"embed_tokens.weight"})
    head.save(folder)


def _write_mtp(folder: Path, target: PreTrainedConfig) -> None:
    """Write the layout of the `speculators` library, which leaves the target's checkpoint as it is."""
    layer = Qwen3Config(**_shape(target))
    head = MtpHead(layer)
    _randomise(head)
    tensors = {}
    for name, tensor in head.state_dict().items():
        ours, theirs = next((pair for pair in MTP_NAMES if name.startswith(pair[0])), ("", ""))
        if name not in BORROWED:
            tensors[f"mtp_layers.0.{theirs}{name.removeprefix(ours)}"] = tensor
    config = {"speculators_model_type": "mtp", "transformer_layer_config": layer.to_dict()}
    write_head(folder, config, tensors)


def _write_dflash(folder: Path, target: PreTrainedConfig) -> None:
    layer = Qwen3Config(**_shape(target))
    config = DFlashConfig(
        layer=layer,
        taps=(0, target.num_hidden_layers - 1),
        draft_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size,
        mask_token_id=target.vocab_size - 1,
        block_size=NUM_GUESSES + 1,
    )
    head = DFlashHead(config)
    _randomise(head)
    described = {
        "speculators_model_type": "dflash",
        "transformer_layer_config": layer.to_dict(),
        "aux_hidden_state_layer_ids": list(config.taps),
        "mask_token_id": config.mask_token_id,
        "block_size": config.block_size,
        "target_hidden_size": config.target_hidden_size,
    }
    tensors = {name: tensor for name, tensor in head.state_dict().items() if name not in BORROWED}
    write_head(folder, described, tensors)


_WRITERS: dict[Method, Callable[[Path, PreTrainedConfig], None]] = {
    Method.MEDUSA: _write_medusa,
    Method.MLP_SPECULATOR: _write_mlp_speculator,
    Method.EAGLE: _write_eagle,
    Method.EAGLE3: _write_eagle3,
    Method.MTP: _write_mtp,
    Method.DFLASH: _write_dflash,
}
