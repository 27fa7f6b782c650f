"""The embedded pair's corpus is honest about what it holds out, and the shipped pair fits together."""

import json

import pytest
from transformers import AutoTokenizer, LlamaForCausalLM

from outrider.drafter_service.embedded import draft_path, held_out_prompts, target_path
from outrider.lab.embedded import corpus


@pytest.fixture(scope="module")
def split():
    return corpus.load_split()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(target_path())


@pytest.fixture(scope="module")
def pair():
    return LlamaForCausalLM.from_pretrained(target_path()), LlamaForCausalLM.from_pretrained(draft_path())


def test_held_out_files_are_disjoint_from_the_training_files(split):
    trained = {source.path for source in split.training}
    assert {source.path for source in split.held_out} == corpus.read_held_out_list()
    assert trained.isdisjoint(corpus.read_held_out_list())
    assert {source.text for source in split.training}.isdisjoint(source.text for source in split.held_out)


def test_tables_duplicates_and_installed_packages_are_left_out(tmp_path):
    source = "def answer():\n    return 42\n" * 20
    for name in ("a.py", "b.py", "site-packages/c.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    (tmp_path / "encodings").mkdir()
    (tmp_path / "encodings" / "cp1.py").write_text(
        "decoding_table = (\n" + "    '\\x00'  # 0x00 -> NULL\n" * 256 + ")\n"
    )
    (tmp_path / "broken.py").write_bytes(b"# \xff\n" * 100)
    assert [found.path for found in corpus.read_sources(tmp_path)] == ["a.py"]


def test_another_library_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="held-out"):
        corpus.load_split(tmp_path)


def test_the_prompts_are_cut_from_held_out_files(split):
    prompts = held_out_prompts()
    assert len(prompts) == 24
    for prompt in prompts:
        assert 150 <= len(prompt) <= 400
        assert any(prompt in source.text for source in split.held_out), json.dumps(prompt)


@pytest.mark.parametrize(
    "text", ["def f(x):\n\treturn x ** 2\n", "naïve — 漢字 🦦", "\r\n \n\n   trailing  ", "\x00\x7f"]
)
def test_the_tokenizer_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_shipped_pair_has_one_vocabulary(pair, tokenizer):
    target, draft = pair
    assert target.config.vocab_size == draft.config.vocab_size == len(tokenizer) == corpus.VOCAB_SIZE
    assert (target_path() / "tokenizer.json").read_bytes() == (draft_path() / "tokenizer.json").read_bytes()
    for model in pair:
        assert model.config.eos_token_id == model.config.bos_token_id == tokenizer.eos_token_id
