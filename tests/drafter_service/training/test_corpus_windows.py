"""Text becomes streams, streams become windows that depend on seed and step alone, and bad input is named."""

import json

import pytest
import torch

from fakes.backend import (
    BRACKETS,
    CALL_ARGUMENTS,
    CALL_TEMPLATES,
    build_tokenizer,
    calls_template,
    chat_of_call,
)
from outrider.drafter_service.training.corpus_windows import (
    TokenStream,
    encode,
    frequent_ids,
    load_corpus,
    read_documents,
)
from outrider.drafter_service.training.shards import Conversation, write_shard

CHAT_TOKENIZER = build_tokenizer(BRACKETS)
TOKENIZER = build_tokenizer("{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}")


def texts_of(documents):
    """Return documents as text, without what opens a plain one."""
    return [TOKENIZER.decode(list(each.token_ids)).removeprefix(TOKENIZER.eos_token) for each in documents]


def numbered(num_tokens):
    return TokenStream(torch.arange(num_tokens, dtype=torch.int32))


def test_documents_come_from_files_folders_and_lines_in_path_order(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.md").write_text("first")
    (tmp_path / "a" / "y.bin").write_bytes(b"\xff\xfe\x00")
    lines = [{"text": "third\u2028"}, {"messages": [{"role": "user", "content": "hi"}]}]
    (tmp_path / "c.jsonl").write_text("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines))
    assert texts_of(read_documents([tmp_path], TOKENIZER)) == ["first", "second", "third\u2028", "[user]hi"]
    assert texts_of(read_documents([tmp_path / "b.txt"], TOKENIZER)) == ["second"]


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


def test_every_text_follows_an_end_of_text_token(tmp_path):
    for name, text in enumerate(["one two", "three", "four"]):
        (tmp_path / f"{name}.txt").write_text(text)
    stream = encode(list(read_documents([tmp_path], TOKENIZER)))
    documents = [text for text in TOKENIZER.decode(stream.token_ids).split(TOKENIZER.eos_token) if text]
    assert sorted(documents) == ["four", "one two", "three"]
    assert stream.token_ids[0] == TOKENIZER.eos_token_id
    assert int((stream.token_ids == TOKENIZER.eos_token_id).sum()) == 3


def test_a_batch_is_a_function_of_seed_and_step_and_reaches_both_ends():
    stream = numbered(12)
    batch = stream.batch(3, rows=200, window=10, seed=0).token_ids
    assert (batch.shape, batch.dtype) == ((200, 10), torch.int64)
    assert set(batch[:, 0].tolist()) == {0, 1, 2}
    assert bool((batch.diff(dim=1) == 1).all())
    assert torch.equal(batch, stream.batch(3, rows=200, window=10, seed=0).token_ids)
    assert not torch.equal(batch, stream.batch(4, rows=200, window=10, seed=0).token_ids)
    assert not torch.equal(batch, stream.batch(3, rows=200, window=10, seed=1).token_ids)


def test_held_out_windows_do_not_overlap_and_cover_the_stream():
    windows = numbered(103).windows(10, limit=4)
    assert windows.token_ids[:, 0].tolist() == [0, 30, 60, 90]
    assert bool(windows.counted.all())
    assert numbered(103).windows(10, limit=99).token_ids.flatten().tolist() == list(range(100))


def test_what_is_held_out_is_not_learnt_from(tmp_path):
    (tmp_path / "text.txt").write_text("a" * 500)
    corpus = load_corpus(TOKENIZER, [tmp_path], [], window=8)
    assert len(corpus.held_out) == 10
    assert len(corpus.training) + len(corpus.held_out) == 501
    assert corpus.prompts == (tuple(corpus.held_out.token_ids[:8].tolist()),)
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


CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "so"},
    {"role": "assistant", "content": "no"},
]


