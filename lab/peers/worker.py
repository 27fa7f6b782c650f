"""What every peer's script does: load an engine, say so, then generate what it is asked for. Standard library alone.

One JSON object a line. In: {"prompts": [[token id, ...], ...], "max_tokens": n}, prompts that run together. Out: first
{"version"}, then for each line in {"elapsed_s", "token_ids"}. Whatever else the engine prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Generate = Callable[[list[list[int]], int], list[list[int]]]  # prompts and max_tokens in, the new tokens of each out


def serve(load: Callable[[dict[str, Any]], tuple[str, Generate]]) -> None:
    """Load with the options of the command line, then answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    version, generate = load(json.loads(sys.argv[1]))
    say({"version": version})
    for line in sys.stdin:
        ask = json.loads(line)
        begin_s = time.perf_counter()
        token_ids = generate(ask["prompts"], ask["max_tokens"])
        say({"elapsed_s": time.perf_counter() - begin_s, "token_ids": token_ids})
