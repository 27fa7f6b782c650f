"""The rule of the house on planted cases, and the reference that it asks."""

from __future__ import annotations

import contextlib
import dataclasses

import click
import pytest
import torch

from fakes.played import FakeReference
from outrider.cluster import LLM, SamplingParams
from outrider.cluster.config.service_config import ServiceConfig
from outrider.lab.plain_decoding import drawn, margin_of
from outrider.lab.same_tokens import (
    NEAR_TIE,
    Pair,
    Seeded,
    Tally,
    compare,
    plain_decoding,
    require_same,
)

SAME = Pair(what="HTTP", prompt=(1, 2), expected=(3, 4, 5), given=(3, 4, 5))
PARTED = dataclasses.replace(SAME, given=(3, 4, 9))
TIE = FakeReference(otherwise=NEAR_TIE, may_tip=True)


def tally_of(num_parted: int, num_answers: int, reference: FakeReference) -> Tally:
    return compare([PARTED] * num_parted + [SAME] * (num_answers - num_parted), lambda: reference)


def never() -> FakeReference:
    raise AssertionError("nothing differs: no model is needed")


def test_where_nothing_differs_nothing_is_loaded():
    tally = compare([SAME, SAME], never)
    assert (tally.holds, str(tally)) == (True, "all 2 answers are identical")
    require_same(tally)


def test_plain_decoding_is_asked_at_the_place_where_an_answer_left_it():
    reference, seeded = FakeReference(), Seeded(seed=7, temperature=0.8)
    compare([SAME, dataclasses.replace(PARTED, seeded=seeded)], lambda: reference)
    assert reference.asked == [([1, 2, 3, 4], seeded)]


@pytest.mark.parametrize(
    ("num_parted", "num_answers", "holds"), [(2, 40, True), (3, 40, False), (1, 13, True), (2, 13, False)]
)
def test_one_in_twenty_may_tip_and_of_fewer_one(num_parted: int, num_answers: int, holds: bool):
    tally = tally_of(num_parted, num_answers, TIE)
    assert tally.holds is holds
    assert str(tally) == f"{num_parted} of {num_answers} answers tipped at a near tie"


def test_beyond_a_near_tie_none_may():
    wide = FakeReference(otherwise=NEAR_TIE * 1.01, may_tip=True)
    tally = tally_of(3, 40, wide)
    assert (tally.holds, str(tally)) == (False, "3 of 40 answers differ")
    mixed = compare([PARTED, dataclasses.replace(PARTED, prompt=(6,), given=())], lambda: FakeReference({6: 0.0}))
    assert str(mixed) == "1 of 2 answers differ, 1 of 2 answers tipped at a near tie"
    assert (mixed.num_identical, mixed.num_tipped, mixed.num_different) == (0, 1, 1)


def test_what_does_not_hold_shows_both_texts_the_place_and_the_margin():
    with pytest.raises(click.ClickException) as raised:
        require_same(tally_of(0, 4, TIE), tally_of(1, 40, TIE), tally_of(1, 40, FakeReference(otherwise=0.0323)))
    assert raised.value.message == (
        "1 of 40 answers differ\n\n"
        "HTTP: token 3 differs; plain decoding's choice there leads by 3.23% of the largest logit\n"
        "expected: '3 4 5'\nhere: '3 4 9'"
    )


# The reference.


def test_a_margin_is_a_share_of_the_largest_logit():
    assert margin_of(torch.tensor([8.0, 7.0, -16.0])) == 1 / 16
    assert margin_of(torch.tensor([8.0, 7.0]), torch.tensor([0.0, 0.75])) == 0.25 / 8, "the noise decides"


def test_the_noise_is_that_of_a_place_and_a_seed_and_a_bias_is_added_before():
    logits = torch.zeros(50)
    seeded = Seeded(seed=3, temperature=0.5, biases=((4, 2.0),))
    biased, noise = drawn(logits, seeded, 7)
    assert (biased[4], biased.sum(), logits.sum()) == (2.0, 2.0, 0.0)
    assert torch.equal(noise, drawn(logits, seeded, 7)[1])
    assert not torch.equal(noise, drawn(logits, seeded, 8)[1])
    assert not torch.equal(noise, drawn(logits, dataclasses.replace(seeded, seed=4), 7)[1])
    assert torch.allclose(2 * noise, drawn(logits, dataclasses.replace(seeded, temperature=1.0), 7)[1])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_leads_in_plain_decoding_is_what_the_engine_drew(temperature: float):
    prompt = [199, 3, 737]
    load = plain_decoding(ServiceConfig(device="cpu").verifier_spec.model)
    reference = load()
    assert load() is reference, "once"
    with contextlib.closing(LLM(speculation="off", device="cpu")) as llm:
        law = SamplingParams(temperature=temperature, seed=5 if temperature else None, max_tokens=8, ignore_eos=True)
        (drawn_one,) = llm.generate([{"prompt_token_ids": prompt}], law)
    for place, token_id in enumerate(drawn_one.outputs[0].token_ids):
        prefix = [*prompt, *drawn_one.outputs[0].token_ids[:place]]
        scores = reference.logits(prefix)
        if temperature:
            scores = sum(drawn(scores, Seeded(seed=5, temperature=temperature), len(prefix)))
        assert scores.argmax() == token_id
    assert reference.text(drawn_one.outputs[0].token_ids) == drawn_one.outputs[0].text
