"""Drafters of a pool that learns: samples of real states, shadows of real weights, the process and its door."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from exactness.drafter_checkpoints import head_folder
from outrider.cluster.offline.engine import RankProcesses
from outrider.drafter_service.engine.drafter import DraftEngineConfig
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.engine.learning_messages import ServedSample, SetLearning, TakeTexts, TrialCounts
from outrider.drafter_service.engine.messages import FROM_DRAFT_ENGINE, DrafterReady, DrafterUpdate
from outrider.drafter_service.observing.engine_learning import EngineLearning
from outrider.drafter_service.service.drafter_spec import DrafterSpec, state_taps
from outrider.drafter_service.service.own_weights import DrafterControl, OwnWeights
from outrider.drafter_service.service.rank_main import (
    SHADOW_TURNS,
    DraftLoop,
    build_draft_engine,
    build_shadow,
    run_drafter_rank,
)
from outrider.drafter_service.service.speculative_config import Method, SpeculativeConfig
from outrider.verifier_service.engine.factory import build_engine
from outrider.verifier_service.engine.verifier_spec import VerifierSpec
from outrider.verifier_service.messages.draft import (
    FINAL_TAP,
    Close,
    Commit,
    Draft,
    DrafterEvent,
    Drafts,
    DraftSampling,
    Open,
    VerifierMessage,
    each_draft,
)
from outrider.verifier_service.messages.engine import CONTROLS, ControlResult, Relay, UpdateDraftWeights
from outrider.verifier_service.messages.request import GenerationRequest, SamplingParams, SpeculationPlan
from outrider.verifier_service.messages.wire import WireError, decode, encode
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.ranks import PipeListener
from outrider.verifier_service.model.runner import ModelRunner, ParallelRunner
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup
from outrider.verifier_service.refit.rank_weights import RankWeights
from tiny.forking import FORKING
from tiny.loop_thread import LoopThread
from tiny.models import make_checkpoint, make_model, random_sequences
from tiny.refits import perturb
from tiny.scripted_drafter import ScriptedDrafter, commit, open_, say

SIZES: dict[str, Any] = {"num_kv_blocks": 96, "block_size": 4, "max_model_len": 96, "device": "cpu"}
PROMPTS = random_sequences((9, 14, 21, 5, 9))
ALL = SetLearning(call_id="s", sample_share=1.0)
NEW_TOKENS = 20
HEADS = (Method.EAGLE3, Method.EAGLE, Method.MEDUSA)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("learning")
    make_checkpoint(path / "target", num_hidden_layers=3)
    yield path
    torch.set_num_threads(threads)


def checkpoint(root: Path, method: Method, seed: int) -> Path:
    if method is not Method.DRAFT_MODEL:
        return head_folder(root, root / "target", method, seed)
    folder = root / f"draft {seed}"
    if not folder.exists():
        perturb(make_model(num_hidden_layers=3), seed=seed, noise=0.01 + 0.5 * seed).save_pretrained(folder)
    return folder


def spec_of(root: Path, method: Method, num_ranks: int = 1, **options: Any) -> DrafterSpec:
    folder = checkpoint(root, method, 0)
    config = SpeculativeConfig(method=method, model=str(folder), draft_tensor_parallel_size=num_ranks, **options)
    return DrafterSpec(
        model=ModelConfig(path=str(folder), check_logits=False, tensor_parallel_size=num_ranks, **SIZES),
        target=ModelConfig(path=str(root / "target"), check_logits=False, **SIZES),
        speculative=config,
        sampling_seed=0,
    )


class LearningClient:
    """A `DraftClient` of a pool's drafter in this process, which may keep all requests."""

    def __init__(self, spec: DrafterSpec, set_: SetLearning | None) -> None:
        runner, change = None, None
        if spec.loads_model and spec.model is not None:
            share = ModelRunner(spec.model, TensorParallelGroup.single())
            runner, change = ParallelRunner(share), RankWeights(share).change
        weights = OwnWeights(spec.speculative, change)
        self.engine: DraftEngine = build_draft_engine(spec, runner=runner, weights=weights)
        self.learning = EngineLearning(self.engine, partial(build_shadow, spec))
        self.control = DrafterControl(self.engine, weights, self.learning)
        if set_ is not None:
            assert self.control.handle(set_).error is None
        self.drafts: list[Draft] = []
        self._events = [DrafterEvent(drafter_id="d", vocab_size=self.engine.vocab_size, needs=self.engine.needs)]

    def send(self, drafter_id: str, messages: Sequence[VerifierMessage]) -> None:
        for message in messages:
            self.engine.handle("v", replace(message, may_learn=True) if isinstance(message, Open) else message)

    def poll(self) -> list[DrafterEvent]:
        while self.engine.has_work():
            for _, message in self.engine.step():
                self.drafts += each_draft(message) if isinstance(message, Draft | Drafts) else []
                self._events.append(DrafterEvent(drafter_id="d", message=message))
            self.engine.check_integrity()
        while self.learning.has_work():
            self.learning.draft_in_shadow()
        while self.engine.has_spare_work():
            self.engine.run_ahead()
        events, self._events = self._events, []
        return events


