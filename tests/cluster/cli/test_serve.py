"""`outrider serve`: its options are the configuration's, and a bad one is named."""

from __future__ import annotations

import pytest

from fakes.command_line import assert_usage_error, invoke
from outrider.cluster.cli.main import main
from outrider.cluster.config.known_models import DEFAULT_MODEL
from outrider.cluster.config.service_config import ServiceConfig


def test_serve_has_every_option_of_the_configuration_with_the_same_default():
    options = main.commands["serve"].make_context("serve", []).params
    assert options.pop("model") == DEFAULT_MODEL  # people get a real one, programs one that is always there
    keys = {name: options.pop(name) for name in ("api_key", "api_key_file", "admin_api_key")}
    assert not any(keys.values())
    others = {"model", "api_key_hashes", "check_integrity", "own_listener"}
    assert options.keys() == ServiceConfig.option_fields().keys() - others
    assert ServiceConfig(**options) == ServiceConfig()


@pytest.mark.parametrize("option", ["--pipeline-parallel-size", "--enable-expert-parallel"])
def test_stages_and_experts_over_devices_are_refused_by_name(option: str):
    """They are simulated alone (docs/results/stages.md)."""
    assert_usage_error(invoke("serve", option, "2"), f"No such option '{option}'")


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
