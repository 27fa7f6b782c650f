"""The offline engine with real processes and tiny random models."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes.collected import Result, collect
from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.offline.engine import OfflineEngine, PipeDraftClient
from outrider.verifier_service.engine.verifier_spec import VerifierSpec
from outrider.verifier_service.messages.expert_shape import ExpertShape
from outrider.verifier_service.messages.request import FinishReason, GenerationRequest, SamplingParams, SpeculationPlan
from outrider.verifier_service.pricing.experts_read import ExpertsRead
from tiny.models import make_checkpoint, make_model

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=1, seed=5, max_tokens=24, ignore_eos=True)
PATIENCE_S = 60.0  # for a draft: beside other tests a drafter's process may be late for a whole short run


class Patient(ServiceConfig):
    """A service whose verifier waits for every draft, so that a busy machine changes no test."""

    @property
    def verifier_spec(self) -> VerifierSpec:
        return replace(super().verifier_spec, min_draft_deadline_s=PATIENCE_S, max_draft_deadline_s=PATIENCE_S)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A random target, and a perturbed copy that drafts for it and is often wrong."""
    folder: Path = tmp_path_factory.mktemp("pair")
    make_checkpoint(folder / "target")
    drafter = make_model()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    drafter.save_pretrained(folder / "draft")
    return {
        "model": str(folder / "target"),
        "draft_model": str(folder / "draft"),
        "max_model_len": 128,
        "kv_cache_memory_bytes": 4 << 20,
    }


def requests(sampling: SamplingParams) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request_id=str(index),
            prompt_token_ids=tuple(range(3, 8 + index)),
            sampling=sampling,
            plan=SpeculationPlan(draft_length=4),
        )
        for index in range(3)
    ]


def generate(engine: OfflineEngine, sampling: SamplingParams) -> list[Result]:
    batch = requests(sampling)
    return sorted(collect(batch, engine.generate(batch)), key=lambda result: result.request.request_id)


def tokens(results: Sequence[Result]) -> list[list[int]]:
    return [result.token_ids for result in results]


@pytest.fixture(scope="module")
def plain(pair: dict[str, Any]) -> Iterator[dict[SamplingParams, list[list[int]]]]:
    with OfflineEngine(ServiceConfig(**pair, num_drafters=0)) as engine:
        yield {sampling: tokens(generate(engine, sampling)) for sampling in (GREEDY, SEEDED)}


@pytest.mark.usefixtures("forking")
@pytest.mark.parametrize(
    ("degrees", "drafter_process"),
    [((1, 1), False), ((1, 1), True), ((2, 1), False), ((2, 2), True)],
)
def test_same_tokens_wherever_the_drafter_runs(pair, plain, degrees, drafter_process):
    config = Patient(**pair, tensor_parallel_size=degrees[0], draft_tensor_parallel_size=degrees[1])
    with OfflineEngine(config, drafter_process=drafter_process) as engine:
        for sampling, expected in plain.items():
            results = generate(engine, sampling)
            assert tokens(results) == expected
            assert sum(result.speculation.num_accepted_tokens for result in results) > 0
        engine.engine.scheduler.check_integrity()


@pytest.mark.usefixtures("forking")
def test_drafter_process_killed_half_way_changes_no_token(pair, plain):
    with OfflineEngine(ServiceConfig(**pair), drafter_process=True) as engine:
        (drafter,) = engine.drafter_pids
        outputs, batch = [], requests(GREEDY)
        for num_seen, output in enumerate(engine.generate(batch)):
            outputs.append(output)
            if num_seen == 6:
                os.kill(drafter, signal.SIGKILL)
        results = sorted(collect(batch, outputs), key=lambda result: result.request.request_id)
        assert tokens(results) == plain[GREEDY]
        assert results[0].speculation.disabled_reason == "drafter_unavailable"
        assert isinstance(engine.drafts, PipeDraftClient)


def test_affinity_is_given_back(pair):
    before = os.sched_getaffinity(0)
    with OfflineEngine(ServiceConfig(**pair), drafter_process=True):
        pass
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("model_type", "experts"), [("olmoe", ExpertShape(num_experts=4, num_active=2)), ("llama", None)]
)
def test_drafts_of_a_mixture_of_experts_are_priced_as_such(tmp_path, model_type, experts):
    make_checkpoint(tmp_path, model_type)
    config = ServiceConfig(model=str(tmp_path), num_drafters=0, max_model_len=128, kv_cache_memory_bytes=4 << 20)
    with OfflineEngine(config, prices_drafts=True) as engine:
        assert engine.engine.pricing.cost is not None
        assert engine.engine.pricing.cost.experts == (None if experts is None else ExpertsRead(experts))
        assert (engine.engine.routing is None) == (experts is None)


def test_impossible_request_is_answered_and_the_others_run(pair, plain):
    too_long = GenerationRequest(request_id="long", prompt_token_ids=(3,) * 500, sampling=GREEDY)
    with OfflineEngine(ServiceConfig(**pair)) as engine:
        batch = [too_long, *requests(GREEDY)]
        results = {result.request.request_id: result for result in collect(batch, engine.generate(batch))}
    assert results["long"].finish_reason is FinishReason.ERROR
    assert [results[str(index)].token_ids for index in range(3)] == plain[GREEDY]
