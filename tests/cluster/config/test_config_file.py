"""Options from a file and from vLLM's JSON: what they become, who wins, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from outrider.cluster.cli.main import main
from outrider.cluster.cli.options import model_options
from outrider.cluster.config.config_file import read_pools
from outrider.cluster.config.service_config import ServiceConfig
from outrider.drafter_service.service.speculative_config import Method


@click.command()
@model_options
@click.option("--num-drafters", default="1")
@click.option("--api-key", multiple=True)
@click.option("--verifier-resources")
@click.option("--drafter-pool", "drafter_pools", multiple=True, callback=read_pools)
def show(**options: Any) -> None:
    click.echo(json.dumps(options))


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(show, [str(argument) for argument in arguments])


def values(*arguments: str | Path) -> dict[str, Any]:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refusal(*arguments: str | Path) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "serve.yaml"


def test_the_file_gives_values_of_every_type(file: Path):
    file.write_text(
        "model: my/model\ndraft-model: my/draft\nmax_num_seqs: 8\ntrust-remote-code: true\nenable_prefix_caching: no\n"
        "num_drafters: 1:3\napi-key: [a, b]\nverifier_resources: {pool: 1}\n"
        "max_model_len: null\nrevision: 0123\n"
    )
    found = values("--config", file)
    assert (found["model"], found["draft_model"], found["max_num_seqs"]) == ("my/model", "my/draft", 8)
    assert (found["trust_remote_code"], found["enable_prefix_caching"]) == (True, False)
    assert found["num_drafters"] == "1:3"  # not 63
    assert found["api_key"] == ["a", "b"]
    assert json.loads(found["verifier_resources"]) == {"pool": 1}
    assert (found["max_model_len"], found["revision"]) == (None, "0123")
    assert "config" not in found


def test_pools_are_objects_in_a_file_and_json_on_the_command_line(file: Path):
    pool = {"name": "lookup", "method": "ngram", "num_drafters": "1:3"}
    file.write_text("drafter_pool:\n  - name: lookup\n    method: ngram\n    num_drafters: 1:3\n")
    assert values("--config", file)["drafter_pools"] == [pool]
    assert values("--drafter-pool", json.dumps(pool))["drafter_pools"] == [pool]


def test_the_command_line_wins_over_the_file_and_the_file_over_defaults(file: Path):
    file.write_text("model: file\nmax-num-seqs: 8\nblock_size: 32\napi_key: one\n")
    found = values("line", "--config", file, "--max-num-seqs", "9")
    assert (found["model"], found["max_num_seqs"], found["block_size"]) == ("line", 9, 32)
    assert found["max_num_batched_tokens"] == 2048
    assert found["api_key"] == ["one"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("max_num_seq: 8", "unknown option 'max_num_seq'; did you mean 'max_num_seqs'?"),
        ("draft-modle: x", "did you mean 'draft_model'?"),
        ("zzz: 8", "unknown option 'zzz'"),
        ("config: other.yaml", "unknown option 'config'"),
        ("draft-model: a\ndraft_model: b", "'draft_model' is given twice"),
        ("block_size: 8\nblock_size: 16", "'block_size' is given twice"),
        ("max_num_seqs: [1]", "--max-num-seqs"),
        ("max_num_seqs: many", "--max-num-seqs"),
        ("- a\n- b", "expected options"),
        ("a: [", "serve.yaml"),
    ],
)
def test_a_bad_file_is_refused_by_name(file: Path, text: str, named: str):
    file.write_text(text)
    assert named in refusal("--config", file)


def test_a_file_that_is_missing_or_no_text_is_refused(file: Path):
    assert "serve.yaml" in refusal("--config", file)
    file.write_bytes(b"\xff\xfe\x00")
    assert "serve.yaml" in refusal("--config", file)


def test_vllms_object_sets_our_options():
    given = {"method": "draft_model", "model": "d", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 2}
    found = values("target", "-sc", json.dumps(given))
    assert (found["model"], found["draft_model"]) == ("target", "d")
    assert (found["num_speculative_tokens"], found["draft_tensor_parallel_size"]) == (3, 2)


@pytest.mark.parametrize("is_first", [True, False])
def test_the_object_wins_over_the_file_and_loses_to_an_option(file: Path, is_first: bool):
    file.write_text("draft_model: file\nnum_speculative_tokens: 1\nblock_size: 32\n")
    object_ = ["-sc", '{"model": "object", "num_speculative_tokens": 2}']
    config = ["--config", str(file)]
    found = values(*(object_ + config if is_first else config + object_), "--num-speculative-tokens", "7")
    assert (found["draft_model"], found["num_speculative_tokens"], found["block_size"]) == ("object", 7, 32)


def test_the_object_may_stand_in_the_file(file: Path):
    file.write_text("speculative-config:\n  model: d\n  num_speculative_tokens: 5\n")
    found = values("--config", file)
    assert (found["draft_model"], found["num_speculative_tokens"]) == ("d", 5)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"num_speculative_token": 3}, "unknown key 'num_speculative_token'; did you mean 'num_speculative_tokens'?"),
        ({"zzz": 3}, "unknown key 'zzz'"),
        ({"prompt_lookup_max": "three"}, "prompt_lookup_max"),
        ({"quantization": "fp8"}, "'quantization' is not supported"),
        ({"method": "eagle4"}, "unknown method 'eagle4'; did you mean 'eagle'?"),
        ({"method": "draft_modle"}, "did you mean 'draft_model'?"),
        ({"spec_prefill": True}, "unknown key 'spec_prefill': speculative prefill is not served"),
        ({"method": "speculative_prefill"}, "unknown method 'speculative_prefill': speculative prefill is not served"),
        ({"relaxed_topk": 10}, "unknown key 'relaxed_topk': lossy judges are not served"),
        ({"rejection_sample_method": "judge"}, "'judge': lossy judges are not served: they accept tokens"),
        ({"method": "early_exit"}, "location: early_exit reads the target's own KV"),
        ({"method": "ngram", "prompt_lookup_min": 9}, "prompt_lookup_min must be at least 1 and at most"),
        ({"method": "hybrid", "methods": ["suffix"]}, "methods must name two or more"),
        ({"num_speculative_tokens": True}, "'num_speculative_tokens' must be"),
        ({"model": {"path": "x"}}, "'model' must be"),
        ([1], "expected a JSON object"),
    ],
)
def test_what_the_object_cannot_ask_is_refused_by_name(given: object, named: str):
    assert named in refusal("-sc", json.dumps(given))
    if isinstance(given, dict):
        with pytest.raises(ValueError) as refused:  # noqa: PT011 - the text is compared below
            ServiceConfig(speculative_config=given)
        assert named.partition(";")[0].split("'")[-1] in str(refused.value)


def test_keys_that_are_no_options_stay_in_the_object():
    given = {"method": "ngram", "prompt_lookup_max": 3, "num_speculative_tokens": 7}
    found = values("-sc", json.dumps(given))
    assert found["speculative_config"] == {"method": "ngram", "prompt_lookup_max": 3}
    config = ServiceConfig(speculative_config=given)
    assert (config.speculative.method, config.speculative.prompt_lookup_max) == (Method.NGRAM, 3)
    assert config.max_draft_length == 7
    assert ServiceConfig(speculative_config=given, num_speculative_tokens=2).speculative == (
        dataclasses.replace(config.speculative, num_speculative_tokens=2)
    )


def test_an_object_that_is_no_json_is_refused():
    assert "not JSON" in refusal("-sc", "{model: d}")


@pytest.mark.parametrize("verb", ["serve", "generate"])
def test_both_verbs_take_the_file(verb: str, file: Path):
    file.write_text("num_speculative_tokens: -1\n")
    result = CliRunner().invoke(main, [verb, "--config", str(file)])
    assert result.exit_code == 2, result.output
    assert "num_speculative_tokens must be at least 0" in result.output


@pytest.mark.parametrize("option", ["--speculative-prefill", "--spec-prefill-percentage=0.3", "--judge-model=x"])
def test_an_option_of_what_is_lossy_is_refused_with_the_reason(option: str):
    refused = CliRunner().invoke(main, ["serve", option])
    assert refused.exit_code == 2
    assert "not served: " in " ".join(refused.output.split())
    with pytest.raises(ValueError, match="not served: "):
        ServiceConfig(**{option.lstrip("-").partition("=")[0].replace("-", "_"): "x"})


def test_a_wrong_option_or_verb_of_the_command_line_is_answered_with_the_closest():
    assert "--num-drafters" in CliRunner().invoke(main, ["serve", "--num-drafter", "2"]).output
    assert "generate" in CliRunner().invoke(main, ["generat"]).output
    with pytest.raises(ValueError, match="num_drafters"):
        ServiceConfig(**{"num-drafter": 2})
