"""Drafts made in advance are those that would be drafted now: through the drafting engine, over known laws.

Whoever has a model: tokens alone. Whoever has a head: its own states where the target's are not there yet.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from fakes.runner import continuation
from outrider.drafter_service.engine.draft_sampler import Children
from outrider.drafter_service.engine.drafter import Ask, SessionKey
from outrider.drafter_service.engine.spare_time import TRIED_ANSWERS
from outrider.drafter_service.engine.speculation_cache import BranchingChain
from outrider.drafter_service.engine.tree_growth import Growth
from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, Draft, DraftSampling, SparseRow
from outrider.verifier_service.messages.draft_checks import check_draft
from tiny.drafting.running_ahead import FEW, GREEDY, LENGTH, PROMPT, Ahead, drafts_in
from tiny.heads import VOCAB_SIZE, SlowDrafting, greedy_chain, states_of

DRAWN = DraftSampling(temperature=1.0)
SEEDED = DraftSampling(temperature=1.0, seed=4)

every_kind = pytest.mark.parametrize("kind", ["model", "eagle", "eagle3", "mtp"])
either_kind = pytest.mark.parametrize("kind", ["model", "eagle3"])


@every_kind
def test_an_outcome_that_was_prepared_for_is_answered_without_a_forward(kind: str):
    ahead = Ahead.prepared(kind)
    assert ahead.hits_and_misses == (0, 0), "the first ask is neither"
    assert len(ahead.idle()) >= 1 + LENGTH
    ahead.runner.num_computed.clear()
    outcome = ahead.outcomes()[0]
    expected = ahead.expected(outcome=outcome)
    (draft,) = ahead.commit(*outcome)
    assert draft.token_ids == expected
    assert (draft.position, draft.round_id) == (len(ahead.tokens["r"]), 2)
    assert ahead.runner.num_computed == []
    assert ahead.hits_and_misses == (1, 0)


@pytest.mark.parametrize("block_size", [1, 3, 4])
@every_kind
def test_whatever_the_outcome_the_draft_and_all_after_it_are_right(kind: str, block_size: int):
    """One outcome of every length; a miss afterwards is drafted from the target's states alone."""
    options = {"vocab_size": FEW, "num_branches": 64, "block_size": block_size, "num_blocks": 1024 // block_size}
    probe = Ahead.prepared(kind, **options)
    probe.idle()
    outcomes = probe.outcomes() if kind == "model" else {len(each): each for each in probe.outcomes()}.values()
    assert len(outcomes) >= LENGTH
    for index, outcome in enumerate(outcomes):
        ahead = Ahead.prepared(kind, **options)
        ahead.idle()
        expected = ahead.expected(outcome=outcome)
        (draft,) = ahead.commit(*outcome)
        assert draft.token_ids == expected
        ahead.idle(index)
        last = 60 if ahead.heads else index % FEW
        again = ahead.ask(*draft.token_ids[:1], last)  # on the KV that was adopted
        assert again.token_ids == ahead.expected()


@either_kind
def test_what_the_branches_hold_is_free_once_somebody_asks_or_the_session_ends(kind: str):
    ahead = Ahead.prepared(kind, num_branches=8, num_blocks=10)
    ahead.idle()
    long = [(3 * i + 1) % VOCAB_SIZE for i in range(29)]
    ahead.open(long, "long")
    assert ahead.ask(name="long").token_ids == ahead.expected(name="long")
    assert ahead.ask(5).token_ids == ahead.expected()
    ahead.idle()
    for name in ("r", "long"):
        ahead.close(name)
    assert not ahead.engine.has_spare_work()
    ahead.open([*long, *range(8)], "all of the pool")
    assert ahead.ask(name="all of the pool").token_ids == ahead.expected(name="all of the pool")


@pytest.mark.parametrize("num_spare", range(6))
@either_kind
def test_a_branch_that_is_not_through_goes_on_where_it_is(kind: str, num_spare: int):
    ahead, probe = Ahead.prepared(kind), Ahead.prepared(kind)
    probe.idle()
    outcome = probe.outcomes()[0]
    num_drawn = max(0, num_spare - 1)
    expected = ahead.expected(outcome=outcome)[:num_drawn]
    ahead.idle(num_spare)
    ahead.runner.num_computed.clear()
    draft = ahead.ask(*outcome)
    assert draft.token_ids[:num_drawn] == expected
    assert len(draft.token_ids) == LENGTH
    if num_drawn == 0:
        assert draft.token_ids == ahead.expected()
    elif kind == "model":
        assert len(ahead.runner.num_computed) == max(0, LENGTH - num_drawn)
    elif num_drawn < LENGTH:  # the states that have come are taken in on the way
        assert ahead.runner.num_computed == [len(outcome), *[1] * (LENGTH - num_drawn)]
    assert ahead.hits_and_misses == ((1, 0) if num_drawn >= LENGTH else (0, min(num_spare, 1)))


@either_kind
def test_an_outcome_that_nobody_thought_of_is_drafted_as_ever(kind: str):
    ahead = Ahead.prepared(kind)
    ahead.idle()
    assert ahead.commit(ahead.surprise()) == []
    assert ahead.run()["r"].token_ids == ahead.expected()
    assert ahead.hits_and_misses == (0, 1)


@pytest.mark.parametrize("length", [1, 2])
@either_kind
def test_a_shorter_ask_gets_the_beginning(kind: str, length: int):
    ahead = Ahead.prepared(kind)
    ahead.idle()
    outcome = ahead.outcomes()[0]
    expected = ahead.expected(outcome=outcome)
    (draft,) = ahead.commit(*outcome, length=length)
    assert draft.token_ids == expected[:length]
    ahead.idle()
    assert ahead.ask(ahead.surprise()).token_ids == ahead.expected()


@pytest.mark.parametrize("fields", [{"max_nodes": 5}, {"forced_ids": (1, 2)}])
@either_kind
def test_trees_and_forced_tokens_are_not_prepared_for(kind: str, fields: dict[str, Any]):
    ahead = Ahead.prepared(kind)
    ahead.idle()
    assert ahead.commit(*ahead.outcomes()[0], **fields) == []
    ahead.run()
    assert not ahead.engine.has_spare_work()
    assert ahead.hits_and_misses == (0, 1)


@pytest.mark.parametrize("sampling", [DRAWN, SEEDED], ids=["drawn", "seeded"])
@either_kind
def test_prepared_drafts_are_valid_and_of_the_length_that_was_asked(kind: str, sampling: DraftSampling):
    ahead, rng = Ahead(kind, num_branches=16, num_blocks=512), random.Random(1)
    ahead.open(sampling=sampling)
    ahead.ask()
    num_answers = 1
    while len(ahead.tokens["r"]) < 50 and num_answers < TRIED_ANSWERS:  # then it is tried without running ahead
        num_answers += 1
        ahead.idle()
        draft = ahead.ask(*rng.choice(ahead.outcomes()))
        assert check_draft(draft, draft_vocab_size=VOCAB_SIZE, max_length=LENGTH) is None
        assert len(draft.token_ids) == LENGTH
        assert (draft.draft_probs is None) == (sampling is SEEDED)
    assert ahead.hits_and_misses[0] > 5


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("family", ["model", "head"])
def test_drafts_are_right_whatever_happens(family: str, seed: int):
    rng = random.Random(seed)
    block_size = rng.choice((1, 3, 4))
    ahead = Ahead(
        "model" if family == "model" else rng.choice(("eagle", "eagle3", "mtp")),
        num_branches=rng.choice((1, 3, 8)),
        budget=rng.choice((4, 16, 64)),
        block_size=block_size,
        num_blocks=rng.choice((30, 48, 160)) // block_size,
        max_model_len=28,
    )
    last: dict[str, Draft] = {}
    for _ in range(120):
        name = rng.choice("abc")
        if name not in ahead.tokens or len(ahead.tokens[name]) > 24 or rng.random() < 0.03:
            ahead.close(name)
            last.pop(name, None)
            ahead.open([rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(2, 9))], name, rng.choice((GREEDY, DRAWN)))
            ahead.commit(name=name)
        elif name in last:
            draft = last.pop(name)
            num_accepted = rng.randint(0, len(draft.token_ids))
            accepted = draft.token_ids[:num_accepted]
            new = [*accepted, rng.choice((*draft.token_ids, 1, 60))]
            length, num_late = rng.choice((1, 3, 3, 5)), rng.choice((0, 0, 1))
            fields = {"max_nodes": rng.choice((0, 0, 0, 5))}
            last |= named(ahead.commit(*new, name=name, length=length, num_late=num_late, **fields))
        hits = ahead.hits_and_misses[0]
        for _ in range(rng.choice((0, 1, 9, 30))):
            last |= named(drafts_in(ahead.engine.step()))
            ahead.engine.check_integrity()
        assert ahead.hits_and_misses[0] == hits
        ahead.idle(rng.choice((0, 1, 3, 20)))
        for draft in last.values() if family == "model" else ():
            context = ahead.tokens[draft.request_id]
            if draft.draft_probs is None and draft.parents is None and draft.position == len(context):
                assert draft.token_ids == continuation(context, len(draft.token_ids), VOCAB_SIZE)
    assert sum(ahead.hits_and_misses) > 0
    for name in "abc":
        ahead.open(PROMPT, name)
        assert ahead.ask(name=name).token_ids == ahead.expected(name=name)


