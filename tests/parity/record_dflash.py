"""Record what `speculators` computes with small random DFlash drafters; see DFLASH.md for how to run it.

    python record_dflash.py OUTPUT     in an environment with the package `speculators`

Each case becomes a folder, the checkpoint as that library writes it, and `<folder>.expected.safetensors` with the
inputs, the target's embeddings where they are not saved, and the logits of whole blocks at several anchors.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LENGTH, NUM_ANCHORS, BLOCK_SIZE = 14, 4, 5
TAPS = [1, 2, 4]
SHAPE: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def randomise(module: torch.nn.Module, seed: int) -> None:
    """Give weights a size at which every part shows in the output."""
    rng = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(module.named_parameters()):
        noise = torch.randn(parameter.shape, generator=rng)
        parameter.data = (1.0 + 0.3 * noise if "norm" in name else 0.35 * noise).to(parameter.dtype)


def record(folder: Path, family: str, draft_vocab_size: int, seed: int, **flags: Any) -> None:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig, Qwen3Config

    extra = {"rope_parameters": LLAMA3_ROPE} if family == "llama" else {}
    layer = (LlamaConfig if family == "llama" else Qwen3Config)(**SHAPE, **extra)
    layer._attn_implementation = "eager"
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=draft_vocab_size,
        block_size=BLOCK_SIZE,
        aux_hidden_state_layer_ids=TAPS,
        mask_token_id=47,
        speculators_config=SpeculatorsConfig(
            algorithm="dflash",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK_SIZE - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
        **flags,
    )
    model = DFlashDraftModel(config).eval()
    randomise(model, seed)
    if model.use_draft_vocab:
        ids = torch.randperm(48, generator=torch.Generator().manual_seed(seed))[:draft_vocab_size].sort().values
        model.d2t.copy_(ids - torch.arange(draft_vocab_size))
        model.t2d.index_fill_(0, ids, True)
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(48, (LENGTH,), generator=rng)
    states = torch.randn(LENGTH, len(TAPS) * SHAPE["hidden_size"], generator=rng)
    torch.manual_seed(seed)  # of the anchors
    with torch.no_grad():
        _, logits, _, _, indices = model._backbone_forward(
            hidden_states=states[None],
            input_ids=tokens[None],
            loss_mask=torch.ones(1, LENGTH),
            verifier_last_hidden_states=torch.zeros(1, LENGTH, SHAPE["hidden_size"]),
            document_ids=torch.zeros(1, LENGTH, dtype=torch.long),
            max_anchors=NUM_ANCHORS,
        )
    model.save_pretrained(folder)
    for path in folder.glob("*.py"):
        path.unlink()  # the library's copy of its own code
    expected = {
        "tokens": tokens,
        "states": states,
        "anchors": indices.view(NUM_ANCHORS, BLOCK_SIZE)[:, 0].contiguous(),
        "logits": logits[0].view(NUM_ANCHORS, BLOCK_SIZE, -1).contiguous(),
        "embed_tokens.weight": model.embed_tokens.weight.detach(),
    }
    if not model.use_draft_vocab:
        expected["lm_head.weight"] = model.lm_head.weight.detach()
    save_file(expected, f"{folder}.expected.safetensors")


if __name__ == "__main__":
    output = Path(sys.argv[1])
    record(output / "speculators_dflash_qwen3", "qwen3", 48, 31)
    record(output / "speculators_dflash_reduced", "llama", 32, 32, sample_from_anchor=True)