class Service:
    """A verifier and a drafter of a pool."""

    def __init__(self, spec: DrafterSpec, set_: SetLearning | None = ALL) -> None:
        self.client = LearningClient(spec, set_)
        served = replace(spec.target, state_taps=state_taps(spec))
        runner = ParallelRunner(ModelRunner(served, TensorParallelGroup.single()))
        trees = spec.speculative.num_tree_nodes
        self.engine = build_engine(
            runner, VerifierSpec(model=served, sampling_seed=0, max_tree_nodes=trees), self.client
        )

    def run(self, prompts: Sequence[list[int]] = PROMPTS, prefix: str = "r") -> dict[str, tuple[int, ...]]:
        """Return every request's whole text."""
        texts = {f"{prefix}{index}": list(prompt) for index, prompt in enumerate(prompts)}
        for index, (name, prompt) in enumerate(texts.items()):
            request = GenerationRequest(
                request_id=name,
                prompt_token_ids=tuple(prompt),
                sampling=SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, temperature=0.7 * (index % 2)),
                plan=SpeculationPlan(draft_length=4),
            )
            assert self.engine.add(request) is None
        for _ in range(400):
            for output in self.engine.step() or []:
                texts[output.request_id] += output.token_ids
            self.engine.check_integrity()
            if not self.engine.has_work():
                break
        return {name: tuple(text) for name, text in texts.items()}

    def samples(self) -> dict[str, ServedSample]:
        return {sample.request_id: sample for sample in self.client.learning.take_samples()[0]}


# --- what is in a sample ---


