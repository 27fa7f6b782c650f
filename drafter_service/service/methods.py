"""The drafting methods, a record each: what configurations, specs, builders and learners must know of it.

A new method is its drafter and, here, a name, the keys of `-sc` that it alone reads, a function that builds it, and its
record. Model code is imported when a drafter is built: that of heads takes seconds.
"""

from __future__ import annotations

import enum
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from outrider.drafter_service.service.plugins import PluginContext, installed_plugins
from outrider.verifier_service.messages.draft import FINAL_TAP, require
from outrider.verifier_service.messages.seeds import derive_seed
from outrider.verifier_service.model.architectures import resolve_description, resolve_folder

if TYPE_CHECKING:
    from outrider.drafter_service.engine.drafter import Drafter
    from outrider.drafter_service.models.vocabulary_map import FileTokenizer
    from outrider.drafter_service.service.drafter_spec import DrafterSpec
    from outrider.drafter_service.service.drafters import Making
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftMethod:
    """One method."""

    kind: Kind
    build: Callable[[Making], Drafter]
    taps: Callable[[DrafterSpec], tuple[int, ...]] = lambda spec: (FINAL_TAP,)  # the hidden states that a head reads
    refusal: Callable[[SpeculativeConfig], str | None] = lambda config: None  # why a configuration is impossible
    is_in_target: bool = False  # its weights are in the target's checkpoint
    has_masks: bool = False  # the target's steps compute masks for it
    has_sets: bool = False  # it may have a set of parameters for each draft position
    learns: bool = False  # it can be trained on what was served
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


# --- look-ups ---


def _ngram(making: Making) -> Drafter:
    from outrider.drafter_service.lookup.ngram_drafter import NgramDrafter

    keys: NgramKeys = making.config
    return NgramDrafter(
        prompt_lookup_min=keys.prompt_lookup_min,
        prompt_lookup_max=keys.prompt_lookup_max,
        needs=making.lookup_needs,
        **making.limits,
    )


def _suffix(making: Making) -> Drafter:
    from outrider.drafter_service.lookup.suffix_drafter import SuffixConfig, SuffixDrafter

    keys: SuffixKeys = making.config
    config = SuffixConfig(
        max_tree_depth=keys.suffix_decoding_max_tree_depth,
        max_cached_requests=keys.suffix_decoding_max_cached_requests,
        max_spec_factor=keys.suffix_decoding_max_spec_factor,
        min_token_prob=keys.suffix_decoding_min_token_prob,
        max_versions=keys.suffix_decoding_max_versions,
    )
    return SuffixDrafter(config=config, needs=replace(making.lookup_needs, history=True), **making.limits)


def _lookahead(making: Making) -> Drafter:
    from outrider.drafter_service.lookup.lookahead_drafter import LookaheadConfig, LookaheadDrafter

    keys: LookaheadKeys = making.config
    config = LookaheadConfig(window=keys.lookahead_window, ngram=keys.lookahead_ngram_size)
    rng = random.Random(derive_seed(making.spec.sampling_seed, "lookahead"))
    return LookaheadDrafter(rng=rng, config=config, **making.limits)


# --- the target itself ---


def _early_exit(making: Making) -> Drafter:
    from outrider.drafter_service.target.early_exit_drafter import early_exit_drafter

    return early_exit_drafter(making.target, making.rng, exit_layer=making.config.exit_layer, trees=making.trees)


def _sparse(making: Making) -> Drafter:
    from outrider.drafter_service.target.sparse_drafter import sparse_drafter

    num_blocks = making.config.sparse_num_blocks
    return sparse_drafter(making.target, making.rng, num_blocks=num_blocks, trees=making.trees)


