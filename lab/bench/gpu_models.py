"""The models of `outrider bench gpu`: a Llama of random weights, and its first layers to draft for it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchShape:
    """How large everything is."""

    target: dict[str, Any]  # of a Llama's config
    num_draft_layers: int
    tail_scale: float  # what the target's other layers weigh: the larger, the fewer drafts are accepted
    streams: tuple[int, ...]
    num_steps: int  # of every measurement
    num_prompts: int  # that are compared, drafted and plain
    num_tokens: int  # of each of them
    prompt_length: int
    max_model_len: int
    kv_bytes: int  # of each model
    copy_bytes: int  # to measure a bandwidth by

    def in_float32(self) -> BenchShape:
        """Return one of the same width in float32, of a quarter of the layers: beside a check's copy it fits a card."""
        num_layers = max(2, self.target["num_hidden_layers"] // 4)
        target = {**self.target, "num_hidden_layers": num_layers, "dtype": "float32"}
        kv_bytes = min(self.kv_bytes, 2 << 30)
        return replace(self, target=target, num_draft_layers=max(1, num_layers // 4), kv_bytes=kv_bytes)

    def config_of(self, num_layers: int) -> dict[str, Any]:
        """Return the whole config of the target, or of its first layers."""
        return {
            "model_type": "llama",
            "num_hidden_layers": num_layers,
            "tie_word_embeddings": False,
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
            "max_position_embeddings": self.max_model_len,
            **{name: value for name, value in self.target.items() if name != "num_hidden_layers"},
        }


FULL = BenchShape(
    target={
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "dtype": "bfloat16",
    },
    num_draft_layers=4,  # with the head 1.4 B parameters that a forward reads
    tail_scale=0.01,
    streams=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    num_steps=32,
    num_prompts=64,
    num_tokens=64,
    prompt_length=64,
    max_model_len=1024,
    kv_bytes=16 << 30,
    copy_bytes=1 << 30,
)
TINY = BenchShape(
    target={
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "dtype": "float32",
    },
    num_draft_layers=1,
    tail_scale=0.03,
    streams=(1, 2),
    num_steps=4,
    num_prompts=4,
    num_tokens=8,
    prompt_length=8,
    max_model_len=256,
    kv_bytes=1 << 22,
    copy_bytes=1 << 22,
)


@contextlib.contextmanager
def models(shape: BenchShape) -> Iterator[tuple[Path, Path]]:
    """Make the pair's checkpoints, which hold no weights: the target's folder and the draft model's."""
    from outrider.verifier_service.model.random_weights import write_recipe

    num_layers = {"target": shape.target["num_hidden_layers"], "draft": shape.num_draft_layers}
    with tempfile.TemporaryDirectory(prefix="outrider-gpu-") as folder:
        for name, count in num_layers.items():
            write_recipe(
                Path(folder) / name,
                shape.config_of(count),
                num_head_layers=shape.num_draft_layers,
                tail_scale=shape.tail_scale,
            )
        yield Path(folder) / "target", Path(folder) / "draft"
