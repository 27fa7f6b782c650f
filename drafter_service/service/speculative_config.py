"""The keys of `--speculative-config`: vLLM's, and our own."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BeforeValidator, ConfigDict, Field

from outrider.drafter_service.service.methods import METHOD_ALIASES, METHODS, DraftMethod, Kind, Method, MethodKeys
from outrider.verifier_service.messages.lossy import acceptance_rule
from outrider.verifier_service.messages.request import AcceptanceRule
from outrider.verifier_service.messages.tensor_route import Transport
from outrider.verifier_service.model.config import Dtype

MAX_DRAFT_LENGTH = 64
MAX_TREE_NODES = 256
MAX_AHEAD_BRANCHES = 64


class Location(enum.StrEnum):
    """Where a drafter runs."""

    POOL = "pool"  # in replicas of its own
    VERIFIER = "verifier"  # in every verifier's engine process


def _named_method(value: Any) -> Any:
    return METHOD_ALIASES.get(value, value) if isinstance(value, str) else value


def _named_rule(value: Any) -> Any:
    return acceptance_rule(value) if isinstance(value, str) else value


def _object_text(value: Any) -> str:
    """Return a plug-in's options as text, the same for equal ones."""
    if value == "":
        return ""
    given = json.loads(value) if isinstance(value, str) else value
    if not isinstance(given, Mapping):
        raise ValueError("must be an object of the plug-in's own options")
    try:
        return json.dumps(dict(given), sort_keys=True, allow_nan=False)
    except TypeError as error:
        raise ValueError(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class DraftKeys:
    """The keys that hold for every method."""

    method: Annotated[Method, BeforeValidator(_named_method)] = Method.DRAFT_MODEL
    model: str | None = None  # the draft model's or head's checkpoint; several, by draft position: `models`
    models: tuple[str, ...] = ()  # parameter sets by draft position (PRISM); the last one serves the rest
    num_speculative_tokens: Annotated[int, Field(ge=0, le=MAX_DRAFT_LENGTH)] = 4  # the longest draft; 0: no drafts
    location: Location = Location.POOL
    num_tree_nodes: Annotated[int, Field(ge=0, le=MAX_TREE_NODES)] = 0  # draft trees of so many tokens; 0: chains
    # of unseeded sampling: drawn, without replacement, or the likeliest
    tree_method: Literal["sampled", "top_k"] = "sampled"
    # greedy: every draft the drafter's likeliest, as a point mass
    draft_sample_method: Literal["probabilistic", "greedy"] = "probabilistic"
    rejection_sample_method: Annotated[AcceptanceRule, BeforeValidator(_named_rule)] = AcceptanceRule.STANDARD
    draft_tensor_parallel_size: Annotated[int, Field(ge=1)] = 1


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", hide_input_in_errors=True))
class SpeculativeConfig(MethodKeys, DraftKeys):
    """One drafter's kind and shape. Raises pydantic's `ValidationError`, a `ValueError`, naming the field."""

    state_dtype: Dtype = "auto"  # of hidden states that are sent to drafters; auto: the target's own
    tensor_transport: Transport = "auto"  # of hidden states and KV, beside links; grpc: within them
    # outcomes of a verification that a pool's draft model or EAGLE head drafts for while it runs; 0: none
    # None: as many as usual, which for a head is none
    ahead_branches: Annotated[int | None, Field(ge=0, le=MAX_AHEAD_BRANCHES)] = None
    methods: tuple[Annotated[Method, BeforeValidator(_named_method)], ...] = ()  # of a hybrid, the most promising first
    plugin: str = ""  # the entry point's name
    # the plug-in's own options: a JSON object as text, which can be hashed; "": none
    plugin_config: Annotated[str, BeforeValidator(_object_text)] = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (refusal := next(self._refusals(), None)) is not None:
            raise ValueError(refusal)

    def _refusals(self) -> Iterator[str]:
        """Yield why the combination is impossible."""
        parts = {name: METHODS[name] for name in self.all_methods}
        for name, part in parts.items():
            if part.kind is Kind.TARGET and self.location is Location.POOL:
                yield f"location: {name} reads the target's own KV, so it runs in the verifier alone"
        if self.methods and self.record.kind is not Kind.HYBRID:
            yield "methods belong to the method hybrid"
        if self.record.kind is Kind.HYBRID and (len(parts) < 2 or self.method in parts):
            yield "methods must name two or more drafters other than hybrid"
        with_checkpoint = [name for name in self.methods if METHODS[name].needs_checkpoint]
        if len(with_checkpoint) > 1:
            yield f"methods: {with_checkpoint[0]} and {with_checkpoint[1]} need a checkpoint each"
        if sum(METHODS[name].kind is Kind.HEAD for name in self.methods) > 1:
            yield "methods: at most one of a hybrid's drafters may read hidden states"
        yield from (text for name in METHODS if name in parts and (text := parts[name].refusal(self)) is not None)
        if not self.has(Kind.PLUGIN) and (self.plugin or self.plugin_config):
            yield f"{'plugin' if self.plugin else 'plugin_config'}: no method here is a plug-in"
        yield from self._refused_shapes()

    def _refused_shapes(self) -> Iterator[str]:
        if self.models and not self.record.has_sets:
            yield "models: parameter sets by position are for eagle and eagle3"
        if self.models and self.num_tree_nodes:
            yield "num_tree_nodes: parameter sets by position draft a chain"
        if self.vocabulary != "same" and self.method is not Method.DRAFT_MODEL:
            yield "vocabulary: only a draft model may have another tokenizer"
        if self.vocabulary == "text" and self.num_tree_nodes:
            yield "num_tree_nodes: a draft that goes by way of text is a chain"
        if self.rejection_sample_method is AcceptanceRule.BLOCK and self.num_tree_nodes:
            yield "rejection_sample_method: block verification is for chains"
        if self.ahead_branches and not self.can_run_ahead:
            yield "ahead_branches: only draft models of the target's vocabulary and EAGLE heads in a pool"
        if self.draft_tensor_parallel_size > 1 and any(part.kind is not Kind.MODEL for part in self.parts):
            yield f"draft_tensor_parallel_size: {self.method} runs on one rank"
        if self.draft_tensor_parallel_size > 1 and self.location is Location.VERIFIER:
            yield "draft_tensor_parallel_size: a drafter in the verifier runs on one rank"

    @property
    def record(self) -> DraftMethod:
        return METHODS[self.method]

    @property
    def all_methods(self) -> tuple[Method, ...]:
        return self.methods or (self.method,)

    @property
    def parts(self) -> list[DraftMethod]:
        """The records of `all_methods`."""
        return [METHODS[name] for name in self.all_methods]

    def has(self, kind: Kind) -> bool:
        """Whether any of `all_methods` is of a kind."""
        return any(part.kind is kind for part in self.parts)

    @property
    def looks_up_only(self) -> bool:
        """Whether drafts take next to nothing."""
        return all(part.kind is Kind.LOOKUP for part in self.parts)

    @property
    def can_run_ahead(self) -> bool:
        """Whether the drafter has spare time, and can draft for several outcomes."""
        is_able = self.record.ahead_branches is not None and self.vocabulary == "same"
        return is_able and self.location is Location.POOL

    @property
    def num_ahead_branches(self) -> int:
        """The number of outcomes of a verification to draft for in spare time."""
        usual = (self.record.ahead_branches or 0) if self.can_run_ahead else 0
        return usual if self.ahead_branches is None else self.ahead_branches

    @property
    def needs_checkpoint(self) -> bool:
        """Whether a draft model or head must be given."""
        return any(part.needs_checkpoint for part in self.parts)

    @property
    def weighted_methods(self) -> tuple[Method, ...]:
        """The methods with weights of their own."""
        return tuple(name for name in self.all_methods if METHODS[name].has_weights)

    @property
    def update_refusal(self) -> str | None:
        """Why this drafter takes no new weights; None: it does."""
        own = self.weighted_methods
        if len(own) > 1:
            return f"{own[0]} and {own[1]} both have weights, which one folder cannot give"
        if own:
            return "models: parameter sets by position stay as they were loaded" if self.models else None
        first = next((name for name in self.all_methods if METHODS[name].kind is Kind.TARGET), self.all_methods[0])
        match METHODS[first].kind:
            case Kind.TARGET:
                return f"{first} runs the target's own layers: it follows the target by itself"
            case Kind.PLUGIN:
                return f"the plug-in {self.plugin!r} has its own ways to take weights"
        return f"{first} has no weights: it looks tokens up"


def learning_refusal(config: SpeculativeConfig) -> str | None:
    """Return why a drafter cannot learn while it serves; None: it can. One that looks tokens up remembers texts."""
    if config.location is not Location.POOL:
        return f"{config.method} runs in the verifier: only a pool has a learner"
    if config.vocabulary != "same":
        return f"vocabulary: a draft model of another vocabulary ({config.vocabulary}) does not learn from token ids"
    own = config.weighted_methods
    if not own and config.has(Kind.LOOKUP):
        return None
    if config.update_refusal is not None:
        return config.update_refusal
    return None if METHODS[own[0]].learns else f"{own[0]} is not trained on what was served"
