"""Drafts made in advance are those that would be drafted now: through the drafting engine, over known logits."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fakes.runner import FakeRunner, continuation
from outrider.drafter_service.engine.draft_sampler import Children
from outrider.drafter_service.engine.drafter import Ask, DraftEngineConfig, SessionKey
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.engine.speculation_cache import BranchingChain
from outrider.drafter_service.engine.tree_growth import Growth
from outrider.verifier_service.messages.draft import (
    DRAFT_PROB_SCALE,
    Close,
    Commit,
    Draft,
    DraftSampling,
    Open,
    SparseRow,
    check_draft,
)
from tiny.drafters import model_drafter

GREEDY = DraftSampling(temperature=0.0)
DRAWN = DraftSampling(temperature=1.0)
SEEDED = DraftSampling(temperature=1.0, seed=4)
VOCAB_SIZE = 97
PROMPT = [5, 6, 0, 1, 2]
LENGTH = 3
FEW = 7  # tokens of a vocabulary whose outcomes can all be prepared for


class Clock:
    """Time that passes only where it is told to: `step_s` for each forward."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class TimedRunner(FakeRunner):
    def __init__(self, clock: Clock, step_s: float, **options: int) -> None:
        super().__init__(**options)
        self._clock, self._step_s = clock, step_s

    def execute(self, batch: Any, chosen: torch.Tensor | None = None) -> torch.Tensor:
        self._clock.now_s += self._step_s
        return super().execute(batch, chosen)


class Table:
    """A drafting engine that runs ahead, and what a verifier says to it."""

    def __init__(self, *, num_branches: int = 4, step_s: float = 0.0, budget: int = 64, **options: int) -> None:
        self.clock = Clock()
        self.runner = TimedRunner(self.clock, step_s, **options)
        rng = torch.Generator().manual_seed(0)
        self.drafter = model_drafter(self.runner, rng, num_ahead_branches=num_branches)
        config = DraftEngineConfig(max_num_batched_tokens=budget, max_draft_length=8, max_tree_nodes=6)
        self.engine = DraftEngine(self.drafter, clock=self.clock, config=config, ahead=self.drafter)
        self.tokens: dict[str, list[int]] = {}
        self._round_ids = itertools.count(1)

    def open(self, tokens: Sequence[int] = PROMPT, name: str = "r", sampling: DraftSampling = GREEDY) -> None:
        self.tokens[name] = list(tokens)
        self.engine.handle("v", Open(request_id=name, sampling=sampling, token_ids=tuple(tokens)))

    def commit(self, *new: int, name: str = "r", length: int = LENGTH, **fields: Any) -> list[Draft]:
        """Say what was committed, and ask; return what is answered without a step."""
        position = len(self.tokens[name])
        self.tokens[name] += new
        message = Commit(
            request_id=name,
            round_id=next(self._round_ids),
            position=position,
            token_ids=new,
            max_length=length,
            **fields,
        )
        self.engine.handle("v", message)
        self.engine.check_integrity()
        return self.drafts(self.engine.flush())

    def drafts(self, answers: Sequence[tuple[str, object]]) -> list[Draft]:
        found = [message for _, message in answers]
        assert all(isinstance(message, Draft) for message in found)
        return found  # type: ignore[return-value]

    def run(self) -> dict[str, Draft]:
        """Draft what is asked for."""
        found: dict[str, Draft] = {}
        for _ in range(500):
            if not self.engine.has_work():
                return found
            found |= {draft.request_id: draft for draft in self.drafts(self.engine.step())}
            self.engine.check_integrity()
        raise AssertionError("drafts do not become complete")

    def ask(self, *new: int, name: str = "r", length: int = LENGTH, **fields: Any) -> Draft:
        at_once = self.commit(*new, name=name, length=length, **fields)
        (draft,) = at_once or [self.run()[name]]
        return draft

    def idle(self, num_steps: int = 1000) -> int:
        """Let the engine have its spare time; return how many forwards it made of it."""
        for number in range(num_steps):
            if not self.engine.has_spare_work():
                return number
            self.engine.run_ahead()
            self.engine.check_integrity()
        return num_steps

    def expected(self, length: int = LENGTH, name: str = "r") -> tuple[int, ...]:
        return continuation(self.tokens[name], length, self.runner.vocab_size)

    def outcomes(self) -> list[tuple[int, ...]]:
        """Return what the one session's next commit may be that is prepared for, likeliest first."""
        (trunk,) = self.drafter._cache._trunks.values()
        return list(trunk.branches)

    @property
    def hits_and_misses(self) -> tuple[int, int]:
        counters = self.engine.counters
        return counters.num_cache_hits, counters.num_cache_misses


