"""Our own decoder for dense and mixture-of-experts transformers, with fused and packed weights.

    token_ids  [num_tokens]  tokens of all sequences, packed
    positions  [num_tokens]  each token's position in its sequence
    rows       [num_rows]    the tokens whose logits are wanted
    attend                   the step's `AttentionHandler`: slots, block tables, lengths and trees over the KV pool

All shapes follow from these shapes, and nothing is read back from the device, so that a step can be captured and
replayed. `decoder_spec` describes what a model computes; `decoder_weights` reads its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from outrider.verifier_service.cpu import kernels as cpu
from outrider.verifier_service.experts.cache import ExpertCache, foreseen, likeliest, num_tokens_each
from outrider.verifier_service.experts.routing import ExpertRouting
from outrider.verifier_service.gpu import kernels as gpu
from outrider.verifier_service.messages.counts import FetchCounts
from outrider.verifier_service.messages.draft import FINAL_TAP
from outrider.verifier_service.model.attention import AttentionHandler, AttentionOptions, LayerShape
from outrider.verifier_service.model.decoder_spec import DecoderSpec, ExpertsSpec, RotarySpec
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup

if TYPE_CHECKING:
    from outrider.verifier_service.gpu.rows import RowKernels

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda rows: F.gelu(rows, approximate="tanh"),
}

TopK = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Turn = tuple[torch.Tensor, torch.Tensor]  # cosines and signed sines, [num_tokens, 1, head_dim] each
LayerCall = Callable[[torch.Tensor, Turn | None, AttentionHandler], torch.Tensor | None]  # None: compute the parts


def _kernels_of(rows: torch.Tensor) -> cpu.Kernels | RowKernels | None:
    """Return our kernels for a tensor's device and dtype; None: use torch's operators."""
    return cpu.kernels_of(rows) or gpu.kernels_of(rows)


class Norm(nn.Module):
    """x / rms(x) * weight (Zhang and Sennrich, 2019, arXiv:1910.07467), computed in the weight's dtype."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps, self._shape = weight, eps, tuple(weight.shape)
        self.wide = weight.float()[None]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if (kernels := _kernels_of(rows)) is not None:
            return kernels.rms_norm(rows, self.wide, self.eps)
        return F.rms_norm(rows.to(self.weight.dtype), self._shape, self.weight, self.eps).to(rows.dtype)


class HeadNorm(nn.Module):
    """Norms each head of queries and keys separately."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:  # weight [num_heads + num_kv_heads, head_dim]
        super().__init__()
        self.weight, self.eps, self._shape = weight, eps, (weight.shape[1],)
        self.wide = weight.float()

    def forward(self, heads: torch.Tensor) -> torch.Tensor:  # [num_tokens, num_heads + num_kv_heads, head_dim]
        if (kernels := _kernels_of(heads)) is not None:
            return kernels.rms_norm(heads, self.wide, self.eps)
        normed = F.rms_norm(heads.to(self.weight.dtype), self._shape, None, self.eps)
        return (normed * self.weight).to(heads.dtype)


class AllHeadsNorm(nn.Module):
    """Norms all query heads as one row, and all key heads as another."""

    def __init__(self, query: Norm, key: Norm) -> None:
        super().__init__()
        self.query, self.key = query, key

    def forward(self, heads: torch.Tensor) -> torch.Tensor:  # [num_tokens, num_heads + num_kv_heads, head_dim]
        rows, query_size = heads.flatten(1), self.query.weight.shape[0]
        normed = torch.cat([self.query(rows[:, :query_size]), self.key(rows[:, query_size:])], dim=1)
        return normed.view_as(heads)


class Rotary(nn.Module):
    """Cosines and sines of a step's positions, in one form for every kind of rotary embedding.

    Dimension i is rotated with i + head_dim / 2: the weights were read in that order (`head_order`). Dimensions that
    are not rotated have frequency 0.
    """

    def __init__(self, spec: RotarySpec, head_dim: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        still = [0.0] * (head_dim // 2 - len(spec.frequencies))
        self.frequencies = torch.tensor([*spec.frequencies, *still], device=device)
        self.scales = torch.tensor([spec.scale] * len(spec.frequencies) + [1.0] * len(still), device=device)
        self._dtype = dtype

    def forward(self, positions: torch.Tensor) -> Turn:
        angles = positions[:, None].float() * self.frequencies
        cos, sin = (angles.cos() * self.scales).to(self._dtype), (angles.sin() * self.scales).to(self._dtype)
        return torch.cat([cos, cos], dim=-1)[:, None], torch.cat([-sin, sin], dim=-1)[:, None]


def rotated(heads: torch.Tensor, turn: Turn) -> torch.Tensor:
    """Rotate every head of [num_tokens, num_heads, head_dim], possibly in place."""
    cos, sin = turn
    if (kernels := _kernels_of(heads)) is not None:
        return kernels.rotate(heads, cos, sin)
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)


def normed_and_turned(heads: torch.Tensor, norm: nn.Module | None, turn: Turn | None) -> torch.Tensor:
    """Apply a layer's norm and rotation, if any, to [num_tokens, num_heads, head_dim], possibly in place."""
    if isinstance(norm, HeadNorm) and turn is not None and (kernels := gpu.kernels_of(heads)) is not None:
        return kernels.norm_and_rotate(heads, *turn, norm.wide, norm.eps)
    normed = heads if norm is None else norm(heads)
    return normed if turn is None else rotated(normed, turn)