@torch.inference_mode()
def plain_states(folder: Path, token_ids: Sequence[int], taps: tuple[int, ...]) -> torch.Tensor:
    """The target's states by a plain forward over a text: [num_tokens, width]."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    hidden = model(input_ids=torch.tensor([list(token_ids)]), output_hidden_states=True).hidden_states
    num_layers = model.config.num_hidden_layers
    return torch.cat([hidden[num_layers if tap == FINAL_TAP else tap][0] for tap in taps], dim=1)


def require_states(sample: ServedSample, expected: torch.Tensor, shift: int = 0) -> None:
    """Require that every state of a sample is the expected one of its position, within bfloat16."""
    flat = torch.frombuffer(bytearray(sample.states), dtype=torch.bfloat16).float()
    found = flat.view(len(sample.state_positions), sample.state_width)
    wanted = expected[[position + shift for position in sample.state_positions]]
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("num_tree_nodes", [0, 6])
@pytest.mark.parametrize("method", HEADS, ids=str)
def test_states_are_those_of_the_committed_text(root: Path, method: Method, num_tree_nodes: int) -> None:
    spec = spec_of(root, method, num_tree_nodes=num_tree_nodes)
    service = Service(spec)
    texts = service.run()
    samples = service.samples()
    assert samples.keys() == texts.keys()
    num_rejected = sum(len(draft.token_ids) for draft in service.client.drafts)
    assert num_rejected > 5 * NEW_TOKENS, "or no rejected state could have strayed in"
    for name, sample in samples.items():
        prompt = PROMPTS[int(name[1:])]
        num_tokens, num_states = len(sample.token_ids), len(sample.state_positions)
        assert texts[name][:num_tokens] == sample.token_ids
        assert sample.num_prompt_tokens in (len(prompt), len(prompt) + 1), "the target's first token may come with it"
        assert num_tokens >= len(prompt) + NEW_TOKENS - 6
        if method is Method.MEDUSA:
            assert num_states >= (num_tokens - len(prompt)) / 5
        else:
            assert sample.state_positions == tuple(range(num_tokens - 1))
        taps = state_taps(spec)
        # a text goes on after its last token, which gives the planted defect a state to mistake
        expected = plain_states(root / "target", (*sample.token_ids, 7), taps)
        require_states(sample, expected)
        with pytest.raises(AssertionError):
            require_states(sample, expected, shift=1)


def test_states_are_right_where_the_target_preempts_and_where_its_prefix_cache_hits(root: Path) -> None:
    spec = spec_of(root, Method.EAGLE3)
    service = Service(replace(spec, target=replace(spec.target, num_kv_blocks=26)))
    service.run(prefix="a")
    service.run(PROMPTS[2:3], "b")
    assert service.engine.scheduler.num_preemptions > 0
    assert service.engine.scheduler.num_prefix_hit_tokens > 0
    samples = service.samples()
    assert len(samples) == len(PROMPTS) + 1
    for sample in samples.values():
        require_states(sample, plain_states(root / "target", sample.token_ids, state_taps(spec)))


@pytest.mark.parametrize("method", [Method.EAGLE3, Method.DRAFT_MODEL], ids=str)
def test_learning_changes_no_token_and_no_draft(root: Path, method: Method) -> None:
    spec = spec_of(root, method, ahead_branches=0)
    plain, learning = Service(spec, None), Service(spec)
    folder = str(checkpoint(root, method, 1))
    both = replace(ALL, shadow_folder=folder, shadow_version="v1", shadow_share=1.0)
    assert learning.client.control.handle(both) == ControlResult(call_id="s")
    assert learning.run() == plain.run()
    assert learning.client.drafts == plain.client.drafts
    assert any(draft.draft_probs for draft in plain.client.drafts), "unseeded ones, too"
    trial = learning.client.learning.report().trial
    assert trial is not None
    assert trial.num_rounds > 10


def test_the_needs_name_the_rows_that_the_learner_wants(root: Path) -> None:
    spec = replace(spec_of(root, Method.EAGLE3), learn_num_top=4)
    needs = build_draft_engine(spec).needs
    assert (needs.num_top, needs.taps) == (4, state_taps(spec))
    assert build_draft_engine(replace(spec, learn_num_top=0)).needs.num_top == 0


# --- shadows ---


def trial_of(service: Service, folder: str, version: str = "v1") -> TrialCounts:
    told = replace(ALL, shadow_folder=folder, shadow_version=version, shadow_share=1.0)
    assert service.client.control.handle(told).error is None
    service.run(prefix=version)
    trial = service.client.learning.report().trial
    assert trial is not None
    assert trial.num_rounds > 10
    return trial


@pytest.mark.parametrize("num_tree_nodes", [0, 6])
@pytest.mark.parametrize("method", [*HEADS, Method.DRAFT_MODEL], ids=str)
def test_the_same_weights_in_the_shadow_score_the_same(root: Path, method: Method, num_tree_nodes: int) -> None:
    spec = spec_of(root, method, num_tree_nodes=num_tree_nodes, ahead_branches=0 if method != Method.MEDUSA else None)
    trial = trial_of(Service(spec), "", "v0 again")
    assert (trial.serving, trial.shadow) == ("v0", "v0 again")
    assert trial.squared_difference == pytest.approx(0.0, abs=1e-3)
    assert trial.serving_score == pytest.approx(trial.shadow_score, abs=1e-2)
    assert method != Method.DRAFT_MODEL or trial.serving_score > 0


def test_a_worse_draft_model_scores_less_and_a_better_one_more(root: Path) -> None:
    good, bad = (checkpoint(root, Method.DRAFT_MODEL, seed) for seed in (0, 1))
    service = Service(spec_of(root, Method.DRAFT_MODEL))
    worse = trial_of(service, str(bad))
    assert worse.shadow_score < worse.serving_score / 2
    update = UpdateDraftWeights(call_id="u", folder=str(bad), weight_version="v1")
    assert service.client.control.handle(update).error is None
    assert service.client.learning.report().trial is None, "what was in the shadow serves"
    better = trial_of(service, "", "v0")
    assert (better.serving, better.shadow) == ("v1", "v0")
    assert better.shadow_score > 2 * better.serving_score
    back = UpdateDraftWeights(call_id="u", folder=str(good), weight_version="v0")
    assert service.client.control.handle(back) == ControlResult(call_id="u", weight_version="v0")
    assert [counts.version for counts in service.client.learning.report().versions] == ["v1", "v0"]


def test_a_shadows_kv_is_bounded_and_it_does_not_run_ahead(root: Path) -> None:
    spec = spec_of(root, Method.DRAFT_MODEL, num_ranks=2, ahead_branches=4)
    shadow: Any = build_shadow(replace(spec, model=replace(spec.model, kv_cache_memory_bytes=1 << 40)), "")
    assert shadow._forward.num_blocks == 8192 // SIZES["block_size"]
    assert (shadow.runs_ahead, shadow.max_model_len) == (False, SIZES["max_model_len"])
    long = replace(spec, model=replace(spec.model, max_model_len=200, num_kv_blocks=None, block_size=16))
    assert build_shadow(long, "").max_model_len == 200


@pytest.mark.parametrize(
    ("speculative", "said"),
    [
        (SpeculativeConfig(method=Method.SUFFIX), "suffix has no weights"),
        (SpeculativeConfig(method=Method.HYBRID, methods=(Method.SUFFIX, Method.EAGLE3), model="m"), "a hybrid has no"),
    ],
)
def test_drafters_that_have_no_shadow_say_so(root: Path, speculative: SpeculativeConfig, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build_shadow(replace(spec_of(root, Method.EAGLE3), speculative=speculative), "")


def test_a_candidate_that_is_none_is_an_error_and_serving_goes_on(root: Path, tmp_path: Path) -> None:
    service = Service(spec_of(root, Method.EAGLE3))
    told = replace(ALL, shadow_folder=str(tmp_path), shadow_version="v1", shadow_share=1.0)
    result = service.client.control.handle(told)
    assert result.error is not None
    assert result.error.startswith("shadow v1: ")
    assert service.client.learning.report().trial is None
    assert len(service.run()) == len(PROMPTS)


def test_drafters_that_look_tokens_up_make_samples_and_hand_them_over(root: Path) -> None:
    config = SpeculativeConfig(method=Method.SUFFIX)
    spec = DrafterSpec(model=None, target=ModelConfig(path=str(root / "target"), **SIZES), speculative=config)
    old, new = LearningClient(spec, ALL), LearningClient(spec, ALL)
    sampling = DraftSampling(temperature=0.0)

    def ask(client: LearningClient, salt: str, name: str) -> tuple[int, ...]:
        opening = Open(request_id=name, sampling=sampling, token_ids=(5, 20, 21), cache_salt=salt)
        client.send("d", [opening, Commit(request_id=name, round_id=1, position=3, token_ids=(), max_length=4)])
        client.poll()
        client.send("d", [Close(request_id=name)])
        return client.drafts[-1].token_ids

    opening = Open(request_id="r", sampling=sampling, token_ids=(1, 2), cache_salt="mine")
    text = Commit(request_id="r", round_id=1, position=2, token_ids=(20, 21, 22, 23, 24), max_length=0)
    old.send("d", [opening, text, Close(request_id="r")])
    samples, _ = old.learning.take_samples()
    assert [(one.token_ids, one.num_prompt_tokens, one.states) for one in samples] == [
        ((1, 2, 20, 21, 22, 23, 24), 2, b"")
    ]
    assert ask(new, "mine", "a") == ()
    assert new.control.handle(TakeTexts(call_id="t", samples=tuple(samples))) == ControlResult(call_id="t")
    new.engine.check_integrity()
    assert ask(new, "mine", "b")[:3] == (22, 23, 24)
    assert ask(new, "", "c") == ask(new, "theirs", "d") == (), "salts share nothing"
    bad = TakeTexts(call_id="t", samples=(replace(samples[0], token_ids=(1, 2, 3, 1 << 20)),))
    assert new.control.handle(bad).error == "samples: token ids outside [0, 256)"


# --- the process ---


def test_the_links_door_does_not_take_what_the_shell_says() -> None:
    for message in (ALL, TakeTexts(call_id="t", samples=())):
        with pytest.raises(WireError, match="unexpected message type"):
            decode(encode(message), CONTROLS)


def test_a_drafter_without_a_learner_says_so(root: Path) -> None:
    engine = build_draft_engine(spec_of(root, Method.EAGLE3))
    assert DrafterControl(engine).handle(ALL) == ControlResult(call_id="s", error="this drafter does not learn")


class Loop(LoopThread):
    """The shell's end of the pipe to a drafter that learns."""

    def __init__(self, client: LearningClient) -> None:
        super().__init__()
        self.client = client
        self.updates: list[DrafterUpdate] = []
        self.start(self._run_loop)

    def _run_loop(self, pipe: Connection) -> None:
        client = self.client
        DraftLoop(
            *(client.engine, pipe),
            clock=time.monotonic,
            check_integrity=True,
            control=client.control,
            learning=client.learning,
        ).run()

    def say(self, *messages: Any) -> None:
        for message in messages:
            is_control = isinstance(message, SetLearning | TakeTexts | UpdateDraftWeights)
            self.pipe.send_bytes(encode(message if is_control else Relay(peer="v", payload=encode(message))))

    def take(self, frame: bytes) -> None:
        self.updates.append(decode(frame, FROM_DRAFT_ENGINE))

    def last(self, take: Callable[[DrafterUpdate], Any]) -> Any:
        """Return what the last load came with."""
        loads = [update for update in self.updates if update.load is not None]
        return take(loads[-1]) if loads else None


