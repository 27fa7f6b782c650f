"""The drafting methods, a record each: what configurations, specs, builders and learners must know of it.

A new method is its drafter, a function in `drafters` or `head_builders` that builds it and, here, its name, the keys of
`-sc` that it alone reads, and its record.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
METHOD_ALIASES = {"mtp_eagle": Method.MTP, "pard": Method.PARALLEL_DRAFT, "draft": Method.DRAFT_MODEL}


class Kind(enum.Enum):
    """What a method guesses with, and so what it needs."""

    LOOKUP = enum.auto()  # tokens alone: no checkpoint, nothing to load
    TARGET = enum.auto()  # the target's layers and KV: it must run in the verifier
    MODEL = enum.auto()  # a model of its own, on one rank or several
    HEAD = enum.auto()  # layers that read the target's hidden states
    PLUGIN = enum.auto()  # code that is not ours: what it loads is not known
    HYBRID = enum.auto()  # what its parts guess with


def named(name: str) -> Callable[..., Any]:
    """Return a function of this package, "room.module:function"; it is imported now, as it may need model code."""
    module, _, function = name.partition(":")
    return getattr(import_module(f"outrider.drafter_service.{module}"), function)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftMethod:
    """One method. Functions that need model code stand here by name."""

    kind: Kind
    builder: str  # takes a `Making`
    parser: str = ""  # of a head's config, which has `taps`; "": it reads the last state alone
    student: str = ""  # takes a `PupilMaker` and a folder; "": it is not trained on what was served
    refusal: Callable[[SpeculativeConfig], str | None] = lambda config: None  # why a configuration is impossible
    is_in_target: bool = False  # its weights are in the target's checkpoint
    has_masks: bool = False  # the target's steps compute masks for it
    has_sets: bool = False  # it may have a set of parameters for each draft position
    # outcomes of a verification to draft for in spare time, where nothing is said; None: it cannot
    ahead_branches: int | None = None

    @property
    def has_weights(self) -> bool:
        """Whether it has weights of its own, which an update of the target's leaves as they are."""
        return self.kind in (Kind.MODEL, Kind.HEAD)

    @property
    def needs_checkpoint(self) -> bool:
        """Whether a draft model or head must be given."""
        return self.has_weights and not self.is_in_target

    @property
    def has_scratch(self) -> bool:
        """Whether it writes guesses into KV blocks of the target's; masks lie behind a request's own tokens."""
        return self.kind is Kind.TARGET and not self.has_masks


# --- keys of `-sc` that one method reads ---


@dataclass(frozen=True, kw_only=True)
class NgramKeys:
    prompt_lookup_min: Annotated[int, Field(ge=1)] = 2
    prompt_lookup_max: int = 5

    def __post_init__(self) -> None:
        highest = self.prompt_lookup_max
        require(self.prompt_lookup_min <= highest, "prompt_lookup_min", "at least 1 and at most prompt_lookup_max")


@dataclass(frozen=True, kw_only=True)
class SuffixKeys:
    suffix_decoding_max_tree_depth: Annotated[int, Field(ge=2)] = 24
    suffix_decoding_max_cached_requests: Annotated[int, Field(ge=0)] = 10_000
    suffix_decoding_max_spec_factor: Annotated[float, Field(gt=0)] = 4.0
    suffix_decoding_min_token_prob: Annotated[float, Field(ge=0, le=1)] = 0.1
    suffix_decoding_max_versions: Annotated[int, Field(ge=1)] = 4  # of the weights, whose rollouts are drafted from


@dataclass(frozen=True, kw_only=True)
class LookaheadKeys:
    lookahead_window: Annotated[int, Field(ge=1)] = 5
    lookahead_ngram_size: Annotated[int, Field(ge=2)] = 4


