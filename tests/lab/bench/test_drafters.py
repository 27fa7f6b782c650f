"""The drafters' benchmark: which arms there are, their order, what is counted, and real arms on a tiny pair."""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from fakes.backend import build_tokenizer
from fakes.played import FakeReference
from outrider.cluster.config.pool_options import checkpoint_of
from outrider.cluster.config.service_config import ServiceConfig
from outrider.drafter_service import embedded
from outrider.drafter_service.service.speculative_config import Location, Method
from outrider.lab.bench.arms import BenchError
from outrider.lab.bench.drafter_arms import (
    OFF,
    BenchPlan,
    DrafterArm,
    DrafterRun,
    Measurement,
    Place,
    WeighingClient,
    arm_groups,
    known_checkpoints,
    measure,
    opened,
    shared_out,
)
from outrider.lab.bench.drafters_report import (
    DrafterRow,
    cells,
    headings,
    notes,
    result_of,
    rows_of,
    to_json,
    to_markdown,
    to_table,
)
from outrider.lab.bench.figures import Machine, Workload
from outrider.lab.cli.bench import bench
from outrider.lab.same_tokens import require_same
from outrider.verifier_service.messages.draft import Close, Commit, Draft, DrafterEvent, DraftSampling, Open
from outrider.verifier_service.messages.request import SpeculationMetrics
from outrider.verifier_service.messages.wire import encode
from tiny.models import make_checkpoint, random_sequences

PROMPTS = tuple(tuple(sequence) for sequence in random_sequences((5, 9, 3)))
WORKLOAD = Workload(prompts=PROMPTS, max_tokens=10, num_speculative_tokens=3)
FOLDERS = {Method.DRAFT_MODEL: Path("/draft"), Method.MEDUSA: Path("/medusa")}
BASE = ServiceConfig(model="/target", num_speculative_tokens=3)
MACHINE = Machine(
    cpu="Test CPU",
    num_cores=2,
    memory_bytes=8 << 30,
    load_average=0.25,
    python="3.11.1",
    torch="2.13.0",
    transformers="5.23.0",
)
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
    assert not plain.drafts
    assert (near.config.speculative.location, far.config.speculative.location) == (Location.VERIFIER, Location.POOL)
    assert (near.config.speculative.num_tree_nodes, tree.config.speculative.num_tree_nodes) == (0, 6)
    assert near.config.speculative.method is Method.MEDUSA
    assert checkpoint_of(near.config.speculative, None) == "/medusa"
    assert checkpoint_of(groups[1][1].config.speculative, None) is None


def test_what_reads_the_targets_kv_is_near_alone() -> None:
    assert labels(arm_groups(["sparse"], BASE, {}, 6)) == [[(OFF, "near"), ("sparse", "near")]]


def test_by_default_every_method_that_can_be_had_is_measured() -> None:
    groups = arm_groups(None, BASE, FOLDERS, 6)
    names = list(dict.fromkeys(arm.name for group in groups for arm in group if arm.drafts))
    assert names == [
        *["draft_model", "draft_model+tree", "ngram", "suffix", "suffix+tree", "lookahead", "early_exit", "sparse"],
        *["medusa", "medusa+tree", "hybrid: suffix, medusa"],
    ]
    without = arm_groups(None, BASE, {}, 6)
    assert {arm.name for group in without for arm in group if arm.drafts} == {
        *["ngram", "suffix", "suffix+tree", "lookahead", "early_exit", "sparse"]
    }


def test_a_hybrid_looks_up_suffixes_beside_the_best_head_there_is() -> None:
    (group,) = arm_groups(["hybrid"], BASE, FOLDERS | {Method.EAGLE3: Path("/eagle3")}, 6)
    assert group[1].name == "hybrid: suffix, eagle3"
    assert group[1].config.speculative.methods == (Method.SUFFIX, Method.EAGLE3)
    assert checkpoint_of(group[1].config.speculative, None) == "/eagle3"


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
class FakeOpenArm:
    arm: DrafterArm
    journal: list

    def run(self, workload: Workload, concurrency: int) -> DrafterRun:
        self.journal.append((self.arm.name, concurrency, len(workload.prompts), workload.max_tokens))
        tokens = tuple((0,) * workload.max_tokens for _ in workload.prompts)
        return DrafterRun(elapsed_s=1.0, token_ids=tokens, speculation=SpeculationMetrics(), wire_bytes={})