def named(drafts: list[Draft]) -> dict[str, Draft]:
    return {draft.request_id: draft for draft in drafts}


# --- what is prepared for ---


def test_asks_come_before_what_may_be_asked():
    ahead = Ahead.prepared()
    assert ahead.engine.has_spare_work()
    ahead.open([1, 2], "other")
    ahead.commit(name="other")
    assert not ahead.engine.has_spare_work()
    num_forwards = len(ahead.runner.num_computed)
    ahead.engine.run_ahead()
    assert len(ahead.runner.num_computed) == num_forwards
    assert ahead.run()["other"].token_ids == ahead.expected(name="other")


def test_spare_work_ends_where_the_pool_does():
    ahead = Ahead.prepared(num_branches=8, num_blocks=4)
    assert len(ahead.idle()) < 100
    assert ahead.ask(0).token_ids == ahead.expected()


def test_nothing_is_prepared_where_nothing_was_asked_or_known():
    ahead = Ahead.prepared()
    assert ahead.commit(1, length=0) == []
    assert not ahead.engine.has_spare_work(), "speculation is off"
    ahead.ask()
    ahead.open([1, 2, 3])
    assert ahead.ask().token_ids == ahead.expected(), "another sequence under the same name"
    ahead.engine.forget_peer("v")
    assert not ahead.engine.has_spare_work()
    ahead.engine.check_integrity()


