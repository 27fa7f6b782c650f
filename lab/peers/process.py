"""A peer's process: started with its interpreter, asked line by line, gone again."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.lab.line_process import LineProcess, ProcessEnded

FOLDER = Path(__file__).parent

PeerError = ProcessEnded  # a peer that did not start or did not answer; the text ends with what it said last


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


class PeerProcess(LineProcess):
    """Started where it is made; `ready_s` is the time from there to its first answer, imports included."""

    def __init__(self, peer: Peer, *, num_threads: int, log: Path, clock: Any) -> None:
        """Raises `PeerError` where it does not get ready."""
        self._log = log
        command = [
            str(peer.interpreter or sys.executable),
            str(FOLDER / peer.script),
            json.dumps({**peer.options, "num_threads": num_threads}),
        ]
        begin_s = clock()
        environment = {"OMP_NUM_THREADS": str(num_threads), "TOKENIZERS_PARALLELISM": "false"}
        with log.open("w") as errors:
            super().__init__(peer.name, command, environment, errors)
        try:
            self.version: str = json.loads(self.hear())["version"]
        except PeerError:
            self.close()
            raise
        self.ready_s: float = clock() - begin_s

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Answer:
        """Have prompts run together; each gets exactly `max_tokens` tokens. Raises `PeerError`."""
        self.tell(json.dumps({"prompts": [list(prompt) for prompt in prompts], "max_tokens": max_tokens}))
        answer = Answer(**json.loads(self.hear()))
        if [len(tokens) for tokens in answer.token_ids] != [max_tokens] * len(prompts):
            raise PeerError(f"{self.name} did not make {max_tokens} tokens of every prompt")
        return answer

    def peak_memory_bytes(self) -> int | None:
        """Return the most memory that the process has held at a time; None where it has ended."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
        return None  # of a process that has ended only its exit status is left

    def _last_words(self) -> str:
        words = self._log.read_text(errors="replace").strip().splitlines()
        return f"{self.name} stopped: {words[-1] if words else 'it said nothing'} (all of it in {self._log})"
