"""Which model to serve, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from outrider.verifier_service.formats.gguf import is_to_be_converted
from outrider.verifier_service.messages.draft import require

Dtype = Literal["auto", "float32", "float16", "bfloat16"]
Quantization = Literal["int8", "fp8"]
Device = Literal["auto", "cpu", "cuda"]
KVCacheDtype = Literal["auto", "fp8"]
DTYPES, DEVICES, KV_CACHE_DTYPES = get_args(Dtype), get_args(Device), get_args(KVCacheDtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A checkpoint and its engine's settings. Raises `ValueError` naming the field that is out of range."""

    path: str  # a folder, or a model id of the Hugging Face hub
    revision: str | None = None
    dtype: str = "auto"  # auto: the checkpoint's, but float32 on a CPU without bfloat16 instructions
    quantization: Quantization | None = None  # of linear layers; int8: weights, on a CPU; fp8: products
    # of each mixture layer on the device, the others in host memory; None: all
    num_cached_experts: int | None = None
    device: str = "auto"  # auto: CUDA if available
    max_model_len: int | None = None  # None: the model's own limit
    may_be_shorter: bool = False  # a drafter's model: its own limit holds where it is below `max_model_len`
    block_size: int = 16
    num_kv_blocks: int | None = None  # None: from kv_cache_memory_bytes
    kv_cache_memory_bytes: int | None = None  # per rank; None: a share of the memory
    kv_cache_dtype: str = "auto"  # auto: the model's; fp8: E4M3 without scales, half of bfloat16's memory
    tensor_parallel_size: int = 1
    trust_remote_code: bool = False
    num_threads: int | None = None  # torch's intra-op threads of each rank; None: torch's default
    state_taps: tuple[int, ...] = ()  # hidden states to keep for drafters, as in `DraftNeeds.taps`
    state_dtype: str = "auto"  # dtype of these states; auto: the model's
    num_scratch_blocks: int = 0  # extra KV blocks, for drafts by the model itself
    enforce_eager: bool = False  # capture no CUDA graphs
    check_logits: bool = True  # compare the engine's logits with the library's at start
    check_anew: bool = False  # ignore the findings of earlier starts with this checkpoint on this machine

    @property
    def has_code(self) -> bool:
        """Whether its tokenizer and description may need torch: they come with code, or are still to be converted."""
        return self.trust_remote_code or is_to_be_converted(self.path)

    def __post_init__(self) -> None:
        require(bool(self.path), "path", "a folder or a model id")
        require(self.dtype in DTYPES, "dtype", f"one of {', '.join(DTYPES)}")
        require(self.state_dtype in DTYPES, "state_dtype", f"one of {', '.join(DTYPES)}")
        require(self.device in DEVICES, "device", f"one of {', '.join(DEVICES)}")
        require(self.kv_cache_dtype in KV_CACHE_DTYPES, "kv_cache_dtype", f"one of {', '.join(KV_CACHE_DTYPES)}")
        require(self.quantization in (None, *get_args(Quantization)), "quantization", "int8, fp8 or None")
        for name in ("block_size", "tensor_parallel_size"):
            require(_is_positive(getattr(self, name)), name, "a positive integer")
        for name in ("max_model_len", "num_kv_blocks", "kv_cache_memory_bytes", "num_threads", "num_cached_experts"):
            value = getattr(self, name)
            require(value is None or _is_positive(value), name, "a positive integer or None")


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
