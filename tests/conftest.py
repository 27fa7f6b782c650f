"""What all tests share: reproducible property tests, and GPU tests that say why they did not run."""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("outrider", derandomize=True, deadline=None, database=None)
settings.load_profile("outrider")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-runs", type=int, default=20, help="How often `make soak` repeats each failure.")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _cuda_is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, torch sees none"))


def _cuda_is_available() -> bool:
    import torch

    return torch.cuda.is_available()
