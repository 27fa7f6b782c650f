"""Drafters of other packages: what they are built with, and what becomes of those that break or lie."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from fakes.drafter_play import KEY, ask_of, draft_after
from fakes.engine_bench import MemoryDrafts
from fakes.plugin_drafters import Answer, FakeDrafter, MadeEntryPoint, answer, entry_point, repeat_first
from outrider.drafter_service.engine.drafter import Ask, DraftEngineConfig, Drafter
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.service.drafter_spec import DrafterSpec, num_scratch_blocks, state_taps
from outrider.drafter_service.service.drafters import build_drafter
from outrider.drafter_service.service.hybrid_drafter import HybridDrafter
from outrider.drafter_service.service.local_client import LocalDraftClient
from outrider.drafter_service.service.plugin_drafter import MAX_SILENT_CALLS, PluginDrafter, PluginFailedError
from outrider.drafter_service.service.plugins import PluginContext
from outrider.drafter_service.service.speculative_config import Location, Method, SpeculativeConfig
from outrider.verifier_service.engine.engine import VerifierEngine
from outrider.verifier_service.engine.factory import build_engine
from outrider.verifier_service.engine.verifier_spec import VerifierSpec
from outrider.verifier_service.messages.draft import (
    LOCAL_DRAFTER_ID,
    Commit,
    Draft,
    DraftClient,
    DraftNeeds,
    DraftSampling,
    Open,
    SparseRow,
)
from outrider.verifier_service.messages.request import GenerationRequest, SamplingParams, SpeculationPlan
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.runner import ModelRunner, ParallelRunner
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup
from tiny.models import VOCAB_SIZE, make_checkpoint

CONTEXT = PluginContext(
    name="mine",
    options={},
    vocab_size=VOCAB_SIZE,
    max_model_len=64,
    num_speculative_tokens=4,
    num_tree_nodes=0,
    seed=1,
    device="cpu",
    target="",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    make_checkpoint(path)
    return path


def spec_of(folder: Path, **speculative: object) -> DrafterSpec:
    target = ModelConfig(path=str(folder), num_kv_blocks=32, block_size=4, device="cpu", max_model_len=64)
    options = {"method": Method.PLUGIN, "plugin": "mine", "location": Location.VERIFIER, **speculative}
    return DrafterSpec(model=None, target=target, speculative=SpeculativeConfig(**options), sampling_seed=1)


# --- built ---


def test_the_factory_hears_what_a_drafter_must_know(folder: Path):
    heard: list[PluginContext] = []

    def build(context: PluginContext) -> Drafter:
        heard.append(context)
        return FakeDrafter(context)

    spec = spec_of(folder, num_speculative_tokens=7, num_tree_nodes=9, plugin_config='{"depth": [1, 2]}')
    drafter = build_drafter(spec, plugins=[MadeEntryPoint("mine", build)])
    (context,) = heard
    assert context == PluginContext(
        name="mine",
        options={"depth": [1, 2]},
        vocab_size=VOCAB_SIZE,
        max_model_len=64,
        num_speculative_tokens=7,
        num_tree_nodes=9,
        seed=context.seed,
        device="cpu",
        target=str(folder),
    )
    with pytest.raises(TypeError):
        context.options["depth"] = 3
    build_drafter(spec, plugins=[MadeEntryPoint("mine", build)])
    assert heard[0].seed == heard[1].seed
    assert (drafter.vocab_size, drafter.max_model_len, drafter.needs) == (VOCAB_SIZE, 64, DraftNeeds())


def test_it_needs_neither_a_model_nor_states_nor_scratch(folder: Path):
    spec = spec_of(folder)
    assert not spec.loads_model
    assert state_taps(spec) == ()
    assert num_scratch_blocks(spec, 4, 8) == 0
    assert spec.vocabulary == spec.target


@pytest.mark.parametrize(
    ("attribute", "text"),
    [
        ("without_licence", "it could not be built: OSError: no licence for mine"),
        ("something_else", "a mappingproxy, which has no draft, release, check_integrity"),
        ("reading_states", r"needs\.taps name hidden states of the target, which plug-ins cannot have"),
        ("needy", "needs must be DraftNeeds"),
        ("without_vocabulary", "vocab_size must be a positive whole number"),
    ],
)
def test_what_cannot_draft_is_refused_by_name_before_anything_is_asked(folder: Path, attribute: str, text: str):
    with pytest.raises(ValueError, match=f"^plugin 'mine': .*{text}"):
        build_drafter(spec_of(folder), plugins=[entry_point("mine", attribute)])


def test_it_may_ask_for_predictions(folder: Path):
    drafter = build_drafter(spec_of(folder), plugins=[entry_point("mine", "knowing_predictions")])
    assert drafter.needs == DraftNeeds(predictions=True)


def test_a_hybrid_may_have_one(folder: Path):
    spec = spec_of(folder, method=Method.HYBRID, methods=(Method.NGRAM, Method.PLUGIN))
    drafter = build_drafter(spec, plugins=[entry_point("mine")])
    assert isinstance(drafter, HybridDrafter)
    assert list(drafter._models) == ["plugin"]


# --- asked ---


def test_answers_and_releases_pass_through():
    inner = FakeDrafter(CONTEXT, lambda asks: [answer(ask, 7, confidences=(0.5,)) for ask in asks])
    drafter = PluginDrafter("mine", inner)
    assert draft_after(drafter, [1, 2, 3]) == answer(ask_of([1, 2, 3]), 7, confidences=(0.5,))
    drafter.release(KEY)
    assert inner.released == [KEY]


def test_an_ask_may_be_answered_in_a_later_call():
    drafter = PluginDrafter("mine", FakeDrafter(CONTEXT, lambda asks: [answer(asks[-1], 7)]))
    first, second = ask_of([1], ask_id=1), ask_of([2], ask_id=2)
    assert [result.round_id for result in drafter.draft([first, second], max_num_tokens=1)] == [2]
    assert [result.round_id for result in drafter.draft([first], max_num_tokens=1)] == [1]


def raising(asks: Sequence[Ask]) -> list[Draft]:
    raise ZeroDivisionError("no idea")


def to_nobody(asks: Sequence[Ask]) -> list[Draft]:
    return [answer(ask_of([1], ask_id=99), 7)]


def twice(asks: Sequence[Ask]) -> list[Draft]:
    return repeat_first(asks) * 2


def as_numpy(asks: Sequence[Ask]) -> list[Draft]:
    return [answer(ask, *np.full(ask.length, 7)) for ask in asks]


def as_numbers(asks: Sequence[Ask]) -> list[Draft]:
    return [answer(ask, 7.0) for ask in asks]  # type: ignore[arg-type]


def as_text(asks: Sequence[Ask]) -> list[Draft]:
    return ["seven" for _ in asks]  # type: ignore[misc]


def silent(asks: Sequence[Ask]) -> list[Draft]:
    return []


def nothing(asks: Sequence[Ask]) -> list[Draft]:
    return None  # type: ignore[return-value]


FAILURES = (raising, to_nobody, twice, as_numpy, as_numbers, as_text, silent, nothing)


@pytest.mark.parametrize("answer_all", FAILURES)
def test_what_is_no_answer_is_a_failure_that_names_the_plug_in(answer_all: Answer):
    drafter = PluginDrafter("mine", FakeDrafter(CONTEXT, answer_all))
    with pytest.raises(PluginFailedError, match=r"^plugin 'mine': "):
        ask_on(drafter, MAX_SILENT_CALLS)


def test_a_long_silence_is_none_yet():
    drafter = PluginDrafter("mine", FakeDrafter(CONTEXT, silent))
    ask_on(drafter, MAX_SILENT_CALLS - 1)


def ask_on(drafter: Drafter, num_calls: int) -> None:
    for _ in range(num_calls):
        drafter.draft([ask_of([1, 2, 3])], max_num_tokens=1)


def test_in_a_process_of_its_own_a_failure_ends_its_steps():
    """As any drafter's error does: the process ends, verifiers go on, and its pool starts another."""
    engine = DraftEngine(
        PluginDrafter("mine", FakeDrafter(CONTEXT, raising)), clock=lambda: 0.0, config=DraftEngineConfig()
    )
    engine.handle("v", Open(request_id="r", sampling=DraftSampling(temperature=0.0), token_ids=(1, 2)))
    engine.handle("v", Commit(request_id="r", round_id=1, position=2, token_ids=(), max_length=3))
    with pytest.raises(PluginFailedError, match="plugin 'mine': ZeroDivisionError: no idea"):
        engine.step()


