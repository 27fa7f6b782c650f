"""How long a step takes on a named accelerator: a roofline of published figures, or a linear fit with a knee.

A step reads every weight and the KV of its sequences once (memory) and does 2 FLOP per parameter and token (compute);
the slower of the two sets its time (Williams et al., "Roofline", 2009). Nothing here was measured on these machines.
Left out: the arithmetic of attention (below 3 % of a 70B model's at 1,000 tokens of context), activations, mixtures of
experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.verifier_service.messages.engine import StepTime

BYTES_PER_PARAM = 2  # bf16
USABLE_MEMORY = 0.9  # what servers hand out by default (vLLM's gpu_memory_utilization)
MAX_WEIGHT_SHARE = 0.6  # of the usable memory, where the tensor-parallel size is not given: KV needs room
# Published peaks are not reached. Matrix products come to about 80 % of the bf16 peak on the first three (mamf-finder,
# https://github.com/stas00/ml-engineering/tree/master/compute/accelerator), copies to about 90 % of the bandwidth; a
# step is not made of large products alone.
COMPUTE_EFFICIENCY = 0.7
MEMORY_EFFICIENCY = 0.85
STEP_OVERHEAD_S = 1.2e-3  # per step of vLLM on an H100 (SpecDecode-Bench's fit, arXiv 2601.11580)
ALL_REDUCE_LATENCY_S = 8e-6  # one small all-reduce over NVLink, two per layer
MAX_TENSOR_PARALLEL_SIZE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One device, by its data sheet."""

    name: str
    flops_per_s: float  # bf16, dense (data sheets that say "with sparsity" give twice as much)
    bytes_per_s: float  # of its memory
    memory_bytes: float
    link_bytes_per_s: float  # between two of them, one direction: NVLink, PCIe or UPI


