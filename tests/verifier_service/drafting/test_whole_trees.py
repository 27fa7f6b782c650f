"""Trees of drafters that learn from the target's predictions: whole where they pay on the whole, never at a loss."""

from __future__ import annotations

import dataclasses

import pytest

from fakes.priced_bench import FREE, ONE_CORE, VOCAB_SIZE, Bench, GuessingDrafts
from outrider.verifier_service.messages.draft import ROOT, Commit, Draft, DrafterEvent, DraftNeeds
from outrider.verifier_service.messages.engine import StepTime

NUM_GUESSES = 12  # nodes that are never right, as those of a lookahead window
MAX_NODES = 16
DEARER = tuple(StepTime(num_tokens=n, seconds=0.01 + 0.002 * n) for n in (1, 4, 16, 64))


class WindowDrafts(GuessingDrafts):
    """A chain that may be right, and beside it guesses that the target is to comment."""

    def __init__(self, *, share_wrong: float) -> None:
        super().__init__(share_wrong=share_wrong, confidences=(0.6,) * 4)
        self.events = [DrafterEvent(drafter_id="d", vocab_size=VOCAB_SIZE, needs=DraftNeeds(predictions=True))]

    def _draft(self, ask: Commit) -> Draft:
        draft = super()._draft(ask)
        taken = set(draft.token_ids[:1])
        guesses = [token for token in range(VOCAB_SIZE - NUM_GUESSES - 1, VOCAB_SIZE) if token not in taken]
        length = len(draft.token_ids)
        return dataclasses.replace(
            draft,
            token_ids=(*draft.token_ids, *guesses[:NUM_GUESSES]),
            parents=(*range(ROOT, length - 1), *(ROOT,) * NUM_GUESSES),
            confidences=(*(0.6,) * length, *(0.02,) * NUM_GUESSES),
        )


def seconds(profile: tuple[StepTime, ...], share_wrong: float, **plan: object) -> tuple[float, set[int]]:
    """Return how long 400 tokens take, and how many draft tokens steps verified."""
    bench = Bench(WindowDrafts(share_wrong=share_wrong), profile, max_tree_nodes=MAX_NODES)
    (outputs,) = bench.run(max_tokens=400, **plan).values()
    return bench.now_s, {output.num_draft_tokens for output in outputs}


def test_guesses_that_never_pay_are_verified_with_the_rest():
    _, sizes = seconds(FREE, 0.3)
    assert max(sizes) == MAX_NODES
    assert all(size == 0 or size > NUM_GUESSES for size in sizes)


@pytest.mark.parametrize("profile", [ONE_CORE, DEARER], ids=["one core", "dearer"])
@pytest.mark.parametrize("share_wrong", [0.2, 0.5])
def test_where_whole_trees_cost_more_than_they_bring_they_are_cut(profile: tuple[StepTime, ...], share_wrong: float):
    plain_s, _ = seconds(profile, share_wrong, draft_length=0)
    priced_s, _ = seconds(profile, share_wrong)
    assert priced_s < 1.02 * plain_s
