"""Build the configured drafter, in the process where it runs."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import EntryPoint
from pathlib import Path

import torch

from outrider.drafter_service.engine.drafter import Drafter
from outrider.drafter_service.engine.tree_growth import DraftRules, TreeConfig
from outrider.drafter_service.service.drafter_spec import DrafterSpec
from outrider.drafter_service.service.methods import METHODS
from outrider.drafter_service.service.own_weights import OwnWeights
from outrider.drafter_service.target.target_view import TargetView
from outrider.verifier_service.engine.runners import Runner
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
    return METHODS[spec.speculative.method].build(Making(spec, runner, view, plugins, rng, weights))


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
        self._state_width: int = description.hidden_size
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

    def require_width(self, folder: Path, width: int) -> None:
        """Raise `ValueError` unless a head reads states as wide as the target's."""
        if width != self._state_width:
            raise ValueError(f"{folder}: it reads states of width {width}, the target's have {self._state_width}")
