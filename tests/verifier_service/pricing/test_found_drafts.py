"""Drafts that are found in no time are asked for whatever was seen before, and verified by what each says of itself."""

from __future__ import annotations

import pytest

from fakes.priced_bench import DEAR, FREE, ONE_CORE, Bench, GuessingDrafts
from outrider.verifier_service.messages.draft import DrafterEvent, DraftNeeds


class FoundDrafts(GuessingDrafts):
    """As guesses, but of a drafter that finds them beside the verifier."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.events = [DrafterEvent(drafter_id="d", vocab_size=97, needs=DraftNeeds(is_found=True))]


def num_verified(bench: Bench, **run) -> int:
    return sum(outputs[-1].speculation.num_draft_tokens for outputs in bench.run(**run).values())


def test_they_are_asked_for_to_the_bound_from_the_first_step_on():
    bench = Bench(FoundDrafts(), FREE)
    bench.run()
    assert set(bench.drafts.asked[:-2]) == {4}


def test_a_text_that_begins_to_repeat_itself_is_followed_at_once():
    """Where drafts were worth nothing for long, others are not even asked for; these are."""
    drafts = FoundDrafts(share_wrong=0.9, share_told=1.0)
    bench = Bench(drafts, ONE_CORE)
    bench.run(num_requests=16, max_tokens=100)
    assert drafts.asked.count(4) > 0.95 * len(drafts.asked), "shorter are only the last ones of each request"
    drafts.share_wrong = 0.0
    assert num_verified(bench, num_requests=16, max_tokens=20) > 0.5 * 16 * 20
    priced = GuessingDrafts(share_wrong=0.9, share_told=1.0)
    other = Bench(priced, ONE_CORE)
    other.run(num_requests=16, max_tokens=100)
    priced.share_wrong = 0.0
    assert num_verified(other, num_requests=16, max_tokens=20) < 0.2 * 16 * 20


def test_each_draft_is_verified_as_far_as_it_pays_by_what_it_says():
    drafts = FoundDrafts(share_wrong=0.5, share_told=1.0)
    bench = Bench(drafts, ONE_CORE)
    bench.run(num_requests=8, max_tokens=100)  # until what it says is known to be so
    outputs = bench.run(num_requests=8, max_tokens=100)
    metrics = [each[-1].speculation for each in outputs.values()]
    num_drafted = sum(each.num_draft_tokens for each in metrics)
    num_accepted = sum(each.num_accepted_tokens for each in metrics)
    assert num_accepted > 0.8 * num_drafted > 0, "of all that it drafts half is wrong"


def test_nothing_is_looked_up_where_not_even_a_sure_token_would_pay():
    bench = Bench(FoundDrafts(), DEAR)
    outputs = bench.run(max_tokens=60)
    assert not any(bench.drafts.asked[4:-2])
    assert next(iter(outputs.values()))[-1].speculation.disabled_reason == "load"


@pytest.mark.parametrize(("draft_s", "is_priced"), [(1e-5, False), (5e-3, True)])
def test_who_takes_time_to_find_them_is_priced_like_any_other(draft_s: float, is_priced: bool):
    bench = Bench(FoundDrafts(share_wrong=1.0, draft_s=draft_s), ONE_CORE)
    bench.run(max_tokens=200)
    assert (sum(bench.drafts.asked) < 0.2 * 4 * 200) == is_priced
