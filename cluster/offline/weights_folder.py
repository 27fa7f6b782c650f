"""A trainer's tensors as a folder of safetensors that every rank of an engine can read."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

SHARED_MEMORY = Path("/dev/shm")
MAX_FILE_BYTES = 1 << 30  # tensors of a GPU are copied to the host file by file

NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]  # `model.named_parameters()`


@contextlib.contextmanager
def weights_folder(tensors: NamedTensors) -> Iterator[Path]:
    """Write tensors into a temporary folder, in shared memory if they fit there; the folder is removed afterwards.

    Raises `ValueError` if there is none.
    """
    pairs = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
    if not pairs:
        raise ValueError("weights must be at least one tensor")
    num_bytes = sum(tensor.nbytes for _, tensor in pairs)
    fits = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > num_bytes
    with tempfile.TemporaryDirectory(prefix="outrider-weights-", dir=SHARED_MEMORY if fits else None) as name:
        folder = Path(name)
        for number, part in enumerate(_parts(pairs)):
            # cloned on a CPU: two names may share one storage, which the format refuses
            copies = {key: tensor.detach().to("cpu", copy=True).contiguous() for key, tensor in part}
            save_file(copies, folder / f"{number:05}.safetensors", metadata={"format": "pt"})
        yield folder


def _parts(pairs: Iterable[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Split tensors into runs of about `MAX_FILE_BYTES`."""
    part: list[tuple[str, torch.Tensor]] = []
    num_bytes = 0
    for name, tensor in pairs:
        if part and num_bytes + tensor.nbytes > MAX_FILE_BYTES:
            yield part
            part, num_bytes = [], 0
        part.append((name, tensor))
        num_bytes += tensor.nbytes
    yield part
