"""What is said of a drafter's end."""

from __future__ import annotations

import dataclasses

from fakes.played import played_answer
from outrider.lab.demo.kill import Kill, Recovery
from outrider.lab.same_tokens import Pair

STREAM = (("a", "accepted"), ("b", "recovered"), ("c", "plain"))
PAIR = Pair(what="killed", prompt=(1,), expected=(1, 1, 1), given=(1, 1, 1))


def test_the_longest_pause_is_one_from_the_kill_on():
    stream = played_answer(*STREAM, every_s=1.0)
    assert Kill(answer=stream, pair=PAIR, struck_s=1.4, recovery=Recovery()).longest_pause_s == 1.0
    assert Kill(answer=stream, pair=PAIR, struck_s=9.0, recovery=Recovery()).longest_pause_s == 0.0


def test_the_outcome_is_one_line():
    recovery = Recovery(drafter_s=5.0, draft_s=7.4)
    kill = Kill(answer=played_answer(*STREAM), pair=PAIR, struck_s=0.15, recovery=recovery)
    assert kill.outcome == "none of 3 tokens changed; longest pause 100 ms; drafts again after 7.2 s"


def test_a_token_that_changed_is_said():
    pair = dataclasses.replace(PAIR, given=(1, 2, 1))
    kill = Kill(answer=played_answer(*STREAM), pair=pair, struck_s=0.15, recovery=Recovery())
    assert kill.outcome.startswith("token 2 of 3 tokens changed; ")