def added_and_normed(
    hidden: torch.Tensor, update: torch.Tensor, scale: float, norm: nn.Module
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden + scale * update and its norm, [num_tokens, hidden_size] each. Not in place: taps keep `hidden`."""
    if isinstance(norm, Norm) and (kernels := gpu.kernels_of(hidden)) is not None:
        return kernels.add_and_norm(hidden, update, scale, norm.wide, norm.eps)
    total = added(hidden, update, scale)
    return total, norm(total)


def added(hidden: torch.Tensor, update: torch.Tensor, scale: float) -> torch.Tensor:
    """Return hidden + scale * update. By `torch.add` alone, bfloat16 is rounded once or twice, by its place."""
    return hidden + (update if scale == 1.0 else update * scale)


def head_order(spec: RotarySpec, head_dim: int) -> list[int]:
    """Return, for each dimension of our heads, the checkpoint's dimension; see `Rotary`."""
    count, half = len(spec.frequencies), head_dim // 2
    still = list(range(2 * count, head_dim))
    if spec.is_interleaved:
        first, second = list(range(0, 2 * count, 2)), list(range(1, 2 * count, 2))
    else:
        first, second = list(range(count)), list(range(count, 2 * count))
    return first + still[: half - count] + second + still[half - count :]


class Attention(nn.Module):
    """Grouped-query attention over the KV pool, with one fused projection for query, key and value."""

    def __init__(
        self,
        layer_index: int,
        shape: LayerShape,
        *,
        qkv: nn.Module,
        output: nn.Module,
        norm: nn.Module | None,
        options: AttentionOptions,
        group: TensorParallelGroup,
    ) -> None:
        super().__init__()
        self.shape, self.qkv, self.output, self.norm = shape, qkv, output, norm
        self.layer_index, self.options, self.group = layer_index, options, group

    def forward(self, rows: torch.Tensor, turn: Turn | None, attend: AttentionHandler) -> torch.Tensor:
        """Map [num_tokens, hidden_size] to the same shape."""
        num_kv_heads, head_dim = self.shape.num_kv_heads, self.shape.head_dim
        heads = self.qkv(rows).unflatten(-1, (-1, head_dim))  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
        turned, value = normed_and_turned(heads[:, :-num_kv_heads], self.norm, turn), heads[:, -num_kv_heads:]
        query, key = turned[:, :-num_kv_heads], turned[:, -num_kv_heads:]
        attended = attend.attend(self.layer_index, query, key, value, self.options)
        return self.group.all_reduce(self.output(attended.flatten(1)))


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), gate and up fused (Shazeer, 2020, arXiv:2002.05202)."""

    def __init__(self, gate_up: nn.Module, down: nn.Module, activation: str, group: TensorParallelGroup) -> None:
        super().__init__()
        self.gate_up, self.down, self.activation, self.group = gate_up, down, activation, group

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.group.all_reduce(self.down(gated(self.gate_up(rows), self.activation)))


def gated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Map [..., 2 * size] to activation(gate) * up [..., size]."""
    if (kernels := _kernels_of(gate_up)) is not None and activation in kernels.activations:
        return kernels.gated(gate_up, activation)
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


