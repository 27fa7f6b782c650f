"""After new weights, answers are those of an engine that started with them; requests that cross an update say so.

128 short answers, greedy and seeded, whose prompts and outputs the prefix cache knows from the old weights. Planted: a
cache whose root does not change.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from exactness.small_engines import Drafts, Limits, ModelDrafts, NoDrafts, generate, make_engine, perturbed_copy
from exactness.small_engines import load as serve
from outrider.drafter_service.engine.drafter import DraftEngineConfig
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.service.local_client import LocalDraftClient
from outrider.drafter_service.target.early_exit_drafter import early_exit_drafter
from outrider.drafter_service.target.scratch_blocks import scratch_blocks_per_draft
from outrider.drafter_service.target.sparse_drafter import sparse_drafter
from outrider.drafter_service.target.target_view import TargetView
from outrider.verifier_service.engine.control import EngineControl
from outrider.verifier_service.engine.engine import VerifierEngine
from outrider.verifier_service.engine.factory import build_engine
from outrider.verifier_service.engine.pipelined import PipelinedEngine
from outrider.verifier_service.engine.verifier_spec import VerifierSpec
from outrider.verifier_service.messages.engine import (
    ContinueGeneration,
    FlushCache,
    PauseGeneration,
    PauseMode,
    UpdateWeights,
)
from outrider.verifier_service.messages.request import (
    FinishReason,
    GenerationRequest,
    RequestOutput,
    SamplingParams,
    SpeculationPlan,
)
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.runner import ModelRunner, ParallelRunner
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup
from outrider.verifier_service.refit.rank_weights import RankWeights
from outrider.verifier_service.scheduling.scheduler import Scheduler
from tiny.models import make_model, random_sequences
from tiny.refits import perturb, trainer

NUM_REQUESTS = 128
NUM_NEW_TOKENS = 6
PROMPTS = random_sequences((9, 21, 5, 14, 30, 12, 17, 26))  # in blocks of four, and with whole blocks to find
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


class Served:
    """A runner whose weights change, and one that started with the new ones."""

    def __init__(self, folder: Path) -> None:
        self.old, self.new = str(folder / "old"), str(folder / "new")
        self.runner = serve(make_model(), folder / "old")
        self.fresh = serve(perturb(make_model()), folder / "new")
        self.weights = RankWeights(self.runner)
        self.draft = serve(perturbed_copy("llama", 0.05), folder / "draft")

    def turn(self, engine: VerifierEngine, folder: str, version: str | None = None) -> None:
        control = EngineControl(engine, self.weights)
        assert engine.drain() == []
        assert change(control, UpdateWeights(call_id="c", folder=folder, weight_version=version)) == []
        (result,) = control.take_results()
        assert (result.error, result.num_missing_tensors) == (None, 0)


def change(control: EngineControl, message: Any) -> list[RequestOutput]:
    """Begin a change and finish it, with no step between."""
    return control.handle(message) + control.finish_change()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Served(tmp_path_factory.mktemp("refit"))
    torch.set_num_threads(threads)


def requests_of(num_requests: int = NUM_REQUESTS, *, draft_length: int = 0) -> list[GenerationRequest]:
    """Half of them greedy, half seeded."""
    shapes: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 1.0})
    return [
        GenerationRequest(
            request_id=str(index),
            prompt_token_ids=tuple(PROMPTS[index // 2 % len(PROMPTS)]),
            sampling=SamplingParams(**shapes[index % 2], seed=index, max_tokens=NUM_NEW_TOKENS, ignore_eos=True),
            plan=SpeculationPlan(draft_length=draft_length),
        )
        for index in range(num_requests)
    ]


def answers(engine: VerifierEngine, drafts: Drafts, num_requests: int = NUM_REQUESTS, draft_length: int = 0) -> Any:
    return generate(engine, drafts, requests_of(num_requests, draft_length=draft_length))


@pytest.mark.parametrize("kind", [VerifierEngine, PipelinedEngine])
def test_there_and_back(served: Served, kind: type[VerifierEngine]) -> None:
    engine = make_engine(served.runner, NoDrafts(), Limits(), kind=kind)
    before = answers(engine, NoDrafts())
    wanted = answers(make_engine(served.fresh, NoDrafts(), Limits(), kind=kind), NoDrafts()).token_ids
    assert before.num_cached_tokens > 0
    served.turn(engine, served.new, "step 1")
    after = answers(engine, NoDrafts())
    assert after.token_ids == wanted
    assert {output.weight_version for outputs in after.outputs.values() for output in outputs} == {"step 1"}
    served.turn(engine, served.old, "step 1")  # other weights by the same name: their KV is not mixed up
    assert answers(engine, NoDrafts()).token_ids == before.token_ids
    changed = [name for name, tokens in wanted.items() if tokens != before.token_ids[name]]
    assert len(changed) > NUM_REQUESTS // 2


def test_a_cache_that_is_not_invalidated_shows(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "change_root", lambda self, root: None)
    engine = make_engine(served.runner, NoDrafts(), Limits())
    answers(engine, NoDrafts(), 32)
    wanted = answers(make_engine(served.fresh, NoDrafts(), Limits()), NoDrafts(), 32).token_ids
    served.turn(engine, served.new)
    got = answers(engine, NoDrafts(), 32).token_ids
    served.turn(engine, served.old)
    assert got != wanted


def test_drafts_of_another_policy_change_no_token(served: Served) -> None:
    """The draft model keeps its weights: it guesses worse, and its drafts are verified as exactly."""
    drafts = ModelDrafts(served.draft)
    engine = make_engine(served.runner, drafts, Limits())
    before = answers(engine, drafts, 48, draft_length=4)
    wanted = answers(make_engine(served.fresh, NoDrafts(), Limits()), NoDrafts(), 48).token_ids
    served.turn(engine, served.new)
    after = answers(engine, drafts, 48, draft_length=4)
    served.turn(engine, served.old)
    assert after.token_ids == wanted
    assert after.num_accepted_tokens < before.num_accepted_tokens


def test_a_trainers_group_gives_the_answers_of_a_folder(served: Served) -> None:
    engine = make_engine(served.runner, NoDrafts(), Limits())
    answers(engine, NoDrafts(), 64)
    wanted = answers(make_engine(served.fresh, NoDrafts(), Limits()), NoDrafts(), 64).token_ids
    control = EngineControl(engine, served.weights)
    with trainer() as there:
        change(control, there.joins())
        change(control, there.sends(served.new, is_flattened=True))
        assert [result.error for result in control.take_results()] == [None, None]
    assert answers(engine, NoDrafts(), 64).token_ids == wanted
    assert engine.weight_version == "1"
    served.turn(engine, served.old)


# --- requests that cross an update ---


def request_of(name: str, *, prompt: int = 1, group_id: str | None = None, **changes: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id=name, prompt_token_ids=tuple(PROMPTS[prompt]), sampling=GREEDY, group_id=group_id, **changes
    )


def finish(engine: VerifierEngine) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    for _ in range(200):
        for output in engine.step() or []:
            outputs.setdefault(output.request_id, []).append(output)
        engine.check_integrity()
        if not engine.has_work():
            return outputs
    raise AssertionError("requests do not finish")


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def alone(runner: ModelRunner, request: GenerationRequest) -> list[int]:
    engine = make_engine(runner, NoDrafts(), Limits())
    engine.add(request)
    return tokens_of(finish(engine)[request.request_id])


@pytest.mark.parametrize("kind", [VerifierEngine, PipelinedEngine])
def test_a_request_that_crosses_publishes_nothing_and_names_both_versions(
    served: Served, kind: type[VerifierEngine]
) -> None:
    wanted = alone(served.fresh, request_of("fresh"))
    engine = make_engine(served.runner, NoDrafts(), Limits(), kind=kind)
    engine.add(request_of("crosses"))
    outputs = [output for _ in range(4) for output in engine.step() or []]
    outputs += engine.drain()
    num_before = len(tokens_of(outputs))
    served.turn(engine, served.new, "second")
    outputs += finish(engine)["crosses"]
    versions = [output.weight_version for output in outputs for _ in output.token_ids]
    assert versions == ["default"] * num_before + ["second"] * (GREEDY.max_tokens - num_before)
    engine.add(request_of("again"))
    again = finish(engine)["again"]
    assert (again[-1].num_cached_tokens, tokens_of(again)) == (0, wanted)
    longer = GenerationRequest(
        request_id="longer", prompt_token_ids=(*PROMPTS[1], *tokens_of(outputs)), sampling=GREEDY
    )
    engine.add(longer)
    assert finish(engine)["longer"][-1].num_cached_tokens <= len(PROMPTS[1]), "KV of two policies was found"
    served.turn(engine, served.old)


@pytest.mark.parametrize("kind", [VerifierEngine, PipelinedEngine])
def test_requests_that_were_retracted_go_on_as_the_new_weights_would(
    served: Served, kind: type[VerifierEngine]
) -> None:
    engine = make_engine(served.runner, NoDrafts(), Limits(), kind=kind)
    control = EngineControl(engine)
    prompts = {"a": 4, "b": 7, "c": 3}
    for name, prompt in prompts.items():
        engine.add(request_of(name, prompt=prompt))
    outputs = [output for _ in range(5) for output in engine.step() or []] + engine.drain()
    control.handle(PauseGeneration(call_id="p", mode=PauseMode.RETRACT))
    control.handle(FlushCache(call_id="f"))
    assert [result.error for result in control.take_results()] == [None, None]
    assert engine.scheduler.kv_usage == 0
    served.turn(engine, served.new)
    control.handle(ContinueGeneration(call_id="c"))
    rest = finish(engine)
    served.turn(engine, served.old)
    for name, prompt in prompts.items():
        begun = tuple(tokens_of([output for output in outputs if output.request_id == name]))
        assert begun
        assert tokens_of(rest[name]) == alone(served.fresh, request_of(name, prompt=prompt, output_token_ids=begun))


def test_siblings_of_a_request_that_crosses_compute_their_prompt(served: Served) -> None:
    """Parked ones, and one that comes later: none takes KV of the old weights."""
    wanted = alone(served.fresh, request_of("fresh", prompt=4))
    limits = Limits(max_num_batched_tokens=9)
    engine = make_engine(served.runner, NoDrafts(), limits)
    for name in ("first", "parked", "parked too"):
        engine.add(request_of(name, prompt=4, group_id="g"))
    engine.step()
    engine.step()
    served.turn(engine, served.new)
    engine.add(request_of("later", prompt=4, group_id="g"))
    outputs = finish(engine)
    served.turn(engine, served.old)
    assert all(tokens_of(outputs[name]) == wanted for name in ("parked", "parked too", "later"))
    assert tokens_of(outputs["first"]) != wanted


def test_a_preempted_request_begins_anew_under_the_new_weights(served: Served) -> None:
    engine = make_engine(served.runner, NoDrafts(), Limits(num_blocks=24))
    prompts = {"a": 4, "b": 7, "c": 3}
    for name, prompt in prompts.items():
        engine.add(request_of(name, prompt=prompt))
    outputs: dict[str, list[RequestOutput]] = {}
    while not any(request.num_preemptions for request in engine.scheduler.waiting):
        for output in engine.step() or []:
            outputs.setdefault(output.request_id, []).append(output)
    lost = next(iter(engine.scheduler.waiting)).request_id
    served.turn(engine, served.new)
    rest = finish(engine)
    begun = tokens_of(outputs.get(lost, []))
    continued = request_of(lost, prompt=prompts[lost], output_token_ids=tuple(begun))
    served_fresh = alone(served.fresh, continued)
    served.turn(engine, served.old)
    assert tokens_of(rest[lost]) == served_fresh


def test_an_engine_with_broken_weights_serves_nobody(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(served.runner, NoDrafts(), Limits())
    engine.add(request_of("running"))
    engine.step()

    def broken(source: Any) -> None:
        raise OSError("gone")

    control = EngineControl(engine, served.weights)
    with monkeypatch.context() as patches:
        patches.setattr(served.weights._weights, "copy", broken)
        (output,) = change(control, UpdateWeights(call_id="c", folder=served.new))
    (result,) = control.take_results()
    assert result.error == output.error == engine.weights_error
    assert output.finish_reason is FinishReason.ERROR
    refusal = engine.add(request_of("next"))
    assert refusal is not None
    assert "broke off" in str(refusal.error)
    served.turn(engine, served.old)
    assert (engine.weights_error, engine.add(request_of("next"))) == (None, None)


# --- drafters that are part of the target ---

SELF_DRAFTERS = {
    "early_exit": lambda view: early_exit_drafter(view, torch.Generator().manual_seed(0), exit_layer=1),
    "sparse": lambda view: sparse_drafter(view, torch.Generator().manual_seed(0), num_blocks=2),
}


def self_drafting(folder: str, name: str) -> tuple[ModelRunner, VerifierEngine]:
    config = ModelConfig(
        path=folder,
        num_kv_blocks=128,
        block_size=4,
        device="cpu",
        check_logits=False,
        num_scratch_blocks=4 * scratch_blocks_per_draft(4, 4),
    )
    share = ModelRunner(config, TensorParallelGroup.single())
    runner = ParallelRunner(share)
    view = TargetView(runner)
    drafts = DraftEngine(SELF_DRAFTERS[name](view), clock=lambda: 0.0, config=DraftEngineConfig(max_draft_length=4))
    engine = build_engine(runner, VerifierSpec(model=config, sampling_seed=0), LocalDraftClient(drafts))
    view.attach(engine)
    return share, engine


def drafted(engine: VerifierEngine) -> tuple[dict[str, list[int]], list[tuple[int, int]]]:
    """Return tokens, and of each request how many draft tokens were verified and accepted."""
    for request in requests_of(12, draft_length=4):
        assert engine.add(request) is None
    outputs = finish(engine)
    metrics = [each[-1].speculation for each in outputs.values()]
    return (
        {name: tokens_of(each) for name, each in outputs.items()},
        [(each.num_draft_tokens, each.num_accepted_tokens) for each in metrics if each is not None],
    )


@pytest.mark.parametrize("name", SELF_DRAFTERS)
def test_drafters_that_are_the_target_follow(served: Served, name: str) -> None:
    """They draft the same as those of an engine that started with the weights, so as many are accepted."""
    share, engine = self_drafting(served.old, name)
    before = drafted(engine)
    control = EngineControl(engine, RankWeights(share))
    change(control, UpdateWeights(call_id="c", folder=served.new))
    after, wanted = drafted(engine), drafted(self_drafting(served.new, name)[1])
    assert after == wanted
    assert sum(accepted for _, accepted in after[1]) > 0
    assert before[0] != after[0]
