"""The drafters' benchmark: which arms there are, their order, what is counted, and real arms on a tiny pair."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from fakes.played import MACHINE, FakeReference
from outrider.cluster.config.pool_options import checkpoint_of
from outrider.cluster.config.service_config import ServiceConfig
from outrider.drafter_service import embedded
from outrider.drafter_service.service.speculative_config import Location, Method
from outrider.lab.bench import drafter_arms
from outrider.lab.bench.arms import BenchError
from outrider.lab.bench.drafter_arms import (
    OFF,
    BenchPlan,
    DrafterArm,
    Place,
    arm_groups,
    known_checkpoints,
    measure,
    opened,
    shared_out,
)
from outrider.lab.bench.drafters import report_of
from outrider.lab.bench.figures import Measurement, RequestTrace, RunTrace, Workload
from outrider.lab.cli.bench import bench
from outrider.lab.same_tokens import require_same
from outrider.verifier_service.messages.draft import DraftSampling, Open
from outrider.verifier_service.messages.request import SpeculationMetrics
from outrider.verifier_service.messages.wire import encode
from tiny.models import random_sequences

PROMPTS = tuple(tuple(sequence) for sequence in random_sequences((5, 9, 3)))
WORKLOAD = Workload(prompts=PROMPTS, max_tokens=10, num_speculative_tokens=3)
FOLDERS = {Method.DRAFT_MODEL: Path("/draft"), Method.MEDUSA: Path("/medusa")}
BASE = ServiceConfig(model="/target", num_speculative_tokens=3)
NEAR, FAR = Place.NEAR, Place.FAR


def labels(groups: tuple[tuple[DrafterArm, ...], ...]) -> list[list[tuple[str, str]]]:
    return [[(arm.name, arm.place.value) for arm in group] for group in groups]


# Which arms there are.


def test_a_method_stands_beside_plain_decoding_near_and_far_as_chain_and_tree() -> None:
    groups = arm_groups(["medusa", "ngram", "medusa+tree"], BASE, FOLDERS, 6)
    assert labels(groups) == [
        [
            *[(OFF, "near"), ("medusa", "near"), ("medusa", "far")],
            *[("medusa+tree", "near"), ("medusa+tree", "far")],
        ],
        [(OFF, "near"), ("ngram", "near"), ("ngram", "far")],
    ]
    plain, near, far, tree, _ = groups[0]
    assert plain.config.drafter_spec is None
    assert (near.config.speculative.location, far.config.speculative.location) == (Location.VERIFIER, Location.POOL)
    assert (near.config.speculative.num_tree_nodes, tree.config.speculative.num_tree_nodes) == (0, 6)
    assert near.config.speculative.method is Method.MEDUSA
    assert checkpoint_of(near.config.speculative, None) == "/medusa"
    assert checkpoint_of(groups[1][1].config.speculative, None) is None


def test_by_default_every_method_that_can_be_had_is_measured() -> None:
    groups = arm_groups(None, BASE, FOLDERS, 6)
    names = list(dict.fromkeys(arm.name for group in groups for arm in group if arm.name != OFF))
    assert names == [
        *["draft_model", "draft_model+tree", "ngram", "suffix", "suffix+tree", "lookahead", "early_exit", "sparse"],
        *["medusa", "medusa+tree", "hybrid: suffix, medusa"],
    ]
    without = arm_groups(None, BASE, {}, 6)
    assert {arm.name for group in without for arm in group if arm.name != OFF} == {
        *["ngram", "suffix", "suffix+tree", "lookahead", "early_exit", "sparse"]
    }


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["eagle"], r"methods: eagle has no checkpoint: give --checkpoint eagle=FOLDER"),
        (["hybrid"], r"--checkpoint draft_model=FOLDER"),
        (["n_gram"], r"unknown method 'n_gram'; did you mean 'ngram'"),
        (["medusa+trees"], r"unknown method 'medusa\+trees'"),
    ],
)
def test_what_cannot_be_measured_is_refused(names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        arm_groups(names, BASE, {}, 6)


def test_checkpoints_are_those_shipped_for_the_embedded_target_and_those_given() -> None:
    shipped = known_checkpoints(None, {})
    assert shipped[Method.DRAFT_MODEL] == embedded.draft_path()
    assert all(path.is_dir() for path in shipped.values())
    assert known_checkpoints(None, {"draft_model": Path("/x")})[Method.DRAFT_MODEL] == Path("/x")
    assert known_checkpoints("/target", {"eagle": Path("/x")}) == {Method.EAGLE: Path("/x")}
    with pytest.raises(ValueError, match="unknown method 'eagel'"):
        known_checkpoints(None, {"eagel": Path("/x")})


def test_the_target_has_the_same_cores_and_a_far_drafter_the_last() -> None:
    cores = sorted(os.sched_getaffinity(0))
    (target, near), (also, far) = shared_out(NEAR), shared_out(FAR)
    assert target == also == near == frozenset(cores[:-1] or cores)
    assert far == {cores[-1]}


# The order.


@dataclass
class FakeOpener:
    journal: list = field(default_factory=list)
    arm: str = ""
    num_threads: int = 1

    @contextlib.contextmanager
    def __call__(self, arm: DrafterArm, _: object) -> Iterator[FakeOpener]:
        self.arm = arm.name
        self.journal.append(f"open {arm.name}")
        yield self
        self.journal.append(f"close {arm.name}")

    def run(self, workload: Workload, concurrency: int) -> RunTrace:
        self.journal.append((self.arm, concurrency, len(workload.prompts), workload.max_tokens))
        return trace(1.0, tuple((0,) * workload.max_tokens for _ in workload.prompts))


def plan(**changes: object) -> BenchPlan:
    fields: dict = {
        "target": "/target",
        "pair": "as given",
        "groups": arm_groups(["sparse", "early_exit"], BASE, {}, 6),
        "workload": WORKLOAD,
        "concurrencies": (1, 2),
        "repeats": 2,
        "num_tree_nodes": 6,
    }
    return BenchPlan(**fields | changes)


def test_every_second_repeat_goes_backwards_and_what_stands_beside_each_other_is_one_moment() -> None:
    said: list[str] = []
    found = measure(plan(), clock=time.perf_counter, on_run=said.append, open_arm=FakeOpener())
    order = [OFF, "sparse, near", OFF, "early_exit, near"]
    assert [one.arm for one in found if one.concurrency == 1] == [*order, *order[::-1]]
    assert [one.repeat for one in found if one.concurrency == 2] == [0, 0, 1, 1, 3, 3, 2, 2]
    assert len(said) == len(found) == plan().num_runs == 16
    assert said[:3] == [f"{OFF}, concurrency 1", f"{OFF}, concurrency 2", "sparse, near, concurrency 1"]


def test_every_run_is_warmed_up_and_an_arm_is_loaded_once_for_all_its_runs() -> None:
    opener = FakeOpener()
    chosen = plan(groups=arm_groups(["sparse"], BASE, {}, 6), repeats=1)
    found = measure(chosen, clock=time.perf_counter, on_run=lambda _: None, open_arm=opener)
    assert opener.journal[-6:] == [
        *["open sparse", ("sparse", 1, 1, 8), ("sparse", 1, 3, 10), ("sparse", 2, 2, 8), ("sparse", 2, 3, 10)],
        "close sparse",
    ]
    assert all(one.trace.num_tokens == 30 for one in found)


# Weighing.


# Figures.

TOKENS = ((1,) * 10, (2,) * 9, (3,))
COUNTS = SpeculationMetrics(
    num_drafts=4, num_draft_tokens=10, num_accepted_tokens=6, num_empty_rounds=1, num_accepted_per_position=[4, 2]
)
WIRE = {"Open": 40, "States": 200, "Commit": 60, "Draft": 100}


def trace(elapsed_s: float, tokens: tuple[tuple[int, ...], ...] = TOKENS, **changes: Any) -> RunTrace:
    requests = tuple(
        RequestTrace(arrival_s=0.0, output_times_s=(elapsed_s,), output_sizes=(len(ids),), token_ids=ids)
        for ids in tokens
    )
    return RunTrace(elapsed_s=elapsed_s, requests=requests, num_target_steps=1, **changes)


def measured(arm: str, tokens_per_s: float, *, repeat: int = 0, **changes: Any) -> Measurement:
    return Measurement(
        arm=arm,
        num_threads=1,
        concurrency=1,
        repeat=repeat,
        trace=trace(20 / tokens_per_s, **{"drafts": COUNTS, "wire_bytes": WIRE, **changes}),
        read_bytes_per_s=1.0,
    )


def test_figures_are_what_the_page_says() -> None:
    measurements = [measured(OFF, 10), measured("x, near", 15, wire_bytes={}), measured("x, far", 20)]
    report = report_of(plan().result_of(MACHINE, measurements), 6)
    cells = {row.arm: [column.cell(row) for column in report.columns] for row in report.sections[0].rows}
    assert cells["x, far"] == ["x, far", "20.0", "2.00", "2.50", "100 50 0", "2.5", "20 %", "15", "10", "5"]
    assert cells["x, near"] == ["x, near", "15.0", "1.50", "2.50", "100 50 0", "2.5", "20 %", "-", "-", "-"]
    page = report.to_markdown()
    for fact in (
        "Test CPU",
        "3 prompts (17 tokens) x 10 tokens",
        "trees of 6",
        "accepted at 1, 2, 3 (%)",
        "**as given",
    ):
        assert fact in page
    assert "B/token         encoded messages" in page
    document = json.loads(json.dumps(report.to_json()))
    assert document["rows"][-1]["bytes_per_token"] == {"Commit": 3.0, "Draft": 5.0, "Open": 2.0, "States": 10.0}


def test_ratios_are_taken_within_a_moment_and_counts_are_added_up() -> None:
    measurements = []
    for repeat, (plain, drafted) in enumerate([(10, 10), (1, 3), (50, 100)]):
        measurements += [measured(OFF, plain, repeat=2 * repeat), measured("x, near", drafted, repeat=2 * repeat)]
        measurements += [measured(OFF, 1000, repeat=2 * repeat + 1)]
    row = plan().result_of(MACHINE, measurements).rows[1]
    assert (row.ratio, row.figures.tokens_per_s) == (2.0, 10.0)
    assert row.total.drafts.num_drafts == 12


def test_prompts_whose_tokens_differ_in_any_repeat_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter_arms, "plain_decoding", lambda model: lambda: FakeReference(otherwise=0.01))
    odd = measured("x, near", 10, repeat=1, tokens=((1,) * 10, (2,) * 8 + (4,), (3,)))
    measurements = [measured(OFF, 10), measured(OFF, 10, repeat=1), measured("x, near", 10), odd]
    result = plan().result_of(MACHINE, measurements)
    assert [row.first_differences for row in result.rows] == [{}, {1: 8}]
    assert "as given, concurrency 1, x, near: 1." in report_of(result, 6).notes[-2]
    with pytest.raises(click.ClickException, match="x, near, prompt 2: token 9 differs"):
        require_same(*result.tallies)


# The real arms on a tiny pair.


@pytest.fixture(scope="module")
def folders(tiny_pair: tuple[Path, Path]) -> tuple[Path, Path]:
    lines = (json.dumps({"prompt_token_ids": ids}) + "\n" for ids in PROMPTS)
    (tiny_pair[0] / "prompts.jsonl").write_text("".join(lines))
    return tiny_pair


def ids_of(run: RunTrace) -> list[tuple[int, ...]]:
    return [request.token_ids for request in run.requests]


def tiny_groups(folders: tuple[Path, Path], *names: str) -> tuple[tuple[DrafterArm, ...], ...]:
    base = ServiceConfig(
        model=str(folders[0]),
        kv_cache_memory_bytes=1 << 20,
        max_model_len=64,
        max_num_seqs=4,
        num_speculative_tokens=3,
        enable_prefix_caching=False,
        seed=0,
    )
    return arm_groups(names, base, {Method.DRAFT_MODEL: folders[1]}, 6)


def test_a_near_drafter_and_its_trees_make_the_tokens_of_plain_decoding(folders: tuple[Path, Path]) -> None:
    cores = os.sched_getaffinity(0)
    plain, chain, _, tree, _ = tiny_groups(folders, "draft_model", "draft_model+tree")[0]
    runs: dict[str, RunTrace] = {}
    for arm in (plain, chain, tree):
        with opened(arm, time.perf_counter) as ready:
            runs[arm.name] = ready.run(WORKLOAD, 2)
    assert ids_of(runs["draft_model"]) == ids_of(runs["draft_model+tree"]) == ids_of(runs[OFF])
    assert [len(tokens) for tokens in ids_of(runs[OFF])] == [10, 10, 10]
    assert runs[OFF].drafts.num_drafts == runs[OFF].drafts.num_empty_rounds == 0
    assert runs[OFF].wire_bytes == {}
    chains, trees = runs["draft_model"].drafts, runs["draft_model+tree"].drafts
    assert 0 < chains.num_accepted_tokens < chains.num_draft_tokens <= 3 * chains.num_drafts
    assert trees.num_draft_tokens > 3 * trees.num_drafts
    assert os.sched_getaffinity(0) == cores


def test_every_run_begins_with_no_memory_of_the_last(folders: tuple[Path, Path]) -> None:
    ((_, near, _),) = tiny_groups(folders, "suffix")
    with opened(near, time.perf_counter) as ready:
        first, second = ready.run(WORKLOAD, 1), ready.run(WORKLOAD, 1)
    assert first.drafts == second.drafts


def test_a_far_drafter_changes_no_token_and_its_messages_are_weighed(folders: tuple[Path, Path]) -> None:
    plain, _, far = tiny_groups(folders, "draft_model")[0]
    with opened(plain, time.perf_counter) as ready:
        expected = ready.run(WORKLOAD, 1)
    with opened(far, time.perf_counter) as ready:
        found = ready.run(WORKLOAD, 1)
    assert ids_of(found) == ids_of(expected)
    assert found.drafts.num_accepted_tokens > 0
    assert found.wire_bytes.keys() == {"Open", "Commit", "Draft", "Close"}
    opens = [
        Open(
            request_id=str(index),
            sampling=DraftSampling(temperature=0.0),
            token_ids=(*prompt, tokens[0]),
            cache_salt="1",
        )
        for index, (prompt, tokens) in enumerate(zip(PROMPTS, ids_of(found), strict=True))
    ]
    assert found.wire_bytes["Open"] == sum(len(encode(message)) for message in opens)


def test_a_request_that_fails_ends_the_benchmark(folders: tuple[Path, Path]) -> None:
    plain = tiny_groups(folders, "sparse")[0][0]
    with opened(plain, time.perf_counter) as ready, pytest.raises(BenchError, match=f"{OFF}: "):
        ready.run(replace(WORKLOAD, prompts=((1 << 20,),)), 1)


# The verb.


def invoke(folders: tuple[Path, Path], *options: str) -> tuple[int, str]:
    target, draft = folders
    prompts = ("--prompts", f"{target}/prompts.jsonl", "--checkpoint", f"draft_model={draft}")
    done = CliRunner().invoke(bench, ["drafters", str(target), *prompts, *options])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def test_a_run_on_an_inflated_target_prints_a_table_and_writes_both_files(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    document, page = tmp_path / "drafters.json", tmp_path / "drafters.md"
    code, output = invoke(
        folders,
        *("--methods", "early_exit", "--inflate", "2e5", "--repeats", "1", "--concurrency", "2"),
        *("--max-tokens", "6", "--num-prompts", "2", "--json", str(document), "--markdown", str(page)),
    )
    assert code == 0, output
    assert "target inflated to 0.2 M, concurrency 2" in page.read_text()
    rows = json.loads(document.read_text())["rows"]
    assert [(row["arm"], row["first_differences"]) for row in rows] == [(OFF, {}), ("early_exit, near", {})]
    assert rows[1]["drafts"]["num_drafts"] > 0
    assert "early_exit" in output
