"""The benchmark's order and bookkeeping with fake arms, and every real arm on a tiny pair."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from fakes.backend import build_tokenizer
from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.offline.prompts import PromptError
from outrider.lab.bench.arms import Arm, placed
from outrider.lab.bench.figures import (
    APART,
    LIBRARY,
    LIBRARY_ASSISTED,
    OFF,
    SHARED,
    RequestTrace,
    RunTrace,
    Workload,
)
from outrider.lab.bench.pairs import (
    BenchOptions,
    measure,
    pairs,
    plan_runs,
    read_prompts,
    run_bench,
    streamed_weight_bytes,
)
from outrider.lab.bench.peers import AssistedLibraryArm, LibraryArm, count_drafts, load_library_model
from outrider.verifier_service.model.config import ModelConfig
from tiny.models import make_checkpoint, random_sequences

ALL_CORES = frozenset(os.sched_getaffinity(0))
PROMPTS = tuple(tuple(sequence) for sequence in random_sequences((5, 9, 3)))
WORKLOAD = Workload(prompts=PROMPTS, max_tokens=10)


@dataclass
class FakeClock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class FakeArm:
    """Takes `seconds` for every token of every prompt; its tokens are `first_token`, then zeros."""

    name: str
    clock: FakeClock
    journal: list
    seconds: float = 1.0
    first_token: int = 0
    num_threads: int = 1
    cores: frozenset[int] = field(default=ALL_CORES)

    def run(self, workload: Workload, concurrency: int) -> RunTrace:
        self.journal.append((self.name, concurrency, len(workload.prompts), workload.max_tokens))
        begin_s, requests = self.clock.now_s, []
        for _ in workload.prompts:
            arrival_s = self.clock.now_s
            times = tuple(arrival_s + self.seconds * (i + 1) for i in range(workload.max_tokens))
            self.clock.now_s = times[-1]
            tokens = (self.first_token, *[0] * (workload.max_tokens - 1))
            sizes = (1,) * workload.max_tokens
            requests.append(
                RequestTrace(arrival_s=arrival_s, output_times_s=times, output_sizes=sizes, token_ids=tokens)
            )
        elapsed_s = self.clock.now_s - begin_s
        return RunTrace(elapsed_s=elapsed_s, requests=tuple(requests), num_target_steps=workload.max_tokens)


def options(**changes: object) -> BenchOptions:
    return BenchOptions(**{"config": ServiceConfig(), "workload": WORKLOAD, "concurrencies": (1, 2)} | changes)


# Order and bookkeeping.


def test_arms_are_interleaved() -> None:
    assert list(plan_runs(["a", "b", "c"], [1, 4], 2)) == [
        *[(0, 1, "a"), (0, 1, "b"), (0, 1, "c"), (0, 4, "a"), (0, 4, "b"), (0, 4, "c")],
        *[(1, 1, "a"), (1, 1, "c"), (1, 1, "b"), (1, 4, "a"), (1, 4, "c"), (1, 4, "b")],
    ]


@pytest.mark.parametrize(("num_arms", "repeats"), [(1, 1), (2, 2), (3, 6), (4, 4), (5, 10), (6, 6)])
def test_each_arm_runs_in_each_place_and_after_each_other_one_equally_often(num_arms: int, repeats: int) -> None:
    names = "abcdef"[:num_arms]
    runs = list(plan_runs(names, [1], repeats))
    orders = [[name for at, _, name in runs if at == repeat] for repeat in range(repeats)]
    places = Counter(pair for order in orders for pair in enumerate(order))
    successions = Counter(pair for order in orders for pair in pairwise(order))
    assert len(places) == num_arms * num_arms
    assert len(successions) == num_arms * (num_arms - 1)
    assert len({*places.values()}) == 1
    assert len({*successions.values()}) <= 1


def test_every_run_is_warmed_up_and_the_warm_up_does_not_count() -> None:
    clock, journal, said = FakeClock(), [], []
    arms: list[Arm] = [FakeArm("a", clock, journal), FakeArm("b", clock, journal, seconds=0.5)]
    found = measure(arms, options(repeats=1), clock=clock, on_run=said.append, read_speed=lambda _: 1e9)
    assert journal == [
        *[("a", 1, 1, 8), ("a", 1, 3, 10), ("b", 1, 1, 8), ("b", 1, 3, 10)],
        *[("a", 2, 2, 8), ("a", 2, 3, 10), ("b", 2, 2, 8), ("b", 2, 3, 10)],
    ]
    assert [(one.arm, one.concurrency, one.trace.elapsed_s) for one in found] == [
        *[("a", 1, 30.0), ("b", 1, 15.0), ("a", 2, 30.0), ("b", 2, 15.0)]
    ]
    assert said[0] == "a, concurrency 1"


def test_the_read_speed_is_measured_anew_in_each_repeat_for_each_number_of_threads() -> None:
    clock, speeds, threads = FakeClock(), iter([1.0, 2.0, 3.0, 4.0]), []

    def read_speed(_: FakeClock) -> float:
        threads.append(torch.get_num_threads())
        return next(speeds)

    arms: list[Arm] = [
        FakeArm("a", clock, [], num_threads=2),
        FakeArm("b", clock, [], num_threads=1),
        FakeArm("c", clock, [], num_threads=2),
    ]
    found = measure(arms, options(repeats=2), clock=clock, on_run=lambda _: None, read_speed=read_speed)
    seen = {(one.repeat, one.arm): one.read_bytes_per_s for one in found}
    assert seen == {(0, "a"): 1, (0, "b"): 2, (0, "c"): 1, (1, "a"): 3, (1, "c"): 3, (1, "b"): 4}
    assert threads == [2, 1, 2, 1]


def test_an_arm_runs_on_its_cores_with_its_threads_and_both_are_given_back() -> None:
    threads = torch.get_num_threads()
    one_core = frozenset(sorted(ALL_CORES)[:1])
    torch.ones(1 << 20).sum()  # torch's worker threads exist
    with placed(one_core, 1):
        for thread in os.listdir("/proc/self/task"):
            assert os.sched_getaffinity(int(thread)) == one_core
        assert torch.get_num_threads() == 1
    assert os.sched_getaffinity(0) == ALL_CORES
    assert torch.get_num_threads() == threads


def test_assisted_drafts_are_counted_from_outputs() -> None:
    # 10 tokens: drafts of 4, 4, min(4, 10 - 7 - 1 = 2); then one token is left, and no room for a draft
    counts = count_drafts([5, 2, 2, 1], WORKLOAD)
    assert (counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens) == (3, 10, 6)


# The real arms on a tiny pair.


@pytest.fixture(scope="module")
def config(tiny_pair: tuple[Path, Path]) -> ServiceConfig:
    target, draft = map(str, tiny_pair)
    return ServiceConfig(model=target, draft_model=draft, kv_cache_memory_bytes=1 << 20, max_model_len=64, seed=0)


def test_library_arms_make_the_tokens_of_plain_greedy_decoding(config: ServiceConfig) -> None:
    target, draft = load_library_model(config.verifier_spec.model), load_library_model(config.drafter_spec.model)
    settings = {"cores": ALL_CORES, "num_threads": 1, "clock": time.perf_counter}
    plain = LibraryArm(LIBRARY, target, **settings).run(WORKLOAD, 1)
    batched = LibraryArm(LIBRARY, target, **settings).run(WORKLOAD, 2)
    assisted = AssistedLibraryArm(LIBRARY_ASSISTED, target, draft, **settings).run(WORKLOAD, 2)
    expected = [greedy(target, prompt, WORKLOAD.max_tokens) for prompt in PROMPTS]
    for run in (plain, batched, assisted):
        assert [list(request.token_ids) for request in run.requests] == expected
        assert all(sum(request.output_sizes) == 10 for request in run.requests)
    assert (plain.num_target_steps, batched.num_target_steps) == (30, 20)
    assert assisted.num_target_steps == sum(len(request.output_sizes) for request in assisted.requests) < 30
    drafts = assisted.drafts
    assert 0 < drafts.num_accepted_tokens < drafts.num_draft_tokens
    # those of a batch arrive together, so the second has waited for the first
    first, second = assisted.requests[:2]
    assert second.arrival_s == first.arrival_s < first.output_times_s[-1] < second.output_times_s[0]


@torch.inference_mode()
def greedy(model: torch.nn.Module, prompt: tuple[int, ...], length: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_all_arms_on_a_tiny_pair_agree(config: ServiceConfig) -> None:
    chosen = options(config=config, concurrencies=(2,), repeats=1, inflate_to=0)
    said: list[str] = []
    with pairs(chosen) as named:
        result = run_bench(chosen, named, clock=time.perf_counter, on_run=said.append)
    assert [row.arm for row in result.rows] == [LIBRARY, LIBRARY_ASSISTED, OFF, SHARED, APART]
    assert len(said) == chosen.num_runs
    rows = {row.arm: row for row in result.rows}
    assert not any(row.first_differences for row in result.rows)
    assert rows[OFF].figures.acceptance_rate is None
    assert rows[OFF].figures.num_target_steps == 20  # two at a time, and the third after the first
    for arm in (LIBRARY_ASSISTED, SHARED, APART):
        assert 0 < rows[arm].figures.acceptance_rate < 1, arm
    assert rows[SHARED].figures.num_target_steps < 20
    assert os.sched_getaffinity(0) == ALL_CORES


def test_an_inflated_pair_is_the_same_function_and_is_removed(config: ServiceConfig) -> None:
    chosen = options(config=config, inflate_to=400_000)
    with pairs(chosen) as named:
        (first, given), (second, inflated) = named
        assert (first, second) == ("as given", "target inflated to 0.4 M")
        assert inflated.drafter_spec.model.path == given.drafter_spec.model.path
        assert not given.verifiers.enable_prefix_caching
        assert streamed_weight_bytes(inflated.verifier_spec.model) > 2 * streamed_weight_bytes(
            given.verifier_spec.model
        )
        folder = Path(inflated.model.target_path)
        assert (folder / "config.json").is_file()
    assert not folder.exists()


def test_a_prompt_too_long_is_refused_before_anything_runs(config: ServiceConfig) -> None:
    chosen = options(config=config, workload=replace(WORKLOAD, max_tokens=56))
    with pytest.raises(ValueError, match="at most 55: the longest prompt has 9 tokens"), pairs(chosen):
        pass


@pytest.mark.parametrize("tied", [True, False])
def test_streamed_weights_are_all_but_the_rows_that_are_looked_up(tied: bool, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, tie_word_embeddings=tied)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as weights:
        sizes = {name: weights.get_tensor(name).numel() for name in weights.keys()}  # noqa: SIM118
    assert ("lm_head.weight" in sizes) is not tied
    expected = sum(sizes.values()) - (0 if tied else sizes["model.embed_tokens.weight"])
    assert streamed_weight_bytes(ModelConfig(path=str(tmp_path))) == 4 * expected


def test_prompts_are_read_as_the_targets_tokens(config: ServiceConfig, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "the fox"}) + "\n" + json.dumps({"prompt_token_ids": [5, 6]}) + "\n")
    assert read_prompts(config, path) == (tuple(build_tokenizer()("the fox")["input_ids"]), (5, 6))
    path.write_text(json.dumps({"prompt": "the fox", "temperature": 1.0}))
    with pytest.raises(PromptError, match="'temperature' has no place"):
        read_prompts(config, path)
