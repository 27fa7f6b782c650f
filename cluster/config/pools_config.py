"""Drafters for verifiers, ours or those of another engine: what a service and a pool alone have in common.

Options have flat names, the same on the command line, in YAML and in a Serve application. Here they are composed: each
part takes its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import model_validator
from pydantic.fields import FieldInfo

from outrider.cluster.common.hints import did_you_mean
from outrider.cluster.common.options import Json, Options, Port, Positive, Seconds, option
from outrider.cluster.common.security import LinkTls, TlsConfig
from outrider.cluster.config.model_options import ModelOptions
from outrider.cluster.config.placement import LEARNER_CPUS, PoolPlacement
from outrider.cluster.config.pool_options import (
    ONE_REPLICA,
    DraftingOptions,
    PoolOptions,
    Replicas,
    checkpoint_of,
    compose_pools,
)
from outrider.cluster.config.speculative_options import split_options
from outrider.cluster.router.fleet import BatchSizeTable, PolicyMode, RouterPolicy, check_table
from outrider.drafter_service.learning.learner_spec import LearnerSpec
from outrider.drafter_service.service.drafter_spec import DrafterSpec
from outrider.drafter_service.service.speculative_config import SpeculativeConfig
from outrider.verifier_service.links.control_rules import ControlRules
from outrider.verifier_service.messages.tensor_route import GLOO, NCCL, offered_transports


class LinkOptions(LinkTls):
    """The links between our own services."""

    internal_host: str = option("127.0.0.1", "Where replicas listen for each other; auto: each node's own address.")


class PoolsConfig(Options):
    """Pools of drafters for one target, their router, and the ports that others reach them by.

    Built from flat options. Raises `ValueError` naming the option, with the closest match for an unknown one.
    """

    model: ModelOptions
    drafting: DraftingOptions
    drafters: tuple[PoolOptions, ...]  # composed of `drafting`: those in pools, and one that may be in the verifiers
    links: LinkOptions
    num_verifiers: Replicas = option(ONE_REPLICA, "Replicas of the target model; min:max: scaled by load.")
    max_num_seqs: Positive = option(256, "Most requests in one step.")
    max_num_batched_tokens: Positive = option(2048, "Most tokens in one step.")
    seed: int | None = option(None, "Seed of unseeded requests' sampling. Default: from the system.")
    speculation: Literal["auto", "always", "off"] = option(
        "auto", "Who decides: load and prices (auto), or a pin: off, or always --num-speculative-tokens."
    )
    draft_length_by_batch_size: Annotated[BatchSizeTable, Json] = option(
        (),
        "Pin draft lengths by running requests, as vLLM's num_speculative_tokens_per_batch_size: "
        "[[first, last, length], ...].",
    )
    weights_root: str | None = option(
        None, "Folder below which new weights must lie, of a trainer or published by hand. Default: any folder."
    )
    host: str = option("127.0.0.1", "Where both ports listen; 0.0.0.0 or ::, for IPv6 as well: on all addresses.")
    port: Port = option(8000, "HTTP port.")
    grpc_port: Port = option(50051)
    engine_timeout_s: Seconds = option(10.0, "Seconds of silence after which an engine is given up.")
    drain_timeout_s: Seconds = option(30.0, "How long a replica that shall stop waits for its streams.")
    log_format: Literal["text", "json"] = option("text", "Of every replica.")
    check_integrity: bool = False  # engines check their books after every step: for tests

    def __init__(self, **options: Any) -> None:
        known = self.option_fields()
        for name in options:
            if name not in known:
                raise ValueError(f"unknown option {name!r}{did_you_mean(name, known)}")
        flat = _split_speculative(options)
        own = {name: flat[name] for name in type(self).model_fields.keys() & flat.keys() - self._parts().keys()}
        parts: dict[str, Any] = {
            name: part(**{option: flat[option] for option in part.model_fields.keys() & flat.keys()})
            for name, part in self._parts().items()
        }
        drafters = compose_pools(parts["drafting"], parts["model"].model)
        super().__init__(**own, **parts, drafters=drafters)

    @classmethod
    def _parts(cls) -> dict[str, type[Options]]:
        kinds = {name: field.annotation for name, field in cls.model_fields.items()}
        return {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Options)}

    @classmethod
    def option_fields(cls) -> dict[str, FieldInfo]:
        """Return all options under their flat names."""
        parts = cls._parts()
        own = {name: field for name, field in cls.model_fields.items() if name not in {*parts, "drafters"}}
        return own | {name: field for part in parts.values() for name, field in part.model_fields.items()}

    def with_options(self, **changes: Any) -> Self:
        """Return the configuration with some options changed, under their flat names."""
        known, parts = self.option_fields(), (getattr(self, name) for name in self._parts())
        # the option `model` comes after the part of that name
        flat = {name: value for options in (self, *parts) for name, value in options if name in known}
        return type(self)(**flat | changes)

    @property
    def public_host(self) -> str:
        """The host of public ports, as in URLs: an IPv6 address stands in brackets."""
        return f"[{self.host}]" if ":" in self.host else self.host

    def address(self, port: int) -> str:
        """Return where a public port listens."""
        return f"{self.public_host}:{port}"

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.num_verifiers.fewest < 1:
            raise ValueError("num_verifiers must be at least 1")
        if self.port == self.grpc_port:
            raise ValueError("grpc_port must be another one than port")
        check_table(self.draft_length_by_batch_size)
        if any(length > self.max_draft_length for _, _, length in self.draft_length_by_batch_size):
            raise ValueError("draft_length_by_batch_size must have draft lengths of at most num_speculative_tokens")
        transport = self.speculative.tensor_transport
        if transport == NCCL and self.model.device == "cpu":
            raise ValueError("speculative_config: tensor_transport: nccl needs the device cuda")
        if self.links.tls is not None and transport in (GLOO, NCCL):
            raise ValueError(
                f"speculative_config: tensor_transport: {transport} is not encrypted, "
                "the links between services are: use grpc"
            )
        folders = [self.learner_folder(pool) for pool in self.learning.values()]
        if len(set(folders)) < len(folders):
            raise ValueError("learner: folder: two pools cannot share one")
        return self

    @property
    def tls(self) -> TlsConfig | None:
        """TLS of the HTTP port."""
        return None

    @property
    def listens_itself(self) -> bool:
        """Whether HTTP comes to our own servers, with no proxy of Ray Serve's between."""
        return False

    @property
    def serves_trainers(self) -> bool:
        """Whether weights change at the call of a trainer."""
        return False

    @property
    def control_rules(self) -> ControlRules:
        """Which orders replicas take over their links."""
        return ControlRules(is_open=self.serves_trainers, weights_root=self.weights_root)

    @property
    def speculative(self) -> SpeculativeConfig:
        """How the first drafter drafts; its acceptance rule and its ways for states hold for all."""
        return self.drafters[0].speculative

    @property
    def active(self) -> list[PoolOptions]:
        """The drafters that there are."""
        return [pool for pool in self.drafters if pool.drafts and pool.is_in_pool]

    @property
    def pools(self) -> dict[str, PoolOptions]:
        """The drafters in pools, by their pools' names."""
        return {pool.name: pool for pool in self.active if pool.is_in_pool}

    @property
    def learning(self) -> dict[str, PoolOptions]:
        """The pools that have a learner."""
        return {name: pool for name, pool in self.pools.items() if pool.learner is not None}

    @property
    def drafter_specs(self) -> list[DrafterSpec]:
        """What every drafter's ranks are told."""
        return [self.drafter_spec_of(pool) for pool in self.active]

    def drafter_spec_of(self, pool: PoolOptions) -> DrafterSpec:
        """Return what the replicas of a pool are told."""
        path = checkpoint_of(pool.speculative, self.model.model)
        ranks = pool.speculative.draft_tensor_parallel_size
        return DrafterSpec(
            model=None if path is None else self.model.checkpoint(path, ranks),
            target=self.model.checkpoint(self.model.target_path, 1),
            speculative=pool.speculative,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_sessions=(self.most_verifiers if pool.is_in_pool else 1) * self.max_num_seqs,
            sampling_seed=self.seed,
            check_integrity=self.check_integrity,
            takes_orders=self.serves_trainers or pool.learner is not None,
            learns=pool.learner is not None,
            learn_num_top=0 if pool.learner is None else pool.learner.num_top,
        )

    def learner_folder(self, pool: PoolOptions) -> str:
        """Return where a pool's learner keeps its versions."""
        assert pool.learner is not None
        return pool.learner.folder_for(self.model.name, pool.name)

    def learner_spec_of(self, pool: PoolOptions) -> LearnerSpec:
        """Return what a pool's learner is told."""
        learner = pool.learner
        assert learner is not None
        return LearnerSpec(
            drafter=self.drafter_spec_of(pool),
            pool=pool.name,
            folder=self.learner_folder(pool),
            export_root=learner.export_root_for(self.learner_folder(pool)),
            weights_root=self.weights_root,
            settings=learner.settings,
            max_bytes=learner.max_bytes,
            device=learner.device,
            num_threads=learner.num_threads,
            seed=self.seed or 0,
        )

    @property
    def most_verifiers(self) -> int:
        """The verifiers at their largest number."""
        return self.num_verifiers.most

    @property
    def who_drafts(self) -> str:
        """In words: "eagle3 by 1 drafter", "suffix in the verifier", "nobody"."""
        return (
            " and ".join(pool.words for pool in sorted(self.active, key=lambda pool: not pool.is_in_pool)) or "nobody"
        )

    @property
    def max_draft_length(self) -> int:
        """The longest draft of any drafter."""
        return max(pool.speculative.num_speculative_tokens for pool in self.drafters)

    @property
    def router_policy(self) -> RouterPolicy:
        return RouterPolicy(
            mode=PolicyMode(self.speculation),
            max_draft_length=self.max_draft_length,
            draft_length_by_batch_size=self.draft_length_by_batch_size,
        )

    @property
    def tensor_transports(self) -> tuple[str, ...]:
        """The channels that both ends of a link offer for hidden states, and takers of KV."""
        return offered_transports(self.speculative.tensor_transport, is_encrypted=self.links.tls is not None)

    def drafter_placement(self, pool: PoolOptions) -> PoolPlacement:
        return PoolPlacement(
            num_ranks=pool.speculative.draft_tensor_parallel_size,
            gpus_per_rank=self.model.gpus_per_rank,
            resources=pool.drafter_resources,
            labels=pool.drafter_labels,
        )

    def learner_placement(self, pool: PoolOptions) -> PoolPlacement:
        """Return what a learner asks for; it stands where the pool's drafters may, which read its folder."""
        assert pool.learner is not None
        return PoolPlacement(
            num_ranks=1,
            gpus_per_rank=pool.learner.num_gpus,
            cpus_per_rank=LEARNER_CPUS,
            labels=pool.drafter_labels,
        )

    @property
    def num_ranks(self) -> int:
        """The ranks of all pools at their largest."""
        return sum(pool.num_ranks for pool in self.pools.values())

    @property
    def num_shells(self) -> int:
        """The replicas of all pools at their largest, and their learners, without ranks."""
        return sum(pool.num_drafters.most for pool in self.pools.values()) + len(self.learning)


def _split_speculative(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return flat options, those within `speculative_config` in their own places; an option of its own wins."""
    given = DraftingOptions(**{name: options[name] for name in options.keys() & {"speculative_config"}})
    split, rest = split_options(given.speculative_config)
    return {**split, **options, "speculative_config": rest}
