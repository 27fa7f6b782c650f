"""`make study NAME=rollouts`: arms that say the same tokens, weights that follow expected lengths, and its table."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from benchmarks.draft_lengths.rollouts import (
    ARMS,
    HISTORY,
    LENGTHS,
    OFF,
    Epoch,
    Study,
    biases_of,
    expected_length,
    lengths_of,
    pairs_of,
    requests_of,
    to_rows,
)
from benchmarks.draft_lengths.tail_shares import MAX_WEIGHT, MIN_WEIGHT, SCENARIOS, WeighedSurvival, last_sample_s

STUDY = Study(prompts=[(1, 2), (3, 4)], num_samples=3, max_tokens=64, temperature=1.0, drift=0.5, num_epochs=2)


def test_all_arms_ask_for_the_same_samples_and_share_no_history():
    of_arm = {arm: requests_of(STUDY, arm, 1, biases_of(STUDY, 1, {7: 3, 8: 1})) for arm in ARMS}
    plain = [(one.prompt_token_ids, one.sampling) for one in of_arm[OFF]]
    assert all([(one.prompt_token_ids, one.sampling) for one in of_arm[arm]] == plain for arm in ARMS)
    keys = {arm: {one.history_key for one in of_arm[arm]} for arm in ARMS}
    assert keys[HISTORY] == {f"{HISTORY} 0", f"{HISTORY} 1"}
    assert not keys[HISTORY] & keys[LENGTHS]
    assert all(keys[arm] == {""} for arm in ARMS if arm not in (HISTORY, LENGTHS))


def test_every_sample_is_held_against_the_one_without_drafts():
    biases = biases_of(STUDY, 1, {7: 3})
    found = {}
    for arm in (OFF, HISTORY):
        requests = requests_of(STUDY, arm, 1, biases)
        tokens = {request.request_id.split("/")[2]: [place] for place, request in enumerate(requests)}
        found[arm] = [Epoch(tokens=tokens, requests=requests)]
    found[HISTORY][0].tokens["1 2"] = [9]
    pairs = pairs_of(found)
    assert [pair.what for pair in pairs if pair.given != pair.expected] == [f"{HISTORY}/1/1 2"]
    assert (pairs[-1].prompt, pairs[-1].expected, pairs[-1].seeded.biases) == ((3, 4), [5], ((7, biases[0].bias),))


def test_epochs_differ_in_lengths_seeds_and_policy():
    first, second = (requests_of(STUDY, OFF, epoch, biases_of(STUDY, epoch, {7: 3})) for epoch in (1, 2))
    assert lengths_of(STUDY, 1) != lengths_of(STUDY, 2)
    for one, other in zip(first, second, strict=True):
        assert one.sampling.seed != other.sampling.seed
        assert one.sampling.logit_bias != other.sampling.logit_bias


def test_a_length_is_expected_by_the_longer_ones_of_its_prompt():
    def request(arm: str, num_output_tokens: int) -> SimpleNamespace:
        return SimpleNamespace(request_id=f"{arm}/1/0 2", num_output_tokens=num_output_tokens)

    lengths: dict[str, Sequence[int]] = {"0": [10, 20, 40], "1": [90]}
    assert expected_length(lengths, request(LENGTHS, 0)) == 20
    assert expected_length(lengths, request(LENGTHS, 15)) == 30
    assert expected_length(lengths, request(LENGTHS, 40)) is None
    assert expected_length(lengths, request(HISTORY, 0)) is None


def test_long_samples_weigh_more_and_those_of_unknown_length_as_they_are():
    requests = [SimpleNamespace(request_id=name, num_output_tokens=10) for name in ("long", "short", "over", "unknown")]
    expected = {"long": 410.0, "short": 15.0, "over": 5.0}
    survival = WeighedSurvival(lambda: requests)
    plain = survival.survivals("long", "d", 3)
    survival.expect = lambda request: expected.get(request.request_id)
    survival.end_step()
    weights = {one.request_id: survival.survivals(one.request_id, "d", 3)[0] / plain[0] for one in requests}
    assert weights["unknown"] == 1.0
    assert weights["short"] == pytest.approx(MIN_WEIGHT)
    assert 1.0 < weights["long"] == weights["over"] <= MAX_WEIGHT


def test_weights_change_the_time_to_the_last_sample_and_nothing_else_does():
    scenario = SCENARIOS[0]
    plain = last_sample_s(scenario, 0, is_weighed=False)
    assert plain == last_sample_s(scenario, 0, is_weighed=False)
    assert plain != last_sample_s(scenario, 0, is_weighed=True)


def test_a_row_is_beside_the_mean_of_both_runs_without_drafts():
    times_s = {OFF: 3.0, "off, again": 5.0}
    found = {arm: [Epoch(times_s.get(arm, 2.0), 4, {"0 0": [1] * 8})] for arm in ARMS}
    assert to_rows(found)[2] == [HISTORY, "2.00 s", "2.00", "2.00"]
