"""vLLM's V2 model runner, played: its books and its calls on CPU tensors, with a greedy target that is known.

What it keeps has vLLM's names, which `tests/cluster/hosted/test_vllm_interface.py` compares with the installed wheel's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from fakes.hosted.engine import MAX_MODEL_LEN, VOCAB_SIZE, Clock, free_steps, target_token

PADDING = 3  # tokens beyond a batch's own, as CUDA graphs have them
HIDDEN_SIZE = 2
BLOCK_SIZE = 4


def on_device(*shape: int, dtype: torch.dtype = torch.int32) -> Any:
    return SimpleNamespace(gpu=torch.zeros(*shape, dtype=dtype))


class RequestStates:
    """vLLM's `RequestState`."""

    def __init__(self, max_num_reqs: int, num_speculative_steps: int) -> None:
        self.req_id_to_index: dict[str, int] = {}
        self.free_indices = list(range(max_num_reqs))
        self.all_token_ids = on_device(max_num_reqs, MAX_MODEL_LEN)
        self.total_len = on_device(max_num_reqs)
        self.prefill_len = SimpleNamespace(np=np.zeros(max_num_reqs, dtype=np.int32))
        self.num_computed_tokens = on_device(max_num_reqs)
        self.num_computed_tokens_np = np.zeros(max_num_reqs, dtype=np.int32)
        self.last_sampled_tokens = torch.zeros(max_num_reqs, 1, dtype=torch.int64)
        self.draft_tokens = torch.zeros(max_num_reqs, num_speculative_steps, dtype=torch.int64)
        self.next_prefill_tokens = torch.zeros(1, max_num_reqs, dtype=torch.int32)

    def add_request(self, req_id: str, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        index = self.req_id_to_index[req_id] = self.free_indices.pop()
        self.all_token_ids.gpu[index] = 7  # what an earlier request left
        self.all_token_ids.gpu[index, : len(token_ids)] = torch.tensor(token_ids)
        self.prefill_len.np[index] = self.total_len.gpu[index] = len(token_ids)
        self.num_computed_tokens_np[index] = num_computed_tokens
        self.num_computed_tokens.gpu[index] = num_computed_tokens
        self.draft_tokens[index] = 0

    def remove_request(self, req_id: str) -> None:
        if (index := self.req_id_to_index.pop(req_id, None)) is not None:
            self.free_indices.append(index)


class OwnSpeculator:
    """What V2 itself would draft with."""


@dataclass
class Model:
    """A model that gives out what goes into its layers."""

    layers: tuple[int, ...] = ()

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.layers = layers


@dataclass
class V2Runner:
    """vLLM's `GPUModelRunner` of V2; `sample_tokens` returns what each request was given, by request."""

    clock: Clock
    num_speculative_steps: int = 4
    max_num_reqs: int = 8
    model: Any = field(default_factory=Model)
    num_blocks: int = 256
    num_kv_cache_groups: int = 1
    speculator: Any = field(default_factory=OwnSpeculator)
    use_aux_hidden_state_outputs: bool = False
    step_s: Callable[[int], float] = free_steps
    num_verified: int = 0  # draft tokens, in all steps
    num_accepted: int = 0

    def __post_init__(self) -> None:
        self.req_states = RequestStates(self.max_num_reqs, self.num_speculative_steps)
        group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=BLOCK_SIZE))
        groups = [group] * self.num_kv_cache_groups
        self.kv_cache_config = SimpleNamespace(num_blocks=self.num_blocks, kv_cache_groups=groups)
        self._step: Any = None
        self._handed: tuple[list[str], torch.Tensor, bool] | None = None

    def get_model(self) -> Any:
        return self.model

    def load_model(self, load_dummy_weights: bool = False, *args: Any, model: Any = None, **kwargs: Any) -> None:
        self.loaded = (load_dummy_weights, args, model, kwargs)

    # --- a step ---

    def execute_model(
        self,
        scheduler_output: Any,
        intermediate_tensors: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        is_profile: bool = False,
        context_len: int = 0,
        valid_dummy_state_slots: bool = False,
        randomize_inputs: bool = False,
    ) -> None:
        if not dummy_run:
            self._follow(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens > 0:
            self._step = (scheduler_output, self._batch_of(scheduler_output, dummy_run))
            self.clock.now_s += self.step_s(scheduler_output.total_num_scheduled_tokens)

    def _follow(self, scheduler_output: Any) -> None:
        gone = scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set())
        for request_id in sorted(gone):
            self.req_states.remove_request(request_id)
        for new in scheduler_output.scheduled_new_reqs:
            self.req_states.remove_request(new.req_id)
            self.req_states.add_request(new.req_id, new.prefill_token_ids, new.num_computed_tokens)
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, count in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            index = self.req_states.req_id_to_index[request_id]
            self.req_states.num_computed_tokens_np[index] = count
            assert self.req_states.num_computed_tokens.gpu[index] == count, "scheduler and runner disagree"

    def _batch_of(self, scheduler_output: Any, dummy_run: bool) -> Any:
        scheduled, drafts = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_spec_decode_tokens
        ids = sorted(scheduled, key=lambda one: (not drafts.get(one), scheduled[one]))  # who verifies comes first
        states = self.req_states
        index = np.array([0 if dummy_run else states.req_id_to_index[one] for one in ids], dtype=np.intp)
        num_drafted = np.array([len(drafts.get(one, ())) for one in ids], dtype=np.int32) if drafts else None
        return SimpleNamespace(
            req_ids=ids,
            num_reqs=len(ids),
            idx_mapping=torch.from_numpy(index.astype(np.int64)),
            idx_mapping_np=index,
            num_scheduled_tokens=np.array([scheduled[one] for one in ids], dtype=np.int32),
            num_draft_tokens_per_req=num_drafted,
            num_computed_tokens_np=states.num_computed_tokens_np[index],
            has_structured_output_reqs=getattr(scheduler_output, "has_structured_output_requests", False),
        )

    def sample_tokens(self, grammar_output: Any = None) -> dict[str, list[int]]:
        """Return the tokens that the step committed, by request; the drafts for the next one are kept."""
        scheduler_output, batch = self._step
        hidden = self._hidden(batch)
        sampled = [self._sampled(batch, row) for row in range(batch.num_reqs)]
        num_sampled = torch.tensor([len(tokens) for tokens in sampled], dtype=torch.int32)
        states, room = self.req_states, scheduler_output.num_spec_tokens_to_schedule
        drafts = self.speculator.propose(
            *(batch, {}, {}, hidden, self._layer_inputs(hidden), num_sampled, torch.zeros_like(num_sampled)),
            *(states.last_sampled_tokens, states.next_prefill_tokens),
            torch.zeros(self.max_num_reqs),
            torch.zeros(self.max_num_reqs, dtype=torch.int64),
            num_speculative_tokens=room,
            dp_sync_state=None,
            mm_inputs=None,
        )
        assert (drafts.shape, drafts.dtype) == ((batch.num_reqs, self.num_speculative_steps), torch.int64)
        assert ((drafts >= 0) & (drafts < VOCAB_SIZE)).all(), "the embedding would end the engine"
        if room < self.num_speculative_steps:
            drafts[:, room:] = -1
        states.draft_tokens[batch.idx_mapping] = drafts
        kept = states.draft_tokens[batch.idx_mapping, :room]
        self._handed = (batch.req_ids, kept, batch.has_structured_output_reqs)
        return dict(zip(batch.req_ids, sampled, strict=True))

    def _sampled(self, batch: Any, row: int) -> list[int]:
        """Verify a row's draft and write what the target says instead into the books."""
        states, index = self.req_states, batch.idx_mapping_np[row]
        computed, length = int(states.num_computed_tokens.gpu[index]), int(states.total_len.gpu[index])
        num_drafted = 0 if batch.num_draft_tokens_per_req is None else int(batch.num_draft_tokens_per_req[row])
        end = computed + int(batch.num_scheduled_tokens[row]) - num_drafted
        assert end <= length
        if end < length:  # a part of its prompt
            states.num_computed_tokens.gpu[index] = end
            return []
        tokens = states.all_token_ids.gpu[index, :length].tolist()
        draft = states.draft_tokens[index, :num_drafted].tolist()
        sampled = [target_token(tokens)]
        while len(sampled) <= len(draft) and draft[len(sampled) - 1] == sampled[-1]:
            sampled.append(target_token(tokens + sampled))
        self.num_verified += num_drafted
        self.num_accepted += len(sampled) - 1
        sampled = sampled[: MAX_MODEL_LEN - length]
        states.all_token_ids.gpu[index, length : length + len(sampled)] = torch.tensor(sampled, dtype=torch.int32)
        states.total_len.gpu[index] = length + len(sampled)
        states.num_computed_tokens.gpu[index] = length + len(sampled) - 1
        states.last_sampled_tokens[index] = sampled[-1]
        return sampled

    def _hidden(self, batch: Any) -> torch.Tensor:
        """Return [num_tokens + padding, 2]: of every computed token its request's row of the books and its position."""
        rows = [
            (int(batch.idx_mapping_np[row]), int(batch.num_computed_tokens_np[row]) + place)
            for row in range(batch.num_reqs)
            for place in range(batch.num_scheduled_tokens[row])
        ]
        return torch.tensor(rows + [(-1, -1)] * PADDING, dtype=torch.float32)

    def _layer_inputs(self, hidden: torch.Tensor) -> list[torch.Tensor] | None:
        return [hidden + 1000 * layer for layer in self.model.layers] if self.use_aux_hidden_state_outputs else None

    def take_draft_token_ids(self) -> Any:
        """Return what the scheduler is told: token ids for grammars alone, else as many -1."""
        if self._handed is None:
            return None
        ids, drafts, has_grammar = self._handed
        told = drafts.tolist() if has_grammar else [[-1] * drafts.shape[1] for _ in ids]
        return SimpleNamespace(req_ids=ids, draft_token_ids=told)
