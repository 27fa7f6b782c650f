"""A peer's process: started with its interpreter, asked line by line, gone again."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

FOLDER = Path(__file__).parent
CLOSE_TIMEOUT_S = 20.0


class PeerError(RuntimeError):
    """A peer that did not start or did not answer; the text ends with what it said last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """An engine in one of its modes."""

    name: str
    script: str  # in this folder
    interpreter: Path | None  # None: this process's own
    options: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a peer made of prompts that ran together."""

    elapsed_s: float
    token_ids: list[list[int]]


class PeerProcess:
    """Started where it is made; `ready_s` is the time from there to its first answer, imports included."""

    def __init__(self, peer: Peer, *, num_threads: int, log: Path, clock: Any) -> None:
        """Raises `PeerError` where it does not get ready."""
        self.name, self._log = peer.name, log
        environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads), "TOKENIZERS_PARALLELISM": "false"}
        command = [
            str(peer.interpreter or sys.executable),
            str(FOLDER / peer.script),
            json.dumps({**peer.options, "num_threads": num_threads}),
        ]
        begin_s = clock()
        self._errors = log.open("w")
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        try:
            self.version: str = self._answer()["version"]
        except PeerError:
            self.close()
            raise
        self.ready_s: float = clock() - begin_s

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Answer:
        """Have prompts run together; each gets exactly `max_tokens` tokens. Raises `PeerError`."""
        assert self._process.stdin is not None
        try:
            ask = {"prompts": [list(prompt) for prompt in prompts], "max_tokens": max_tokens}
            self._process.stdin.write(json.dumps(ask) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise PeerError(self._last_words()) from error
        answer = Answer(**self._answer())
        if [len(tokens) for tokens in answer.token_ids] != [max_tokens] * len(prompts):
            raise PeerError(f"{self.name} did not make {max_tokens} tokens of every prompt")
        return answer

    @property
    def pid(self) -> int:
        return self._process.pid

    def peak_memory_bytes(self) -> int | None:
        """Return the most memory that the process has held at a time; None where it has ended."""
        for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
        return None  # of a process that has ended only its exit status is left

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, with a line unread
            self._process.stdin.close()
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(self._last_words())
        return json.loads(line)

    def _last_words(self) -> str:
        words = self._log.read_text(errors="replace").strip().splitlines()
        return f"{self.name} stopped: {words[-1] if words else 'it said nothing'} (all of it in {self._log})"

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
