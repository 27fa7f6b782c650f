"""The optimizer is the published one: what it makes of gradients, held against the library's and against SVD."""

import pytest
import torch

from outrider.drafter_service.training.muon import Muon, orthogonal


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)])
def test_singular_values_come_near_one_and_directions_stay(shape: tuple[int, int]):
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    update = orthogonal(matrix)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    values = (left.T @ update.float() @ right.T).diagonal()
    assert values.min() > 0.5
    assert values.max() < 1.5
    rest = left.T @ update.float() @ right.T - torch.diag(values)
    assert rest.abs().max() < 0.05


def test_steps_are_those_of_the_library():
    generator = torch.Generator().manual_seed(1)
    begun = torch.randn(48, 32, generator=generator)
    ours, theirs = begun.clone().requires_grad_(), begun.clone().requires_grad_()
    optimizers = [Muon([ours], lr=0.02, weight_decay=0.1), torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1)]
    for _ in range(4):
        gradient = torch.randn(48, 32, generator=generator)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    moved = (theirs - begun).norm()
    assert (ours - theirs).norm() < 0.02 * moved  # the library's products are in bfloat16


def test_a_matrix_without_a_gradient_stays():
    parameter = torch.ones(4, 4, requires_grad=True)
    Muon([parameter], lr=0.1, weight_decay=0.1).step()
    assert torch.equal(parameter, torch.ones(4, 4))
