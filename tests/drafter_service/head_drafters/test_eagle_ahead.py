"""Drafts that a head made in advance, from its own states, beside a slow reference that makes the same ones."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from outrider.drafter_service.engine.drafter import DraftEngineConfig
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.engine.spare_time import TRIED_ANSWERS
from outrider.drafter_service.head_drafters.head_runner import LAYER_INDEX, HeadRunner
from outrider.drafter_service.heads.head_layer import DraftHead
from outrider.drafter_service.heads.switched import SwitchedHeads
from outrider.verifier_service.messages.batch import ScheduledBatch, slots_of
from outrider.verifier_service.messages.draft import Close, Commit, Draft, DraftSampling, Open, States, check_draft
from tiny.drafters import eagle_drafter
from tiny.heads import VOCAB_SIZE, SlowDrafting, eagle3_head, eagle_head, greedy_chain, mtp_head, states_of

GREEDY = DraftSampling(temperature=0.0)
DRAWN = DraftSampling(temperature=1.0)
SEEDED = DraftSampling(temperature=1.0, seed=4)
PROMPT = [5, 17, 3, 40, 22, 9, 31]
LENGTH = 3
BLOCK_SIZE = 4
FEW = 12  # tokens of a vocabulary whose outcomes can all be prepared for
HEADS = {
    "eagle": lambda: [eagle_head()],
    "eagle3": lambda: [eagle3_head()],
    "mtp": lambda: [mtp_head()],
    "switched": lambda: [eagle3_head(seed) for seed in (1, 2, 3)],
}


class CountingRunner(HeadRunner):
    """A head's runner that notes how many pairs each forward computes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.num_pairs: list[int] = []

    def execute(self, batch: ScheduledBatch, *args: Any, **options: Any) -> Any:
        self.num_pairs.append(batch.num_tokens)
        return super().execute(batch, *args, **options)


