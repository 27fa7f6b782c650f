"""The prompts that figures are taken from: of eight kinds, as a user says them, through a model's chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.tokenizer import load_tokenizer

PROMPTS = Path(__file__).parent / "peers" / "prompts.jsonl"


def chat_encoder(tokenizer: Any) -> Callable[[str], Sequence[int]]:
    """Return what writes a user's words through the model's chat template, as token ids."""

    def encode(text: str) -> Sequence[int]:
        message = [{"role": "user", "content": text}]
        return tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"]

    return encode


def chat_prompts(encode: Callable[[str], Sequence[int]]) -> list[tuple[int, ...]]:
    """Return the committed prompts as the model's chat template writes them."""
    return [tuple(encode(json.loads(line)["prompt"])) for line in PROMPTS.read_text().splitlines()]


def encoded_prompts(config: ModelConfig) -> list[tuple[int, ...]]:
    """Return the committed prompts, through the model's chat template where it has one."""
    tokenizer: Any = load_tokenizer(config)
    return chat_prompts(tokenizer.encode if tokenizer.chat_template is None else chat_encoder(tokenizer))
