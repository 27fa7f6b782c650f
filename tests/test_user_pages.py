"""The pages for users name every drafter, key, reason, endpoint and field, and no option or metric that is not."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import click
import pytest

from checkout import ROOT
from fakes.backend import FakeBackend, build_gateway, build_tokenizer, says
from fakes.fleet_snapshots import busy_fleet
from outrider.cluster.api.openai.endpoints import build_api
from outrider.cluster.api.openai.format import metrics_object
from outrider.cluster.api.rollouts.history import add_history_routes
from outrider.cluster.cli.main import main
from outrider.cluster.config.speculative_options import UNSERVED_KEYS
from outrider.cluster.gateway.rollout_memory import RolloutMemory
from outrider.cluster.monitoring.fleet_load import fleet_load
from outrider.cluster.peers.every_gateway import EveryGateway
from outrider.cluster.router.fleet import PlacementReason
from outrider.drafter_service.service.speculative_config import Method, SpeculativeConfig
from outrider.proto import generation_pb2
from outrider.verifier_service.messages.request import DisabledReason, EnabledReason, SpeculationMetrics

PAGES = ("README.md", *(f"docs/{name}.md" for name in ("api", "drafters", "operating", "speculation")))
SPAN = re.compile(r"`([^`\n]+)`")
METRIC = re.compile(r"\b(?:outrider|vllm:)_?[a-z_]+_(?:total|seconds|tokens|mean|price)\b|\boutrider_price\b")


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def section(page: str, heading: str) -> str:
    """Return what stands under a heading, up to the next one of its rank or above."""
    rank = len(heading) - len(heading.lstrip("#"))
    after = text_of(page).partition(f"\n{heading}\n")[2]
    assert after, f"{page} has no {heading}"
    return re.split(rf"^#{{1,{rank}}} ", after, maxsplit=1, flags=re.MULTILINE)[0]


def named(text: str) -> set[str]:
    """Return the words in the code spans of a text."""
    return {word for span in SPAN.findall(text) for word in re.findall(r"[\w./{}:-]+", span)}


def first_column(text: str) -> set[str]:
    """Return what the first column of a text's tables names, heads of tables left out."""
    rows = re.findall(r"^\|([^|\n]*)\|.*$(?!\n\|-)", text, flags=re.MULTILINE)
    return named("\n".join(rows))


# Complete.


def test_every_method_and_every_key_has_a_line() -> None:
    methods = {method.value for method in Method} - {Method.PLUGIN.value}
    assert methods == first_column(section("docs/drafters.md", "## Every kind"))
    keys = {field.name for field in dataclasses.fields(SpeculativeConfig)}
    options = section("docs/drafters.md", "## Options")
    assert keys == first_column(options)
    assert named(options) >= UNSERVED_KEYS


def test_every_reason_for_drafts_and_against_them_has_a_line() -> None:
    found = first_column(section("docs/speculation.md", "## Why drafting was off for my request"))
    assert {*DisabledReason, *EnabledReason} == found


def test_every_reason_for_a_placement_is_named() -> None:
    found = named(section("docs/speculation.md", "## Why drafting was off for my request"))
    assert {reason.value for reason in PlacementReason} <= found


def test_every_endpoint_has_a_line() -> None:
    tokenizer = build_tokenizer()

    async def is_healthy() -> bool:
        return True

    backend = FakeBackend(lambda _: says(tokenizer, "the"))
    gateway = build_gateway(backend, tokenizer, rollouts=True, memory=RolloutMemory())
    app = build_api(gateway, is_healthy)
    add_history_routes(app, EveryGateway(gateway))
    served = {re.sub(r"\{.*?\}", "{}", path) for path in app.openapi()["paths"]}
    told = {re.sub(r"\{.*?\}", "{}", path) for path in named(section("docs/api.md", "## HTTP endpoints"))}
    assert served <= told
    assert {path for path in told if re.fullmatch(r"/v1/\S+|/(?:de)?tokenize", path)} <= served


def test_every_field_of_load_and_of_speculation_is_named() -> None:
    assert set(_keys(fleet_load(busy_fleet(), now_s=1000.0))) <= named(section("docs/api.md", "## Load"))
    speculation = metrics_object([SpeculationMetrics()])["speculative_decoding"]
    assert speculation.keys() <= named(section("docs/api.md", "### The answer"))


def _keys(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in parts:
        yield from _keys(part)


def test_every_call_over_grpc_has_a_line() -> None:
    service = generation_pb2.DESCRIPTOR.services_by_name["Inference"]
    assert {method.name for method in service.methods} == first_column(section("docs/api.md", "## gRPC"))


# Nothing else.


@pytest.mark.parametrize("page", PAGES)
def test_options_that_a_page_names_exist(page: str) -> None:
    asked = {word for span in SPAN.findall(text_of(page)) for word in re.findall(r"(?<![\w-])--[a-z][a-z-]*", span)}
    assert asked <= _options(main)


def _options(command: click.Command) -> set[str]:
    found = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    verbs = command.commands.values() if isinstance(command, click.Group) else ()
    return found.union(*(_options(verb) for verb in verbs), {"--help"})


@pytest.mark.parametrize("page", PAGES)
def test_metrics_that_a_page_names_exist(page: str) -> None:
    assert {name for name in named(text_of(page)) if METRIC.fullmatch(name)} <= named(text_of("deploy/METRICS.md"))


def test_a_missing_metric_would_be_seen() -> None:
    assert METRIC.fullmatch("outrider_no_such_thing_total")
    assert METRIC.fullmatch("outrider_price")
