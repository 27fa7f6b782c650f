"""GGUF files (llama.cpp's format): converted once into a folder of safetensors.

The weights are dequantised to bfloat16: memory and speed are those of a 16-bit checkpoint. The library must know the
family's GGUF layout.
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
PACKAGES = ("gguf", "accelerate")  # needed by the library to read GGUF files

logger = logging.getLogger(__name__)


def is_gguf(path: str) -> bool:
    """Return whether a model's path names a GGUF file."""
    return path.endswith(SUFFIX)


def local_path(path: str) -> str:
    """Return a GGUF file's converted folder, converting it if needed; any other path unchanged."""
    return str(convert_once(Path(path))) if is_gguf(path) else path


def is_to_be_converted(path: str) -> bool:
    """Return whether a path names a GGUF file that no process has converted yet."""
    return is_gguf(path) and Path(path).is_file() and not _folder_of(Path(path)).is_dir()


def _folder_of(path: Path) -> Path:
    """Return where a GGUF file's checkpoint is, or will be."""
    return cache_folder() / "gguf" / f"{path.stem}-{_key(path)}"


def convert_once(path: Path) -> Path:
    """Return the folder of a GGUF file's checkpoint; convert the file first, unless an earlier process did.

    Raises `ValueError` if the file is missing, packages are not installed or the library cannot read it.
    """
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    folder = _folder_of(path)
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            _convert(path, Path(scratch) / "model")
            _move(Path(scratch) / "model", folder)
    return folder


def _key(path: Path) -> str:
    """Return a key of the file's path, size and modification time."""
    status = path.resolve().stat()
    return hashlib.sha256(f"{path.resolve()} {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()[:16]


def _move(made: Path, folder: Path) -> None:
    """Move a finished folder to its place; if another process was faster, keep that one's."""
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
        del config.quantization_config  # else the library refuses to save dequantised weights
    config.dtype = torch.bfloat16
    model = type(loaded)(config).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    size_gb, file_gb = sum(weight.nbytes for weight in model.parameters()) / 1e9, path.stat().st_size / 1e9
    logger.warning("%s: dequantised to %.2f GB of bfloat16, the file has %.2f GB", path, size_gb, file_gb)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(folder)
