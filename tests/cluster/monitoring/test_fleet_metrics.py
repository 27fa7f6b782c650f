from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from fakes.fleet_snapshots import DECIDED_AT_S, busy_fleet
from outrider.cluster.monitoring.fleet_metric import COUNTERS, DRAFTER_COUNTERS, DRAFTER_LOAD, FETCHES, LOAD
from outrider.cluster.monitoring.fleet_metrics import FLEET_DEFINITIONS, FleetMetrics
from outrider.cluster.monitoring.metrics import GATEWAY_DEFINITIONS, GatewayMetrics
from outrider.cluster.monitoring.metrics_page import PAGE, metrics_page
from outrider.cluster.router.fleet import FleetSnapshot
from outrider.verifier_service.messages.metric import metrics_of


def registry_of(snapshot: FleetSnapshot | None, *, vllm_aliases: bool = True) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(
        FleetMetrics(
            lambda: snapshot,
            model_name="tiny",
            wall_clock=lambda: DECIDED_AT_S + 2.0,
            vllm_aliases=vllm_aliases,
        )
    )
    return registry


def samples(registry: CollectorRegistry) -> dict[str, float]:
    """Return every sample of the exposition as Prometheus itself reads it: `name{labels}` to value."""
    text = generate_latest(registry).decode()
    return {
        f"{sample.name}{{{','.join(f'{k}={v}' for k, v in sorted(sample.labels.items()) if k != 'model_name')}}}": (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_load_is_shown_per_replica_and_under_both_names():
    shown = samples(registry_of(busy_fleet()))
    for prefix in ("outrider_", "vllm:"):
        assert shown[f"{prefix}num_requests_running{{engine=v0}}"] == 6
        assert shown[f"{prefix}num_requests_waiting{{engine=v0}}"] == 2
        assert shown[f"{prefix}num_requests_running{{engine=v1}}"] == 0
        assert shown[f"{prefix}kv_cache_usage_perc{{engine=v0}}"] == 0.625
        assert shown[f"{prefix}prefix_cache_queries_total{{engine=v0}}"] == 640
        assert shown[f"{prefix}prefix_cache_hits_total{{engine=v0}}"] == 320
        assert shown[f"{prefix}num_preemptions_total{{engine=v0}}"] == 2
        assert shown[f"{prefix}request_queue_time_seconds_bucket{{engine=v0,le=0.1}}"] == 7
        assert shown[f"{prefix}request_queue_time_seconds_bucket{{engine=v0,le=+Inf}}"] == 8
        assert shown[f"{prefix}request_queue_time_seconds_count{{engine=v0}}"] == 8
        assert shown[f"{prefix}request_queue_time_seconds_sum{{engine=v0}}"] == 0.75
    assert shown["outrider_pool_replicas{role=verifier,state=ready}"] == 1
    assert shown["outrider_pool_replicas{role=drafter,state=draining}"] == 1
    assert shown["outrider_fleet_snapshot_age_seconds{}"] == 2.0


def test_steps_and_drafts_are_counted():
    shown = samples(registry_of(busy_fleet()))
    expected = {
        "verify_step_seconds_count{engine=v0}": 50,
        "verify_step_seconds_sum{engine=v0}": 2.5,
        "verify_step_seconds_count{engine=v1}": 0,
        "verify_idle_seconds_total{engine=v0}": 1.5,
        "verify_scheduled_tokens_total{engine=v0}": 400,
        "verify_committed_tokens_total{engine=v0}": 300,
        "graph_steps_total{engine=v0,role=verifier}": 46,
        "graph_steps_total{engine=d0,role=drafter}": 0,
        "graph_fallback_total{engine=v0,reason=many_tokens,role=verifier}": 4,
        "graph_capture_seconds_total{engine=v0,role=verifier}": 3.5,
        "router_spec_decisions_total{decision=off,reason=load}": 11,
        "router_spec_decisions_total{decision=on,reason=pays}": 31,
        "router_placements_total{reason=prefix}": 42,
        "price{engine=v0}": 0.25,
        "draft_length{engine=v0}": 3,
        "draft_length{engine=v1}": 0,
        "draft_length_mean{engine=v0}": 2.5,
        "verify_idle_share{engine=v0}": 0.125,
        "verify_knee_tokens{engine=v0}": 96,
        "verify_extrapolated_steps_total{engine=v0}": 4,
        "tokens_per_second_per_accelerator{}": 24,
        "speculation_cache_hits_total{engine=d0}": 30,
        "speculation_cache_misses_total{engine=d0}": 10,
        "draft_rtt_seconds_count{engine=v0}": 40,
        "draft_lateness_seconds_count{engine=v0}": 3,
        "drafts_stale_total{engine=v0}": 3,
        "draft_fallback_total{engine=v0,reason=timeout}": 7,
        "draft_fallback_total{engine=v0,reason=bad_draft}": 1,
        "draft_resyncs_total{engine=v0}": 5,
        "draft_state_bytes_total{engine=v0,transport=gloo}": 4096,
        "draft_tensor_fallbacks_total{engine=v0}": 2,
        "drafter_circuit_state{drafter=d0,engine=v0}": 0,
        "drafter_circuit_state{drafter=d1,engine=v0}": 2,
        "draft_yield{drafter=d0,engine=v0}": 1.5,
        "link_bad_frames_total{engine=v0,role=verifier}": 4,
        "link_bad_frames_total{engine=d0,role=drafter}": 9,
        "draft_sessions{engine=d0}": 6,
        "draft_queue_depth{engine=d0}": 1,
        "drafter_draft_seconds{engine=d0}": 0.004,
        "drafter_drafts_total{engine=d0}": 44,
        "drafter_draft_tokens_total{engine=d0}": 132,
        "drafter_evicted_sessions_total{engine=d0}": 1,
    }
    assert {name: shown[f"outrider_{name}"] for name in expected} == expected
    assert "outrider_price{engine=v1}" not in shown, "nothing was computed for it"
    assert "outrider_verify_knee_tokens{engine=v1}" not in shown


def test_acceptance_is_shown_by_version_of_the_weights_and_who_has_not_followed():
    shown = samples(registry_of(busy_fleet()))
    assert {name: value for name, value in shown.items() if "weight_version" in name or "behind" in name} == {
        "outrider_version_draft_tokens_total{engine=v0,weight_version=v6}": 80,
        "outrider_version_draft_tokens_total{engine=v0,weight_version=v7}": 40,
        "outrider_version_accepted_tokens_total{engine=v0,weight_version=v6}": 72,
        "outrider_version_accepted_tokens_total{engine=v0,weight_version=v7}": 18,
        "outrider_drafter_updates_behind{drafter=d0,engine=v0}": 2,
    }


def test_before_the_first_snapshot_there_are_no_samples():
    assert samples(registry_of(None)) == {}


def test_aliases_can_be_left_out():
    assert b"vllm:" not in generate_latest(registry_of(busy_fleet(), vllm_aliases=False))


def test_a_scrape_has_the_names_of_the_page_and_no_others():
    registry = registry_of(busy_fleet())
    GatewayMetrics(registry, model_name="tiny")
    text = generate_latest(registry).decode()
    families = list(text_string_to_metric_families(text))
    names = [family.name + ("_total" if family.type == "counter" else "") for family in families]
    assert len(names) == len(set(names)), "each is defined once"
    definitions = (*GATEWAY_DEFINITIONS, *FLEET_DEFINITIONS)
    assert set(names) == {name for definition in definitions for name in definition.names}
    assert all(family.documentation for family in families)


def test_learners_are_shown_by_pool_and_version():
    shown = samples(registry_of(busy_fleet()))
    expected = {
        "learner_phase{phase=watch,pool=default}": 1,
        "learner_phase{phase=training,pool=default}": 0,
        "learner_samples{pool=default}": 37,
        "learner_sample_bytes{pool=default}": 3 << 20,
        "learner_seen_samples_total{pool=default}": 402,
        "learner_dropped_samples_total{pool=default}": 13,
        "learner_steps_total{pool=default}": 150,
        "learner_train_seconds_total{pool=default}": 61.5,
        "learner_candidates_total{pool=default}": 7,
        "learner_published_total{pool=default}": 4,
        "learner_refused_total{pool=default}": 3,
        "learner_rolled_back_total{pool=default}": 2,
        "learner_version_rounds_total{pool=default,version=v2}": 400,
        "learner_version_draft_tokens_total{pool=default,version=v4}": 320,
        "learner_version_named_tokens_total{pool=default,version=v4}": 160,
        "learner_version_rounds_total{pool=default,version=v3}": 0,
    }
    for name, value in expected.items():
        assert shown[f"outrider_{name}"] == value, name


def test_requests_that_change_their_verifier_are_counted_on_both_sides():
    shown = samples(registry_of(busy_fleet()))
    assert shown["outrider_kv_given_requests_total{engine=v0}"] == 3
    assert shown["outrider_kv_given_bytes_total{engine=v0}"] == 1 << 20
    assert shown["outrider_kv_refusals_total{engine=v0,reason=other_weights}"] == 2
    assert shown["outrider_kv_taken_requests_total{engine=v0}"] == 1


def test_experts_are_counted_where_they_lie_in_host_memory():
    shown = samples(registry_of(busy_fleet()))
    assert {name: value for name, value in shown.items() if "expert" in name} == {
        "outrider_expert_cache_queries_total{engine=v0}": 70,
        "outrider_expert_cache_hits_total{engine=v0}": 60,
        "outrider_expert_cache_fetches_total{engine=v0}": 25,
    }


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == metrics_page(), "run python -m outrider.cluster.monitoring.metrics_page"


def test_labels_are_those_of_the_page():
    page = metrics_page()
    for family in registry_of(busy_fleet()).collect():
        labels = {name for sample in family.samples for name in sample.labels if name != "le"}
        (row,) = (line for line in page.splitlines() if f"`{family.name}`" in line or f"`{family.name}_total`" in line)
        assert labels == set(row.split("|")[3].replace(" ", "").split(",")), family.name


def test_every_field_with_a_metric_is_shown():
    defined = {definition.name for definition in FLEET_DEFINITIONS}
    for shown in (LOAD, COUNTERS, FETCHES, DRAFTER_LOAD, DRAFTER_COUNTERS):
        assert {metric.name for metric in metrics_of(shown.kind).values()} <= defined