@pytest.mark.parametrize(
    "change", [{"tokens": [7, *PROMPT[1:]]}, {"sampling": DraftSampling(temperature=0.0, top_k=1)}]
)
def test_what_was_prepared_is_of_no_use_to_another_sequence(change: dict[str, Any]):
    ahead = Ahead.prepared()
    ahead.idle()
    outcome = ahead.outcomes()[0]
    ahead.open(**change)
    assert ahead.commit(*outcome) == []
    assert ahead.run()["r"].token_ids == ahead.expected()


def test_drafts_end_at_the_models_context_in_advance_too():
    ahead = Ahead.prepared(max_model_len=len(PROMPT) + LENGTH + 3)
    ahead.idle()
    (draft,) = ahead.commit(*ahead.expected(LENGTH + 1))
    assert draft.token_ids == ahead.expected()  # one beyond the context
    ahead.idle()
    assert ahead.ask(*draft.token_ids[:2]).token_ids == ahead.expected(1)


def test_a_seeded_draft_is_the_same_whether_prepared_or_not():
    prepared, plain = Ahead(num_branches=16), Ahead(num_branches=16)
    for ahead in (prepared, plain):
        ahead.open(sampling=SEEDED)
        ahead.ask()
    for _ in range(8):
        prepared.idle()
        new = prepared.outcomes()[0]
        drafts = [ahead.ask(*new) for ahead in (prepared, plain)]
        assert drafts[0].token_ids == drafts[1].token_ids
    assert prepared.hits_and_misses == (8, 0)
    assert plain.hits_and_misses[0] == 0


