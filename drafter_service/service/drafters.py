"""Build the configured drafter, in the process where it runs.

Heads import transformers' model code, which takes seconds: it is imported only for heads.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from types import MappingProxyType

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
from outrider.drafter_service.service.own_weights import OwnWeights
from outrider.drafter_service.service.plugin_drafter import build_plugin
from outrider.drafter_service.service.plugins import PluginContext, installed_plugins
from outrider.drafter_service.service.speculative_config import (
    MODEL_FREE,
    Method,
)
from outrider.drafter_service.target.early_exit_drafter import early_exit_drafter
from outrider.drafter_service.target.sparse_drafter import sparse_drafter
from outrider.drafter_service.target.target_view import TargetView
from outrider.drafter_service.target.tidar_drafter import TidarDrafter, parse_blocks
from outrider.verifier_service.engine.runners import Runner
from outrider.verifier_service.messages.draft import DraftNeeds
from outrider.verifier_service.messages.seeds import derive_seed
from outrider.verifier_service.model.architectures import read_description, resolve_description, resolve_folder
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.settled import own_limit, resolve_device, with_dtype
from outrider.verifier_service.model.weights import Checkpoint, WeightError


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
    maker = _Maker(spec, runner, view, plugins, rng, weights)
    methods = spec.speculative.all_methods
    if spec.speculative.method is not Method.HYBRID:
        return maker.make(methods[0])
    lookups = {method.value: maker.make(method) for method in methods if method in MODEL_FREE}
    models = {method.value: maker.make(method) for method in methods if method not in MODEL_FREE}
    return HybridDrafter(lookups, models)


def drafter_rng(spec: DrafterSpec) -> torch.Generator:
    """Return the generator of unseeded drafts."""
    return torch.Generator().manual_seed(derive_seed(spec.sampling_seed, "drafter"))


class _Maker:
    """Factories of drafters, by method."""

    def __init__(
        self,
        spec: DrafterSpec,
        runner: Runner | None,
        view: TargetView | None,
        plugins: Iterable[EntryPoint] | None,
        rng: torch.Generator,
        weights: OwnWeights,
    ) -> None:
        self._spec, self._runner, self._view, self._plugins = spec, runner, view, plugins
        self._weights = weights
        self._config = spec.speculative
        self._rng = rng
        description = read_description(resolve_description(spec.target), spec.target)  # of any engine
        self._vocab_size: int = description.vocab_size
        self._state_width: int = description.hidden_size
        self._device = resolve_device(spec.target.device)
        self._max_model_len: int = spec.target.max_model_len or own_limit(description)
        self._limits = {"vocab_size": self._vocab_size, "max_model_len": self._max_model_len}
        self._trees = TreeConfig(method=self._config.tree_method)
        self._rules = DraftRules(rng=rng, vocab_size=self._vocab_size, trees=self._trees)
        self._num_ahead_branches = 0 if view is not None else self._config.num_ahead_branches  # no time of its own

        # a draft over a link takes time, and trees are priced as other drafts
        self._lookup_needs = DraftNeeds(is_found=view is not None and not self._config.num_tree_nodes)

    def make(self, method: Method) -> Drafter:
        makers: dict[Method, Callable[[], Drafter]] = {
            Method.DRAFT_MODEL: self._draft_model,
            Method.NGRAM: self._ngram,
            Method.SUFFIX: self._suffix,
            Method.LOOKAHEAD: self._lookahead,
            Method.EARLY_EXIT: self._early_exit,
            Method.SPARSE: self._sparse,
            Method.TIDAR: self._tidar,
            Method.MEDUSA: self._medusa,
            Method.MLP_SPECULATOR: self._mlp_speculator,
            Method.EAGLE: partial(self._eagle, Method.EAGLE),
            Method.EAGLE3: partial(self._eagle, Method.EAGLE3),
            Method.MTP: partial(self._eagle, Method.MTP),
            Method.PARALLEL_DRAFT: self._parallel_draft,
            Method.DFLASH: self._dflash,
            Method.PLUGIN: self._plugin,
        }
        return makers[method]()

    def _draft_model(self) -> Drafter:
        assert self._runner is not None, "the draft model is not loaded"
        self._weights.keep_model(lambda folder: None)
        match self._config.vocabulary:
            case "text":
                return self._by_way_of_text(self._runner)
            case "intersect":
                return self._in_shared_tokens(self._runner)
        shared = min(self._runner.vocab_size, self._vocab_size)
        forward = ModelForward(self._runner, replace(self._rules, vocab_size=shared))
        return PagedDrafter(forward, num_ahead_branches=self._num_ahead_branches)

    def _by_way_of_text(self, runner: Runner) -> Drafter:
        target, draft = self._tokenizers()
        inner = PagedDrafter(ModelForward(runner, replace(self._rules, vocab_size=runner.vocab_size)))
        return TextDrafter(inner, target_tokenizer=target, draft_tokenizer=draft, target_vocab_size=self._vocab_size)

    def _in_shared_tokens(self, runner: Runner) -> Drafter:
        target, draft = self._tokenizers()
        vocabulary = VocabularyMap.of(
            target.vocabulary(),
            draft.vocabulary(),
            target_vocab_size=self._vocab_size,
            draft_vocab_size=runner.vocab_size,
        )
        return IntersectionDrafter(
            runner,
            self._rng,
            vocabulary=vocabulary,
            target_tokenizer=target,
            draft_tokenizer=draft,
            trees=self._trees,
        )

    def _tokenizers(self) -> tuple[FileTokenizer, FileTokenizer]:
        assert self._spec.model is not None
        folders = (resolve_description(self._spec.target), resolve_description(self._spec.model))
        return FileTokenizer.from_folder(folders[0]), FileTokenizer.from_folder(folders[1])

    def _parallel_draft(self) -> Drafter:
        assert self._runner is not None, "the draft model is not loaded"
        vocab_size = self._runner.vocab_size
        mask_token_id = parse_mask_token_id(read_json(self._head_folder() / CONFIG_NAME), vocab_size)
        self._weights.keep_model(partial(_require_mask_token, mask_token_id, vocab_size))
        rules = replace(self._rules, vocab_size=min(vocab_size, self._vocab_size))
        return PagedDrafter(CanvasForward(MaskedModel(self._runner, mask_token_id), rules))

    def _ngram(self) -> Drafter:
        return NgramDrafter(
            prompt_lookup_min=self._config.prompt_lookup_min,
            prompt_lookup_max=self._config.prompt_lookup_max,
            needs=self._lookup_needs,
            **self._limits,
        )

    def _suffix(self) -> Drafter:
        config = SuffixConfig(
            max_tree_depth=self._config.suffix_decoding_max_tree_depth,
            max_cached_requests=self._config.suffix_decoding_max_cached_requests,
            max_spec_factor=self._config.suffix_decoding_max_spec_factor,
            min_token_prob=self._config.suffix_decoding_min_token_prob,
            max_versions=self._config.suffix_decoding_max_versions,
        )
        return SuffixDrafter(config=config, needs=replace(self._lookup_needs, history=True), **self._limits)

    def _lookahead(self) -> Drafter:
        config = LookaheadConfig(window=self._config.lookahead_window, ngram=self._config.lookahead_ngram_size)
        rng = random.Random(derive_seed(self._spec.sampling_seed, "lookahead"))
        return LookaheadDrafter(rng=rng, config=config, **self._limits)

    def _early_exit(self) -> Drafter:
        assert self._view is not None, "early exit runs in the verifier"
        return early_exit_drafter(self._view, self._rng, exit_layer=self._config.exit_layer, trees=self._trees)

    def _sparse(self) -> Drafter:
        assert self._view is not None, "sparse self-speculation runs in the verifier"
        return sparse_drafter(self._view, self._rng, num_blocks=self._config.sparse_num_blocks, trees=self._trees)

    def _tidar(self) -> Drafter:
        assert self._view is not None, "tidar drafts in the verifier's steps"
        config, given = read_json(resolve_description(self._spec.target) / CONFIG_NAME), self._config.mask_token_id
        token_id = parse_mask_token_id(config if given is None else {MASK_KEYS[0]: given}, self._vocab_size)
        length, num_blocks = self._config.num_speculative_tokens, self._config.tidar_num_blocks
        masks = parse_blocks(config, token_id, length=length, num_blocks=num_blocks)
        return TidarDrafter(self._view, self._rules, masks)

    def _medusa(self) -> Drafter:
        from outrider.drafter_service.head_drafters.medusa_drafter import MedusaDrafter
        from outrider.drafter_service.heads.medusa import MedusaHeads

        def load(folder: Path) -> MedusaHeads:
            heads = MedusaHeads.from_folder(folder, target_lm_head=self._target_lm_head())
            self._require_width(folder, heads.hidden_size)
            return heads.to(self._device)

        heads = load(self._head_folder())
        self._weights.keep_head(heads, load)
        return MedusaDrafter(heads, rng=self._rng, **self._limits)

    def _mlp_speculator(self) -> Drafter:
        from outrider.drafter_service.head_drafters.mlp_drafter import MlpDrafter
        from outrider.drafter_service.heads.mlp_speculator import MlpSpeculator

        def load(folder: Path) -> MlpSpeculator:
            speculator = MlpSpeculator.from_folder(folder)
            self._require_width(folder, speculator.emb_dim)
            return speculator.to(self._device)

        speculator = load(self._head_folder())
        self._weights.keep_head(speculator, load)
        return MlpDrafter(speculator, rng=self._rng, **self._limits)

    def _require_width(self, folder: Path, width: int) -> None:
        if width != self._state_width:
            raise ValueError(f"{folder}: it reads states of width {width}, the target's have {self._state_width}")

    def _target_lm_head(self) -> torch.Tensor | None:
        """Read the target's output embedding, for heads that use it."""
        with Checkpoint(resolve_folder(self._spec.target)) as target:
            found = (name for name in ("lm_head.weight", "model.embed_tokens.weight") if name in target)
            name = next(found, None)
            return None if name is None else target.read(name)

    def _eagle(self, method: Method) -> Drafter:
        from outrider.drafter_service.head_drafters.eagle_drafter import HeadForward
        from outrider.drafter_service.head_drafters.head_runner import HeadRunner, load_heads
        from outrider.drafter_service.heads.switched import SwitchedHeads

        is_with_target = method is Method.MTP and (self._spec.model is None or bool(self._config.methods))
        model = self._spec.target if self._spec.model is None or is_with_target else self._spec.model
        paths = self._config.models or (model.path,)

        def load(folders: Sequence[Path], model: ModelConfig) -> SwitchedHeads:
            return load_heads(
                method.value,
                folders,
                model,
                target=folders[0] if is_with_target else resolve_folder(self._spec.target),
                num_target_layers=self._spec.num_target_layers(),
            )

        heads = load([resolve_folder(replace(model, path=path)) for path in paths], model)
        runner = HeadRunner.sized_by(heads, model)
        runner.capture()
        again = with_dtype(model, runner.dtype)
        self._weights.keep_head(heads.first, lambda folder: load([folder], again).first)
        return PagedDrafter(HeadForward(runner, self._rules), num_ahead_branches=self._num_ahead_branches)

    def _dflash(self) -> Drafter:
        from outrider.drafter_service.heads.dflash import DFlashHead
        from outrider.drafter_service.models.dflash_drafter import DFlashModel, load_dflash_head

        def load(folder: Path, model: ModelConfig) -> DFlashHead:
            target, num_layers = resolve_folder(self._spec.target), self._spec.num_target_layers()
            return load_dflash_head(folder, model, target=target, num_target_layers=num_layers)

        assert self._spec.model is not None, "the drafter has no checkpoint"
        head = load(self._head_folder(), self._spec.model)
        again = with_dtype(self._spec.model, head.embed_tokens.weight.dtype)
        self._weights.keep_head(head, lambda folder: load(folder, again))
        return PagedDrafter(CanvasForward(DFlashModel.sized_by(head, self._spec.model), self._rules))

    def _plugin(self) -> Drafter:
        name, options = self._config.plugin, json.loads(self._config.plugin_config or "{}")
        context = PluginContext(
            name=name,
            options=MappingProxyType(options),
            num_speculative_tokens=self._config.num_speculative_tokens,
            num_tree_nodes=self._config.num_tree_nodes,
            seed=derive_seed(self._spec.sampling_seed, f"plugin {name}"),
            device=str(self._device),
            target=str(resolve_folder(self._spec.target)),
            **self._limits,
        )
        return build_plugin(context, installed_plugins() if self._plugins is None else self._plugins)

    def _head_folder(self) -> Path:
        assert self._spec.model is not None, "the head has no checkpoint"
        return resolve_folder(self._spec.model)


def _require_mask_token(mask_token_id: int, vocab_size: int, folder: Path) -> None:
    found = parse_mask_token_id(read_json(folder / CONFIG_NAME), vocab_size)
    if found != mask_token_id:
        raise WeightError(f"{folder / CONFIG_NAME}: the mask token is {found}, the served model's is {mask_token_id}")
