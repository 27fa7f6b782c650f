"""Read a checkpoint's tensors into a `Decoder`: each rank reads its slices; projections of one input are fused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from outrider.verifier_service.experts.cache import ExpertCache, copier_of
from outrider.verifier_service.formats.checkpoint import Shard
from outrider.verifier_service.formats.layouts import INT8_SCALES
from outrider.verifier_service.messages.counts import FetchCounts
from outrider.verifier_service.model.architectures import UnsupportedModelError
from outrider.verifier_service.model.attention import AttentionOptions, LayerShape
from outrider.verifier_service.model.config import Quantization
from outrider.verifier_service.model.cpu_attention import whole_layer
from outrider.verifier_service.model.decoder import (
    AllHeadsNorm,
    Attention,
    Decoder,
    DecoderLayer,
    Experts,
    GatedMLP,
    HeadNorm,
    Norm,
    OffloadedExperts,
    SeparateExperts,
    head_order,
)
from outrider.verifier_service.model.decoder_spec import DecoderSpec, ExpertsSpec, LayerSpec, QueryKeyNorm
from outrider.verifier_service.model.packed_linear import has_panels, make_linear
from outrider.verifier_service.model.tensor_parallel import (
    TensorParallelGroup,
    VocabParallelEmbedding,
    VocabParallelHead,
    vocabulary_range,
)
from outrider.verifier_service.model.weights import WeightReader


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """This rank's rows [start, stop) of one of several projections of the same input."""

    name: str
    size: int  # rows on all ranks
    start: int
    stop: int


def load_decoder(
    spec: DecoderSpec,
    reader: WeightReader,
    group: TensorParallelGroup,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization | None = None,
    num_cached_experts: int | None = None,
) -> Decoder:
    """Build this rank's part of a model. Raises `WeightError` naming a tensor, `UnsupportedModelError` naming a size.

    `quantization` does not apply to the embedding, FP8 not to the head either. `num_cached_experts`: of each layer on
    the device, the others in host memory; None: all.
    """
    return _DecoderLoader(spec, reader, group, dtype, device, quantization, num_cached_experts).load()


def decoder_parts(
    spec: DecoderSpec,
    reader: WeightReader,
    group: TensorParallelGroup,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization | None = None,
) -> Iterator[tuple[str, nn.Module]]:
    """Build this rank's part of a model piece by piece: yield each piece and its name in `Decoder`. Raises as above.

    A caller that keeps none of the pieces needs memory for embedding and head, or for one layer.
    """
    return _DecoderLoader(spec, reader, group, dtype, device, quantization).parts()