@dataclass(frozen=True, kw_only=True)
class TargetKeys:
    """Of the methods that run the target's own layers."""

    exit_layer: Annotated[int | None, Field(ge=1)] = None  # early exit after so many layers; None: a third of them
    sparse_num_blocks: Annotated[int, Field(ge=2)] = 8  # KV blocks that sparse self-speculation attends to
    # blocks of masks in a step of tidar, for the likeliest outcomes of its verification; 0: for every one
    tidar_num_blocks: Annotated[int, Field(ge=0)] = 0
    mask_token_id: Annotated[int | None, Field(ge=0)] = None  # of tidar; None: the target's config names it


@dataclass(frozen=True, kw_only=True)
class DraftModelKeys:
    # as the target's; another, by way of text; another, where both agree
    vocabulary: Literal["same", "text", "intersect"] = "same"


@dataclass(frozen=True, kw_only=True)
class MethodKeys(DraftModelKeys, TargetKeys, LookaheadKeys, SuffixKeys, NgramKeys):
    """All of them: a hybrid has those of its parts, and each is checked, whoever reads it."""


# --- records ---


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


_BUILD, _HEAD, _LEARN = "service.drafters", "service.head_builders", "learning.pupils"
METHODS: Mapping[Method, DraftMethod] = {
    Method.DRAFT_MODEL: DraftMethod(
        kind=Kind.MODEL, builder=f"{_BUILD}:draft_model", student=f"{_LEARN}:draft_model", ahead_branches=8
    ),
    Method.NGRAM: DraftMethod(kind=Kind.LOOKUP, builder=f"{_BUILD}:ngram"),
    Method.SUFFIX: DraftMethod(kind=Kind.LOOKUP, builder=f"{_BUILD}:suffix"),
    Method.LOOKAHEAD: DraftMethod(kind=Kind.LOOKUP, builder=f"{_BUILD}:lookahead"),
    Method.EARLY_EXIT: DraftMethod(kind=Kind.TARGET, builder=f"{_BUILD}:early_exit"),
    Method.SPARSE: DraftMethod(kind=Kind.TARGET, builder=f"{_BUILD}:sparse"),
    Method.TIDAR: DraftMethod(kind=Kind.TARGET, builder=f"{_BUILD}:tidar", refusal=_tidar_refusal, has_masks=True),
    Method.MEDUSA: DraftMethod(kind=Kind.HEAD, builder=f"{_HEAD}:medusa", student=f"{_LEARN}:medusa"),
    Method.MLP_SPECULATOR: DraftMethod(
        kind=Kind.HEAD, builder=f"{_HEAD}:mlp_speculator", student=f"{_LEARN}:mlp_speculator"
    ),
    # A head is fast beside a verification, and drafts from its own states are accepted less: the embedded EAGLE-3
    # head answers half of the rounds at once, with 6% fewer tokens per round (greedy, 8 outcomes).
    Method.EAGLE: DraftMethod(
        kind=Kind.HEAD, builder=f"{_HEAD}:eagle", student=f"{_LEARN}:eagle", has_sets=True, ahead_branches=0
    ),
    Method.EAGLE3: DraftMethod(
        kind=Kind.HEAD,
        builder=f"{_HEAD}:eagle3",
        parser="heads.eagle3:parse_config",
        student=f"{_LEARN}:eagle3",
        has_sets=True,
        ahead_branches=0,
    ),
    Method.MTP: DraftMethod(kind=Kind.HEAD, builder=f"{_HEAD}:mtp", is_in_target=True, ahead_branches=0),
    Method.PARALLEL_DRAFT: DraftMethod(kind=Kind.MODEL, builder=f"{_BUILD}:parallel_draft"),
    Method.DFLASH: DraftMethod(kind=Kind.HEAD, builder=f"{_HEAD}:dflash", parser="heads.dflash:parse_config"),
    Method.HYBRID: DraftMethod(kind=Kind.HYBRID, builder=f"{_BUILD}:hybrid"),
    Method.PLUGIN: DraftMethod(kind=Kind.PLUGIN, builder=f"{_BUILD}:plugin", refusal=_plugin_refusal),
}


def methods_of(kind: Kind) -> tuple[Method, ...]:
    """Return the methods of one kind."""
    return tuple(name for name, method in METHODS.items() if method.kind is kind)
