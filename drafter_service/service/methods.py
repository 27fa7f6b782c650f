"""The drafting methods, a record each: what configurations, specs, builders and learners must know of it.

A new method is its drafter, a function of its name in `drafters` or `head_builders` that builds it and, here, its name,
its record and the keys of `-sc` that it alone reads.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from outrider.verifier_service.messages.draft import require

if TYPE_CHECKING:
    from outrider.drafter_service.service.speculative_config import SpeculativeConfig


class Method(enum.StrEnum):
    """The names of the drafting methods."""

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


# other names of methods, which vLLM and papers use
METHOD_ALIASES = {
    "dspark": Method.DFLASH,
    "dflash2": Method.DFLASH,
    "mtp_eagle": Method.MTP,
    "pard": Method.PARALLEL_DRAFT,
    "draft": Method.DRAFT_MODEL,
}


class Kind(enum.Enum):
    """What a method guesses with, and so what it needs."""

    LOOKUP = enum.auto()  # tokens alone: no checkpoint, nothing to load
    TARGET = enum.auto()  # the target's layers and KV: it must run in the verifier
    MODEL = enum.auto()  # a model of its own, on one rank or several
    HEAD = enum.auto()  # layers that read the target's hidden states
    PLUGIN = enum.auto()  # code that is not ours: what it loads is not known
    HYBRID = enum.auto()  # what its parts guess with


@dataclass(frozen=True, kw_only=True)
class MethodKeys:
    """The keys of `-sc` that one method reads; a hybrid reads those of its parts. Each is checked, whoever reads it."""

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
    # of a draft model: as the target's; another, by way of text; another, where both agree
    vocabulary: Literal["same", "text", "intersect"] = "same"

    def __post_init__(self) -> None:
        highest = self.prompt_lookup_max
        require(self.prompt_lookup_min <= highest, "prompt_lookup_min", "at least 1 and at most prompt_lookup_max")


@dataclass(frozen=True, slots=True)
class DraftMethod:
    """One method."""

    name: Method
    kind: Kind
    _: KW_ONLY
    learns: bool = False  # on what was served: it has a student in `learning.students`
    names_taps: bool = False  # a head's config says which states it reads; others read the last one
    is_in_target: bool = False  # its weights are in the target's checkpoint
    has_masks: bool = False  # the target's steps compute masks for it
    has_sets: bool = False  # it may have a set of parameters for each draft position
    # outcomes of a verification to draft for in spare time, where nothing is said; None: it cannot
    ahead_branches: int | None = None
    # options of `outrider train-drafter` that not all methods have, and this one has; None: it is not trained
    trained_with: tuple[str, ...] | None = None
    refusal: Callable[[SpeculativeConfig], str | None] = lambda config: None  # why a configuration is impossible

    @property
    def has_weights(self) -> bool:
        """Whether it has weights of its own, which an update of the target's leaves as they are."""
        return self.kind in (Kind.MODEL, Kind.HEAD)

    @property
    def needs_checkpoint(self) -> bool:
        """Whether a draft model or head must be given."""
        return self.has_weights and not self.is_in_target

    @property
    def build(self) -> Callable[..., Any]:
        """What makes a drafter of a `Making`. Like the next two it may need model code, whose import takes seconds."""
        return _function(f"service.{'head_builders' if self.kind is Kind.HEAD else 'drafters'}", self.name)

    @property
    def student(self) -> Callable[..., Any]:
        """What makes a student, and says how it reads, of a `StudentMaker` and a folder."""
        return _function("learning.students", self.name)

    @property
    def parse_config(self) -> Callable[..., Any]:
        """What reads a head's config, which names its taps."""
        return _function(f"heads.{self.name}", "parse_config")


def _function(module: str, name: str) -> Callable[..., Any]:
    return getattr(import_module(f"outrider.drafter_service.{module}"), name)


def _tidar_refusal(config: SpeculativeConfig) -> str | None:
    if config.methods:
        return "methods: tidar drafts in every step of the target, so that it stands alone"
    if config.num_tree_nodes:
        return "num_tree_nodes: tidar has masks for every outcome of a chain, not of a tree"
    return None


def _plugin_refusal(config: SpeculativeConfig) -> str | None:
    if not config.plugin:
        return "plugin must be the name of an entry point"
    if not config.methods and config.model is not None:
        return "model: a plug-in is told its files in plugin_config"
    return None


_RECORDS = (
    DraftMethod(
        Method.DRAFT_MODEL,
        Kind.MODEL,
        learns=True,
        ahead_branches=8,
        trained_with=("init_from", "hidden_size", "num_layers"),
    ),
    DraftMethod(Method.NGRAM, Kind.LOOKUP),
    DraftMethod(Method.SUFFIX, Kind.LOOKUP),
    DraftMethod(Method.LOOKAHEAD, Kind.LOOKUP),
    DraftMethod(Method.EARLY_EXIT, Kind.TARGET),
    DraftMethod(Method.SPARSE, Kind.TARGET),
    DraftMethod(Method.TIDAR, Kind.TARGET, has_masks=True, refusal=_tidar_refusal, trained_with=("init_from",)),
    DraftMethod(Method.MEDUSA, Kind.HEAD, learns=True, trained_with=("num_layers", "draft_vocab_size")),
    DraftMethod(Method.MLP_SPECULATOR, Kind.HEAD, learns=True, trained_with=("hidden_size",)),
    # A head is fast beside a verification, and drafts from its own states are accepted less: the embedded EAGLE-3
    # head answers half of the rounds at once, with 6% fewer tokens per round (greedy, 8 outcomes).
    DraftMethod(Method.EAGLE, Kind.HEAD, learns=True, has_sets=True, ahead_branches=0, trained_with=()),
    DraftMethod(
        Method.EAGLE3,
        Kind.HEAD,
        learns=True,
        names_taps=True,
        has_sets=True,
        ahead_branches=0,
        trained_with=("init_from", "draft_vocab_size", "taps"),
    ),
    DraftMethod(Method.MTP, Kind.HEAD, is_in_target=True, ahead_branches=0, trained_with=()),
    DraftMethod(Method.PARALLEL_DRAFT, Kind.MODEL, trained_with=("init_from", "hidden_size", "num_layers")),
    DraftMethod(Method.DFLASH, Kind.HEAD, names_taps=True, trained_with=("num_layers", "taps")),
    DraftMethod(Method.HYBRID, Kind.HYBRID),
    DraftMethod(Method.PLUGIN, Kind.PLUGIN, refusal=_plugin_refusal),
)
METHODS: Mapping[Method, DraftMethod] = {record.name: record for record in _RECORDS}
# those that `outrider train-drafter` trains, by their names there
TRAINED: Mapping[str, DraftMethod] = {
    record.name.replace("_", "-"): record for record in _RECORDS if record.trained_with is not None
}


def methods_of(kind: Kind) -> tuple[Method, ...]:
    """Return the methods of one kind."""
    return tuple(record.name for record in _RECORDS if record.kind is kind)
