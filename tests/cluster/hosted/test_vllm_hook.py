"""vLLM's hook on a played runner: what it reads, what it passes on, and what it refuses."""

from __future__ import annotations

import inspect
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outrider.cluster.hosted.drafting import HostRow
from outrider.cluster.hosted.vllm_hook import PARAMETERS, RunnerView, install_hook, rows_of
from outrider.cluster.hosted.vllm_settings import UntriedVersionError

VERSION = "0.32.0"


class OurDrafts:
    def __init__(self, state_taps: tuple[int, ...] = ()) -> None:
        self.state_taps = state_taps
        self.steps: list[tuple[Any, ...]] = []

    def propose_step(self, *step: Any) -> list[list[int]]:
        self.steps.append(step)
        return [[1, 2], []]


class Model:
    """A model of vLLM that gives out what goes into its layers."""

    layers: tuple[int, ...] | None = None

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.layers = layers


def runner_class() -> type:
    """Return a class like vLLM's model runner, to be hooked."""

    class Runner:
        def __init__(self, drafter: object) -> None:
            self.drafter = drafter
            self._draft_probs: object = "of the last proposer"
            self._draft_prob_req_ids: object = "of the last proposer"
            self.use_aux_hidden_state_outputs = False
            self.model: object = Model()

        def get_model(self) -> object:
            return self.model

        def _setup_eagle3_aux_hidden_state_outputs(self) -> str:
            return "vLLM's own"

        def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> tuple[Any, Any]:
            return scheduler_output, intermediate_tensors

        def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
            return False  # a request is nearly at its end

        def propose_draft_token_ids(
            self,
            scheduler_output: Any,
            sampled_token_ids: Any,
            sampling_metadata: Any,
            hidden_states: Any,
            sample_hidden_states: Any,
            aux_hidden_states: Any,
            spec_decode_metadata: Any,
            common_attn_metadata: Any,
            slot_mappings: Any,
        ) -> tuple[Any, ...]:
            return ("vLLM's own", scheduler_output, sampled_token_ids, slot_mappings)

    return Runner


def ask(runner: Any) -> Any:
    return runner.propose_draft_token_ids("scheduled", [[5], []], None, "hidden", None, ["aux"], None, None, "slots")


# The hook.


def test_our_proposer_is_asked_with_the_step_of_its_runner():
    runner_type = runner_class()
    install_hook(runner_type, VERSION, OurDrafts)
    runner = runner_type(OurDrafts())
    assert ask(runner) == [[1, 2], []]
    assert runner.drafter.steps == [(runner, "scheduled", [[5], []], "hidden", ["aux"])]
    assert (runner._draft_probs, runner._draft_prob_req_ids) == (None, None), "our drafts are point masses"


@pytest.mark.parametrize("drafter", [object(), None])
def test_other_proposers_are_left_alone(drafter: object):
    runner_type = runner_class()
    install_hook(runner_type, VERSION, OurDrafts)
    runner = runner_type(drafter)
    assert ask(runner) == ("vLLM's own", "scheduled", [[5], []], "slots")
    assert runner._draft_probs == "of the last proposer"
    assert not runner._input_fits_in_drafter("metadata")


def test_a_subclass_of_our_proposer_is_ours():
    runner_type = runner_class()
    install_hook(runner_type, VERSION, OurDrafts)
    assert ask(runner_type(type("Derived", (OurDrafts,), {})())) == [[1, 2], []]


def test_ours_is_asked_whatever_is_nearly_at_its_end_but_not_where_nothing_was_computed():
    runner_type = runner_class()
    install_hook(runner_type, VERSION, OurDrafts)
    runner = runner_type(OurDrafts())
    assert runner._input_fits_in_drafter("metadata")
    assert not runner._input_fits_in_drafter(None)


def test_the_model_gives_out_the_layers_that_heads_read_and_no_others():
    runner_type = runner_class()
    install_hook(runner_type, VERSION, OurDrafts)
    runner = runner_type(OurDrafts((5, -1, 2)))
    runner._setup_eagle3_aux_hidden_state_outputs()
    assert (runner.use_aux_hidden_state_outputs, runner.model.layers) == (True, (2, 5))
    for taps in ((), (-1,)):
        runner = runner_type(OurDrafts(taps))
        runner._setup_eagle3_aux_hidden_state_outputs()
        assert (runner.use_aux_hidden_state_outputs, runner.model.layers) == (False, None)
    assert runner_type(object())._setup_eagle3_aux_hidden_state_outputs() == "vLLM's own"


def test_a_model_that_cannot_give_them_out_is_refused_by_name():
    runner_type = runner_class()
    install_hook(runner_type, VERSION, OurDrafts)
    runner = runner_type(OurDrafts((2,)))
    runner.model = object()
    with pytest.raises(ValueError, match="state_taps: vLLM's object does not give out"):
        runner._setup_eagle3_aux_hidden_state_outputs()