@dataclass
class FakeOpener:
    journal: list = field(default_factory=list)

    @contextlib.contextmanager
    def __call__(self, arm: DrafterArm, _: object) -> Iterator[FakeOpenArm]:
        self.journal.append(f"open {arm.name}")
        yield FakeOpenArm(arm, self.journal)
        self.journal.append(f"close {arm.name}")


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


def test_every_second_repeat_goes_backwards() -> None:
    said: list[str] = []
    found = measure(plan(), clock=time.perf_counter, on_run=said.append, open_arm=FakeOpener())
    order = [OFF, "sparse", OFF, "early_exit"]
    assert [one.name for one in found if one.concurrency == 1] == [*order, *order[::-1]]
    assert [(one.repeat, one.group) for one in found if one.concurrency == 2] == [
        *[(0, 0), (0, 0), (0, 1), (0, 1)],
        *[(1, 1), (1, 1), (1, 0), (1, 0)],
    ]
    assert len(said) == len(found) == plan().num_runs == 16
    assert said[:3] == [f"{OFF}, near, concurrency 1", f"{OFF}, near, concurrency 2", "sparse, near, concurrency 1"]


def test_every_run_is_warmed_up_and_an_arm_is_loaded_once_for_all_its_runs() -> None:
    opener = FakeOpener()
    chosen = plan(groups=arm_groups(["sparse"], BASE, {}, 6), repeats=1)
    found = measure(chosen, clock=time.perf_counter, on_run=lambda _: None, open_arm=opener)
    assert opener.journal[-6:] == [
        *["open sparse", ("sparse", 1, 1, 8), ("sparse", 1, 3, 10), ("sparse", 2, 2, 8), ("sparse", 2, 3, 10)],
        "close sparse",
    ]
    assert all(one.num_tokens == 30 for one in found)


# Weighing.


class ScriptedClient:
    def __init__(self) -> None:
        self.sent: list = []

    def send(self, drafter_id: str, messages: list) -> None:
        self.sent.append((drafter_id, list(messages)))

    def poll(self) -> list[DrafterEvent]:
        draft = Draft(request_id="a", round_id=1, position=3, token_ids=(5, 6))
        return [DrafterEvent(drafter_id="far"), DrafterEvent(drafter_id="far", message=draft)]


def test_messages_pass_and_are_weighed_once() -> None:
    inner = ScriptedClient()
    client = WeighingClient(inner)
    commit = Commit(request_id="a", round_id=1, position=3, token_ids=(7,), max_length=4)
    client.send("far", [commit, commit, Close(request_id="a")])
    events = client.poll()
    assert inner.sent == [("far", [commit, commit, Close(request_id="a")])]
    assert [event.message is None for event in events] == [True, False]
    assert client.take_bytes() == {
        "Commit": 2 * len(encode(commit)),
        "Close": len(encode(Close(request_id="a"))),
        "Draft": len(encode(events[1].message)),
    }
    assert client.take_bytes() == {}


# Figures.


def measured(name: str, place: Place, tokens_per_s: float, **changes: object) -> Measurement:
    run = DrafterRun(
        elapsed_s=20 / tokens_per_s,
        token_ids=((1,) * 10, (2,) * 9, (3,)),
        speculation=SpeculationMetrics(
            num_drafts=4,
            num_draft_tokens=10,
            num_accepted_tokens=6,
            num_empty_rounds=1,
            num_accepted_per_position=[4, 2],
        ),
        wire_bytes={"Open": 40, "States": 200, "Commit": 60, "Draft": 100},
    )
    fields: dict = {"name": name, "place": place, "group": 0, "concurrency": 1, "repeat": 0, "run": run}
    return Measurement(**fields | changes)


def table(*measurements: Measurement, compares: bool = True) -> dict[tuple[str, str], DrafterRow]:
    return {(row.name, row.place.value): row for row in rows_of(measurements, num_positions=3, compares=compares)}


def test_figures_are_what_the_page_says() -> None:
    rows = table(measured(OFF, NEAR, 10), measured("x", NEAR, 15), measured("x", FAR, 20))
    near, far = rows["x", "near"], rows["x", "far"]
    assert (rows[OFF, "near"].speed_up, near.speed_up, far.speed_up) == (1.0, 1.5, 2.0)
    assert near.mean_acceptance_length == 2.5
    assert near.acceptance_by_position == (1.0, 0.5, 0.0)
    assert (near.drafted, near.empty) == (2.5, 0.2)
    assert near.bytes_to_drafter is None
    assert (far.bytes_to_drafter, far.bytes_of_states, far.bytes_back) == (15.0, 10.0, 5.0)


