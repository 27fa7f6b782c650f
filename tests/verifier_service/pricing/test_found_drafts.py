"""Drafts that are found in no time are asked for whatever was seen before, and verified by what each says of itself."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from fakes.engine_bench import greedy_tokens
from fakes.priced_bench import DEAR, FREE, ONE_CORE, SURE, Bench, GuessingDrafts
from outrider.verifier_service.messages.draft import Commit, Draft, DrafterEvent, DraftNeeds


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


# A drafter that finds some of its drafts, and computes the others.


class FoundOrComputedDrafts(GuessingDrafts):
    """At a share of the positions right tokens are found in `find_s`; what is computed is a guess as others."""

    def __init__(self, *, share_found: float, find_s: float = 0.0, **options) -> None:
        super().__init__(**options)
        self.events = [DrafterEvent(drafter_id="d", vocab_size=97, needs=DraftNeeds(finds_some=True))]
        self.share_found, self.find_s = share_found, find_s
        self.computed: list[int] = []  # how many tokens each ask let be computed
        self._waits_s: dict[int, float] = {}  # by round

    def _draft(self, ask: Commit) -> Draft:
        most = ask.max_length if ask.max_computed is None else ask.max_computed
        self.computed.append(most)
        computed, prefix = super()._draft(replace(ask, max_length=most)), self._prefixes[ask.request_id]
        is_found = random.Random(f"{ask.request_id} {len(prefix)} found").random() < self.share_found
        self._waits_s[ask.round_id] = self.find_s + (0.0 if is_found else self.seconds(most))
        if not is_found:
            return computed
        token_ids = tuple(greedy_tokens(ask.max_length, prefix))
        return replace(computed, token_ids=token_ids, confidences=(SURE[1],) * len(token_ids), is_found=True)

    def wait_s(self, draft: Draft) -> float:
        return self._waits_s[draft.round_id]

    def share_computing(self) -> float:
        """The share of asks that let something be computed."""
        return sum(map(bool, self.computed)) / len(self.computed)


def test_what_is_found_is_verified_where_what_is_computed_does_not_pay():
    drafts = FoundOrComputedDrafts(share_found=0.5, share_wrong=1.0, draft_s=5e-3)
    bench = Bench(drafts, ONE_CORE)
    bench.run(num_requests=4, max_tokens=200)
    drafts.computed.clear()
    assert num_verified(bench, num_requests=4, max_tokens=200) > 0.5 * 4 * 200, "4 of 5 tokens, in every second round"
    assert drafts.share_computing() < 0.1, "the price learns nothing from what is found"
    assert drafts.asked.count(4) > 0.8 * len(drafts.asked), "shorter are the last ones of a request"


def test_where_computing_pays_what_is_found_may_still_be_longer():
    drafts = FoundOrComputedDrafts(share_found=0.5, share_wrong=0.4, draft_s=3e-3)
    bench = Bench(drafts, ONE_CORE)
    bench.run(max_tokens=200)
    drafts.computed.clear()
    drafts.asked.clear()
    bench.run(max_tokens=200)
    assert drafts.share_computing() > 0.5
    assert max(drafts.computed) < 4 == max(drafts.asked)


def test_a_drafter_that_takes_time_to_find_is_not_asked_for_that_alone():
    drafts = FoundOrComputedDrafts(share_found=0.0, share_wrong=1.0, draft_s=5e-3, find_s=3e-3)
    bench = Bench(drafts, ONE_CORE)
    bench.run(max_tokens=400)
    assert len(drafts.asked) < 0.2 * 400


def test_an_operator_who_pins_drafts_has_all_of_them_computed():
    drafts = FoundOrComputedDrafts(share_found=0.0)
    Bench(drafts, ONE_CORE).run(max_tokens=20, is_pinned=True)
    assert drafts.computed == drafts.asked