class Table:
    """A drafting engine over a head that runs ahead, and what a verifier says to it."""

    def __init__(
        self,
        heads: Sequence[DraftHead],
        *,
        num_branches: int = 6,
        num_blocks: int = 256,
        block_size: int = BLOCK_SIZE,
        max_model_len: int = 64,
        budget: int = 64,
        vocab_size: int = VOCAB_SIZE,
    ) -> None:
        self.heads, self.vocab_size = heads, vocab_size
        sizes = {"num_blocks": num_blocks, "block_size": block_size, "max_model_len": max_model_len}
        self.runner = CountingRunner(SwitchedHeads(heads), **sizes)
        rng = torch.Generator().manual_seed(0)
        self.drafter = eagle_drafter(self.runner, rng, vocab_size=vocab_size, num_ahead_branches=num_branches)
        config = DraftEngineConfig(max_num_batched_tokens=budget, max_draft_length=8, max_tree_nodes=6)
        self.engine = DraftEngine(self.drafter, clock=lambda: 0.0, config=config, ahead=self.drafter)
        self.tokens: dict[str, list[int]] = {}
        self.num_states: dict[str, int] = {}  # that were told
        self._round_ids = itertools.count(1)

    def open(self, tokens: Sequence[int] = PROMPT, name: str = "r", sampling: DraftSampling = GREEDY) -> None:
        self.tokens[name], self.num_states[name] = list(tokens), 0
        self.engine.handle("v", Open(request_id=name, sampling=sampling, token_ids=tuple(tokens)))

    def commit(
        self, *new: int, name: str = "r", length: int = LENGTH, num_late: int = 0, first: int = 0, **fields: Any
    ) -> list[Draft]:
        """Say what was committed, with all states but the last `num_late`; return what is answered without a step."""
        position = len(self.tokens[name])
        self.tokens[name] += new
        states = states_of(self.tokens[name], self.heads[0], first)
        told = states[self.num_states[name] : len(states) - num_late]
        if len(told):
            data = told.numpy().tobytes()
            at = {"position": self.num_states[name], "dtype": "float32", "width": states.shape[1]}
            self.engine.handle("v", States(request_id=name, data=data, **at))
            self.num_states[name] += len(told)
        ids = {"request_id": name, "round_id": next(self._round_ids), "position": position}
        self.engine.handle("v", Commit(token_ids=new, max_length=length, **ids, **fields))
        self.engine.check_integrity()
        return drafts_of(self.engine.flush())

    def run(self) -> dict[str, Draft]:
        """Draft what is asked for."""
        found: dict[str, Draft] = {}
        for _ in range(500):
            if not self.engine.has_work():
                return found
            found |= {draft.request_id: draft for draft in drafts_of(self.engine.step())}
            self.engine.check_integrity()
        raise AssertionError("drafts do not become complete")

    def ask(self, *new: int, name: str = "r", **fields: Any) -> Draft:
        at_once = self.commit(*new, name=name, **fields)
        (draft,) = at_once or [self.run()[name]]
        return draft

    def idle(self, num_steps: int = 1000) -> list[int]:
        """Let the engine have its spare time; return how many pairs each forward had."""
        num_before = len(self.runner.num_pairs)
        for _ in range(num_steps):
            if not self.engine.has_spare_work():
                break
            self.engine.run_ahead()
            self.engine.check_integrity()
        return self.runner.num_pairs[num_before:]

    def expected(self, length: int = LENGTH, name: str = "r") -> tuple[int, ...]:
        """Return what the head drafts from the target's states."""
        tokens = self.tokens[name]
        states = states_of(tokens, self.heads[0])[: self.num_states[name]]
        return self.chain_of(SlowDrafting(self.heads, tokens, states), len(tokens), length)

    def prepared(self, outcome: Sequence[int], length: int = LENGTH) -> tuple[int, ...]:
        """Return what the head drafts for an outcome of the one session's last draft, from its own states."""
        tokens = self.tokens["r"]
        return self.chain_of(self.drafting_of(tokens, outcome), len(tokens) + len(outcome), length)

    def drafting_of(self, tokens: Sequence[int], outcome: Sequence[int]) -> SlowDrafting:
        """Return the reference after an outcome whose states are not known."""
        drafting = SlowDrafting(self.heads, tokens, states_of(tokens, self.heads[0]))
        for depth, token_id in enumerate(outcome[:-1]):
            drafting.step(token_id, drafting.feedback, len(tokens) - 1 + depth, depth + 1)
        drafting.step(outcome[-1], drafting.feedback, len(tokens) + len(outcome) - 2)
        return drafting

    def chain_of(self, drafting: SlowDrafting, num_tokens: int, length: int = LENGTH) -> tuple[int, ...]:
        """Draft greedily after `num_tokens` tokens."""
        drafted = [int(drafting.logits[: self.vocab_size].argmax())]
        while len(drafted) < length:
            drafting.step(drafted[-1], drafting.feedback, num_tokens - 2 + len(drafted), len(drafted))
            drafted.append(int(drafting.logits[: self.vocab_size].argmax()))
        return tuple(drafted)

    def outcomes(self) -> list[tuple[int, ...]]:
        """Return what the one session's next commit may be that is prepared for, likeliest first."""
        (trunk,) = self.drafter._cache._trunks.values()
        return list(trunk.branches)

    def surprise(self) -> int:
        """Return a token that, were it to come next in the one session, nobody has thought of."""
        return next(token_id for token_id in range(VOCAB_SIZE) if (token_id,) not in self.outcomes())

    def keys_of_committed(self) -> torch.Tensor:
        """Return the keys of the one session's committed pairs: [num_pairs, num_kv_heads, head_dim]."""
        (state,) = self.drafter._states.values()
        slots = slots_of(state.block_table, range(len(self.tokens["r"]) - 1 - state.first), self.runner.block_size)
        return self.runner.pool.keys[LAYER_INDEX][slots]

    @property
    def hits_and_misses(self) -> tuple[int, int]:
        counters = self.engine.counters
        return counters.num_cache_hits, counters.num_cache_misses


def drafts_of(answers: Sequence[tuple[str, object]]) -> list[Draft]:
    found = [message for _, message in answers]
    assert all(isinstance(message, Draft) for message in found)
    return found  # type: ignore[return-value]


