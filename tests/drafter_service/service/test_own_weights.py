"""A drafter of every kind takes new weights while it serves, and then drafts as one that started with them."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from exactness.drafter_checkpoints import head_folder, masked_draft_model
from outrider.cluster.offline.engine import RankProcesses
from outrider.drafter_service.engine.messages import DrafterReady, DrafterUpdate
from outrider.drafter_service.service.colocated import open_local_drafter
from outrider.drafter_service.service.drafter_spec import DrafterSpec, state_taps
from outrider.drafter_service.service.local_client import LocalDraftClient
from outrider.drafter_service.service.own_weights import OwnWeights
from outrider.drafter_service.service.rank_main import run_drafter_rank
from outrider.drafter_service.service.speculative_config import Location, Method, SpeculativeConfig
from outrider.verifier_service.engine.control import EngineControl
from outrider.verifier_service.engine.engine import VerifierEngine
from outrider.verifier_service.engine.factory import build_engine
from outrider.verifier_service.engine.verifier_spec import VerifierSpec
from outrider.verifier_service.messages.draft import (
    Commit,
    Draft,
    DrafterEvent,
    Drafts,
    DraftSampling,
    Open,
    VerifierMessage,
    each_draft,
)
from outrider.verifier_service.messages.engine import ControlResult, FlushCache, Relay, UpdateDraftWeights
from outrider.verifier_service.messages.request import GenerationRequest, SamplingParams, SpeculationPlan
from outrider.verifier_service.messages.wire import decode, encode
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.packed_linear import make_linear
from outrider.verifier_service.model.ranks import PipeListener
from outrider.verifier_service.model.runner import ModelRunner, ParallelRunner
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup
from outrider.verifier_service.refit.rank_weights import BrokenWeightsError, RankWeights
from tiny.forking import FORKING
from tiny.models import make_checkpoint, make_model, random_sequences
from tiny.refits import perturb

HEADS = (Method.MEDUSA, Method.MLP_SPECULATOR, Method.EAGLE, Method.EAGLE3, Method.MTP, Method.DFLASH)
MODELS = (Method.DRAFT_MODEL, Method.PARALLEL_DRAFT)
OTHERS = (Method.NGRAM, Method.SUFFIX, Method.LOOKAHEAD, Method.EARLY_EXIT, Method.SPARSE)
PROMPTS = random_sequences((9, 14, 21, 5))
SIZES: dict[str, Any] = {"num_kv_blocks": 96, "block_size": 4, "max_model_len": 96, "device": "cpu"}
Drafted = dict[tuple[str, int], tuple[int, ...]]  # by request and position


class Recording:
    """The drafter's client, whose drafts are recorded."""

    def __init__(self, local: LocalDraftClient) -> None:
        self.local = local
        self.drafts: Drafted = {}

    def send(self, drafter_id: str, messages: Sequence[VerifierMessage]) -> None:
        self.local.send(drafter_id, messages)

    def poll(self) -> list[DrafterEvent]:
        events = self.local.poll()
        for event in events:
            for draft in each_draft(event.message) if isinstance(event.message, Draft | Drafts) else ():
                self.drafts[draft.request_id, draft.position] = draft.token_ids
        return events


