"""Drafts for vLLM's V2 model runner: a speculator, and how the runner and its batch are read; imports no vLLM.

V2 refuses `custom_class`, but calls its speculator with the step's request ids and hidden states. So our worker sets a
speculator of ours on the runner. It also wraps three methods of that runner (vLLM's classes stay unchanged):
`execute_model` shows which requests the scheduler has added and dropped; `take_draft_token_ids` reports each draft's
length to the scheduler; `load_model` has the model return the hidden states that heads read.

V2 keeps drafts in a tensor with K tokens per request. When it schedules step by step, its scheduler gets placeholder
ids, K times -1, only to count them. Cut to a draft's length, they make vLLM verify so many tokens, and none for a
request without a draft.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from outrider.cluster.hosted.drafting import HostRequest, HostRow
from outrider.cluster.hosted.plugin import HostStep
from outrider.cluster.hosted.vllm_scheduled import ScheduledRequests
from outrider.cluster.hosted.vllm_settings import give_out_layers, refuse_untried, request_of
from outrider.cluster.hosted.vllm_states import StepStates

RUNNER_PARAMETERS = {
    "execute_model": (
        *("self", "scheduler_output", "intermediate_tensors", "dummy_run", "skip_attn_for_dummy_run", "is_profile"),
        *("context_len", "valid_dummy_state_slots", "randomize_inputs"),
    ),
    "take_draft_token_ids": ("self",),
    "load_model": ("self", "load_dummy_weights", "args", "model", "kwargs"),
    "get_model": ("self",),
}


class Proposes(Protocol):
    """The plug-in on a rank."""

    def propose(self, num_rows: int, read: Callable[[], HostStep]) -> list[list[int]]:
        """Return the next step's draft for every row; never raises."""


class BatchView:
    """A `Host` over a V2 step; `new_tokens`: its committed tokens, by row."""

    def __init__(
        self,
        input_batch: Any,
        req_states: Any,
        requests: ScheduledRequests,
        rows: Sequence[HostRow],
        new_tokens: Sequence[Sequence[int]],
        *,
        began_s: float,
        draft_seeded: bool,
    ) -> None:
        self._batch, self._req_states, self._requests = input_batch, req_states, requests
        self._rows, self._new_tokens = rows, new_tokens
        self._draft_seeded = draft_seeded
        self.began_s = began_s

    def describe(self, row: int) -> HostRequest:
        request = self._requests[self._batch.req_ids[row]]
        return request_of(request.sampling, request.num_prompt_tokens, draft_seeded=self._draft_seeded)

    def block_table(self, row: int) -> list[int]:
        return self._requests[self._batch.req_ids[row]].blocks

    def token_ids(self, row: int, start: int, stop: int) -> list[int]:
        first_new = self._rows[row].num_tokens - self._rows[row].num_new_tokens
        if start >= first_new:  # nearly always: `new_tokens` was one copy from the device for all rows
            return list(self._new_tokens[row][start - first_new : stop - first_new])
        tokens: list[int] = self._req_states.all_token_ids.gpu[self._batch.idx_mapping_np[row], start:stop].tolist()
        return tokens