@contextlib.contextmanager
def looping(client: LearningClient) -> Iterator[Loop]:
    loop = Loop(client)
    try:
        yield loop
    finally:
        loop.end()


def test_the_loop_sends_samples_at_once_and_counts_with_the_load(root: Path) -> None:
    spec = spec_of(root, Method.DRAFT_MODEL, ahead_branches=0)
    with looping(LearningClient(spec, None)) as loop:
        told = replace(ALL, shadow_version="v0 again", shadow_share=1.0)
        loop.say(told)
        loop.hear_until(lambda: any(update.results for update in loop.updates))
        assert [each for update in loop.updates for each in update.results] == [ControlResult(call_id="s")]
        opening = Open(
            request_id="r", sampling=DraftSampling(temperature=0.0), token_ids=tuple(PROMPTS[0]), may_learn=True
        )
        ask = Commit(request_id="r", round_id=1, position=len(PROMPTS[0]), token_ids=(), max_length=4)
        loop.say(opening, ask)
        loop.hear_until(lambda: any(update.relays for update in loop.updates))
        (relay,) = [relay for update in loop.updates for relay in update.relays]
        draft = decode(relay.payload, (Draft,))
        loop.say(replace(ask, round_id=2, token_ids=draft.token_ids, max_length=0), Close(request_id="r"))
        loop.hear_until(lambda: any(update.samples for update in loop.updates))
        (sample,) = [sample for update in loop.updates for sample in update.samples]
        assert sample.token_ids == (*PROMPTS[0], *draft.token_ids)
        loop.hear_until(lambda: loop.last(lambda update: update.versions and update.versions[0].num_rounds))
        (counts,) = loop.last(lambda update: update.versions)
        assert (counts.version, counts.num_rounds, counts.num_draft_tokens, counts.num_named_tokens) == ("v0", 1, 4, 4)
        trial = loop.last(lambda update: update.trial)
        assert (trial.serving, trial.shadow) == ("v0", "v0 again")
        if trial.num_rounds:  # the session may end before the shadow had its time
            assert (trial.serving_score, trial.shadow_score) == (4, 4)
        loop.say(SetLearning(call_id="off"))
        loop.hear_until(lambda: loop.updates[-1].results)
        loop.hear_until(lambda: loop.last(lambda update: update.trial) is None)
        assert loop.last(lambda update: (update.versions, update.samples)) == ((), ())