class Experts(nn.Module):
    """A mixture of experts: a router sends every token to its top few (Shazeer et al., 2017, arXiv:1701.06538).

    Tokens are sorted by expert and multiplied in groups, so that no shape depends on the routing.
    """

    def __init__(
        self,
        spec: ExpertsSpec,
        *,
        router: nn.Module,  # [num_experts, hidden_size]
        gate_up: torch.Tensor,  # [num_experts, hidden_size, 2 * inner_size]
        down: torch.Tensor,  # [num_experts, inner_size, hidden_size]
        shared: GatedMLP | None,
        shared_gate: nn.Module | None,  # [1, hidden_size]
        activation: str,
        group: TensorParallelGroup,
    ) -> None:
        super().__init__()
        self.router, self.gate_up, self.down = router, gate_up, down
        self.shared, self.shared_gate = shared, shared_gate
        self.spec, self._activation, self._group = spec, activation, group
        self.topk: TopK = partial(torch.topk, k=spec.num_active, dim=-1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map [num_tokens, hidden_size] to the same shape."""
        chosen, weights = self._route(rows)
        outputs = self._outputs(rows, chosen).unflatten(0, chosen.shape)
        mixed = self._group.all_reduce((outputs * weights[..., None]).sum(dim=1))
        if self.shared is None or self.shared_gate is None:
            return mixed
        return mixed + self._sigmoid(self.shared_gate(rows)) * self.shared(rows)

    def _sigmoid(self, gates: torch.Tensor) -> torch.Tensor:  # [num_tokens, 1]
        return F.sigmoid(gates)

    def _outputs(self, rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return what each token's experts make of it: [num_tokens * num_active, hidden_size]."""
        experts = chosen.flatten()
        order = experts.argsort(stable=True)
        outputs = self._products(rows, experts, order, self.gate_up, self.down)
        return torch.zeros_like(outputs).index_copy(0, order, outputs)

    def _products(
        self,
        rows: torch.Tensor,
        groups: torch.Tensor,  # of each token's experts, by index of the two weights
        order: torch.Tensor,  # of those wanted here, sorted by group
        gate_up: torch.Tensor,
        down: torch.Tensor,
    ) -> torch.Tensor:
        """Return outputs in this order: [len(order), hidden_size]."""
        numbers = torch.arange(len(gate_up), device=rows.device)
        ends = (groups[:, None] <= numbers).sum(dim=0, dtype=torch.int32)  # end of each group's sorted tokens
        inner = F.grouped_mm(rows[order // self.spec.num_active], gate_up, offs=ends)
        return F.grouped_mm(gated(inner, self._activation), down, offs=ends)

    def _route(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token's experts and their weights: [num_tokens, num_active] each."""
        probs = self.router(rows).softmax(dim=-1, dtype=torch.float32)
        weights, chosen = self.topk(probs)
        if self.spec.normalises:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return chosen, weights.to(rows.dtype)


class SeparateExperts(Experts):
    """A mixture on a CPU: each expert is two linear layers. In torch's grouped product a row depends on the others."""

    def __init__(self, *parts: Any, gate_up: nn.ModuleList, down: nn.ModuleList, **options: Any) -> None:
        """Take the arguments of `Experts`, which has a linear layer for each expert."""
        super().__init__(*parts, gate_up=gate_up, down=down, **options)  # type: ignore[arg-type]

    def _outputs(self, rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        gate_up, down = cast(nn.ModuleList, self.gate_up), cast(nn.ModuleList, self.down)
        experts = chosen.flatten()
        outputs = rows.new_empty(len(experts), rows.shape[1])
        for expert in experts.unique().tolist():
            taken = (experts == expert).nonzero().flatten()
            inner = gated(gate_up[expert](rows[taken // self.spec.num_active]), self._activation)
            outputs[taken] = down[expert](inner)
        return outputs

    def _sigmoid(self, gates: torch.Tensor) -> torch.Tensor:
        # torch's sigmoid computes the last numbers of a tensor in another way than the others
        return F.pad(gates, (0, 1)).softmax(dim=-1)[:, :1]


class OffloadedExperts(Experts):
    """A mixture whose experts lie in host memory; see `experts.cache`. Its routing is read back by the host.

    Outputs are those of `Experts`, to the bit: each expert's product has the same rows, in the same order.
    """

    def __init__(self, *parts: Any, cache: ExpertCache, **options: Any) -> None:
        """Take the arguments of `Experts`, which has weights of the cache by slot."""
        super().__init__(*parts, gate_up=cache.gate_up, down=cache.down, **options)
        self.cache = cache
        self.following: tuple[nn.Module, ExpertCache] | None = None  # router and cache of the next mixture layer

    def _outputs(self, rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        counted = [chosen]
        if self.following is not None:
            counted.append(foreseen(rows, self.following[0], self.spec.num_active))
        counts = num_tokens_each(counted, self.spec.num_experts)
        taken = [expert for expert, count in enumerate(counts[0]) if count]
        groups = chosen.flatten()
        outputs = rows.new_empty(len(groups), rows.shape[1])
        for number, experts in enumerate(self.cache.rounds(taken)):
            self.cache.fetch(experts)
            if number == 0 and self.following is not None:
                self.following[1].fetch(likeliest(counts[1], self.following[1].num_slots))
            slots = self.cache.arrived(experts)[groups]
            here = (slots < self.cache.num_slots).nonzero().flatten()
            order = here[slots[here].argsort(stable=True)]
            outputs.index_copy_(0, order, self._products(rows, slots, order, self.gate_up, self.down))
        return outputs


class DecoderLayer(nn.Module):
    """Attention and feed-forward block, each with a norm before it, after it, or both."""

    def __init__(
        self, *, attention: Attention, mlp: nn.Module, before_attention: nn.Module, after_attention: nn.Module,
        before_mlp: nn.Module, after_mlp: nn.Module, residual_scale: float,
    ) -> None:
        super().__init__()
        self.attention, self.mlp = attention, mlp
        self.before_attention, self.after_attention = before_attention, after_attention
        self.before_mlp, self.after_mlp = before_mlp, after_mlp
        self.scale = residual_scale
        self.whole: LayerCall | None = None  # the layer in one call

    def forward(self, hidden: torch.Tensor, turn: Turn | None, attend: AttentionHandler) -> torch.Tensor:
        """Map [num_tokens, hidden_size] to the same shape."""
        if self.whole is not None and (output := self.whole(hidden, turn, attend)) is not None:
            return output
        attended = self.attention(self.before_attention(hidden), turn, attend)
        hidden, normed = added_and_normed(hidden, self.after_attention(attended), self.scale, self.before_mlp)
        return added(hidden, self.after_mlp(self.mlp(normed)), self.scale)


class Decoder(nn.Module):
    """A causal language model over packed tokens."""

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        embedding: nn.Module,
        layers: Sequence[DecoderLayer],
        norm: Norm,
        head: nn.Module,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.spec, self.dtype, self.device = spec, dtype, device
        self.hidden_size, self.vocab_size, self.num_layers = spec.hidden_size, spec.vocab_size, len(layers)
        self.embedding, self.norm, self.head = embedding, norm, head
        self.layers = nn.ModuleList(layers)
        self.kv_shapes = {index: layer.attention.shape for index, layer in enumerate(layers)}  # of this rank
        self.rotaries = nn.ModuleDict(
            {name: Rotary(rotary, spec.head_dim, dtype=dtype, device=device) for name, rotary in spec.rotaries.items()}
        )
        self._embedding_scale = float(torch.tensor(spec.embedding_scale, dtype=dtype))

    def record_routing(self) -> ExpertRouting | None:
        """Let every mixture layer keep its tokens' experts, from the next step or capture on; None: all are dense."""
        mixtures = [layer.mlp for layer in self.layers if isinstance(layer.mlp, Experts)]
        if not mixtures:
            return None
        spec = mixtures[0].spec
        routing = ExpertRouting(len(mixtures), spec.num_experts, spec.num_active, self.device)
        for index, mixture in enumerate(mixtures):
            mixture.topk = partial(routing.topk, index)
        return routing

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        attend: AttentionHandler,
        *,
        num_layers: int | None = None,
        taps: Sequence[int] = (),
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return float32 logits [num_rows, vocab_size] and the concatenated tapped states [num_tokens, width].

        `num_layers`: early exit after so many layers. A tap is a layer's index, for its input, or `FINAL_TAP`; without
        taps the states are None.
        """
        hidden, states = self.hidden(token_ids, positions, attend, num_layers=num_layers, taps=taps)
        return self.logits(hidden[rows]), states

    @property
    def fetches(self) -> FetchCounts | None:
        """Counters of experts in host memory; None: all are on the device."""
        return next((layer.mlp.cache.counts for layer in self.layers if isinstance(layer.mlp, OffloadedExperts)), None)

    @property
    def not_captured(self) -> str | None:
        """Why steps run eagerly on a GPU; None: they can be captured.

        In float32, torch's grouped product loops over the groups on the host and reads their ends back. Which experts
        to fetch is read back, too.
        """
        if self.fetches is not None:
            return "offloaded_experts"
        has_experts = any(layer.experts is not None for layer in self.spec.layers)
        is_looped = self.device.type == "cuda" and self.dtype is torch.float32
        return "float32_experts" if has_experts and is_looped else None

    def hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: AttentionHandler,
        *,
        num_layers: int | None = None,
        taps: Sequence[int] = (),
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the head's input [num_tokens, hidden_size] and the tapped states, as `forward` does."""
        hidden = self.embedding(token_ids)
        if self._embedding_scale != 1.0:
            hidden = hidden * self._embedding_scale
        turns: dict[str | None, Turn | None] = {name: rotary(positions) for name, rotary in self.rotaries.items()}
        turns[None] = None
        taken: dict[int, torch.Tensor] = {}
        for index, (layer, described) in enumerate(zip(self.layers[:num_layers], self.spec.layers, strict=False)):
            if index in taps:
                taken[index] = hidden
            hidden = layer(hidden, turns[described.rotary], attend)
        taken[FINAL_TAP] = hidden = self.norm(hidden)
        return hidden, torch.cat([taken[tap] for tap in taps], dim=1) if taps else None

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [num_rows, vocab_size] of rows of `hidden`."""
        logits = self.head(rows).float()
        if self.spec.logits_scale != 1.0:
            logits = logits * self.spec.logits_scale
        if self.spec.logits_softcap is not None:
            logits = torch.tanh(logits / self.spec.logits_softcap) * self.spec.logits_softcap
        return logits