def test_of_a_conversation_the_assistants_tokens_count_alone(tmp_path):
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": CHAT}))
    (document,) = read_documents([tmp_path], CHAT_TOKENIZER)
    said = [token for token, counts in zip(document.token_ids, document.counted, strict=True) if counts]
    assert CHAT_TOKENIZER.decode(said) == "yesno"
    assert CHAT_TOKENIZER.decode(list(document.prompt_ids)) == "[user]hi[assistant]"


@pytest.mark.parametrize("kind", CALL_TEMPLATES)
@pytest.mark.parametrize("arguments", [CALL_ARGUMENTS, json.loads(CALL_ARGUMENTS)])
def test_calls_of_a_conversation_are_written_in_the_templates_form(tmp_path, kind, arguments):
    body, written = CALL_TEMPLATES[kind]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": chat_of_call(arguments)}))
    (document,) = read_documents([tmp_path], build_tokenizer(calls_template(body)))
    assert texts_of([document]) == [f"[user]fox[assistant]{written}"]


def test_arguments_that_no_template_can_walk_are_named_with_their_line(tmp_path):
    (tmp_path / "chat.jsonl").write_text("\n" + json.dumps({"messages": chat_of_call("[")}))
    tokenizer = build_tokenizer(calls_template(CALL_TEMPLATES["walks"][0]))
    with pytest.raises(ValueError, match=r"chat.jsonl:2: tool_calls: function.arguments of 'weather'"):
        list(read_documents([tmp_path], tokenizer))


def test_a_shard_is_read_as_conversations_of_which_answers_count(tmp_path):
    said = [Conversation((1, 2, 3), (4, 5)), Conversation((6,), (7, 8, 9))]
    write_shard(tmp_path / "shard-00000.npz", said)
    documents = list(read_documents([tmp_path], TOKENIZER))
    assert [list(each.token_ids) for each in documents] == [[1, 2, 3, 4, 5], [6, 7, 8, 9]]
    assert [each.prompt_ids for each in documents] == [(1, 2, 3), (6,)]
    stream = encode(documents)
    assert stream.counted.tolist() == [False] * 3 + [True] * 2 + [False] + [True] * 3
    assert stream.starts.tolist() == [0, 5]


def conversations(num, length):
    """Streams of conversations whose tokens are numbered through."""
    tokens = torch.arange(num * length, dtype=torch.int32)
    return TokenStream(tokens, tokens % length >= 2, torch.arange(0, num * length, length))


def test_a_window_begins_with_a_conversation_or_whole_windows_behind():
    batch = conversations(10, 7).batch(0, rows=300, window=7, seed=0)
    assert set(batch.token_ids[:, 0].tolist()) == set(range(0, 64, 7))
    assert batch.counted.tolist() == [[False, False, True, True, True, True, True]] * 300
    far = conversations(2, 50).batch(0, rows=3000, window=7, seed=0).token_ids[:, 0]
    assert set(far.tolist()) == {0, 7, 14, 21, 28, 35, 42, 49, 50, 57, 64, 71, 78, 85, 92}


def test_held_out_windows_of_conversations_begin_with_one():
    windows = conversations(10, 7).windows(9, limit=99)
    assert windows.token_ids[:, 0].tolist() == [0, 14, 28, 42, 56]


def test_whole_conversations_are_held_out_and_their_prompts_known(tmp_path):
    said = [Conversation((number, number), (number,) * 8) for number in range(1, 31)]
    write_shard(tmp_path / "s.npz", said)
    corpus = load_corpus(TOKENIZER, [tmp_path], [], window=15)
    assert len(corpus.held_out) == 20
    assert corpus.held_out.starts.tolist() == [0, 10]
    held = {int(token) for token in corpus.held_out.token_ids}
    assert {prompt[0] for prompt in corpus.prompts} == held
    assert not held & {int(token) for token in corpus.training.token_ids}
    assert sorted(len(prompt) for prompt in corpus.prompts) == [2, 2]
