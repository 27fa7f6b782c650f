"""Build the configured drafter, in the process where it runs; heads are built by `head_builders`."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from outrider.drafter_service.engine.drafter import Drafter
from outrider.drafter_service.engine.paged_drafter import PagedDrafter
from outrider.drafter_service.engine.tree_growth import DraftRules, TreeConfig
from outrider.drafter_service.heads.head_files import CONFIG_NAME, read_json
from outrider.drafter_service.lookup.lookahead_drafter import LookaheadConfig, LookaheadDrafter
from outrider.drafter_service.lookup.ngram_drafter import NgramDrafter
from outrider.drafter_service.lookup.suffix_drafter import SuffixConfig, SuffixDrafter
from outrider.drafter_service.models.model_drafter import ModelForward
from outrider.drafter_service.models.one_pass_drafter import CanvasForward
from outrider.drafter_service.models.parallel_drafter import MASK_KEYS, MaskedModel, parse_mask_token_id
from outrider.drafter_service.models.translated_drafter import IntersectionDrafter, TextDrafter
from outrider.drafter_service.models.vocabulary_map import FileTokenizer, VocabularyMap
from outrider.drafter_service.service.drafter_spec import DrafterSpec
from outrider.drafter_service.service.hybrid_drafter import HybridDrafter
from outrider.drafter_service.service.methods import METHODS, Kind
from outrider.drafter_service.service.own_weights import OwnWeights
from outrider.drafter_service.service.plugin_drafter import build_plugin
from outrider.drafter_service.service.plugins import PluginContext, installed_plugins
from outrider.drafter_service.target.early_exit_drafter import early_exit_drafter
from outrider.drafter_service.target.sparse_drafter import sparse_drafter
from outrider.drafter_service.target.target_view import TargetView
from outrider.drafter_service.target.tidar_drafter import TidarDrafter, parse_blocks
from outrider.verifier_service.engine.runners import Runner
from outrider.verifier_service.formats.checkpoint import WeightError
from outrider.verifier_service.messages.draft import DraftNeeds
from outrider.verifier_service.messages.seeds import derive_seed
from outrider.verifier_service.model.architectures import read_description, resolve_description, resolve_folder
from outrider.verifier_service.model.settled import own_limit, resolve_device


def build_drafter(
    spec: DrafterSpec,
    *,
    runner: Runner | None = None,
    view: TargetView | None = None,
    plugins: Iterable[EntryPoint] | None = None,
    rng: torch.Generator | None = None,
    weights: OwnWeights | None = None,
) -> Drafter:
    """Build the drafter of `spec`; raises `ValueError` naming a bad option or file.

    `rng` draws unseeded drafts; None: a generator with the spec's seed. `runner`: the loaded draft model, for methods
    with a whole model. `view`: the target's engine, if the drafter runs in the verifier. `plugins`: entry points to
    search; None: all installed ones. `weights` is told how the drafter's weights change.
    """
    rng, weights = rng or drafter_rng(spec), weights or OwnWeights(spec.speculative)
    drafter: Drafter = spec.speculative.record.build(Making(spec, runner, view, plugins, rng, weights))
    return drafter


def drafter_rng(spec: DrafterSpec) -> torch.Generator:
    """Return the generator of unseeded drafts."""
    return torch.Generator().manual_seed(derive_seed(spec.sampling_seed, "drafter"))


class Making:
    """What a drafter is built from; the parts of a hybrid share it."""

    def __init__(
        self,
        spec: DrafterSpec,
        runner: Runner | None,
        view: TargetView | None,
        plugins: Iterable[EntryPoint] | None,
        rng: torch.Generator,
        weights: OwnWeights,
    ) -> None:
        self.spec, self.config = spec, spec.speculative
        self.plugins, self.rng, self.weights = plugins, rng, weights
        self._runner, self._view = runner, view
        description = read_description(resolve_description(spec.target), spec.target)  # of any engine
        self.vocab_size: int = description.vocab_size  # the target's
        self.state_width: int = description.hidden_size
        self.device = resolve_device(spec.target.device)
        max_model_len: int = spec.target.max_model_len or own_limit(description)
        self.limits = {"vocab_size": self.vocab_size, "max_model_len": max_model_len}
        self.trees = TreeConfig(method=self.config.tree_method)
        self.rules = DraftRules(rng=rng, vocab_size=self.vocab_size, trees=self.trees)
        self.num_ahead_branches = 0 if view is not None else self.config.num_ahead_branches  # no time of its own
        # a draft over a link takes time, and trees are priced as other drafts
        self.lookup_needs = DraftNeeds(is_found=view is not None and not self.config.num_tree_nodes)

    @property
    def draft_model(self) -> Runner:
        assert self._runner is not None, "the draft model is not loaded"
        return self._runner

    @property
    def target(self) -> TargetView:
        assert self._view is not None, "it runs in the verifier"
        return self._view

    @property
    def folder(self) -> Path:
        """The draft model's or head's own."""
        assert self.spec.model is not None, "the drafter has no checkpoint"
        return resolve_folder(self.spec.model)


# --- look-ups ---


def ngram(making: Making) -> Drafter:
    return NgramDrafter(
        prompt_lookup_min=making.config.prompt_lookup_min,
        prompt_lookup_max=making.config.prompt_lookup_max,
        needs=making.lookup_needs,
        **making.limits,
    )


def suffix(making: Making) -> Drafter:
    keys = making.config
    config = SuffixConfig(
        max_tree_depth=keys.suffix_decoding_max_tree_depth,
        max_cached_requests=keys.suffix_decoding_max_cached_requests,
        max_spec_factor=keys.suffix_decoding_max_spec_factor,
        min_token_prob=keys.suffix_decoding_min_token_prob,
        max_versions=keys.suffix_decoding_max_versions,
    )
    return SuffixDrafter(config=config, needs=replace(making.lookup_needs, history=True), **making.limits)


def lookahead(making: Making) -> Drafter:
    config = LookaheadConfig(window=making.config.lookahead_window, ngram=making.config.lookahead_ngram_size)
    rng = random.Random(derive_seed(making.spec.sampling_seed, "lookahead"))
    return LookaheadDrafter(rng=rng, config=config, **making.limits)


# --- the target itself ---


def early_exit(making: Making) -> Drafter:
    return early_exit_drafter(making.target, making.rng, exit_layer=making.config.exit_layer, trees=making.trees)


def sparse(making: Making) -> Drafter:
    num_blocks = making.config.sparse_num_blocks
    return sparse_drafter(making.target, making.rng, num_blocks=num_blocks, trees=making.trees)


def tidar(making: Making) -> Drafter:
    config, given = read_json(resolve_description(making.spec.target) / CONFIG_NAME), making.config.mask_token_id
    token_id = parse_mask_token_id(config if given is None else {MASK_KEYS[0]: given}, making.vocab_size)
    length, num_blocks = making.config.num_speculative_tokens, making.config.tidar_num_blocks
    masks = parse_blocks(config, token_id, length=length, num_blocks=num_blocks)
    return TidarDrafter(making.target, making.rules, masks)


# --- models of their own ---


def draft_model(making: Making) -> Drafter:
    runner, vocab_size = making.draft_model, making.vocab_size
    making.weights.keep_model(lambda folder: None)
    if making.config.vocabulary == "same":
        rules = replace(making.rules, vocab_size=min(runner.vocab_size, vocab_size))
        return PagedDrafter(ModelForward(runner, rules), num_ahead_branches=making.num_ahead_branches)
    target, draft = _tokenizers(making)
    tokenizers: dict[str, Any] = {"target_tokenizer": target, "draft_tokenizer": draft}
    if making.config.vocabulary == "text":
        inner = PagedDrafter(ModelForward(runner, replace(making.rules, vocab_size=runner.vocab_size)))
        return TextDrafter(inner, target_vocab_size=vocab_size, **tokenizers)
    sizes = {"target_vocab_size": vocab_size, "draft_vocab_size": runner.vocab_size}
    shared = VocabularyMap.of(target.vocabulary(), draft.vocabulary(), **sizes)
    return IntersectionDrafter(runner, making.rng, vocabulary=shared, trees=making.trees, **tokenizers)


def _tokenizers(making: Making) -> tuple[FileTokenizer, FileTokenizer]:
    assert making.spec.model is not None
    target, draft = (resolve_description(model) for model in (making.spec.target, making.spec.model))
    return FileTokenizer.from_folder(target), FileTokenizer.from_folder(draft)


def parallel_draft(making: Making) -> Drafter:
    runner = making.draft_model
    served = parse_mask_token_id(read_json(making.folder / CONFIG_NAME), runner.vocab_size)

    def require_mask_token(folder: Path) -> None:
        found = parse_mask_token_id(read_json(folder / CONFIG_NAME), runner.vocab_size)
        if found != served:
            raise WeightError(f"{folder / CONFIG_NAME}: the mask token is {found}, the served model's is {served}")

    making.weights.keep_model(require_mask_token)
    rules = replace(making.rules, vocab_size=min(runner.vocab_size, making.vocab_size))
    return PagedDrafter(CanvasForward(MaskedModel(runner, served), rules))


# --- others' and several ---


def plugin(making: Making) -> Drafter:
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


def hybrid(making: Making) -> Drafter:
    lookups: dict[str, Drafter] = {}
    models: dict[str, Drafter] = {}
    for name in making.config.methods:
        part = METHODS[name]
        (lookups if part.kind is Kind.LOOKUP else models)[name] = part.build(making)
    return HybridDrafter(lookups, models)