def test_a_step_notes_when_it_began_and_is_else_as_it_was():
    runner_type = runner_class()
    install_hook(runner_type, VERSION, OurDrafts)
    runner = runner_type(OurDrafts())
    before_s = time.monotonic()
    assert runner.execute_model("scheduled", intermediate_tensors="tensors") == ("scheduled", "tensors")
    assert before_s <= runner.outrider_step_began_s <= time.monotonic()


def test_the_hook_is_installed_once():
    runner_type = runner_class()
    install_hook(runner_type, VERSION, OurDrafts)
    hooked = {name: getattr(runner_type, name) for name in ("propose_draft_token_ids", "execute_model")}
    install_hook(runner_type, VERSION, OurDrafts)
    assert hooked == {name: getattr(runner_type, name) for name in hooked}
    assert tuple(inspect.signature(runner_type.propose_draft_token_ids).parameters) == PARAMETERS


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "0.320.1", "1.0.32.0", ""])
def test_a_version_that_was_not_tried_is_refused_and_nothing_is_touched(version: str):
    runner_type = runner_class()
    original = runner_type.propose_draft_token_ids
    with pytest.raises(UntriedVersionError, match=r"was tried with 0\.32\.x alone"):
        install_hook(runner_type, version, OurDrafts)
    assert runner_type.propose_draft_token_ids is original


def test_another_method_of_the_same_name_is_refused_and_nothing_is_touched():
    class Runner:
        def execute_model(self) -> None: ...
        def propose_draft_token_ids(self, scheduler_output: Any, sampled: Any) -> None: ...

    original = Runner.execute_model
    with pytest.raises(UntriedVersionError, match="propose_draft_token_ids takes"):
        install_hook(Runner, VERSION, OurDrafts)
    assert Runner.execute_model is original


# What is read of a step.


@dataclass
class Sampling:
    """Of vLLM's `SamplingParams`, what is looked at."""

    max_tokens: int | None = 16
    temperature: float = 0.0
    seed: int | None = None
    extra_args: dict[str, Any] | None = None
    ignore_eos: bool = False
    stop_token_ids: list[int] | None = field(default_factory=lambda: [7])
    all_stop_token_ids: set[int] = field(default_factory=lambda: {2, 7})


def runner_with(*sampling: Sampling) -> Any:
    request_ids = [f"r{index}" for index in range(len(sampling))]
    tokens = np.arange(100, 120, dtype=np.int32).reshape(2, 10)
    return SimpleNamespace(
        input_batch=SimpleNamespace(
            req_ids=request_ids, token_ids_cpu=tokens, num_tokens_no_spec=np.array([6, 4], dtype=np.int32)
        ),
        requests={
            request_id: SimpleNamespace(num_prompt_tokens=3, sampling_params=one)
            for request_id, one in zip(request_ids, sampling, strict=True)
        },
        outrider_step_began_s=5.0,
    )


def view(sampling: Sampling, *, draft_seeded: bool = False) -> RunnerView:
    return RunnerView(runner_with(sampling), draft_seeded=draft_seeded)


def test_rows_are_the_batchs_in_its_order_and_padding_is_no_draft():
    scheduled = SimpleNamespace(
        scheduled_spec_decode_tokens={"r0": [5, 0, -1, -1]}, num_scheduled_tokens={"r1": 4, "r0": 5}
    )
    rows = rows_of(runner_with(Sampling(), Sampling()).input_batch, scheduled, [[5, 9], []])
    assert rows == [
        HostRow(request_id="r0", num_tokens=6, num_scheduled_tokens=5, num_draft_tokens=2, num_new_tokens=2),
        HostRow(request_id="r1", num_tokens=4, num_scheduled_tokens=4, num_draft_tokens=0, num_new_tokens=0),
    ]
    assert [row.num_accepted_tokens for row in rows] == [1, 0]
    assert all(type(row.num_tokens) is int for row in rows), "numpy's integers do not cross a wire"


def test_tokens_are_plain_integers_of_the_requests_row():
    tokens = view(Sampling()).token_ids(0, 1, 4)
    assert tokens == [101, 102, 103]
    assert all(type(token_id) is int for token_id in tokens)
    assert view(Sampling()).began_s == 5.0


def test_a_request_is_described_by_its_parameters():
    description = view(Sampling()).describe(0)
    assert (description.num_prompt_tokens, description.max_tokens) == (3, 16)
    seeded = Sampling(temperature=0.7, seed=3)
    assert view(seeded).describe(0).num_speculative_tokens == 0
    assert view(seeded, draft_seeded=True).describe(0).num_speculative_tokens is None
