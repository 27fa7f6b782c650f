"""A drafter that remembers gets the responses of sessions that ended, and of no others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outrider.drafter_service.engine.drafter import DraftEngineConfig
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.lookup.ngram_drafter import NgramDrafter
from outrider.drafter_service.lookup.suffix_drafter import SuffixDrafter
from outrider.drafter_service.service.hybrid_drafter import HybridDrafter
from outrider.verifier_service.messages.draft import Close, Commit, Draft, DraftSampling, History, Open, Resync, Seed
from outrider.verifier_service.messages.history import PastResponse

GREEDY = DraftSampling(temperature=0.0)
HISTORY = History(key="p", num_prompt_tokens=2)
TOKENS = (1, 2, 20, 21, 22, 23)


class Bench:
    def __init__(self) -> None:
        self.drafter = SuffixDrafter(vocab_size=100)
        self.engine = DraftEngine(self.drafter, clock=lambda: 0.0, config=DraftEngineConfig())

    def open(self, peer: str, token_ids: Sequence[int], history: History | None = HISTORY) -> None:
        self.engine.handle(peer, Open(request_id="r", sampling=GREEDY, token_ids=tuple(token_ids), history=history))

    def found(self, length: int = 4) -> tuple[int, ...]:
        """Return what a new sample of the prompt is drafted after so many tokens."""
        self.open("new", TOKENS[:length])
        ask = Commit(request_id="r", round_id=1, position=length, token_ids=(), max_length=8)
        self.engine.handle("new", ask)
        ((_, draft),) = [item for item in self.engine.step() if not isinstance(item[1], Resync)]
        assert isinstance(draft, Draft)
        self.engine.forget_peer("new")
        self.engine.check_integrity()
        return draft.token_ids


def test_a_response_is_found_after_its_end_though_nothing_was_asked_for_it():
    bench = Bench()
    bench.open("verifier", TOKENS)
    assert bench.found() == ()
    bench.engine.handle("verifier", Close(request_id="r"))
    assert bench.found() == (22, 23)
    assert bench.found(2) == (), "the prompt is no part of it"


def test_the_next_verifier_finds_it_too():
    bench = Bench()
    bench.open("first", TOKENS)
    bench.engine.handle("first", Close(request_id="r"))
    bench.engine.forget_peer("first")
    assert bench.found() == (22, 23)


def test_a_session_that_is_lost_leaves_nothing():
    bench = Bench()
    bench.open("verifier", TOKENS)
    bench.engine.forget_peer("verifier")
    assert bench.found() == ()


@pytest.mark.parametrize("history", [None, History(key="", num_prompt_tokens=2)])
def test_a_session_without_a_key_leaves_nothing_to_others(history: History | None):
    bench = Bench()
    bench.open("verifier", TOKENS, history)
    bench.engine.handle("verifier", Close(request_id="r"))
    assert bench.drafter.export() == SuffixDrafter(vocab_size=100).export(), "not in memory either"
    assert bench.found() == ()


def test_tokens_outside_the_vocabulary_are_not_remembered():
    bench = Bench()
    bench.open("verifier", (*TOKENS, 100))
    bench.engine.handle("verifier", Close(request_id="r"))
    assert bench.found() == ()


def seed(*token_ids: int, history: History = HISTORY) -> Seed:
    return Seed(request_id="r", history=history, responses=(PastResponse(token_ids=token_ids),))


def test_what_ended_elsewhere_is_found_once_it_was_said():
    bench = Bench()
    bench.engine.handle("verifier", seed(*TOKENS[2:]))
    assert bench.found() == (22, 23)
    assert bench.engine.counters.num_resyncs == 0, "it is no session's"


def test_a_seed_that_names_no_key_or_no_tokens_of_the_vocabulary_leaves_nothing():
    bench = Bench()
    bench.engine.handle("verifier", seed(*TOKENS[2:], history=History(key="", num_prompt_tokens=2)))
    assert bench.engine.counters.num_bad_messages == 0
    bench.engine.handle("verifier", seed(*TOKENS[2:], 100))
    assert bench.engine.counters.num_bad_messages == 1
    assert bench.drafter.export() == SuffixDrafter(vocab_size=100).export()
    assert bench.found() == ()


def test_drafters_without_a_memory_pass_over_it():
    engine = DraftEngine(NgramDrafter(vocab_size=100), clock=lambda: 0.0, config=DraftEngineConfig())
    engine.handle("verifier", seed(20, 21))
    assert engine.step() == []


def test_a_hybrid_lets_its_look_ups_have_it():
    bench = Bench()
    hybrid = HybridDrafter({"suffix": bench.drafter, "ngram": NgramDrafter(vocab_size=100)}, {})
    DraftEngine(hybrid, clock=lambda: 0.0, config=DraftEngineConfig()).handle("verifier", seed(*TOKENS[2:]))
    assert bench.found() == (22, 23)