# --- beside a target ---


def too_long(asks: Sequence[Ask]) -> list[Draft]:
    return [answer(ask, *[7] * (ask.length + 1)) for ask in asks]


def unknown_token(asks: Sequence[Ask]) -> list[Draft]:
    return [answer(ask, VOCAB_SIZE) for ask in asks]


def a_tree(asks: Sequence[Ask]) -> list[Draft]:
    return [answer(ask, 7, 8, parents=(-1, -1)) for ask in asks]


def not_its_row(asks: Sequence[Ask]) -> list[Draft]:
    return [answer(ask, 7, draft_probs=(SparseRow(token_ids=(8,), weights=(1 << 16,)),)) for ask in asks]


def row_of_too_much(asks: Sequence[Ask]) -> list[Draft]:
    return [answer(ask, 7, draft_probs=(SparseRow(token_ids=(7,), weights=(1 << 17,)),)) for ask in asks]


def too_confident(asks: Sequence[Ask]) -> list[Draft]:
    return [answer(ask, 7, confidences=(2.0,)) for ask in asks]


LIES = (too_long, unknown_token, a_tree, not_its_row, row_of_too_much, too_confident)


@pytest.fixture(scope="module")
def runner(folder: Path) -> ParallelRunner:
    return ParallelRunner(ModelRunner(spec_of(folder).target, TensorParallelGroup.single()))


