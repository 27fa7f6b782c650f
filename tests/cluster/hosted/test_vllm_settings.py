"""What operators and clients say, read and refused; without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fakes.hosted.v2_scheduler import Sampling
from outrider.cluster.hosted.drafting import HostRequest
from outrider.cluster.hosted.vllm_settings import (
    CAP_KEY,
    SALT_KEY,
    STORE_KEY,
    UNTRIED_PARALLELISM,
    UntriedVersionError,
    give_out_layers,
    options_of,
    refuse_untried,
    refuse_v2_configuration,
    request_of,
)

# A request's parameters.


def described(*, draft_seeded: bool = False, **parameters: Any) -> HostRequest:
    values: dict[str, Any] = {"ignore_eos": False, "stop_token_ids": [7], "all_stop_token_ids": {2, 7}}
    return request_of(Sampling(**{**values, **parameters}), 3, draft_seeded=draft_seeded)


def test_a_request_is_described_by_its_parameters():
    description = described(max_tokens=16)
    assert (description.num_prompt_tokens, description.max_tokens) == (3, 16)
    assert description.num_speculative_tokens is None
    assert description.stop_token_ids == {2, 7}
    assert described(max_tokens=None).max_tokens > 1 << 20


def test_seeded_requests_get_no_drafts_unless_the_operator_allows_it():
    assert described(temperature=0.7, seed=3).num_speculative_tokens == 0
    assert described(temperature=0.7, seed=3, draft_seeded=True).num_speculative_tokens is None


def test_a_seed_that_decides_nothing_and_sampling_without_one_are_drafted():
    assert described(temperature=0.7).num_speculative_tokens is None
    assert described(seed=3).num_speculative_tokens is None


@pytest.mark.parametrize(
    ("said", "cap"),
    [
        (0, 0),
        (3, 3),
        (2.9, 2),
        ("2", 2),
        (-1, 0),
        (None, None),
        ("none", 0),
        ([2], 0),
        (float("inf"), 0),
        (float("nan"), 0),
    ],
)
def test_a_clients_cap_is_read_and_one_that_is_no_number_harms_only_its_own_drafts(said: Any, cap: int | None):
    """An exception would end everybody's drafts, and for ever after the third."""
    assert described(extra_args={CAP_KEY: said}).num_speculative_tokens == cap
    assert described(extra_args={"other": said}).num_speculative_tokens is None


@pytest.mark.parametrize(
    ("said", "store"),
    [
        *[(value, True) for value in (True, 1, 1.0, "true", "True", "1")],
        *[(value, False) for value in (False, 0, 0.0, "false", "no", "", [1], {}, 2, float("nan"))],
        (None, None),
    ],
)
def test_what_is_no_clear_yes_may_not_be_stored(said: Any, store: bool | None):
    assert described(extra_args={STORE_KEY: said}).store is store
    assert described(extra_args={"other": said}).store is None
    assert described().store is None


def test_a_salt_is_read_whatever_a_client_makes_it_of():
    for said, salt in (("s", "s"), (7, "7"), ("", "")):
        assert described(extra_args={SALT_KEY: said}).cache_salt == salt
    assert described().cache_salt == described(extra_args={"other": "s"}).cache_salt == ""


def test_the_models_end_is_no_stop_token_where_it_is_ignored_but_the_clients_own_are():
    assert described(ignore_eos=True).stop_token_ids == {7}
    assert described(ignore_eos=True, stop_token_ids=None).stop_token_ids == frozenset()


# The options.


def config_with(additional_config: Any) -> Any:
    return SimpleNamespace(additional_config=additional_config)


def test_options_are_of_vllms_additional_config():
    assert options_of(config_with({"outrider": {"pool": "h:1"}, "other": 1})).pool == "h:1"


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({}, "--additional-config must say where the pool is"),
        (None, "--additional-config must say where the pool is"),
        ("outrider", "--additional-config must say where the pool is"),
        ({"outrider": "h:1"}, "--additional-config must say where the pool is"),
        ({"outrider": {}}, "--additional-config: outrider: pool is missing"),
        ({"outrider": {"pol": "h:1"}}, "did you mean 'pool'"),
    ],
)
def test_a_bad_additional_config_is_named(found: Any, said: str):
    with pytest.raises(ValueError, match=said):
        options_of(config_with(found))


# What V2 cannot be run with.


def v2_config(method: str | None = "ngram", *, is_v2: bool = True, is_async: bool = False, **parallel: int) -> Any:
    return SimpleNamespace(
        use_v2_model_runner=is_v2,
        speculative_config=None if method is None else SimpleNamespace(method=method),
        scheduler_config=SimpleNamespace(async_scheduling=is_async),
        parallel_config=SimpleNamespace(**{**dict.fromkeys(UNTRIED_PARALLELISM, 1), **parallel}),
    )


def test_v2_is_taken_as_it_is_meant_to_be_configured():
    refuse_v2_configuration(v2_config())


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (v2_config(is_v2=False), "--worker-cls: this vLLM runs its V1 model runner"),
        (v2_config(None), '"method": "ngram".*not none'),
        (v2_config("ngram_gpu"), '"method": "ngram".*not \'ngram_gpu\''),
        (v2_config("custom_class"), '"method": "ngram".*not \'custom_class\''),
        (v2_config(is_async=True), "--async-scheduling"),
        *((v2_config(**{name: 2}), f"--{name.replace('_', '-')} 2") for name in UNTRIED_PARALLELISM),
    ],
)
def test_what_v2_was_not_written_for_is_refused_by_the_options_name(config: Any, said: str):
    with pytest.raises(ValueError, match=said):
        refuse_v2_configuration(config)


# Versions.


class Owner:
    def method(self, first: int, second: int = 0) -> None:
        raise AssertionError("nobody calls it")


def test_a_version_and_a_method_that_were_tried_are_taken():
    refuse_untried("0.32.4", Owner, {"method": ("self", "first", "second")})


@pytest.mark.parametrize(
    ("version", "parameters", "said"),
    [
        ("0.33.0", {}, "tried with 0.32.x alone"),
        ("0.320.0", {}, "tried with 0.32.x alone"),
        ("", {}, "tried with 0.32.x alone"),
        ("0.32.0", {"method": ("self", "first")}, "method takes"),
        ("0.32.0", {"method": ("self", "second", "first")}, "method takes"),
        ("0.32.0", {"gone": ("self",)}, "Owner has no gone"),
    ],
)
def test_what_was_not_tried_is_refused(version: str, parameters: Any, said: str):
    with pytest.raises(UntriedVersionError, match=said):
        refuse_untried(version, Owner, parameters)


# Layers.


@pytest.mark.parametrize(("taps", "layers"), [((5, -1, 2, 5), (2, 5)), ((0,), (0,)), ((-1,), None), ((), None)])
def test_a_model_gives_out_each_layer_once_in_order_and_the_final_states_anyway(taps: Any, layers: Any):
    given: list[Any] = []
    model = SimpleNamespace(set_aux_hidden_state_layers=given.append)
    runner = SimpleNamespace(get_model=lambda: model, use_aux_hidden_state_outputs=False)
    give_out_layers(runner, taps)
    assert (given, runner.use_aux_hidden_state_outputs) == ([] if layers is None else [layers], layers is not None)
