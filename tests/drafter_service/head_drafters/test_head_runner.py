from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from outrider.drafter_service.head_drafters.head_runner import HeadRunner
from outrider.drafter_service.heads.eagle import EagleHead
from outrider.drafter_service.heads.eagle3 import Eagle3Head
from outrider.drafter_service.heads.head_layer import DraftHead, HeadError, load_heads
from outrider.drafter_service.heads.switched import SwitchedHeads
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.runner import graph_backend
from outrider.verifier_service.model.step_graphs import TOKEN_BUCKETS
from tiny.heads import HIDDEN_SIZE, VOCAB_SIZE, eagle3_head, eagle_head, llama_layer, mtp_head
from tiny.played_graphs import played_backend

BLOCK_SIZE = 4
TABLES = ([3, 0, 5], [1, 2, 4])


def runner_of(*heads: DraftHead) -> HeadRunner:
    return HeadRunner(SwitchedHeads(heads), num_blocks=8, block_size=BLOCK_SIZE, max_model_len=32)


def batch_of(spans: list[range], tokens: list[list[int]], *, trees: list[list[int]] | None = None) -> ScheduledBatch:
    """Lay spans of pairs of several sequences side by side; every output is wanted."""
    pairs = [(table, i) for table, span in zip(TABLES, spans, strict=True) for i in span]
    slots = [table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for table, i in pairs]
    return ScheduledBatch(
        token_ids=[tokens[index][i] for index, span in enumerate(spans) for i in span],
        positions=[i for span in spans for i in span],
        slot_mapping=slots,
        query_lengths=[len(span) for span in spans],
        context_lengths=[span.stop for span in spans],
        block_tables=[table[: -(-span.stop // BLOCK_SIZE)] for table, span in zip(TABLES, spans, strict=True)],
        logits_indices=list(range(len(slots))),
        tree_parents=trees or [],
    )


def random_pairs(head: DraftHead, lengths: tuple[int, int]) -> tuple[list[list[int]], list[torch.Tensor]]:
    rng = torch.Generator().manual_seed(5)
    tokens = [torch.randint(VOCAB_SIZE, (length,), generator=rng).tolist() for length in lengths]
    return tokens, [torch.randn(length, head.state_size, generator=rng) for length in lengths]


def test_parameter_sets_share_the_keys_and_values() -> None:
    heads = [eagle3_head(1), eagle3_head(2)]
    runner = runner_of(*heads)
    tokens, states = random_pairs(heads[0], (4, 3))
    runner.execute(batch_of([range(4), range(3)], tokens), runner.combine(torch.cat(states)))
    kept = runner.pool.keys[0].clone()
    batch = batch_of([range(4, 5), range(3, 4)], [[*tokens[0], 1], [*tokens[1], 2]])
    hidden = torch.randn(2, HIDDEN_SIZE, generator=torch.Generator().manual_seed(8))
    first, second = runner.execute(batch, hidden, 0), runner.execute(batch, hidden, 1)
    assert not torch.allclose(first.feedback, second.feedback)
    assert int((runner.pool.keys[0] != kept).flatten(1).any(dim=1).sum()) == 2


def save(head: DraftHead, folder: Path) -> Path:
    head.save(folder)  # type: ignore[operator]
    return folder


def test_a_head_takes_what_it_lacks_from_the_targets_folder(tmp_path: Path) -> None:
    head = eagle_head()
    head.borrowed = frozenset({"lm_head.weight"})
    target = tmp_path / "target"
    target.mkdir()
    save_file({"lm_head.weight": head.lm_head.weight.data}, target / "model.safetensors")
    folder = save(head, tmp_path / "head")
    (loaded,) = load_heads(EagleHead, [folder], ModelConfig(path="unused", device="cpu"), target=target)
    assert loaded.borrowed == {"lm_head.weight"}


def test_the_pool_and_the_context_are_sized_as_a_models(tmp_path: Path) -> None:
    heads = SwitchedHeads([eagle3_head()])
    runner = HeadRunner.sized_by(heads, ModelConfig(path="unused", num_kv_blocks=3, block_size=8))
    assert (runner.num_blocks, runner.block_size, runner.max_model_len) == (3, 8, 24)
    runner = HeadRunner.sized_by(heads, ModelConfig(path="unused", num_kv_blocks=99, block_size=8))
    assert runner.max_model_len == 128, "the head's own limit"
    per_block = 8 * 4 * 2 * 2 * 8  # slots, bytes, keys and values, KV heads, head_dim
    config = ModelConfig(path="unused", block_size=8, kv_cache_memory_bytes=5 * per_block, max_model_len=16)
    runner = HeadRunner.sized_by(heads, config)
    assert (runner.num_blocks, runner.max_model_len) == (5, 16)


def test_what_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    folder = save(eagle3_head(), tmp_path)
    with pytest.raises(HeadError, match="tensor_parallel_size: 2"):
        load_heads(Eagle3Head, [folder], ModelConfig(path="unused", device="cpu", tensor_parallel_size=2))
    with pytest.raises(HeadError, match="parameter sets: there must be one"):
        SwitchedHeads([])


def test_parameter_sets_of_different_shape_are_named() -> None:
    with pytest.raises(HeadError, match=r"taps: \(-1,\) in parameter set 1, \(1, 3, 4\) in set 0"):
        SwitchedHeads([eagle3_head(), eagle_head()])
    with pytest.raises(HeadError, match="layer_shape"):
        SwitchedHeads([eagle3_head(), eagle3_head(layer=llama_layer(num_key_value_heads=1))])


def test_the_last_parameter_set_serves_what_is_longer() -> None:
    heads = SwitchedHeads([eagle3_head(1), eagle3_head(2)])
    assert [heads.set_index(position) for position in range(4)] == [0, 1, 1, 1]


# --- captured steps ---

TREE = [-1, -1, 0, 1, 1, 3]


def step_batches(tokens: list[list[int]]) -> list[ScheduledBatch]:
    """Prefills, single pairs, and a tree beside one; what is wanted is not all."""
    tree = batch_of([range(6, 12), range(8, 9)], tokens, trees=[TREE, []])
    tree.positions[:6] = [6, 6, 7, 7, 7, 8]
    tree.logits_indices[:] = [5, 2, 6]
    return [batch_of(spans, tokens) for spans in ([range(5), range(2)], [range(5, 6), range(2, 8)])] + [tree]


def test_what_follows_a_pair_outlasts_the_next_captured_step() -> None:
    """A draft goes on from states of earlier steps, which must not lie in the graphs' memory."""
    head = eagle3_head()
    runner = HeadRunner(
        SwitchedHeads([head]), num_blocks=8, block_size=BLOCK_SIZE, max_model_len=32, backend=played_backend()
    )
    tokens, states = random_pairs(head, (5, 4))
    hidden = runner.combine(torch.cat([states[0][:4], states[1][:3]]))
    first = runner.execute(batch_of([range(4), range(3)], tokens), hidden)
    kept = first.feedback.clone()
    runner.execute(batch_of([range(4, 5), range(3, 4)], tokens), torch.ones(2, HIDDEN_SIZE))
    assert torch.equal(first.feedback, kept)


def test_a_step_too_large_for_a_graph_runs_eagerly() -> None:
    head = eagle3_head()
    options = {"num_blocks": TOKEN_BUCKETS[-1], "block_size": BLOCK_SIZE, "max_model_len": 320}
    eager = HeadRunner(SwitchedHeads([head]), **options)
    captured = HeadRunner(SwitchedHeads([head]), **options, backend=played_backend())
    num_tokens = TOKEN_BUCKETS[-1] + 1
    batch = ScheduledBatch(
        token_ids=[index % VOCAB_SIZE for index in range(num_tokens)],
        positions=[index % 100 for index in range(num_tokens)],
        slot_mapping=list(range(num_tokens)),
        query_lengths=[num_tokens],
        context_lengths=[num_tokens],
        block_tables=[list(range(-(-num_tokens // BLOCK_SIZE)))],
        logits_indices=[3, num_tokens - 1],
    )
    hidden = torch.randn(num_tokens, HIDDEN_SIZE, generator=torch.Generator().manual_seed(7))
    expected, got = eager.execute(batch, hidden), captured.execute(batch, hidden)
    assert torch.equal(got.logits, expected.logits)
    assert torch.equal(got.feedback, expected.feedback)
    assert captured.graph_counts.eager == {"many_tokens": 1}
    assert captured.graph_counts.num_graphs == 0


def test_every_parameter_set_has_graphs_of_its_own() -> None:
    heads = [eagle3_head(1), eagle3_head(2)]
    eager = runner_of(*heads)
    captured = HeadRunner(
        SwitchedHeads(heads), num_blocks=8, block_size=BLOCK_SIZE, max_model_len=32, backend=played_backend()
    )
    tokens, _ = random_pairs(heads[0], (4, 3))
    batch = batch_of([range(2), range(1)], tokens)
    hidden = torch.randn(3, HIDDEN_SIZE, generator=torch.Generator().manual_seed(8))
    for set_index in (0, 1, 0):
        expected, got = eager.execute(batch, hidden, set_index), captured.execute(batch, hidden, set_index)
        torch.testing.assert_close(got.logits, expected.logits, atol=1e-4, rtol=1e-4)
    assert captured.graph_counts.num_graphs == 2


@pytest.mark.gpu
@pytest.mark.parametrize("make", [eagle_head, eagle3_head, mtp_head])
def test_a_gpus_graphs_replay_a_heads_eager_steps(make: type[DraftHead]) -> None:
    device = torch.device("cuda", 0)
    backend = graph_backend(ModelConfig(path="unused"), device)
    heads = SwitchedHeads([make().to(device)])
    options = {"num_blocks": 8, "block_size": BLOCK_SIZE, "max_model_len": 32}
    eager, captured = HeadRunner(heads, **options), HeadRunner(heads, **options, backend=backend)
    captured.capture()
    rng = torch.Generator().manual_seed(6)
    tokens = [torch.randint(VOCAB_SIZE, (12,), generator=rng).tolist() for _ in TABLES]
    for batch in step_batches(tokens):
        hidden = torch.randn(batch.num_tokens, HIDDEN_SIZE, generator=rng).to(device)
        expected, got = eager.execute(batch, hidden), captured.execute(batch, hidden)
        torch.testing.assert_close(got.logits, expected.logits, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(got.feedback, expected.feedback, atol=1e-3, rtol=1e-3)
    assert captured.graph_counts.num_replayed == len(step_batches(tokens))
    assert not captured.graph_counts.eager
