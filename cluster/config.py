"""What an operator configures: one frozen dataclass, the same for command line, YAML and Serve application."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
import torch

from outrider.cluster.fleet import PolicyMode, RouterPolicy
from outrider.drafter_service import embedded
from outrider.drafter_service.rank_main import DrafterSpec
from outrider.verifier_service.architectures import load_model_description, resolve_folder
from outrider.verifier_service.engine_factory import VerifierSpec
from outrider.verifier_service.model_config import ModelConfig

APP_NAME = "outrider"
_POSITIVE = (
    "tensor_parallel_size",
    "draft_tensor_parallel_size",
    "num_verifiers",
    "threads_per_rank",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """A service: one target model on verifiers, one draft model (or none) on drafters, one gateway.

    With neither `model` nor `draft_model` the embedded pair is served. Raises `ValueError` naming the field.
    """

    model: str | None = None
    draft_model: str | None = None
    served_model_name: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    draft_tensor_parallel_size: int = 1
    num_verifiers: int = 1
    num_drafters: int = 1
    num_speculative_tokens: int = 4
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    kv_cache_memory_bytes: int | None = None
    block_size: int = 16
    enable_prefix_caching: bool = True
    threads_per_rank: int = 1
    gpu_share: float = 1.0  # of a GPU for each rank, where there are any; 0.5 lets two ranks share one
    seed: int | None = None
    speculation: str = "auto"  # auto | always | off
    host: str = "127.0.0.1"  # of the public ports
    internal_host: str = "127.0.0.1"  # of the ports between our own services; auto: each node's own address
    port: int = 8000
    grpc_port: int = 50051

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if not 0.0 < self.gpu_share <= 1.0:
            raise ValueError("gpu_share must be in (0, 1]")
        for name in ("num_drafters", "num_speculative_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0")
        if self.speculation not in ("auto", "always", "off"):
            raise ValueError("speculation must be auto, always or off")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> ServiceConfig:
        """Build from plain values; an unknown key is refused with the closest match."""
        known = {field.name: field for field in dataclasses.fields(cls)}
        for key in values:
            if key not in known:
                hint = difflib.get_close_matches(key, known, n=1)
                raise ValueError(f"unknown option {key!r}" + (f"; did you mean {hint[0]!r}?" if hint else ""))
        return cls(**{key: _coerce(value, str(known[key].type)) for key, value in values.items()})

    @property
    def target_path(self) -> str:
        return self.model or str(embedded.target_path())

    @property
    def draft_path(self) -> str | None:
        """Where the draft model is; None: nothing drafts."""
        if self.num_drafters == 0:
            return None
        if self.draft_model is not None:
            return self.draft_model
        return str(embedded.draft_path()) if self.model is None else None

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model or "outrider-embedded"

    @property
    def router_policy(self) -> RouterPolicy:
        return RouterPolicy(mode=PolicyMode(self.speculation), max_draft_length=self.num_speculative_tokens)

    @property
    def gpus_per_rank(self) -> float:
        if self.device == "cpu" or not torch.cuda.is_available():
            return 0.0
        return self.gpu_share

    @property
    def internal_address(self) -> str:
        """Return where this node's replicas listen for each other."""
        return ray.util.get_node_ip_address() if self.internal_host == "auto" else self.internal_host

    @property
    def target_vocab_size(self) -> int:
        """Read the target's vocabulary size from its files."""
        model = self.verifier_spec.model
        return int(load_model_description(resolve_folder(model), model).vocab_size)

    @property
    def num_ranks(self) -> int:
        verifier_ranks = self.num_verifiers * self.tensor_parallel_size
        return verifier_ranks + self.num_drafters * self.draft_tensor_parallel_size

    @property
    def verifier_spec(self) -> VerifierSpec:
        return VerifierSpec(
            model=self._model(self.target_path, self.tensor_parallel_size),
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            enable_prefix_caching=self.enable_prefix_caching,
            sampling_seed=self.seed,
        )

    @property
    def drafter_spec(self) -> DrafterSpec | None:
        if self.draft_path is None:
            return None
        return DrafterSpec(
            model=self._model(self.draft_path, self.draft_tensor_parallel_size),
            target=self._model(self.target_path, 1),
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_draft_length=max(1, self.num_speculative_tokens),
            max_sessions=self.num_verifiers * self.max_num_seqs,
            sampling_seed=self.seed,
        )

    def _model(self, path: str, tensor_parallel_size: int) -> ModelConfig:
        return ModelConfig(
            path=path,
            revision=self.revision if path == self.model else None,
            dtype=self.dtype,
            device=self.device,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            kv_cache_memory_bytes=self.kv_cache_memory_bytes,
            tensor_parallel_size=tensor_parallel_size,
            trust_remote_code=self.trust_remote_code,
            num_threads=self.threads_per_rank,
        )


def _coerce(value: Any, annotation: str) -> Any:
    """Convert the strings that `serve run module:build_app key=value` passes."""
    if not isinstance(value, str) or "str" in annotation:
        return value
    if annotation.startswith("bool"):
        if value.lower() not in ("true", "false"):
            raise ValueError(f"expected true or false, got {value!r}")
        return value.lower() == "true"
    return float(value) if annotation == "float" else int(value)
