"""`outrider bench gpu` in its tiny shape on a CPU, and the figures that it makes of measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoConfig

from outrider.lab.bench.gpu import GpuResult, gpu, to_markdown
from outrider.lab.bench.gpu_measure import Rate
from outrider.lab.bench.gpu_models import FULL, TINY
from outrider.lab.bench.pairs import streamed_weight_bytes
from outrider.lab.same_tokens import Difference, Tally
from outrider.verifier_service.formats.checkpoint import Shard
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.random_weights import read_recipe, write_recipe
from outrider.verifier_service.model.settled import resolve_dtype

CPU = torch.device("cpu")
TIPPED = Difference(what="prompt 9", place=2, margin=0.001, expected="5 6 7", given="5 6 8")


def rate(streams: int, tokens_per_s: float, acceptance: float | None = None) -> Rate:
    return Rate(streams=streams, tokens_per_s=tokens_per_s, step_s=streams / tokens_per_s, acceptance=acceptance)


def test_figures_of_the_target_alone_and_ratios_to_it():
    result = GpuResult(
        device="a card",
        tensor_parallel_size=1,
        bandwidth=2e12,
        is_bandwidth_published=True,
        step_bytes=int(8e9),
        one_row_s=0.007,
        five_rows_s=0.0077,
        graphs={"num_graphs": 51, "capture_s": 4.5, "num_replayed": 90, "eager": {"many_tokens": 3, "early_exit": 1}},
        rates={
            "off": [rate(1, 125.0), rate(2, 250.0)],
            "in turn": [rate(1, 100.0), rate(2, 125.0)],
            "co-located, cold": [rate(1, 250.0, 0.75), rate(2, 300.0)],
        },
        tallies={"as it is served": Tally(num_answers=64, differences=(TIPPED,))},
    )
    assert result.roofline_share == pytest.approx(0.5)
    assert result.host_s == pytest.approx(0.003), "of the steps that hide nothing"
    lines = to_markdown(result).splitlines()
    assert "| share of the memory roofline, 1 stream | 50% |" in lines
    assert "| forward of 1 row, of 5 | 7.00 ms, 1.10 x |" in lines
    assert "| steps replayed, eager | 90, 4 |" in lines
    assert "| drafted tokens are the plain ones, as it is served | 63 of 64 prompts |" in lines
    assert lines[-2:] == ["| 1 | 125 | 100 | 250 | 0.80 | 2.00 | 75% |", "| 2 | 250 | 125 | 300 | 0.50 | 1.20 | - |"]


def test_the_full_pair_costs_what_it_says(tmp_path: Path):
    sizes = {}
    for name, num_layers in {"target": 32, "draft": FULL.num_draft_layers}.items():
        write_recipe(tmp_path / name, FULL.config_of(num_layers), num_head_layers=4, tail_scale=0.01)
        sizes[name] = streamed_weight_bytes(ModelConfig(path=str(tmp_path / name), dtype="bfloat16"))
    assert sizes["target"] == pytest.approx(15.0e9, rel=0.01)  # 8.03 B parameters but for the embedding, of 0.5 B
    assert sizes["draft"] == pytest.approx(2.8e9, rel=0.01)


def test_tensors_are_the_same_in_target_and_draft_model_and_on_every_rank(tmp_path: Path):
    sources = []
    for name, num_layers in {"target": 4, "draft": 1}.items():
        write_recipe(tmp_path / name, TINY.config_of(num_layers), num_head_layers=1, tail_scale=0.5)
        description = AutoConfig.from_pretrained(tmp_path / name)
        dtype = resolve_dtype("auto", description, CPU)
        sources.append(read_recipe(tmp_path / name, description, dtype=dtype, device=CPU))
    target, draft = sources
    assert target is not None
    assert draft is not None
    assert set(draft.names) < set(target.names)
    assert all(torch.equal(draft.read(name), target.read(name)) for name in draft.names)
    name = "model.layers.{}.mlp.down_proj.weight"
    assert target.read(name.format(1)).std() == pytest.approx(0.5 * target.read(name.format(0)).std().item(), rel=0.05)
    part = target.read(name.format(0), Shard(dim=1, start=32, stop=64))
    assert torch.equal(part, target.read(name.format(0))[:, 32:64])
    assert read_recipe(tmp_path, description, dtype=dtype, device=CPU) is None


def test_the_tiny_shape_runs_on_a_cpu_and_its_drafts_change_no_token(tmp_path: Path):
    path = tmp_path / "gpu.json"
    result = CliRunner().invoke(
        gpu, ["--tiny", "--device", "cpu", "--no-drafter-process", "--json", str(path)], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    figures = json.loads(path.read_text())
    same = {"num_answers": TINY.num_prompts, "differences": [], "may_tip": False}
    assert figures["tallies"] == {"as it is served": same, "float32, at reduced depth": same}
    assert list(figures["rates"]) == ["off", "co-located, cold", "co-located, known"]
    assert "co-located, known: 2 streams" in result.stderr
    assert 0.2 < figures["acceptance"] < 1.0
    assert [own["streams"] for own in figures["rates"]["off"]] == list(TINY.streams)
    assert all(own["tokens_per_s"] > 0 for rates in figures["rates"].values() for own in rates)
    assert figures["graphs"]["num_graphs"] == 0
    assert "| no graphs |" in result.output