ACCELERATORS = {
    accelerator.name: accelerator
    for accelerator in (
        # https://www.nvidia.com/en-us/data-center/h100/ (SXM: 1,979 TFLOP/s with sparsity, 3.35 TB/s, 80 GB, 900 GB/s)
        Accelerator(name="H100", flops_per_s=989e12, bytes_per_s=3.35e12, memory_bytes=80e9, link_bytes_per_s=450e9),
        # https://www.nvidia.com/en-us/data-center/h200/ (SXM: 1,979 TFLOP/s with sparsity, 4.8 TB/s, 141 GB, 900 GB/s)
        Accelerator(name="H200", flops_per_s=989e12, bytes_per_s=4.8e12, memory_bytes=141e9, link_bytes_per_s=450e9),
        # https://www.nvidia.com/en-us/data-center/dgx-b200/ (eight of them: 64 TB/s, 1,440 GB, 14.4 TB/s of NVLink);
        # bf16 dense 2,250 TFLOP/s: the table of https://github.com/stas00/ml-engineering (compute/accelerator)
        Accelerator(name="B200", flops_per_s=2250e12, bytes_per_s=8e12, memory_bytes=180e9, link_bytes_per_s=900e9),
        # https://www.nvidia.com/en-us/data-center/l4/ (242 TFLOP/s with sparsity, 300 GB/s, 24 GB, PCIe 4.0 x16)
        Accelerator(name="L4", flops_per_s=121e12, bytes_per_s=300e9, memory_bytes=24e9, link_bytes_per_s=32e9),
        # https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf (bf16 dense 70
        # TFLOP/s, below the A10's 125; 600 GB/s, 24 GB, PCIe 4.0 x16)
        Accelerator(name="A10G", flops_per_s=70e12, bytes_per_s=600e9, memory_bytes=24e9, link_bytes_per_s=32e9),
        # https://www.nvidia.com/en-us/data-center/l40s/ (362.05 TFLOP/s dense, 864 GB/s, 48 GB, PCIe 4.0 x16)
        Accelerator(name="L40S", flops_per_s=362e12, bytes_per_s=864e9, memory_bytes=48e9, link_bytes_per_s=32e9),
        # One socket of an Intel Xeon Platinum 8480+ (Intel's product page: 56 cores, 2.0 GHz, 8 channels of DDR5-4800,
        # which is 307.2 GB/s, UPI of 16 GT/s on 24 lanes). AMX does 1,024 bf16 operations per cycle and core: a
        # TDPBF16PS is 16 x 16 x 32 products and as many sums in 16 cycles. Memory: 8 modules of 64 GB, an assumption.
        Accelerator(name="CPU", flops_per_s=115e12, bytes_per_s=307e9, memory_bytes=512e9, link_bytes_per_s=48e9),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What of a dense model costs time and memory."""

    num_params: float
    num_layers: float
    hidden_size: float
    kv_bytes_per_token: float

    @property
    def weight_bytes(self) -> float:
        return BYTES_PER_PARAM * self.num_params

    @classmethod
    def llama_like(cls, num_params: float) -> ModelShape:
        """Return the shape that a Llama 3 of that size would have: between its published sizes by power laws."""
        if not num_params > 0:
            raise ValueError(f"num_params must be positive, not {num_params}")
        right = next(
            (index for index, size in enumerate(_LLAMA_3[1:-1], start=1) if num_params <= size.num_params),
            len(_LLAMA_3) - 1,
        )
        low, high = _LLAMA_3[right - 1], _LLAMA_3[right]
        place = math.log(num_params / low.num_params) / math.log(high.num_params / low.num_params)

        def between(left: float, right: float) -> float:
            return left * (right / left) ** place

        return cls(
            num_params=num_params,
            num_layers=between(low.num_layers, high.num_layers),
            hidden_size=between(low.hidden_size, high.hidden_size),
            kv_bytes_per_token=between(low.kv_bytes_per_token, high.kv_bytes_per_token),
        )


# https://github.com/meta-llama/llama-models (Llama 3.1 and 3.2); KV: layers x 8 KV heads x head size x 2 x 2 bytes
_LLAMA_3 = (
    ModelShape(num_params=1.24e9, num_layers=16, hidden_size=2048, kv_bytes_per_token=32_768),
    ModelShape(num_params=3.21e9, num_layers=28, hidden_size=3072, kv_bytes_per_token=114_688),
    ModelShape(num_params=8.03e9, num_layers=32, hidden_size=4096, kv_bytes_per_token=131_072),
    ModelShape(num_params=70.6e9, num_layers=80, hidden_size=8192, kv_bytes_per_token=327_680),
    ModelShape(num_params=405.9e9, num_layers=126, hidden_size=16384, kv_bytes_per_token=516_096),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """Seconds of a step over n tokens that reads c positions of KV, in five coefficients:

    max(compute_token_s * n, base_s + token_s * n + context_token_s * c) + overhead_s + link_token_s * n
    """

    compute_token_s: float
    base_s: float
    context_token_s: float
    token_s: float = 0.0
    overhead_s: float = STEP_OVERHEAD_S
    link_token_s: float = 0.0

    @classmethod
    def roofline(cls, accelerator: Accelerator, model: ModelShape, tensor_parallel_size: int = 1) -> StepTiming:
        """Return the time of a model on that many accelerators, all-reduces included."""
        num_all_reduces = 2 * model.num_layers if tensor_parallel_size > 1 else 0.0
        ring = 2 * (tensor_parallel_size - 1) / tensor_parallel_size * model.hidden_size * BYTES_PER_PARAM
        compute_flops_per_s = tensor_parallel_size * COMPUTE_EFFICIENCY * accelerator.flops_per_s
        memory_bytes_per_s = tensor_parallel_size * MEMORY_EFFICIENCY * accelerator.bytes_per_s
        return cls(
            compute_token_s=2 * model.num_params / compute_flops_per_s,
            base_s=model.weight_bytes / memory_bytes_per_s,
            context_token_s=model.kv_bytes_per_token / memory_bytes_per_s,
            overhead_s=STEP_OVERHEAD_S + num_all_reduces * ALL_REDUCE_LATENCY_S,
            link_token_s=num_all_reduces * ring / accelerator.link_bytes_per_s,
        )

    def seconds(self, num_tokens: float, num_context_tokens: float) -> float:
        """Return how long a step takes; fractions of tokens are means."""
        memory_s = self.base_s + self.token_s * num_tokens + self.context_token_s * num_context_tokens
        return max(self.compute_token_s * num_tokens, memory_s) + self.overhead_s + self.link_token_s * num_tokens

    def knee(self) -> float:
        """Return the number of tokens, without context, from which a step is bound by compute; infinity: never."""
        gain_s = self.compute_token_s - self.token_s
        return self.base_s / gain_s if gain_s > 0 else math.inf

    def profile(self, max_tokens: int) -> tuple[StepTime, ...]:
        """Return what an engine measures at start: steps of 1, 2, 4 ... `max_tokens` sequences of one token."""
        counts = [1 << power for power in range(max(1, max_tokens).bit_length())]
        return tuple(StepTime(num_tokens=count, seconds=self.seconds(count, count)) for count in counts)


def kv_capacity(
    accelerator: Accelerator,
    model: ModelShape,
    tensor_parallel_size: int,
    *,
    other_bytes: float = 0.0,
    option: str = "tensor_parallel_size",
) -> int:
    """Return the tokens of KV that fit beside the weights and `other_bytes`.

    Raises `ValueError` naming `option` when none does.
    """
    free = USABLE_MEMORY * tensor_parallel_size * accelerator.memory_bytes - model.weight_bytes - other_bytes
    if free < model.kv_bytes_per_token:
        raise ValueError(
            f"{option}: {model.num_params:.3g} parameters do not fit on {tensor_parallel_size} x {accelerator.name}"
        )
    return int(free / model.kv_bytes_per_token)


def smallest_tensor_parallel_size(accelerator: Accelerator, model: ModelShape) -> int:
    """Return the fewest accelerators (1, 2, 4, 8) that hold the weights and leave room; raise `ValueError` if none."""
    size = 1
    while model.weight_bytes > MAX_WEIGHT_SHARE * USABLE_MEMORY * size * accelerator.memory_bytes:
        size *= 2
        if size > MAX_TENSOR_PARALLEL_SIZE:
            raise ValueError(f"num_params: {model.num_params:.3g} parameters do not fit on 8 x {accelerator.name}")
    return size