def prepared_table(heads: Sequence[DraftHead], **options: Any) -> Table:
    table = Table(heads, **options)
    table.open()
    assert table.ask().token_ids == table.expected()
    return table


@pytest.mark.parametrize("kind", HEADS)
def test_an_outcome_that_was_prepared_for_is_answered_without_a_forward(kind: str) -> None:
    table = prepared_table(HEADS[kind]())
    assert len(table.idle()) >= 1 + LENGTH
    table.runner.num_pairs.clear()
    outcome = table.outcomes()[0]
    expected = table.prepared(outcome)
    (draft,) = table.commit(*outcome)
    assert draft.token_ids == expected
    assert (draft.position, draft.round_id) == (len(table.tokens["r"]), 2)
    assert table.runner.num_pairs == []
    assert table.hits_and_misses == (1, 0)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_whatever_the_outcome_the_draft_is_what_follows_from_its_own_states(kind: str, block_size: int) -> None:
    heads = HEADS[kind]()
    options = {"vocab_size": FEW, "num_branches": 64, "block_size": block_size, "num_blocks": 1024 // block_size}
    probe = prepared_table(heads, **options)
    probe.idle()
    of_each_length = {len(outcome): outcome for outcome in probe.outcomes()}
    assert len(of_each_length) >= LENGTH
    for index, outcome in enumerate(of_each_length.values()):
        table = prepared_table(heads, **options)
        table.idle()
        expected = table.prepared(outcome)
        (draft,) = table.commit(*outcome)
        assert draft.token_ids == expected
        table.idle(index)
        assert table.ask(60).token_ids == table.expected(), "a miss is drafted from the target's states alone"


def test_the_targets_states_are_taken_in_when_there_is_time() -> None:
    heads = [eagle3_head()]
    table = prepared_table(heads, vocab_size=FEW, num_branches=64)
    table.idle()
    outcome = max(table.outcomes(), key=len)
    assert len(outcome) == LENGTH + 1
    table.ask(*outcome)
    own = table.keys_of_committed()
    num_pairs = table.idle(2)
    assert num_pairs == [len(outcome), 1], "the pairs of what was committed, then that of the last drafted token"
    fresh = Table(heads)
    fresh.open(table.tokens["r"])
    fresh.ask()
    torch.testing.assert_close(table.keys_of_committed(), fresh.keys_of_committed())
    assert (own[-len(outcome) :] - fresh.keys_of_committed()[-len(outcome) :]).abs().amax() > 0.1
    table.idle()
    assert table.hits_and_misses == (1, 0)
    table.ask(*table.outcomes()[0])
    assert table.hits_and_misses == (2, 0), "outcomes of a draft that was prepared are prepared for as any"
    assert table.ask(table.surprise()).token_ids == table.expected()


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("num_late", [0, 2])
def test_outcomes_of_a_prepared_draft_go_on_from_what_was_taken_in(num_late: int, block_size: int) -> None:
    """Pairs of committed tokens come from the target's states as far as they are there, all others from before."""
    options = {"vocab_size": FEW, "num_branches": 64, "block_size": block_size, "num_blocks": 1024 // block_size}
    probe = prepared_table([eagle3_head()], **options)
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
        table = prepared_table([eagle3_head()], **options)
        table.idle()
        table.ask(*outcome, num_late=num_late)
        table.idle()
        (prepared,) = table.commit(*following)
        assert prepared.token_ids == table.chain_of(drafting, len(table.tokens["r"]))


def test_states_are_taken_in_where_there_is_no_room_for_more() -> None:
    table = prepared_table([eagle3_head()], block_size=1)
    table.idle()
    table.ask(*table.outcomes()[0])
    pool, (state,) = table.drafter._pool, table.drafter._states.values()
    pool.allocate(pool.num_free_blocks)
    table.engine.run_ahead()
    assert state.num_true == len(table.tokens["r"]) - 1


def test_drafts_at_different_positions_with_different_parameters_are_prepared_together() -> None:
    heads = HEADS["switched"]()
    table = Table(heads)
    prompts = {"a": PROMPT, "b": [9, 8, 7, 6, 5]}
    for name, prompt in prompts.items():
        table.open(prompt, name)
        table.ask(name=name)
        table.idle(1)
    table.idle()
    for name, prompt in prompts.items():
        trunk = next(o for key, o in table.drafter._cache._trunks.items() if key.request_id == name)
        for outcome, branch in trunk.branches.items():
            expected = table.chain_of(table.drafting_of(prompt, outcome), len(prompt) + len(outcome))
            assert branch.growth.chosen().token_ids == expected


def test_the_winners_kv_is_kept_and_the_others_are_freed() -> None:
    table = prepared_table([eagle3_head()], num_branches=8, num_blocks=64)
    table.idle()
    winner = table.outcomes()[0]
    (trunk,) = table.drafter._cache._trunks.values()
    blocks = list(trunk.branches[winner].block_table)
    table.ask(*winner)
    (state,) = table.drafter._states.values()
    assert state.block_table == blocks
    assert table.drafter._pool.num_free_blocks == 64 - len(blocks)
    table.engine.handle("v", Close(request_id="r"))
    table.engine.check_integrity()
    assert not table.engine.has_spare_work()
    assert table.drafter._pool.num_free_blocks == 64


@pytest.mark.parametrize("num_spare", range(6))
def test_a_branch_that_is_not_through_goes_on_where_it_is(num_spare: int) -> None:
    table = prepared_table([eagle3_head()])
    probe = prepared_table([eagle3_head()])
    probe.idle()
    outcome = probe.outcomes()[0]
    num_drawn = max(0, num_spare - 1)
    expected = table.prepared(outcome)[:num_drawn]
    table.idle(num_spare)
    table.runner.num_pairs.clear()
    draft = table.ask(*outcome)
    assert draft.token_ids[:num_drawn] == expected
    assert len(draft.token_ids) == LENGTH
    if num_drawn == 0:
        assert draft.token_ids == table.expected()
    elif num_drawn < LENGTH:  # the states that have come are taken in on the way
        assert table.runner.num_pairs == [len(outcome), *[1] * (LENGTH - num_drawn)]
    assert table.hits_and_misses == ((1, 0) if num_drawn >= LENGTH else (0, min(num_spare, 1)))
    assert table.ask(table.surprise()).token_ids == table.expected()


def test_an_outcome_that_nobody_thought_of_is_drafted_as_ever() -> None:
    table = prepared_table([eagle3_head()])
    table.idle()
    assert table.commit(table.surprise()) == []
    assert table.run()["r"].token_ids == table.expected()
    assert table.hits_and_misses == (0, 1)


@pytest.mark.parametrize("length", [1, 2])
def test_a_shorter_ask_gets_the_beginning(length: int) -> None:
    table = prepared_table([eagle3_head()])
    table.idle()
    outcome = table.outcomes()[0]
    expected = table.prepared(outcome)
    (draft,) = table.commit(*outcome, length=length)
    assert draft.token_ids == expected[:length]
    table.idle()
    assert table.outcomes()
    assert table.ask(table.surprise()).token_ids == table.expected()


@pytest.mark.parametrize("num_late", [1, LENGTH + 1])
def test_states_that_are_late_are_no_reason_to_wait(num_late: int) -> None:
    table = prepared_table([eagle3_head()], vocab_size=FEW, num_branches=64)
    table.idle()
    outcome = max(table.outcomes(), key=len)
    expected = table.prepared(outcome)
    (draft,) = table.commit(*outcome, num_late=num_late)
    assert draft.token_ids == expected
    table.idle()
    assert table.ask(*table.outcomes()[0], num_late=1).token_ids
    table.idle()
    assert table.ask(table.surprise()).token_ids == table.expected()


def test_a_session_that_comes_back_without_its_states_is_drafted_for_from_what_there_is() -> None:
    table = prepared_table([eagle3_head()], num_branches=200)
    table.idle()
    tokens = [*PROMPT, *max(table.outcomes(), key=len)]
    table.open(tokens)
    first = len(PROMPT)
    assert table.commit(first=first) == []
    states = states_of(tokens, table.heads[0], first=first)
    assert table.run()["r"].token_ids == tuple(greedy_chain(table.heads, tokens, states, LENGTH))
    table.idle()
    table.open([*tokens, *table.outcomes()[0]])
    assert table.ask(num_late=len(tokens)).token_ids == (), "no states at all"


@pytest.mark.parametrize("fields", [{"max_nodes": 5}, {"forced_ids": (1, 2)}])
def test_trees_and_forced_tokens_are_not_prepared_for(fields: dict[str, Any]) -> None:
    table = prepared_table([eagle3_head()])
    table.idle()
    assert table.commit(*table.outcomes()[0], **fields) == []
    table.run()
    assert not table.engine.has_spare_work()
    assert table.hits_and_misses == (0, 1)


def test_branches_give_their_kv_to_whatever_is_asked_for() -> None:
    table = prepared_table([eagle3_head()], num_branches=8, num_blocks=10)
    table.idle()
    assert table.drafter._pool.num_free_blocks < 8
    table.open([(3 * i + 1) % VOCAB_SIZE for i in range(29)], "long")
    assert table.ask(name="long").token_ids == table.expected(name="long")
    assert table.ask(table.tokens["r"][0]).token_ids == table.expected()


@pytest.mark.parametrize("sampling", [DRAWN, SEEDED], ids=["drawn", "seeded"])
def test_prepared_drafts_are_valid_and_of_the_length_that_was_asked(sampling: DraftSampling) -> None:
    table, rng = Table([eagle3_head()], num_branches=16, num_blocks=512), random.Random(1)
    table.open(sampling=sampling)
    table.ask()
    num_answers = 1
    while len(table.tokens["r"]) < 50 and num_answers < TRIED_ANSWERS:  # then it is tried without running ahead
        num_answers += 1
        table.idle()
        draft = table.ask(*rng.choice(table.outcomes()))
        assert check_draft(draft, draft_vocab_size=VOCAB_SIZE, max_length=LENGTH) is None
        assert len(draft.token_ids) == LENGTH
        assert (draft.draft_probs is None) == (sampling is SEEDED)
    hits, misses = table.hits_and_misses
    assert hits > 5
    assert misses == 0


@pytest.mark.parametrize("seed", range(6))
def test_misses_are_drafted_from_the_targets_states_whatever_happened_before(seed: int) -> None:
    rng = random.Random(seed)
    block_size = rng.choice((1, 3, 4))
    table = Table(
        HEADS[rng.choice(("eagle", "eagle3", "mtp"))](),
        num_branches=rng.choice((1, 3, 8)),
        budget=rng.choice((4, 16, 64)),
        block_size=block_size,
        num_blocks=rng.choice((30, 48, 160)) // block_size,
        max_model_len=28,
    )
    last: dict[str, Draft] = {}
    for _ in range(120):
        name = rng.choice("abc")
        if name not in table.tokens or len(table.tokens[name]) > 24 or rng.random() < 0.03:
            table.engine.handle("v", Close(request_id=name))
            last.pop(name, None)
            table.open([rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(2, 9))], name, rng.choice((GREEDY, DRAWN)))
            table.commit(name=name)
        elif name in last:
            draft = last.pop(name)
            num_accepted = rng.randint(0, len(draft.token_ids))
            new = [*draft.token_ids[:num_accepted], rng.choice((*draft.token_ids, 1, 60))]
            length, num_late = rng.choice((1, 3, 3, 5)), rng.choice((0, 0, 1))
            fields = {"max_nodes": rng.choice((0, 0, 0, 5))}
            last |= {d.request_id: d for d in table.commit(*new, name=name, length=length, num_late=num_late, **fields)}
        hits = table.hits_and_misses[0]
        for _ in range(rng.choice((0, 1, 9, 30))):
            for draft in drafts_of(table.engine.step()):
                last[draft.request_id] = draft
                assert len(draft.token_ids) <= 6
            table.engine.check_integrity()
        assert table.hits_and_misses[0] == hits
        table.idle(rng.choice((0, 1, 3, 20)))
    assert sum(table.hits_and_misses) > 0
    for name in "abc":
        table.open(PROMPT, name)
        assert table.ask(name=name).token_ids == table.expected(name=name)
