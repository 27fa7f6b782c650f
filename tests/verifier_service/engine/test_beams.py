"""Beam searches over the fake runner, which reads every context through the block tables."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import pytest
import torch

from fakes.engine_bench import PROMPT, EngineBench, Pace, greedy_tokens, tokens_of
from fakes.runner import noisy_row
from outrider.verifier_service.messages.beam_search import BeamSearch
from outrider.verifier_service.messages.request import FinishReason, Request, RequestOutput
from outrider.verifier_service.sampling.beam_search import ends_in_text

VOCAB_SIZE = 97
LENGTH = 12
ENDS = (11, 40, 41, 60, 72, 90)
Scored = list[tuple[float, list[int]]]


@pytest.fixture(params=Pace, ids=lambda pace: pace.name.lower(), autouse=True)
def pace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in test_engine.py: logits that are there at once, late, and an engine that runs ahead."""
    monkeypatch.setattr(EngineBench, "pace", request.param)


def bench_of(**options) -> EngineBench:
    """A bench whose rows are laws, not point masses."""
    bench = EngineBench(**options)
    bench.runner.rows_after = rows_after
    return bench


def rows_after(contexts: Sequence[list[int]]) -> torch.Tensor:
    rows = [noisy_row(context, VOCAB_SIZE) for context in contexts]
    return torch.stack(rows) if rows else torch.zeros(0, VOCAB_SIZE)


def searched(
    width: int,
    *,
    prompt: Sequence[int] = PROMPT,
    length: int = LENGTH,
    penalty: float = 1.0,
    ends: Collection[int] = (),
) -> Scored:
    """Search over whole contexts, without KV: the outputs and their scores, the best first."""
    live: Scored = [(0.0, [])]
    found: Scored = []
    for num_tokens in range(1, length + 1):
        laws = [(total, ids, noisy_row([*prompt, *ids], VOCAB_SIZE).log_softmax(0).tolist()) for total, ids in live]
        children = [(total + law[id_], [*ids, id_]) for total, ids, law in laws for id_ in range(VOCAB_SIZE)]
        children = sorted(children, reverse=True)[: max(2, 1 + len(ends)) * width]
        is_last = num_tokens == length
        found += [(total / num_tokens**penalty, ids) for total, ids in children[:width] if is_last or ids[-1] in ends]
        found = sorted(found, reverse=True)[:width]
        live = [child for child in children if not is_last and child[1][-1] not in ends][:width]
        if not live or (len(found) == width and live[0][0] / num_tokens**penalty <= found[-1][0]):
            break
    return found


def ask(
    bench: EngineBench, request_id: str = "a", *, width: int, penalty: float = 1.0, **options
) -> RequestOutput | None:
    options = {"max_tokens": LENGTH, "num_speculative_tokens": 0, "logprobs": 2, **options}
    return bench.add(request_id, beams=BeamSearch(width=width, length_penalty=penalty), **options)


def check(outputs: Sequence[RequestOutput], expected: Scored, penalty: float = 1.0) -> None:
    """Assert that a search's only output has what is expected."""
    (output,) = outputs
    assert [list(beam.token_ids) for beam in output.beams] == [ids for _, ids in expected]
    for beam, (score, _) in zip(output.beams, expected, strict=True):
        own = sum(entry.logprob for entry in beam.logprobs) / len(beam.token_ids) ** penalty
        assert math.isclose(own, score, abs_tol=1e-5)
        assert all(entry.rank == 1 or entry.logprob < entry.top_logprobs[0] for entry in beam.logprobs)
        assert {len(entry.top_token_ids) for entry in beam.logprobs} == {2}


def is_empty(bench: EngineBench) -> bool:
    bench.engine.check_integrity()
    return not bench.engine.has_work() and bench.engine.scheduler.kv_usage == 0.0


@pytest.mark.parametrize("budget", [256, 7, 2], ids=lambda budget: f"{budget} tokens a step")
@pytest.mark.parametrize(
    ("width", "penalty", "ends"), [(1, 1.0, ()), (2, 0.0, ENDS), (4, 1.0, ENDS), (4, -2.0, ENDS[:2]), (7, 3.0, ENDS)]
)
def test_beams_are_those_of_a_search_over_whole_contexts(budget: int, width: int, penalty: float, ends):
    bench = bench_of(max_num_batched_tokens=budget)
    assert ask(bench, width=width, penalty=penalty, stop_token_ids=tuple(ends)) is None
    bench.add("b", max_tokens=9, prompt=(3, 1, 4))
    outputs = bench.finish()
    check(outputs["a"], searched(width, penalty=penalty, ends=ends), penalty)
    assert len(tokens_of(outputs["b"])) == 9
    assert is_empty(bench)


def test_some_beams_end_before_others():
    lengths = {len(ids) for _, ids in searched(4, ends=ENDS)}
    assert len(lengths) > 1, "or the tests above show too little"


def used_blocks(bench: EngineBench) -> int:
    pool = bench.engine.scheduler._pool
    return pool.num_blocks - pool.num_free_blocks


def block_prefixes(requests: Sequence[Request], block_size: int) -> set[tuple[int, ...]]:
    """Return what each block has, with all that stands before it."""
    return {
        tuple(request.token_ids[: min(start + block_size, request.num_computed_tokens)])
        for request in requests
        for start in range(0, request.num_computed_tokens, block_size)
    }


