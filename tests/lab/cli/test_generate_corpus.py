"""`outrider generate-corpus`, run in this process with a tiny target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fakes.backend import BRACKETS, build_tokenizer
from fakes.command_line import invoke
from outrider.drafter_service.training.shards import read_shard
from tiny.models import make_checkpoint


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("corpus") / "target"
    tokenizer = build_tokenizer(BRACKETS)
    make_checkpoint(folder, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    return [str(folder), "--max-model-len", "256", "--kv-cache-memory-bytes", str(4 << 20), "--device", "cpu"]


def test_a_corpus_is_made_and_gone_on_with(target: list[str], tmp_path: Path):
    common = [*target, "--output", str(tmp_path / "corpus"), "--prompts-per-shard", "3", "--max-tokens", "8"]
    result = invoke("generate-corpus", *common, "--num-tokens", "10", "--speculation", "off")
    assert result.exit_code == 0, result.output
    first = (tmp_path / "corpus" / "shard-00000.npz").read_bytes()
    said = list(read_shard(tmp_path / "corpus" / "shard-00000.npz"))
    assert len(said) == 3
    assert all(1 <= len(each.answer_ids) <= 8 for each in said)
    tokenizer = build_tokenizer(BRACKETS)
    assert all(tokenizer.decode(list(each.prompt_ids)).endswith("[assistant]") for each in said)
    num_tokens = sum(len(each.prompt_ids) + len(each.answer_ids) for each in said)
    assert f"{num_tokens:,} tokens in " in result.stdout
    assert "generate-corpus: " in result.stderr, "progress is told to a log, too"
    again = invoke("generate-corpus", *common, "--num-tokens", str(num_tokens + 1), "--speculation", "off")
    assert again.exit_code == 0, again.output
    assert sorted(file.name for file in (tmp_path / "corpus").iterdir()) == ["shard-00000.npz", "shard-00001.npz"]
    assert (tmp_path / "corpus" / "shard-00000.npz").read_bytes() == first


def test_prompts_can_be_given(target: list[str], tmp_path: Path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"kind": "x", "prompt": text}) for text in ("hello", "good day")))
    result = invoke(
        *("generate-corpus", *target, "--output", str(tmp_path / "corpus"), "--prompts", str(file)),
        *("--max-tokens", "4", "--temperatures", "0", "--speculation", "off"),
    )
    assert result.exit_code == 0, result.output
    said = list(read_shard(tmp_path / "corpus" / "shard-00000.npz"))
    texts = [build_tokenizer(BRACKETS).decode(list(each.prompt_ids)) for each in said]
    assert texts == ["[user]hello[assistant]", "[user]good day[assistant]"]
