"""What is served and how it is loaded: what the target and all that drafts for it have in common."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from outrider.cluster.common.options import Options, Positive
from outrider.cluster.config.known_models import is_embedded, path_of
from outrider.verifier_service.model.config import Device, Dtype, ModelConfig, Quantization


class ModelOptions(Options):
    """The target, and how checkpoints are loaded. With no `model` the embedded one is served."""

    model: str | None = None
    served_model_name: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    dtype: Dtype = "auto"
    quantization: Quantization | None = None  # of the target
    device: Device = "auto"
    check_anew: bool = False  # check and measure again what an earlier start of this checkpoint here has found out
    enforce_eager: bool = False  # capture no steps as CUDA graphs
    max_model_len: Positive | None = None
    kv_cache_memory_bytes: Positive | None = None
    block_size: Positive = 16
    threads_per_rank: Positive | None = None  # None: one; without a cluster the cores are shared out
    gpu_share: Annotated[float, Field(gt=0, le=1)] = 1.0  # of a GPU for each rank; 0.5 lets two ranks share one

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
            dtype=self.dtype,
            quantization=self.quantization if path == self.target_path else None,
            device=self.device,
            check_anew=self.check_anew,
            enforce_eager=self.enforce_eager,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            kv_cache_memory_bytes=self.kv_cache_memory_bytes,
            tensor_parallel_size=tensor_parallel_size,
            trust_remote_code=self.trust_remote_code,
            num_threads=self.threads_per_rank or 1,
        )

    @property
    def settled_device(self) -> Literal["cpu", "cuda"]:
        """The device, with `auto` decided by whether this machine has a GPU."""
        if self.device != "auto":
            return self.device
        import torch  # takes seconds to load: only where the device is not given

        return "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def gpus_per_rank(self) -> float:
        """The share of a GPU that each rank reserves."""
        return self.gpu_share if self.settled_device == "cuda" else 0.0