class Served:
    """A verifier with a drafter in its process."""

    def __init__(self, target: Path, method: Method, folder: Path | None, **options: Any) -> None:
        own = {"num_tree_nodes": 0, **options}
        config = SpeculativeConfig(
            method=method, location=Location.VERIFIER, model=None if folder is None else str(folder), **own
        )
        model = None if folder is None else ModelConfig(path=str(folder), check_logits=False, **SIZES)
        spec = DrafterSpec(
            model=model,
            target=ModelConfig(path=str(target), check_logits=False, **SIZES),
            speculative=config,
            sampling_seed=0,
        )
        served = replace(spec.target, state_taps=state_taps(spec), num_scratch_blocks=48)
        runner = ParallelRunner(ModelRunner(served, TensorParallelGroup.single()))
        draft_model, change_model = None, None
        if spec.loads_model:
            assert model is not None
            share = ModelRunner(model, TensorParallelGroup.single())
            draft_model, change_model = ParallelRunner(share), RankWeights(share).change
        local, attach = open_local_drafter(spec, runner, draft_model, change_model)
        self.client = Recording(local)
        self.engine: VerifierEngine = build_engine(
            runner, VerifierSpec(model=served, sampling_seed=0, max_tree_nodes=own["num_tree_nodes"]), self.client
        )
        attach(self.engine)
        self.control = EngineControl(self.engine, None, local.change_weights)

    def update(self, folder: Path, version: str | None = None) -> ControlResult:
        assert self.engine.drain() == []
        assert self.control.handle(UpdateDraftWeights(call_id="u", folder=str(folder), weight_version=version)) == []
        (result,) = self.control.take_results()
        return result

    def begin(self, prefix: str) -> None:
        for index, prompt in enumerate(PROMPTS):
            shape = {"temperature": 0.0} if index % 2 else {"temperature": 0.7, "seed": index}
            request = GenerationRequest(
                request_id=f"{prefix}{index}",
                prompt_token_ids=tuple(prompt),
                sampling=SamplingParams(max_tokens=16, ignore_eos=True, **shape),
                plan=SpeculationPlan(draft_length=4),
            )
            assert self.engine.add(request) is None

    def finish(self, max_steps: int = 200) -> Drafted:
        """Run all requests, or some steps of them; return what was drafted meanwhile."""
        self.client.drafts = {}
        for _ in range(max_steps):
            self.engine.step()
            self.engine.check_integrity()
            if not self.engine.has_work():
                break
        return self.client.drafts

    def drafts(self, prefix: str) -> Drafted:
        self.begin(prefix)
        return self.finish()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("own weights")
    make_checkpoint(path / "target", num_hidden_layers=3)
    yield path
    torch.set_num_threads(threads)


def checkpoint(root: Path, method: Method, seed: int) -> Path:
    """Return one of several checkpoints of a method for the target."""
    if method in HEADS:
        return head_folder(root, root / "target", method, seed)
    folder = root / f"draft {seed}"
    if not folder.exists():
        perturb(make_model(num_hidden_layers=3), seed=seed, noise=0.1).save_pretrained(folder)
    return masked_draft_model(folder, folder) if method is Method.PARALLEL_DRAFT else folder


@pytest.mark.parametrize("method", [*HEADS, *MODELS], ids=str)
def test_it_drafts_as_one_that_started_with_the_weights(root: Path, method: Method) -> None:
    old, new = (checkpoint(root, method, seed) for seed in (0, 1))
    served = Served(root / "target", method, old)
    before = served.drafts("before")
    served.begin("running")
    served.finish(max_steps=4)
    assert served.update(new, "v1") == ControlResult(call_id="u", weight_version="v1")
    served.finish(max_steps=1)  # with drafts that had begun before
    running = served.finish()
    after = served.drafts("after")
    fresh = Served(root / "target", method, new)
    wanted = fresh.drafts("after")
    assert (after == wanted, len(wanted) > 20) == (True, True)
    whole = fresh.drafts("running")
    common = running.keys() & whole.keys()
    assert len(common) > 4, "running requests are drafted for by the new weights"
    assert {key: running[key] for key in common} == {key: whole[key] for key in common}
    assert served.update(old) == ControlResult(call_id="u", weight_version="draft-2")
    assert served.drafts("before") == before
    assert {("after", *key[1:]) for key in before} != {("after", *key[1:]) for key in after} or before != after