def _tidar(making: Making) -> Drafter:
    from outrider.drafter_service.heads.head_files import CONFIG_NAME, read_json
    from outrider.drafter_service.models.parallel_drafter import MASK_KEYS, parse_mask_token_id
    from outrider.drafter_service.target.tidar_drafter import TidarDrafter, parse_blocks

    config, given = read_json(resolve_description(making.spec.target) / CONFIG_NAME), making.config.mask_token_id
    token_id = parse_mask_token_id(config if given is None else {MASK_KEYS[0]: given}, making.vocab_size)
    length, num_blocks = making.config.num_speculative_tokens, making.config.tidar_num_blocks
    masks = parse_blocks(config, token_id, length=length, num_blocks=num_blocks)
    return TidarDrafter(making.target, making.rules, masks)


def _tidar_refusal(config: SpeculativeConfig) -> str | None:
    if config.methods:
        return "methods: tidar drafts in every step of the target, so that it stands alone"
    if config.num_tree_nodes:
        return "num_tree_nodes: tidar has masks for every outcome of a chain, not of a tree"
    return None


# --- models of their own ---


def _draft_model(making: Making) -> Drafter:
    from outrider.drafter_service.engine.paged_drafter import PagedDrafter
    from outrider.drafter_service.models.model_drafter import ModelForward
    from outrider.drafter_service.models.translated_drafter import IntersectionDrafter, TextDrafter
    from outrider.drafter_service.models.vocabulary_map import VocabularyMap

    runner, vocab_size = making.draft_model, making.vocab_size
    making.weights.keep_model(lambda folder: None)
    if making.config.vocabulary == "same":
        rules = replace(making.rules, vocab_size=min(runner.vocab_size, vocab_size))
        return PagedDrafter(ModelForward(runner, rules), num_ahead_branches=making.num_ahead_branches)
    target, draft = _tokenizers(making)
    tokenizers = {"target_tokenizer": target, "draft_tokenizer": draft}
    if making.config.vocabulary == "text":
        inner = PagedDrafter(ModelForward(runner, replace(making.rules, vocab_size=runner.vocab_size)))
        return TextDrafter(inner, target_vocab_size=vocab_size, **tokenizers)
    sizes = {"target_vocab_size": vocab_size, "draft_vocab_size": runner.vocab_size}
    shared = VocabularyMap.of(target.vocabulary(), draft.vocabulary(), **sizes)
    return IntersectionDrafter(runner, making.rng, vocabulary=shared, trees=making.trees, **tokenizers)


def _tokenizers(making: Making) -> tuple[FileTokenizer, FileTokenizer]:
    from outrider.drafter_service.models.vocabulary_map import FileTokenizer

    assert making.spec.model is not None
    target, draft = (resolve_description(model) for model in (making.spec.target, making.spec.model))
    return FileTokenizer.from_folder(target), FileTokenizer.from_folder(draft)


def _parallel_draft(making: Making) -> Drafter:
    from outrider.drafter_service.engine.paged_drafter import PagedDrafter
    from outrider.drafter_service.heads.head_files import CONFIG_NAME, read_json
    from outrider.drafter_service.models.one_pass_drafter import CanvasForward
    from outrider.drafter_service.models.parallel_drafter import MaskedModel, parse_mask_token_id
    from outrider.verifier_service.model.weights import WeightError

    runner = making.draft_model
    served = parse_mask_token_id(read_json(making.folder / CONFIG_NAME), runner.vocab_size)

    def require_mask_token(folder: Path) -> None:
        found = parse_mask_token_id(read_json(folder / CONFIG_NAME), runner.vocab_size)
        if found != served:
            raise WeightError(f"{folder / CONFIG_NAME}: the mask token is {found}, the served model's is {served}")

    making.weights.keep_model(require_mask_token)
    rules = replace(making.rules, vocab_size=min(runner.vocab_size, making.vocab_size))
    return PagedDrafter(CanvasForward(MaskedModel(runner, served), rules))


# --- heads ---


