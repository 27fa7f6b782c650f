"""Models of one shape with other weights, and a trainer in a process of its own that broadcasts them over gloo.

The trainer is written from what RL trainers do: rendezvous at a TCP address, the group's name as the store's prefix,
torch's helper for further groups.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import PreTrainedModel

from outrider.verifier_service.messages.engine import InitWeightsGroup, UpdateWeights
from outrider.verifier_service.model.ranks import free_port
from tiny.forking import FORKING
from tiny.models import make_model

NOISE = 0.5  # of a matrix's own spread: most tokens change
TIMEOUT_S = 30.0


def perturb(model: PreTrainedModel, *, seed: int = 5, noise: float = NOISE) -> PreTrainedModel:
    """Add seeded noise to every weight, norms and biases included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter += drawn * (parameter.std() if parameter.numel() > 1 else 1.0) * noise
    return model


def write_two(folder: Path, model_type: str = "llama", **options: object) -> tuple[str, str]:
    """Write a model and a perturbed one; return their folders."""
    make_model(model_type, **options).save_pretrained(folder / "old")
    perturb(make_model(model_type, **options)).save_pretrained(folder / "new")
    return str(folder / "old"), str(folder / "new")


def tensors_of(folder: str) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "model.safetensors")


@dataclass
class Trainer:
    """The test's end of a trainer's process."""

    pipe: Connection
    joining: InitWeightsGroup
    process: Any  # of multiprocessing's context
    is_dead: bool = False
    may_fail: bool = False  # a broadcast that it has begun, since nobody listens any more

    def joins(self) -> InitWeightsGroup:
        """Let the trainer join, and return what the server must be told meanwhile."""
        self._say("join", vars_of(self.joining))
        return self.joining

    def buckets(self, folder: str, num_buckets: int) -> list[list[str]]:
        """Return the names of a folder's tensors in so many parts."""
        names = list(tensors_of(folder))
        size = -(-len(names) // num_buckets)
        return [names[first : first + size] for first in range(0, len(names), size)]

    def sends(self, folder: str, names: Sequence[str] | None = None, **fields: object) -> UpdateWeights:
        """Let the trainer broadcast tensors of a folder, and return what the server must be told meanwhile."""
        message = self.tells(folder, names, **fields)
        self._say("send", {"folder": folder, "names": message.names, "is_flattened": message.is_flattened})
        return message

    def tells(self, folder: str, names: Sequence[str] | None = None, **fields: object) -> UpdateWeights:
        """Return what the server must be told of tensors, which the trainer does not broadcast."""
        tensors = tensors_of(folder)
        chosen = list(tensors) if names is None else list(names)
        return UpdateWeights(
            call_id="update",
            names=tuple(chosen),
            dtypes=tuple(str(tensors[name].dtype).removeprefix("torch.") for name in chosen),
            shapes=tuple(tuple(tensors[name].shape) for name in chosen),
            group_name=self.joining.group_name,
            **fields,  # type: ignore[arg-type]
        )

    def dies(self) -> None:
        """End as a killed process does: between its calls, or within a broadcast."""
        self.is_dead = True
        self.process.kill()
        self.process.join()

    def _say(self, verb: str, arguments: object) -> None:
        self.pipe.send_bytes(json.dumps([verb, arguments]).encode())


def vars_of(message: InitWeightsGroup) -> dict[str, object]:
    return {name: getattr(message, name) for name in message.__slots__}


@contextmanager
def trainer(num_ranks: int = 1) -> Iterator[Trainer]:
    """A trainer's process, for a server of so many ranks."""
    near, far = FORKING.Pipe()
    process = FORKING.Process(target=_train, args=(far,), daemon=True)
    process.start()
    far.close()
    assert near.recv_bytes() == b"ready"
    port = free_port()
    joining = InitWeightsGroup(
        call_id="init",
        master_address="127.0.0.1",
        master_port=port,
        rank_offset=1,
        world_size=1 + num_ranks,
        group_name=f"slime-pp_{port}",  # of this test alone: all are in one process
        backend="gloo",
        timeout_s=TIMEOUT_S,
    )
    training = Trainer(near, joining, process)
    yield training
    near.close()
    process.join(TIMEOUT_S)
    assert process.exitcode == (-signal.SIGKILL if training.is_dead else 0) or training.may_fail


def _train(pipe: Connection) -> None:
    torch.set_num_threads(1)
    group: dist.ProcessGroup | None = None
    pipe.send_bytes(b"ready")
    while True:
        try:
            verb, arguments = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        if verb == "join":
            group = _joined(**arguments)
            continue
        tensors = tensors_of(arguments["folder"])
        chosen = [tensors[name].contiguous() for name in arguments["names"]]
        if arguments["is_flattened"]:
            chosen = [torch.cat([tensor.flatten().view(torch.uint8) for tensor in chosen])]
        for work in [dist.broadcast(tensor, 0, group=group, async_op=True) for tensor in chosen]:
            work.wait()


def _joined(
    *, master_address: str, master_port: int, world_size: int, group_name: str, backend: str, **_: object
) -> dist.ProcessGroup:
    timeout = timedelta(seconds=TIMEOUT_S)
    address = f"tcp://{master_address}:{master_port}"
    store, rank, size = next(dist.rendezvous(address, 0, world_size, timeout=timeout))
    prefixed = dist.PrefixStore(group_name, store)
    made, _store = dist.distributed_c10d._new_process_group_helper(
        size, rank, [], dist.Backend(backend), prefixed, group_name=group_name, timeout=timeout
    )
    dist.distributed_c10d._world.pg_group_ranks[made] = {index: index for index in range(size)}
    return made
