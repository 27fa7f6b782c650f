"""Draft with masks that the target's own verification computes: TiDAR (Liu et al. 2025, arXiv 2511.08923).

The target was taught to guess over blocks of masks (`outrider train-drafter tidar`). Every step that verifies has such
blocks behind the draft (`verifier_service/scheduling/masks.py`), and that of the tokens that were accepted is the next
draft: a round is one forward. Where a step had no block for what was accepted, the next step has no draft.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from outrider.drafter_service.engine.drafter import Ask, SessionKey
from outrider.drafter_service.engine.row_drafts import grow_rows, start_rows
from outrider.drafter_service.engine.tree_growth import DraftRules, Growing, answer_of
from outrider.drafter_service.target.target_view import TargetView
from outrider.verifier_service.messages.draft import Draft, DraftNeeds
from outrider.verifier_service.scheduling.masks import MaskBlocks

BLOCK_KEY = "tidar_block_length"  # in the target's config: masks of a block in training
MAX_STEP_NODES = 64  # tokens of a request's draft and masks: what a captured step has bits for


def parse_blocks(config: Mapping[str, Any], token_id: int, *, length: int, num_blocks: int) -> MaskBlocks:
    """Return the masks of a target's config, whose mask is `token_id`; raises `ValueError` for what cannot be.

    `length`: tokens of a draft. `num_blocks`: as in `MaskBlocks`.
    """
    longest = config.get(BLOCK_KEY)
    if isinstance(longest, int) and length > longest:
        raise ValueError(f"num_speculative_tokens: the model guesses {longest} tokens ahead, not {length}")
    num_nodes = length + length * min(length + 1, num_blocks or length + 1)
    if num_nodes > MAX_STEP_NODES:
        raise ValueError(
            f"num_speculative_tokens: drafts of {length} and their masks take {num_nodes} tokens of a step, "
            f"at most {MAX_STEP_NODES} are possible: draft less, or lower tidar_num_blocks"
        )
    return MaskBlocks(token_id=token_id, length=length, num_blocks=num_blocks)


class TidarDrafter:
    """A `Drafter` for the verifier's own process; it keeps nothing between two asks."""

    needs = DraftNeeds()

    def __init__(self, view: TargetView, rules: DraftRules, masks: MaskBlocks) -> None:
        self.vocab_size, self.max_model_len = view.vocab_size, view.max_model_len
        self._view, self._rules = view, rules
        view.use_masks(masks)

    def draft(self, asks: Sequence[Ask], *, max_num_tokens: int) -> list[Draft]:
        """Make drafts of what the last step's masks have guessed; they are empty where it had none."""
        answers: list[Draft] = []
        drafts, rows = [], []
        for ask in asks:
            guessed = self._view.mask_rows(ask.key.request_id, len(ask.token_ids))
            if guessed is None:
                answers.append(ask.answer())
                continue
            own = guessed[len(ask.forced_ids) : ask.length]
            drafts.append(Growing(ask, start_rows(ask, len(own), trees=self._rules.trees), len(ask.token_ids)))
            rows.append(own)
        grow_rows(drafts, rows, self._rules)
        return answers + [answer_of(draft.ask, draft.growth) for draft in drafts]

    def release(self, key: SessionKey) -> None:
        """Nothing is kept."""

    def check_integrity(self, keys: Collection[SessionKey]) -> None:
        """Nothing is kept."""
