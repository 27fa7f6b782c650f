from __future__ import annotations

import pytest

from outrider.drafter_service.service.methods import METHODS, Kind, Method, methods_of
from outrider.drafter_service.service.speculative_config import (
    MAX_AHEAD_BRANCHES,
    MAX_DRAFT_LENGTH,
    MAX_TREE_NODES,
    Location,
    SpeculativeConfig,
)
from outrider.verifier_service.messages.request import AcceptanceRule

BESIDE = {"location": Location.VERIFIER}
# what some methods must be told
TOLD: dict[Method, dict[str, object]] = {
    Method.HYBRID: {"methods": (Method.NGRAM, Method.SUFFIX)},
    Method.PLUGIN: {"plugin": "theirs"},
}


@pytest.mark.parametrize("method", [method for method in Method if method is not Method.HYBRID])
def test_every_method_stands_by_itself_beside_the_verifier(method: Method):
    config = SpeculativeConfig(method=method, **BESIDE, **TOLD.get(method, {}))
    assert config.all_methods == (method,)
    assert config.needs_checkpoint == (METHODS[method].has_weights and method is not Method.MTP)


@pytest.mark.parametrize("method", Method)
def test_only_what_reads_the_targets_kv_cannot_be_a_pool(method: Method):
    fields = TOLD.get(method, {})
    if method in methods_of(Kind.TARGET):
        with pytest.raises(ValueError, match=f"location: {method} reads the target's own KV"):
            SpeculativeConfig(method=method, **fields)
    else:
        assert SpeculativeConfig(method=method, **fields).location is Location.POOL


@pytest.mark.parametrize("method", Method)
def test_only_whole_models_run_on_several_ranks(method: Method):
    fields = {"method": method, "draft_tensor_parallel_size": 2, **TOLD.get(method, {})}
    if method is Method.HYBRID:
        fields["methods"] = (Method.DRAFT_MODEL, Method.NGRAM)
    if method in methods_of(Kind.MODEL):
        assert SpeculativeConfig(**fields).draft_tensor_parallel_size == 2
        with pytest.raises(ValueError, match="draft_tensor_parallel_size: a drafter in the verifier"):
            SpeculativeConfig(**fields, **BESIDE)
    else:
        location = BESIDE if method in methods_of(Kind.TARGET) else {}
        with pytest.raises(ValueError, match=f"draft_tensor_parallel_size: {method} runs on one rank"):
            SpeculativeConfig(**fields, **location)


