"""The plug-in's hooks in vLLM's V1 model runner, and how the runner is read; imports no vLLM.

vLLM gives its `custom_class` proposer neither request ids nor parameters. So our proposer, created inside the model
runner, wraps `propose_draft_token_ids`, the only method that calls proposers; calls for other proposers pass through.
Before it changes anything, it compares vLLM's version and the method's parameters with the tried ones.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from outrider.cluster.hosted.drafting import HostRequest, HostRow
from outrider.cluster.hosted.vllm_settings import give_out_layers, refuse_untried, request_of
from outrider.cluster.hosted.vllm_states import block_table_of

PARAMETERS = (
    *("self", "scheduler_output", "sampled_token_ids", "sampling_metadata", "hidden_states", "sample_hidden_states"),
    *("aux_hidden_states", "spec_decode_metadata", "common_attn_metadata", "slot_mappings"),
)


class RunnerView:
    """A `Host` over vLLM's model runner."""

    def __init__(self, runner: Any, *, draft_seeded: bool) -> None:
        self._batch, self._requests = runner.input_batch, runner.requests
        self._draft_seeded = draft_seeded
        self.began_s: float = runner.outrider_step_began_s

    def describe(self, row: int) -> HostRequest:
        state = self._requests[self._batch.req_ids[row]]
        return request_of(state.sampling_params, state.num_prompt_tokens, draft_seeded=self._draft_seeded)

    def block_table(self, row: int) -> list[int]:
        return block_table_of(self._batch, row)

    def token_ids(self, row: int, start: int, stop: int) -> list[int]:
        return self._batch.token_ids_cpu[row, start:stop].tolist()


def rows_of(batch: Any, scheduler_output: Any, sampled_token_ids: Sequence[list[int]]) -> list[HostRow]:
    """Return the rows of vLLM's batch, after the sampled tokens were written into it."""
    drafts = scheduler_output.scheduled_spec_decode_tokens
    return [
        HostRow(
            request_id=request_id,
            num_tokens=int(batch.num_tokens_no_spec[row]),
            num_scheduled_tokens=scheduler_output.num_scheduled_tokens[request_id],
            num_draft_tokens=sum(token_id >= 0 for token_id in drafts.get(request_id, ())),  # -1: padding
            num_new_tokens=len(sampled_token_ids[row]),
        )
        for row, request_id in enumerate(batch.req_ids)
    ]


def install_hook(runner: type, version: str, proposer: type) -> None:
    """Hook a runner class, once, so that its steps call our proposer; raises `UntriedVersionError`."""
    original = runner.propose_draft_token_ids  # type: ignore[attr-defined]
    if getattr(original, "is_outriders", False):
        return
    refuse_untried(version, runner, {"propose_draft_token_ids": PARAMETERS})
    runner.propose_draft_token_ids = _hooked(original, proposer)  # type: ignore[attr-defined]
    runner._input_fits_in_drafter = _fitting(runner._input_fits_in_drafter, proposer)  # type: ignore[attr-defined]
    setup = "_setup_eagle3_aux_hidden_state_outputs"
    setattr(runner, setup, _tapping(getattr(runner, setup), proposer))
    runner.execute_model = _timed(runner.execute_model)  # type: ignore[attr-defined]


def _hooked(original: Callable[..., Any], proposer: type) -> Callable[..., Any]:
    @functools.wraps(original)
    def propose_draft_token_ids(self: Any, *arguments: Any, **named: Any) -> Any:
        drafter: Any = self.drafter
        if not issubclass(type(drafter), proposer):
            return original(self, *arguments, **named)
        self._draft_probs = self._draft_prob_req_ids = None  # point masses
        step = dict(zip(PARAMETERS[1:], arguments, strict=False)) | named
        return drafter.propose_step(
            self,
            step["scheduler_output"],
            step["sampled_token_ids"],
            step["hidden_states"],
            step["aux_hidden_states"],
        )

    propose_draft_token_ids.is_outriders = True  # type: ignore[attr-defined]
    return propose_draft_token_ids


def _fitting(original: Callable[..., bool], proposer: type) -> Callable[..., bool]:
    """Call our proposer for every batch: it cuts each draft at the end of its request's context.

    vLLM skips proposers, for all requests, while one is nearly as long as a draft model's context. It then verifies
    placeholder tokens, and its CPU build crashes for want of a CUDA stream.
    """

    @functools.wraps(original)
    def _input_fits_in_drafter(self: Any, common_attn_metadata: Any) -> bool:
        if not issubclass(type(self.drafter), proposer):
            return original(self, common_attn_metadata)
        return common_attn_metadata is not None

    return _input_fits_in_drafter


def _tapping(original: Callable[..., None], proposer: type) -> Callable[..., None]:
    """Have the model return the hidden states that our proposer reads."""

    @functools.wraps(original)
    def _setup_eagle3_aux_hidden_state_outputs(self: Any) -> None:
        drafter = getattr(self, "drafter", None)
        if drafter is None or not issubclass(type(drafter), proposer):
            return original(self)
        return give_out_layers(self, drafter.state_taps)

    return _setup_eagle3_aux_hidden_state_outputs


def _timed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Record when a step begins, which matters after a pause."""

    @functools.wraps(original)
    def execute_model(self: Any, *arguments: Any, **named: Any) -> Any:
        self.outrider_step_began_s = time.monotonic()
        return original(self, *arguments, **named)

    return execute_model
