"""A small mixture of experts, trained for minutes on the standard library's sources, byte by byte; and its steps."""

from __future__ import annotations

import random
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.runner import ModelRunner
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup

SIZES = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 512,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.01,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
BATCH, WINDOW, RATE = 16, 128, 2e-3
LENGTH, BLOCK_SIZE = 256, 16  # of a text that is walked through
NUM_READ = 32  # of its tokens, before the steps begin


def sources() -> tuple[bytes, bytes]:
    """Return text to train on, and other text to measure with."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    held = files[::10]
    return tuple(  # type: ignore[return-value]
        b"".join(file.read_bytes() for file in part) for part in ([f for f in files if f not in held], held)
    )


def train(folder: Path, seconds: float, say: Callable[[str], None]) -> None:
    """Train for so long and write the checkpoint."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("olmoe", **SIZES), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    text, rng = torch.frombuffer(bytearray(sources()[0]), dtype=torch.uint8), random.Random(0)
    begin_s, num_steps, loss = time.monotonic(), 0, 0.0
    while time.monotonic() - begin_s < seconds:
        starts = [rng.randrange(len(text) - WINDOW) for _ in range(BATCH)]
        tokens = torch.stack([text[start : start + WINDOW] for start in starts]).long()
        found = model(input_ids=tokens, labels=tokens)
        found.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        num_steps, loss = num_steps + 1, 0.95 * loss + 0.05 * found.loss.item()
    say(f"trained for {num_steps} steps of {BATCH * WINDOW} bytes, loss {loss / (1 - 0.95**num_steps):.2f} nats a byte")
    model.save_pretrained(folder)


def load(folder: Path, num_cached: int | None = None, num_threads: int = 2) -> ModelRunner:
    config = ModelConfig(
        path=str(folder),
        num_cached_experts=num_cached,
        num_kv_blocks=256,
        block_size=BLOCK_SIZE,
        device="cpu",
        check_logits=False,
        num_threads=num_threads,
    )
    return ModelRunner(config, TensorParallelGroup.single())


def texts(count: int, seed: int) -> list[list[int]]:
    """Return passages of text that no mixture was trained on."""
    held, rng = sources()[1], random.Random(seed)
    return [[*held[start : start + LENGTH]] for start in (rng.randrange(len(held) - LENGTH) for _ in range(count))]


def walk(sequence: list[int], num_tokens: int) -> Iterator[ScheduledBatch]:
    """Yield the steps over a text: its first tokens, then `num_tokens` at a time, as if all drafts were accepted."""
    stops = [NUM_READ, *range(NUM_READ + num_tokens, LENGTH + 1, num_tokens)]
    for start, stop in zip([0, *stops], stops, strict=False):
        yield step_of(sequence, start, stop)


def step_of(sequence: list[int], start: int, stop: int) -> ScheduledBatch:
    return ScheduledBatch(
        token_ids=sequence[start:stop],
        positions=[*range(start, stop)],
        slot_mapping=[*range(start, stop)],
        query_lengths=[stop - start],
        context_lengths=[stop],
        block_tables=[[*range(-(-stop // BLOCK_SIZE))]],
        logits_indices=[*range(stop - start)],
    )
