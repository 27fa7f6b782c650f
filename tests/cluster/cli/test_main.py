"""The `outrider` command, run in this process: its help, its usage errors, and `generate` with a tiny pair."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from transformers import PreTrainedTokenizerFast

from outrider.cluster.cli.main import main
from outrider.cluster.config.service_config import ServiceConfig
from tiny.models import make_checkpoint

PROMPT = "the quick brown"


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def verbs(command: click.Command = main, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every command, groups included."""
    yield path
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from verbs(inner, (*path, name))


def leaf_options() -> list[tuple[str, click.Option]]:
    leaves = []
    for path in verbs():
        command: click.Command = main
        for name in path:
            command = command.commands[name]
        leaves += [(" ".join(path), option) for option in command.params if isinstance(option, click.Option)]
    return leaves


def assert_usage_error(result: Result, *named: str) -> None:
    assert result.exit_code == 2, result.output
    assert "Usage:" in result.output
    for text in named:
        assert text in result.output, result.output
    assert "Traceback" not in result.output


def test_the_verbs_are_there():
    assert {("serve",), ("generate",), ("demo",), ("bench", "latency"), ("bench", "throughput")} <= set(verbs())


@pytest.mark.parametrize("path", list(verbs()), ids=lambda path: " ".join(path) or "outrider")
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_every_verb_explains_itself(path: tuple[str, ...], flag: str):
    result = invoke(*path, flag)
    assert result.exit_code == 0, result.output
    assert "Usage:" in result.output
    assert len(result.output.splitlines()) > 3


def test_the_version_is_the_packages():
    result = invoke("--version")
    assert result.exit_code == 0
    assert "0.1.0" in result.output


def test_serve_has_every_option_of_the_configuration_with_the_same_default():
    options = main.commands["serve"].make_context("serve", []).params
    keys = {name: options.pop(name) for name in ("api_key", "api_key_file")}
    assert not any(keys.values())
    fields = {field.name for field in dataclasses.fields(ServiceConfig)}
    assert options.keys() == fields - {"api_key_hashes", "check_integrity"}
    config = ServiceConfig.from_mapping(options)
    # ranges are texts there
    assert dataclasses.replace(config, num_verifiers=1, num_drafters=1, num_gateways=1) == ServiceConfig()


@pytest.mark.parametrize("verb", ["serve", "generate", "demo"])
def test_an_unknown_option_is_refused_by_name(verb: str):
    assert_usage_error(invoke(verb, "--tensor-paralel-size", "2"), "No such option", "--tensor-paralel-size")


def test_an_unknown_verb_is_refused():
    assert_usage_error(invoke("generat"), "No such command")


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [
        ("--tensor-parallel-size", "0", "tensor_parallel_size"),
        ("--draft-tensor-parallel-size", "-1", "draft_tensor_parallel_size"),
        ("--num-speculative-tokens", "-1", "num_speculative_tokens"),
        ("--threads-per-rank", "0", "threads_per_rank"),
        ("--dtype", "float8", "--dtype"),
        ("--device", "tpu", "--device"),
        ("--max-num-seqs", "many", "--max-num-seqs"),
    ],
)
@pytest.mark.parametrize("verb", ["serve", "generate"])
def test_a_bad_value_is_a_usage_error_that_names_it(verb: str, option: str, value: str, field: str):
    assert_usage_error(invoke(verb, option, value), field)


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [
        ("--num-verifiers", "0", "num_verifiers"),
        ("--num-drafters", "-1", "num_drafters"),
        ("--speculation", "sometimes", "--speculation"),
        ("--port", "http", "--port"),
        ("--drafter-pool", "{", "--drafter-pool"),
        ("--drafter-pool", "[1]", "expected a JSON object"),
        ("--drafter-pool", '{"name": "x", "method": "ngam"}', "drafter_pools: x: speculative_config: unknown method"),
    ],
)
def test_a_bad_value_of_serve_is_a_usage_error_that_names_it(option: str, value: str, field: str):
    assert_usage_error(invoke("serve", option, value), field)


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [
        ("--temperature", "-1", "temperature"),
        ("--temperature", "nan", "temperature"),
        ("--top-p", "0", "top_p"),
        ("--top-k", "-1", "top_k"),
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