Plain = dict[int | None, list[int]]


@pytest.fixture(scope="module")
def plain(runner: ParallelRunner) -> Plain:
    """The tokens without a drafter, by the request's seed; None: greedy."""
    return {seed: generated(runner, MemoryDrafts(), seed=seed)[0] for seed in (None, 3)}


def generated(
    runner: ParallelRunner, client: DraftClient, *, seed: int | None = None
) -> tuple[list[int], VerifierEngine]:
    engine = build_engine(runner, VerifierSpec(model=ModelConfig(path="loaded already")), client)
    sampling = SamplingParams(temperature=0.0 if seed is None else 1.0, seed=seed, max_tokens=20, ignore_eos=True)
    request = GenerationRequest(
        request_id="r",
        prompt_token_ids=(5, 6, 7, 5, 6, 7, 5, 6),
        sampling=sampling,
        plan=SpeculationPlan(drafter_id=LOCAL_DRAFTER_ID, draft_length=3),
    )
    assert engine.add(request) is None
    outputs = [output for _ in range(30) for output in engine.step() or []]
    engine.check_integrity()
    assert not engine.has_work()
    return [token_id for output in outputs for token_id in output.token_ids], engine


def client_of(drafter: FakeDrafter) -> LocalDraftClient:
    config = DraftEngineConfig(max_draft_length=3)
    return LocalDraftClient(DraftEngine(PluginDrafter("mine", drafter), clock=lambda: 0.0, config=config))


@pytest.mark.parametrize("seed", [None, 3], ids=["greedy", "seeded"])
@pytest.mark.parametrize("answer_all", [repeat_first, *FAILURES, *LIES])
def test_no_token_is_lost_to_one_that_fails_or_lies(
    runner: ParallelRunner, plain: Plain, answer_all: Answer, seed: int | None
):
    tokens, engine = generated(runner, client_of(FakeDrafter(CONTEXT, answer_all)), seed=seed)
    assert tokens == plain[seed]
    assert len(tokens) == 20
    reasons = dict(engine.drafting.fallbacks)
    if answer_all in FAILURES:
        assert reasons == {"drafter_lost": 1}
    else:
        assert reasons.keys() == ({"bad_draft"} if answer_all in LIES else set())


def test_in_a_verifier_a_failure_is_told_once_and_ends_drafting_alone(
    runner: ParallelRunner, plain: Plain, caplog: pytest.LogCaptureFixture
):
    client = client_of(FakeDrafter(CONTEXT, raising))
    for _ in range(2):
        assert generated(runner, client)[0] == plain[None]
    (record,) = [record for record in caplog.records if record.name.endswith("local_client")]
    assert "nothing is drafted here any more" in record.getMessage()
    assert "plugin 'mine': ZeroDivisionError: no idea" in caplog.text


def test_a_release_that_raises_is_a_failure_like_any_other(runner: ParallelRunner, plain: Plain):
    client = client_of(FakeDrafter(CONTEXT, release_error=ValueError("gone")))
    for _ in range(2):
        assert generated(runner, client)[0] == plain[None]
