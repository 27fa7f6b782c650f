"""Requests of two kinds that end and make room: worths lead to the lengths that are best in the long run."""

from __future__ import annotations

from itertools import accumulate

import pytest

from outrider.verifier_service.pricing.token_worth import MAX_WORTH, TokenWorth

NUM_LANES = 40
FIXED_S, TOKEN_S = 12e-3, 1e-4  # of a step; of each token in it
RATES = {"quick": 0.9, "slow": 0.6}  # at which each further draft token is accepted
MAX_LENGTH = 16


def survivals(kind: str) -> list[float]:
    return [RATES[kind] ** (place + 1) for place in range(MAX_LENGTH)]


def tokens(kind: str, length: int) -> float:
    """Return how many tokens a step brings."""
    return 1.0 + sum(survivals(kind)[:length])


def seconds_per_token(kind: str, length: int) -> float:
    """Return what a token costs in the long run: a lane's share of the step, and its own tokens."""
    return (FIXED_S / NUM_LANES + TOKEN_S * (1 + length)) / tokens(kind, length)


def settled_lengths(worth: TokenWorth) -> dict[str, int]:
    """Play steps until lengths no longer change; a kind holds lanes for as long as its requests take."""
    lengths = dict.fromkeys(RATES, 4)
    for _ in range(200):
        num_steps = {kind: 1.0 / tokens(kind, length) for kind, length in lengths.items()}
        num_slow = round(NUM_LANES * num_steps["slow"] / sum(num_steps.values()))
        kinds = ["slow"] * num_slow + ["quick"] * (NUM_LANES - num_slow)
        step_s = FIXED_S + TOKEN_S * sum(1 + lengths[kind] for kind in kinds)
        gained = sum(sum(worth.worths(kind, survivals(kind)[: lengths[kind]])) for kind in kinds)
        price = TOKEN_S * (NUM_LANES + gained) / step_s
        worth.observe([(kind, tokens(kind, lengths[kind]), lengths[kind]) for kind in kinds], price)
        lengths = {kind: sum(value > price for value in worth.worths(kind, survivals(kind))) for kind in RATES}
    return lengths


class Unweighted(TokenWorth):
    """Most tokens in this step: the planted defect."""

    def weight(self, request_id: str) -> float:
        return 1.0


def test_each_kind_gets_the_length_that_is_best_in_the_long_run():
    best = {kind: min(range(MAX_LENGTH + 1), key=lambda length: seconds_per_token(kind, length)) for kind in RATES}
    assert settled_lengths(TokenWorth()) == best
    greedy = settled_lengths(Unweighted())
    assert greedy["quick"] > best["quick"], "which hurry anyway"
    assert greedy["slow"] < best["slow"]
    assert sum(seconds_per_token(kind, greedy[kind]) for kind in RATES) > 1.01 * sum(
        seconds_per_token(kind, best[kind]) for kind in RATES
    )


def test_among_equals_and_strangers_a_worth_is_a_survival():
    worth, row = TokenWorth(), list(accumulate([0.5] * 3, lambda above, rate: above * rate))
    assert worth.worths("a", row) is row
    for _ in range(20):
        worth.observe([("a", 3, 4), ("b", 3, 4)], price=0.3)
    assert worth.worths("a", row) == pytest.approx(row, rel=1e-3)
    assert worth.worths("stranger", row) is row


def test_worths_keep_their_order_and_stay_below_the_price_that_nothing_exceeds():
    worth = TokenWorth()
    for _ in range(100):
        worth.observe([("slow", 1, 0), ("quick", 9, 8)], price=0.05)
    worths = worth.worths("slow", [0.99, 0.9, 0.2])
    assert list(worths) == sorted(worths, reverse=True)
    assert worths[0] == MAX_WORTH
    assert 0.0 < worth.worths("quick", [0.99])[0] < 0.5


def test_pinned_requests_that_draft_at_any_price_leave_worths_sane():
    for num_tokens in (9, 1):  # all that they draft is accepted, or nothing
        worth = TokenWorth()
        for _ in range(100):
            worth.observe([("pinned", num_tokens, 8), ("other", num_tokens, 8), ("plain", 1, 0)], price=1.0)
        if num_tokens == 9:
            assert (worth.weight("pinned"), worth.weight("plain")) == (1.0, 1.0), "its tokens cost what any do"
        else:
            assert 0.0 < worth.weight("plain") < 1.0 < worth.weight("pinned") < 2.0, "each costs it eight drafts"


def test_a_step_of_prompts_alone_and_requests_that_have_left_say_nothing():
    worth = TokenWorth()
    worth.observe([], price=0.5)
    worth.observe([("a", 2, 4), ("b", 1, 4)], price=0.5)
    assert worth.request_ids == {"a", "b"}
    for request_id in ("a", "b", "never here"):
        worth.forget(request_id)
    assert worth.request_ids == set()
    assert worth.worths("a", [0.5]) == [0.5]
