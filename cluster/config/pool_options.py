"""Who drafts: the options that describe drafters, and the list of pools that they compose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from outrider.cluster.common.options import Json, Options, Positive, option
from outrider.cluster.config.known_models import drafter_paths, path_of, usual_drafting
from outrider.cluster.config.learner_options import LearnerOptions, read_learner
from outrider.cluster.config.speculative_options import TABLE_KEY, parse_speculative_config
from outrider.cluster.scaling.autoscaling import FIRST_POOL, ReplicaRange
from outrider.drafter_service.service.speculative_config import (
    MAX_DRAFT_LENGTH,
    Location,
    SpeculativeConfig,
    learning_refusal,
)


def _range_of(value: Any) -> ReplicaRange:
    return value if isinstance(value, ReplicaRange) else ReplicaRange.parse(value)


Replicas = Annotated[ReplicaRange, BeforeValidator(_range_of)]  # a number, or "min:max" for Serve to choose by load
ONE_REPLICA = ReplicaRange(1, 1)
Resources = Annotated[dict[str, float], Json]
Labels = Annotated[dict[str, str], Json]

# keys of a further pool beside those of `SpeculativeConfig`, and those that only the whole service has
_POOL_KEYS = frozenset({"num_drafters", "drafter_resources", "drafter_labels", "learner"})
_SHARED_KEYS = frozenset({"rejection_sample_method", "state_dtype", "tensor_transport"})


class DraftingOptions(Options):
    """The options that describe drafters: the first pool under names of their own, further ones as objects."""

    draft_model: str | None = option(
        None, "Folder or hub id of the draft model or head. Default: the one that is shipped for smollm2 or embedded."
    )
    draft_tensor_parallel_size: Positive = option(1, "Ranks per drafter.")
    num_drafters: Replicas = option(ONE_REPLICA, "Replicas of the draft model; min:max: scaled by load.")
    drafter_resources: Resources = option({}, "Custom Ray resources of each drafter.")
    drafter_labels: Labels = option({}, "Ray label selector of drafters' nodes.")
    num_speculative_tokens: Annotated[int, Field(ge=0, le=MAX_DRAFT_LENGTH)] = option(
        4, "Longest draft; 0: never speculate."
    )
    learner: Annotated[dict[str, Any] | None, Json] = option(
        None,
        "Drafters learn while they serve: {} with all defaults, else as docs/learning.md says. Default: they do not.",
    )
    # these two are objects, which the command line reads by itself
    speculative_config: Annotated[dict[str, Any], Json] = Field({})  # further keys of `SpeculativeConfig`
    drafter_pools: Annotated[tuple[dict[str, Any], ...], Json] = ()


class PoolOptions(Options):
    """A drafter: in a pool of its own or, by its `location`, in every verifier."""

    name: str
    is_named: bool = True  # an operator says who drafts, or how; otherwise it is what is usual for the target
    num_drafters: Replicas = ONE_REPLICA
    drafter_resources: Resources = Field({})
    drafter_labels: Labels = Field({})
    learner: Annotated[LearnerOptions | None, BeforeValidator(read_learner)] = None  # None: they stay as they are
    speculative: SpeculativeConfig

    @property
    def is_in_pool(self) -> bool:
        return self.speculative.location is Location.POOL

    @property
    def drafts(self) -> bool:
        """Whether there is such a drafter; `num_drafters` 0 also keeps the target's usual one out of the verifiers."""
        is_wanted = self.num_drafters.most > 0 or (self.is_named and not self.is_in_pool)
        return is_wanted and self.speculative.num_speculative_tokens > 0

    @property
    def words(self) -> str:
        """Who drafts: "eagle3 by 2 drafters", "suffix in the verifier"."""
        method, count = self.speculative.method.value, str(self.num_drafters)
        if not self.is_in_pool:
            return f"{method} in the verifier"
        return f"{method} by {count} drafter{'' if count == '1' else 's'}"

    @property
    def num_ranks(self) -> int:
        """The ranks of all its replicas, at most."""
        return self.num_drafters.most * self.speculative.draft_tensor_parallel_size