# --- what a miss is worth ---


@pytest.mark.parametrize(
    ("num_accepted", "last", "num_judged"), [(0, 1, 1), (1, 1, 2), (2, 1, 3), (3, 1, 3), (2, 0, 2)]
)
def test_acceptance_is_learned_from_what_is_committed(num_accepted: int, last: int, num_judged: int):
    """A token that was cut off is judged by what the target chose there, and those after it are not (last: 0)."""
    ahead = Ahead.prepared()
    ahead.idle()
    ahead.commit(*ahead.expected()[:num_accepted], *[ahead.surprise()] * last)
    overall = ahead.drafter._cache._acceptance.overall
    assert overall == pytest.approx((num_accepted + 0.5) / (num_judged + 1.0), abs=0.01)


def play_misses(step_s: float, round_s: float, *, num_spare: int = 1) -> list[int]:
    ahead = Ahead(step_s=step_s, num_branches=4)
    ahead.open()
    lengths: list[int] = []
    for _ in range(4):
        draft = ahead.ask(60)  # what no one thought of
        lengths.append(len(draft.token_ids))
        now_s = ahead.runner.now_s
        ahead.idle(num_spare)
        ahead.runner.now_s = now_s + round_s
    return lengths


def test_a_miss_is_drafted_as_far_as_is_worth_the_verifiers_time():
    assert play_misses(step_s=0.001, round_s=1.0) == [3, 3, 3, 3]
    first, *others = play_misses(step_s=1.0, round_s=0.5)
    assert first == LENGTH, "nothing is known yet"
    assert others == [0, 0, 0], "a token that was never accepted is not waited for"
    assert play_misses(step_s=1.0, round_s=0.5, num_spare=0) == [3, 3, 3, 3], "a drafter without spare time drafts"


def test_after_an_empty_answer_the_next_token_is_prepared_for():
    ahead = Ahead(step_s=1.0, num_branches=3)
    ahead.open()
    ahead.ask(60)
    ahead.idle(1)
    ahead.runner.now_s = 3.5  # three forwards, and half a second in which one more was made
    assert ahead.ask(60).token_ids == ()
    ahead.idle()
    (draft,) = ahead.commit(*ahead.expected(1))
    assert draft.token_ids == ahead.expected()


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


# --- heads, whose states come later ---