def test_the_copy_leaves_every_address_as_it_is(tmp_path: Path) -> None:
    """Captured steps read there. Large linears are packed."""

    def build(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return nn.Sequential(make_linear(torch.randn(512, 320)), nn.Linear(512, 8))

    head, rows = build(0), torch.randn(3, 320)
    weights = OwnWeights(SpeculativeConfig(method=Method.EAGLE, model="a"))
    weights.keep_head(head, lambda folder: build(1))
    addresses = [tensor.data_ptr() for tensor in head.state_dict().values()]
    weights.change(tmp_path)
    assert [tensor.data_ptr() for tensor in head.state_dict().values()] == addresses
    with torch.no_grad():
        assert torch.equal(head(rows), build(1)(rows))


def test_a_copy_that_breaks_off_says_so(tmp_path: Path) -> None:
    class Unreadable(torch.Tensor):
        """A tensor whose data cannot be read."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.copy_:
                raise OSError("the disk is gone")
            return super().__torch_function__(func, types, args, kwargs or {})

    head, loaded = nn.Linear(2, 2), nn.Linear(2, 2)
    loaded.bias = nn.Parameter(torch.zeros(2).as_subclass(Unreadable), requires_grad=False)  # type: ignore[assignment]
    weights = OwnWeights(SpeculativeConfig(method=Method.EAGLE, model="a"))
    weights.keep_head(head, lambda folder: loaded)
    with pytest.raises(BrokenWeightsError, match="the disk is gone"):
        weights.change(tmp_path)


# --- what is refused ---


def edited(folder: Path, edit: Callable[[dict[str, torch.Tensor], dict[str, Any]], str], to: Path) -> str:
    """Write a checkpoint with a defect; return what must be said of it."""
    shutil.copytree(folder, to)
    (file,) = to.glob("*.safetensors")
    tensors, config = load_file(file), json.loads((to / "config.json").read_text())
    said = edit(tensors, config)
    save_file(tensors, file, {"format": "pt"})
    (to / "config.json").write_text(json.dumps(config))
    return said


def a_matrix(tensors: dict[str, torch.Tensor]) -> str:
    return next(name for name in sorted(tensors) if tensors[name].ndim == 2)


def narrow(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> str:
    name = a_matrix(tensors)
    tensors[name] = tensors[name][:, :-1].contiguous()
    return name


def lacking(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> str:
    name = a_matrix(tensors)
    del tensors[name]
    return name.rpartition(".")[0].rpartition(".")[2] if "lm_head" in name else name


def strange(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> str:
    tensors["strange.weight"] = torch.zeros(2)
    return "strange.weight"


def spoilt(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> str:
    tensors[a_matrix(tensors)][0, 0] = float("nan")
    return "has numbers that are not finite"


# an MTP layer is read from among a target's tensors
DEFECTS = [
    pytest.param(method, defect, id=f"{method} {defect.__name__}")
    for method in (*HEADS, *MODELS)
    for defect in (narrow, lacking, strange, spoilt)
    if (method, defect) != (Method.MTP, strange)
]


@pytest.mark.parametrize(("method", "defect"), DEFECTS)
def test_what_does_not_fit_is_refused_whole(root: Path, tmp_path: Path, method: Method, defect: Any) -> None:
    served = Served(root / "target", method, checkpoint(root, method, 0))
    before = served.drafts("r")
    said = edited(checkpoint(root, method, 1), defect, tmp_path / "bad")
    result = served.update(tmp_path / "bad", "v1")
    assert result.error is not None
    assert said in result.error
    assert result.weight_version == ""
    assert served.drafts("r") == before


@pytest.mark.parametrize("method", HEADS, ids=str)
def test_a_head_of_another_shape_is_refused_by_a_tensor_or_setting(root: Path, tmp_path: Path, method: Method) -> None:
    make_checkpoint(tmp_path / "wider", num_hidden_layers=3, hidden_size=80)
    served = Served(root / "target", method, checkpoint(root, method, 0))
    before = served.drafts("r")
    result = served.update(head_folder(tmp_path, tmp_path / "wider", method))
    assert result.error is not None
    assert served.drafts("r") == before


CHANGED_SETTINGS: dict[Method, tuple[tuple[str, Any], str]] = {
    Method.EAGLE3: (("norm_before_residual", True), "'norm_before_residual'"),
    Method.EAGLE: (("rms_norm_eps", 0.5), "eps"),
    Method.MEDUSA: (("logit_scale", 0.5), "logit_scale"),
    Method.MLP_SPECULATOR: (("scale_input", True), "scale_input"),
    Method.DFLASH: (("mask_token_id", 7), "mask_token_id"),
    Method.PARALLEL_DRAFT: (("pard_token", 7), "mask token is 7"),
}


@pytest.mark.parametrize("method", CHANGED_SETTINGS, ids=str)
def test_tensors_that_fit_with_a_config_that_computes_otherwise_are_refused(
    root: Path, tmp_path: Path, method: Method
) -> None:
    (key, value), said = CHANGED_SETTINGS[method]

    def edit(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> str:
        config[key] = value
        return said

    served = Served(root / "target", method, checkpoint(root, method, 0))
    before = served.drafts("r")
    edited(checkpoint(root, method, 1), edit, tmp_path / "other")
    assert said in str(served.update(tmp_path / "other").error)
    assert served.drafts("r") == before


def test_a_folder_that_is_not_there_is_refused(root: Path) -> None:
    served = Served(root / "target", Method.EAGLE3, checkpoint(root, Method.EAGLE3, 0))
    assert "there is no folder" in str(served.update(root / "nowhere").error)
    (root / "empty").mkdir()
    assert "config.json" in str(served.update(root / "empty").error)


@pytest.mark.parametrize("method", OTHERS, ids=str)
def test_drafters_without_weights_of_their_own_refuse_by_name(root: Path, method: Method) -> None:
    served = Served(root / "target", method, None)
    result = served.update(root / "target", "v1")
    expected = "follows the target by itself" if method in (Method.EARLY_EXIT, Method.SPARSE) else "looks tokens up"
    assert result.error is not None
    assert result.error.startswith(method.value)
    assert expected in result.error
    assert served.client.local._engine.load().weight_version is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "eagle3", "model": "a", "models": ("a", "b")}, "models: parameter sets"),
        ({"method": "hybrid", "methods": ("suffix", "early_exit")}, "early_exit runs the target's own layers"),
        ({"method": "hybrid", "methods": ("draft_model", "mtp"), "model": "a"}, "draft_model and mtp both have"),
        ({"method": "hybrid", "methods": ("suffix", "draft_model"), "model": "a"}, None),
        ({"method": "plugin", "plugin": "mine"}, "the plug-in 'mine'"),
    ],
)
def test_which_configurations_take_weights(options: dict[str, Any], said: str | None) -> None:
    refusal = SpeculativeConfig(location=Location.VERIFIER, **options).update_refusal
    assert (refusal is None) == (said is None)
    assert (said or "") in (refusal or "")


def test_a_hybrids_draft_model_is_the_one_that_changes(root: Path) -> None:
    methods = {"methods": ("ngram", "draft_model")}
    old, new = (checkpoint(root, Method.DRAFT_MODEL, seed) for seed in (0, 1))
    served = Served(root / "target", Method.HYBRID, old, **methods)
    served.begin("running")
    served.finish(max_steps=4)
    assert served.update(new).error is None
    served.finish()
    fresh = Served(root / "target", Method.HYBRID, new, **methods)
    for each in (served, fresh):  # which drafter is asked follows from what was accepted: begin alike
        each.client.local._engine._drafter._prior["draft_model"].value = 1.0  # type: ignore[attr-defined]
    assert served.drafts("a") == fresh.drafts("a")


def test_a_drafter_takes_no_other_control_message(root: Path) -> None:
    served = Served(root / "target", Method.NGRAM, None)
    result = served.client.local._control.handle(FlushCache(call_id="f"))
    assert result == ControlResult(call_id="f", error="FlushCache is for verifiers: a drafter takes UpdateDraftWeights")


def test_embeddings_of_the_targets_stay_unless_the_folder_has_its_own(root: Path, tmp_path: Path) -> None:
    old = checkpoint(root, Method.EAGLE, 0)
    served = Served(root / "target", Method.EAGLE, old)
    before = served.drafts("r")

    def edit(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> str:
        target = load_file(root / "target" / "model.safetensors")
        tensors["lm_head.weight"] = target["lm_head.weight"].roll(1, dims=0)
        return ""

    edited(old, edit, tmp_path / "with its own")
    assert served.update(tmp_path / "with its own").error is None
    rolled = served.drafts("r")
    first = min(key for key in before if key[0] == "r1")  # a greedy one
    assert rolled[first][0] == (before[first][0] + 1) % 256
    assert served.update(old).error is None
    assert served.drafts("r") == before


# --- a draft model on two ranks, in processes of their own ---


@contextmanager
def drafting(spec: DrafterSpec) -> Iterator[Connection]:
    """Yield the shell's end of the pipe to a drafter that is ready."""
    size = spec.speculative.draft_tensor_parallel_size
    ranks = RankProcesses(run_drafter_rank, spec, size, first_rank=0, context=FORKING)
    with PipeListener(ranks.rank(0, size).shell_address) as listener:
        ranks.start()
        pipe = listener.accept(ranks.are_alive)
    decode(pipe.recv_bytes(), (DrafterReady,))
    yield pipe
    pipe.close()
    ranks.close()


def heard(pipe: Connection) -> Iterator[DrafterUpdate]:
    while pipe.poll(60.0):
        yield decode(pipe.recv_bytes(), (DrafterUpdate,))


def draft_over(pipe: Connection, request_id: str) -> tuple[int, ...]:
    opening = Open(request_id=request_id, sampling=DraftSampling(temperature=0.0), token_ids=tuple(PROMPTS[0]))
    ask = Commit(request_id=request_id, round_id=1, position=len(PROMPTS[0]), token_ids=(), max_length=6)
    for message in (opening, ask):
        pipe.send_bytes(encode(Relay(peer="v", payload=encode(message))))
    relay = next(relay for update in heard(pipe) for relay in update.relays)
    return tuple(decode(relay.payload, (Draft,)).token_ids)


def test_a_draft_model_changes_on_all_ranks(root: Path) -> None:
    old, new = (checkpoint(root, Method.DRAFT_MODEL, seed) for seed in (0, 1))

    def spec_of(folder: Path, num_ranks: int) -> DrafterSpec:
        config = SpeculativeConfig(
            model=str(folder), draft_tensor_parallel_size=num_ranks, num_speculative_tokens=6, ahead_branches=0
        )
        model = ModelConfig(path=str(folder), check_logits=False, tensor_parallel_size=num_ranks, **SIZES)
        return DrafterSpec(model=model, target=ModelConfig(path=str(root / "target"), **SIZES), speculative=config)

    with drafting(spec_of(new, 1)) as fresh:
        wanted = draft_over(fresh, "r")
    with drafting(spec_of(old, 2)) as pipe:
        before = draft_over(pipe, "r")
        nowhere = root / "nowhere"
        for where, error in ((nowhere, f"there is no folder {nowhere}"), (new, None)):
            pipe.send_bytes(encode(UpdateDraftWeights(call_id="u", folder=str(where), weight_version="v")))
            result = next(result for update in heard(pipe) for result in update.results)
            assert (result.error, result.weight_version) == (error, "" if error else "v")
            assert (draft_over(pipe, str(where)) == before) == (error is not None)
        assert draft_over(pipe, "again") == wanted
    with drafting(dataclasses.replace(spec_of(old, 1), takes_orders=False)) as closed:
        closed.send_bytes(encode(UpdateDraftWeights(call_id="u", folder=str(new), weight_version="v")))
        result = next(result for update in heard(closed) for result in update.results)
        assert result.error == "this drafter's weights cannot change", "in a service without a trainer and a learner"