def prepared(num_branches: int = 4, **options: int) -> Table:
    table = Table(num_branches=num_branches, **options)
    table.open()
    table.ask()
    return table


def test_an_outcome_that_was_prepared_for_is_answered_without_a_forward():
    table = prepared()
    bonus = continuation([*PROMPT, *table.expected()], 1, VOCAB_SIZE)
    assert table.idle() == 1 + LENGTH
    table.runner.batches.clear()
    (draft,) = table.commit(*table.expected(), *bonus)
    assert draft.token_ids == table.expected()
    assert (draft.position, draft.round_id) == (len(table.tokens["r"]), 2)
    assert table.runner.batches == []
    assert table.hits_and_misses == (1, 0)


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_whatever_the_outcome_the_draft_and_all_after_it_are_the_models(block_size: int):
    num_outcomes = LENGTH * (FEW - 1) + FEW
    options = {"vocab_size": FEW, "block_size": block_size, "num_blocks": 1024 // block_size}
    for index in range(num_outcomes):
        table = prepared(num_branches=num_outcomes, **options)
        table.idle()
        outcome = table.outcomes()[index]
        (draft,) = table.commit(*outcome)
        assert draft.token_ids == table.expected()
        table.idle()
        again = table.ask(*table.expected(1), index % FEW)  # on the KV that was adopted
        assert again.token_ids == table.expected()


def test_the_winners_kv_is_kept_and_the_others_are_freed():
    table = prepared(num_branches=8, block_size=4, num_blocks=64)
    table.idle()
    bonus = continuation([*PROMPT, *table.expected()], 1, VOCAB_SIZE)
    table.ask(*table.expected(), *bonus)
    table.runner.batches.clear()
    table.engine.run_ahead()
    assert [batch.num_tokens for batch in table.runner.batches] == [1], "the last drafted token alone is new"
    table.engine.handle("v", Close(request_id="r"))
    table.engine.check_integrity()
    assert not table.engine.has_spare_work()
    assert table.drafter._pool.num_free_blocks == 64


@pytest.mark.parametrize("num_spare", range(6))
def test_a_branch_that_is_not_through_goes_on_where_it_is(num_spare: int):
    table = prepared()
    bonus = continuation([*PROMPT, *table.expected()], 1, VOCAB_SIZE)
    table.idle(num_spare)
    table.runner.batches.clear()
    draft = table.ask(*table.expected(), *bonus)
    assert draft.token_ids == table.expected()
    num_drawn = max(0, num_spare - 1)
    assert len(table.runner.batches) == max(0, LENGTH - num_drawn)
    assert table.hits_and_misses == ((1, 0) if num_drawn >= LENGTH else (0, min(num_spare, 1)))


def test_an_outcome_that_nobody_thought_of_is_drafted_as_ever():
    table = prepared()
    table.idle()
    assert table.commit(90) == []
    assert table.run()["r"].token_ids == table.expected()
    assert table.hits_and_misses == (0, 1)


def test_the_first_ask_is_neither_a_hit_nor_a_miss():
    assert prepared().hits_and_misses == (0, 0)


@pytest.mark.parametrize("length", [1, 2])
def test_a_shorter_ask_gets_the_beginning(length: int):
    table = prepared()
    table.idle()
    bonus = continuation([*PROMPT, *table.expected()], 1, VOCAB_SIZE)
    (draft,) = table.commit(*table.expected(), *bonus, length=length)
    assert draft.token_ids == table.expected(length)
    table.idle()
    assert table.ask(*table.expected(length), 3).token_ids == table.expected()


def test_asks_come_before_what_may_be_asked():
    table = prepared()
    assert table.engine.has_spare_work()
    table.open([1, 2], "other")
    table.commit(name="other")
    assert not table.engine.has_spare_work()
    num_batches = len(table.runner.batches)
    table.engine.run_ahead()
    assert len(table.runner.batches) == num_batches
    assert table.run()["other"].token_ids == table.expected(name="other")


def test_branches_give_their_kv_to_whatever_is_asked_for():
    table = prepared(num_branches=8, block_size=4, num_blocks=10)
    table.idle()
    assert table.drafter._pool.num_free_blocks < 8
    table.open(list(range(29)), "long")
    assert table.ask(name="long").token_ids == table.expected(name="long")
    assert table.ask(90).token_ids == table.expected()


def test_spare_work_ends_where_the_pool_does():
    table = prepared(num_branches=8, block_size=4, num_blocks=4)
    assert table.idle() < 100
    assert table.ask(0).token_ids == table.expected()


@pytest.mark.parametrize("fields", [{"max_nodes": 5}, {"forced_ids": (1, 2)}])
def test_trees_and_forced_tokens_are_not_prepared_for(fields: dict[str, Any]):
    table = prepared()
    table.idle()
    bonus = continuation([*PROMPT, *table.expected()], 1, VOCAB_SIZE)
    assert table.commit(*table.expected(), *bonus, **fields) == []
    table.run()
    assert not table.engine.has_spare_work()
    assert table.hits_and_misses == (0, 1)


def test_nothing_is_prepared_where_nothing_was_asked_or_known():
    table = prepared()
    assert table.commit(1, length=0) == []
    assert not table.engine.has_spare_work(), "speculation is off"
    table.ask()
    table.open([1, 2, 3])
    assert table.ask().token_ids == table.expected(), "another sequence under the same name"
    table.engine.forget_peer("v")
    assert not table.engine.has_spare_work()
    table.engine.check_integrity()


def test_what_was_prepared_is_of_no_use_to_another_sequence():
    for change in ({"tokens": [7, *PROMPT[1:]]}, {"sampling": DraftSampling(temperature=0.0, top_k=1)}):
        table = prepared()
        table.idle()
        outcome = table.outcomes()[0]
        table.open(**change)
        assert table.commit(*outcome) == []
        assert table.run()["r"].token_ids == table.expected()


def test_drafts_end_at_the_models_context_in_advance_too():
    table = prepared(max_model_len=len(PROMPT) + LENGTH + 3)
    bonus = continuation([*PROMPT, *table.expected()], 1, VOCAB_SIZE)
    table.idle()
    (draft,) = table.commit(*table.expected(), *bonus)
    assert draft.token_ids == table.expected()  # one beyond the context
    table.idle()
    assert table.ask(*draft.token_ids[:2]).token_ids == table.expected(1)


# --- what a miss is worth ---


@pytest.mark.parametrize("num_accepted", range(LENGTH + 1))
def test_acceptance_is_learned_from_what_is_committed(num_accepted: int):
    table = prepared()
    table.idle()
    acceptance = table.drafter._cache._acceptance
    table.commit(*table.expected()[:num_accepted], 90)
    num_judged = min(num_accepted + 1, LENGTH)
    assert acceptance.overall == pytest.approx((num_accepted + 0.5) / (num_judged + 1.0), abs=0.01)


def test_a_token_that_was_cut_off_is_judged_by_what_the_target_chose_there_and_those_after_it_are_not():
    table = prepared()
    table.idle()
    table.commit(*table.expected()[:2])  # the verifier cut the draft after its first token, and chose the second itself
    assert table.drafter._cache._acceptance.overall == pytest.approx(2.5 / 3.0, abs=0.01)


def play_misses(step_s: float, round_s: float, *, num_spare: int = 1) -> list[int]:
    table = Table(step_s=step_s)
    table.open()
    lengths: list[int] = []
    for _ in range(4):
        draft = table.ask(90)  # what no one thought of
        lengths.append(len(draft.token_ids))
        now_s = table.clock.now_s
        table.idle(num_spare)
        table.clock.now_s = now_s + round_s
    return lengths


def test_a_miss_is_drafted_as_far_as_is_worth_the_verifiers_time():
    assert play_misses(step_s=0.001, round_s=1.0) == [3, 3, 3, 3]
    first, *others = play_misses(step_s=1.0, round_s=0.5)
    assert first == LENGTH, "nothing is known yet"
    assert others == [0, 0, 0], "a token that was never accepted is not waited for"
    assert play_misses(step_s=1.0, round_s=0.5, num_spare=0) == [3, 3, 3, 3], "a drafter without spare time drafts"


def test_after_an_empty_answer_the_next_token_is_prepared_for():
    table = Table(step_s=1.0, num_branches=3)
    table.open()
    table.ask(90)
    table.idle(1)
    table.clock.now_s = 3.5  # three forwards, and half a second in which one more was made
    assert table.ask(90).token_ids == ()
    table.idle()
    (draft,) = table.commit(*continuation(table.tokens["r"], 1, VOCAB_SIZE))
    assert draft.token_ids == table.expected()


# --- sampled drafts ---


@pytest.mark.parametrize("sampling", [DRAWN, SEEDED], ids=["drawn", "seeded"])
def test_prepared_drafts_are_valid_and_of_the_length_that_was_asked(sampling: DraftSampling):
    table = Table(num_branches=16)
    table.open(sampling=sampling)
    draft, rng = table.ask(), random.Random(1)
    for _ in range(30):
        table.idle()
        draft = table.ask(*rng.choice(table.outcomes()))
        assert check_draft(draft, draft_vocab_size=VOCAB_SIZE, max_length=LENGTH) is None
        assert len(draft.token_ids) == min(LENGTH, table.runner.max_model_len - len(table.tokens["r"]) + 1)
        assert (draft.draft_probs is None) == (sampling is SEEDED)
        if len(table.tokens["r"]) > 50:
            break
    assert table.hits_and_misses[0] > 5


def test_a_seeded_draft_is_the_same_whether_prepared_or_not():
    prepared_one, plain = Table(num_branches=16), Table(num_branches=16)
    for table in (prepared_one, plain):
        table.open(sampling=SEEDED)
    drafts = [table.ask() for table in (prepared_one, plain)]
    for _ in range(8):
        prepared_one.idle()
        new = prepared_one.outcomes()[0]
        drafts = [table.ask(*new) for table in (prepared_one, plain)]
        assert drafts[0].token_ids == drafts[1].token_ids
    assert prepared_one.hits_and_misses == (8, 0)
    assert plain.hits_and_misses[0] == 0


def test_a_chain_notes_what_might_stand_in_each_place():
    def chain_of(sampling: DraftSampling) -> BranchingChain:
        ask = Ask(key=SessionKey("v", "r"), ask_id=1, token_ids=[1], sampling=sampling, length=2)
        chain: Growth = BranchingChain(ask, num_candidates=3)
        assert isinstance(chain, BranchingChain)
        return chain

    greedy = chain_of(GREEDY)
    assert (greedy.num_children, greedy.frontier) == (3, [-1])
    greedy.grow([Children(token_ids=(7, 8, 9), probs=(0.5, 0.25, 0.125))])
    assert greedy.places[0].others == [(8, 0.5), (9, 0.25)]
    assert greedy.frontier == [0]
    greedy.stop_at(1)
    assert (greedy.frontier, greedy.rows()) == ([], ())
    drawn = chain_of(DRAWN)
    assert drawn.num_children == 1, "what is drawn is drawn once"
    row = SparseRow(token_ids=(8, 7, 3), weights=(DRAFT_PROB_SCALE // 2, DRAFT_PROB_SCALE // 4, DRAFT_PROB_SCALE // 4))
    drawn.grow([Children(token_ids=(7,), probs=(0.5,), row=row)])
    assert drawn.places[0].confidence == 0.5
    assert drawn.places[0].others == [(8, pytest.approx(2 / 3)), (3, pytest.approx(1 / 3))]
    drawn.grow([Children(token_ids=(8,), probs=(0.5,), row=row)])
    assert drawn.frontier == []
    drawn.stop_at(1)
    assert drawn.rows() == (row,)
    assert drawn.chosen().token_ids == (7,)


# --- everything at once ---


@pytest.mark.parametrize("seed", range(6))
def test_greedy_drafts_are_the_models_whatever_happens(seed: int):
    rng = random.Random(seed)
    block_size = rng.choice((1, 3, 4))
    num_blocks = rng.choice((30, 48, 160)) // block_size
    table = Table(
        num_branches=rng.choice((1, 3, 8)),
        budget=rng.choice((4, 16, 64)),
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=28,
    )
    last: dict[str, Draft] = {}
    for _ in range(150):
        name = rng.choice("abc")
        tokens = table.tokens.get(name)
        if tokens is None or len(tokens) > 24 or rng.random() < 0.03:
            table.engine.handle("v", Close(request_id=name))
            last.pop(name, None)
            table.open([rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 9))], name, rng.choice((GREEDY, DRAWN)))
            table.commit(name=name)
        elif name in last:
            new = next_tokens(rng, last.pop(name), tokens)
            last |= {d.request_id: d for d in table.commit(*new, name=name, length=rng.choice((1, 3, 3, 5)))}
        for _ in range(rng.choice((0, 1, 9, 30))):
            last |= {d.request_id: d for d in table.drafts(table.engine.step())}
            table.engine.check_integrity()
        table.idle(rng.choice((0, 1, 3, 20)))
        for draft in last.values():
            context = table.tokens[draft.request_id]
            if draft.draft_probs is None and draft.position == len(context):
                assert draft.token_ids == continuation(context, len(draft.token_ids), VOCAB_SIZE)
    hits, misses = table.hits_and_misses
    assert misses > 0
    assert hits > 0 or num_blocks < 100 // block_size, "a pool this small has nothing to spare"


def next_tokens(rng: random.Random, draft: Draft, tokens: Sequence[int]) -> list[int]:
    """Verify a draft: some of it is accepted, then comes a token that may have been thought of."""
    num_accepted = rng.randint(0, len(draft.token_ids))
    accepted = draft.token_ids[:num_accepted]
    following = continuation([*tokens, *accepted], 1, VOCAB_SIZE)[0]
    return [*accepted, rng.choice((0, 1, following, 90))]
