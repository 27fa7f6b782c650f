"""Our heads against outputs that `speculators` and vLLM computed; EAGLE.md says how they were recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from outrider.drafter_service.heads.eagle import EagleHead
from outrider.drafter_service.heads.eagle3 import Eagle3Head
from outrider.drafter_service.heads.head_layer import DraftHead
from outrider.drafter_service.heads.mtp import MtpHead
from outrider.verifier_service.formats.checkpoint import StateDictSource
from tiny.heads import SlowDrafting

DATA = Path(__file__).parent / "data"
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


def recorded(name: str) -> dict[str, torch.Tensor]:
    return load_file(DATA / f"{name}.expected.safetensors")


def dense_steps(
    head: DraftHead, tokens: torch.Tensor, states: torch.Tensor, num_steps: int, length: int
) -> torch.Tensor:
    """Run whole sequences, each step over the head's own states of the one before: [num_steps, length, draft_vocab]."""
    hidden, logits = head.combine(states)[None, :length], []
    for step in range(num_steps):
        positions = torch.arange(length)[None]  # rotary positions are relative: a shift of all changes nothing
        output, hidden = head(tokens[None, 1 + step : 1 + step + length], hidden, positions)
        logits.append(head.logits(output)[0])
    return torch.stack(logits)


@pytest.mark.parametrize(
    "name", ["speculators_eagle3_llama", "speculators_eagle3_llama3_rope", "speculators_eagle3_qwen3"]
)
def test_eagle3_drafts_as_speculators_trains(name: str) -> None:
    head, expected = Eagle3Head.from_folder(DATA / name), recorded(name)
    tokens, states, logits = expected["tokens"], expected["states"], expected["logits"]
    num_steps, num_pairs = logits.shape[:2]
    for last in range(num_pairs - num_steps):
        drafting = SlowDrafting([head], tokens[: last + 2].tolist(), states[: last + 1])
        for step in range(num_steps):
            assert_logits(head, drafting.logits, logits[step, last])
            following = last + 2 + step  # the training run is told the true token
            drafting.step(int(tokens[following]), drafting.feedback, following - 1)


def assert_logits(head: DraftHead, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare logits in the target's ids with those of the draft vocabulary."""
    assert head.target_ids is not None
    torch.testing.assert_close(found[head.target_ids], expected, **TOLERANCE)
    assert int(found.isinf().sum()) == len(found) - len(expected)


def test_eagle3_of_the_authors_format_is_vllms() -> None:
    name = "vllm_eagle3_original"
    head, expected = Eagle3Head.from_folder(DATA / name), recorded(name)
    assert head.taps == (1, 2, 4)
    with torch.no_grad():
        logits = dense_steps(head, expected["tokens"], expected["states"], 2, expected["logits"].shape[1])
    torch.testing.assert_close(head.in_target_ids(logits), expected["logits"], **TOLERANCE)


def test_eagle1_is_vllms() -> None:
    name = "vllm_eagle"
    expected = recorded(name)
    target = StateDictSource({"lm_head.weight": expected["lm_head.weight"]})
    head = EagleHead.from_folder(DATA / name, target=target)
    with torch.no_grad():
        logits = dense_steps(head, expected["tokens"], expected["states"], 2, expected["logits"].shape[1])
    torch.testing.assert_close(logits, expected["logits"], **TOLERANCE)


def test_mtp_is_that_of_speculators() -> None:
    name = "speculators_mtp_qwen3"
    expected = recorded(name)
    lent = {"model.embed_tokens.weight": "embed_tokens.weight", "lm_head.weight": "lm_head.weight"}
    target = StateDictSource({there: expected[here] for there, here in lent.items()})
    head = MtpHead.from_folder(DATA / name, target=target)
    num_steps, length = expected["logits"].shape[:2]
    with torch.no_grad():
        logits = dense_steps(head, expected["tokens"], expected["states"], num_steps, length)
    torch.testing.assert_close(logits, expected["logits"], **TOLERANCE)


def test_the_recorded_cases_can_tell_heads_apart() -> None:
    head, expected = Eagle3Head.from_folder(DATA / "vllm_eagle3_original"), recorded("vllm_eagle3_original")
    for name, parameter in head.named_parameters():
        kept = parameter.data.clone()
        parameter.data = kept.roll(1, 0) if kept.ndim == 2 else kept * 1.05
        with torch.no_grad():
            logits = dense_steps(head, expected["tokens"], expected["states"], 2, expected["logits"].shape[1])
        parameter.data = kept
        assert not torch.allclose(head.in_target_ids(logits), expected["logits"], **TOLERANCE), name
