"""What an operator configures: one frozen dataclass, the same for command line, YAML and Serve application."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self, get_origin, get_type_hints

import grpc

from outrider.cluster.common.api_keys import require_hashes
from outrider.cluster.common.extras import require_extra
from outrider.cluster.common.hints import did_you_mean
from outrider.cluster.common.logs import LOG_FORMATS
from outrider.cluster.common.option_values import typed_value
from outrider.cluster.common.security import TlsConfig, link_tls, public_tls
from outrider.cluster.config.checks import OUTRIDER, VLLM, check_engine, check_links
from outrider.cluster.config.known_models import drafter_paths, is_embedded, path_of, usual_drafting
from outrider.cluster.config.placement import PoolPlacement
from outrider.cluster.config.speculative_options import PoolOptions, parse_pool, parse_speculative_config, split_options
from outrider.cluster.config.vllm_service import vllm_spec
from outrider.cluster.replies.reader import ReplySyntax
from outrider.cluster.router.autoscaling import FIRST_POOL, ReplicaRange
from outrider.cluster.router.fleet import BatchSizeTable, PolicyMode, RouterPolicy
from outrider.cluster.vllm_engine.spec import VllmSpec
from outrider.drafter_service.service.drafter_spec import (
    ColocatedSpec,
    DrafterSpec,
    common_state_taps,
    num_scratch_blocks,
)
from outrider.drafter_service.service.speculative_config import Location, SpeculativeConfig
from outrider.verifier_service.engine.verifier_spec import VerifierSpec
from outrider.verifier_service.links.grpc_channel import LinkCredentials
from outrider.verifier_service.messages.tensor_route import offered_transports
from outrider.verifier_service.model.config import ModelConfig, Quantization

APP_NAME = "outrider"
DrafterPools = tuple[dict[str, Any], ...]
_JSON_KINDS = (BatchSizeTable, DrafterPools, tuple[str, ...])  # beside objects: what is written as JSON in text
_POSITIVE = (
    "tensor_parallel_size",
    "draft_tensor_parallel_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_queued_requests",
    "block_size",
)
# what a further pool has unless it says so itself: not what the first one has
FURTHER_POOL: dict[str, Any] = {"draft_model": None, "num_drafters": 1, "draft_tensor_parallel_size": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """A service: one target model on verifiers, drafters in one or more pools (or none), gateways in front.

    With neither `model` nor `draft_model` the embedded pair is served. Raises `ValueError` naming the field.
    """

    model: str | None = None
    draft_model: str | None = None
    served_model_name: str | None = None
    tool_call_parser: str | None = None  # how the model writes tool calls: of `TOOL_FAMILIES`
    reasoning_parser: str | None = None  # how it marks its thoughts: of `REASONING_FAMILIES`
    revision: str | None = None
    trust_remote_code: bool = False
    dtype: str = "auto"
    quantization: Quantization | None = None  # of the target
    engine: str = OUTRIDER  # of the verifiers: outrider | vllm
    engine_kwargs: dict[str, Any] = field(default_factory=dict)  # further arguments of vLLM's `AsyncEngineArgs`
    lora_modules: dict[str, str] = field(default_factory=dict)  # of vLLM: adapters' folders by their names
    device: str = "auto"
    check_anew: bool = False  # find out again what an earlier start of this checkpoint here found out
    enforce_eager: bool = False  # capture no steps as CUDA graphs
    async_scheduling: bool = True  # on CUDA: launch the next step before one is read
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    draft_tensor_parallel_size: int = 1
    num_verifiers: int | str = 1  # a number, or "min:max" for Serve to choose by load; so the next two
    num_drafters: int | str = 1
    num_gateways: int | str = 1
    verifier_resources: dict[str, float] = field(default_factory=dict)  # custom Ray resources of each replica
    drafter_resources: dict[str, float] = field(default_factory=dict)
    verifier_labels: dict[str, str] = field(default_factory=dict)  # Ray label selector of each replica's node
    drafter_labels: dict[str, str] = field(default_factory=dict)
    max_queued_requests: int = 1024  # waiting per verifier; more are refused until the queue is shorter
    failover_timeout_s: float = 60.0  # how long a request that has lost its verifier waits for another
    engine_timeout_s: float = 10.0  # an engine silent for longer is given up and its replica replaced
    drain_timeout_s: float = 30.0  # how long a replica that shall stop waits for its streams to finish or move
    num_speculative_tokens: int = 4  # the longest draft; 0: never speculate
    speculative_config: dict[str, Any] = field(default_factory=dict)  # keys of `SpeculativeConfig` but those above
    drafter_pools: DrafterPools = ()  # beside the one described here: see `parse_pool`
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    kv_cache_memory_bytes: int | None = None
    block_size: int = 16
    enable_prefix_caching: bool = True
    threads_per_rank: int | None = None  # None: one; without a cluster the cores are shared out
    gpu_share: float = 1.0  # of a GPU for each rank, where there are any; 0.5 lets two ranks share one
    seed: int | None = None
    speculation: str = "auto"  # auto | always | off
    draft_length_by_batch_size: BatchSizeTable = ()  # (first, last, length) by running requests; empty: the router's
    host: str = "127.0.0.1"  # of the public ports
    internal_host: str = "127.0.0.1"  # of the ports between our own services; auto: each node's own address
    port: int = 8000
    grpc_port: int = 50051
    ssl_certfile: str | None = None  # PEM files, on every node that has a gateway
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None  # given: clients must present a certificate that it signed
    link_ssl_certfile: str | None = None  # of the links between our own services, always mutual; on every node
    link_ssl_keyfile: str | None = None
    link_ssl_ca_certs: str | None = None
    link_ssl_server_name: str | None = None  # expected in peers' certificates; None: the address they listen at
    allowed_origins: tuple[str, ...] = ("*",)  # whose pages a browser lets call us; (): nobody's but our own
    api_key_hashes: tuple[str, ...] = ()  # SHA-256 in hex; none: no key is asked for
    log_format: str = "text"  # text | json: one object a line
    otlp_traces_endpoint: str | None = None  # "http://host:4317", OTLP over gRPC; None: no traces
    check_integrity: bool = False  # engines check their books after every step: for tests
    trace_sample_ratio: float = 1.0  # of the requests whose caller does not say whether to trace

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.threads_per_rank is not None and self.threads_per_rank < 1:
            raise ValueError("threads_per_rank must be at least 1")
        if not 0.0 < self.gpu_share <= 1.0:
            raise ValueError("gpu_share must be in (0, 1]")
        if self.num_speculative_tokens < 0:
            raise ValueError("num_speculative_tokens must be at least 0")
        for name in ("drain_timeout_s", "failover_timeout_s", "engine_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite")
        for name in ("port", "grpc_port"):
            if not 0 < getattr(self, name) < 1 << 16:
                raise ValueError(f"{name} must be in [1, 65535]")
        if self.port == self.grpc_port:
            raise ValueError("grpc_port must be another one than port")
        self._model(self.target_path, self.tensor_parallel_size)  # refuses what no engine takes
        for name, fewest in (("num_verifiers", 1), ("num_drafters", 0), ("num_gateways", 1)):
            if self._range(name).fewest < fewest:
                raise ValueError(f"{name} must be at least {fewest}")
        if self.speculation not in ("auto", "always", "off"):
            raise ValueError("speculation must be auto, always or off")
        if self.log_format not in LOG_FORMATS:
            raise ValueError("log_format must be text or json")
        if not 0.0 <= self.trace_sample_ratio <= 1.0:
            raise ValueError("trace_sample_ratio must be in [0, 1]")
        if self.otlp_traces_endpoint is not None:
            require_extra("otlp", "otlp_traces_endpoint")
        self.reply_syntax  # noqa: B018  # refuses what no parser is
        self.speculative  # noqa: B018  # refuses what no drafter takes
        self.pools  # noqa: B018
        longest = self.router_policy.max_draft_length  # refuses a table that is none
        if any(length > longest for _, _, length in self.draft_length_by_batch_size):
            raise ValueError("draft_length_by_batch_size must have draft lengths of at most num_speculative_tokens")
        require_hashes(self.api_key_hashes)
        public_tls(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)  # refuses an incomplete set
        check_links(self)
        check_engine(self)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Build from plain values; an unknown key is refused with the closest match, a value by its field's name."""
        known = get_type_hints(cls)
        given = values.get("speculative_config")
        if isinstance(given, Mapping):
            options, rest = split_options(given)
            values = {**options, **values, "speculative_config": rest}
        for key in values:
            if key not in known:
                raise ValueError(f"unknown option {key!r}{did_you_mean(key, known)}")
        return cls(**{key: _parsed(key, value, known[key]) for key, value in values.items()})

    @property
    def target_path(self) -> str:
        return path_of(self.model)

    @property
    def reply_syntax(self) -> ReplySyntax | None:
        """How the model writes calls and thoughts, where that is said; None: its tokenizer may know."""
        if self.tool_call_parser is None and self.reasoning_parser is None:
            return None
        return ReplySyntax(tool_call_parser=self.tool_call_parser, reasoning_parser=self.reasoning_parser)

    @property
    def tls(self) -> TlsConfig | None:
        """TLS of the public ports."""
        return public_tls(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)

    @property
    def link_tls(self) -> TlsConfig | None:
        """TLS between our own services."""
        return link_tls(self.link_ssl_certfile, self.link_ssl_keyfile, self.link_ssl_ca_certs)

    @property
    def pools(self) -> dict[str, ServiceConfig]:
        """Every pool of drafters by its name: the service as it would be with that one alone."""
        if not self.drafter_pools:
            return {FIRST_POOL: self} if self.has_drafters else {}
        # a table of lengths is of the whole service: plans are cut to what each drafter drafts
        alone = dataclasses.replace(self, drafter_pools=(), draft_length_by_batch_size=())
        pools = {FIRST_POOL: alone} if self.has_drafters else {}
        for values in self.drafter_pools:
            pool = parse_pool(values, self.speculative_config)
            if pool.name in pools:
                raise ValueError(f"drafter_pools: {pool.name}: there are two of that name")
            try:
                pools[pool.name] = alone._with_pool(pool)
            except ValueError as error:
                raise ValueError(f"drafter_pools: {pool.name}: {error}") from error
        return pools

    def _with_pool(self, pool: PoolOptions) -> ServiceConfig:
        """Return the service, which has one pool, with another in its place."""
        kinds = get_type_hints(ServiceConfig)
        found = dataclasses.replace(
            self,
            **{name: FURTHER_POOL[name] for name in FURTHER_POOL if name not in pool.options},
            **{name: _parsed(name, value, kinds[name]) for name, value in pool.options.items()},
            speculative_config=pool.speculative_config,
        )
        if not found.has_drafters:
            raise ValueError("it would have no drafter: model, num_drafters or num_speculative_tokens")
        return found

    @property
    def tensor_transports(self) -> tuple[str, ...]:
        """The channels for hidden states that both ends of a link offer."""
        return offered_transports(self.speculative.tensor_transport, is_encrypted=self.link_tls is not None)

    @property
    def link_server_credentials(self) -> grpc.ServerCredentials | None:
        return None if self.link_tls is None else self.link_tls.server_credentials()

    @property
    def link_credentials(self) -> LinkCredentials | None:
        return None if self.link_tls is None else self.link_tls.link_credentials(self.link_ssl_server_name)

    @property
    def verifier_range(self) -> ReplicaRange:
        return self._range("num_verifiers")

    @property
    def drafter_range(self) -> ReplicaRange:
        return self._range("num_drafters")

    @property
    def gateway_range(self) -> ReplicaRange:
        return self._range("num_gateways")

    def _range(self, name: str) -> ReplicaRange:
        try:
            return ReplicaRange.parse(getattr(self, name))
        except ValueError as error:
            raise ValueError(f"{name} {error}") from error

    @property
    def verifier_placement(self) -> PoolPlacement:
        is_one_process = self.engine == VLLM  # which starts its ranks itself, on the devices that it is given
        return PoolPlacement(
            num_ranks=1 if is_one_process else self.tensor_parallel_size,
            gpus_per_rank=self.gpus_per_rank * (self.tensor_parallel_size if is_one_process else 1),
            resources=self.verifier_resources,
            labels=self.verifier_labels,
        )

    @property
    def drafter_placement(self) -> PoolPlacement:
        return PoolPlacement(
            num_ranks=self.draft_tensor_parallel_size,
            gpus_per_rank=self.gpus_per_rank,
            resources=self.drafter_resources,
            labels=self.drafter_labels,
        )

    @property
    def speculative(self) -> SpeculativeConfig:
        """How drafts are made; raises `ValueError` naming the key of `speculative_config` that is wrong."""
        is_told = self.is_drafter_named or (self.drafter_pools and not drafter_paths(self.model))
        usual = {} if is_told else usual_drafting(self.model)
        return dataclasses.replace(
            parse_speculative_config(usual | self.speculative_config),
            model=self.draft_model,
            num_speculative_tokens=max(1, self.num_speculative_tokens),
            draft_tensor_parallel_size=self.draft_tensor_parallel_size,
        )

    @property
    def is_drafter_named(self) -> bool:
        """Whether somebody says who drafts, or how."""
        return bool(self.draft_model) or "method" in self.speculative_config

    @property
    def draft_path(self) -> str | None:
        """Where the draft model or head is; None: the method needs none, or there is none."""
        if self.draft_model is not None:
            return path_of(self.draft_model)
        if self.speculative.models:
            return self.speculative.models[0]
        shipped = drafter_paths(self.model)
        found = (shipped.get(method) for method in self.speculative.all_methods)
        return next((str(path) for path in found if path is not None), None)

    @property
    def has_drafters(self) -> bool:
        """Whether there is a pool of drafters."""
        return self.drafter_spec is not None and self.speculative.location is Location.POOL

    @property
    def model_name(self) -> str:
        if self.served_model_name is not None:
            return self.served_model_name
        return "outrider-embedded" if is_embedded(self.model) else str(self.model)

    @property
    def router_policy(self) -> RouterPolicy:
        return RouterPolicy(
            mode=PolicyMode(self.speculation),
            max_draft_length=max(config.num_speculative_tokens for config in (self, *self.pools.values())),
            draft_length_by_batch_size=self.draft_length_by_batch_size,
        )

    @property
    def gpus_per_rank(self) -> float:
        """Return the share of a GPU that each rank reserves; whether this machine has one counts for `auto` alone."""
        has_gpus = self.settled().device == "cuda"
        return self.gpu_share if has_gpus else 0.0

    def settled(self) -> Self:
        """Return the configuration with an automatic `device` decided here, for replicas on other nodes to agree on."""
        if self.device != "auto":
            return self
        import torch  # seconds, and whoever has been told the device needs none

        return dataclasses.replace(self, device="cuda" if torch.cuda.is_available() else "cpu")

    @property
    def num_ranks(self) -> int:
        """Return the ranks of all pools at their largest."""
        verifier_ranks = self.verifier_range.most * self.tensor_parallel_size
        return verifier_ranks + sum(
            pool.drafter_range.most * pool.draft_tensor_parallel_size for pool in self.pools.values()
        )

    @property
    def num_shells(self) -> int:
        """Return the replicas of all pools at their largest, ranks not counted."""
        num_drafters = sum(pool.drafter_range.most for pool in self.pools.values())
        return self.verifier_range.most + num_drafters + self.gateway_range.most

    @property
    def verifier_spec(self) -> VerifierSpec:
        model = self._model(self.target_path, self.tensor_parallel_size)
        specs = self.drafter_specs
        if specs:
            model = dataclasses.replace(
                model,
                state_taps=common_state_taps(specs),
                state_dtype=self.speculative.state_dtype,
                num_scratch_blocks=max(num_scratch_blocks(spec, self.block_size, self.max_num_seqs) for spec in specs),
            )
        return VerifierSpec(
            model=model,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            enable_prefix_caching=self.enable_prefix_caching,
            async_scheduling=self.async_scheduling,
            sampling_seed=self.seed,
            check_integrity=self.check_integrity,
            max_tree_nodes=max([self.speculative.num_tree_nodes, *(spec.speculative.num_tree_nodes for spec in specs)]),
        )

    @property
    def verifier_main(self) -> VerifierSpec | ColocatedSpec | VllmSpec:
        """What each rank of a verifier runs: with the drafter beside it where it belongs there."""
        if self.engine == VLLM:
            return vllm_spec(self)
        drafter = self.drafter_spec
        if drafter is None or self.has_drafters:
            return self.verifier_spec
        return ColocatedSpec(verifier=self.verifier_spec, drafter=drafter)

    @property
    def drafting(self) -> str:
        """Return who drafts, in words: "eagle3 by 1 drafter", "suffix in the verifier", "nobody"."""
        parts = []
        for pool in self.pools.values():
            drafters = "1 drafter" if str(pool.num_drafters) == "1" else f"{pool.num_drafters} drafters"
            parts.append(f"{pool.speculative.method.value} by {drafters}")
        if self.drafter_spec is not None and not self.has_drafters:
            parts.append(f"{self.speculative.method.value} in the verifier")
        return " and ".join(parts) or "nobody"

    @property
    def drafter_specs(self) -> list[DrafterSpec]:
        """What drafts in all pools and in the verifiers; one may be named twice."""
        found = (config.drafter_spec for config in (self, *self.pools.values()))
        return [spec for spec in found if spec is not None]

    @property
    def drafter_spec(self) -> DrafterSpec | None:
        """What drafts, in a pool or in the verifier; None: nothing does."""
        speculative, path = self.speculative, self.draft_path
        is_in_pool = speculative.location is Location.POOL
        is_wanted = self.drafter_range.most > 0 or (self.is_drafter_named and not is_in_pool)
        if self.num_speculative_tokens == 0 or not is_wanted or (self.engine == VLLM and not is_in_pool):
            return None
        if speculative.needs_checkpoint and path is None:
            if "method" in self.speculative_config:
                raise ValueError(f"speculative_config: model: {speculative.method} needs a checkpoint")
            return None
        return DrafterSpec(
            model=None if path is None else self._model(path, self.draft_tensor_parallel_size),
            target=self._model(self.target_path, 1),
            speculative=speculative,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_sessions=(self.verifier_range.most if is_in_pool else 1) * self.max_num_seqs,
            sampling_seed=self.seed,
            check_integrity=self.check_integrity,
        )

    def _model(self, path: str, tensor_parallel_size: int) -> ModelConfig:
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


def _parsed(name: str, value: Any, kind: Any) -> Any:
    """Return a value as its field's type, also from the text that `serve run module:build_app key=value` passes."""
    is_json = isinstance(value, str) and (get_origin(kind) is dict or kind in _JSON_KINDS)
    return typed_value(name, value, kind, is_json=is_json)
