"""What the tests of engines without a server share: ranks and drafters' processes that start at once."""

from __future__ import annotations

import pytest

from outrider.cluster.offline.engine import SPAWNING
from tiny.forking import FORKING


@pytest.fixture
def forking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork an engine's processes: to spawn one takes five seconds of a core. test_llm.py has them spawned."""
    monkeypatch.setattr(SPAWNING, "Process", FORKING.Process)