def checkpoint_of(speculative: SpeculativeConfig, model: str | None) -> str | None:
    """Return where the draft model or head for a target is; None: the method needs none, or there is none."""
    if speculative.model is not None:
        return path_of(speculative.model)
    if speculative.models:
        return speculative.models[0]
    shipped = drafter_paths(model)
    found = (shipped.get(method) for method in speculative.all_methods)
    return next((str(path) for path in found if path is not None), None)


def compose_pools(drafting: DraftingOptions, model: str | None) -> tuple[PoolOptions, ...]:
    """Return all drafters for a target; of the first there may be none. Raises `ValueError` naming the option."""
    given = drafting.speculative_config
    is_named = bool(drafting.draft_model) or "method" in given
    is_told = is_named or (drafting.drafter_pools and not drafter_paths(model))
    placed = {"drafter_resources": drafting.drafter_resources, "drafter_labels": drafting.drafter_labels}
    shared = {"num_speculative_tokens": drafting.num_speculative_tokens, **placed}
    own = {"model": drafting.draft_model, "draft_tensor_parallel_size": drafting.draft_tensor_parallel_size}
    first = {**({} if is_told else usual_drafting(model)), **given, **shared, **own}
    only_first = {"num_drafters": drafting.num_drafters, "learner": drafting.learner}
    pools = {FIRST_POOL: _pool(FIRST_POOL, {**first, **only_first}, model, is_named=is_named)}
    shared |= {key: given[key] for key in _SHARED_KEYS & given.keys()}
    for values in drafting.drafter_pools:
        pool = _further_pool(values, shared, model)
        if pool.name in pools:
            raise ValueError(f"drafter_pools: {pool.name}: there are two of that name")
        pools[pool.name] = pool
    return tuple(pools.values())


def _further_pool(values: Mapping[str, Any], shared: Mapping[str, Any], model: str | None) -> PoolOptions:
    """Read a pool: an object with a `name`, keys of `SpeculativeConfig`, and `_POOL_KEYS`; `shared` holds for all."""
    name = values.get("name")
    if not isinstance(name, str) or not name.isidentifier() or name == FIRST_POOL:
        raise ValueError(f"drafter_pools: name must be a word other than {FIRST_POOL!r}, not {name!r}")
    try:
        if taken := (_SHARED_KEYS | {TABLE_KEY}) & values.keys():
            raise ValueError(f"{min(taken)!r} is of the whole service")
        rest = {key: value for key, value in values.items() if key != "name"}
        pool = _pool(name, {**shared, **rest}, model)
        if not pool.is_in_pool:
            raise ValueError("location: a drafter in the verifier is no pool")
        if not pool.drafts:
            raise ValueError("it would have no drafter: model, num_drafters or num_speculative_tokens")
    except ValueError as error:
        raise ValueError(f"drafter_pools: {name}: {error}") from error
    return pool


def _pool(name: str, values: Mapping[str, Any], model: str | None, *, is_named: bool = True) -> PoolOptions:
    """Build a pool from its keys. One that lacks its checkpoint has no drafters; if it has a method, it is refused."""
    own = {key: values[key] for key in _POOL_KEYS & values.keys()}
    speculative = parse_speculative_config({key: value for key, value in values.items() if key not in own})
    pool = PoolOptions(name=name, is_named=is_named, speculative=speculative, **own)
    if pool.drafts and speculative.needs_checkpoint and checkpoint_of(speculative, model) is None:
        pool = _without_checkpoint(pool, values)
    if pool.learner is not None:
        _require_learning(pool)
    return pool


def _without_checkpoint(pool: PoolOptions, values: Mapping[str, Any]) -> PoolOptions:
    if "method" in values:
        raise ValueError(f"speculative_config: model: {pool.speculative.method} needs a checkpoint")
    return pool.model_copy(update={"num_drafters": ReplicaRange(0, 0)})


def _require_learning(pool: PoolOptions) -> None:
    """Raise `ValueError` unless the pool's drafters can learn."""
    refusal = learning_refusal(pool.speculative) or (None if pool.drafts else "there is no drafter to learn")
    if refusal is not None:
        raise ValueError(f"learner: {refusal}")
