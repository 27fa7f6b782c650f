"""`outrider generate`, run in this process with a tiny pair."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import Result
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fakes.command_line import assert_usage_error, invoke
from outrider.cluster.cli.usage import usage_errors
from outrider.cluster.offline import generation
from tiny.models import make_checkpoint

PROMPT = "the quick brown"


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [
        ("--temperature", "-1", "temperature"),
        ("--temperature", "nan", "temperature"),
        ("--top-p", "0", "top_p"),
        ("--top-k", "-2", "top_k"),
        ("--min-p", "1.5", "min_p"),
        ("--max-tokens", "0", "max_tokens"),
        ("--seed", str(1 << 63), "seed"),
    ],
)
def test_bad_sampling_is_a_usage_error_that_names_it(option: str, value: str, field: str):
    assert_usage_error(invoke("generate", "--prompt", "x", option, value), field)


def test_generate_wants_a_prompt():
    assert_usage_error(invoke("generate"), "--prompt")


def test_a_prompts_file_must_exist(tmp_path: Path):
    assert_usage_error(invoke("generate", "--prompts", str(tmp_path / "none.jsonl")), "none.jsonl")


# --- generating ---


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Arguments that name a tiny random target with a tokenizer, and a drafter that is often right."""
    folder = tmp_path_factory.mktemp("pair")
    for name in ("target", "draft"):
        make_checkpoint(folder / name, vocab_size=len(tokenizer))
        tokenizer.save_pretrained(folder / name)
    sizes = ["--max-model-len", "128", "--kv-cache-memory-bytes", str(4 << 20), "--device", "cpu", "--ignore-eos"]
    return [str(folder / "target"), "--draft-model", str(folder / "draft"), *sizes]


def records(result: Result) -> list[dict]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_generated_text_is_the_same_with_and_without_a_drafter(pair: list[str], tokenizer: PreTrainedTokenizerFast):
    common = ("generate", *pair, "--prompt", PROMPT, "--max-tokens", "12", "--json")
    (priced,) = records(invoke(*common))
    (drafted,) = records(invoke(*common, "--speculation", "always"))
    (plain,) = records(invoke(*common, "--speculation", "off"))
    (never,) = records(invoke(*common, "--num-speculative-tokens", "0"))
    assert priced["token_ids"] == drafted["token_ids"] == plain["token_ids"] == never["token_ids"]
    assert len(plain["token_ids"]) == 12
    assert plain["prompt_token_ids"] == tokenizer(PROMPT)["input_ids"]
    assert plain["text"] == tokenizer.decode(plain["token_ids"], skip_special_tokens=True)
    assert plain["finish_reason"] == "length"
    assert drafted["metrics"]["speculative_decoding"]["num_accepted_tokens"] > 0
    # a draft model as large as the target does not pay
    counts = [record["metrics"]["speculative_decoding"]["num_draft_tokens"] for record in (plain, priced, drafted)]
    assert counts[0] == 0 <= counts[1] < counts[2]
    text = invoke(*common[:-1])
    assert text.stdout == plain["text"] + "\n"


def test_a_drafter_that_nobody_asks_is_not_loaded(pair: list[str], tmp_path: Path):
    target, *rest = pair
    sizes = rest[2:]  # without --draft-model and its folder
    models = (target, "--draft-model", str(tmp_path))
    common = ("generate", *models, *sizes, "--prompt", PROMPT, "--max-tokens", "4", "--json")
    for off in (["--speculation", "off"], ["--num-speculative-tokens", "0"]):
        (plain,) = records(invoke(*common, *off))
        assert len(plain["token_ids"]) == 4
    assert invoke(*common).exit_code != 0, "there is no model in that folder"


def test_a_seed_makes_sampled_text_repeat(pair: list[str]):
    common = ("generate", *pair, "--prompt", PROMPT, "--max-tokens", "10", "--temperature", "1", "--json")
    (first,) = records(invoke(*common, "--seed", "7"))
    (again,) = records(invoke(*common, "--seed", "7"))
    (other,) = records(invoke(*common, "--seed", "8"))
    assert first["token_ids"] == again["token_ids"] != other["token_ids"]


def test_lines_of_a_file_have_settings_of_their_own_and_an_impossible_one_is_answered(pair: list[str], tmp_path: Path):
    lines = [
        {"prompt": PROMPT, "max_tokens": 3},
        {"prompt_token_ids": [5, 6, 7]},
        {"prompt_token_ids": [5] * 500},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    result = invoke("generate", *pair, "--prompts", str(file), "--max-tokens", "5", "--json")
    answers = {tuple(record["prompt_token_ids"]): record for record in records(result)}
    assert len(answers) == 3
    assert len(answers[5, 6, 7]["token_ids"]) == 5
    assert sorted(len(record["token_ids"]) for record in answers.values()) == [0, 3, 5]
    assert "prompt of 500 tokens" in answers[(5,) * 500]["error"]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ({"prompt": "x", "temprature": 1}, "temprature"),
        ({"prompt": "x", "top_p": 7}, "top_p"),
        ({"prompt": "x", "prompt_token_ids": [1]}, "prompt_token_ids"),
        ({"prompt_token_ids": ["x"]}, "prompt_token_ids"),
        (None, "expected an object"),
    ],
)
def test_a_bad_line_is_a_usage_error_that_names_what_is_wrong(pair: list[str], tmp_path: Path, line, named: str):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(line) + "\n")
    assert_usage_error(invoke("generate", *pair, "--prompts", str(file)), named)


