"""What drafters of SmolLM2 learn from: whole shards, and nothing in them of the prompts that figures are taken from."""

from __future__ import annotations

from pathlib import Path

from fakes.grams import grams_of
from outrider.drafter_service.training.shards import Conversation, read_shard

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "models" / "smollm2"
VOCAB_SIZE = 49_152
MIN_TOKENS = 450_000
MAX_BYTES = 4_000_000


def conversations(name: str) -> list[Conversation]:
    return [each for shard in sorted((FOLDER / name).glob("*.npz")) for each in read_shard(shard)]


def test_shards_are_whole_and_in_the_models_vocabulary():
    for name in ("corpus", "held_out"):
        said = conversations(name)
        assert all(each.prompt_ids and each.answer_ids for each in said)
        assert max(max(*each.prompt_ids, *each.answer_ids) for each in said) < VOCAB_SIZE
    assert sum(len(each.prompt_ids) + len(each.answer_ids) for each in conversations("corpus")) > MIN_TOKENS
    assert sum(file.stat().st_size for file in (FOLDER / "corpus").iterdir()) < MAX_BYTES


def test_no_run_of_tokens_of_a_held_out_prompt_was_learnt():
    held_out = [each.prompt_ids for each in conversations("held_out")]
    assert len(held_out) == 64
    opening, closing = num_common(held_out), num_common([prompt[::-1] for prompt in held_out])
    asked = [prompt[opening : len(prompt) - closing] for prompt in held_out]  # what the user says
    assert min(len(words) for words in asked) >= 3
    learnt: set[tuple[int, ...]] = set()
    prompts: set[tuple[int, ...]] = set()
    for each in conversations("corpus"):
        learnt.update(grams_of(each.prompt_ids + each.answer_ids))
        prompts.add(each.prompt_ids)
    shared = [words for words in asked if any(gram in learnt for gram in grams_of(words))]
    assert shared == []
    assert prompts.isdisjoint(held_out), "short prompts have no such run: as a whole they are new as well"


def num_common(prompts: list[tuple[int, ...]]) -> int:
    """Return with how many tokens all of them begin: the template's."""
    columns = zip(*prompts, strict=False)
    return next(index for index, column in enumerate(columns) if len(set(column)) > 1)