class Busy(DraftEngine):
    """An engine that can always run ahead."""

    num_ahead = 0

    def has_spare_work(self) -> bool:
        return not self.has_work()

    def run_ahead(self, max_num_tokens: int = 0) -> None:
        self.num_ahead += 1


def test_running_ahead_leaves_the_shadow_its_turns() -> None:
    engine = Busy(ScriptedDrafter(), clock=lambda: 0.0, config=DraftEngineConfig())
    shadow = ScriptedDrafter()
    learning = EngineLearning(engine, lambda folder: shadow)
    near, far = Pipe()
    loop = DraftLoop(engine, near, clock=lambda: 0.0, learning=learning)
    for _ in range(5):
        loop._spend_spare_time()
    assert engine.num_ahead == 5
    learning.set(replace(ALL, shadow_version="v1", shadow_share=1.0))
    say(engine, open_("r", (1, 2)), commit("r", 2), open_("q", (1, 2)), commit("q", 2))
    say(engine, commit("r", 2, (3,)))
    while learning.has_work():
        loop._spend_spare_time()
    assert (len(shadow.asks), engine.num_ahead) == (3, 5 + 2 * (SHADOW_TURNS - 1))
    say(engine, commit("r", 3, (4,)))
    far.send_bytes(b"a message that waits")
    for _ in range(2 * SHADOW_TURNS):
        loop._spend_spare_time()
    assert len(shadow.asks) == 3, "what is asked for goes first"
    near.close()
    far.close()