def test_beams_share_blocks_up_to_where_they_part_and_dropped_ones_hold_none():
    bench = bench_of()
    prompt = tuple(range(1, 11))
    ask(bench, width=5, prompt=prompt, max_tokens=20)
    num_copies = most = 0
    while bench.engine.has_work():
        bench.step()
        running = bench.engine.scheduler.running
        assert used_blocks(bench) == len(block_prefixes(running, 4))
        assert {request.request_id for request in running} <= {"a", "a/1", "a/2", "a/3", "a/4"}
        num_copies += len(bench.runner.batches[-1].copy_sources)
        most = max(most, used_blocks(bench))
    assert 0 < num_copies < 20 * 4, "of part of a block, where two beams go on in it"
    assert most < 5 * 8, "what five requests that share nothing would hold"
    assert is_empty(bench)


def test_beams_stand_next_to_each_other_in_a_step_and_run_in_one():
    bench = bench_of()
    ask(bench, width=4)
    bench.step()
    for other in "bc":
        bench.add(other, max_tokens=20)
        bench.step()
    bench.runner.batches.clear()
    bench.step()
    ids = [request.request_id for request in bench.engine.scheduler.running]
    assert ids == ["a", "a/1", "a/2", "a/3", "b", "c"]
    assert bench.runner.batches[-1].query_lengths == [1] * 6


def test_a_search_that_loses_kv_starts_anew_and_none_waits_for_another_for_ever():
    bench = bench_of(num_blocks=14)
    for request_id in "abc":
        assert ask(bench, request_id, width=3, prompt=(5, 9, ord(request_id) % 97)) is None
    outputs = bench.finish(max_steps=400)
    for request_id in "abc":
        check(outputs[request_id], searched(3, prompt=(5, 9, ord(request_id) % 97)))
    assert bench.engine.scheduler.num_preemptions > 0, "or the pool is too large for this test"
    assert is_empty(bench)


def test_all_kv_may_be_taken_away_between_two_steps():
    bench = bench_of(max_num_batched_tokens=2)
    ask(bench, width=4)
    for _ in range(9):
        bench.step()
    bench.engine.drain()
    bench.engine.scheduler.preempt_all()
    check(bench.finish()["a"], searched(4))


@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_a_cancelled_search_frees_all_of_its_beams(num_steps: int):
    bench = bench_of()
    ask(bench, width=4)
    for _ in range(num_steps):
        bench.step()
    bench.engine.cancel("a")
    assert is_empty(bench)


def test_a_search_that_is_ended_has_one_output():
    bench = bench_of()
    ask(bench, width=4)
    for _ in range(3):
        bench.step()
    (output,) = bench.engine.end_all(FinishReason.ABORT)
    assert (output.request_id, output.finish_reason, output.beams) == ("a", FinishReason.ABORT, ())
    assert is_empty(bench)


def test_a_search_runs_where_there_are_seats_for_all_of_its_beams():
    bench = bench_of(max_num_seqs=4)
    bench.add("b", max_tokens=3)
    bench.step()
    ask(bench, width=4)
    bench.add("c", max_tokens=2)
    bench.step()
    assert [request.request_id for request in bench.engine.scheduler.running] == ["b"], "c waits behind a"
    outputs = bench.finish()
    check(outputs["a"], searched(4))
    assert len(tokens_of(outputs["c"])) == 2


@pytest.mark.parametrize(
    ("width", "options", "text"),
    [
        (5, {"max_num_seqs": 4}, "n: 5 beams"),
        (98, {}, "n: 98 beams of a vocabulary of 97"),
        (4, {"num_blocks": 12}, "16 KV blocks"),
    ],
)
def test_a_search_that_can_never_run_is_refused(width: int, options: dict, text: str):
    bench = bench_of(**options)
    refusal = ask(bench, width=width)
    assert text in refusal.error
    assert is_empty(bench)


def test_a_stop_text_needs_an_engine_that_knows_texts():
    bench = bench_of()
    refusal = bench.add(beams=BeamSearch(width=2, stop=("x",)), num_speculative_tokens=0)
    assert refusal.error.startswith("stop: ")


def test_beams_have_no_drafts_beside_requests_that_do():
    bench = EngineBench()
    ask(bench, width=2, draft_length=4, max_tokens=6)
    bench.add("b", draft_length=4, max_tokens=20)
    bench.step()
    assert {message.request_id for _, message in bench.drafts.sent} == {"b"}
    bench.drafts.answer(greedy_tokens(5)[1:])
    outputs = bench.finish()
    assert tokens_of(outputs["b"]) == greedy_tokens(20)[1:]
    assert outputs["a"][0].beams[0].token_ids == greedy_tokens(6)


@pytest.mark.parametrize(
    ("ids", "ends"),
    [((0,), False), ((0, 1), True), ((0, 1, 2), False), ((2, 3), True), ((3,), False), ((0, 4), True), ((4,), False)],
)
def test_a_text_ends_where_its_last_byte_is(ids: tuple[int, ...], ends: bool):
    texts = [b"xa", b"b", b"a\xc3", b"\xa4 and", b"bcd"]
    assert ends_in_text(("ab", "ä"), lambda ids: b"".join(texts[id_] for id_ in ids))(ids) is ends
