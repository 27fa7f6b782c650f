"""The histories of rollouts: which responses belong together, and those that a request brings with it."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

_PROMPT, _KEY = "prompt", "key"


@dataclass(frozen=True, slots=True, kw_only=True)
class PastResponse:
    """A response that ended elsewhere. Raises `ValueError` naming the field out of range."""

    token_ids: tuple[int, ...]
    # How many versions of the weights have come since. Not their names: a drafter that was not there when they came
    # cannot put names in order.
    age: int = 0

    def __post_init__(self) -> None:
        if self.age < 0:
            raise ValueError("age must be 0 or positive")


def prompt_hash(prompt_token_ids: Sequence[int]) -> str:
    """Return the hash by which a prompt's history is found, in hex."""
    return hashlib.blake2b(array("i", prompt_token_ids).tobytes(), digest_size=16).hexdigest()


def filed_under(history_key: str | None, prompt_token_ids: Sequence[int], partition: str = "") -> str:
    """Return the key of a response's history; "": none.

    A request's own key is never that of a prompt. `partition`: without spaces; in another one all keys are others.
    """
    if history_key is None:
        return filed_under_hash(prompt_hash(prompt_token_ids), partition)
    return f"{partition} {_KEY} {history_key}" if history_key else ""


def filed_under_hash(prompt_hash: str, partition: str = "") -> str:
    """Return the key of a prompt's history."""
    return f"{partition} {_PROMPT} {prompt_hash}"


def name_of(key: str) -> dict[str, str]:
    """Return what a history's key was made of: a `prompt_hash` or a `history_key`, and a `partition` if it has one."""
    partition, kind, name = key.split(" ", 2)
    own = {"partition": partition} if partition else {}
    return {("prompt_hash" if kind == _PROMPT else "history_key"): name, **own}
