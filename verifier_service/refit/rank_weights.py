"""Changes of weights on the ranks of a verifier: rank 0 sends each to its followers, then all ranks make it.

    trainer    | broadcast: bucket 1          | bucket 2 |
    every rank | names, dtypes, shapes | host memory: staged, checked | + staged, complete | agree | copy | agree |
    serving    | steps, old weights                                                        | none         | new  |

What fails on one rank before the copy fails on all, and the old weights stay. An error within the copy cannot be
undone: then the model is broken until a whole update succeeds.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

from outrider.verifier_service.formats.checkpoint import StateDictSource, TensorSource, WeightError
from outrider.verifier_service.messages.engine import (
    WEIGHT_CHANGES,
    DestroyWeightsGroup,
    FinishWeights,
    InitWeightsGroup,
    UpdateWeights,
    WeightChange,
)
from outrider.verifier_service.messages.wire import encode
from outrider.verifier_service.model.architectures import resolve_folder
from outrider.verifier_service.model.runner import ModelRunner
from outrider.verifier_service.refit.model_weights import ModelWeights
from outrider.verifier_service.refit.trainer_group import TrainerGroup, dtype_of
from outrider.verifier_service.refit.weight_checks import Checked, WeightChecks, digest_of

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
Received = tuple[dict[str, torch.Tensor], dict[str, Checked]]
_AGAIN = "begin again with /init_weights_update_group"


class BrokenWeightsError(ValueError):
    """An update broke off while weights were copied: some are old and some new."""


@dataclass(slots=True)
class _Pending:
    """A change that has begun."""

    message: WeightChange
    found: Future[Any]  # what was received or read, and found to be weights
    opened: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    missing: tuple[str, ...] = ()  # what an update lacks when this bucket is here


class RankWeights:
    """One rank's side. Rank 0 has a pipe to each follower; its calls are made on all ranks in the same order.

    A change begins, goes on beside steps until it `is_ready`, and is finished between two of them.
    """

    def __init__(self, runner: ModelRunner, followers: Sequence[Connection] = ()) -> None:
        self._runner, self._followers = runner, followers
        self._weights = ModelWeights(runner)
        self._groups: dict[str, tuple[InitWeightsGroup, TrainerGroup]] = {}
        self._staged: dict[str, torch.Tensor] = {}  # of an update that is not complete yet
        self._checks, self._checked = WeightChecks(), dict[str, Checked]()
        self._first = contextlib.ExitStack()  # holds the checkpoint that served first open, until an update succeeds
        self._first_source: TensorSource | None = None
        self._pending: _Pending | None = None
        self.missing: tuple[str, ...] = ()  # what an update lacks that is half here
        self.digest = ""  # of the last update's tensors, in hex, on rank 0; "": none came

    def change(self, message: WeightChange) -> int:
        """Make a change at once: `begin`, then `finish`."""
        self.begin(message)
        return self.finish()

    def begin(self, message: WeightChange) -> None:
        """Begin a change on all ranks. What is wrong with it, `finish` says."""
        assert self._pending is None, "one change at a time"
        self._tell(message)
        self._pending = _Pending(message, Future())
        try:
            self._begin(message, self._pending)
        except Exception as error:  # the other ranks hear of it when all finish
            self._pending.found.set_exception(error)

    @property
    def is_ready(self) -> bool:
        """Whether `finish` waits for nobody but the other ranks."""
        return self._pending is not None and self._pending.found.done()

    def finish(self, *, is_abandoned: bool = False) -> int:
        """Finish the change on all ranks; return how many tensors an update still lacks: 0, the weights are new.

        `is_abandoned`: no more is received. Raises `WeightError` if the change is refused, `BrokenWeightsError` if the
        model is neither old nor new. Waits until the change is ready.
        """
        pending, self._pending = self._pending, None
        assert pending is not None, "no change has begun"
        self._tell(FinishWeights(is_abandoned=is_abandoned))
        if is_abandoned:
            self._leave_all()
        with pending.opened:
            match pending.message:
                case UpdateWeights(folder=None):
                    return self._finish_bucket(pending)
                case UpdateWeights():
                    source, self._checked = self._together(pending.found.result)
                    self._copy(source)
                case InitWeightsGroup(group_name=name):
                    self._or_leave(name, pending.found.result)
                case _:
                    self._together(pending.found.result)
        return 0

    def follower_calls(self) -> dict[type, Callable[[Any], object]]:
        """Return what a follower does with rank 0's messages; see `follow`."""
        calls: dict[type, Callable[[Any], object]] = dict.fromkeys(WEIGHT_CHANGES, self.begin)
        calls[FinishWeights] = lambda message: self.finish(is_abandoned=message.is_abandoned)
        return calls

    # --- what begins ---

    def _tell(self, message: WeightChange | FinishWeights) -> None:
        for follower in self._followers:
            follower.send_bytes(encode(message))

    def _begin(self, message: WeightChange, pending: _Pending) -> None:
        match message:
            case InitWeightsGroup():
                pending.found = _beside(self._join(message).join)
            case DestroyWeightsGroup(group_name=name):
                self._drop_staged()
                self._leave(name)
                pending.found.set_result(None)
            case UpdateWeights(folder=None):
                pending.found = _beside(self._receiving(message, pending))
            case UpdateWeights(folder=folder):
                self._drop_staged()
                source = pending.opened.enter_context(self._opened(Path(folder or "")))
                if missing := self._weights.missing(source):
                    raise WeightError(f"{len(missing)} tensors are missing, {missing[0]!r} among them")
                self._open_first()
                pending.found = _beside(lambda: (source, self._check(source, source.names)))

    @contextlib.contextmanager
    def _opened(self, folder: Path) -> Iterator[TensorSource]:
        if not folder.is_dir():
            raise WeightError(f"there is no folder {folder}")
        self._weights.require_same_model(folder)
        with self._runner.open_checkpoint(folder) as checkpoint:
            yield checkpoint

    def _receiving(self, message: UpdateWeights, pending: _Pending) -> Callable[[], Received]:
        """Return what receives a bucket; raises `WeightError` for one that does not fit, before any rank takes part."""
        if message.group_name not in self._groups:
            raise WeightError(f"there is no weights group {message.group_name!r}: {_AGAIN}")
        if not len(message.names) == len(message.dtypes) == len(message.shapes):
            raise WeightError("names, dtypes and shapes differ in number")
        dtypes = [dtype_of(name) for name in message.dtypes]
        told = {
            name: _without_data(name, shape, dtype)
            for name, shape, dtype in zip(message.names, message.shapes, dtypes, strict=True)
        }
        if len(told) < len(message.names):
            raise WeightError("names: a tensor is named twice")
        pending.missing = self._weights.missing(StateDictSource({**self._staged, **told}))
        self._weights.require_small(told)
        self._open_first()
        group, shapes = self._groups[message.group_name][1], message.shapes

        def receive() -> Received:
            tensors = group.receive(dtypes, shapes, is_flattened=message.is_flattened)
            bucket = dict(zip(message.names, tensors, strict=True))
            return bucket, self._check(StateDictSource(bucket), bucket)

        return receive

    def _open_first(self) -> None:
        """Open what served first, to compare with; a recipe's weights are drawn here, not beside steps."""
        if self._first_source is not None or self.digest or self._runner.group.rank > 0:
            return
        try:
            folder = resolve_folder(self._runner.config)
            self._first_source = self._first.enter_context(self._runner.open_checkpoint(folder))
        except (OSError, ValueError) as error:
            logger.warning("the size of new weights is not compared with the first ones: %s", error)

    def _check(self, source: TensorSource, names: Iterable[str]) -> dict[str, Checked]:
        """Check tensors, on rank 0: all ranks have the same ones."""
        return self._checks.check(source, names, self._first_source) if self._runner.group.rank == 0 else {}

    # --- what is finished ---

    def _finish_bucket(self, pending: _Pending) -> int:
        """Stage a bucket; copy the weights if it was the last. A refusal drops what is staged, and ends the group."""
        message = pending.message
        assert isinstance(message, UpdateWeights)
        try:
            bucket, checked = self._or_leave(message.group_name, pending.found.result)
        except WeightError:
            self._drop_staged()
            raise
        self._staged |= bucket
        self._checked |= checked
        self.missing = pending.missing
        if self.missing:
            return len(self.missing)
        source = StateDictSource(self._staged)
        self._staged = {}
        self._copy(source)
        return 0

    def _copy(self, source: TensorSource) -> None:
        """Copy a source that was found complete. Raises `BrokenWeightsError`."""
        checked, self._checked = self._checked, {}
        try:
            self._together(lambda: self._weights.copy(source))
        except WeightError as error:
            raise BrokenWeightsError(f"the update broke off while weights were copied: {error}") from error
        self._checks.accept(checked)
        self.digest = digest_of(checked)
        self._first_source = None
        self._first.close()
        if self._runner.device.type == "cuda":
            torch.cuda.empty_cache()  # what a layer was read into

    def _drop_staged(self) -> None:
        self._staged, self._checked, self.missing = {}, {}, ()

    # --- groups ---

    def _join(self, message: InitWeightsGroup) -> TrainerGroup:
        """Begin to join a group. The same call again changes nothing; another of this name ends the group there was."""
        self._drop_staged()
        name, rank = message.group_name, message.rank_offset + self._runner.group.rank
        if name in self._groups and _arguments(self._groups[name][0]) == _arguments(message):
            return self._groups[name][1]
        self._leave(name)
        group = TrainerGroup(message, rank, self._runner.device)
        self._groups[name] = message, group
        return group

    def _or_leave(self, name: str, act: Callable[[], Result]) -> Result:
        """Do something on every rank; if it fails on one, all leave the group, and the trainer waits for nobody."""
        try:
            return self._together(act)
        except WeightError:
            self._leave(name)
            raise

    def _leave_all(self) -> None:
        for name in list(self._groups):
            self._leave(name)

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


def _beside(act: Callable[[], Result]) -> Future[Result]:
    """Do something on a thread that holds up neither steps nor the end of the process."""
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(act())
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True, name="weights").start()
    return done


def _without_data(name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor that has only shape and dtype; raises `WeightError` for a shape that no tensor has."""
    try:
        return torch.empty(tuple(shape), dtype=dtype, device="meta")
    except RuntimeError as error:
        raise WeightError(f"shapes: {name!r} cannot have the shape {tuple(shape)}") from error
