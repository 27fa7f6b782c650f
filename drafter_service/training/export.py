"""Write a trained model as a transformers folder."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

log = logging.getLogger(__name__)


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a transformers folder, replacing the old one atomically by a rename."""
    fresh, old = folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")
    for stale in (fresh, old):
        shutil.rmtree(stale, ignore_errors=True)
    model.save_pretrained(fresh)
    (fresh / "model.safetensors").chmod(0o644)  # safetensors makes it private, which a wheel must not
    tokenizer.save_pretrained(fresh, save_jinja_files=False)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    log.info("wrote %s", folder)
