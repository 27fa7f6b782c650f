"""Where vLLM is installed, and the mark of tests that need it: they are skipped by name where it is not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ENVIRONMENT = Path(os.environ.get("OUTRIDER_VLLM_ENV", Path.home() / ".cache" / "outrider" / "vllm-0.32.0"))
INTERPRETER = ENVIRONMENT / "bin" / "python"
needs_vllm = pytest.mark.skipif(
    not (ENVIRONMENT / ".ready").is_file(), reason=f"vLLM is not in {ENVIRONMENT}: make vllm installs it"
)
