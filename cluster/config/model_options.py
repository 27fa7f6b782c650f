"""What is served and how it is loaded: what the target and all that drafts for it have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from outrider.cluster.common.options import Options, Positive, option
from outrider.cluster.config.known_models import is_embedded, path_of
from outrider.verifier_service.model.config import Device, Dtype, KVCacheDtype, ModelConfig, Quantization

_OF_ALL_CHECKPOINTS = (
    *("dtype", "device", "trust_remote_code", "max_model_len", "block_size", "kv_cache_memory_bytes"),
    *("check_anew", "enforce_eager"),
)


DEVICES = Path("/dev")
_GPU_NODES = ("nvidia[0-9]*", "nvmap", "kfd", "dxg")  # of NVIDIA's drivers, of its boards, of AMD's, of Windows' host


def has_gpu_nodes(devices: Path | None = None) -> bool:
    """Tell whether this machine may have a GPU, without torch, which takes seconds to load."""
    return any(any((devices or DEVICES).glob(pattern)) for pattern in _GPU_NODES)


class ModelOptions(Options):
    """The target, and how checkpoints are loaded. With no `model` the embedded one is served."""

    model: str | None = None
    served_model_name: str | None = option(None, "Name in the API. Default: MODEL.")
    revision: str | None = option(None, "Hub revision of MODEL.")
    trust_remote_code: bool = option(False, "Run model code that comes with the checkpoint.")
    dtype: Dtype = option("auto")
    quantization: Quantization | None = option(None, "Linear layers of the target in int8 (CPU) or fp8.")
    num_cached_experts: Positive | None = option(
        None, "Experts of each of the target's mixture layers on the device; the others are fetched from host memory."
    )
    device: Device = option("auto")
    check_anew: bool = option(False, "Check logits and measure steps again, though a start here has done so.")
    enforce_eager: bool = option(False, "Capture no steps as CUDA graphs; without CUDA, none is.")
    max_model_len: Positive | None = option(None, "Longest sequence in tokens. Default: the model's own limit.")
    kv_cache_memory_bytes: Positive | None = option(None, "KV pool of one rank. Default: from the free memory.")
    kv_cache_dtype: KVCacheDtype = option("auto", "Of the target's KV pool. fp8 (E4M3): half of the memory.")
    block_size: Positive = option(16, "Tokens per KV block.")
    threads_per_rank: Positive | None = option(None, "CPU threads of each rank. Default: a fair share of the cores.")
    gpu_share: Annotated[float, Field(gt=0, le=1)] = option(1.0, "GPU per rank; 0.5: two ranks share one.")

    @property
    def name(self) -> str:
        """The target's name in the API."""
        if self.served_model_name is not None:
            return self.served_model_name
        return "outrider-embedded" if is_embedded(self.model) else str(self.model)

    @property
    def target_path(self) -> str:
        return path_of(self.model)

    def checkpoint(self, path: str, tensor_parallel_size: int) -> ModelConfig:
        """Return how a checkpoint is loaded, the target's or a drafter's."""
        return ModelConfig(
            path=path,
            revision=self.revision if path == self.model else None,
            quantization=self.quantization if path == self.target_path else None,
            num_cached_experts=self.num_cached_experts if path == self.target_path else None,
            kv_cache_dtype=self.kv_cache_dtype if path == self.target_path else "auto",
            tensor_parallel_size=tensor_parallel_size,
            num_threads=self.threads_per_rank or 1,
            may_be_shorter=path != self.target_path,
            **{name: getattr(self, name) for name in _OF_ALL_CHECKPOINTS},
        )

    @property
    def settled_device(self) -> Literal["cpu", "cuda"]:
        """The device, with `auto` decided by whether this machine has a GPU."""
        if self.device != "auto":
            return self.device
        if not has_gpu_nodes():
            return "cpu"
        import torch  # takes seconds to load: only where there may be a GPU

        return "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def gpus_per_rank(self) -> float:
        """The share of a GPU that each rank reserves."""
        return self.gpu_share if self.settled_device == "cuda" else 0.0
