"""A row's bits do not depend on its company where the service says so: every product, and whole models, on every path.

`benchmarks.invariance` measures, each path in a process of its own, for a process takes one. Dependences that are
planted are seen by the same measure.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.invariance import models
from benchmarks.invariance.company import BRIEF, WHOLE, Case, Finding, described, found
from benchmarks.invariance.models import load, seen_of
from benchmarks.invariance.products import drawn
from benchmarks.invariance.study import TORCH, measured, own_paths, to_table
from outrider.verifier_service.cpu.kernels import load_kernels
from tiny.models import make_checkpoint

PATHS = own_paths()


@cache
def findings_of(path: str) -> list[Finding]:
    if path != TORCH and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("needs a C++ compiler (g++ or clang++), there is none")
    return measured(path, is_brief=True)


@pytest.mark.parametrize("path", [*PATHS, TORCH])
def test_what_is_said_not_to_depend_on_the_batch_does_not(path):
    broken = [own for own in findings_of(path) if own.is_promised and own.seen]
    assert broken == []


@pytest.mark.parametrize("path", PATHS)
def test_all_of_our_kernels_are_said_not_to(path):
    """And so are whole models by them; what is not is torch's."""
    not_promised = {own.product for own in findings_of(path) if not own.is_promised}
    ours = [name for name in not_promised if "torch's" not in name and "oneDNN" not in name and "library's" not in name]
    assert ours == []
    promised = {own.product.split(" ")[0] for own in findings_of(path) if own.is_promised}
    assert promised >= {"linear", "norm", "rotary", "rotation", "gate", "residual", "router", "experts", "attention"}
    assert any(own.product.startswith("model: ") and own.is_promised for own in findings_of(path))


def test_torchs_operators_promise_nothing():
    assert not [own for own in findings_of(TORCH) if own.is_promised]


# --- planted dependences ---

ROWS, WEIGHT = drawn(600, 96), drawn(40, 96)
LONE = torch.stack([WEIGHT @ row for row in ROWS])


def linear_that_switches(rows: list[int]) -> torch.Tensor:
    """As oneDNN's: another order of sums above 32 rows."""
    return LONE[rows] if len(rows) <= 32 else F.linear(ROWS[rows].flip(1), WEIGHT.flip(1))


def norm_over_the_batch(rows: list[int]) -> torch.Tensor:
    return ROWS[rows] / (1.0 + 1e-4 * ROWS[rows].square().mean())


def softmax_whose_sums_follow_the_batch(rows: list[int]) -> torch.Tensor:
    """As an attention that splits a context by how many queries there are."""
    weights, pieces = ROWS[rows].exp(), 1 + len(rows) % 3
    return weights / sum(part.sum(dim=1) for part in weights.chunk(pieces, dim=1))[:, None]  # type: ignore[index]


def tail_of_a_vector(rows: list[int]) -> torch.Tensor:
    """As torch's operators: the last numbers of a tensor are computed one by one, to another rounding."""
    flat = F.gelu(ROWS[rows]).flatten()
    last = flat[-len(flat) % 7 - 3 :]
    last.copy_(torch.nextafter(last, torch.full_like(last, 1e9)))
    return flat.view(len(rows), -1)


def sum_by_threads(rows: list[int]) -> torch.Tensor:
    """As a product whose threads share the inputs."""
    parts = ROWS[rows].chunk(torch.get_num_threads(), dim=1)
    return torch.stack([part.sum(dim=1) for part in parts]).sum(dim=0)[:, None]


def only_in_place_17(rows: list[int]) -> torch.Tensor:
    output = ROWS[rows] * 2.0
    output[17:18] = torch.nextafter(output[17:18], torch.tensor(9.0))
    return output


def only_at_511_rows(rows: list[int]) -> torch.Tensor:
    return ROWS[rows] * (2.0 if len(rows) != 511 else 2.0 + 2.0**-20)


def zeros_of_another_sign(rows: list[int]) -> torch.Tensor:
    return torch.zeros(len(rows), 2) * (1.0 if len(rows) < 5 else -1.0)


PLANTED: dict[str, tuple[Callable[[list[int]], torch.Tensor], str]] = {
    "a linear that switches": (
        linear_that_switches,
        "2 groups: 1-32, 33-600; other bits than alone in batches of 33-600",
    ),
    "a norm over the batch": (norm_over_the_batch, "groups"),
    "a softmax by the batch": (softmax_whose_sums_follow_the_batch, "other bits than alone in batches of 3 5-6 8-9"),
    "the tail of a vector": (tail_of_a_vector, "other bits than alone in batches of 2-600"),
    "sums by threads": (sum_by_threads, "only with 2 threads, in batches of 1-600"),
    "one place": (only_in_place_17, "other bits than alone in batches of 18-600"),
    "one count": (only_at_511_rows, "2 groups: 1-256 512-600, 511; other bits than alone in batches of 511"),
    "a sign of zero": (zeros_of_another_sign, "2 groups: 1-4, 5-600"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_dependence_is_seen(name):
    compute, text = PLANTED[name]
    assert text in found(Case(product=name, dtype="float32", is_promised=True, compute=compute), WHOLE).seen


def test_what_depends_on_nothing_is_found_so():
    own = found(Case(product="", dtype="float32", is_promised=True, compute=lambda rows: ROWS[rows] * 2.0), BRIEF)
    assert own.seen == ""
    assert described({1: (1, 2, 3)}, [[1, 2, 3]], {}) == ""


class Switching(nn.Module):
    """A model's linear layer that adds in another order above 32 rows."""

    def __init__(self, real: nn.Module) -> None:
        super().__init__()
        self._real = real

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output = self._real(rows)
        return output if len(rows) <= 32 else torch.nextafter(output, torch.zeros_like(output))


def test_a_planted_dependence_of_one_layer_is_seen_in_a_whole_model(tmp_path: Path):
    if load_kernels(torch.float32) is None:
        pytest.skip("needs a C++ compiler (g++ or clang++), there is none")
    make_checkpoint(tmp_path, **models.ROOM)
    runner, ways = load(str(tmp_path)), {1: ("token by token", "in chunks", "in company")}
    assert seen_of(runner, ways) == ""
    layer = runner.model.layers[1].attention
    layer.qkv = Switching(layer.qkv)
    seen = seen_of(runner, ways)
    assert "token by token, 1 threads: 150 of 150 tokens" in seen
    assert "in chunks" in seen
    assert "in company" not in seen, "more than 32 rows as well"


def test_the_table_has_a_column_for_every_path():
    invariant = Finding(product="norm", dtype="float32", is_promised=True, seen="")
    other = Finding(product="norm", dtype="float32", is_promised=False, seen="2 groups: 1, 2-600")
    lines = to_table({"avx2": [invariant], TORCH: [other]}).splitlines()
    assert lines[0] == "| product | dtype | avx2 | torch's operators |"
    assert lines[-1] == "| norm | float32 | invariant | 2 groups: 1, 2-600 |"