def test_ratios_are_taken_within_a_repeat_and_a_group_and_speeds_are_medians() -> None:
    measurements = []
    for repeat, (plain, drafted) in enumerate([(10, 10), (1, 3), (50, 100)]):
        measurements += [measured(OFF, NEAR, plain, repeat=repeat), measured("x", NEAR, drafted, repeat=repeat)]
        measurements += [measured(OFF, NEAR, 1000, repeat=repeat, group=1)]
    row = table(*measurements)["x", "near"]
    assert (row.speed_up, row.tokens_per_s) == (2.0, 10.0)
    assert row.repeats == (10.0, 3.0, 100.0)
    assert row.drafted == 2.5  # counts are added up


def test_concurrencies_are_apart_and_in_order() -> None:
    measurements = [
        measured(name, NEAR, speed, concurrency=concurrency)
        for name, speed in ((OFF, 10), ("x", 30))
        for concurrency in (1, 8)
    ]
    rows = rows_of(measurements, num_positions=3, compares=True)
    assert [(row.concurrency, row.name) for row in rows] == [(1, OFF), (1, "x"), (8, OFF), (8, "x")]


def test_prompts_whose_tokens_differ_in_any_repeat_are_counted() -> None:
    odd = measured("x", NEAR, 10, repeat=1)
    odd = replace(odd, run=replace(odd.run, token_ids=((1,) * 10, (2,) * 8 + (4,), (3,))))
    measurements = [*(measured(OFF, NEAR, 10, repeat=repeat) for repeat in (0, 1)), measured("x", NEAR, 10), odd]
    assert table(*measurements)["x", "near"].num_differing_prompts == 1
    assert table(*measurements)[OFF, "near"].num_differing_prompts == 0
    assert table(*measurements, compares=False)["x", "near"].num_differing_prompts is None
    result = result_of(plan(), MACHINE, measurements, lambda: FakeReference(otherwise=0.01))
    assert "x, near, concurrency 1: 1." in notes(result)[-1]
    assert notes(result)[-1].endswith("Over all repeats: 1 of 12 answers differ.")
    with pytest.raises(click.ClickException, match="x, near, concurrency 1, prompt 2: token 9 differs"):
        require_same(result.tally)


def test_a_drafter_that_never_drafted_shows_so() -> None:
    silent = measured("x", NEAR, 10)
    silent = replace(silent, run=replace(silent.run, speculation=SpeculationMetrics(num_empty_rounds=3)))
    row = table(measured(OFF, NEAR, 10), silent)["x", "near"]
    assert (row.mean_acceptance_length, row.acceptance_by_position, row.drafted, row.empty) == (None, (), None, 1.0)


# The report.


def test_table_page_and_document_say_the_same() -> None:
    measurements = [measured(OFF, NEAR, 10), measured("x", FAR, 20)]
    result = result_of(plan(pair="target inflated to 1 M"), MACHINE, measurements, FakeReference)
    expected = ["x", "far", "20.0", "2.00", "2.50", "100 50 0", "2.5", "20 %", "15", "10", "5"]
    assert cells(result.rows[-1]) == expected
    assert len(headings(result)) == len(expected)
    console = Console(file=io.StringIO(), width=250)
    console.print(to_table(result))
    (line,) = [line for line in console.file.getvalue().splitlines() if line.startswith("│ x ")]
    assert [cell.strip() for cell in line.strip("│").split("│")] == expected
    page = to_markdown(result)
    assert "| " + " | ".join(expected) + " |" in page.splitlines()
    for fact in ("Test CPU", "3 prompts (17 tokens) x 10 tokens", "trees of 6", "accepted at 1, 2, 3 (%)", "inflated"):
        assert fact in page
    assert "B/token         encoded messages" in page
    document = json.loads(json.dumps(to_json(result)))
    assert document["rows"][-1]["bytes_per_token"] == {"Open": 2.0, "States": 10.0, "Commit": 3.0, "Draft": 5.0}
    assert document["workload"]["num_prompts"] == 3


