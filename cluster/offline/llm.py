"""`LLM`: generation in this process, under vLLM's names."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from outrider.cluster.common.hints import did_you_mean
from outrider.cluster.config.machine import fit_drafting, share_cores, usable_cores
from outrider.cluster.config.service_config import MODEL_OPTIONS, ServiceConfig
from outrider.cluster.gateway.text_codec import TextCodec
from outrider.cluster.offline.beam_search import BeamRun, BeamSearchOutput, BeamSearchParams
from outrider.cluster.offline.engine import OfflineEngine
from outrider.cluster.offline.outputs import RequestOutput, TextPiece
from outrider.cluster.offline.prompt_run import PromptRun
from outrider.cluster.offline.prompt_runs import PromptRuns, named_prompts
from outrider.cluster.offline.prompts import Prompt, PromptInput, parse_messages
from outrider.cluster.offline.sampling_params import SamplingParams
from outrider.cluster.router.fleet import PolicyMode
from outrider.cluster.router.planning import off
from outrider.verifier_service.messages.request import DisabledReason, SpeculationPlan
from outrider.verifier_service.model.tokenizer import load_tokenizer

OPTIONS = (*MODEL_OPTIONS, "generation_config", "speculation")
Conversation = Sequence[Mapping[str, Any]]
OutputT = TypeVar("OutputT")


class LLM:
    """A target model and its drafter, loaded into this process; without a model, the embedded pair.

    Ranks and a `drafter_process` are spawned: with them, a script needs `if __name__ == "__main__":`. Raises
    `ValueError` naming the bad option, `OSError` if a model is not found.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        draft_model: str | os.PathLike[str] | None = None,
        speculative_config: Mapping[str, Any] | None = None,  # vLLM's dictionary, with our keys
        dtype: str = "auto",
        tensor_parallel_size: int = 1,
        max_model_len: int | None = None,
        seed: int | None = None,  # of prompts without a seed
        drafter_process: bool = False,  # the drafter has a process and a core of its own
        **options: Any,  # the other OPTIONS
    ) -> None:
        given = {
            "model": model,
            "draft_model": draft_model,
            "speculative_config": speculative_config,
            "dtype": dtype,
            "tensor_parallel_size": tensor_parallel_size,
            "max_model_len": max_model_len,
            "seed": seed,
        }
        config, plan = planned_config({**given, **options}, drafter_process=drafter_process)
        codec = TextCodec(load_tokenizer(config.verifier_spec.model))
        self._engine = OfflineEngine(config, drafter_process=drafter_process, prices_drafts=is_priced(plan))
        self._prompts = PromptRuns(
            config,
            plan,
            codec,
            max_model_len=self._engine.max_model_len,
            eos_token_ids=self._engine.eos_token_ids,
        )
        self._is_closed = False
        self._running = threading.Lock()

    def generate(
        self,
        prompts: PromptInput | Iterable[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Run all prompts together; return their outputs in the prompts' order.

        `prompts` is a text, a mapping with `prompt`, `prompt_token_ids` or `messages`, or an iterable of them;
        `sampling_params` is one for all, or one each; None: as the model's generation_config.json says. `use_tqdm`
        shows progress on stderr. Raises `ValueError` naming the bad field; a prompt that the engine refuses has an
        `error` in its output instead.
        """
        return self._all(self._prompts.runs(named_prompts(prompts), sampling_params), use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Return the outputs for one or several conversations, rendered by a chat template, by default the model's.

        Raises `ValueError` if there is no template, or if the messages do not fit it.
        """
        is_one = not messages or isinstance(messages[0], Mapping)
        named = [("messages", messages)] if is_one else [(f"messages[{i}]", each) for i, each in enumerate(messages)]
        prompts = [(name, Prompt(messages=parse_messages(each, name))) for name, each in named]
        runs = self._prompts.runs(
            prompts, sampling_params, add_generation_prompt=add_generation_prompt, chat_template=chat_template
        )
        return self._all(runs, use_tqdm)

    def beam_search(
        self,
        prompts: PromptInput | Iterable[PromptInput],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Search every prompt's `beam_width` outputs of the highest score; return them in the prompts' order.

        The tokens and scores are those of transformers' `generate(num_beams=...)`. The beams of a prompt share KV up
        to where they part, and run in one step; they have no drafts. At most `concurrency_limit` prompts run at a time.
        Raises `ValueError` naming the bad field, also if the engine refuses a prompt.
        """
        runs = self._prompts.beam_runs(named_prompts(prompts), params)
        limit = max(1, concurrency_limit or len(runs))
        batches = (runs[start : start + limit] for start in range(0, len(runs), limit))
        found = (each for batch in batches for each in self._searched(batch))
        by_id = dict(_with_progress(found, len(runs), use_tqdm))
        return [by_id[run.message.request_id] for run in runs]

    def as_completed(
        self,
        prompts: PromptInput | Iterable[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Yield each prompt's outputs as it finishes; closing the iterator cancels the others."""
        return self._run(self._prompts.runs(named_prompts(prompts), sampling_params))

    def as_generated(
        self,
        prompts: PromptInput | Iterable[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[TextPiece]:
        """Yield pieces of all outputs' texts as they are generated; closing the iterator cancels the rest."""
        return self._pieces(self._prompts.runs(named_prompts(prompts), sampling_params))

    def update_weights(self, folder: str, weight_version: str | None = None) -> None:
        """Take the weights of another checkpoint of the same model: what follows is what a fresh `LLM` of it would say.

        No KV of older weights is found. `weight_version` names the weights (None: by their number), under which
        `rollouts` file responses. A draft model or head keeps its own weights: tokens stay right, and drafts may be
        accepted less often. Raises `ValueError` if tensors are missing or do not fit, and `RuntimeError` while prompts
        run: nothing changes.
        """
        with self._alone():
            self._engine.update_weights(folder, weight_version)

    def update_draft_weights(self, folder: str, weight_version: str | None = None) -> None:
        """Give the draft model or head the weights of another checkpoint, in the format that it started from.

        Tokens are the same with any. `weight_version`: the target's that they belong to, if it has a name. Raises
        `ValueError` if they are refused, or the drafter has none of its own, and `RuntimeError` while prompts run.
        """
        with self._alone():
            self._engine.update_draft_weights(folder, weight_version)

    def close(self) -> None:
        """Free the models and end the processes."""
        self._is_closed = True
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _all(self, runs: Sequence[PromptRun], shows_progress: bool) -> list[RequestOutput]:
        outputs = _with_progress(self._run(runs), len(runs), shows_progress)
        return sorted(outputs, key=lambda output: int(output.request_id))

    def _searched(self, runs: Sequence[BeamRun]) -> Iterator[tuple[str, BeamSearchOutput]]:
        """Search prompts' beams together; yield each request's id and result."""
        by_id = {run.message.request_id: run for run in runs}
        with self._alone():
            try:
                for output in self._engine.generate(run.message for run in runs):
                    yield output.request_id, by_id[output.request_id].found(output)
            finally:
                for request_id in by_id:
                    self._engine.cancel(request_id)

    def _run(self, runs: Sequence[PromptRun]) -> Iterator[RequestOutput]:
        """Run prompts together; yield each one's outputs once it has ended, also by an error."""
        by_id = {run.request_id: run for run in runs}
        with contextlib.closing(self._pieces(runs)) as pieces:
            for piece in pieces:
                run = by_id[piece.request_id]
                if piece.finish_reason is not None and run.is_finished:
                    yield run.output()

    def _pieces(self, runs: Sequence[PromptRun]) -> Generator[TextPiece]:
        """Run prompts together; yield the pieces of text that each step adds."""
        by_request = {request.request_id: run for run in runs for request in run.requests}
        with self._alone():
            try:
                for output in self._engine.generate(request for run in runs for request in run.requests):
                    if self._is_closed:  # closed while the iterator was suspended
                        raise RuntimeError("this LLM is closed")
                    piece = by_request[output.request_id].absorb(output)
                    if piece.finish_reason is not None:
                        self._engine.cancel(output.request_id)  # a stop string ended it, which the engine does not see
                    if piece.text or piece.finish_reason is not None:
                        yield piece
            finally:
                for request_id in by_request:
                    self._engine.cancel(request_id)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Refuse concurrent calls: they would take each other's tokens."""
        if self._is_closed:
            raise RuntimeError("this LLM is closed")
        if not self._running.acquire(blocking=False):
            raise RuntimeError("this LLM is generating for another call, which must end or be closed first")
        try:
            yield
        finally:
            self._running.release()


def _with_progress(outputs: Iterable[OutputT], num_prompts: int, is_shown: bool) -> Iterable[OutputT]:
    """Show on stderr how many prompts have ended."""
    from rich.console import Console
    from rich.progress import track

    return track(outputs, "prompts", total=num_prompts, console=Console(stderr=True), disable=not is_shown)


def offline_config(options: Mapping[str, Any]) -> ServiceConfig:
    """Build the configuration of an engine without a server; an option that is None has its default.

    Raises `ValueError` naming the bad option, or an unknown one's closest match.
    """
    for name in sorted(options.keys() - set(OPTIONS)):
        raise ValueError(f"unknown option {name!r}{did_you_mean(name, OPTIONS)}")
    given = {name: value for name, value in options.items() if value is not None}
    paths: dict[str, Any] = {name: os.fspath(given[name]) for name in ("model", "draft_model") if name in given}
    config = ServiceConfig(**(given | paths))
    if config.draft_length_by_batch_size:
        raise ValueError("speculative_config: num_speculative_tokens_per_batch_size: only a server follows it")
    return config


def planned_config(
    options: Mapping[str, Any], *, drafter_process: bool = False
) -> tuple[ServiceConfig, SpeculationPlan]:
    """Return the configuration of these options, fitted to this machine's cores, and every prompt's plan."""
    config = offline_config(options)
    if not drafter_process:
        config = fit_drafting(config, num_cores=usable_cores())
    mode = config.router_policy.mode
    if mode is PolicyMode.OFF or config.max_draft_length == 0:  # no drafter is loaded
        config, plan = config.with_options(num_speculative_tokens=0), off(DisabledReason.CONFIG)
    else:
        plan = SpeculationPlan(draft_length=config.max_draft_length, is_pinned=mode is PolicyMode.ALWAYS)
    num_apart = config.speculative.draft_tensor_parallel_size if drafter_process and config.pools else 0
    num_ranks = config.verifiers.tensor_parallel_size + num_apart
    return share_cores(config, num_ranks=num_ranks, num_cores=usable_cores()), plan


def is_priced(plan: SpeculationPlan) -> bool:
    """Return whether the price of a draft decides its length."""
    return plan.draft_length > 0 and not plan.is_pinned
