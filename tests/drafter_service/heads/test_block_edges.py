"""DSpark and DFlash2: read from the `speculators` library's format, and drafting as they are defined."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from exactness.drafter_cells import Bench
from fakes.drafter_play import ask_of, draft_of
from outrider.drafter_service.heads.dflash import DFlashHead
from outrider.drafter_service.heads.head_layer import HeadError
from outrider.drafter_service.models.dflash_drafter import DFlashModel
from tiny.dflash import BLOCK_SIZE, KINDS, MASK_ID, dflash_head, slow_hidden
from tiny.drafters import one_pass_drafter
from tiny.heads import HIDDEN_SIZE, VOCAB_SIZE, states_of
from tiny.models import make_checkpoint

PROMPT = [5, 17, 3, 40, 22, 9, 31]


def make_head(kind: str) -> DFlashHead:
    head = dflash_head(edges=KINDS[kind], sample_from_anchor=kind == "dspark")
    for name, tensor in head.named_parameters():
        if "codebook" in name or "markov" in name:  # large enough to turn the order of tokens
            tensor.mul_(3.0)
    return head


def config_of(head: DFlashHead, kind: str, **changes: Any) -> dict[str, Any]:
    edges = head.config.edges
    return {
        "speculators_model_type": kind,
        "transformer_layer_config": head.config.layer.to_dict(),
        "aux_hidden_state_layer_ids": list(head.config.taps),
        "mask_token_id": MASK_ID,
        "block_size": BLOCK_SIZE,
        "draft_vocab_size": VOCAB_SIZE,
        "sample_from_anchor": head.config.sample_from_anchor,
        "markov_rank": edges.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": edges.has_confidence,
        "confidence_head_with_markov": edges.confidence_reads_token,
        "selector_rank": edges.selector_rank,
        "selector_top_k": edges.selector_top_k,
        "conv_kernel_size": edges.conv_kernel_size,
        "conv_group_size": edges.conv_group_size,
        **changes,
    }


def write(folder: Path, head: DFlashHead, kind: str, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config_of(head, kind, **changes)))
    tensors = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    save_file({**tensors, "t2d": torch.ones(VOCAB_SIZE, dtype=torch.bool)}, folder / "model.safetensors")
    return folder


@pytest.fixture(params=sorted(KINDS))
def read(request: pytest.FixtureRequest, tmp_path: Path) -> DFlashHead:
    return DFlashHead.from_folder(write(tmp_path, make_head(request.param), request.param))


@torch.no_grad()
def slow_law(head: DFlashHead, hidden: torch.Tensor, previous: int) -> tuple[torch.Tensor, float | None]:
    """Return one row's logits after a token and its confidence, by the definition."""
    logits = head.lm_head.weight @ hidden
    if head.config.edges.markov_rank:
        bias = head.markov_head
        code = bias.markov_w1.weight[previous]
        sure = head.confidence_head.proj
        return logits + bias.markov_w2.weight @ code, float(
            torch.sigmoid(sure.weight[0] @ torch.cat([hidden, code]) + sure.bias[0])
        )
    part, law = head.candidate_selector, torch.full_like(logits, float("-inf"))
    context = part.predecessor_codebook[previous] * (part.hidden_projection.weight @ hidden)
    for token_id in logits.sort(descending=True).indices[: part.top_k].tolist():
        law[token_id] = logits[token_id] + context @ part.successor_codebook[token_id]
    return law, None


def slow_chain(head: DFlashHead, tokens: list[int]) -> tuple[list[int], list[float | None]]:
    rows = slow_hidden(head, tokens, states_of(tokens, head))[0 if head.config.sample_from_anchor else 1 :]
    chain, chances = [tokens[-1]], []
    for hidden in rows:
        law, chance = slow_law(head, hidden, chain[-1])
        chain.append(int(law.argmax()))
        chances.append(chance)
    return chain[1:], chances


def test_a_chain_is_what_the_definition_says(read: DFlashHead) -> None:
    model = DFlashModel(read, num_blocks=64, block_size=4, max_model_len=128)
    drafter = one_pass_drafter(model, torch.Generator().manual_seed(0))
    states = states_of(PROMPT, read)
    result = draft_of(drafter, ask_of(PROMPT, ask_id=1, states=states, length=read.config.num_guesses))
    chain, chances = slow_chain(read, PROMPT)
    assert list(result.token_ids) == chain
    alone = slow_hidden(read, PROMPT, states) @ read.lm_head.weight.T
    assert chain != alone[-len(chain) :].argmax(dim=1).tolist(), "or the token before could not show"
    if chances[0] is not None:
        assert result.confidences == pytest.approx(chances, abs=1e-5)


def test_a_tree_knows_each_nodes_own_token(read: DFlashHead) -> None:
    model = DFlashModel(read, num_blocks=64, block_size=4, max_model_len=128)
    drafter = one_pass_drafter(model, torch.Generator().manual_seed(0))
    ask = ask_of(PROMPT, ask_id=1, states=states_of(PROMPT, read), length=3, max_nodes=7)
    result = draft_of(drafter, ask)
    rows = slow_hidden(read, PROMPT, states_of(PROMPT, read))[0 if read.config.sample_from_anchor else 1 :]
    depths: list[int] = []
    for node, parent in enumerate(result.parents):
        depths.append(0 if parent < 0 else depths[parent] + 1)
        previous = PROMPT[-1] if parent < 0 else result.token_ids[parent]
        law, _ = slow_law(read, rows[depths[node]], previous)
        assert result.confidences[node] == pytest.approx(float(law.softmax(0)[result.token_ids[node]]), abs=1e-4)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_drafts_change_no_token(kind: str, bench: Bench, tmp_path: Path) -> None:
    shape = {"vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN_SIZE, "num_hidden_layers": 4}
    make_checkpoint(tmp_path / "target", "qwen3", **shape)
    (tmp_path / "head").mkdir()
    write(tmp_path / "head", make_head(kind), kind)
    options = {"model": str(tmp_path / "target"), "seed": 0, "device": "cpu"}
    speculative = {"method": kind, "model": str(tmp_path / "head"), "num_speculative_tokens": 4}
    bench.require_same_tokens(options, speculative, [PROMPT, PROMPT[1:]])


def test_a_head_of_another_type_is_refused_by_name(tmp_path: Path) -> None:
    head = make_head("dspark")
    with pytest.raises(HeadError, match="markov_head_type: 'gated' is not served"):
        DFlashHead.from_folder(write(tmp_path, head, "dspark", markov_head_type="gated"))
    with pytest.raises(HeadError, match="speculators_model_type: 'peagle', expected one of dflash, dspark, dflash2"):
        DFlashHead.from_folder(write(tmp_path, head, "peagle"))
