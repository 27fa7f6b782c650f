"""`RolloutEngine`: an LLM's tokens, as they finish; weights that change under running samples; failures end them."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from outrider.cluster import LLM, RolloutEngine, RolloutSample, SamplingParams
from outrider.cluster.gateway.choice import WeightSpan
from outrider.cluster.offline import weights_folder
from outrider.cluster.offline.engine_thread import EngineEndedError
from outrider.verifier_service.engine.engine import VerifierEngine
from outrider.verifier_service.messages.engine import PauseGeneration, PauseMode
from tiny.models import full_logits, make_model
from tiny.refits import perturb

LENGTH = 1024
SIZES = {"max_model_len": LENGTH, "kv_cache_memory_bytes": 16 << 20, "device": "cpu"}
OPTIONS: dict[str, Any] = {**SIZES, "speculative_config": {"method": "suffix", "location": "verifier"}}
OPTIONS["speculation"] = "always"
TEXTS = ["the quick brown", "fox jumps over the lazy dog"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.7, seed=3, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
HELD_AT = 100  # tokens
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> dict[str, Path]:
    """Two checkpoints of one shape, whose matrices are tied, as those of most small models."""
    root = tmp_path_factory.mktemp("policies")
    options = {"vocab_size": len(tokenizer), "max_position_embeddings": LENGTH, "tie_word_embeddings": True}
    for name in ("old", "new"):
        model = make_model(**options)
        (perturb(model) if name == "new" else model).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return {name: root / name for name in ("old", "new")}


@pytest.fixture
def engine(folders: dict[str, Path]) -> Iterator[RolloutEngine]:
    with RolloutEngine(folders["old"], **OPTIONS) as opened:
        yield opened


async def test_look_ups_have_no_weights_to_update(engine: RolloutEngine, folders: dict[str, Path]):
    with pytest.raises(ValueError, match="suffix"):
        await engine.update_draft_weights(folders["new"])
    assert engine.weight_version == "default"


@dataclass
class Hold:
    """No step runs once a sample has `HELD_AT` tokens, until there are new weights, or the step breaks."""

    is_holding: threading.Event = field(default_factory=threading.Event)
    is_broken: threading.Event = field(default_factory=threading.Event)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self.is_holding.wait, PATIENCE_S)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Hold:
    step, hold = VerifierEngine.step, Hold()

    def holding(self: VerifierEngine, *args: Any) -> Any:
        longest = max((request.num_output_tokens for request in self.requests.values()), default=0)
        if longest < HELD_AT or self.weight_version != "default":
            return step(self, *args)
        hold.is_holding.set()
        if hold.is_broken.is_set():
            raise ArithmeticError("a step broke")
        return None

    monkeypatch.setattr(VerifierEngine, "step", holding)
    return hold


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, list[tuple[int, ...]]]:
    """What each policy answers, greedy and seeded; the long answer is the last."""
    found = {}
    for name, folder in folders.items():
        with LLM(folder, speculation="off", **SIZES) as llm:
            outputs = llm.generate([*TEXTS, *TEXTS, TEXTS[0]], [GREEDY, GREEDY, SEEDED, SEEDED, LONG])
        found[name] = [tuple(output.outputs[0].token_ids) for output in outputs]
    return found


def whole_span(sample: RolloutSample, version: str = "default") -> tuple[WeightSpan, ...]:
    return (WeightSpan(version=version, start=0, end=len(sample.token_ids)),)


def answers(engine: RolloutEngine) -> list[tuple[int, ...]]:
    samples = engine.generate_all([*TEXTS, *TEXTS], sampling=[GREEDY, GREEDY, SEEDED, SEEDED])
    return [sample.token_ids for sample in samples]


async def long_and_updated(engine: RolloutEngine, held: Hold, *args: Any, **fields: Any) -> RolloutSample:
    """Return a long sample, in the middle of which the weights are changed."""
    samples = engine.generate([TEXTS[1], TEXTS[0]], sampling=[ONE, LONG])
    assert (await anext(samples)).prompt_index == 0
    await held.reached()
    await engine.update_weights(*args, **fields)
    (rest,) = [sample async for sample in samples]
    return rest


# --- samples ---


def test_samples_are_those_of_an_llm(engine: RolloutEngine, folders: dict[str, Path]):
    sampling = SamplingParams(temperature=0.7, seed=3, max_tokens=24, logprobs=0)
    with LLM(folders["old"], logprobs_mode="processed_logprobs", **OPTIONS) as llm:
        outputs = llm.generate(TEXTS, [SamplingParams(temperature=0.7, seed=3, max_tokens=24, logprobs=0, n=2)] * 2)
    samples = engine.generate_all(TEXTS, n=2, sampling=sampling)
    wanted = [(place, each) for place, output in enumerate(outputs) for each in output.outputs]
    for sample, (place, each) in zip(samples, wanted, strict=True):
        assert (sample.prompt_index, sample.sample_index) == (place, each.index)
        assert sample.prompt_token_ids == tuple(outputs[place].prompt_token_ids)
        assert (sample.token_ids, sample.text) == (tuple(each.token_ids), each.text)
        assert (sample.finish_reason, sample.error) == (each.finish_reason, None)
        assert sample.weight_versions == whole_span(sample)
        assert each.logprobs is not None
        shown = [by_id[id_].logprob for id_, by_id in zip(each.token_ids, each.logprobs, strict=True)]
        assert sample.logprobs == pytest.approx(shown, abs=1e-3)


def test_drafts_change_no_token_and_are_counted(engine: RolloutEngine, expected: dict[str, Any]):
    assert answers(engine) == answers(engine) == expected["old"][:4]
    stats = engine.stats()
    assert (stats.num_samples, stats.num_tokens, stats.num_unfinished) == (8, 8 * 24, 0)
    assert stats.tokens_per_verification > 1.2, "the second epoch drafts from the first"
    assert stats.speculation.num_accepted_tokens > 0


def test_logprobs_are_the_library_models_own_after_temperature(engine: RolloutEngine, folders: dict[str, Path]):
    (sample,) = engine.generate_all(TEXTS[0], sampling=SEEDED)
    model = AutoModelForCausalLM.from_pretrained(folders["old"], dtype=torch.float32)
    laws = torch.log_softmax(full_logits(model, [*sample.prompt_token_ids, *sample.token_ids]) / 0.7, dim=1)
    places = torch.arange(len(sample.token_ids)) + len(sample.prompt_token_ids) - 1
    own = laws[places, torch.tensor(sample.token_ids)]
    assert sample.logprobs == pytest.approx(own.tolist(), abs=5e-4)


def test_truncated_laws_have_finite_logprobs(engine: RolloutEngine):
    for sample in engine.generate_all(TEXTS, n=2, sampling=SamplingParams(top_k=1, max_tokens=8)):
        assert sample.logprobs == pytest.approx([0.0] * len(sample.token_ids), abs=1e-6)


async def test_samples_come_as_they_finish_in_calls_that_run_together(engine: RolloutEngine, expected: dict[str, Any]):
    order: list[str] = []

    async def call(name: str, samplings: list[SamplingParams]) -> None:
        async for sample in engine.generate([TEXTS[0]] * len(samplings), sampling=samplings):
            order.append(f"{name}{sample.prompt_index}")
            assert sample.token_ids == expected["old"][4][: len(sample.token_ids)]

    await asyncio.gather(call("a", [LONG, ONE]), call("b", [GREEDY]))
    assert sorted(order) == ["a0", "a1", "b0"]
    assert order.index("a1") < order.index("a0")


def test_several_event_loops_may_use_one_engine(engine: RolloutEngine, expected: dict[str, Any]):
    found: list[tuple[int, ...]] = []

    async def one() -> None:
        found.extend([sample.token_ids async for sample in engine.generate(TEXTS[0], n=2, sampling=GREEDY)])

    threads = [threading.Thread(target=asyncio.run, args=(one(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert found == [expected["old"][0]] * 4


def test_a_stop_string_ends_a_sample_and_cuts_its_fields_alike(engine: RolloutEngine):
    (whole,) = engine.generate_all(TEXTS[0], sampling=GREEDY)
    stop = whole.text[8:11]
    (sample,) = engine.generate_all(
        TEXTS[0], sampling=SamplingParams(temperature=0, max_tokens=800, ignore_eos=True, stop=stop)
    )
    assert (sample.finish_reason, sample.text) == ("stop", whole.text[: whole.text.index(stop)])
    num_tokens = len(sample.token_ids)
    assert num_tokens < 24
    assert len(sample.logprobs) == num_tokens
    assert sample.weight_versions == whole_span(sample)


def test_a_prompt_that_is_refused_has_an_error_and_leaves_the_others_alone(engine: RolloutEngine):
    refused, fine = engine.generate_all([{"prompt_token_ids": [10**6]}, TEXTS[0]], sampling=GREEDY)
    assert refused.finish_reason == "error"
    assert "prompt_token_ids" in str(refused.error)
    assert refused.token_ids == refused.logprobs == refused.weight_versions == ()
    assert fine.finish_reason == "length"


def test_a_history_key_is_of_one_prompt(engine: RolloutEngine):
    def accepted(key: str | None) -> int:
        (sample,) = engine.generate_all(TEXTS[:1], sampling=GREEDY, history_keys=[key])
        return sample.metrics.num_accepted_tokens

    cold = accepted("mine")
    assert accepted("theirs") == cold < accepted("mine")
    with pytest.raises(ValueError, match="history_keys must be one for each of 2 prompts"):
        engine.generate_all(TEXTS, history_keys=["k"])
    with pytest.raises(ValueError, match="history_keys must be of at most 128 characters"):
        engine.generate_all(TEXTS[0], history_keys=["k" * 129])


# --- weights ---


@pytest.mark.parametrize("kind", ["folder", "parameters", "state_dict"])
async def test_new_weights_are_a_folders_or_the_models_own_tensors(
    engine: RolloutEngine,
    folders: dict[str, Path],
    expected: dict[str, Any],
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(weights_folder, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(weights_folder, "MAX_FILE_BYTES", 1 << 14)  # several files
    model = AutoModelForCausalLM.from_pretrained(folders["new"], dtype=torch.float32)
    weights = {"folder": folders["new"], "parameters": model.named_parameters(), "state_dict": model.state_dict()}
    assert answers(engine) == expected["old"][:4]
    await engine.update_weights(weights[kind], "step 1")
    assert engine.weight_version == engine.stats().weight_version == "step 1"
    assert answers(engine) == expected["new"][:4], "KV of the old weights would say otherwise"
    await engine.update_weights(str(folders["old"]))
    assert answers(engine) == expected["old"][:4]
    assert list(tmp_path.iterdir()) == [], "what was written is removed"


async def test_kept_samples_go_on_under_the_new_weights_and_say_so(
    engine: RolloutEngine, held: Hold, folders: dict[str, Path], expected: dict[str, Any]
):
    sample = await long_and_updated(engine, held, folders["new"], "v1")
    (old, new), old_tokens = sample.weight_versions, expected["old"][4]
    assert (old.version, old.start, new.version, new.end) == ("default", 0, "v1", LONG.max_tokens)
    assert HELD_AT <= old.end == new.start < HELD_AT + 32
    assert sample.token_ids[: old.end] == old_tokens[: old.end]
    assert sample.token_ids[old.end :] != old_tokens[old.end :]
    assert len(sample.logprobs) == len(sample.token_ids) == LONG.max_tokens
    assert answers(engine) == expected["new"][:4], "nothing finds the KV of the old weights"


async def test_retracted_samples_go_on_as_the_new_weights_would(
    engine: RolloutEngine, held: Hold, folders: dict[str, Path], expected: dict[str, Any]
):
    sample = await long_and_updated(engine, held, folders["new"], "v1", mode="retract")
    old, new = sample.weight_versions
    assert (old.version, new.version) == ("default", "v1")
    assert HELD_AT <= old.end == new.start
    assert sample.token_ids[: old.end] == expected["old"][4][: old.end]
    begun = {"prompt_token_ids": [*sample.prompt_token_ids, *sample.token_ids[: old.end]]}
    with LLM(folders["new"], speculation="off", **SIZES) as llm:
        rest = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        (output,) = llm.generate(begun, rest)
    assert sample.token_ids[old.end : old.end + 24] == tuple(output.outputs[0].token_ids)


async def test_after_a_wait_every_sample_is_of_one_policy(
    engine: RolloutEngine, folders: dict[str, Path], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    has_called, call = threading.Event(), engine._thread.call

    def noted(message: Any) -> Any:
        answer = call(message)
        has_called.set()
        return answer

    monkeypatch.setattr(engine._thread, "call", noted)
    samples = engine.generate([TEXTS[1], TEXTS[0]], sampling=[ONE, LONG])
    await anext(samples)
    update = asyncio.create_task(engine.update_weights(folders["new"], "v1", mode="wait"))
    await asyncio.to_thread(has_called.wait, PATIENCE_S)
    later = asyncio.create_task(anext(engine.generate(TEXTS[0], sampling=GREEDY)))
    (long,) = [sample async for sample in samples]
    assert (long.token_ids, long.weight_versions) == (expected["old"][4], whole_span(long))
    await update
    assert (await later).token_ids == expected["new"][0]


async def test_aborted_samples_end_with_what_they_have(
    engine: RolloutEngine, held: Hold, folders: dict[str, Path], expected: dict[str, Any]
):
    sample = await long_and_updated(engine, held, folders["new"], mode="abort")
    assert sample.finish_reason == "abort"
    assert HELD_AT <= len(sample.token_ids) == len(sample.logprobs) < LONG.max_tokens
    assert sample.token_ids == expected["old"][4][: len(sample.token_ids)]
    assert sample.weight_versions == whole_span(sample)
    assert engine.weight_version == "1", "the next number"
    assert answers(engine) == expected["new"][:4]


async def test_a_pause_of_the_callers_own_outlasts_an_update(
    engine: RolloutEngine, folders: dict[str, Path], expected: dict[str, Any]
):
    await engine.pause()
    sample = asyncio.create_task(anext(engine.generate(TEXTS[0], sampling=GREEDY)))
    for mode in ("keep", "wait"):
        await engine.update_weights(folders["new"], mode=mode)
    await asyncio.sleep(0.1)
    assert not sample.done()
    await engine.resume()
    assert (await sample).token_ids == expected["new"][0]
    await engine.pause()
    aborted = asyncio.create_task(anext(engine.generate(TEXTS[0], sampling=GREEDY)))
    while engine.stats().num_unfinished == 0:
        await asyncio.sleep(0.005)
    await engine.update_weights(folders["old"], mode="abort")
    assert (await aborted).finish_reason == "abort"
    await engine.resume()


async def test_what_does_not_fit_changes_nothing(
    engine: RolloutEngine, folders: dict[str, Path], expected: dict[str, Any]
):
    model = AutoModelForCausalLM.from_pretrained(folders["new"], dtype=torch.float32)
    lacking = {name: each for name, each in model.named_parameters() if name != "model.norm.weight"}
    for weights, named in ((lacking, "model.norm.weight"), ("/nowhere", "/nowhere"), ([], "weights")):
        with pytest.raises(ValueError, match=named):
            await engine.update_weights(weights, mode="wait")
    with pytest.raises(ValueError, match="sometimes"):
        await engine.update_weights(folders["new"], mode="sometimes")
    both = (engine.update_weights(model.named_parameters()), engine.update_weights(model.named_parameters()))
    results = await asyncio.gather(*both, return_exceptions=True)
    assert [type(result) for result in results if result is not None] == [RuntimeError]
    await engine.update_weights(folders["old"])
    assert answers(engine) == expected["old"][:4]


def test_all_ranks_take_the_models_tensors(folders: dict[str, Path], expected: dict[str, Any]):
    model = AutoModelForCausalLM.from_pretrained(folders["new"], dtype=torch.float32)
    with RolloutEngine(folders["old"], tensor_parallel_size=2, **OPTIONS) as engine:
        assert answers(engine) == expected["old"][:4]
        asyncio.run(engine.update_weights(model.named_parameters()))
        assert answers(engine) == expected["new"][:4]


# --- ends ---


async def test_an_iterator_that_is_closed_frees_its_samples(engine: RolloutEngine, expected: dict[str, Any]):
    samples = engine.generate([TEXTS[1], *TEXTS], n=2, sampling=[ONE, LONG, LONG])
    await anext(samples)
    await samples.aclose()
    cancelled = asyncio.create_task(anext(engine.generate(TEXTS[0], sampling=LONG)))
    await asyncio.sleep(0.05)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    assert engine.stats().num_unfinished == 0
    paused = await engine._told(PauseGeneration(call_id=""))
    assert paused.num_requests == 0, "the engine has none, either"
    await engine.resume()
    assert answers(engine) == expected["old"][:4]


async def test_a_failure_ends_whatever_runs_and_what_comes_later(folders: dict[str, Path], held: Hold):
    with RolloutEngine(folders["old"], **OPTIONS) as engine:
        samples = engine.generate([TEXTS[1], TEXTS[0]], sampling=[ONE, LONG])
        await anext(samples)
        running = asyncio.gather(
            *(anext(samples), asyncio.to_thread(engine.generate_all, TEXTS[1], sampling=LONG)),
            engine.update_weights(folders["new"], mode="wait"),
            return_exceptions=True,
        )
        await held.reached()
        held.is_broken.set()
        async with asyncio.timeout(PATIENCE_S):
            results = await running
        assert [type(result) for result in results] == [EngineEndedError] * 3
        assert "a step broke" in str(results[0])
        with pytest.raises(EngineEndedError, match="a step broke"):
            await anext(engine.generate(TEXTS[0]))
        with pytest.raises(EngineEndedError, match="a step broke"):
            await engine.pause()
    engine.close()


async def test_a_call_that_a_failed_engine_has_not_answered_ends(folders: dict[str, Path], held: Hold):
    with RolloutEngine(folders["old"], **OPTIONS) as engine:
        sample = asyncio.create_task(anext(engine.generate(TEXTS[0], sampling=LONG)))
        await held.reached()
        call = engine._thread.call(PauseGeneration(call_id="", mode=PauseMode.WAIT))
        held.is_broken.set()
        with pytest.raises(EngineEndedError, match="a step broke"):
            await asyncio.to_thread(call.result, 10.0)
        await asyncio.gather(sample, return_exceptions=True)


async def test_closing_the_engine_ends_what_runs(folders: dict[str, Path], held: Hold):
    engine = RolloutEngine(folders["old"], **OPTIONS)
    sample = asyncio.create_task(anext(engine.generate(TEXTS[0], sampling=LONG)))
    await held.reached()
    await asyncio.to_thread(engine.close)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(EngineEndedError, match="closed"):
            await sample
    with pytest.raises(EngineEndedError, match="closed"):
        engine.generate_all(TEXTS[0])


def test_what_cannot_be_opened_says_why(folders: dict[str, Path], tmp_path: Path):
    with pytest.raises(OSError, match="nowhere"):
        RolloutEngine("/nowhere")
    with pytest.raises(ValueError, match="unknown option 'modle'"):
        RolloutEngine(folders["old"], modle="m")
    shutil.copytree(folders["old"], tmp_path / "empty", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(ValueError, match="no tensors"):  # found by the engine, on its thread
        RolloutEngine(tmp_path / "empty", **OPTIONS)


def test_lossy_rules_are_refused(engine: RolloutEngine, folders: dict[str, Path]):
    typical = {"method": "suffix", "location": "verifier", "rejection_sample_method": "typical"}
    refused = "rejection_sample_method must be lossless in rollouts"
    with pytest.raises(ValueError, match=refused):
        RolloutEngine(folders["old"], speculative_config=typical, logprobs_mode="raw_logprobs")
    with pytest.raises(ValueError, match=refused):
        LLM(folders["old"], speculative_config=typical, rollouts=True)
    with pytest.raises(ValueError, match=refused):
        engine.generate_all(TEXTS, sampling=SamplingParams(rejection_sample_method="typical"))
    assert engine.generate_all(TEXTS, sampling=SamplingParams(rejection_sample_method="block"))
