"""`outrider drafters`: its options are the configuration's, and a bad one is named."""

from __future__ import annotations

import pytest

from fakes.command_line import assert_usage_error, invoke
from outrider.cluster.cli.main import main
from outrider.cluster.config.drafters_config import DraftersConfig


def test_every_option_is_a_field_of_the_configuration():
    options = main.commands["drafters"].make_context("drafters", ["some/draft", "--target", "m"]).params
    assert options.pop("draft") == "some/draft"
    assert not options.pop("admin_api_key")
    assert options.keys() <= DraftersConfig.option_fields().keys()
    config = DraftersConfig(**{**options, "draft_model": "some/draft"})
    assert (config.model.model, str(config.num_verifiers), config.grpc_port, config.port) == ("m", "1", 50061, 8061)
    assert config.num_ranks == 1


def test_help_says_what_it_serves():
    result = invoke("drafters", "--help")
    assert result.exit_code == 0
    for text in ("DRAFT", "--target", "--num-drafters", "--link-ssl-certfile", "ngram", "suffix", "eagle3"):
        assert text in result.output, result.output


@pytest.mark.parametrize("arguments", [(), ("d",), ("--target", "m")])
def test_what_is_missing_is_a_usage_error(arguments: tuple[str, ...]):
    assert_usage_error(invoke("drafters", *arguments), "Missing")


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--num-drafters", "0", "draft_model: nothing would draft"),
        ("--num-drafters", "3:1", "num_drafters"),
        ("--num-drafters", "many", "num_drafters"),
        ("--num-speculative-tokens", "0", "draft_model: nothing would draft"),
        ("--num-speculative-tokens", "-1", "num_speculative_tokens"),
        ("--tensor-parallel-size", "0", "draft_tensor_parallel_size"),
        ("--num-engines", "0", "num_verifiers"),
        ("--max-num-seqs", "0", "max_num_seqs"),
        ("--port", "grpc", "--port"),
        ("--dtype", "int4", "--dtype"),
        ("--drafter-resources", "[", "drafter_resources"),
        ("--speculative-config", "{", "--speculative-config"),
        ("--speculative-config", '{"method": "ngam"}', "did you mean 'ngram'"),
        ("--link-ssl-certfile", "c.pem", "link_ssl_"),
    ],
)
def test_a_bad_value_is_a_usage_error_that_names_it(option: str, value: str, said: str):
    assert_usage_error(invoke("drafters", "some/draft", "--target", "m", option, value), said)


@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_a_look_up_by_its_name_is_no_checkpoint(name: str):
    """The error is of another option, so the look-up was taken for what it is."""
    result = invoke("drafters", name, "--target", "m", "--num-engines", "0")
    assert_usage_error(result, "num_verifiers")


@pytest.mark.parametrize("method", ["suffix", "draft_model"])
def test_a_look_up_and_another_method_beside_it_are_one_too_many(method: str):
    result = invoke("drafters", "ngram", "--target", "m", "--speculative-config", f'{{"method": "{method}"}}')
    assert_usage_error(result, "method")


def test_a_drafter_that_is_shipped_for_the_target_goes_by_its_methods_name():
    result = invoke("drafters", "eagle3", "--target", "embedded", "--num-engines", "0")
    assert_usage_error(result, "num_verifiers")
    result = invoke("drafters", "eagle3", "--target", "embedded", "--speculative-config", '{"method": "medusa"}')
    assert_usage_error(result, "method: medusa, where DRAFT is eagle3")