def test_a_prompt_may_be_what_a_user_says(pair: list[str], tokenizer: PreTrainedTokenizerFast, tmp_path: Path):
    file = tmp_path / "chats.jsonl"
    said = [{"role": "user", "content": "the fox"}]
    own = [{"role": "system", "content": "brown"}, *said]
    file.write_text("\n".join(json.dumps({"messages": messages}) for messages in (said, own)))
    common = ("generate", *pair, "--prompts", str(file), "--max-tokens", "3", "--json")
    found = records(invoke(*common, "--chat", "--system", "jumps", "--prompt", "the dog"))
    by_id = {record["request_id"]: tokenizer.decode(record["prompt_token_ids"]) for record in found}
    instructed = [{"role": "system", "content": "jumps"}]
    chats = [[*instructed, {"role": "user", "content": "the dog"}], [*instructed, *said], own]
    assert by_id == {
        f"prompt-{index}": tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        for index, chat in enumerate(chats)
    }
    assert {len(record["token_ids"]) for record in found} == {3}
    alone = records(invoke(*common))  # messages speak for themselves
    assert len(alone) == 2


def test_a_system_message_needs_a_chat(pair: list[str]):
    assert_usage_error(invoke("generate", *pair, "--prompt", PROMPT, "--system", "x"), "--chat")


def test_a_line_may_ask_for_several_outputs(pair: list[str], tmp_path: Path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": PROMPT, "n": 2, "temperature": 1, "seed": 3, "stop": ["\n\n\n"]}))
    found = records(invoke("generate", *pair, "--prompts", str(file), "--max-tokens", "8", "--json"))
    assert [(record["request_id"], record["index"]) for record in found] == [("prompt-0", 0), ("prompt-0", 1)]
    assert found[0]["token_ids"] != found[1]["token_ids"]


def test_texts_come_in_the_prompts_order_and_records_as_they_end(pair: list[str], tmp_path: Path):
    file = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": PROMPT, "max_tokens": 12},
        {"prompt": "fox jumps over", "max_tokens": 2},
        {"prompt_token_ids": [5] * 500},
        {"prompt": PROMPT, "max_tokens": 3},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    common = ("generate", *pair, "--prompts", str(file))
    by_end = records(invoke(*common, "--json"))
    ids = [record["request_id"] for record in by_end]
    assert ids.index("prompt-1") < ids.index("prompt-0"), "the shortest ends first"
    by_id = {record["request_id"]: record.get("error") or record["text"] for record in by_end}
    assert invoke(*common).stdout == "".join(f"{by_id[f'prompt-{number}']}\n" for number in range(4))


def test_who_stops_reading_made_no_error_of_usage():
    with pytest.raises(BrokenPipeError), usage_errors():
        raise BrokenPipeError


def test_a_record_has_the_fields_that_scripts_read(pair: list[str]):
    (record,) = records(invoke("generate", *pair, "--prompt", PROMPT, "--max-tokens", "2", "--json"))
    assert list(record) == ["request_id", "prompt_token_ids", "token_ids", "text", "finish_reason", "metrics"]
    assert record["request_id"] == "prompt-0"
    counters = {"enabled", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "mean_acceptance_length"}
    assert counters <= record["metrics"]["speculative_decoding"].keys()


ENDED = {"text": "", "finish_reason": "stop"}


@pytest.mark.parametrize(
    ("records", "is_chat", "has_template", "is_hinted"),
    [
        ([ENDED], False, True, True),
        ([ENDED], True, True, False),
        ([ENDED], False, False, False),
        ([ENDED, {"text": "a", "finish_reason": "stop"}], False, True, False),
        ([{"text": "", "finish_reason": "length"}], False, True, False),
        ([], False, True, False),
    ],
)
def test_a_model_that_chats_and_ends_at_once_is_told_how_to_be_asked(
    pair: list[str], tmp_path: Path, records: list, is_chat: bool, has_template: bool, is_hinted: bool
):
    folder = tmp_path / "target"
    shutil.copytree(pair[0], folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{{ messages[0].content }}" if has_template else None
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    is_silent = bool(records) and all(generation.ended_at_once(**record) for record in records)
    hint = generation.hint(str(folder), is_chat=is_chat) if is_silent else None
    assert (hint is not None) == is_hinted
