"""A pool's versions of its drafter's weights, on disk.

    its state      what serves, what served before, what became of each; replaced atomically
    its versions   a folder of weights for each, in the format that the pool started from; "v0" is the pool's own

A version's folder is written under another name and renamed, and the state names it after that. What a killed process
left half written is removed at the next start. The last three versions that served are kept, and one candidate. The
state holds counts and dates: no text of any request.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from outrider.drafter_service.learning.messages import FIRST_VERSION, DrafterVersion
from outrider.verifier_service.folders import sync

NUM_KEPT = 3  # versions that served, beside the pool's own
MAX_VERSIONS = 32  # versions that status tells of
STATE_NAME, VERSIONS_NAME = "state.json", "versions"
READ_BYTES = 1 << 24
CANDIDATE, SERVES = "candidate", "serves"


@dataclass(slots=True)
class RegistryState:
    """What the state file holds."""

    line: list[str] = field(default_factory=lambda: [FIRST_VERSION.name])  # each replaced the one before; last serves
    is_watched: bool = False  # the last one has just replaced the one before
    next_number: int = 1
    fates: dict[str, str] = field(default_factory=lambda: {FIRST_VERSION.name: SERVES})  # by version, in order
    dates: dict[str, str] = field(default_factory=dict)  # when each was written
    counters: dict[str, float] = field(default_factory=dict)
    origin: str = ""  # digest of the weights that the pool started with


class VersionRegistry:
    """The versions in one folder, which no other process uses: see `own_folder`."""

    def __init__(self, folder: Path, origin: str = "") -> None:
        """Read the folder, if there is one, and remove what is half written. Raises `ValueError` for a bad state.

        `origin`: digest of the weights that the pool starts with. Versions that were trained from others are given up:
        the operator has chosen anew.
        """
        self._folder, self._versions = folder, folder / VERSIONS_NAME
        self._versions.mkdir(parents=True, exist_ok=True)
        self._state = _read(folder / STATE_NAME)
        if self._state.origin != origin:
            self._state.fates |= dict.fromkeys(self._state.line, "given up: the pool starts with other weights")
            self._state.line, self._state.is_watched = [FIRST_VERSION.name], False
            self._state.fates[FIRST_VERSION.name] = SERVES
            self._state.origin = origin
        for name, fate in self._state.fates.items():
            if fate == CANDIDATE:
                self._state.fates[name] = "given up: the learner started anew"
        self._tidy()

    @property
    def serving(self) -> DrafterVersion:
        return self.version(self._state.line[-1])

    @property
    def predecessor(self) -> DrafterVersion | None:
        """The version that served before; None: there is none."""
        return self.version(self._state.line[-2]) if len(self._state.line) > 1 else None

    @property
    def is_watched(self) -> bool:
        """Whether the serving version has just replaced its predecessor."""
        return self._state.is_watched

    @property
    def fates(self) -> dict[str, str]:
        """What became of the last versions, in words, by name in order."""
        return dict(self._state.fates)

    @property
    def counters(self) -> dict[str, float]:
        """Figures that outlive the process; saved with the next change."""
        return self._state.counters

    def version(self, name: str) -> DrafterVersion:
        """Return a version by name."""
        if name == FIRST_VERSION.name:
            return FIRST_VERSION
        return DrafterVersion(name=name, folder=str(self._versions / name))

    def add(self, write: Callable[[Path], None]) -> DrafterVersion:
        """Let `write` write a candidate's folder, and name it. What `write` raises leaves no version."""
        name = f"v{self._state.next_number}"
        self._state.next_number += 1
        self._save()  # the name is never given again
        fresh = self._versions / f".{name}.fresh"
        try:
            write(fresh)
            sync(fresh)
            fresh.rename(self._versions / name)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        self._state.fates[name] = CANDIDATE
        self._state.dates[name] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._save()
        return self.version(name)

    def refuse(self, name: str, fate: str) -> None:
        """Give a candidate up."""
        assert self._state.fates[name] == CANDIDATE, f"{name} is no candidate"
        self._state.fates[name] = fate
        self._save()
        self._tidy()

    def publish(self, name: str) -> None:
        """Serve a candidate, which is watched from now on."""
        assert self._state.fates[name] == CANDIDATE, f"{name} is no candidate"
        self._state.fates[self._state.line[-1]] = f"replaced by {name}"
        self._state.fates[name] = SERVES
        self._state.line.append(name)
        self._state.is_watched = True
        first, *later = self._state.line
        self._state.line = [first, *later[-NUM_KEPT:]]
        self._save()
        self._tidy()

    def settle(self) -> None:
        """End the watch: the serving version stays."""
        self._state.is_watched = False
        self._save()

    def roll_back(self, fate: str) -> None:
        """Serve the version before. Raises `ValueError` if there is none."""
        if len(self._state.line) < 2:
            raise ValueError(f"{self._state.line[-1]} is the first version: there is none before it")
        self._state.fates[self._state.line.pop()] = fate
        self._state.fates[self._state.line[-1]] = SERVES
        self._state.is_watched = False
        self._save()
        self._tidy()

    def save_counters(self) -> None:
        """Save the counters now."""
        self._save()

    def _save(self) -> None:
        for name in list(self._state.fates)[:-MAX_VERSIONS]:
            if name not in self._state.line:
                del self._state.fates[name]
                self._state.dates.pop(name, None)
        partial = self._folder / f".{STATE_NAME}.fresh"
        with partial.open("w") as file:
            file.write(json.dumps(asdict(self._state), indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self._folder / STATE_NAME)

    def _tidy(self) -> None:
        """Remove folders of versions that neither serve nor may serve again, and what is half written."""
        candidates = {name for name, fate in self._state.fates.items() if fate == CANDIDATE}
        for path in self._versions.iterdir():
            if path.name not in candidates | set(self._state.line):
                shutil.rmtree(path, ignore_errors=True)


def digest_of(folder: Path) -> str:
    """Return a digest of a checkpoint's weights."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin")):
        with path.open("rb") as file:
            while part := file.read(READ_BYTES):
                digest.update(part)
    return digest.hexdigest()


def _read(path: Path) -> RegistryState:
    if not path.exists():
        return RegistryState()
    try:
        found: Any = json.loads(path.read_text())
        state = RegistryState(**found)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: not a learner's state: {error}") from error
    missing = [name for name in state.line[1:] if not (path.parent / VERSIONS_NAME / name).is_dir()]
    if missing:
        raise ValueError(f"{path}: the folder of {missing[0]} is missing")
    return state
