"""GGUF files, the format of llama.cpp: converted once into a folder of safetensors, which everything else reads.

The weights are dequantised: nothing is gained in memory or speed over a checkpoint of 16 bit, and the tokens are those
of the dequantised weights in bfloat16. Families are those whose GGUF layout the library knows.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import tempfile
from pathlib import Path
from typing import Any

from outrider.verifier_service.cache import cache_folder

SUFFIX = ".gguf"
PACKAGES = ("gguf", "accelerate")  # what the library reads such files with

logger = logging.getLogger(__name__)


def is_gguf(path: str) -> bool:
    """Tell whether a model's path names a GGUF file."""
    return path.endswith(SUFFIX)


def local_path(path: str) -> str:
    """Return what to read for a model's path: a GGUF file's converted folder, else the path itself."""
    return str(converted_folder(Path(path))) if is_gguf(path) else path


def converted_folder(path: Path) -> Path:
    """Return the folder of a GGUF file's checkpoint, converting it where no process has done so before.

    Raises `ValueError` where the file is missing, its packages are not installed or the library cannot read it.
    """
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    folder = cache_folder() / "gguf" / f"{path.stem}-{_key(path)}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            _convert(path, Path(scratch) / "model")
            _move(Path(scratch) / "model", folder)
    return folder


def _key(path: Path) -> str:
    """Tell a file from others of its name, and from what it was before, without reading it."""
    status = path.resolve().stat()
    return hashlib.sha256(f"{path.resolve()} {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()[:16]


def _move(made: Path, folder: Path) -> None:
    """Put a finished folder in its place; another process may have been faster, and is right as well."""
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _convert(path: Path, folder: Path) -> None:
    """Write the file's model in bfloat16, its tokenizer and its chat template."""
    if any(importlib.util.find_spec(package) is None for package in PACKAGES):
        raise ValueError(f"{path}: GGUF files need packages that are not installed: pip install 'outrider[gguf]'")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, name = str(path.parent), path.name
    loaded: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
    config = loaded.config
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # else the library refuses to save what is not quantised any more
    config.dtype = torch.bfloat16
    model = type(loaded)(config).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    size_gb, file_gb = sum(weight.nbytes for weight in model.parameters()) / 1e9, path.stat().st_size / 1e9
    logger.warning("%s: dequantised to %.2f GB of bfloat16, the file has %.2f GB", path, size_gb, file_gb)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(folder)