class PoolSpeculator:
    """The speculator of vLLM's V2 runner, with a pool's drafts."""

    # attributes of `BaseSpeculator` that the runner reads
    num_query_per_req = 1
    num_extra_query_per_req = 0
    supports_mm_inputs = False
    enable_adaptive_verification = False
    draft_logits: torch.Tensor | None = None  # drafts are point masses
    pcp_manager: Any = None  # set by the runner

    def __init__(
        self,
        runner: Any,
        plugin: Proposes,
        requests: ScheduledRequests,
        *,
        num_speculative_tokens: int,
        draft_seeded: bool,
        states: StepStates | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`runner`: V2's; `num_speculative_tokens`: its longest draft."""
        self._runner = runner
        self._plugin = plugin
        self._requests = requests
        self._num_speculative_tokens = num_speculative_tokens
        self._draft_seeded = draft_seeded
        self._states = states
        self._clock = clock
        self._lengths: dict[str, int] = {}  # of the last drafts, by request
        self._began_s = 0.0
        self._is_resting = False

    # --- calls of the worker and the wrapped runner ---

    def begin_step(self, scheduler_output: Any) -> None:
        """Follow the scheduler's output; after a step that computes nothing, no drafts are asked for."""
        self._began_s = self._clock()
        self._requests.follow(scheduler_output)

    def cut(self, drafts: Any) -> None:
        """Cut vLLM's `DraftTokenIds`, which go to the scheduler, to the lengths of our drafts."""
        for request_id, token_ids in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            del token_ids[self._lengths.get(request_id, 0) :]

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Draft nothing within this context: vLLM warms up with ordinary requests."""
        self._is_resting = True
        try:
            yield
        finally:
            self._is_resting = False

    # --- vLLM's BaseSpeculator ---

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Do nothing: there is no model."""

    def capture(self) -> None:
        """Do nothing: there is no model."""

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,  # [num_tokens, hidden_size], and padding
        aux_hidden_states: list[torch.Tensor] | None,  # the same, by tapped layer
        num_sampled: torch.Tensor,  # [num_reqs]; 0: the request is prefilling
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """Return the next step's drafts, int64 [num_reqs, K]; `cut` gives their lengths."""
        self._lengths = {}
        drafts: list[list[int]] = [[] for _ in range(input_batch.num_reqs)]
        if not (dummy_run or self._is_resting):
            finished = self._requests.take_finished()

            def read() -> HostStep:
                rows, new_tokens = self._rows_of(input_batch, num_sampled)
                if self._states is not None:
                    self._keep_states(self._states, input_batch, last_hidden_states, aux_hidden_states)
                view = BatchView(
                    input_batch,
                    self._runner.req_states,
                    self._requests,
                    rows,
                    new_tokens,
                    began_s=self._began_s,
                    draft_seeded=self._draft_seeded,
                )
                return rows, finished, view

            drafts = self._plugin.propose(input_batch.num_reqs, read)
            self._lengths = {
                request_id: len(draft) for request_id, draft in zip(input_batch.req_ids, drafts, strict=True)
            }
        room = self._num_speculative_tokens
        padded = [
            draft + [0] * (room - len(draft)) for draft in drafts
        ]  # padding may be any token: nothing beyond a draft is verified
        return torch.tensor(padded, dtype=torch.int64).to(num_sampled.device)

    # --- reading the batch ---

    def _rows_of(self, input_batch: Any, num_sampled: torch.Tensor) -> tuple[list[HostRow], list[list[int]]]:
        """Return the step's rows and committed tokens: one copy from the device, after sampling."""
        states, places = self._runner.req_states, input_batch.idx_mapping  # [num_reqs]
        num_tokens = states.total_len.gpu[places]  # including the new ones
        all_token_ids = states.all_token_ids.gpu  # [max_num_reqs, max_model_len]
        offsets = torch.arange(self._num_speculative_tokens + 1, device=num_sampled.device)
        columns = (num_tokens - num_sampled)[:, None] + offsets  # [num_reqs, K + 1]
        new = all_token_ids[places[:, None], columns.clamp(max=all_token_ids.shape[1] - 1)]
        read = torch.cat([num_tokens[:, None], num_sampled[:, None], new], dim=1).tolist()
        num_drafted = input_batch.num_draft_tokens_per_req
        rows = [
            HostRow(
                request_id=request_id,
                num_tokens=length,
                num_scheduled_tokens=int(input_batch.num_scheduled_tokens[row]),
                num_draft_tokens=0 if num_drafted is None else int(num_drafted[row]),
                num_new_tokens=num_new,
            )
            for row, (request_id, (length, num_new, *_)) in enumerate(zip(input_batch.req_ids, read, strict=True))
        ]
        return rows, [tokens[:num_new] for _, num_new, *tokens in read]

    def _keep_states(
        self,
        states: StepStates,
        input_batch: Any,
        hidden_states: torch.Tensor,
        layer_inputs: Sequence[torch.Tensor] | None,
    ) -> None:
        config = self._runner.kv_cache_config
        spans = [
            (int(input_batch.num_computed_tokens_np[row]), int(input_batch.num_scheduled_tokens[row]))
            for row in range(input_batch.num_reqs)
        ]
        ids = input_batch.req_ids
        states.keep(
            config,
            config.kv_cache_groups[0].kv_cache_spec.block_size,
            spans,
            lambda row, first: self._requests[ids[row]].blocks[first:],
            hidden_states,
            layer_inputs,
        )


def parameters_of_propose() -> tuple[str, ...]:
    """Return the parameters that `BaseSpeculator.propose` must have: those of ours."""
    return tuple(inspect.signature(PoolSpeculator.propose).parameters)


def attach(runner: Any, speculator: PoolSpeculator, version: str, state_taps: tuple[int, ...]) -> None:
    """Set our speculator on a new V2 runner, before it loads a model.

    Raises `UntriedVersionError`, and then changes nothing. Later, loading a model raises `ValueError` if it cannot
    return the states of `state_taps`.
    """
    refuse_untried(version, type(runner), RUNNER_PARAMETERS)
    execute_model, load_model = runner.execute_model, runner.load_model
    take_draft_token_ids = runner.take_draft_token_ids

    @functools.wraps(execute_model)
    def followed(
        scheduler_output: Any, intermediate_tensors: Any = None, dummy_run: bool = False, *others: Any, **named: Any
    ) -> Any:
        if not dummy_run:
            speculator.begin_step(scheduler_output)
        return execute_model(scheduler_output, intermediate_tensors, dummy_run, *others, **named)

    @functools.wraps(take_draft_token_ids)
    def cut() -> Any:
        if (drafts := take_draft_token_ids()) is not None:
            speculator.cut(drafts)
        return drafts

    @functools.wraps(load_model)
    def tapped(*arguments: Any, **named: Any) -> None:
        load_model(*arguments, **named)
        give_out_layers(runner, state_taps)

    runner.speculator = speculator
    runner.execute_model, runner.take_draft_token_ids, runner.load_model = followed, cut, tapped