def test_a_hybrid_is_what_its_parts_are():
    config = SpeculativeConfig(method=Method.HYBRID, methods=(Method.SUFFIX, Method.EAGLE3))
    assert config.all_methods == (Method.SUFFIX, Method.EAGLE3)
    assert config.needs_checkpoint
    config = SpeculativeConfig(method=Method.HYBRID, methods=(Method.SUFFIX, Method.NGRAM))
    assert not config.needs_checkpoint
    with pytest.raises(ValueError, match="location: sparse"):
        SpeculativeConfig(method=Method.HYBRID, methods=(Method.SUFFIX, Method.SPARSE))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
        ({"num_speculative_tokens": MAX_DRAFT_LENGTH + 1}, "num_speculative_tokens"),
        ({"num_tree_nodes": -1}, "num_tree_nodes"),
        ({"num_tree_nodes": MAX_TREE_NODES + 1}, "num_tree_nodes"),
        ({"tree_method": "bushy"}, "tree_method"),
        ({"draft_sample_method": "maybe"}, "draft_sample_method"),
        ({"draft_tensor_parallel_size": 0}, "draft_tensor_parallel_size"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min"),
        ({"prompt_lookup_min": 6}, "prompt_lookup_min"),
        ({"suffix_decoding_max_tree_depth": 1}, "suffix_decoding_max_tree_depth"),
        ({"suffix_decoding_max_cached_requests": -1}, "suffix_decoding_max_cached_requests"),
        ({"suffix_decoding_max_spec_factor": 0.0}, "suffix_decoding_max_spec_factor"),
        ({"suffix_decoding_min_token_prob": 1.5}, "suffix_decoding_min_token_prob"),
        ({"lookahead_window": 0}, "lookahead_window"),
        ({"lookahead_ngram_size": 1}, "lookahead_ngram_size"),
        ({"exit_layer": 0, "method": Method.EARLY_EXIT, **BESIDE}, "exit_layer"),
        ({"sparse_num_blocks": 1, "method": Method.SPARSE, **BESIDE}, "sparse_num_blocks"),
        ({"state_dtype": "int8"}, "state_dtype"),
        ({"tensor_transport": "pigeon"}, "tensor_transport"),
        ({"vocabulary": "klingon"}, "vocabulary"),
        ({"methods": (Method.NGRAM, Method.SUFFIX)}, "methods belong to the method hybrid"),
        ({"method": Method.HYBRID}, "methods must name two or more"),
        ({"method": Method.HYBRID, "methods": (Method.NGRAM,)}, "methods must name two or more"),
        ({"method": Method.HYBRID, "methods": (Method.NGRAM, Method.HYBRID)}, "methods must name two or more"),
        ({"method": Method.HYBRID, "methods": (Method.NGRAM, Method.NGRAM)}, "methods must name two or more"),
        ({"models": ("a", "b")}, "models: parameter sets"),
        ({"method": Method.EAGLE3, "models": ("a", "b"), "num_tree_nodes": 4}, "num_tree_nodes: parameter sets"),
        ({"method": Method.HYBRID, "methods": (Method.MEDUSA, Method.DRAFT_MODEL)}, "methods: medusa and draft_model"),
        ({"method": Method.HYBRID, "methods": (Method.MTP, Method.MEDUSA)}, "methods: at most one"),
        ({"method": Method.NGRAM, "vocabulary": "text"}, "vocabulary: only a draft model"),
        ({"method": Method.PLUGIN}, "plugin must be the name"),
        ({"plugin": "theirs"}, "plugin: no method here"),
        ({"plugin_config": "{}"}, "plugin_config: no method here"),
        ({"method": Method.PLUGIN, "plugin": "theirs", "model": "m"}, "model: a plug-in"),
        ({"vocabulary": "text", "num_tree_nodes": 4}, "num_tree_nodes: a draft that goes by way of text"),
        ({"rejection_sample_method": AcceptanceRule.BLOCK, "num_tree_nodes": 4}, "rejection_sample_method: block"),
    ],
)
def test_what_cannot_be_is_refused_by_field(fields, text: str):
    with pytest.raises(ValueError, match=text):
        SpeculativeConfig(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_speculative_tokens": MAX_DRAFT_LENGTH, "num_tree_nodes": MAX_TREE_NODES, "tree_method": "top_k"},
        {"prompt_lookup_min": 5, "prompt_lookup_max": 5},
        {"suffix_decoding_max_cached_requests": 0, "suffix_decoding_min_token_prob": 1.0},
        {"method": Method.EAGLE, "models": ("a", "b")},
        {"vocabulary": "intersect", "num_tree_nodes": 4},
        {"method": Method.HYBRID, "methods": (Method.PLUGIN, Method.DRAFT_MODEL), "plugin": "theirs", "model": "m"},
        {"rejection_sample_method": AcceptanceRule.TYPICAL, "num_tree_nodes": 4},
        {"state_dtype": "float16", "tensor_transport": "gloo"},
    ],
)
def test_the_edges_are_inside(fields):
    config = SpeculativeConfig(**fields)
    assert {name: getattr(config, name) for name in fields} == fields


def test_running_ahead_is_for_drafters_with_time_of_their_own():
    assert SpeculativeConfig().num_ahead_branches == METHODS[Method.DRAFT_MODEL].ahead_branches == 8
    assert SpeculativeConfig(ahead_branches=0).num_ahead_branches == 0
    assert SpeculativeConfig(ahead_branches=3).num_ahead_branches == 3
    for head in (Method.EAGLE, Method.EAGLE3, Method.MTP):
        assert SpeculativeConfig(method=head).num_ahead_branches == 0, "nothing says that it pays"
        assert SpeculativeConfig(method=head, ahead_branches=3).num_ahead_branches == 3
    beside: dict[str, object] = {"method": Method.EAGLE3, "location": Location.VERIFIER}
    others: list[dict[str, object]] = [BESIDE, beside, {"method": Method.NGRAM}, {"method": Method.MEDUSA}]
    others.append({"vocabulary": "text"})
    for fields in others:
        assert SpeculativeConfig(**fields).num_ahead_branches == 0
        assert SpeculativeConfig(ahead_branches=0, **fields).num_ahead_branches == 0
        with pytest.raises(ValueError, match="ahead_branches: only draft models"):
            SpeculativeConfig(ahead_branches=1, **fields)
    for number in (-1, MAX_AHEAD_BRANCHES + 1):
        with pytest.raises(ValueError, match="ahead_branches"):
            SpeculativeConfig(ahead_branches=number)