def test_a_draft_model_on_two_ranks_has_a_shadow_on_one(root: Path) -> None:
    spec = spec_of(root, Method.DRAFT_MODEL, num_ranks=2, ahead_branches=0)
    bad = checkpoint(root, Method.DRAFT_MODEL, 1)
    ranks = RankProcesses(run_drafter_rank, spec, 2, first_rank=0, context=FORKING)
    with PipeListener(ranks.rank(0, 2).shell_address) as listener:
        ranks.start()
        pipe = listener.accept(ranks.are_alive)
    decode(pipe.recv_bytes(), (DrafterReady,))

    def heard() -> Iterator[DrafterUpdate]:
        while pipe.poll(60.0):
            yield decode(pipe.recv_bytes(), (DrafterUpdate,))

    def say(message: VerifierMessage) -> None:
        pipe.send_bytes(encode(Relay(peer="v", payload=encode(message))))

    told = replace(ALL, shadow_folder=str(bad), shadow_version="v1", shadow_share=1.0)
    for message in (told, UpdateDraftWeights(call_id="u", folder=str(bad), weight_version="v2")):
        pipe.send_bytes(encode(message))
        result = next(result for update in heard() for result in update.results)
        assert result.error is None
    text = tuple(PROMPTS[0])
    say(Open(request_id="r", sampling=DraftSampling(temperature=0.0), token_ids=text, may_learn=True))
    say(ask := Commit(request_id="r", round_id=1, position=len(text), token_ids=(), max_length=4))
    relay = next(relay for update in heard() for relay in update.relays)
    draft = decode(relay.payload, (Draft,))
    time.sleep(0.5)  # of spare time
    say(replace(ask, round_id=2, token_ids=draft.token_ids, max_length=0))
    trial = next(update.trial for update in heard() if update.trial is not None and update.trial.num_rounds)
    assert (trial.serving, trial.shadow) == ("v2", "v1")
    assert (trial.serving_score, trial.shadow_score) == (4, 4), "the same weights, on two ranks and on one"
    say(Close(request_id="r"))
    sample = next(sample for update in heard() for sample in update.samples)
    assert sample.token_ids == (*text, *draft.token_ids)
    assert np.frombuffer(sample.states).size == 0
    pipe.close()
    ranks.close()
