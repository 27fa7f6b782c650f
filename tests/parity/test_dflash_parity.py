"""Our DFlash drafter against blocks that `speculators` computed; DFLASH.md says how they were recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from outrider.drafter_service.engine.drafter import Ask, SessionKey
from outrider.drafter_service.heads.dflash import DFlashHead
from outrider.drafter_service.models.dflash_drafter import DFlashModel
from outrider.drafter_service.models.one_pass_drafter import Canvas, Chunk
from outrider.verifier_service.formats.checkpoint import StateDictSource
from outrider.verifier_service.messages.draft import DraftSampling

DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize("name", ["speculators_dflash_qwen3", "speculators_dflash_reduced"])
def test_blocks_are_those_of_speculators(name: str) -> None:
    expected = load_file(DATA / f"{name}.expected.safetensors")
    target = StateDictSource({key: value for key, value in expected.items() if key.endswith(".weight")})
    head = DFlashHead.from_folder(DATA / name, target=target)
    model = DFlashModel(head, num_blocks=32, block_size=4, max_model_len=64)
    anchors = expected["anchors"].tolist()
    assert len(anchors) == 4
    for anchor, logits in zip(anchors, model.execute(chunks_of(expected, anchors, head)), strict=True):
        ours = logits if head.target_ids is None else logits[:, head.target_ids]
        recorded = expected["logits"][anchors.index(anchor)]
        assert recorded.std() > 0.5
        torch.testing.assert_close(ours, recorded, atol=1e-4, rtol=1e-4)


def chunks_of(expected: dict[str, torch.Tensor], anchors: list[int], head: DFlashHead) -> list[Chunk]:
    """Ask for every row of a block at each anchor, contexts in scattered blocks of the pool."""
    tokens, size = expected["tokens"].tolist(), head.config.block_size
    masks = [head.config.mask_token_id] * (size - 1)
    return [
        Chunk(
            ask=Ask(
                key=SessionKey("v", str(anchor)),
                ask_id=index,
                token_ids=tokens[: anchor + 1],
                sampling=DraftSampling(temperature=0.0),
                length=size,
                states=expected["states"][:anchor],
            ),
            begin=0,
            end=anchor,
            canvas=Canvas(token_ids=[tokens[anchor], *masks], rows=range(size)),
            block_table=[(7 * (4 * index + place) + 3) % 32 for place in range(-(-anchor // 4))],
            num_cached=0,
        )
        for index, anchor in enumerate(anchors)
    ]
