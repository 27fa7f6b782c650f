"""The methods' benchmark: which there are, what a step is made of, what is recorded, and the verb on a tiny pair."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from outrider.cluster.config.pool_options import checkpoint_of
from outrider.cluster.config.service_config import ServiceConfig
from outrider.drafter_service import embedded
from outrider.drafter_service.service.speculative_config import Location, Method
from outrider.lab.bench.arms import BenchError
from outrider.lab.bench.method_arms import (
    DRAFTING,
    NUM_SETTLING,
    NUM_SETTLINGS,
    WAITING,
    MethodArm,
    Mode,
    Steps,
    known_checkpoints,
    method_configs,
)
from outrider.lab.bench.method_arms import opened as open_arm
from outrider.lab.bench.method_figures import MeasuredMachine, Row
from outrider.lab.cli.bench import bench
from outrider.verifier_service.messages.engine import StepTime
from outrider.verifier_service.messages.request import RequestOutput
from tiny.models import random_sequences

PROMPTS = [tuple(sequence) for sequence in random_sequences((5, 9))]
FOLDERS = {Method.DRAFT_MODEL: Path("/draft"), Method.MEDUSA: Path("/medusa")}
BASE = ServiceConfig(model="/target", num_speculative_tokens=3)


def configs(*names: str, **options: bool) -> dict[str, ServiceConfig]:
    return method_configs(names or None, BASE, FOLDERS, num_tree_nodes=6, **options)


# Which methods there are.


def test_by_default_every_method_that_can_be_had_is_measured() -> None:
    assert [*configs()] == [
        *["ngram", "suffix", "suffix+tree", "lookahead", "early_exit", "sparse", "draft_model", "draft_model+tree"],
        *["medusa", "medusa+tree", "hybrid"],
    ]
    assert not {"early_exit", "sparse"} & {*configs(is_far=True)}, "they read the target's KV"


def test_a_method_has_its_checkpoint_its_tree_and_its_place() -> None:
    near, tree = configs("medusa", "medusa+tree").values()
    (far,) = configs("medusa", is_far=True).values()
    assert (near.speculative.num_tree_nodes, tree.speculative.num_tree_nodes) == (0, 6)
    assert (near.speculative.location, far.speculative.location) == (Location.VERIFIER, Location.POOL)
    assert checkpoint_of(near.speculative, None) == "/medusa"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("eagle", r"methods: eagle has no checkpoint: give --checkpoint eagle=FOLDER"),
        ("n_gram", r"unknown method 'n_gram'; did you mean 'ngram'"),
        ("medusa+trees", r"unknown method 'medusa\+trees'"),
        ("sparse", r"methods: sparse reads the target's KV"),
    ],
)
def test_what_cannot_be_measured_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configs(name, is_far=True)


def test_checkpoints_are_those_shipped_for_a_target_and_those_given() -> None:
    assert known_checkpoints(None, {})[Method.DRAFT_MODEL] == embedded.draft_path()
    assert known_checkpoints("/target", {"eagle": Path("/x")}) == {Method.EAGLE: Path("/x")}
    assert Method.EAGLE3 in known_checkpoints("smollm2", {})


# What a step is made of.


def steps(seconds: dict[str, float], *outputs: tuple[int, int]) -> Steps:
    """One step; an output is its drafted and its accepted tokens."""
    found = Steps()
    made = [
        RequestOutput(
            request_id="r", token_ids=(0,) * (accepted + 1), num_draft_tokens=drafted, num_accepted_tokens=accepted
        )
        for drafted, accepted in outputs
    ]
    found.add(seconds, made)
    return found


def test_figures_are_what_the_page_says() -> None:
    drafted = steps({"forward": 1.0, DRAFTING: 0.5, "verify": 0.25, "schedule": 0.25}, (4, 2), (2, 0), (0, 0))
    row = Row(name="x", num_requests=3, steps={Mode.ALWAYS: drafted, Mode.OFF: steps({"forward": 1.0}, (0, 0))})
    assert (row.step_s, row.tokens_per_round, drafted.num_drafts) == (2.0, 5 / 3, 2)
    assert (row.share("drafting"), row.share("verification"), row.share("host")) == (0.25, 0.5, 0.125)
    assert row.ratio(Mode.ALWAYS) == 2.5
    assert drafted.plus(drafted).seconds["forward"] == 2 * drafted.seconds["forward"]


def test_a_step_of_the_bound_is_the_profile_as_dear_as_here_and_a_draft_a_share_of_the_longest() -> None:
    plain = steps({"forward": 0.4, "schedule": 0.1}, (0, 0))
    always = steps({"forward": 1.0, DRAFTING: 0.8}, (4, 4))
    rows = [Row(name="x", num_requests=2, steps={Mode.OFF: plain, Mode.ALWAYS: always})]
    times = [StepTime(num_tokens=count, seconds=0.1 * count) for count in (1, 2, 4, 8)]
    machine = MeasuredMachine(rows, times, 4)
    assert machine.step_s(4, 2) == pytest.approx(0.4 * 0.4 / 0.2 + 0.1)
    assert machine.draft_s("x", 2, 1) == pytest.approx(0.2)


# The real arms on a tiny pair.


@pytest.fixture(scope="module")
def arm(tiny_pair: tuple[Path, Path]) -> Iterator[MethodArm]:
    base = ServiceConfig(
        model=str(tiny_pair[0]),
        kv_cache_memory_bytes=1 << 20,
        max_model_len=128,
        max_num_seqs=4,
        num_speculative_tokens=3,
        enable_prefix_caching=False,
        seed=0,
    )
    (config,) = method_configs(["draft_model"], base, {Method.DRAFT_MODEL: tiny_pair[1]}, num_tree_nodes=6).values()
    with open_arm(config, time.perf_counter) as opened:
        yield opened


def test_what_is_recorded_is_a_draft_at_every_position_beside_plain_decoding(arm: MethodArm) -> None:
    recorded, plain = arm.record(PROMPTS, 10)
    assert [len(places) for places in recorded] == [9, 9], "the first token comes with the prompt"
    assert {drafted for places in recorded for drafted, _ in places} == {3}
    assert 0 < sum(right for places in recorded for _, right in places) < 3 * 18
    found, tokens = arm.decode(PROMPTS, 4, "all modes")
    for index in range(2):
        own = plain[f"recorded-{index}"]
        assert tokens[f"all modes-{index}"][: len(own)] == own
    assert found[Mode.OFF].num_drafts == 0
    assert found[Mode.ALWAYS].num_drafts == found[Mode.ALWAYS].num_rounds == 2 * 4
    assert found[Mode.ALWAYS].seconds[DRAFTING] > 0.0 == found[Mode.ALWAYS].seconds[WAITING]
    assert not arm.engine.requests


def test_a_price_settles_in_steps_that_do_not_count(arm: MethodArm) -> None:
    level = arm.engine.pricing._levels.at(2 * len(PROMPTS))
    assert level.price.is_new
    num_before = arm.engine.stats.num_steps
    arm.settle(2 * PROMPTS)
    assert not level.price.is_new
    assert arm.engine.stats.num_steps - num_before >= NUM_SETTLINGS * NUM_SETTLING
    assert not arm.engine.requests


def test_a_context_that_is_too_short_ends_the_benchmark(arm: MethodArm) -> None:
    with pytest.raises(BenchError, match="the context of the model is too short"):
        arm.decode(PROMPTS, 400, "long")


def test_a_tiny_run_writes_its_page_with_every_share_and_the_bound(
    tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document, page = tmp_path / "methods.json", tmp_path / "methods.md"
    options = ["--tiny", "--methods", "early_exit", "--json", str(document), "--markdown", str(page)]
    done = CliRunner().invoke(bench, ["methods", "embedded", *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = json.loads(document.read_text())
    assert [(row["method"], row["requests"]) for row in found["rows"]] == [("early_exit", "1"), ("early_exit", "2")]
    shares = [float(found["rows"][0][f"{name} %"]) for name in ("drafting", "verification", "sampling", "host")]
    assert sum(shares) == pytest.approx(100, abs=2)
    assert [bound["num_requests"] for bound in found["bounds"]] == [1, 2]
    assert "answers are identical" in page.read_text()
    assert "| early_exit | 1." in page.read_text(), "tokens a verification"


def test_recorded_requests_have_a_bound_without_a_model(tmp_path: Path) -> None:
    traces = tmp_path / "traces.jsonl"
    request = {"prompt_token_ids": [5, 6], "generated_token_ids": [1, 2, 3, 1, 2, 3, 1, 2]}
    traces.write_text(json.dumps(request | {"acc_eagle": {"acc_len": [2, 1, 3, 1, 1, 3, 2, 1]}}) + "\n")
    done = CliRunner().invoke(bench, ["methods", "--traces", str(traces), "--concurrency", "1"])
    assert done.exit_code == 0, done.output
    assert "| 1 |" in done.output
    traces.write_text(json.dumps(request) + "\n")
    done = CliRunner().invoke(bench, ["methods", "--traces", str(traces)])
    assert (done.exit_code, "a request has no acc_eagle" in done.output) == (1, True)