def test_the_targets_states_are_taken_in_when_there_is_time() -> None:
    ahead = Ahead.prepared("eagle3", vocab_size=FEW, num_branches=64)
    ahead.idle()
    outcome = max(ahead.outcomes(), key=len)
    assert len(outcome) == LENGTH + 1
    ahead.ask(*outcome)
    num_pairs = ahead.idle(2)
    assert num_pairs == [len(outcome), 1], "the pairs of what was committed, then that of the last drafted token"
    ahead.idle()
    assert ahead.hits_and_misses == (1, 0)
    ahead.ask(*ahead.outcomes()[0])
    assert ahead.hits_and_misses == (2, 0), "outcomes of a draft that was prepared are prepared for as any"
    assert ahead.ask(ahead.surprise()).token_ids == ahead.expected()


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("num_late", [0, 2])
def test_outcomes_of_a_prepared_draft_go_on_from_what_was_taken_in(num_late: int, block_size: int) -> None:
    """Pairs of committed tokens come from the target's states as far as they are there, all others from before."""
    options = {"vocab_size": FEW, "num_branches": 64, "block_size": block_size, "num_blocks": 1024 // block_size}
    probe = Ahead.prepared("eagle3", **options)
    probe.idle()
    outcome = max(probe.outcomes(), key=len)
    own = probe.drafting_of(PROMPT, outcome)
    draft = probe.ask(*outcome, num_late=num_late)
    taken_in, last, begun, *_ = probe.idle()
    assert (taken_in, last) == (len(outcome) - num_late, 1), "nothing else is computed again"
    assert begun > 1
    tokens, num_true = probe.tokens["r"], probe.num_states["r"]
    feedback = [own.feedback]  # that follows the committed tokens, and each drafted one but the last
    for depth, token_id in enumerate(draft.token_ids[:-1]):
        own.step(token_id, own.feedback, len(tokens) - 1 + depth)
        feedback.append(own.feedback)
    for following in {len(outcome): outcome for outcome in probe.outcomes()}.values():
        drafting = SlowDrafting(probe.heads, tokens[: num_true + 1], states_of(tokens, probe.heads[0])[:num_true])
        num_accepted = len(following) - 1
        if num_accepted or num_late:
            drafting.feedback = feedback[min(num_accepted, LENGTH - 1)]
        num_shared = len(tokens) - 1 + min(num_accepted, LENGTH - 1)
        drafting._keys += own._keys[num_true:num_shared]
        drafting._values += own._values[num_true:num_shared]
        if num_accepted == LENGTH:
            drafting.step(draft.token_ids[-1], drafting.feedback, num_shared)
        drafting.step(following[-1], drafting.feedback, len(tokens) - 1 + num_accepted)
        ahead = Ahead.prepared("eagle3", **options)
        ahead.idle()
        ahead.ask(*outcome, num_late=num_late)
        ahead.idle()
        (prepared,) = ahead.commit(*following)
        assert prepared.token_ids == ahead.chain_of(drafting, len(ahead.tokens["r"]))


@pytest.mark.parametrize("index", range(4))
def test_drafts_at_different_positions_with_different_parameters_are_prepared_together(index: int) -> None:
    ahead = Ahead("switched")
    for name, prompt in {"a": PROMPT, "b": [9, 8, 7, 6, 5]}.items():
        ahead.open(prompt, name)
        ahead.ask(name=name)
        ahead.idle(1)
    ahead.idle()
    for name in "ab":
        outcome = ahead.outcomes(name)[index]
        expected = ahead.expected(name=name, outcome=outcome)
        (draft,) = ahead.commit(*outcome, name=name)
        assert draft.token_ids == expected


@pytest.mark.parametrize("num_late", [1, LENGTH + 1])
def test_states_that_are_late_are_no_reason_to_wait(num_late: int) -> None:
    ahead = Ahead.prepared("eagle3", vocab_size=FEW, num_branches=64)
    ahead.idle()
    outcome = max(ahead.outcomes(), key=len)
    expected = ahead.expected(outcome=outcome)
    (draft,) = ahead.commit(*outcome, num_late=num_late)
    assert draft.token_ids == expected
    ahead.idle()
    assert ahead.ask(*ahead.outcomes()[0], num_late=1).token_ids
    ahead.idle()
    assert ahead.ask(ahead.surprise()).token_ids == ahead.expected()


def test_a_session_that_comes_back_without_its_states_is_drafted_for_from_what_there_is() -> None:
    ahead = Ahead.prepared("eagle3", num_branches=200)
    ahead.idle()
    tokens = [*PROMPT, *max(ahead.outcomes(), key=len)]
    ahead.open(tokens)
    first = len(PROMPT)
    assert ahead.commit(first=first) == []
    states = states_of(tokens, ahead.heads[0], first=first)
    assert ahead.run()["r"].token_ids == tuple(greedy_chain(ahead.heads, tokens, states, LENGTH))
    ahead.idle()
    ahead.open([*tokens, *ahead.outcomes()[0]])
    assert ahead.ask(num_late=len(tokens)).token_ids == (), "no states at all"
