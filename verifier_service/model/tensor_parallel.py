"""Tensor parallelism: the group of ranks, and the layers that are sharded over it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from outrider.verifier_service.formats.checkpoint import Shard
from outrider.verifier_service.model.architectures import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BACKENDS = ("gloo", "nccl")


class TensorParallelGroup:
    """The ranks of one tensor-parallel model; its process group is made from a store, without a default group."""

    def __init__(self, rank: int, size: int, process_group: dist.ProcessGroup | None) -> None:
        self.rank, self.size, self._process_group = rank, size, process_group

    @classmethod
    def single(cls) -> TensorParallelGroup:
        """Return a group of one rank, whose collectives return their input."""
        return cls(0, 1, None)

    @classmethod
    def join(
        cls, rank: int, size: int, store_address: str, backend: str = "gloo", timeout_s: float = 60.0
    ) -> TensorParallelGroup:
        """Join the group at `store_address` ("host:port", served by rank 0); every rank must call this."""
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}")
        if not 0 <= rank < size:
            raise ValueError("rank must be in [0, size)")
        if size == 1:
            return cls.single()
        host, _, port = store_address.rpartition(":")
        timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore(host, int(port), size, is_master=rank == 0, timeout=timeout)
        prefixed = dist.PrefixStore("outrider", store)
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return cls(rank, size, dist.ProcessGroupNCCL(prefixed, rank, size, options))  # type: ignore[arg-type]
        return cls(rank, size, dist.ProcessGroupGloo(prefixed, rank, size, timeout))  # type: ignore[arg-type]

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place; returns `tensor`."""
        if self._process_group is not None:
            self._process_group.allreduce([tensor]).wait()
        return tensor

    def all_reduce_min(self, value: int) -> int:
        """Return the minimum over ranks."""
        if self._process_group is None:
            return value
        device = "cuda" if isinstance(self._process_group, _nccl_type()) else "cpu"
        tensor = torch.tensor([value], device=device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        self._process_group.allreduce([tensor], options).wait()
        return int(tensor.item())

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy rank 0's tensor to every rank, in place; returns `tensor`."""
        if self._process_group is not None:
            self._process_group.broadcast([tensor]).wait()
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Concatenate the ranks' equally shaped tensors along `dim`."""
        if self._process_group is None:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self._process_group.allgather([parts], [tensor.contiguous()]).wait()
        return torch.cat(parts, dim=dim)


def _nccl_type() -> tuple[type, ...]:
    return (dist.ProcessGroupNCCL,) if dist.is_nccl_available() else ()


class AllReduced(nn.Module):
    """A layer whose output is summed over ranks."""

    def __init__(self, inner: nn.Module, group: TensorParallelGroup) -> None:
        super().__init__()
        self.inner, self._group = inner, group

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self._group.all_reduce(self.inner(*inputs))


class VocabParallelEmbedding(nn.Module):
    """An embedding whose rows are sharded over ranks; ids of other ranks' rows contribute zero."""

    def __init__(self, inner: nn.Embedding, group: TensorParallelGroup, start: int) -> None:
        super().__init__()
        self.inner, self._group, self._start = inner, group, start
        inner.padding_idx = None  # unused without gradients, and may lie outside of this rank's rows

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        local = token_ids - self._start
        num_rows = self.inner.weight.shape[0]
        outside = (local < 0) | (local >= num_rows)
        hidden = self.inner(local.clamp(0, num_rows - 1)).masked_fill_(outside[..., None], 0.0)
        return self._group.all_reduce(hidden)


class VocabParallelHead(nn.Module):
    """A head whose vocabulary is sharded over ranks; the logits are gathered."""

    def __init__(self, inner: nn.Module, group: TensorParallelGroup, vocab_size: int) -> None:
        super().__init__()
        self.inner, self._group, self._vocab_size = inner, group, vocab_size
        self._widest = -(-vocab_size // group.size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.inner(hidden)
        # the last ranks may have fewer columns; all_gather needs equal shapes
        logits = F.pad(logits, (0, self._widest - logits.shape[-1]))
        return self._group.all_gather(logits, dim=-1)[..., : self._vocab_size]


def plan_shards(model: PreTrainedModel, group: TensorParallelGroup) -> dict[str, Shard]:
    """Return this rank's slice of each sharded checkpoint tensor, by the library's sharding plan.

    Linears are sharded by columns or rows, experts along their intermediate dimension, embedding and head along the
    vocabulary. Tensors without an entry are replicated. Raises `UnsupportedModelError`.
    """
    if group.size == 1:
        return {}
    _require_divisible(model, "num_attention_heads", model.config.num_attention_heads, group.size)
    shards: dict[str, Shard] = {}
    for name, module in model.named_modules():
        style = _plan_style(model, name)
        if style == "colwise":
            shards |= _column_shards(model, name, module, group)
        elif style == "rowwise":
            shards[f"{name}.weight"] = _even_shard(model, name, 1, module.in_features, group)
        elif style == "moe_tp_experts":
            width = module.down_proj.shape[2]
            shards[f"{name}.gate_up_proj"] = _even_shard(model, name, 0, width, group)
            shards[f"{name}.down_proj"] = _even_shard(model, name, 1, width, group)
        elif style not in _REPLICATED_STYLES:
            raise UnsupportedModelError(f"{model.config.model_type}: cannot shard {name} in the style {style!r}")
    return shards | _vocabulary_shards(model, group)


def shrink(model: PreTrainedModel, shards: Mapping[str, Shard]) -> None:
    """Replace the model's parameters (on the meta device) by ones with the shapes of their shards."""
    shrunk: dict[int, nn.Parameter] = {}
    for name, shard in shards.items():
        owner_name, _, leaf = name.rpartition(".")
        owner = model.get_submodule(owner_name)
        parameter = getattr(owner, leaf)
        if id(parameter) not in shrunk:
            shape = _shard_shape(name, parameter, shard)
            small = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
            shrunk[id(parameter)] = nn.Parameter(small, requires_grad=False)
        setattr(owner, leaf, shrunk[id(parameter)])
        if isinstance(owner, nn.Linear):
            owner.out_features, owner.in_features = owner.weight.shape


def wrap_shards(model: PreTrainedModel, group: TensorParallelGroup, vocab_size: int) -> None:
    """Add the collectives around loaded shards: one all-reduce per row-parallel layer, one gather at the head."""
    if group.size == 1:
        return
    for name, module in list(model.named_modules()):
        style = _plan_style(model, name)
        if style == "rowwise" and group.rank > 0:
            module.bias = None  # only rank 0 adds it
        if style in ("rowwise", "moe_tp_experts"):
            _replace(model, name, AllReduced(module, group))
    start = vocabulary_range(vocab_size, group)[0]
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    _replace(model, _name_of(model, embedding), VocabParallelEmbedding(embedding, group, start))
    _replace(model, _name_of(model, head), VocabParallelHead(head, group, vocab_size))


def vocabulary_range(vocab_size: int, group: TensorParallelGroup) -> tuple[int, int]:
    """Return this rank's half-open range of token ids; the last ranks may have fewer."""
    widest = -(-vocab_size // group.size)
    return min(group.rank * widest, vocab_size), min((group.rank + 1) * widest, vocab_size)


_REPLICATED_STYLES = (None, "replicated_with_grad_allreduce", "packed_colwise")
_KV_PROJECTIONS = ("k_proj", "v_proj")


def _plan_style(model: PreTrainedModel, name: str) -> str | None:
    plan = getattr(model.config, "base_model_tp_plan", None) or {}
    relative = name.removeprefix(f"{model.base_model_prefix}.")
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", relative))


def _column_shards(
    model: PreTrainedModel, name: str, module: nn.Linear, group: TensorParallelGroup
) -> dict[str, Shard]:
    num_kv_heads = getattr(model.config, "num_key_value_heads", None) or model.config.num_attention_heads
    if name.rpartition(".")[2] in _KV_PROJECTIONS:
        shard = _kv_shard(model, name, module.out_features, num_kv_heads, group)
    else:
        shard = _even_shard(model, name, 0, module.out_features, group)
    leaves = ["weight"] if module.bias is None else ["weight", "bias"]
    return {f"{name}.{leaf}": shard for leaf in leaves}


def _kv_shard(model: PreTrainedModel, name: str, num_rows: int, num_kv_heads: int, group: TensorParallelGroup) -> Shard:
    """Shard by KV heads; with fewer heads than ranks, neighbouring ranks share one."""
    if num_kv_heads >= group.size:
        _require_divisible(model, "num_key_value_heads", num_kv_heads, group.size)
        return _even_shard(model, name, 0, num_rows, group)
    _require_divisible(model, f"tensor_parallel_size over {num_kv_heads} KV heads", group.size, num_kv_heads)
    head_rows = num_rows // num_kv_heads
    head = group.rank * num_kv_heads // group.size
    return Shard(dim=0, start=head * head_rows, stop=(head + 1) * head_rows)


def _even_shard(model: PreTrainedModel, name: str, dim: int, size: int, group: TensorParallelGroup) -> Shard:
    _require_divisible(model, name, size, group.size)
    width = size // group.size
    return Shard(dim=dim, start=group.rank * width, stop=(group.rank + 1) * width)


def _vocabulary_shards(model: PreTrainedModel, group: TensorParallelGroup) -> dict[str, Shard]:
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    if head is None or head.bias is not None or head.weight.shape[0] != embedding.weight.shape[0]:
        raise UnsupportedModelError(f"{model.config.model_type}: cannot shard its head along the vocabulary")
    start, stop = vocabulary_range(embedding.weight.shape[0], group)
    shard = Shard(dim=0, start=start, stop=stop)
    return {f"{_name_of(model, module)}.weight": shard for module in (embedding, head)}


def _shard_shape(name: str, parameter: torch.Tensor, shard: Shard) -> list[int]:
    shape = list(parameter.shape)
    width = shard.stop - shard.start
    if parameter.ndim == 3:  # [num_experts, rows, columns]: `shard` indexes one expert's gate, up or down tensor
        shape[shard.dim + 1] = 2 * width if name.endswith("gate_up_proj") else width
    else:
        shape[shard.dim] = width
    return shape


def _require_divisible(model: PreTrainedModel, what: str, value: int, divisor: int) -> None:
    if value % divisor:
        raise UnsupportedModelError(f"{model.config.model_type}: {what} ({value}) is not divisible by {divisor}")


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)


def _replace(model: nn.Module, name: str, replacement: nn.Module) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, replacement)
