"""Findings of a start about a checkpoint on this machine (checked logits, step times), kept for the next start.

One small file per kind of start in the cache folder. Its name is a hash of everything that findings depend on: the
checkpoint's files, how it is served, the machine, and the versions of our code and the libraries.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from outrider.verifier_service.cache import cache_folder

logger = logging.getLogger(__name__)

OUR_CODE = Path(__file__).parent  # a change of any file of the verifier invalidates findings
MAX_STARTS = 256  # files to keep


class StartMemory:
    """Findings of one kind of start, by name; an unreadable or unwritable file counts as missing."""

    def __init__(
        self, settings: Mapping[str, Any], folder: Path, device: torch.device, *, rank: int = 0, is_anew: bool = False
    ) -> None:
        """`settings`: how the checkpoint in `folder` is served. `is_anew`: ignore earlier findings."""
        parts = (
            *(f"{name}={value}" for name, value in sorted(settings.items())),
            *(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in _files(folder)),
            *(_machine(device), str(torch.get_num_threads()), f"rank {rank}"),
            *(torch.__version__, transformers.__version__, _our_version()),
        )
        name = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]
        self._path = cache_folder() / "starts" / f"{name}.json"
        self._found: dict[str, Any] = {}
        if not is_anew:
            with contextlib.suppress(OSError, ValueError, TypeError):
                self._found = dict(json.loads(self._path.read_text()))

    def recall(self, name: str) -> Any:
        """Return a finding; None if there is none."""
        return self._found.get(name)

    def remember(self, name: str, finding: Any) -> None:
        """Keep a finding that JSON can hold."""
        self._found[name] = finding
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._path.parent, delete=False) as file:
                json.dump(self._found, file)
            os.replace(file.name, self._path)  # atomic
            _forget_old_ones(self._path.parent)
        except OSError as error:
            logger.warning("what this start found out is not kept, the next one takes as long: %s", error)


def _forget_old_ones(folder: Path) -> None:
    files = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
    for path in files[:-MAX_STARTS]:
        path.unlink(missing_ok=True)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else [folder]


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_properties(device).total_memory}"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    name = next((line for line in lines if line.startswith("model name")), platform.processor())
    return f"{name} {len(os.sched_getaffinity(0))}"


@functools.cache
def _our_version() -> str:
    """Hash the verifier's source; two states of a checkout may have one version number."""
    digest = hashlib.sha256()
    for path in sorted(OUR_CODE.rglob("*")):
        if path.suffix in (".py", ".cpp", ".h"):
            digest.update(path.read_bytes())
    return digest.hexdigest()
