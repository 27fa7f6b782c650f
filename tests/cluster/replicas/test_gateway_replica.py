"""What a gateway knows of its model: from the model's files, without its weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from outrider.cluster.replicas.gateway_replica import model_info
from outrider.drafter_service.embedded import target_path
from outrider.verifier_service.messages.request import AcceptanceRule, LogprobsMode
from outrider.verifier_service.model.config import ModelConfig


@pytest.mark.parametrize("reads", [True, False])
def test_a_model_is_described_by_its_files(tmp_path: Path, reads: bool):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(target_path() / name, tmp_path)
    written = {"eos_token_id": [0, 3], "temperature": 0.5, "max_new_tokens": 9}
    (tmp_path / "generation_config.json").write_text(json.dumps(written))
    told = AcceptanceRule.STANDARD, LogprobsMode.RAW
    info = model_info("m", ModelConfig(path=str(tmp_path)), 64, *told, reads_generation_config=reads)
    assert (info.name, info.max_model_len, info.eos_token_ids) == ("m", 64, (0, 3))
    assert info.sampling_defaults == ({"temperature": 0.5, "max_tokens": 9} if reads else {})
