"""The engines that tests of a file share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from exactness.drafter_cells import Bench


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    bench = Bench()
    yield bench
    bench.close()
    torch.set_num_threads(threads)