def _medusa(making: Making) -> Drafter:
    from outrider.drafter_service.head_drafters.medusa_drafter import MedusaDrafter
    from outrider.drafter_service.heads.medusa import MedusaHeads, target_lm_head

    def load(folder: Path) -> MedusaHeads:
        heads = MedusaHeads.from_folder(folder, target_lm_head=target_lm_head(resolve_folder(making.spec.target)))
        making.require_width(folder, heads.hidden_size)
        return heads.to(making.device)

    heads = load(making.folder)
    making.weights.keep_head(heads, load)
    return MedusaDrafter(heads, rng=making.rng, **making.limits)


def _mlp_speculator(making: Making) -> Drafter:
    from outrider.drafter_service.head_drafters.mlp_drafter import MlpDrafter
    from outrider.drafter_service.heads.mlp_speculator import MlpSpeculator

    def load(folder: Path) -> MlpSpeculator:
        speculator = MlpSpeculator.from_folder(folder)
        making.require_width(folder, speculator.emb_dim)
        return speculator.to(making.device)

    speculator = load(making.folder)
    making.weights.keep_head(speculator, load)
    return MlpDrafter(speculator, rng=making.rng, **making.limits)


def _eagle(making: Making, *, method: Method) -> Drafter:
    from outrider.drafter_service.engine.paged_drafter import PagedDrafter
    from outrider.drafter_service.head_drafters.eagle_drafter import HeadForward
    from outrider.drafter_service.head_drafters.head_runner import HeadRunner, load_heads
    from outrider.drafter_service.heads.switched import SwitchedHeads
    from outrider.verifier_service.model.config import ModelConfig
    from outrider.verifier_service.model.settled import with_dtype

    spec = making.spec
    is_in_target = METHODS[method].is_in_target and (spec.model is None or bool(making.config.methods))
    model = spec.target if spec.model is None or is_in_target else spec.model

    def load(folders: Sequence[Path], model: ModelConfig) -> SwitchedHeads:
        target = folders[0] if is_in_target else resolve_folder(spec.target)
        return load_heads(method.value, folders, model, target=target, num_target_layers=spec.num_target_layers())

    paths = making.config.models or (model.path,)
    heads = load([resolve_folder(replace(model, path=path)) for path in paths], model)
    runner = HeadRunner.sized_by(heads, model)
    runner.capture()
    again = with_dtype(model, runner.dtype)
    making.weights.keep_head(heads.first, lambda folder: load([folder], again).first)
    return PagedDrafter(HeadForward(runner, making.rules), num_ahead_branches=making.num_ahead_branches)


def _eagle3_taps(spec: DrafterSpec) -> tuple[int, ...]:
    from outrider.drafter_service.heads.eagle3 import parse_config

    return parse_config(_config_of(spec), spec.num_target_layers()).taps


def _dflash(making: Making) -> Drafter:
    from outrider.drafter_service.engine.paged_drafter import PagedDrafter
    from outrider.drafter_service.heads.dflash import DFlashHead
    from outrider.drafter_service.models.dflash_drafter import DFlashModel, load_dflash_head
    from outrider.drafter_service.models.one_pass_drafter import CanvasForward
    from outrider.verifier_service.model.config import ModelConfig
    from outrider.verifier_service.model.settled import with_dtype

    spec = making.spec

    def load(folder: Path, model: ModelConfig) -> DFlashHead:
        target, num_layers = resolve_folder(spec.target), spec.num_target_layers()
        return load_dflash_head(folder, model, target=target, num_target_layers=num_layers)

    assert spec.model is not None, "the drafter has no checkpoint"
    head = load(making.folder, spec.model)
    again = with_dtype(spec.model, head.embed_tokens.weight.dtype)
    making.weights.keep_head(head, lambda folder: load(folder, again))
    return PagedDrafter(CanvasForward(DFlashModel.sized_by(head, spec.model), making.rules))


def _dflash_taps(spec: DrafterSpec) -> tuple[int, ...]:
    from outrider.drafter_service.heads.dflash import parse_config

    return parse_config(_config_of(spec), spec.num_target_layers()).taps


def _config_of(spec: DrafterSpec) -> Mapping[str, Any]:
    assert spec.model is not None
    return json.loads((resolve_description(spec.model) / "config.json").read_text())


