"""A target's answers on disk: compressed token ids, some hundreds of conversations per file.

A drafter learns its target's distribution best from the target's own text. A shard is a NumPy archive of three arrays,
read without pickle: `token_ids`, all conversations concatenated, uint16 if the vocabulary allows it; `prompt_lengths`
and `answer_lengths`, int32, one per conversation.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SUFFIX = ".npz"
NARROW_VOCABULARY = 1 << 16


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt as rendered by the target's chat template, and the target's answer."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


def write_shard(path: Path, conversations: Sequence[Conversation]) -> None:
    """Write conversations to a file, atomically."""
    token_ids = [token for each in conversations for token in (*each.prompt_ids, *each.answer_ids)]
    narrow = max(token_ids, default=0) < NARROW_VOCABULARY
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez_compressed(
            file,
            token_ids=np.array(token_ids, dtype=np.uint16 if narrow else np.uint32),
            prompt_lengths=np.array([len(each.prompt_ids) for each in conversations], dtype=np.int32),
            answer_lengths=np.array([len(each.answer_ids) for each in conversations], dtype=np.int32),
        )
    os.replace(partial, path)


def read_shard(path: Path) -> Iterator[Conversation]:
    """Yield a shard's conversations. Raises `ValueError` naming a file that is no shard."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            token_ids, prompts, answers = (arrays[name] for name in ("token_ids", "prompt_lengths", "answer_lengths"))
    except (KeyError, ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: no shard of a corpus: {error}") from error
    if len(prompts) != len(answers) or int(prompts.sum() + answers.sum()) != len(token_ids):
        raise ValueError(f"{path}: lengths of {len(prompts)} conversations do not fit {len(token_ids)} tokens")
    start = 0
    for prompt_length, answer_length in zip(prompts.tolist(), answers.tolist(), strict=True):
        middle, end = start + prompt_length, start + prompt_length + answer_length
        yield Conversation(tuple(token_ids[start:middle].tolist()), tuple(token_ids[middle:end].tolist()))
        start = end


def count_tokens(path: Path) -> int:
    """Return the number of tokens of a shard, including prompts."""
    return sum(len(each.prompt_ids) + len(each.answer_ids) for each in read_shard(path))
