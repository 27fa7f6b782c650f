"""The study of a model that drafts for itself: what counts as another token, and what stands in its table."""

from __future__ import annotations

from benchmarks.masks.tidar import ARMS, PLAIN, SAMPLINGS, Arm, pairs_of, to_markdown
from fakes.played import FakeReference
from outrider.lab.same_tokens import Seeded, compare


def made_up() -> dict[str, Arm]:
    arms = {name: Arm(None, None) for name in ARMS}  # type: ignore[arg-type]
    for index, (name, arm) in enumerate(arms.items()):
        for sampling in SAMPLINGS:
            arm.tokens[sampling] = [[1, 2, 3, 4], [5, 6, 7, 8]]
            arm.rates[sampling] = [100.0 + 10 * index, 120.0]
            arm.num_rounds[sampling] = 8 if name == PLAIN else 4
            arm.num_rows[sampling], arm.num_drafted[sampling], arm.num_accepted[sampling] = 50, 12, 4
    return arms


def test_tokens_must_be_plain_decodings_unless_they_are_drawn_anew() -> None:
    arms = made_up()
    arms["by price"].tokens["greedy"] = [[1, 2, 3, 4], [5, 6, 7, 9]]
    arms["by price"].tokens["unseeded, temperature 1"] = [[0]]
    pairs = pairs_of(arms, [(1,), (2,)])
    assert {pair.seeded for pair in pairs} == {None, Seeded(seed=11, temperature=1.0)}
    tally = compare(pairs, FakeReference)
    assert [(each.what, each.place) for each in tally.differences] == [("by price, greedy, prompt 2", 3)]
    assert tally.num_answers == (len(ARMS) - 1) * 2 * 2


def test_the_table_has_tokens_and_rows_of_a_forward_and_speed_beside_plain_decoding() -> None:
    lines = to_markdown(made_up(), num_prompt_rows=10).splitlines()
    assert lines[2] == "| greedy | plain | 1.00 | 4 of 12 | 5.0 | 110 | 1.00 (1.00-1.00) |"
    assert lines[4] == "| greedy | masks for all outcomes | 2.00 | 4 of 12 | 10.0 | 120 | 1.10 (1.00-1.20) |"
    assert len(lines) == 2 + len(ARMS) * len(SAMPLINGS)
