"""What is built for each method, and what the verifier must keep for it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoConfig

from fakes.drafter_play import ask_of
from outrider.drafter_service.engine.paged_drafter import PagedDrafter
from outrider.drafter_service.lookup.lookahead_drafter import LookaheadDrafter
from outrider.drafter_service.lookup.ngram_drafter import NgramDrafter
from outrider.drafter_service.lookup.suffix_drafter import SuffixDrafter
from outrider.drafter_service.service.drafter_spec import (
    DrafterSpec,
    num_scratch_blocks,
    state_taps,
)
from outrider.drafter_service.service.drafters import build_drafter
from outrider.drafter_service.service.hybrid_drafter import HybridDrafter
from outrider.drafter_service.service.methods import METHODS, Kind, Method, methods_of
from outrider.drafter_service.service.speculative_config import Location, SpeculativeConfig
from outrider.drafter_service.target.scratch_blocks import MAX_DRAFTS_TOGETHER, scratch_blocks_per_draft
from outrider.drafter_service.target.self_drafter import SelfDrafter
from outrider.verifier_service.messages.draft import FINAL_TAP
from outrider.verifier_service.model.config import ModelConfig
from tiny.models import VOCAB_SIZE, make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    make_model(num_hidden_layers=4).config.save_pretrained(path)  # nothing here reads a tensor
    return path


def spec_of(folder: Path, *, max_model_len: int | None = None, **speculative: object) -> DrafterSpec:
    target = ModelConfig(path=str(folder), max_model_len=max_model_len, device="cpu")
    config = SpeculativeConfig(location=Location.VERIFIER, **speculative)
    return DrafterSpec(model=target, target=target, speculative=config, sampling_seed=1)


RUNNER = SimpleNamespace(vocab_size=300, max_model_len=128, num_blocks=8, block_size=4)
VIEW = SimpleNamespace(vocab_size=VOCAB_SIZE, max_model_len=99, num_layers=4, block_size=4, scratch_blocks=range(8))


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        (Method.NGRAM, NgramDrafter),
        (Method.SUFFIX, SuffixDrafter),
        (Method.LOOKAHEAD, LookaheadDrafter),
        (Method.EARLY_EXIT, SelfDrafter),
        (Method.SPARSE, SelfDrafter),
        (Method.DRAFT_MODEL, PagedDrafter),
    ],
)
def test_a_method_is_built_as_its_drafter_within_the_targets_limits(folder: Path, method: Method, kind: type):
    drafter = build_drafter(spec_of(folder, method=method, max_model_len=99), runner=RUNNER, view=VIEW)
    assert isinstance(drafter, kind)
    assert drafter.vocab_size == (300 if method is Method.DRAFT_MODEL else VOCAB_SIZE), "the one that it knows"
    if method is Method.DRAFT_MODEL:
        assert drafter._forward._rules.vocab_size == VOCAB_SIZE, "it drafts nothing that the target does not know"
    assert drafter.max_model_len == (128 if method is Method.DRAFT_MODEL else 99)


def test_the_targets_own_context_is_the_limit_where_nothing_is_said(folder: Path):
    assert build_drafter(spec_of(folder, method=Method.NGRAM)).max_model_len == 256


def test_it_drafts_for_a_target_that_another_engine_serves(tmp_path: Path):
    whole = AutoConfig.for_model("llava", text_config={"model_type": "llama", "vocab_size": 96}).to_dict()
    whole["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    spec = spec_of(tmp_path, method=Method.SUFFIX)
    assert (build_drafter(spec).vocab_size, spec.num_target_layers()) == (96, 32)


def test_options_reach_the_drafter(folder: Path):
    drafter = build_drafter(spec_of(folder, method=Method.NGRAM, prompt_lookup_min=3, prompt_lookup_max=4))
    for tokens, num_drafted in (([5, 6, 7, 8, 5, 6], 0), ([4, 5, 6, 7, 8, 4, 5, 6], 2)):
        (result,) = drafter.draft([ask_of(tokens, length=2)], max_num_tokens=1)
        drafter.release(ask_of(tokens, length=2).key)
        assert len(result.token_ids) == num_drafted
    exits = build_drafter(spec_of(folder, method=Method.EARLY_EXIT, exit_layer=3), view=VIEW)
    assert exits._num_layers == 3
    with pytest.raises(ValueError, match="exit_layer"):
        build_drafter(spec_of(folder, method=Method.EARLY_EXIT, exit_layer=4), view=VIEW)
    trees = build_drafter(spec_of(folder, method=Method.SPARSE, tree_method="top_k"), view=VIEW)
    assert trees._rules.trees.method == "top_k"


def test_a_hybrid_looks_up_what_is_free_and_drafts_with_the_rest(folder: Path):
    methods = (Method.EARLY_EXIT, Method.SUFFIX, Method.NGRAM, Method.SPARSE)
    drafter = build_drafter(spec_of(folder, method=Method.HYBRID, methods=methods), view=VIEW)
    assert isinstance(drafter, HybridDrafter)
    assert list(drafter._lookups) == ["suffix", "ngram"]
    assert list(drafter._models) == ["early_exit", "sparse"]


@pytest.mark.parametrize("method", [method for method in Method if method not in (Method.HYBRID, Method.PLUGIN)])
def test_whole_models_are_loaded_and_nothing_else(folder: Path, method: Method):
    assert spec_of(folder, method=method).loads_model == (method in methods_of(Kind.MODEL))


def test_a_hybrid_loads_a_model_where_a_part_does(folder: Path):
    parts = (Method.NGRAM, Method.DRAFT_MODEL)
    assert spec_of(folder, method=Method.HYBRID, methods=parts).loads_model
    assert not spec_of(folder, method=Method.HYBRID, methods=(Method.NGRAM, Method.SUFFIX)).loads_model


@pytest.mark.parametrize("method", [*methods_of(Kind.LOOKUP), *methods_of(Kind.TARGET), *methods_of(Kind.MODEL)])
def test_no_states_are_kept_for_who_reads_none(folder: Path, method: Method):
    assert state_taps(spec_of(folder, method=method)) == ()


@pytest.mark.parametrize("method", sorted({*methods_of(Kind.HEAD)} - {Method.EAGLE3, Method.DFLASH}))
def test_most_heads_read_the_final_state(folder: Path, method: Method):
    assert state_taps(spec_of(folder, method=method)) == (FINAL_TAP,)
    assert state_taps(spec_of(folder, method=Method.HYBRID, methods=(Method.NGRAM, method))) == (FINAL_TAP,)


def test_scratch_blocks_are_for_the_longest_drafts_of_as_many_as_draft_together(folder: Path):
    chain = spec_of(folder, method=Method.EARLY_EXIT, num_speculative_tokens=6)
    assert num_scratch_blocks(chain, 4, 3) == 3 * scratch_blocks_per_draft(6, 4)
    assert num_scratch_blocks(chain, 4, 999) == MAX_DRAFTS_TOGETHER * scratch_blocks_per_draft(6, 4)
    tree = spec_of(folder, method=Method.SPARSE, num_speculative_tokens=6, num_tree_nodes=20)
    assert num_scratch_blocks(tree, 4, 3) == 3 * scratch_blocks_per_draft(20, 4)
    parts = (Method.NGRAM, Method.SPARSE)
    assert num_scratch_blocks(spec_of(folder, method=Method.HYBRID, methods=parts), 4, 1) > 0
    assert num_scratch_blocks(spec_of(folder, method=Method.NGRAM), 4, 3) == 0


@pytest.mark.parametrize(
    ("num_nodes", "block_size", "expected"), [(1, 4, 2), (4, 4, 2), (5, 4, 3), (1, 1, 2), (9, 1, 10)]
)
def test_scratch_of_one_draft_holds_a_partly_filled_block_the_last_token_and_the_drafted(
    num_nodes: int, block_size: int, expected: int
):
    assert scratch_blocks_per_draft(num_nodes, block_size) == expected
    assert expected * block_size >= (block_size - 1) + 1 + num_nodes


def test_every_method_has_a_record_and_the_functions_that_it_speaks_of():
    assert list(METHODS) == list(Method)
    for method in METHODS.values():
        assert callable(method.build)
        assert not method.learns or callable(method.student)
        assert not method.names_taps or callable(method.parse_config)
        assert method.has_weights or not (method.learns or method.names_taps or method.is_in_target or method.has_sets)
