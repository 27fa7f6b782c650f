"""What a gateway remembers of a request, and for how long it tries: no I/O."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from exactness import law
from fakes.engine_bench import EngineBench, make_request
from fakes.played_fleet import MODEL, PLAN
from fakes.runner import next_token
from outrider.cluster.common.errors import RequestFailed, Unavailable
from outrider.cluster.gateway.journal import HANDOVER_S, MAX_ATTEMPTS, MAX_LOSSES, RETRY_INTERVAL_S, Attempts, Journal
from outrider.verifier_service.messages.request import (
    FinishReason,
    GenerationRequest,
    RequestOutput,
    SpeculationMetrics,
    SpeculationPlan,
)

EOS = MODEL.eos_token_ids[0]


def journal_of(*published: int, prompt_length: int = 3, **sampling: Any) -> Journal:
    journal = Journal(request=make_request(prompt=(1,) * prompt_length, **sampling), model=MODEL)
    for token_id in published:
        journal.publish(RequestOutput(request_id="x", token_ids=(token_id,)))
    return journal


# --- the journal ---


@pytest.mark.parametrize(
    ("journal", "ending"),
    [
        (journal_of(), None),
        (journal_of(5), None),
        (journal_of(5, EOS), FinishReason.STOP),
        (journal_of(5, EOS, ignore_eos=True), None),
        (journal_of(EOS, min_tokens=2), None),
        (journal_of(5, EOS, min_tokens=2), FinishReason.STOP),
        (journal_of(EOS, 5), None),
        (journal_of(5, 7, stop_token_ids=(7,)), FinishReason.STOP),
        (journal_of(5, 7, stop_token_ids=(7,), ignore_eos=True), FinishReason.STOP),
        (journal_of(5, 6, max_tokens=3), None),
        (journal_of(5, 6, 7, max_tokens=3), FinishReason.LENGTH),
        (journal_of(5, 6, EOS, max_tokens=3), FinishReason.STOP),
        (journal_of(5, prompt_length=MODEL.max_model_len - 2), None),
        (journal_of(5, 6, prompt_length=MODEL.max_model_len - 2), FinishReason.LENGTH),
        (journal_of(prompt_length=MODEL.max_model_len), None),
    ],
)
def test_what_was_published_may_be_the_end(journal: Journal, ending: FinishReason | None):
    assert journal.ending is ending


def test_the_verifiers_own_finish_reason_is_the_end():
    journal = journal_of(5)
    journal.publish(RequestOutput(request_id="x", token_ids=(6,), finish_reason=FinishReason.ABORT))
    assert journal.ending is FinishReason.ABORT


def test_the_last_output_of_a_request_that_had_ended_has_no_token_and_all_counters():
    journal = journal_of(5)
    metrics = SpeculationMetrics(enabled=True, num_drafts=3)
    journal.publish(RequestOutput(request_id="x", token_ids=(EOS,), num_cached_tokens=9, speculation=metrics))
    journal.close_account()
    assert journal.last_output() == RequestOutput(
        request_id="a", token_ids=(), finish_reason=FinishReason.STOP, speculation=metrics
    )


def test_a_continuation_has_the_published_tokens_and_its_own_id_and_plan():
    journal = journal_of(5, 6, seed=4, temperature=1.0)
    asked = journal.continuation("g/7/a", PLAN)
    assert asked == dataclasses.replace(journal.request, request_id="g/7/a", plan=PLAN, output_token_ids=(5, 6))


def test_a_request_that_was_continued_before_it_came_here_goes_on_from_there():
    request = dataclasses.replace(make_request(), output_token_ids=(5,))
    journal = Journal(request=request, model=MODEL)
    journal.publish(RequestOutput(request_id="x", token_ids=(6, 7)))
    assert journal.continuation("i", PLAN).output_token_ids == (5, 6, 7)


def test_closing_an_account_says_whether_this_verifier_published():
    journal = journal_of(5)
    assert [journal.close_account(), journal.close_account()] == [True, False]
    journal.publish(RequestOutput(request_id="x", token_ids=(6,)))
    assert [journal.close_account(), journal.close_account()] == [True, False]


def test_why_speculation_is_off_is_said_by_the_verifier_that_runs_the_request_now():
    journal = journal_of()
    totals = []
    for reason in ("warmup", None, "load"):
        counters = SpeculationMetrics(enabled=reason is None, disabled_reason=reason, num_drafts=1)
        shown = journal.publish(RequestOutput(request_id="x", token_ids=(5,), speculation=counters)).speculation
        journal.close_account()
        assert shown is not None
        totals.append((shown.disabled_reason, shown.enabled, shown.num_drafts))
    assert totals == [("warmup", False, 1), (None, True, 2), ("load", True, 3)]


def test_unseeded_sampling_keeps_its_law_across_a_loss():
    """The joint law of three tokens, the first from one verifier, the others from another."""
    vocab_size, num_draws = 4, 4000
    journals = {
        f"r{index}": Journal(
            request=make_request(f"r{index}", prompt=(1, 2, 3), temperature=8.0, max_tokens=3), model=MODEL
        )
        for index in range(num_draws)
    }
    for seed, is_lost in ((1, True), (2, False)):
        engine = EngineBench(vocab_size=vocab_size, num_blocks=1024).engine
        engine._generator = torch.Generator().manual_seed(seed)
        for request_id, journal in journals.items():
            assert engine.add(journal.continuation(request_id, SpeculationPlan())) is None
        while engine.has_work():
            for output in engine.step() or []:
                journals[output.request_id].publish(output)
                if is_lost:
                    engine.cancel(output.request_id)
                    journals[output.request_id].close_account()
    assert {journal.finish_reason for journal in journals.values()} == {FinishReason.LENGTH}
    counts = law.joint_counts([journal.token_ids for journal in journals.values()], vocab_size)
    expected = _joint_law(journals["r0"].request, vocab_size, num_tokens=3)
    law.assert_law(counts, expected)
    assert law.power(expected, law.shifted(expected, 0.12), num_draws) > 0.99


def _joint_law(request: GenerationRequest, vocab_size: int, num_tokens: int) -> np.ndarray:
    """Compute the fake target's joint law: [vocab_size] * num_tokens."""
    joint = np.ones([vocab_size] * num_tokens)
    for tokens in np.ndindex(*joint.shape):
        for position, token_id in enumerate(tokens):
            logits = np.zeros(vocab_size)
            logits[next_token([*request.prompt_token_ids, *tokens[:position]], vocab_size)] = 10.0
            weights = np.exp(logits / request.sampling.temperature)
            joint[tokens] *= weights[token_id] / weights.sum()
    return joint


