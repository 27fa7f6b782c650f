"""New weights for a drafter that serves, from a folder of the format that it started from.

A draft model changes as a target does, on all of its ranks. A head is loaded once more by the code that built it,
compared with the one that serves, and copied into its storage, which captured steps read: that needs as much memory
again as the head has.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.engine.learning_messages import SetLearning, TakeTexts
from outrider.drafter_service.observing.engine_learning import EngineLearning
from outrider.drafter_service.service.speculative_config import SpeculativeConfig
from outrider.verifier_service.formats.checkpoint import WeightError
from outrider.verifier_service.messages.engine import Control, ControlResult, UpdateDraftWeights, UpdateWeights
from outrider.verifier_service.model.weights import copy_tensors, require_alike, require_finite
from outrider.verifier_service.refit.rank_weights import BrokenWeightsError


class OwnWeights:
    """The weights of one drafter's own, if it has any; whoever builds the drafter says how they change."""

    def __init__(self, config: SpeculativeConfig, change_model: Callable[[UpdateWeights], int] | None = None) -> None:
        """`change_model` changes the draft model on all ranks (see `RankWeights.change`); None: it cannot change."""
        self._refusal = config.update_refusal
        self._change_model = change_model
        self._change: Callable[[Path], None] | None = None

    def keep_head(self, head: nn.Module, load: Callable[[Path], nn.Module]) -> None:
        """Change a head that serves to what `load` loads."""
        self._change = lambda folder: _reload(head, load, folder)

    def keep_model(self, check: Callable[[Path], None]) -> None:
        """Change the draft model to what is in a folder that `check` lets pass."""

        def change(folder: Path) -> None:
            check(folder)
            if self._change_model is None:
                raise WeightError("this draft model's weights cannot change")
            self._change_model(UpdateWeights(call_id="", folder=str(folder)))

        self._change = change

    def change(self, folder: Path) -> None:
        """Take a folder's weights.

        Raises `WeightError` if they are refused: the old ones stay. Raises `BrokenWeightsError` if some are old and
        some new: drafts are bad then until a whole update succeeds.
        """
        if self._refusal is not None or self._change is None:
            raise WeightError(self._refusal or "this drafter's weights cannot change")
        if not folder.is_dir():
            raise WeightError(f"there is no folder {folder}")
        self._change(folder)


class DrafterControl:
    """What a trainer, or by way of the shell the pool's learner, asks of a drafter between two steps."""

    def __init__(
        self, engine: DraftEngine, weights: OwnWeights | None = None, learning: EngineLearning | None = None
    ) -> None:
        """Without `weights`, they cannot change; without `learning`, no learner is served."""
        self._engine, self._weights, self._learning = engine, weights, learning
        self._num_updates = 0

    def handle(self, message: Control | SetLearning | TakeTexts) -> ControlResult:
        """Do what a message asks, while no step runs."""
        error: str | None = None
        try:
            match message:
                case SetLearning():
                    self._set_learning(message)
                case TakeTexts():
                    self._engine.take_texts(message.samples)
                case _:
                    self._update(message)
        except ValueError as refusal:
            error = str(refusal)
        return ControlResult(call_id=message.call_id, error=error, weight_version=self._engine.weight_version or "")

    def _set_learning(self, message: SetLearning) -> None:
        if self._learning is None:
            raise ValueError("this drafter does not learn")
        self._learning.set(message)

    def _update(self, message: Control) -> None:
        if not isinstance(message, UpdateDraftWeights):
            raise ValueError(f"{type(message).__name__} is for verifiers: a drafter takes UpdateDraftWeights")
        if self._weights is None:
            raise ValueError("this drafter's weights cannot change")
        self._weights.change(Path(message.folder))
        self._num_updates += 1
        version = message.weight_version
        self._engine.take_version(f"draft-{self._num_updates}" if version is None else version)


def _reload(head: nn.Module, load: Callable[[Path], nn.Module], folder: Path) -> None:
    try:
        loaded = load(folder)
    except WeightError:
        raise
    except Exception as error:  # whatever is wrong with the folder, the old weights stay
        raise WeightError(str(error) or repr(error)) from error
    require_alike(head, loaded)
    require_finite(loaded)
    try:
        copy_tensors(head, loaded)
    except Exception as error:
        raise BrokenWeightsError(f"the update broke off while weights were copied: {error}") from error
    del loaded
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what the head was loaded into
