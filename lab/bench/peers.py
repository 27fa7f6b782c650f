"""The arms we compare with: `generate` of the transformers library, plain and assisted by the draft model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.generation import BaseStreamer

from outrider.lab.bench.figures import RequestTrace, RunTrace, Workload
from outrider.verifier_service.messages.request import SpeculationMetrics
from outrider.verifier_service.model.architectures import load_model_description, resolve_folder
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.settled import resolve_device, resolve_dtype

PAD_TOKEN_ID = 0  # any id: padding is masked
NO_TOP_K = 0


def load_library_model(config: ModelConfig) -> PreTrainedModel:
    """Load a checkpoint with the library, in the dtype and on the device that the engine would choose."""
    folder = resolve_folder(config)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, load_model_description(folder, config), device)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=config.trust_remote_code)
    model.generation_config = GenerationConfig()  # the checkpoint's own would bring back its end-of-sequence token
    return model.to(device).eval().requires_grad_(False)


class OutputClock(BaseStreamer):
    """Note when each step's tokens come out of `generate`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._has_seen_prompt = False
        self.times_s: list[float] = []
        self.sizes: list[int] = []  # tokens of each request in that output

    def put(self, value: torch.Tensor) -> None:
        if not self._has_seen_prompt:
            self._has_seen_prompt = True
            return
        self.times_s.append(self._clock())
        self.sizes.append(value.shape[-1] if value.ndim == 2 else 1)  # assisted: [1, num_tokens], plain: [num_requests]

    def end(self) -> None:
        """Nothing is held back."""


class LibraryArm:
    """Batches of as many prompts as the concurrency says, left-padded; each runs to its end before the next."""

    def __init__(
        self,
        name: str,
        target: PreTrainedModel,
        *,
        cores: frozenset[int],
        num_threads: int,
        clock: Callable[[], float],
    ) -> None:
        self.name, self.cores, self.num_threads = name, cores, num_threads
        self._target = target
        self._clock = clock

    def run(self, workload: Workload, concurrency: int) -> RunTrace:
        """Generate `max_tokens` for every prompt."""
        begin_s = self._clock()
        requests: list[RequestTrace] = []
        num_steps = 0
        for batch in _chunks(workload.prompts, concurrency):
            arrival_s = self._clock()
            outputs, token_ids = _generate(self._target, batch, workload, self._clock)
            num_steps += len(outputs.times_s)
            requests += [_request_trace(arrival_s, outputs, tokens) for tokens in token_ids]
        return RunTrace(elapsed_s=self._clock() - begin_s, requests=tuple(requests), num_target_steps=num_steps)


class AssistedLibraryArm:
    """Assisted generation takes one prompt at a time: those that arrive together run one after another."""

    def __init__(
        self,
        name: str,
        target: PreTrainedModel,
        draft: PreTrainedModel,
        *,
        cores: frozenset[int],
        num_threads: int,
        clock: Callable[[], float],
    ) -> None:
        self.name, self.cores, self.num_threads = name, cores, num_threads
        self._target, self._draft = target, draft
        self._clock = clock

    def run(self, workload: Workload, concurrency: int) -> RunTrace:
        """Generate `max_tokens` for every prompt; a request's time to first token has its wait in it."""
        self._configure_drafting(workload.num_speculative_tokens)
        begin_s = self._clock()
        requests: list[RequestTrace] = []
        drafts, num_steps = SpeculationMetrics(), 0
        for batch in _chunks(workload.prompts, concurrency):
            arrival_s = self._clock()
            for prompt in batch:
                outputs, (tokens,) = _generate(
                    self._target, [prompt], workload, self._clock, assistant_model=self._draft
                )
                num_steps += len(outputs.times_s)
                drafts = drafts.plus(count_drafts(outputs.sizes, workload))
                requests.append(_request_trace(arrival_s, outputs, tokens))
        return RunTrace(
            elapsed_s=self._clock() - begin_s, requests=tuple(requests), num_target_steps=num_steps, drafts=drafts
        )

    def _configure_drafting(self, draft_length: int) -> None:
        """Have every draft be of one length: neither adapted to the last one nor cut at unsure tokens."""
        self._draft.generation_config = GenerationConfig(
            num_assistant_tokens=draft_length,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
        )


def count_drafts(output_sizes: Sequence[int], workload: Workload) -> SpeculationMetrics:
    """Tell from the sizes of its outputs what assisted generation drafted and accepted.

    Every output is accepted tokens and one more; drafts leave room for that one within `max_tokens`.
    """
    counts, num_done = SpeculationMetrics(), 0
    for size in output_sizes:
        length = min(workload.num_speculative_tokens, workload.max_tokens - num_done - 1)
        num_done += size
        if length > 0:
            counts = counts.plus(
                SpeculationMetrics(num_drafts=1, num_draft_tokens=length, num_accepted_tokens=size - 1)
            )
    return counts


def _chunks(prompts: Sequence[tuple[int, ...]], size: int) -> list[Sequence[tuple[int, ...]]]:
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]


@torch.inference_mode()
def _generate(
    model: PreTrainedModel,
    prompts: Sequence[tuple[int, ...]],
    workload: Workload,
    clock: Callable[[], float],
    **options: Any,
) -> tuple[OutputClock, list[tuple[int, ...]]]:
    """Call the library; without an end-of-sequence token every prompt gets exactly `max_tokens`."""
    longest = max(len(prompt) for prompt in prompts)
    padding = [longest - len(prompt) for prompt in prompts]
    rows = [[PAD_TOKEN_ID] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)]
    mask = [[0] * pad + [1] * (longest - pad) for pad in padding]
    outputs = OutputClock(clock)
    library_generate: Any = model.generate
    sequences = library_generate(
        input_ids=torch.tensor(rows, device=model.device),  # [num_prompts, longest]
        attention_mask=torch.tensor(mask, device=model.device),
        generation_config=_generation_config(workload),
        streamer=outputs,
        **options,
    )
    return outputs, [tuple(row) for row in sequences[:, longest:].tolist()]


def _generation_config(workload: Workload) -> GenerationConfig:
    if workload.temperature == 0.0:
        return GenerationConfig(do_sample=False, max_new_tokens=workload.max_tokens, pad_token_id=PAD_TOKEN_ID)
    return GenerationConfig(
        do_sample=True,
        temperature=workload.temperature,
        top_k=NO_TOP_K,
        max_new_tokens=workload.max_tokens,
        pad_token_id=PAD_TOKEN_ID,
    )


def _request_trace(arrival_s: float, outputs: OutputClock, token_ids: tuple[int, ...]) -> RequestTrace:
    return RequestTrace(
        arrival_s=arrival_s,
        output_times_s=tuple(outputs.times_s),
        output_sizes=tuple(outputs.sizes),
        token_ids=token_ids,
    )
