from __future__ import annotations

import pytest

from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.config.speculative_options import UNSERVED_KEYS, parse_speculative_config, split_options
from outrider.drafter_service.service.speculative_config import Location, Method, SpeculativeConfig
from outrider.verifier_service.messages.request import AcceptanceRule


def test_nothing_said_is_the_default():
    assert parse_speculative_config({}) == SpeculativeConfig()


def test_every_value_reaches_its_field_as_its_type():
    parsed = parse_speculative_config(
        {
            "method": "hybrid",
            "methods": ["suffix", "eagle3"],
            "location": "verifier",
            "num_tree_nodes": "12",
            "rejection_sample_method": "typical",
            "suffix_decoding_max_spec_factor": 2,
        }
    )
    assert parsed == SpeculativeConfig(
        method=Method.HYBRID,
        methods=(Method.SUFFIX, Method.EAGLE3),
        location=Location.VERIFIER,
        num_tree_nodes=12,
        rejection_sample_method=AcceptanceRule.TYPICAL,
        suffix_decoding_max_spec_factor=2.0,
    )


@pytest.mark.parametrize(
    ("name", "method"),
    [("pard", Method.PARALLEL_DRAFT), ("mtp_eagle", Method.MTP), ("draft", Method.DRAFT_MODEL)],
)
def test_other_names_of_methods_are_known(name: str, method: Method):
    assert parse_speculative_config({"method": name}).method is method


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"methd": "ngram"}, r"unknown key 'methd'.*'method'"),
        ({"num_spec_tokens": 3}, r"unknown key 'num_spec_tokens'.*'num_speculative_tokens'"),
        ({"method": "eagel3"}, r"unknown method 'eagel3'.*'eagle3'"),
        ({"method": 7}, "method must be draft_model, ngram"),
        ({"method": None}, "method must be draft_model, ngram"),
        ({"method": ["ngram"]}, "method must be draft_model, ngram"),
        ({"num_tree_nodes": "many"}, "num_tree_nodes: .*integer"),
        ({"num_tree_nodes": 1.5}, "num_tree_nodes: "),
        ({"location": "moon"}, "location must be pool or verifier"),
        ({"method": "hybrid", "methods": ["suffix", "eagel"]}, "methods: "),
        ({"num_tree_nodes": 999}, "num_tree_nodes must be at most 256"),
        ({"method": "sparse"}, "location: sparse reads"),
    ],
)
def test_errors_name_the_key(values, text: str):
    with pytest.raises(ValueError, match=f"^speculative_config: .*{text}"):
        parse_speculative_config(values)


def theirs() -> set[str]:
    return {"bigram", "tri-gram", "ngram"}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"method": "bigram"}, {"method": Method.PLUGIN, "plugin": "bigram"}),
        ({"method": "plugin", "plugin": "bigram"}, {"method": Method.PLUGIN, "plugin": "bigram"}),
        ({"method": "plugin", "plugin": "ngram"}, {"method": Method.PLUGIN, "plugin": "ngram"}),
        ({"method": "ngram"}, {"method": Method.NGRAM}),
        (
            {"method": "hybrid", "methods": ["suffix", "tri-gram"]},
            {"method": Method.HYBRID, "methods": (Method.SUFFIX, Method.PLUGIN), "plugin": "tri-gram"},
        ),
        (
            {"method": "bigram", "plugin_config": {"b": [1, {"d": None}], "a": 2}},
            {"method": Method.PLUGIN, "plugin": "bigram", "plugin_config": '{"a": 2, "b": [1, {"d": null}]}'},
        ),
    ],
)
def test_a_method_that_is_none_of_ours_is_a_plug_in(values, expected):
    parsed = parse_speculative_config(values, theirs)
    assert parsed == SpeculativeConfig(**expected)
    assert hash(parsed) == hash(SpeculativeConfig(**expected))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"method": "bigarm"}, r"unknown method 'bigarm'; did you mean 'bigram'\? .*group outrider\.drafters"),
        ({"method": "eagel3"}, r"unknown method 'eagel3'; did you mean 'eagle3'\?"),
        ({"method": "plugin", "plugin": "bigarm"}, "plugin: unknown method 'bigarm'.*'bigram'"),
        ({"method": "hybrid", "methods": ["suffix", "bigarm"]}, "methods: unknown method 'bigarm'.*'bigram'"),
        ({"method": "hybrid", "methods": ["bigram", "tri-gram"]}, "plugin: at most one, not bigram and tri-gram"),
        ({"method": "bigram", "plugin": "tri-gram"}, "plugin: at most one"),
        ({"method": "plugin"}, "plugin must be the name"),
        ({"method": "plugin", "plugin": 7}, "plugin: .*string"),
        ({"method": ["bigram"], "plugin": "bigram"}, "method must be draft_model, ngram"),
        ({"method": "suffix", "plugin": "bigram"}, "plugin: no method here is a plug-in"),
        ({"method": "bigram", "plugin_config": ["a"]}, "plugin_config must be an object"),
        ({"method": "bigram", "plugin_config": {"a": float("nan")}}, "plugin_config: "),
        ({"method": "bigram", "plugin_config": {"a": {1}}}, "plugin_config: .*not JSON"),
    ],
)
def test_what_is_wrong_with_a_plug_in_is_said(values, text: str):
    with pytest.raises(ValueError, match=f"^speculative_config: .*{text}"):
        parse_speculative_config(values, theirs)


def test_nobody_looks_for_plug_ins_where_every_method_is_ours():
    def looked() -> set[str]:
        raise AssertionError

    assert parse_speculative_config({"method": "pard"}, looked).method is Method.PARALLEL_DRAFT


@pytest.mark.parametrize("key", sorted(UNSERVED_KEYS))
def test_vllms_other_keys_are_refused_by_name(key: str):
    with pytest.raises(ValueError, match=f"'{key}' is not supported"):
        parse_speculative_config({key: 1})


def test_options_of_their_own_are_parted_from_the_rest():
    options, rest = split_options(
        {"model": "m", "num_speculative_tokens": 5, "draft_tensor_parallel_size": 2, "method": "eagle3", "x": 1}
    )
    assert options == {"draft_model": "m", "num_speculative_tokens": 5, "draft_tensor_parallel_size": 2}
    assert rest == {"method": "eagle3", "x": 1}
    assert split_options({}) == ({}, {})


@pytest.mark.parametrize("value", [True, 1.5, None, ["m"]])
@pytest.mark.parametrize("key", ["model", "num_speculative_tokens", "draft_tensor_parallel_size"])
def test_options_are_text_or_whole_numbers(key: str, value):
    with pytest.raises(ValueError, match=f"'{key}' must be text or a whole number"):
        split_options({key: value})


def test_vllms_table_by_batch_size_pins_the_routers_lengths():
    rows = [[1, 4, 3], [5, 64, 0]]
    config = ServiceConfig(speculative_config={"num_speculative_tokens_per_batch_size": rows})
    assert config.router_policy.draft_length_by_batch_size == ((1, 4, 3), (5, 64, 0))
    with pytest.raises(ValueError, match="draft_length_by_batch_size"):
        ServiceConfig(speculative_config={"num_speculative_tokens_per_batch_size": [[2, 4, 3]]})
