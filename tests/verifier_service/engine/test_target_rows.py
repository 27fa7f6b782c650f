"""The target's likeliest tokens beside committed ones, for drafters that learn: whose they are, and who pays."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence

import pytest
import torch

from fakes.engine_bench import EngineBench, Pace, make_request, tokens_of
from fakes.runner import continuation, next_token
from outrider.verifier_service.messages.draft import (
    DRAFT_PROB_SCALE,
    Commit,
    DrafterEvent,
    DraftNeeds,
    Open,
    Resync,
    SparseRow,
)
from outrider.verifier_service.messages.request import SpeculationPlan

NUM_TOP, VOCAB_SIZE = 5, 97
OFF = SpeculationPlan()
SHAPES = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 5.0, "seed": 7},
    "shaped": {"temperature": 3.0, "seed": 7, "top_k": 20, "repetition_penalty": 1.5, "presence_penalty": 1.0},
}


def bench_of(pace: Pace, *, num_top: int = NUM_TOP, max_tree_nodes: int = 0) -> EngineBench:
    kind = type("PacedBench", (EngineBench,), {"pace": pace})
    return kind(needs=DraftNeeds(num_top=num_top), max_tree_nodes=max_tree_nodes)


def add(bench: EngineBench, request_id: str = "a", *, may_learn: bool = True, **options: object) -> None:
    made = make_request(request_id, **{"draft_length": 3, "max_tokens": 24, "ignore_eos": True, **options})
    bench.engine.add(dataclasses.replace(made, may_learn=may_learn))


def run(bench: EngineBench, *, seed: int = 0, is_tree: bool = False) -> dict[str, tuple[int, ...]]:
    """Step to the end; asks get right, half right, wrong, or no drafts, and now and then none is asked for a while.

    Return the tokens by request.
    """
    rng, outputs = random.Random(seed), {}
    texts: dict[str, list[int]] = {}
    num_heard = 0
    for _ in range(300):
        if not bench.engine.has_work():
            return {request_id: tokens_of(one) for request_id, one in outputs.items()}
        if rng.random() < 0.2:
            plan = SpeculationPlan(drafter_id="d", draft_length=rng.choice((0, 3)))
            bench.engine.set_plans(dict.fromkeys(bench.engine.requests, plan))
        for output in bench.step() or []:
            outputs.setdefault(output.request_id, []).append(output)
        for to, message in bench.drafts.sent[num_heard:]:
            if isinstance(message, Open):
                texts[message.request_id] = list(message.token_ids)
            if isinstance(message, Commit):
                texts[message.request_id] += message.token_ids
                answer(bench, to, message, texts[message.request_id], rng, is_tree=is_tree)
        num_heard = len(bench.drafts.sent)
        bench.now_s += bench.engine.idle_s() or 0.0
    raise AssertionError("requests do not finish")


def answer(bench: EngineBench, to: str, ask: Commit, text: Sequence[int], rng: random.Random, *, is_tree: bool) -> None:
    luck = rng.random()
    right = continuation(list(text), ask.max_length, VOCAB_SIZE)
    wrong = tuple((token_id + 1) % VOCAB_SIZE for token_id in right)
    if luck < 0.2:
        return  # it comes too late
    if luck < 0.3:
        bench.drafts.events.append(DrafterEvent(drafter_id=to, message=Resync(request_id=ask.request_id)))
        return
    if bench.drafts.last_ask()[1] is not ask:
        return  # after a resync it was asked twice
    if is_tree and ask.max_length > 1:
        bench.drafts.answer((wrong[0], right[0], wrong[1], right[1]), (-1, -1, 1, 1))
    else:
        num_right = rng.randint(0, ask.max_length)
        bench.drafts.answer((*right[:num_right], *wrong[num_right:]))


def expected_row(context: Sequence[int]) -> tuple[list[int], list[float]]:
    """Return the likeliest ids after a context and their exact weights, by the model's own law."""
    logits = torch.zeros(VOCAB_SIZE, dtype=torch.float64)
    logits[next_token(list(context), VOCAB_SIZE)] = 10.0
    law = logits.softmax(dim=0).tolist()
    ids = sorted(range(VOCAB_SIZE), key=lambda id_: (-law[id_], id_))[:NUM_TOP]
    total = sum(law[id_] for id_ in ids)
    return ids, [law[id_] / total * DRAFT_PROB_SCALE for id_ in ids]


