"""What our door for V2 stands on, in the sources of the installed vLLM: names and parameters, read and not imported.

`test_live_vllm_v2.py` runs most of it. This is for what does not come up on a CPU, and says of a new vLLM what changed.
"""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

import pytest

from fakes.hosted.engine import Clock
from fakes.hosted.v2_runner import RequestStates, V2Runner
from fakes.hosted.v2_scheduler import Sampling, Scheduler
from fakes.hosted.vllm_environment import ENVIRONMENT, needs_vllm
from outrider.cluster.hosted.vllm_settings import UNTRIED_PARALLELISM, V2_METHOD
from outrider.cluster.hosted.vllm_speculator import RUNNER_PARAMETERS, PoolSpeculator, parameters_of_propose

# what the runner asks of draft models, of watermarks and of adaptive verification, with a look at the type or a flag
OTHERS = {
    *("load_model", "dcp_size", "draft_attn_layer_names", "set_attn", "observe_verification"),
    *("prepare_watermarking", "draft_token_confidence_probs"),
}

pytestmark = needs_vllm


def source(path: str) -> ast.Module:
    (package,) = ENVIRONMENT.glob("lib/python3*/site-packages/vllm")
    return ast.parse((package / path).read_text())


def class_of(path: str, name: str) -> ast.ClassDef:
    (found,) = (node for node in source(path).body if isinstance(node, ast.ClassDef) and node.name == name)
    return found


def method_of(owner: ast.ClassDef, name: str) -> ast.FunctionDef:
    (found,) = (node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == name)
    return found


def parameters(function: ast.FunctionDef) -> tuple[str, ...]:
    arguments = function.args
    names = [*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg]
    return tuple(one.arg for one in names if one is not None)


def names_of(owner: ast.ClassDef) -> set[str]:
    """Return the attributes of a class: fields, methods, and what its methods assign to `self`."""
    fields = {node.target.id for node in owner.body if isinstance(node, ast.AnnAssign) and hasattr(node.target, "id")}
    methods = {node.name for node in owner.body if isinstance(node, ast.FunctionDef)}
    assigned = {
        node.attr
        for node in ast.walk(owner)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    return fields | methods | assigned


RUNNER = ("v1/worker/gpu/model_runner.py", "GPUModelRunner")


@pytest.mark.parametrize("name", RUNNER_PARAMETERS)
def test_a_method_that_is_gone_through_takes_what_ours_passes_on(name: str):
    assert parameters(method_of(class_of(*RUNNER), name)) == RUNNER_PARAMETERS[name]


def test_a_speculator_is_asked_as_ours_is():
    base = class_of("v1/worker/gpu/spec_decode/speculator.py", "BaseSpeculator")
    assert parameters(method_of(base, "propose")) == parameters_of_propose()
    for name in names_of(base):
        assert hasattr(PoolSpeculator, name), f"vLLM's speculators have {name}"


def test_the_runner_asks_our_speculator_for_nothing_that_it_does_not_have():
    asked = {
        node.attr
        for node in ast.walk(class_of(*RUNNER))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self.speculator"
    }
    assert {name for name in asked if not hasattr(PoolSpeculator, name)} == OTHERS


def test_the_step_is_passed_in_the_order_of_our_parameters():
    calls = [
        node
        for node in ast.walk(method_of(class_of(*RUNNER), "sample_tokens"))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self.speculator.propose"
    ]
    (call,) = calls
    assert len(call.args) == 11
    assert {keyword.arg for keyword in call.keywords} <= set(parameters_of_propose())
    assert [ast.unparse(call.args[place]) for place in (0, 4, 5)] == [
        "input_batch",
        "aux_hidden_states",
        "num_sampled",
    ]


@pytest.mark.parametrize(
    ("path", "name", "played"),
    [
        (*RUNNER, V2Runner(Clock())),
        ("v1/worker/gpu/states.py", "RequestState", RequestStates(2, 2)),
        ("sampling_params.py", "SamplingParams", Sampling()),
    ],
    ids=lambda one: one if isinstance(one, str) and one[0].isupper() else "",
)
def test_what_is_played_has_no_names_that_vllm_does_not_have(path: str, name: str, played: Any):
    own = {"clock", "num_blocks", "num_kv_cache_groups", "step_s", "num_verified", "num_accepted"}  # of the play
    names = {one for one in vars(played) if not one.startswith("_")} - (own if isinstance(played, V2Runner) else set())
    assert names <= names_of(class_of(path, name))


def test_a_played_step_and_batch_have_no_names_that_vllm_does_not_have():
    scheduler = Scheduler(2)
    scheduler.add("a", (1, 2))
    output = scheduler.schedule()
    runner = V2Runner(Clock())
    runner.execute_model(output)
    _, batch = runner._step
    played = {
        ("v1/core/sched/output.py", "SchedulerOutput"): output,
        ("v1/core/sched/output.py", "NewRequestData"): output.scheduled_new_reqs[0],
        ("v1/core/sched/output.py", "CachedRequestData"): output.scheduled_cached_reqs,
        ("v1/worker/gpu/input_batch.py", "InputBatch"): batch,
    }
    for (path, name), one in played.items():
        assert isinstance(one, SimpleNamespace)
        assert vars(one).keys() <= names_of(class_of(path, name)), name


def test_drafts_for_the_scheduler_are_lists_of_their_own():
    drafts = class_of("v1/outputs.py", "DraftTokenIds")
    assert {"req_ids", "draft_token_ids"} <= names_of(drafts)
    handler = class_of("v1/worker/gpu/spec_decode/utils.py", "DraftTokensHandler")
    told = ast.unparse(method_of(handler, "get_draft_tokens"))
    assert "draft_token_ids = [[-1] * self.num_draft_tokens for _ in self.req_ids]" in told
    assert "self.draft_tokens_np.tolist()" in told


def test_the_method_is_scheduled_step_by_step_and_the_worker_makes_its_runner_with_its_device():
    text = ast.unparse(class_of("config/vllm.py", "VllmConfig"))
    assert "self.speculative_config.method not in get_args(EagleModelTypes)" in text
    config = class_of("config/speculative.py", "SpeculativeConfig")
    assert f"self.method in ('{V2_METHOD}', 'ngram_gpu')" in ast.unparse(method_of(config, "use_ngram"))
    parallel = names_of(class_of("config/parallel.py", "ParallelConfig"))
    assert {*UNTRIED_PARALLELISM, "worker_cls"} <= parallel
    for path, name in (("gpu_worker", "Worker"), ("cpu_worker", "CPUWorker"), ("xpu_worker", "XPUWorker")):
        made = ast.unparse(method_of(class_of(f"v1/worker/{path}.py", name), "init_device"))
        assert "self.model_runner" in made or "_init_workspace_and_model_runner()" in made, name