class _DecoderLoader:
    def __init__(
        self,
        spec: DecoderSpec,
        reader: WeightReader,
        group: TensorParallelGroup,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization | None,
        num_cached_experts: int | None = None,
    ) -> None:
        self._spec, self._reader, self._group, self._dtype, self._device = spec, reader, group, dtype, device
        self._quantization, self._num_cached = quantization, num_cached_experts
        self._copier = None if num_cached_experts is None else copier_of(device)
        self._fetches = FetchCounts()
        self._heads = self._share("num_attention_heads", spec.num_heads)
        self._kv_heads = self._share_kv_heads()
        if group.size > 1 and spec.query_key_norm is QueryKeyNorm.ALL_HEADS:
            raise self._unsupported("norms over all heads are not served with tensor_parallel_size > 1")

    def load(self) -> Decoder:
        parts = dict(self.parts())
        norm = parts["norm"]
        assert isinstance(norm, Norm)
        parted = [parts[f"layers.{index}"] for index in range(len(self._spec.layers))]
        layers = [layer for layer in parted if isinstance(layer, DecoderLayer)]
        decoder = Decoder(
            self._spec,
            embedding=parts["embedding"],
            layers=layers,
            norm=norm,
            head=parts["head"],
            dtype=self._dtype,
            device=self._device,
        )
        mixtures = [layer.mlp for layer in layers if isinstance(layer.mlp, OffloadedExperts)]
        for mixture, following in pairwise(mixtures):
            mixture.following = following.router, following.cache
        return decoder.eval().requires_grad_(False)

    def parts(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield embedding, head, final norm and layers, by their names in `Decoder`."""
        yield from self._ends()
        yield "norm", self._norm("model.norm")
        for index, layer in enumerate(self._spec.layers):
            yield f"layers.{index}", self._layer(index, layer)

    def _ends(self) -> Iterator[tuple[str, nn.Module]]:
        spec, group = self._spec, self._group
        start, stop = vocabulary_range(spec.vocab_size, group)
        shard = Shard(dim=0, start=start, stop=stop)
        shape = (spec.vocab_size, spec.hidden_size)
        weight = self._place(self._reader.read("model.embed_tokens.weight", shape, shard))
        own = None if spec.is_tied else self._place(self._reader.read("lm_head.weight", shape, shard))
        if spec.is_tied:
            self._reader.skip("lm_head.weight")  # some checkpoints have a tied weight twice
        table = nn.Embedding.from_pretrained(weight)
        scales = self._scales("lm_head", spec.vocab_size, shard)
        quantization = None if self._quantization == "fp8" else self._quantization  # the head is most sensitive
        head = make_linear(weight if own is None else own, None, quantization, scales)
        if group.size > 1:
            head = VocabParallelHead(head, group, spec.vocab_size)
        yield "embedding", table if group.size == 1 else VocabParallelEmbedding(table, group, start)
        yield "head", head

    def _layer(self, index: int, layer: LayerSpec) -> DecoderLayer:
        prefix, names = f"model.layers.{index}.", self._spec.norm_names
        mlp_prefix = f"{prefix}mlp."
        made = DecoderLayer(
            attention=self._attention(f"{prefix}self_attn.", index, layer),
            mlp=self._mlp(mlp_prefix, self._spec.inner_size)
            if layer.experts is None
            else self._experts(mlp_prefix, layer.experts),
            before_attention=self._optional_norm(prefix, names.before_attention),
            after_attention=self._optional_norm(prefix, names.after_attention),
            before_mlp=self._optional_norm(prefix, names.before_mlp),
            after_mlp=self._optional_norm(prefix, names.after_mlp),
            residual_scale=self._spec.residual_scale,
        )
        made.whole = whole_layer(made, self._dtype)
        return made

    # --- attention ---

    def _attention(self, prefix: str, index: int, layer: LayerSpec) -> Attention:
        spec = self._spec
        order = None if layer.rotary is None else head_order(spec.rotaries[layer.rotary], spec.head_dim)
        columns = spec.num_heads * spec.head_dim
        rows = self._cut(columns, self._heads.start * spec.head_dim, self._heads.stop * spec.head_dim, dim=1)
        output = self._reader.read(f"{prefix}o_proj.weight", (spec.hidden_size, columns), rows)
        options = AttentionOptions(
            scaling=spec.attention_scale, sliding_window=layer.window, softcap=spec.attention_softcap
        )
        return Attention(
            index,
            LayerShape(num_kv_heads=len(self._kv_heads), head_dim=spec.head_dim, value_dim=spec.head_dim),
            qkv=self._qkv(prefix, order),
            output=self._linear(
                self._place(output),
                self._summed_bias(f"{prefix}o_proj", spec.has_output_bias),
                self._scales(f"{prefix}o_proj", spec.hidden_size),
            ),
            norm=self._query_key_norm(prefix, order),
            options=options,
            group=self._group,
        )

    def _qkv(self, prefix: str, order: list[int] | None) -> nn.Module:
        spec, head_dim = self._spec, self._spec.head_dim
        heads = {"q_proj": (spec.num_heads, self._heads), "k_proj": (spec.num_kv_heads, self._kv_heads)}
        heads["v_proj"] = heads["k_proj"]
        parts = [
            Part(name=name, size=count * head_dim, start=own.start * head_dim, stop=own.stop * head_dim)
            for name, (count, own) in heads.items()
        ]
        weight = self._fused(prefix, "qkv_proj", parts, "weight", (spec.hidden_size,))
        bias = self._fused(prefix, "qkv_proj", parts, "bias", ()) if spec.has_qkv_bias else None
        scales, num_turned = self._fused_scales(prefix, "qkv_proj", parts), len(self._heads) + len(self._kv_heads)
        return self._linear(
            self._place(_reordered(weight, num_turned, head_dim, order)),
            None if bias is None else self._place(_reordered(bias, num_turned, head_dim, order)),
            None if scales is None else _reordered(scales, num_turned, head_dim, order),
        )

    def _query_key_norm(self, prefix: str, order: list[int] | None) -> nn.Module | None:
        spec = self._spec
        if spec.query_key_norm is None:
            return None
        if spec.query_key_norm is QueryKeyNorm.ALL_HEADS:
            counts = {"q_norm": spec.num_heads, "k_norm": spec.num_kv_heads}
            query, key = (
                _reordered(self._norm_weight(f"{prefix}{name}", count * spec.head_dim), count, spec.head_dim, order)
                for name, count in counts.items()
            )
            return AllHeadsNorm(Norm(query, spec.norm_eps), Norm(key, spec.norm_eps))
        query, key = (
            _reordered(self._norm_weight(f"{prefix}{name}", spec.head_dim), 1, spec.head_dim, order)
            for name in ("q_norm", "k_norm")
        )
        weight = torch.cat([query.expand(len(self._heads), -1), key.expand(len(self._kv_heads), -1)])
        return HeadNorm(weight, spec.norm_eps)

    # --- feed-forward ---

    def _mlp(self, prefix: str, inner_size: int) -> GatedMLP:
        spec, own = self._spec, self._share(f"{prefix}up_proj", inner_size)
        parts = [Part(name=name, size=inner_size, start=own.start, stop=own.stop) for name in ("gate_proj", "up_proj")]
        gate_up = self._fused(prefix, "gate_up_proj", parts, "weight", (spec.hidden_size,))
        gate_up_bias = self._fused(prefix, "gate_up_proj", parts, "bias", ()) if spec.has_mlp_bias else None
        down_shape, columns = (spec.hidden_size, inner_size), self._cut(inner_size, own.start, own.stop, dim=1)
        down = self._reader.read(f"{prefix}down_proj.weight", down_shape, columns)
        return GatedMLP(
            self._linear(
                self._place(gate_up),
                None if gate_up_bias is None else self._place(gate_up_bias),
                self._fused_scales(prefix, "gate_up_proj", parts),
            ),
            self._linear(
                self._place(down),
                self._summed_bias(f"{prefix}down_proj", spec.has_mlp_bias),
                self._scales(f"{prefix}down_proj", spec.hidden_size),
            ),
            spec.activation,
            self._group,
        )

    def _experts(self, prefix: str, experts: ExpertsSpec) -> Experts:
        spec, count, inner_size = self._spec, experts.num_experts, experts.inner_size
        own = self._share(f"{prefix}experts", inner_size)
        shard = None if self._group.size == 1 else Shard(dim=0, start=own.start, stop=own.stop)
        gate_up_shape = (count, 2 * len(own), spec.hidden_size)
        gate_up = self._reader.read_part([f"{prefix}experts.gate_up_proj"], gate_up_shape, shard)
        shard = None if self._group.size == 1 else Shard(dim=1, start=own.start, stop=own.stop)
        down = self._reader.read_part([f"{prefix}experts.down_proj"], (count, spec.hidden_size, len(own)), shard)
        shared = shared_gate = None
        if experts.shared_inner_size:
            shared = self._mlp(f"{prefix}shared_expert.", experts.shared_inner_size)
            shared_gate = self._score(f"{prefix}shared_expert_gate", 1)
        router = self._score(f"{prefix}gate", count)
        rest: dict[str, Any] = {"router": router, "shared": shared, "shared_gate": shared_gate, "group": self._group}
        rest["activation"] = spec.activation
        if self._num_cached is not None and self._copier is not None:
            hosted = gate_up.to(self._dtype), down.to(self._dtype)
            cache = ExpertCache(*hosted, self._num_cached, self._device, self._copier, self._fetches)
            return OffloadedExperts(experts, cache=cache, **rest)
        placed = [self._place(weights) for weights in (gate_up, down)]
        if has_panels(placed[0][0]) and has_panels(placed[1][0]):
            lists = [nn.ModuleList(make_linear(weight) for weight in weights) for weights in placed]
            return SeparateExperts(experts, gate_up=lists[0], down=lists[1], **rest)
        return Experts(experts, gate_up=placed[0].transpose(1, 2), down=placed[1].transpose(1, 2), **rest)

    def _score(self, name: str, count: int) -> nn.Module:
        """Return what gives each token `count` scores."""
        return make_linear(self._place(self._reader.read(f"{name}.weight", (count, self._spec.hidden_size))))

    # --- shared by all of them ---

    def _fused(
        self, prefix: str, fused_name: str, parts: Sequence[Part], leaf: str, columns: tuple[int, ...]
    ) -> torch.Tensor:
        """Concatenate this rank's rows of several projections; the checkpoint may have them fused already."""
        fused = f"{prefix}{fused_name}.{leaf}"
        is_fused = fused in self._reader
        total, offset, pieces = sum(part.size for part in parts), 0, []
        for part in parts:
            name, size = (fused, total) if is_fused else (f"{prefix}{part.name}.{leaf}", part.size)
            shard = self._cut(size, offset + part.start, offset + part.stop)
            pieces.append(self._reader.read(name, (size, *columns), shard))
            offset += part.size if is_fused else 0
        return torch.cat(pieces)

    def _fused_scales(self, prefix: str, fused_name: str, parts: Sequence[Part]) -> torch.Tensor | None:
        """Concatenate the int8 scales of projections that the checkpoint has in int8; None: it has other weights."""
        names = [[f"{prefix}{fused_name}"], [f"{prefix}{part.name}" for part in parts]]
        if not any(all(f"{name}{INT8_SCALES}" in self._reader for name in own) for own in names):
            return None
        return self._fused(prefix, fused_name, parts, INT8_SCALES[1:], (1,)).flatten().float()

    def _scales(self, name: str, size: int, shard: Shard | None = None) -> torch.Tensor | None:
        """Read the int8 scales of one projection, of a rank's rows or all; None: its weight is no int8."""
        if f"{name}{INT8_SCALES}" not in self._reader:
            return None
        return self._reader.read(f"{name}{INT8_SCALES}", (size, 1), shard).flatten().float()

    def _linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, scales: torch.Tensor | None = None
    ) -> nn.Module:
        return make_linear(weight, bias, self._quantization, scales)

    def _summed_bias(self, name: str, has_bias: bool) -> torch.Tensor | None:
        """Read the bias of a projection whose output is summed over ranks; only rank 0 adds it."""
        if not has_bias:
            return None
        bias = self._place(self._reader.read(f"{name}.bias", (self._spec.hidden_size,)))
        return bias if self._group.rank == 0 else None

    def _optional_norm(self, prefix: str, name: str | None) -> nn.Module:
        return nn.Identity() if name is None else self._norm(f"{prefix}{name}")

    def _norm(self, name: str) -> Norm:
        return Norm(self._norm_weight(name, self._spec.hidden_size), self._spec.norm_eps)

    def _norm_weight(self, name: str, size: int) -> torch.Tensor:
        weight = self._reader.read(f"{name}.weight", (size,))
        if self._spec.norm_offset:  # in float32: half precision would round the sum
            return (weight.float() + self._spec.norm_offset).to(self._device)
        return self._place(weight)

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=self._device, dtype=self._dtype)

    def _share(self, what: str, size: int) -> range:
        """Return this rank's share of `size`, which must be divisible by the number of ranks; errors name `what`."""
        if size % self._group.size:
            raise self._unsupported(f"{what} ({size}) is not divisible by {self._group.size}")
        width = size // self._group.size
        return range(self._group.rank * width, (self._group.rank + 1) * width)

    def _share_kv_heads(self) -> range:
        """Return this rank's KV heads; with fewer heads than ranks, neighbouring ranks share one."""
        count, group = self._spec.num_kv_heads, self._group
        if count >= group.size:
            return self._share("num_key_value_heads", count)
        if group.size % count:
            what = f"tensor_parallel_size over {count} KV heads"
            raise self._unsupported(f"{what} ({group.size}) is not divisible by {count}")
        head = group.rank * count // group.size
        return range(head, head + 1)

    def _unsupported(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self._spec.model_type}: {reason}")

    @staticmethod
    def _cut(size: int, start: int, stop: int, dim: int = 0) -> Shard | None:
        return None if (start, stop) == (0, size) else Shard(dim=dim, start=start, stop=stop)


def _reordered(tensor: torch.Tensor, num_heads: int, head_dim: int, order: list[int] | None) -> torch.Tensor:
    """Permute the dimensions within each of the first `num_heads` heads of [num_rows, ...]; see `head_order`."""
    if order is None or order == list(range(head_dim)):
        return tensor
    turned, rest = tensor[: num_heads * head_dim], tensor[num_heads * head_dim :]
    return torch.cat([turned.unflatten(0, (num_heads, head_dim))[:, order].flatten(0, 1), rest])
