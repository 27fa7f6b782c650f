"""Text becomes streams, streams become windows that depend on seed and step alone, and bad input is named."""

import json

import pytest
import torch

from fakes.backend import build_tokenizer
from outrider.drafter_service.training.corpus_windows import (
    TokenStream,
    encode,
    frequent_ids,
    load_corpus,
    read_documents,
)

TOKENIZER = build_tokenizer("{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}")


def numbered(num_tokens):
    return TokenStream(torch.arange(num_tokens, dtype=torch.int32))


def test_documents_come_from_files_folders_and_lines_in_path_order(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.md").write_text("first")
    (tmp_path / "a" / "y.bin").write_bytes(b"\xff\xfe\x00")
    lines = [{"text": "third"}, {"messages": [{"role": "user", "content": "hi"}]}]
    (tmp_path / "c.jsonl").write_text("\n\n".join(json.dumps(line) for line in lines))
    assert list(read_documents([tmp_path], TOKENIZER)) == ["first", "second", "third", "[user]hi"]
    assert list(read_documents([tmp_path / "b.txt"], TOKENIZER)) == ["second"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", b"\xff\xfe", "x.txt: not UTF-8"),
        ("x.jsonl", b'{"text": "a"}\n{', "x.jsonl:2: not JSON"),
        ("x.jsonl", b'{"prompt": "a"}', "x.jsonl:1: an object with `text` or `messages`"),
        ("x.jsonl", b'["a"]', "x.jsonl:1: an object"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(read_documents([tmp_path / name], TOKENIZER))


def test_a_path_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere: no such file or folder"):
        list(read_documents([tmp_path / "nowhere"], TOKENIZER))


def test_every_document_follows_an_end_of_text_token():
    stream = encode(TOKENIZER, ["one two", "three", "four"], seed=1)
    documents = [text for text in TOKENIZER.decode(stream.token_ids).split(TOKENIZER.eos_token) if text]
    assert sorted(documents) == ["four", "one two", "three"]
    assert stream.token_ids[0] == TOKENIZER.eos_token_id
    assert int((stream.token_ids == TOKENIZER.eos_token_id).sum()) == 3


def test_a_batch_is_a_function_of_seed_and_step_and_reaches_both_ends():
    stream = numbered(12)
    batch = stream.batch(3, rows=200, window=10, seed=0)
    assert (batch.shape, batch.dtype) == ((200, 10), torch.int64)
    assert set(batch[:, 0].tolist()) == {0, 1, 2}
    assert bool((batch.diff(dim=1) == 1).all())
    assert torch.equal(batch, stream.batch(3, rows=200, window=10, seed=0))
    assert not torch.equal(batch, stream.batch(4, rows=200, window=10, seed=0))
    assert not torch.equal(batch, stream.batch(3, rows=200, window=10, seed=1))


def test_held_out_windows_do_not_overlap_and_cover_the_stream():
    windows = numbered(103).windows(10, limit=4)
    assert windows[:, 0].tolist() == [0, 30, 60, 90]
    assert numbered(103).windows(10, limit=99).flatten().tolist() == list(range(100))


def test_what_is_held_out_is_not_learnt_from(tmp_path):
    (tmp_path / "text.txt").write_text("a" * 500)
    corpus = load_corpus(TOKENIZER, [tmp_path], [], window=8)
    assert len(corpus.held_out) == 10
    assert len(corpus.training) + len(corpus.held_out) == 501
    (tmp_path / "other.txt").write_text("b" * 20)
    corpus = load_corpus(TOKENIZER, [tmp_path / "text.txt"], [tmp_path / "other.txt"], window=8)
    assert (len(corpus.training), len(corpus.held_out)) == (501, 21)


@pytest.mark.parametrize("option", ["--text", "--held-out"])
def test_too_little_text_is_named(tmp_path, option):
    (tmp_path / "long.txt").write_text("a" * 100)
    (tmp_path / "short.txt").write_text("b" * 5)
    text, held_out = ("short", "long") if option == "--text" else ("long", "short")
    with pytest.raises(ValueError, match=f"{option}: 6 tokens are less than one window of 8"):
        load_corpus(TOKENIZER, [tmp_path / f"{text}.txt"], [tmp_path / f"{held_out}.txt"], window=8)


def test_the_most_frequent_ids_come_in_ascending_order_and_unseen_ones_fill_up():
    stream = TokenStream(torch.tensor([7, 7, 7, 2, 2, 5], dtype=torch.int32))
    assert frequent_ids(stream, 9, 2).tolist() == [2, 7]
    assert frequent_ids(stream, 9, 5).tolist() == [0, 1, 2, 5, 7]


def test_the_digest_tells_texts_apart():
    assert numbered(9).digest() == numbered(9).digest() != numbered(8).digest()