def check_row(row: SparseRow, context: Sequence[int]) -> None:
    ids, weights = expected_row(context)
    assert list(row.token_ids) == ids
    assert sum(row.weights) == DRAFT_PROB_SCALE
    assert all(abs(found - wanted) < 1.0 for found, wanted in zip(row.weights, weights, strict=True))


def check_commits(bench: EngineBench) -> int:
    """Assert that every commit has the row of every token; return how many tokens had one."""
    texts: dict[str, list[int]] = {}
    num_rows = 0
    for _, message in bench.drafts.sent:
        if isinstance(message, Open):
            texts[message.request_id] = list(message.token_ids)
        if isinstance(message, Commit):
            text = texts[message.request_id]
            assert len(text) == message.position
            assert len(message.target_rows) == len(message.token_ids)
            for token_id, row in zip(message.token_ids, message.target_rows, strict=True):
                check_row(row, text)
                text.append(token_id)
                num_rows += 1
    return num_rows


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pace", Pace)
@pytest.mark.parametrize("is_tree", [False, True], ids=["chains", "trees"])
def test_every_committed_token_has_the_row_of_the_models_own_law(pace: Pace, shape: str, is_tree: bool):
    num_rows = 0
    for seed in range(4):
        bench, plain = (bench_of(pace, num_top=num_top, max_tree_nodes=8 if is_tree else 0) for num_top in (NUM_TOP, 0))
        for one in (bench, plain):
            add(one, **SHAPES[shape])
        tokens = run(bench, seed=seed, is_tree=is_tree)
        assert tokens == run(plain, seed=seed, is_tree=is_tree), "no token depends on what is told"
        num_rows += check_commits(bench)
        undrafted = EngineBench(drafters=())
        add(undrafted, draft_length=0, **SHAPES[shape])
        assert tokens == run(undrafted), "nor on drafts"
    assert num_rows > 25


@pytest.mark.parametrize("pace", Pace)
@pytest.mark.parametrize(("may_learn", "num_top"), [(False, NUM_TOP), (True, 0)])
def test_without_permission_or_wish_nothing_is_read_and_nothing_told(pace: Pace, may_learn: bool, num_top: int):
    bench = bench_of(pace, num_top=num_top)
    add(bench, may_learn=may_learn)
    run(bench)
    commits = [message for _, message in bench.drafts.sent if isinstance(message, Commit)]
    assert any(commit.token_ids for commit in commits)
    assert not any(commit.target_rows for commit in commits)


def test_only_steps_whose_rows_are_wanted_are_read_before_the_next_is_launched():
    def num_early(*, may_learn: bool) -> int:
        """Run a request whose drafts end after a while, but not its session."""
        bench = bench_of(Pace.ASYNC)
        add(bench, may_learn=may_learn, max_tokens=30)
        for step in itertools.count():
            if not bench.engine.has_work():
                break
            if step == 4:
                bench.engine.set_plans({"a": SpeculationPlan(drafter_id="d", draft_length=0)})
            bench.step()
            bench.now_s += bench.engine.idle_s() or 0.0
        return bench.runner.num_early

    assert num_early(may_learn=True) == 0 < num_early(may_learn=False)


def test_after_its_session_has_ended_a_request_pays_for_nothing():
    bench = bench_of(Pace.ASYNC)
    add(bench, max_tokens=30)
    bench.step()
    bench.engine.set_plans({"a": OFF})
    bench.finish()
    assert bench.runner.num_early > 8


def test_requests_of_drafters_with_other_wishes_share_a_step():
    bench = EngineBench(drafters=())
    bench.drafts.events = [
        DrafterEvent(drafter_id=name, vocab_size=VOCAB_SIZE, needs=DraftNeeds(num_top=num_top))
        for name, num_top in (("few", 1), ("many", NUM_TOP), ("none", 0))
    ]
    for name in ("few", "many", "none"):
        add(bench, name, drafter_id=name, prompt=(3, len(name)))
    bench.finish()
    sizes = {"few": set(), "many": set(), "none": set()}
    for to, message in bench.drafts.sent:
        if isinstance(message, Commit):
            sizes[to] |= {len(row.token_ids) for row in message.target_rows}
    assert sizes == {"few": {1}, "many": {NUM_TOP}, "none": set()}