# The real arms on a tiny pair.


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A pair whose drafter is the target with one weight changed: often right, not always."""
    target, draft = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft")
    make_checkpoint(target)
    model = make_checkpoint(draft)
    with torch.no_grad():
        model.lm_head.weight.mul_(1 + 0.5 * torch.rand(model.lm_head.weight.shape, generator=torch.manual_seed(0)))
    model.save_pretrained(draft)
    build_tokenizer().save_pretrained(target)
    (target / "prompts.jsonl").write_text("".join(json.dumps({"prompt_token_ids": ids}) + "\n" for ids in PROMPTS))
    return target, draft


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
    runs: dict[str, DrafterRun] = {}
    for arm in (plain, chain, tree):
        with opened(arm, time.perf_counter) as ready:
            runs[arm.name] = ready.run(WORKLOAD, 2)
    assert runs["draft_model"].token_ids == runs["draft_model+tree"].token_ids == runs[OFF].token_ids
    assert [len(tokens) for tokens in runs[OFF].token_ids] == [10, 10, 10]
    assert runs[OFF].speculation.num_drafts == runs[OFF].speculation.num_empty_rounds == 0
    assert runs[OFF].wire_bytes == {}
    chains, trees = runs["draft_model"].speculation, runs["draft_model+tree"].speculation
    assert 0 < chains.num_accepted_tokens < chains.num_draft_tokens <= 3 * chains.num_drafts
    assert trees.num_draft_tokens > 3 * trees.num_drafts
    assert os.sched_getaffinity(0) == cores


def test_the_engine_is_kept_at_the_concurrency(folders: tuple[Path, Path]) -> None:
    plain = tiny_groups(folders, "sparse")[0][0]
    with opened(plain, time.perf_counter) as ready:
        ready.run(WORKLOAD, 1)
        assert ready.engine.stats.num_steps == 30
        ready.run(WORKLOAD, 3)
        assert ready.engine.stats.num_steps == 40


def test_every_run_begins_with_no_memory_of_the_last(folders: tuple[Path, Path]) -> None:
    ((_, near, _),) = tiny_groups(folders, "suffix")
    with opened(near, time.perf_counter) as ready:
        first, second = ready.run(WORKLOAD, 1), ready.run(WORKLOAD, 1)
    assert first.speculation == second.speculation


def test_a_far_drafter_changes_no_token_and_its_messages_are_weighed(folders: tuple[Path, Path]) -> None:
    plain, _, far = tiny_groups(folders, "draft_model")[0]
    with opened(plain, time.perf_counter) as ready:
        expected = ready.run(WORKLOAD, 1)
    with opened(far, time.perf_counter) as ready:
        found = ready.run(WORKLOAD, 1)
    assert found.token_ids == expected.token_ids
    assert found.speculation.num_accepted_tokens > 0
    assert found.wire_bytes.keys() == {"Open", "Commit", "Draft", "Close"}
    opens = [
        Open(
            request_id=str(index),
            sampling=DraftSampling(temperature=0.0),
            token_ids=(*prompt, tokens[0]),
            cache_salt="1",
        )
        for index, (prompt, tokens) in enumerate(zip(PROMPTS, found.token_ids, strict=True))
    ]
    assert found.wire_bytes["Open"] == sum(len(encode(message)) for message in opens)


def test_a_request_that_fails_ends_the_benchmark(folders: tuple[Path, Path]) -> None:
    plain = tiny_groups(folders, "sparse")[0][0]
    with opened(plain, time.perf_counter) as ready, pytest.raises(BenchError, match=f"{OFF}, near: "):
        ready.run(replace(WORKLOAD, prompts=((1 << 20,),)), 1)


# The verb.


def invoke(folders: tuple[Path, Path], *options: str) -> tuple[int, str]:
    target, draft = folders
    prompts = ("--prompts", f"{target}/prompts.jsonl", "--checkpoint", f"draft_model={draft}")
    done = CliRunner().invoke(bench, ["drafters", str(target), *prompts, *options])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--concurrency", "1;8"), "expected numbers"),
        (("--concurrency", "0"), "concurrency must be"),
        (("--checkpoint", "medusa"), "expected METHOD=FOLDER"),
        (("--methods", "medusa"), "medusa has no checkpoint"),
        (("--checkpoint", "medusa=/no/such"), "a folder that exists"),
        (("--methods", "nonsense"), "unknown method 'nonsense'"),
        (("--max-tokens", "500"), "max_tokens must be at most 247"),
    ],
)
def test_senseless_options_are_refused(folders: tuple[Path, Path], options: tuple[str, ...], message: str) -> None:
    code, output = invoke(folders, *options)
    assert code == 2
    assert message in " ".join(output.split())


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
    assert [(row["name"], row["num_differing_prompts"]) for row in rows] == [(OFF, 0), ("early_exit", 0)]
    assert rows[1]["drafted"] is not None
    assert "early_exit" in output
