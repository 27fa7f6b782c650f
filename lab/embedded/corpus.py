"""The embedded pair's corpus: the sources of the Python standard library that runs this code.

    stdlib files ─ tables, duplicates ─┬─ held_out.txt ──────> evaluation, prompts
                                       ├─ the library ──────┐
                                       └─ its tests ────────┴> two token streams, <|endoftext|> before each file

The two training streams stay apart so that training chooses their mixture: tests are more than half of the bytes
and much less varied than the library.
"""

from __future__ import annotations

import hashlib
import logging
import random
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

log = logging.getLogger(__name__)

HELD_OUT_LIST = Path(__file__).with_name("held_out.txt")
END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 2048
MAX_LENGTH = 2048
GENERATED = ("pydoc_data/", "_sysconfigdata", "html/entities.py", "re/_casefix.py", "stringprep.py")  # tables, dumps
MIN_FILE_BYTES = 200
# One base model for chat and completions: a conversation is the text of its messages, one after the other.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


@dataclass(frozen=True, slots=True)
class Source:
    """One file of the standard library: its path below the library's root, and its text."""

    path: str
    text: str

    @property
    def is_test(self) -> bool:
        parts = Path(self.path).parts
        return any(part.startswith("test") or part.endswith(("_test", "tests")) for part in parts)


@dataclass(frozen=True, slots=True)
class Split:
    """The corpus in three disjoint parts."""

    library: tuple[Source, ...]
    tests: tuple[Source, ...]
    held_out: tuple[Source, ...]

    @property
    def training(self) -> tuple[Source, ...]:
        return self.library + self.tests


def stdlib_root() -> Path:
    """Return the folder of the running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def read_sources(root: Path) -> Iterator[Source]:
    """Yield every readable source below `root` in path order, without installed packages, tables and duplicates."""
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if "site-packages" in relative.parts or (text := _read_text(path)) is None:
            continue
        digest = hashlib.sha256(text.encode()).hexdigest()
        source = Source(relative.as_posix(), text)
        if digest not in seen and not _is_table(source):
            seen.add(digest)
            yield source


def _read_text(path: Path) -> str | None:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:  # Lib/test has files that are broken on purpose
        return None
    return text if len(text) >= MIN_FILE_BYTES else None


def _is_table(source: Source) -> bool:
    is_code_page = source.path.startswith("encodings/") and "decoding_table" in source.text
    return is_code_page or source.path.startswith(GENERATED)


def read_held_out_list() -> frozenset[str]:
    """Return the paths that are never trained on."""
    lines = HELD_OUT_LIST.read_text().splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


def load_split(root: Path | None = None) -> Split:
    """Read the standard library and split it by `held_out.txt`.

    Raises:
        FileNotFoundError: no held-out file exists here, so this is another Python than the list was made for.
    """
    root = root or stdlib_root()
    sources, held_out = list(read_sources(root)), read_held_out_list()
    split = Split(
        library=tuple(s for s in sources if s.path not in held_out and not s.is_test),
        tests=tuple(s for s in sources if s.path not in held_out and s.is_test),
        held_out=tuple(s for s in sources if s.path in held_out),
    )
    if not split.held_out:
        raise FileNotFoundError(f"none of the held-out files is below {root}")
    return split


def train_tokenizer(split: Split) -> PreTrainedTokenizerFast:
    """Train the byte-level BPE that target and drafter share; any bytes round-trip."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((source.text for source in split.library), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerFast, sources: Iterable[Source], seed: int = 0) -> Tensor:
    """Return one stream of tokens, the files shuffled and each after an end-of-text token: [num_tokens]."""
    shuffled = sorted(sources, key=lambda source: source.path)
    random.Random(seed).shuffle(shuffled)
    stream: list[int] = []
    for ids in tokenizer([source.text for source in shuffled], add_special_tokens=False)["input_ids"]:
        stream.append(tokenizer.eos_token_id)
        stream.extend(ids)
    return torch.tensor(stream, dtype=torch.int32)
