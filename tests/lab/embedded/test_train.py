"""The schedule ends on time, batches depend on seed and step alone, and a stopped run goes on where it was."""

import pytest
import torch

from outrider.lab.embedded.train import (
    Optimizers,
    Phase,
    Progress,
    Recipe,
    Run,
    Shape,
    Streams,
    cross_entropy,
)

TINY = Shape(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1)
PHASE = Phase(until=1.0, rows=2, window=16)


@pytest.fixture
def streams():
    tokens = torch.randint(0, 2048, (2, 500), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    return Streams(tokens[0], tokens[1])


def test_the_learning_rate_warms_up_stays_and_falls_to_zero_at_the_end_of_the_budget():
    recipe = Recipe(minutes=10, warm_up_steps=20, cool_down=0.4)
    assert recipe.lr_scale(0, 0.0) == pytest.approx(0.05)
    assert recipe.lr_scale(1000, 0.6) == pytest.approx(1.0)
    assert recipe.lr_scale(1000, 0.8) == pytest.approx(0.5)
    assert recipe.lr_scale(1000, 1.01) == 0.0


def test_a_batch_is_a_function_of_seed_and_step(streams):
    recipe = Recipe(minutes=1)
    batch = streams.batch(3, PHASE, recipe)  # [2, 17]
    assert batch.shape == (2, 17)
    assert torch.equal(batch, streams.batch(3, PHASE, recipe))
    assert not torch.equal(batch, streams.batch(4, PHASE, recipe))
    assert not torch.equal(batch, streams.batch(3, PHASE, Recipe(minutes=1, seed=1)))


def test_a_stopped_run_resumes_with_weights_optimizers_and_time(streams, tmp_path):
    def run(minutes: float) -> Run:
        recipe = Recipe(minutes=minutes, phases=(PHASE,))
        return Run(TINY.build(), recipe, tmp_path / "model.pt", streams, cross_entropy)

    first = run(minutes=0.02)
    first.train()
    second, progress = run(minutes=0.02), Progress()
    optimizers = Optimizers(second.model, second.recipe)
    second._resume(optimizers, progress)
    assert progress.step > 0
    assert progress.elapsed_s >= 0.02 * 60
    assert progress.num_tokens == progress.step * 32
    for name, weight in first.model.state_dict().items():
        assert torch.equal(weight, second.model.state_dict()[name])
    assert all(optimizer.state for optimizer in optimizers.optimizers)
