"""The choice among drafters, with drafters whose guesses the test knows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import pytest

from fakes.drafter_play import ask_of, draft_after, play
from outrider.drafter_service.engine.drafter import Ask, Drafter, SessionKey
from outrider.drafter_service.service.hybrid_drafter import EXPLORE_EVERY, HybridDrafter, expected_tokens
from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, Draft, DraftNeeds, SparseRow

PROMPT = [1, 2, 3]


def target(token_ids: Sequence[int]) -> int:
    """Count up."""
    return token_ids[-1] + 1


@dataclass
class KnownDrafter:
    """Counts on correctly for `num_right` tokens, then goes wrong, and says how sure it is."""

    num_right: int = 8
    confidence: float = 0.5
    num_steps: int = 1
    length: int = 8
    vocab_size: int = 10_000
    max_model_len: int = 20_000
    needs: DraftNeeds = DraftNeeds()
    num_asked: int = 0
    sampled: bool = False
    age: dict[int, int] = field(default_factory=dict)
    released: list[SessionKey] = field(default_factory=list)

    def draft(self, asks: Sequence[Ask], *, max_num_tokens: int) -> list[Draft]:
        self.num_asked += len(asks)
        for ask in asks:
            self.age[ask.ask_id] = self.age.get(ask.ask_id, 0) + 1
        return [self._result(ask) for ask in asks if self.age[ask.ask_id] % self.num_steps == 0]

    def _result(self, ask: Ask) -> Draft:
        last = ask.token_ids[-1]
        places = range(min(self.length, ask.length))
        tokens = tuple(last + 1 + place + (0 if place < self.num_right else 500) for place in places)
        rows = tuple(SparseRow(token_ids=(token,), weights=(DRAFT_PROB_SCALE,)) for token in tokens)
        return ask.answer(
            tokens,
            draft_probs=rows if self.sampled else None,
            confidences=(self.confidence,) * len(tokens),
        )

    def release(self, key: SessionKey) -> None:
        self.released.append(key)

    def check_integrity(self, keys: Collection[SessionKey]) -> None:
        """Nothing to contradict."""


def hybrid(lookups: dict[str, Drafter] | None = None, **models: Drafter) -> HybridDrafter:
    return HybridDrafter(lookups or {}, models)


def test_the_lookup_is_taken_where_it_promises_more_than_the_model_has_won():
    lookup, model = KnownDrafter(confidence=0.9), KnownDrafter(num_right=2)
    drafter = hybrid({"suffix": lookup}, model=model)
    played = play(drafter, target, PROMPT, 10)
    assert drafter.counts.num_drafts == {"suffix": 10}
    assert drafter.counts.num_accepted == {"suffix": 72}, "of nine drafts: the last one is not judged yet"
    assert played.num_accepted == [8] * 10
    assert model.num_asked == 0, "a model that is not chosen costs nothing"


def test_the_model_is_taken_where_the_lookup_has_little():
    lookup, model = KnownDrafter(num_right=0, confidence=0.4, length=2), KnownDrafter(num_right=3)
    drafter = hybrid({"suffix": lookup}, model=model)
    played = play(drafter, target, PROMPT, 10)
    assert drafter.counts.num_drafts == {"model": 10}
    assert played.num_accepted == [3] * 10


def test_an_empty_lookup_is_never_taken():
    drafter = hybrid({"ngram": KnownDrafter(length=0)}, model=KnownDrafter(num_right=0))
    play(drafter, target, PROMPT, 40)
    assert drafter.counts.num_drafts == {"model": 40}, "its mean falls towards zero and never is"


def test_a_model_that_wins_less_and_less_gives_way_and_is_tried_again():
    lookup = KnownDrafter(num_right=1, confidence=0.5, length=1)
    model = KnownDrafter(num_right=0)
    drafter = hybrid({"suffix": lookup}, model=model)
    play(drafter, target, PROMPT, 40)
    assert drafter.counts.num_drafts["suffix"] > 25
    assert drafter.counts.num_drafts["model"] >= 7, "at first, and every now and then"
    model.num_right = 8
    before = drafter.counts.num_drafts["model"]
    play(drafter, target, list(range(1, 400)), 10 * EXPLORE_EVERY)
    assert drafter.counts.num_drafts["model"] - before > 5 * EXPLORE_EVERY, "it was found to be good again"


def test_of_two_models_the_better_is_found_and_the_other_tried_in_turn():
    worse, better = KnownDrafter(num_right=1), KnownDrafter(num_right=5)
    drafter = hybrid(worse=worse, better=better)
    play(drafter, target, PROMPT, 6 * EXPLORE_EVERY)
    assert drafter.counts.num_drafts["better"] > 4 * EXPLORE_EVERY
    before = drafter.counts.num_drafts["worse"]
    play(drafter, target, list(range(1, 2000)), 4 * EXPLORE_EVERY)
    assert drafter.counts.num_drafts["worse"] - before >= 3, "the one that was not used for longest"


def test_a_new_request_starts_from_what_others_saw():
    lookup, model = KnownDrafter(num_right=2, confidence=0.9, length=2), KnownDrafter(num_right=6)
    drafter = hybrid({"suffix": lookup}, model=model)
    assert play(drafter, target, PROMPT, 4 * EXPLORE_EVERY).num_accepted[0] == 2
    drafter.release(SessionKey("peer", "request"))
    assert play(drafter, target, PROMPT, 1, key=SessionKey("peer", "another")).num_accepted == [6]


@pytest.mark.parametrize("sampled", [False, True])
def test_the_choice_is_made_before_a_model_draws_and_stays_whatever_it_drew(sampled: bool):
    """A model that takes three steps is waited for; the lookup is asked once; no other answer takes its place."""
    lookup = KnownDrafter(confidence=0.1)
    slow = KnownDrafter(num_right=0, num_steps=3, sampled=sampled)
    drafter = hybrid({"suffix": lookup}, slow=slow)
    ask = ask_of(PROMPT)
    assert drafter.draft([ask], max_num_tokens=1) == []
    lookup.confidence = 1.0
    assert drafter.draft([ask], max_num_tokens=1) == []
    (result,) = drafter.draft([ask], max_num_tokens=1)
    assert result.token_ids[0] == 504
    assert (result.draft_probs is not None) == sampled
    assert lookup.num_asked == 1


def test_a_superseded_ask_is_chosen_for_anew():
    lookup, slow = KnownDrafter(confidence=0.1), KnownDrafter(num_steps=2)
    drafter = hybrid({"suffix": lookup}, slow=slow)
    assert drafter.draft([ask_of(PROMPT, ask_id=1)], max_num_tokens=1) == []
    lookup.confidence = 1.0
    (result,) = drafter.draft([ask_of([*PROMPT, 4], ask_id=2)], max_num_tokens=1)
    assert (result.round_id, result.token_ids[0]) == (2, 5)
    assert drafter.counts.num_drafts == {"suffix": 1}


def test_what_a_longer_draft_could_win_is_bounded_by_what_is_asked_for():
    """A model that wins six is worth one where one is asked for: a sure lookup is better."""
    lookup, model = KnownDrafter(length=0), KnownDrafter(num_right=6)
    drafter = hybrid({"suffix": lookup}, model=model)
    tokens = play(drafter, target, PROMPT, 30).token_ids
    lookup.length, lookup.confidence = 2, 0.9
    before = drafter.counts.num_drafts["model"]
    draft_after(drafter, tokens, length=8)
    assert drafter.counts.num_drafts["model"] == before + 1
    tokens.append(tokens[-1] + 1)
    draft_after(drafter, tokens, length=1, ask_id=2)
    assert drafter.counts.num_drafts["model"] == before + 2, "0.9 is below 1"
    lookup.confidence = 1.0
    tokens.append(tokens[-1] + 1)
    draft_after(drafter, tokens, length=2, ask_id=3)
    assert drafter.counts.num_drafts["model"] == before + 2, "as good, and cheaper"


def test_where_nothing_may_be_computed_only_look_ups_in_no_time_are_asked():
    found, slow = KnownDrafter(confidence=0.1, needs=DraftNeeds(is_found=True)), KnownDrafter(confidence=0.9)
    model = KnownDrafter()
    drafter = hybrid({"suffix": found, "lookahead": slow}, model=model)
    assert drafter.needs.finds_some
    for ask_id in range(1, 2 * EXPLORE_EVERY):
        assert len(draft_after(drafter, PROMPT, ask_id=ask_id, length=4, max_computed=0).token_ids) == 4
    assert (slow.num_asked, model.num_asked) == (0, 0), "not even to see whether the model has become better"


def test_a_model_computes_no_more_than_it_may_and_what_is_found_is_as_long_as_it_can_be():
    found = KnownDrafter(confidence=0.5, needs=DraftNeeds(is_found=True))
    model = KnownDrafter(num_right=8)
    drafter = hybrid({"suffix": found}, model=model)
    for ask_id in range(2):  # until the model has won more than one token
        draft_after(drafter, [*PROMPT, *range(4, 4 + 8 * ask_id)], ask_id=ask_id, length=8)
    token_ids = [*PROMPT, *range(4, 12), 0]
    result = draft_after(drafter, token_ids, ask_id=9, length=4, max_computed=2)
    assert (len(result.token_ids), result.is_found) == (2, False), "0.94 tokens are found"
    found.confidence = 0.9
    result = draft_after(drafter, [*token_ids, 1], ask_id=10, length=4, max_computed=1)
    assert (len(result.token_ids), result.is_found) == (4, True)


def test_a_draft_asked_for_again_is_not_judged_before_anything_was_committed():
    drafter = hybrid({"suffix": KnownDrafter(confidence=0.9)}, model=KnownDrafter())
    for ask_id in (1, 2):
        draft_after(drafter, PROMPT, ask_id=ask_id)
    assert not drafter.counts.num_accepted
    draft_after(drafter, [*PROMPT, 4, 5, 99], ask_id=3)
    assert drafter.counts.num_accepted == {"suffix": 2}


def test_what_a_tree_won_is_counted_along_the_committed_path():
    @dataclass
    class TreeDrafter(KnownDrafter):
        def _result(self, ask: Ask) -> Draft:
            return ask.answer(
                (9, 4, 9, 5, 6),
                parents=(-1, -1, 1, 1, 3),
                confidences=(0.9,) * 5,
            )

    drafter = hybrid({"suffix": TreeDrafter()}, model=KnownDrafter())
    drafter.draft([ask_of(PROMPT, max_nodes=5)], max_num_tokens=1)
    drafter.draft([ask_of([*PROMPT, 4, 5, 7], ask_id=2, max_nodes=5)], max_num_tokens=1)
    assert drafter.counts.num_accepted == {"suffix": 2}
    drafter.draft([ask_of([*PROMPT, 4, 5, 7, 4, 6], ask_id=3, max_nodes=5)], max_num_tokens=1)
    assert drafter.counts.num_accepted == {"suffix": 3}, "6 follows 5 in the tree, not 4"


def test_expected_tokens_of_chains_and_trees():
    def result(confidences: tuple[float, ...] | None, parents: tuple[int, ...] | None = None) -> Draft:
        num_tokens = len(confidences or (1, 2))
        return Draft(
            request_id="r",
            round_id=1,
            position=0,
            token_ids=tuple(range(num_tokens)),
            parents=parents,
            confidences=confidences,
        )

    assert expected_tokens(result((0.5, 0.5, 0.5))) == pytest.approx(0.875)
    assert expected_tokens(result((0.5, 0.25, 0.5), (-1, -1, 0))) == pytest.approx(1.0)
    assert expected_tokens(result((0.5, 0.25, 0.5), (-1, -1, 1))) == pytest.approx(0.875)
    assert expected_tokens(result(None)) == 0.0
    assert expected_tokens(result((), ())) == 0.0


def test_releasing_forgets_everywhere():
    parts = [KnownDrafter(), KnownDrafter()]
    drafter = hybrid({"suffix": parts[0]}, model=parts[1])
    key = SessionKey("peer", "request")
    play(drafter, target, PROMPT, 2)
    with pytest.raises(AssertionError, match="a session that is gone"):
        drafter.check_integrity([])
    drafter.release(key)
    drafter.check_integrity([])
    assert [part.released for part in parts] == [[key], [key]]
    drafter.release(key)


def test_limits_and_needs_are_those_of_all_parts():
    states = KnownDrafter(needs=DraftNeeds(taps=(1, -1), last_state_only=True), vocab_size=50)
    guesser = KnownDrafter(needs=DraftNeeds(predictions=True), max_model_len=77)
    drafter = hybrid({"lookahead": guesser}, head=states)
    assert drafter.needs == DraftNeeds(taps=(1, -1), last_state_only=True, predictions=True)
    assert (drafter.vocab_size, drafter.max_model_len) == (50, 77)
    assert hybrid(a=KnownDrafter(), b=KnownDrafter()).needs == DraftNeeds()


def test_what_cannot_be_combined_is_refused():
    with pytest.raises(ValueError, match="two or more"):
        hybrid(model=KnownDrafter())
    states = DraftNeeds(taps=(0,))
    with pytest.raises(ValueError, match="at most one of a hybrid"):
        hybrid(first=KnownDrafter(needs=states), second=KnownDrafter(needs=states))
