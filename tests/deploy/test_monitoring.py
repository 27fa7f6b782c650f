"""Alerts and dashboard: accepted by Prometheus, and made of metrics that a gateway has."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from outrider.cluster.monitoring.fleet_metrics import FLEET_DEFINITIONS
from outrider.cluster.monitoring.metrics import GATEWAY_DEFINITIONS, OWN_PREFIX

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
DASHBOARD = json.loads((DEPLOY / "grafana" / "outrider.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]

SELECTOR = re.compile(r"\b(outrider_\w+)(?:\{([^}]*)\})?")
LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}


def series() -> dict[str, set[str]]:
    """Return the names of all series that a gateway exports, with their labels."""
    found = {}
    for definition in (*GATEWAY_DEFINITIONS, *FLEET_DEFINITIONS):
        for suffix in SUFFIXES[definition.kind]:
            labels = {*definition.labels, *(["le"] if suffix == "_bucket" else [])}
            found[OWN_PREFIX + definition.name + suffix] = labels
    return found


def problems(expression: str) -> list[str]:
    """Complain of metrics that no gateway has, and of labels that a metric lacks."""
    known = series()
    found = []
    for name, selector in SELECTOR.findall(expression):
        if name not in known:
            found.append(f"no metric {name}")
        else:
            found += [f"{name} has no label {label}" for label in set(LABEL.findall(selector)) - known[name]]
    return found


def expressions() -> list[str]:
    shown = [target["expr"] for panel in PANELS for target in panel["targets"]]
    return [*shown, *(rule["expr"] for rule in RULES)]


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("needs promtool: `make system-deps` installs it")
    return found


def run(*command: str | Path) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


# --- alerts ---


def test_prometheus_accepts_its_configuration_and_the_rules(promtool: str):
    assert "SUCCESS" in run(promtool, "check", "config", DEPLOY / "prometheus" / "prometheus.yml")


def test_alerts_fire_when_they_should_and_only_then(promtool: str):
    assert "SUCCESS" in run(promtool, "test", "rules", Path(__file__).parent / "alerts_test.yml")


def test_every_alert_is_tested_firing_and_silent():
    tests = yaml.safe_load((Path(__file__).parent / "alerts_test.yml").read_text())["tests"]
    checks = [check for test in tests for check in test.get("alert_rule_test", ())]
    alerts = {rule["alert"] for rule in RULES if "alert" in rule}
    assert {check["alertname"] for check in checks if check["exp_alerts"]} == alerts
    assert {check["alertname"] for check in checks if not check["exp_alerts"]} == alerts


def test_every_alert_says_how_bad_it_is_and_what_happened():
    for rule in RULES:
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert "{{" in rule["annotations"]["summary"]
            assert "for" in rule


# --- metrics ---


@pytest.mark.parametrize("expression", expressions())
def test_every_metric_and_label_exists(expression: str):
    assert SELECTOR.search(expression) or "outrider:" in expression
    assert not problems(expression)


def test_recorded_ratios_that_alerts_use_are_recorded():
    recorded = {rule["record"] for rule in RULES if "record" in rule}
    used = {name for rule in RULES for name in re.findall(r"outrider:[\w:]+", rule["expr"])}
    assert used == recorded


def test_a_metric_or_label_that_does_not_exist_is_caught():
    assert problems("rate(outrider_draft_fallbacks_total[5m])") == ["no metric outrider_draft_fallbacks_total"]
    assert problems('outrider_pool_replicas{pool="verifier"}') == ["outrider_pool_replicas has no label pool"]
    assert not problems('outrider_pool_replicas{role="verifier"} > 0')


# --- the dashboard ---


def test_the_dashboard_fits_its_schema():
    jsonschema.validate(DASHBOARD, json.loads((Path(__file__).parent / "dashboard.schema.json").read_text()))


def test_panels_have_ids_of_their_own_and_do_not_overlap():
    everything = DASHBOARD["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    for one, other in itertools.combinations(everything, 2):
        assert not overlap(one["gridPos"], other["gridPos"]), (one["title"], other["title"])
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in everything)


def overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    return (
        one["x"] < other["x"] + other["w"]
        and other["x"] < one["x"] + one["w"]
        and one["y"] < other["y"] + other["h"]
        and other["y"] < one["y"] + one["h"]
    )


def test_every_query_of_the_dashboard_is_promql(promtool: str, tmp_path: Path):
    shown = [target["expr"] for panel in PANELS for target in panel["targets"]]
    rules: list[dict[str, Any]] = [{"record": f"panel:{index}", "expr": expr} for index, expr in enumerate(shown)]
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"{len(shown)} rules found" in run(promtool, "check", "rules", file)


def test_the_dashboard_shows_what_an_operator_asks_for():
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == ["Pools and load", "Latency", "Acceptance", "Decisions", "Drafters and steps"]
    assert any("per_pos_total" in target["expr"] for panel in PANELS for target in panel["targets"])
