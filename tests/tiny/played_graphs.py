"""CUDA graphs played on a CPU: a captured step runs again, and fails wherever a real graph could not be replayed.

A graph is bound to the kernels, shapes and addresses of its capture and never waits for the host. So a played step
raises `NotCapturable` for a read of a tensor's values, for an operator whose shape depends on them, for a tensor made
of host memory, and in a replay for any operator, shape or outside address that is not the captured one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outrider.verifier_service.model.attention import AttentionOptions, KVPool, attend_by_hand
from outrider.verifier_service.model.paged_metadata import PagedMetadata
from outrider.verifier_service.model.step_graphs import GraphBackend

# what reads values on a CPU without an operator, and what is an operator; `lift_fresh` is of `torch.tensor`
READING_METHODS = {"tolist", "numpy", "item", "__array__", "__bool__", "__int__", "__float__", "__index__"}
READING_OPERATORS = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::allclose"}
SHAPING_OPERATORS = {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::bincount"}
VIEWS = {
    f"aten::{name}"
    for name in (
        "view",
        "slice",
        "select",
        "unsqueeze",
        "expand",
        "detach",
        "alias",
        "split",
        "unbind",
        "permute",
        "empty",
    )
}
UPLOADS = {"aten::lift_fresh"}

Result = TypeVar("Result")
Trace = list[tuple[str, tuple[tuple[int, ...], ...], tuple[int, ...]]]  # operator, shapes, addresses from outside


class NotCapturable(AssertionError):
    """A captured step did what no graph can hold."""


class HostReads(TorchFunctionMode):
    """Counts the reads of tensors' values by the host while it is entered, and names the methods."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READING_METHODS or name in ("nonzero", "cpu"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


class _Recording(TorchDispatchMode):
    """Notes every operator with the addresses that it takes from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.trace: Trace = []
        self._made: set[int] = set()  # addresses of the storages that the step made itself
        self._kept: list[torch.Tensor] = []  # alive, so that no address comes twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split(".")[0]
        if name in READING_OPERATORS | SHAPING_OPERATORS | UPLOADS:
            raise NotCapturable(name)
        inputs = list(_tensors((args, kwargs)))
        if name == "aten::index" and any(tensor.dtype is torch.bool for tensor in inputs[1:]):
            raise NotCapturable("an index by a mask")
        outside = {tensor.untyped_storage().data_ptr() for tensor in inputs} - self._made
        result = func(*args, **(kwargs or {}))
        outputs = list(_tensors(result))
        self._kept += outputs
        self._made |= {tensor.untyped_storage().data_ptr() for tensor in outputs} - outside
        addresses = tuple(tensor.data_ptr() for tensor in inputs if tensor.untyped_storage().data_ptr() in outside)
        self.trace.append((name, tuple(tuple(tensor.shape) for tensor in (*inputs, *outputs)), addresses))
        return result


class PlayedCapture:
    """A `Capture` that keeps the function, and what it did."""

    def __init__(self) -> None:
        self.num_captured = 0

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        step()
        captured = _traced(step)
        self.num_captured += 1

        def replay() -> None:
            played = _traced(step)
            for place, (own, again) in enumerate(zip(captured, played, strict=False)):
                if own != again:
                    raise NotCapturable(f"operator {place} was {own} and is {again}")
            if len(played) != len(captured):
                raise NotCapturable(f"{len(captured)} operators became {len(played)}")

        return replay


def _traced(step: Callable[[], object]) -> Trace:
    with HostReads() as reads, _Recording() as recording:
        step()
    if reads.names:
        raise NotCapturable(", ".join(reads.names))
    return recording.trace


def without_host(step: Callable[[], Result]) -> Result:
    """Return what a step says that runs on a device from end to end; raises `NotCapturable` where it cannot."""
    said: list[Result] = []
    _traced(lambda: said.append(step()))
    return said[0]


def num_launches(step: Callable[[], object]) -> int:
    """Count the operators of a step that a device would have a kernel for: those that make no view."""
    return sum(name not in VIEWS for name, _, _ in _traced(step))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    leaves = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return (leaf for leaf in leaves if leaf.layout is torch.strided)  # oneDNN's packed weights have no address


class PlainPagedAttention:
    """What the Triton kernels compute, in torch's operators over the same metadata: no shape depends on a value."""

    def __init__(self, metadata: PagedMetadata, pool: KVPool) -> None:
        self._metadata, self._pool = metadata, pool

    def attend(
        self, layer_index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        metadata, pool = self._metadata, self._pool
        pool.write(layer_index, metadata.slot_mapping, key, value)
        keys, values = pool.keys[layer_index], pool.values[layer_index]
        starts, contexts = metadata.query_starts.long(), metadata.context_lengths.long()
        tokens = torch.arange(metadata.num_tokens)
        sequence = torch.searchsorted(starts[1:].contiguous(), tokens, right=True)  # [num_tokens]
        rows = contexts[sequence] - starts[sequence + 1] + tokens  # the place of each token in its sequence
        slots = metadata.block_tables.long()[:, :, None] * pool.block_size + torch.arange(pool.block_size)
        slots = slots.flatten(1)[sequence]  # [num_tokens, context]
        places = torch.arange(slots.shape[1])
        slots = slots.where(places < contexts[sequence, None], 0)  # a table may hold anything beyond its own
        visible = self._visible(rows, places, contexts[sequence], options.sliding_window)
        bias = torch.zeros_like(visible, dtype=query.dtype).masked_fill_(~visible, float("-inf"))
        output = attend_by_hand(
            query[:, :, None],
            keys[slots].to(query.dtype).transpose(1, 2),
            values[slots].to(query.dtype).transpose(1, 2),
            bias[:, None, None],
            options,
            repeats=1,
        )
        return output[:, :, 0]

    def _visible(
        self, rows: torch.Tensor, places: torch.Tensor, contexts: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """Say which places each token sees: [num_tokens, context]; `rows` and `contexts` are [num_tokens]."""
        metadata = self._metadata
        visible = places <= rows[:, None]
        own, others = rows, places.expand(len(rows), -1)  # positions of tokens and keys
        if metadata.ancestors is not None and metadata.tree_sizes is not None and metadata.positions is not None:
            packed = torch.arange(len(rows))[:, None] + places - rows[:, None]  # of each key among the step's tokens
            sizes = torch.repeat_interleave(
                metadata.tree_sizes.long(), metadata.query_starts.long().diff(), output_size=len(rows)
            )
            first = (contexts - sizes)[:, None]  # where the sequence's tree begins
            in_tree = places >= first
            seen = (metadata.ancestors[:, :1] >> (places - first).clamp(0, 63)) & 1 != 0
            visible = torch.where(in_tree & (rows[:, None] >= first), seen, visible)
            own = metadata.positions.long()
            others = torch.where(in_tree, own[packed.clamp(0, len(rows) - 1)], others)
        if window is not None:
            visible &= own[:, None] - others < window
        return visible


def played_backend() -> GraphBackend:
    return GraphBackend(PlayedCapture(), PlainPagedAttention)