# --- others' ---


def _plugin(making: Making) -> Drafter:
    from outrider.drafter_service.service.plugin_drafter import build_plugin

    config, seed = making.config, making.spec.sampling_seed
    context = PluginContext(
        name=config.plugin,
        options=MappingProxyType(json.loads(config.plugin_config or "{}")),
        num_speculative_tokens=config.num_speculative_tokens,
        num_tree_nodes=config.num_tree_nodes,
        seed=derive_seed(seed, f"plugin {config.plugin}"),
        device=str(making.device),
        target=str(resolve_folder(making.spec.target)),
        **making.limits,
    )
    return build_plugin(context, installed_plugins() if making.plugins is None else making.plugins)


def _plugin_refusal(config: SpeculativeConfig) -> str | None:
    if not config.plugin:
        return "plugin must be the name of an entry point"
    if not config.methods and config.model is not None:
        return "model: a plug-in is told its files in plugin_config"
    return None


def _hybrid(making: Making) -> Drafter:
    from outrider.drafter_service.service.hybrid_drafter import HybridDrafter

    lookups: dict[str, Drafter] = {}
    models: dict[str, Drafter] = {}
    for name in making.config.methods:
        part = METHODS[name]
        (lookups if part.kind is Kind.LOOKUP else models)[name.value] = part.build(making)
    return HybridDrafter(lookups, models)


METHODS: Mapping[Method, DraftMethod] = {
    Method.DRAFT_MODEL: DraftMethod(kind=Kind.MODEL, build=_draft_model, learns=True, ahead_branches=8),
    Method.NGRAM: DraftMethod(kind=Kind.LOOKUP, build=_ngram),
    Method.SUFFIX: DraftMethod(kind=Kind.LOOKUP, build=_suffix),
    Method.LOOKAHEAD: DraftMethod(kind=Kind.LOOKUP, build=_lookahead),
    Method.EARLY_EXIT: DraftMethod(kind=Kind.TARGET, build=_early_exit),
    Method.SPARSE: DraftMethod(kind=Kind.TARGET, build=_sparse),
    Method.TIDAR: DraftMethod(kind=Kind.TARGET, build=_tidar, refusal=_tidar_refusal, has_masks=True),
    Method.MEDUSA: DraftMethod(kind=Kind.HEAD, build=_medusa, learns=True),
    Method.MLP_SPECULATOR: DraftMethod(kind=Kind.HEAD, build=_mlp_speculator, learns=True),
    # A head is fast beside a verification, and drafts from its own states are accepted less: the embedded EAGLE-3
    # head answers half of the rounds at once, with 6% fewer tokens per round (greedy, 8 outcomes).
    Method.EAGLE: DraftMethod(
        kind=Kind.HEAD, build=partial(_eagle, method=Method.EAGLE), has_sets=True, learns=True, ahead_branches=0
    ),
    Method.EAGLE3: DraftMethod(
        kind=Kind.HEAD,
        build=partial(_eagle, method=Method.EAGLE3),
        taps=_eagle3_taps,
        has_sets=True,
        learns=True,
        ahead_branches=0,
    ),
    Method.MTP: DraftMethod(
        kind=Kind.HEAD, build=partial(_eagle, method=Method.MTP), is_in_target=True, ahead_branches=0
    ),
    Method.PARALLEL_DRAFT: DraftMethod(kind=Kind.MODEL, build=_parallel_draft),
    Method.DFLASH: DraftMethod(kind=Kind.HEAD, build=_dflash, taps=_dflash_taps),
    Method.HYBRID: DraftMethod(kind=Kind.HYBRID, build=_hybrid),
    Method.PLUGIN: DraftMethod(kind=Kind.PLUGIN, build=_plugin, refusal=_plugin_refusal),
}


def methods_of(kind: Kind) -> tuple[Method, ...]:
    """Return the methods of one kind."""
    return tuple(name for name, method in METHODS.items() if method.kind is kind)
