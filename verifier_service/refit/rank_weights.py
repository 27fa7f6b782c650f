"""Changes of weights on the ranks of a verifier: rank 0 sends each to its followers, then all ranks make it.

    trainer    | broadcast: bucket 1 | bucket 2 |
    every rank | host memory: staged | + staged, complete | agree | copy | agree |
    serving    | old weights                                              | new  |

What fails on one rank before the copy fails on all, and the old weights stay. An error within the copy cannot be
undone: then the model is broken until a whole update succeeds.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import torch

from outrider.verifier_service.messages.engine import DestroyWeightsGroup, InitWeightsGroup, UpdateWeights, WeightChange
from outrider.verifier_service.messages.wire import encode
from outrider.verifier_service.model.runner import ModelRunner
from outrider.verifier_service.model.weights import StateDictSource, TensorSource, WeightError
from outrider.verifier_service.refit.model_weights import ModelWeights
from outrider.verifier_service.refit.trainer_group import TrainerGroup, dtype_of

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class BrokenWeightsError(ValueError):
    """An update broke off while weights were copied: some are old and some new."""


class StagedWeights(StateDictSource):
    """Whole tensors in host memory, of an update that is not complete yet."""

    def __init__(self) -> None:
        self._staged: dict[str, torch.Tensor] = {}
        super().__init__(self._staged)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor; one of the same name is replaced."""
        self._staged[name] = tensor


class RankWeights:
    """One rank's side. Rank 0 has a pipe to each follower; `change` must be called on all ranks in the same order."""

    def __init__(self, runner: ModelRunner, followers: Sequence[Connection] = ()) -> None:
        self._runner, self._followers = runner, followers
        self._weights = ModelWeights(runner)
        self._groups: dict[str, tuple[InitWeightsGroup, TrainerGroup]] = {}
        self._staged = StagedWeights()

    def change(self, message: WeightChange) -> int:
        """Make a change on all ranks; return how many tensors an update still lacks: 0, the weights are new.

        Raises `WeightError` if it is refused, `BrokenWeightsError` if the model is neither old nor new.
        """
        for follower in self._followers:
            follower.send_bytes(encode(message))
        match message:
            case InitWeightsGroup():
                self._staged = StagedWeights()
                self._together(lambda: self._join(message))
                return 0
            case DestroyWeightsGroup(group_name=name):
                self._staged = StagedWeights()
                self._together(lambda: self._leave(name))
                return 0
            case UpdateWeights(folder=None):
                return self._update_from_group(message)
        return self._update_from_folder(message)

    def update_weights(self, source: TensorSource) -> None:
        """Take the weights of a source that has all of them, on all ranks. Raises as `change`."""
        missing = self._together(lambda: self._weights.missing(source))
        if missing:
            raise WeightError(f"{len(missing)} tensors are missing, {missing[0]!r} among them")
        self._copy(source)

    def _copy(self, source: TensorSource) -> None:
        """Copy a source that was found complete. Raises `BrokenWeightsError`."""
        try:
            self._together(lambda: self._weights.copy(source))
        except WeightError as error:
            raise BrokenWeightsError(f"the update broke off while weights were copied: {error}") from error
        if self._runner.device.type == "cuda":
            torch.cuda.empty_cache()  # what a layer was read into

    def _update_from_folder(self, message: UpdateWeights) -> int:
        self._staged = StagedWeights()
        with contextlib.ExitStack() as stack:
            self.update_weights(self._together(lambda: stack.enter_context(self._opened(Path(message.folder or "")))))
        return 0

    @contextlib.contextmanager
    def _opened(self, folder: Path) -> Iterator[TensorSource]:
        if not folder.is_dir():
            raise WeightError(f"there is no folder {folder}")
        self._weights.require_same_model(folder)
        with self._runner.open_checkpoint(folder) as checkpoint:
            yield checkpoint

    def _update_from_group(self, message: UpdateWeights) -> int:
        """Receive a bucket; copy the weights if it was the last. A refusal drops what is staged."""
        staged, self._staged = self._staged, StagedWeights()
        for name, tensor in zip(message.names, self._together(lambda: self._receive(message)), strict=True):
            staged.add(name, tensor)
        if missing := self._together(lambda: self._weights.missing(staged)):
            self._staged = staged
            return len(missing)
        self._copy(staged)
        return 0

    def _receive(self, message: UpdateWeights) -> list[torch.Tensor]:
        """Take part in a bucket's broadcasts. A failure ends the group, so that the trainer does not wait for us."""
        if message.group_name not in self._groups:
            raise WeightError(f"there is no weights group {message.group_name!r}")
        if not len(message.names) == len(message.dtypes) == len(message.shapes):
            raise WeightError("names, dtypes and shapes differ in number")
        group = self._groups[message.group_name][1]
        try:
            dtypes = [dtype_of(name) for name in message.dtypes]
            return group.receive(dtypes, message.shapes, is_flattened=message.is_flattened)
        except Exception:
            self._leave(message.group_name)
            raise

    def _join(self, message: InitWeightsGroup) -> None:
        """Join a group. The same call again changes nothing; another of this name ends the group that there was."""
        name, rank = message.group_name, message.rank_offset + self._runner.group.rank
        if name in self._groups and _arguments(self._groups[name][0]) == _arguments(message):
            return
        self._leave(name)
        self._groups[name] = message, TrainerGroup(message, rank, self._runner.device)

    def _leave(self, name: str) -> None:
        if name in self._groups:
            self._groups.pop(name)[1].close()

    def _together(self, act: Callable[[], Result]) -> Result:
        """Do something on every rank; raise `WeightError` on all if it fails on one."""
        error, results = None, []
        try:
            results = [act()]
        except Exception as caught:  # whatever it is, the other ranks wait to hear of it
            error = caught
            logger.warning("a change of weights fails on rank %d: %r", self._runner.group.rank, caught)
        is_done = self._runner.group.all_reduce_min(len(results)) == 1
        if error is not None:
            raise error if isinstance(error, WeightError) else WeightError(str(error) or repr(error)) from error
        if not is_done:
            raise WeightError("another rank has failed")
        return results[0]


def _arguments(message: InitWeightsGroup) -> tuple[object, ...]:
    """Return what two calls of one trainer have in common."""
    where = (message.master_address, message.master_port, message.group_name, message.backend)
    return *where, message.rank_offset, message.world_size
