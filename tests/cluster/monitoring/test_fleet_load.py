from __future__ import annotations

import json

import pytest

from fakes.fleet_snapshots import DECIDED_AT_S, busy_fleet
from outrider.cluster.monitoring.fleet_load import fleet_load


def test_every_replica_is_described():
    load = fleet_load(busy_fleet(), DECIDED_AT_S + 0.5)
    assert json.loads(json.dumps(load)) == load, "JSON-ready"
    assert load["age_s"] == 0.5
    busy, idle = load["verifiers"]
    assert busy == {
        "id": "v0",
        "state": "ready",
        "role": "both",
        "batch_dependent": None,
        "num_running": 6,
        "num_waiting": 2,
        "kv_usage": 0.625,
        "weight_version": "",
        "weights_digest": "",
        "weights_error": None,
        "is_paused": False,
        "tokens_per_s": 120.0,
        "mean_step_s": 0.05,
        "price": 0.25,
        "knee": 96.0,
        "num_extrapolated_steps": 4,
        "draft_length": 3,
        "enabled_reason": "pays",
        "disabled_reason": None,
        "num_asks": 48,
        "num_asked_tokens": 120,
        "draft_length_mean": 2.5,
        "verify_idle_share": 0.125,
        "late_share": pytest.approx(3 / 43),
        "mean_lateness_s": pytest.approx(0.125 / 3),
        "acceptance_rate": 0.75,
        "mean_acceptance_length": 3.25,
    }
    assert (idle["state"], idle["disabled_reason"], idle["acceptance_rate"]) == ("draining", "warmup", None)
    assert (idle["price"], idle["knee"], idle["late_share"], idle["mean_lateness_s"]) == (None,) * 4
    assert load["drafters"][0] == {
        "id": "d0",
        "state": "ready",
        "pool": "default",
        "num_sessions": 6,
        "queue_depth": 1,
        "mean_draft_s": 0.004,
        "hit_rate": 0.75,
        "accepted_per_round": 1.5,
        "num_links_up": 2,
        "num_circuits_open": 0,
    }
    assert load["drafters"][1]["hit_rate"] is None
    assert (load["drafters"][1]["num_links_up"], load["drafters"][1]["num_circuits_open"]) == (1, 1)


def test_learners_are_described_with_what_their_versions_brought():
    (learner,) = fleet_load(busy_fleet(), DECIDED_AT_S)["learners"]
    assert {name: value for name, value in learner.items() if name != "versions"} == {
        "pool": "default",
        "phase": "watch",
        "serving": "v4",
        "num_samples": 37,
        "num_bytes": 3 << 20,
        "num_seen": 402,
        "num_dropped": 13,
        "num_steps": 150,
        "loss": 0.875,
        "train_s": 61.5,
        "num_candidates": 7,
        "num_published": 4,
        "num_refused": 3,
        "num_rolled_back": 2,
        "last_event": "v4 serves: in 512 rounds of its trial it named 0.25 tokens more than v2",
    }
    found = [
        (each["name"], each["is_serving"], each["acceptance"], each["named_per_round"]) for each in learner["versions"]
    ]
    assert found == [("v2", False, 0.4375, 1.75), ("v3", False, None, None), ("v4", True, 0.5, 2.0)]
    assert fleet_load(None, 0.0)["learners"] == []


def test_totals_and_decisions_are_those_of_the_whole_fleet():
    load = fleet_load(busy_fleet(), DECIDED_AT_S)
    assert load["totals"] == {
        "num_running": 6,
        "num_waiting": 2,
        "tokens_per_s": 120.0,
        "tokens_per_s_per_accelerator": 24.0,  # v0 has 2 ranks, the others one each
        "num_draft_sessions": 6,
        "hit_rate": 0.75,
        "acceptance_rate": 0.75,
        "mean_acceptance_length": pytest.approx(3.25),
    }
    assert load["decisions"] == [
        {"decision": "off", "reason": "load", "count": 11},
        {"decision": "on", "reason": "pays", "count": 31},
    ]
    assert load["placements"] == [{"reason": "prefix", "count": 42}]


def test_a_gateway_that_has_heard_of_nobody_says_so():
    load = fleet_load(None, 5.0)
    assert (load["age_s"], load["verifiers"], load["drafters"], load["decisions"]) == (None, [], [], [])
    assert load["totals"]["acceptance_rate"] is None
    assert load["totals"]["tokens_per_s_per_accelerator"] is None
