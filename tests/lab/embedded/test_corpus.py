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


def test_a_few_percent_of_the_library_are_held_out(split):
    def num_chars(sources):
        return sum(len(source.text) for source in sources)

    assert 0.02 < num_chars(split.held_out) / num_chars(split.library) < 0.06


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


@pytest.mark.parametrize("path", ["test/test_os.py", "unittest/test/support.py", "idlelib/idle_test/mock_tk.py"])
def test_tests_are_told_from_the_library(path):
    assert corpus.Source(path, "").is_test
    assert not corpus.Source("unittest/mock.py", "").is_test


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


def test_streams_begin_every_file_with_the_end_of_text_token(tokenizer):
    sources = [corpus.Source("a.py", "import os\n"), corpus.Source("b.py", "import re\n")]
    stream = corpus.encode(tokenizer, sources)
    assert stream[0] == tokenizer.eos_token_id
    assert (stream == tokenizer.eos_token_id).sum() == 2
    assert sorted(tokenizer.decode(stream).split(corpus.END_OF_TEXT)[1:]) == ["import os\n", "import re\n"]


def test_a_conversation_renders_as_its_messages(tokenizer):
    messages = [{"role": "system", "content": "# Python"}, {"role": "user", "content": "def f():"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "# Python\ndef f():\n"


def test_the_shipped_pair_has_one_vocabulary(pair, tokenizer):
    target, draft = pair
    assert target.config.vocab_size == draft.config.vocab_size == len(tokenizer) == corpus.VOCAB_SIZE
    assert (target_path() / "tokenizer.json").read_bytes() == (draft_path() / "tokenizer.json").read_bytes()
    for model in pair:
        assert model.config.eos_token_id == model.config.bos_token_id == tokenizer.eos_token_id


def test_the_shipped_pair_keeps_its_sizes(pair):
    target, draft = pair
    assert 4_000_000 <= target.num_parameters() <= 8_000_000
    assert draft.num_parameters() <= 800_000
    num_bytes = sum(path.stat().st_size for folder in (target_path(), draft_path()) for path in folder.iterdir())
    assert num_bytes <= 40_000_000
