"""The keys of `--speculative-config`: vLLM's, and our own."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from outrider.verifier_service.messages.draft import require
from outrider.verifier_service.messages.lossy import acceptance_rule
from outrider.verifier_service.messages.request import AcceptanceRule
from outrider.verifier_service.messages.tensor_route import Transport
from outrider.verifier_service.model.config import Dtype

MAX_DRAFT_LENGTH = 64
MAX_TREE_NODES = 256
MAX_AHEAD_BRANCHES = 64
USUAL_AHEAD_BRANCHES = 8


class Method(enum.StrEnum):
    """The drafting methods."""

    DRAFT_MODEL = "draft_model"
    NGRAM = "ngram"
    SUFFIX = "suffix"
    LOOKAHEAD = "lookahead"
    EARLY_EXIT = "early_exit"
    SPARSE = "sparse"
    TIDAR = "tidar"
    MEDUSA = "medusa"
    MLP_SPECULATOR = "mlp_speculator"
    EAGLE = "eagle"
    EAGLE3 = "eagle3"
    MTP = "mtp"
    PARALLEL_DRAFT = "parallel_draft"
    DFLASH = "dflash"
    HYBRID = "hybrid"
    PLUGIN = "plugin"  # a drafter of another package: `plugins`


class Location(enum.StrEnum):
    """Where a drafter runs."""

    POOL = "pool"  # in replicas of its own
    VERIFIER = "verifier"  # in every verifier's engine process


# other names of methods, which vLLM and papers use
METHOD_ALIASES = {"mtp_eagle": Method.MTP, "pard": Method.PARALLEL_DRAFT, "draft": Method.DRAFT_MODEL}
# they are models of their own
WHOLE_MODELS = (Method.DRAFT_MODEL, Method.PARALLEL_DRAFT)
# they read the target's KV, and so must run in the verifier
TARGET_DERIVED = (Method.EARLY_EXIT, Method.SPARSE, Method.TIDAR)
# they read tokens only: no checkpoint, nothing to load
MODEL_FREE = (Method.NGRAM, Method.SUFFIX, Method.LOOKAHEAD)
# heads that continue from their own states
EAGLE_LIKE = (Method.EAGLE, Method.EAGLE3, Method.MTP)
# they can be trained on what was served
LEARNING = (Method.DRAFT_MODEL, Method.MEDUSA, Method.MLP_SPECULATOR, Method.EAGLE, Method.EAGLE3)
# they read the target's hidden states
STATE_READING = (Method.MEDUSA, Method.MLP_SPECULATOR, *EAGLE_LIKE, Method.DFLASH)


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


@dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid", hide_input_in_errors=True))
class SpeculativeConfig:
    """One drafter's kind and shape. Raises pydantic's `ValidationError`, a `ValueError`, naming the field."""

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
    prompt_lookup_min: Annotated[int, Field(ge=1)] = 2
    prompt_lookup_max: int = 5
    suffix_decoding_max_tree_depth: Annotated[int, Field(ge=2)] = 24
    suffix_decoding_max_cached_requests: Annotated[int, Field(ge=0)] = 10_000
    suffix_decoding_max_spec_factor: Annotated[float, Field(gt=0)] = 4.0
    suffix_decoding_min_token_prob: Annotated[float, Field(ge=0, le=1)] = 0.1
    suffix_decoding_max_versions: Annotated[int, Field(ge=1)] = 4  # of the weights, whose rollouts are drafted from
    lookahead_window: Annotated[int, Field(ge=1)] = 5
    lookahead_ngram_size: Annotated[int, Field(ge=2)] = 4
    exit_layer: Annotated[int | None, Field(ge=1)] = None  # early exit after so many layers; None: a third of them
    sparse_num_blocks: Annotated[int, Field(ge=2)] = 8  # KV blocks that sparse self-speculation attends to
    # blocks of masks in a step of tidar, for the likeliest outcomes of its verification; 0: for every one
    tidar_num_blocks: Annotated[int, Field(ge=0)] = 0
    mask_token_id: Annotated[int | None, Field(ge=0)] = None  # of tidar; None: the target's config names it
    # as the target's; another, by way of text; another, where both agree
    vocabulary: Literal["same", "text", "intersect"] = "same"
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
        highest = self.prompt_lookup_max
        require(self.prompt_lookup_min <= highest, "prompt_lookup_min", "at least 1 and at most prompt_lookup_max")
        self._check_combination()

    def _check_combination(self) -> None:
        """Raise `ValueError` for an impossible combination; the text says why."""
        for method in self.all_methods:
            if method in TARGET_DERIVED and self.location is Location.POOL:
                raise ValueError(f"location: {method} reads the target's own KV, so it runs in the verifier alone")
        if self.methods and self.method is not Method.HYBRID:
            raise ValueError("methods belong to the method hybrid")
        if self.method is Method.HYBRID and (len(set(self.methods)) < 2 or Method.HYBRID in self.methods):
            raise ValueError("methods must name two or more drafters other than hybrid")
        with_checkpoint = [method for method in self.methods if _needs_checkpoint(method)]
        if len(with_checkpoint) > 1:
            raise ValueError(f"methods: {with_checkpoint[0]} and {with_checkpoint[1]} need a checkpoint each")
        if sum(method in STATE_READING for method in self.methods) > 1:
            raise ValueError("methods: at most one of a hybrid's drafters may read hidden states")
        if Method.TIDAR in self.methods:
            raise ValueError("methods: tidar drafts in every step of the target, so that it stands alone")
        if self.method is Method.TIDAR and self.num_tree_nodes:
            raise ValueError("num_tree_nodes: tidar has masks for every outcome of a chain, not of a tree")
        self._check_plugin()
        if self.models and self.method not in (Method.EAGLE, Method.EAGLE3):
            raise ValueError("models: parameter sets by position are for eagle and eagle3")
        if self.models and self.num_tree_nodes:
            raise ValueError("num_tree_nodes: parameter sets by position draft a chain")
        if self.vocabulary != "same" and self.method is not Method.DRAFT_MODEL:
            raise ValueError("vocabulary: only a draft model may have another tokenizer")
        if self.vocabulary == "text" and self.num_tree_nodes:
            raise ValueError("num_tree_nodes: a draft that goes by way of text is a chain")
        if self.rejection_sample_method is AcceptanceRule.BLOCK and self.num_tree_nodes:
            raise ValueError("rejection_sample_method: block verification is for chains")
        if self.ahead_branches and not self.can_run_ahead:
            raise ValueError("ahead_branches: only draft models of the target's vocabulary and EAGLE heads in a pool")
        if self.draft_tensor_parallel_size > 1 and not set(self.all_methods) <= set(WHOLE_MODELS):
            raise ValueError(f"draft_tensor_parallel_size: {self.method} runs on one rank")
        if self.draft_tensor_parallel_size > 1 and self.location is Location.VERIFIER:
            raise ValueError("draft_tensor_parallel_size: a drafter in the verifier runs on one rank")

    def _check_plugin(self) -> None:
        if Method.PLUGIN not in self.all_methods:
            if self.plugin or self.plugin_config:
                raise ValueError(f"{'plugin' if self.plugin else 'plugin_config'}: no method here is a plug-in")
            return
        require(bool(self.plugin), "plugin", "the name of an entry point")
        if self.method is Method.PLUGIN and self.model is not None:
            raise ValueError("model: a plug-in is told its files in plugin_config")

    @property
    def can_run_ahead(self) -> bool:
        """Whether the drafter has spare time, and can draft for several outcomes."""
        is_able = self.method in (Method.DRAFT_MODEL, *EAGLE_LIKE) and self.vocabulary == "same"
        return is_able and self.location is Location.POOL

    @property
    def num_ahead_branches(self) -> int:
        """The number of outcomes of a verification to draft for in spare time."""
        # a head is fast beside a verification, and drafts from its own states are accepted less: the embedded EAGLE-3
        # head answers half of the rounds at once, with 6% fewer tokens per round (greedy, 8 outcomes)
        usual = USUAL_AHEAD_BRANCHES if self.can_run_ahead and self.method is Method.DRAFT_MODEL else 0
        return usual if self.ahead_branches is None else self.ahead_branches

    @property
    def all_methods(self) -> tuple[Method, ...]:
        return self.methods or (self.method,)

    @property
    def needs_checkpoint(self) -> bool:
        """Whether a draft model or head must be given."""
        return any(_needs_checkpoint(method) for method in self.all_methods)

    @property
    def weighted_methods(self) -> tuple[Method, ...]:
        """The methods with weights of their own, which an update of the target's leaves as they are."""
        others = (*MODEL_FREE, *TARGET_DERIVED, Method.PLUGIN)  # whether a plug-in has weights is not known
        return tuple(method for method in self.all_methods if method not in others)

    @property
    def update_refusal(self) -> str | None:
        """Why this drafter takes no new weights; None: it does."""
        own = self.weighted_methods
        if len(own) > 1:
            return f"{own[0]} and {own[1]} both have weights, which one folder cannot give"
        if own:
            return "models: parameter sets by position stay as they were loaded" if self.models else None
        first = next((method for method in self.all_methods if method in TARGET_DERIVED), self.all_methods[0])
        if first in TARGET_DERIVED:
            return f"{first} runs the target's own layers: it follows the target by itself"
        if first is Method.PLUGIN:
            return f"the plug-in {self.plugin!r} has its own ways to take weights"
        return f"{first} has no weights: it looks tokens up"


def learning_refusal(config: SpeculativeConfig) -> str | None:
    """Return why a drafter cannot learn while it serves; None: it can. One that looks tokens up remembers texts."""
    if config.location is not Location.POOL:
        return f"{config.method} runs in the verifier: only a pool has a learner"
    if config.vocabulary != "same":
        return f"vocabulary: a draft model of another vocabulary ({config.vocabulary}) does not learn from token ids"
    own = config.weighted_methods
    if not own and any(method in MODEL_FREE for method in config.all_methods):
        return None
    if config.update_refusal is not None:
        return config.update_refusal
    return None if own[0] in LEARNING else f"{own[0]} is not trained on what was served"


def _needs_checkpoint(method: Method) -> bool:
    # MTP layers are in the target's checkpoint; a plug-in loads its own files
    return method not in (*MODEL_FREE, *TARGET_DERIVED, Method.MTP, Method.PLUGIN)
