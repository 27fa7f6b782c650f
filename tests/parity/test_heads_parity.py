"""Our heads against vLLM's, on checkpoints and outputs that `record_heads.py` recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from outrider.drafter_service.engine.drafter import Ask, SessionKey
from outrider.drafter_service.head_drafters.medusa_drafter import MedusaDrafter
from outrider.drafter_service.head_drafters.mlp_drafter import MlpDrafter
from outrider.drafter_service.heads.medusa import MedusaHeads
from outrider.drafter_service.heads.mlp_speculator import MlpSpeculator
from outrider.verifier_service.messages.draft import DraftSampling

DATA = Path(__file__).parent / "data"
MEDUSA = (
    *("medusa_original", "medusa_renamed", "medusa_shared", "medusa_truncated"),
    *("medusa_saved", "medusa_saved_truncated"),
)
MLP = ("mlp", "mlp_tied", "mlp_saved")


@pytest.mark.parametrize("name", MEDUSA)
def test_medusa_heads_compute_what_vllm_computes(name: str):
    expected = load_file(DATA / f"{name}.expected.safetensors")
    with torch.inference_mode():
        logits = MedusaHeads.from_folder(DATA / name)(expected["states"])
    _require_close(logits, expected["logits"])


@pytest.mark.parametrize("name", MLP)
def test_the_mlp_speculator_computes_what_vllm_computes(name: str):
    expected = load_file(DATA / f"{name}.expected.safetensors")
    speculator = MlpSpeculator.from_folder(DATA / name)
    token_ids = expected["token_ids"]
    with torch.inference_mode():
        state = speculator.start(expected["states"])
        for step, expected_logits in enumerate(expected["logits"]):
            logits, state = speculator.step(step, state, token_ids)
            _require_close(logits, expected_logits)
            token_ids = expected_logits.argmax(dim=-1)
    assert step + 1 == speculator.n_predict


@pytest.mark.parametrize("name", [*MEDUSA, *MLP])
def test_greedy_drafts_are_what_vllm_proposes(name: str):
    expected = load_file(DATA / f"{name}.expected.safetensors")
    num_tokens, num_states, vocab_size = expected["logits"].shape
    last_ids = expected.get("token_ids", torch.zeros(num_states, dtype=torch.int64)).tolist()
    asks = [
        Ask(
            key=SessionKey("v", str(index)),
            ask_id=index,
            token_ids=[0, token_id],
            sampling=DraftSampling(temperature=0.0),
            length=num_tokens,
            states=state[None],
        )
        for index, (token_id, state) in enumerate(zip(last_ids, expected["states"], strict=True))
    ]
    limits = {"vocab_size": vocab_size, "max_model_len": 64, "rng": torch.Generator()}
    drafter = (
        MlpDrafter(MlpSpeculator.from_folder(DATA / name), **limits)
        if name in MLP
        else MedusaDrafter(MedusaHeads.from_folder(DATA / name), **limits)
    )
    drafts = drafter.draft(asks, max_num_tokens=64)
    proposals = expected["logits"].argmax(dim=-1).T  # [num_states, num_tokens]
    assert [list(draft.token_ids) for draft in drafts] == proposals.tolist()


def test_every_recorded_head_is_compared():
    recorded = {path.name.split(".")[0] for path in DATA.glob("*.expected.safetensors")}
    assert {name for name in recorded if name.startswith(("medusa", "mlp"))} == {*MEDUSA, *MLP}


def _require_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    is_finite = expected.isfinite()
    assert torch.equal(found.isfinite(), is_finite), "other ids are left out"
    assert expected[is_finite].std() > 0.1, "logits so alike that this test could not fail"
    torch.testing.assert_close(found[is_finite], expected[is_finite], rtol=0.0, atol=1e-5)
