"""What model to serve and how: one frozen dataclass, checked where it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Dtype = Literal["auto", "float32", "float16", "bfloat16"]
Quantization = Literal["int8"]
Device = Literal["auto", "cpu", "cuda"]
DTYPES, DEVICES = get_args(Dtype), get_args(Device)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Name a checkpoint and the shape of its engine. Raises `ValueError` naming the field that is out of range."""

    path: str  # a folder, or a model id of the Hugging Face hub
    revision: str | None = None
    dtype: str = "auto"  # auto: the checkpoint's own; on a CPU without products in bfloat16 float32
    quantization: Quantization | None = None  # int8: the linear layers' weights, on a CPU
    device: str = "auto"  # auto: CUDA where there is one
    max_model_len: int | None = None  # None: the model's own limit
    block_size: int = 16
    num_kv_blocks: int | None = None  # None: from kv_cache_memory_bytes
    kv_cache_memory_bytes: int | None = None  # of one rank; None: a share of the free memory
    tensor_parallel_size: int = 1
    trust_remote_code: bool = False
    num_threads: int | None = None  # torch's intra-op threads of each rank; None: as torch decides
    state_taps: tuple[int, ...] = ()  # hidden states to keep for drafters, as in `DraftNeeds.taps`
    state_dtype: str = "auto"  # of those states, kept and sent; auto: the model's own
    num_scratch_blocks: int = 0  # KV blocks beyond the pool's, for drafts made by the model itself
    enforce_eager: bool = False  # capture no steps as CUDA graphs
    check_logits: bool = True  # compare the engine's logits with the library's own at start
    check_anew: bool = False  # find out again what an earlier start found out about this checkpoint on this machine

    def __post_init__(self) -> None:
        _require(bool(self.path), "path", "a folder or a model id")
        _require(self.dtype in DTYPES, "dtype", f"one of {', '.join(DTYPES)}")
        _require(self.state_dtype in DTYPES, "state_dtype", f"one of {', '.join(DTYPES)}")
        _require(self.device in DEVICES, "device", f"one of {', '.join(DEVICES)}")
        _require(self.quantization in (None, *get_args(Quantization)), "quantization", "int8 or None")
        for name in ("block_size", "tensor_parallel_size"):
            _require(_is_positive(getattr(self, name)), name, "a positive integer")
        for name in ("max_model_len", "num_kv_blocks", "kv_cache_memory_bytes", "num_threads"):
            value = getattr(self, name)
            _require(value is None or _is_positive(value), name, "a positive integer or None")


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _require(condition: bool, field_name: str, expectation: str) -> None:
    if not condition:
        raise ValueError(f"{field_name} must be {expectation}")
