"""A whole service: pools of drafters, with verifiers and gateways of ours."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from outrider.cluster.common.api_keys import HOW_TO_BE_ADMIN, ApiKeys, KeyOptions
from outrider.cluster.common.extras import require_extra
from outrider.cluster.common.options import Json, Options, Positive, Seconds, option
from outrider.cluster.common.security import LOOPBACK_HOSTS, TlsConfig, is_loopback, public_tls
from outrider.cluster.config.placement import PoolPlacement
from outrider.cluster.config.pool_options import ONE_REPLICA, Labels, PoolOptions, Replicas, Resources
from outrider.cluster.config.pools_config import PoolsConfig
from outrider.cluster.replies.families import REASONING_FAMILIES, TOOL_FAMILIES
from outrider.cluster.router.fleet import VerifierRole
from outrider.cluster.scaling.autoscaling import ReplicaRange
from outrider.drafter_service.service.drafter_spec import DrafterSpec, common_state_taps, num_scratch_blocks
from outrider.verifier_service.engine.verifier_spec import VerifierSpec
from outrider.verifier_service.messages.lossy import require_lossless
from outrider.verifier_service.messages.request import AcceptanceRule, LogprobsMode

APP_NAME = "outrider"
MODEL_OPTIONS = (  # that say what to load and how, with or without a server
    *("model", "draft_model", "revision", "trust_remote_code", "dtype", "quantization", "device"),
    "num_cached_experts",
    *("enforce_eager", "max_model_len", "tensor_parallel_size", "draft_tensor_parallel_size", "threads_per_rank"),
    *("num_speculative_tokens", "speculative_config", "seed"),
    *("max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes", "block_size", "enable_prefix_caching"),
    *("kv_cache_dtype", "async_scheduling", "logprobs_mode", "rollouts", "check_anew", "check_integrity"),
)
OUTRIDER: Final = "outrider"  # engines
VLLM: Final = "vllm"
_PEER = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")
_NOT_KWARGS = ("model", "tensor_parallel_size", "distributed_executor_backend")  # of vLLM: they have options


class VerifierOptions(Options):
    """The verifiers and their engine."""

    engine: Literal["outrider", "vllm"] = option(
        OUTRIDER, "Of the verifiers. vllm: vLLM, with drafts from our pools; docs/vllm.md says how it is installed."
    )
    engine_kwargs: Annotated[dict[str, Any], Json] = option(
        {}, 'Further arguments of vLLM\'s engine, by its names: {"quantization": "fp8"}.'
    )
    lora_modules: Annotated[dict[str, str], Json] = option(
        {}, 'LoRA adapters that vLLM serves, which clients name as model: {"name": "folder"}.'
    )
    tensor_parallel_size: Positive = option(1, "Ranks per verifier.")
    verifier_resources: Resources = option({}, "Custom Ray resources of each verifier.")
    verifier_labels: Labels = option({}, "Ray label selector of verifiers' nodes.")
    num_prefill_verifiers: Replicas = option(
        ReplicaRange(0, 0),
        "Further verifiers, of role prefill: they compute long prompts, the others decode; min:max: scaled by load. "
        "0: each verifier does both.",
    )
    prefill_verifier_resources: Resources = option({}, "Custom Ray resources of each of these.")
    prefill_verifier_labels: Labels = option({}, "Ray label selector of their nodes.")
    enable_prefix_caching: bool = option(True)
    async_scheduling: bool = option(True, "Launch the next step before one is read; without CUDA, none is.")
    rollouts: bool = option(
        False, "Serve a trainer: look-ups remember responses by prompt or history_key, not by cache_salt."
    )
    generation_config: Literal["auto", "vllm"] | None = option(
        None,
        "Sampling of requests that leave it open: as MODEL's generation_config.json says (auto), or unchanged (vllm)."
        " Default: auto, with --rollouts vllm.",
    )
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] | None = option(
        None,
        "Of requests that name none: the model's own, or of the law that a token was drawn from. Default: raw_logprobs,"
        " with --rollouts processed_logprobs.",
    )

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        for name in ("engine_kwargs", "lora_modules"):
            if self.engine == OUTRIDER and getattr(self, name):
                raise ValueError(f"{name} are vLLM's: they need engine vllm")
        if self.rollouts and self.engine == VLLM:
            raise ValueError("rollouts: they are our own engine's")
        if self.num_prefill_verifiers.most and self.engine == VLLM:
            raise ValueError("num_prefill_verifiers: roles are our own engine's")
        if self.num_prefill_verifiers.most and self.rollouts:
            raise ValueError("num_prefill_verifiers: in rollouts a sample stays where its prompt was computed")
        for name in _NOT_KWARGS:
            if name in self.engine_kwargs:
                raise ValueError(f"engine_kwargs: {name} is not vLLM's to be told: say it to the service")
        return self


class GatewayOptions(KeyOptions):
    """The gateways: what clients reach, and how requests are admitted."""

    num_gateways: Replicas = option(ONE_REPLICA, "Replicas of the API; min:max: scaled by load.")
    tool_call_parser: str | None = option(
        None, "How MODEL writes tool calls. Default: as its tokenizer's response template says, if it has one."
    )
    reasoning_parser: str | None = option(
        None, "How MODEL marks what it thinks; split off as reasoning_content. Default: as for tool calls."
    )
    max_queued_requests: Positive = option(1024, "Most requests that wait per verifier; more are told to come back.")
    stream_interval: Positive = option(1, "Tokens of an event of a stream, but for its first and its last one.")
    next_turn_prefill: bool = option(
        False, "After a chat's answer, prefill the beginning of its next turn while the verifier is idle."
    )
    failover_timeout_s: Seconds = option(60.0, "Seconds that a request which lost its verifier waits for another.")
    keep_alive_timeout_s: Seconds = option(
        75.0, "Seconds that an idle HTTP connection is kept: longer than a load balancer in front keeps it."
    )
    ssl_certfile: str | None = option(None, "PEM: certificate of the HTTP and gRPC ports.")
    ssl_keyfile: str | None = option(None, "PEM: key of --ssl-certfile.")
    ssl_ca_certs: str | None = option(None, "PEM: clients must present a certificate signed by one of these.")
    kv_peers: Annotated[tuple[str, ...], Json] = option(
        (), "Verifiers of other services that a request's kv_transfer_params may name: HOST or HOST:PORT of each."
    )
    trainer_hosts: Annotated[tuple[str, ...], Json] = option(
        LOOPBACK_HOSTS, "Hosts that a trainer's master_address may name: verifiers connect to them."
    )
    trainer_timeout_s: Seconds = option(
        45.0, "Seconds that joining a trainer's group may take, and each bucket of its tensors."
    )
    own_listener: bool = False  # HTTP without Serve's proxy, as with TLS; `outrider serve` sets it, a YAML may
    allowed_origins: Annotated[tuple[str, ...], Json] = option(
        ("*",), "Origins whose pages a browser lets call the API; []: none but its own."
    )
    share_between_keys: bool = option(
        False, "One prefix cache, and one store of past responses and samples, for all API keys. Default: each its own."
    )
    allow_typical_acceptance: bool = option(
        False, "Requests may ask for the lossy rejection_sample_method typical. Default: only if it is the service's."
    )
    otlp_traces_endpoint: str | None = option(None, "Send traces there by OTLP over gRPC. Default: no traces.")
    trace_sample_ratio: Annotated[float, Field(ge=0, le=1)] = option(
        1.0, "Share of requests to trace, where the caller's traceparent does not decide."
    )

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.num_gateways.fewest < 1:
            raise ValueError("num_gateways must be at least 1")
        if self.otlp_traces_endpoint is not None:
            require_extra("otlp", "otlp_traces_endpoint")
        if not all(_PEER.fullmatch(peer) for peer in self.kv_peers):
            raise ValueError("kv_peers must be HOST or HOST:PORT, each")
        public_tls(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)
        for name, families in (("tool_call_parser", TOOL_FAMILIES), ("reasoning_parser", REASONING_FAMILIES)):
            if getattr(self, name) not in (None, *families):
                raise ValueError(f"{name} must be one of {', '.join(families)}")
        return self

    @property
    def tls(self) -> TlsConfig | None:
        """TLS of the public ports."""
        return public_tls(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)


class ServiceConfig(PoolsConfig):
    """One target model on verifiers, drafters in one or more pools (or none), gateways in front.

    With neither `model` nor `draft_model` the embedded pair is served.
    """

    verifiers: VerifierOptions
    gateway: GatewayOptions

    def __init__(self, **options: Any) -> None:  # or mypy takes the parts for parameters
        super().__init__(**options)

    @property
    def serves_trainers(self) -> bool:
        return self.verifiers.rollouts

    @property
    def logprobs_mode(self) -> LogprobsMode:
        """Of requests that name none."""
        default = LogprobsMode.PROCESSED if self.verifiers.rollouts else LogprobsMode.RAW
        return LogprobsMode(self.verifiers.logprobs_mode or default)

    @property
    def reads_generation_config(self) -> bool:
        """Whether the model's generation_config.json says how requests are sampled that leave it open."""
        return (self.verifiers.generation_config or ("vllm" if self.verifiers.rollouts else "auto")) == "auto"

    @model_validator(mode="after")
    def _check_rollouts(self) -> Self:
        """Refuse rules that bias what a trainer learns."""
        if self.verifiers.rollouts:
            require_lossless(self.speculative.rejection_sample_method)
        return self

    @model_validator(mode="after")
    def _check_doors(self) -> Self:
        """Refuse doors that all clients could open: whoever passes changes the weights."""
        if not is_loopback(self.host):
            self.require_admin(f"host {self.host}")
        return self

    def require_admin(self, place: str) -> None:
        """Raise `ValueError` if weights can be changed from a place that others reach, and nobody is an admin."""
        opened = "rollouts" if self.verifiers.rollouts else "learner" if self.learning else None
        if opened is not None and not ApiKeys(self.gateway.api_key_hashes).has_admin:
            reached = f"whoever reaches {place} could change the weights"
            alone = "--api-key and --ssl-ca-certs alone are for clients"
            raise ValueError(f"{opened}: {reached}; add {HOW_TO_BE_ADMIN} ({alone})")

    @model_validator(mode="after")
    def _check_peers(self) -> Self:
        """Refuse verifiers of other services, which do not know what this cluster's links show."""
        peers = [found[1].strip("[]") for peer in self.gateway.kv_peers if (found := _PEER.fullmatch(peer))]
        hosts = [self.links.internal_host, *peers]
        if peers and not self.links.is_closed and not all(map(is_loopback, hosts)):
            raise ValueError("kv_peers: beyond this machine both services need one --link-secret-file, or --link-ssl-*")
        return self

    @model_validator(mode="after")
    def _check_next_turn(self) -> Self:
        if self.gateway.next_turn_prefill and self.verifiers.engine == VLLM:
            raise ValueError("next_turn_prefill: our own engine alone knows when it is idle")
        if self.gateway.next_turn_prefill and not self.verifiers.enable_prefix_caching:
            raise ValueError("next_turn_prefill: it needs enable_prefix_caching")
        return self

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        """Refuse log probabilities of a law that no token is drawn from."""
        rule = self.speculative.rejection_sample_method
        if self.logprobs_mode is LogprobsMode.PROCESSED and rule.is_lossy:
            raise ValueError(f"logprobs_mode: {self.logprobs_mode} is not for the lossy rejection_sample_method {rule}")
        return self

    @model_validator(mode="after")
    def _check_vllm(self) -> Self:
        """Refuse what vLLM cannot do."""
        if self.verifiers.engine != VLLM:
            return self
        if self.model.quantization is not None:
            raise ValueError("quantization: int8 and fp8 are our own engine's; vLLM's go into engine_kwargs")
        if self.model.kv_cache_dtype != "auto":
            raise ValueError("kv_cache_dtype: our own engine's; vLLM's goes into engine_kwargs")
        if self.model.num_cached_experts is not None:
            raise ValueError("num_cached_experts: our own engine's; vLLM has options of its own for offloading")
        if self.check_integrity:
            raise ValueError("check_integrity: vLLM keeps books of its own")
        if self.logprobs_mode is not LogprobsMode.RAW:
            raise ValueError(f"logprobs_mode: vLLM's are {LogprobsMode.RAW} here")
        if self.model.name in self.verifiers.lora_modules:
            raise ValueError(f"lora_modules: {self.model.name} is the model's own name")
        if self.speculative.rejection_sample_method is not AcceptanceRule.STANDARD:
            raise ValueError("speculative_config: rejection_sample_method: vLLM verifies by the standard rule alone")
        if any(pool.speculative.num_tree_nodes for pool in self.drafters):
            raise ValueError("speculative_config: num_tree_nodes: vLLM verifies chains alone")
        if self.drafters[0].is_named and not self.drafters[0].is_in_pool:
            raise ValueError("speculative_config: location: vLLM's drafts come from a pool, not from its own process")
        return self

    @property
    def tls(self) -> TlsConfig | None:
        return self.gateway.tls

    @property
    def listens_itself(self) -> bool:
        return self.gateway.own_listener or self.tls is not None  # Serve's proxy verifies no client

    @property
    def is_shared_by_strangers(self) -> bool:
        """Whether clients of other hosts share one prefix cache without any key: counts would tell of one another."""
        is_near = self.listens_itself and is_loopback(self.host)  # Serve's proxy listens where Serve was told to
        return not self.gateway.api_key_hashes and not is_near

    @property
    def active(self) -> list[PoolOptions]:
        has_own = self.verifiers.engine == OUTRIDER  # within vLLM's process nothing of ours drafts
        return [pool for pool in self.drafters if pool.drafts and (pool.is_in_pool or has_own)]

    @property
    def own_drafter(self) -> DrafterSpec | None:
        """What drafts in every verifier's process; None: nothing does."""
        return next((self.drafter_spec_of(pool) for pool in self.active if not pool.is_in_pool), None)

    @property
    def drafter_spec(self) -> DrafterSpec | None:
        """The first of what drafts: without a server there is no more."""
        return next(iter(self.drafter_specs), None)

    @property
    def verifier_spec(self) -> VerifierSpec:
        model = self.model.checkpoint(self.model.target_path, self.verifiers.tensor_parallel_size)
        if specs := self.drafter_specs:
            scratch = (num_scratch_blocks(spec, self.model.block_size, self.max_num_seqs) for spec in specs)
            model = dataclasses.replace(
                model,
                state_taps=common_state_taps(specs),
                state_dtype=self.speculative.state_dtype,
                num_scratch_blocks=max(scratch),
            )
        return VerifierSpec(
            model=model,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            enable_prefix_caching=self.verifiers.enable_prefix_caching,
            async_scheduling=self.verifiers.async_scheduling,
            rollouts=self.verifiers.rollouts,
            sampling_seed=self.seed,
            check_integrity=self.check_integrity,
            max_tree_nodes=max(pool.speculative.num_tree_nodes for pool in self.drafters),
            has_masks=any(pool.speculative.record.has_masks for pool in self.active),
        )

    @property
    def verifier_placement(self) -> PoolPlacement:
        """What a verifier asks for that is none of role prefill."""
        ranks, gpus = self.verifiers.tensor_parallel_size, self.model.gpus_per_rank
        is_one_process = self.verifiers.engine == VLLM  # which starts its ranks itself, on the devices that it is given
        return PoolPlacement(
            num_ranks=1 if is_one_process else ranks,
            gpus_per_rank=gpus * ranks if is_one_process else gpus,
            resources=self.verifiers.verifier_resources,
            labels=self.verifiers.verifier_labels,
        )

    @property
    def prefill_placement(self) -> PoolPlacement:
        """What a verifier of role prefill asks for."""
        own = self.verifiers
        return dataclasses.replace(
            self.verifier_placement, resources=own.prefill_verifier_resources, labels=own.prefill_verifier_labels
        )

    @property
    def role(self) -> VerifierRole:
        """Of the verifiers that are none of role prefill."""
        return VerifierRole.DECODE if self.verifiers.num_prefill_verifiers.most else VerifierRole.BOTH

    @property
    def most_verifiers(self) -> int:
        return super().most_verifiers + self.verifiers.num_prefill_verifiers.most

    @property
    def num_ranks(self) -> int:
        return super().num_ranks + self.most_verifiers * self.verifiers.tensor_parallel_size

    @property
    def num_shells(self) -> int:
        return super().num_shells + self.most_verifiers + self.gateway.num_gateways.most