# --- attempts ---


def attempts_after(*losses: tuple[bool, bool], timeout_s: float = 60.0) -> Attempts:
    """Return what is left after losses of v0, v1, …, each (was accepted, has published), at time 0."""
    attempts = Attempts(failover_timeout_s=timeout_s)
    for index, loss in enumerate(losses):
        lose(attempts, loss, f"v{index}")
    return attempts


def lose(attempts: Attempts, loss: tuple[bool, bool], verifier_id: str = "v") -> None:
    was_accepted, has_published = loss
    attempts.lost(verifier_id, 0.0, was_accepted=was_accepted, has_published=has_published, reason="gone")


REFUSED, FRUITLESS, FRUITFUL = (False, False), (True, False), (True, True)


@pytest.mark.parametrize(
    ("before", "last", "kind"),
    [
        ([FRUITLESS] * (MAX_ATTEMPTS - 1), FRUITLESS, RequestFailed),
        ([FRUITFUL] + [FRUITLESS] * (MAX_ATTEMPTS - 1), FRUITLESS, RequestFailed),
        ([FRUITLESS, REFUSED, REFUSED, REFUSED, FRUITLESS], FRUITLESS, RequestFailed),
        ([FRUITFUL] * (MAX_LOSSES - 1), FRUITFUL, RequestFailed),
    ],
)
def test_tries_are_bounded(before: list[tuple[bool, bool]], last: tuple[bool, bool], kind: type[Exception]):
    attempts = attempts_after(*before)
    with pytest.raises(kind, match="gone"):
        lose(attempts, last)


def test_tokens_between_losses_and_refusals_of_one_that_has_begun_cost_no_try():
    attempts_after(FRUITLESS, FRUITLESS, FRUITFUL, FRUITLESS, FRUITLESS, *[REFUSED] * 20)


def test_verifiers_that_failed_are_avoided_until_there_is_no_other():
    attempts = attempts_after(FRUITFUL, REFUSED)
    assert attempts.excluded_verifier_ids == ("v0", "v1")
    assert attempts.none_found(1.0) == RETRY_INTERVAL_S
    assert attempts.excluded_verifier_ids == ()


def test_a_new_request_without_a_verifier_waits_for_a_handover_only():
    attempts = attempts_after()
    assert attempts.none_found(7.0) == RETRY_INTERVAL_S
    assert attempts.none_found(7.0 + 0.9 * HANDOVER_S) == RETRY_INTERVAL_S
    with pytest.raises(Unavailable, match="no verifier is ready"):
        attempts.none_found(7.0 + HANDOVER_S)


def test_a_new_request_that_is_refused_tries_again_after_a_moment_for_as_long_as_a_handover_takes():
    attempts = attempts_after(*[REFUSED] * (2 * MAX_ATTEMPTS))
    assert attempts.none_found(0.9 * HANDOVER_S) == RETRY_INTERVAL_S
    with pytest.raises(Unavailable, match="no verifier takes the request: gone"):
        attempts.lost("v", HANDOVER_S, was_accepted=False, has_published=False, reason="gone")


def test_a_few_verifiers_are_tried_however_long_each_takes_to_refuse():
    attempts = attempts_after(REFUSED)
    for _ in range(MAX_ATTEMPTS - 2):
        attempts.lost("v", 10 * HANDOVER_S, was_accepted=False, has_published=False, reason="gone")
        assert attempts.none_found(10 * HANDOVER_S) == RETRY_INTERVAL_S
    with pytest.raises(Unavailable, match="gone"):
        attempts.lost("v", 10 * HANDOVER_S, was_accepted=False, has_published=False, reason="gone")


def test_each_loss_gives_the_whole_time_out_again():
    attempts = attempts_after(FRUITFUL, timeout_s=5.0)
    assert attempts.none_found(4.9) > 0
    attempts.lost("v", 4.9, was_accepted=True, has_published=False, reason="gone")
    assert attempts.none_found(9.8) > 0
    with pytest.raises(Unavailable, match="within 5 s"):
        attempts.none_found(9.9)
