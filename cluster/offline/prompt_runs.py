"""From a caller's prompts and sampling parameters to runs: what `LLM` and `RolloutEngine` have in common."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry

from outrider.cluster.common.errors import InvalidRequest
from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.gateway.request_parser import MAX_HISTORY_KEY_CHARS
from outrider.cluster.gateway.text_codec import TextCodec
from outrider.cluster.monitoring.metrics import GatewayMetrics
from outrider.cluster.offline.beam_search import BeamRun, BeamSearchParams
from outrider.cluster.offline.prompt_run import PromptRun, RunContext
from outrider.cluster.offline.prompts import Prompt, PromptError, PromptInput, parse_prompt
from outrider.cluster.offline.sampling_params import SamplingParams
from outrider.verifier_service.messages.request import SpeculationPlan
from outrider.verifier_service.model.architectures import read_sampling_defaults, resolve_description


class PromptRuns:
    """Makes the runs of one engine's prompts, each with an id of its own; may be used by several threads."""

    def __init__(
        self,
        config: ServiceConfig,
        plan: SpeculationPlan,
        codec: TextCodec,
        *,
        max_model_len: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._context = RunContext(
            codec=codec,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            plan=plan,
            acceptance=config.speculative.rejection_sample_method,
            logprobs_mode=config.logprobs_mode,
            rollouts=config.verifiers.rollouts,
            metrics=GatewayMetrics(CollectorRegistry(), model_name=config.model.name),
            clock=time.monotonic,
        )
        self._numbers = itertools.count()
        self._default_sampling = SamplingParams(**_sampling_defaults(config))

    def runs(
        self,
        prompts: Sequence[tuple[str, Prompt]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        history_keys: Sequence[str | None] | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
    ) -> list[PromptRun]:
        """Return a run for each prompt, in order. Raises `ValueError` naming the bad field.

        `prompts` come with their names in errors; `history_keys`: one each, as in `GenerationRequest`. Of
        conversations: whether an answer of its own begins, and a template in place of the model's.
        """
        given = self._default_sampling if sampling_params is None else sampling_params
        samplings = _one_for_each(given, len(prompts))
        keys = _checked_keys(history_keys, len(prompts))
        tokenised = [
            self._tokenised(prompt, name, add_generation_prompt=add_generation_prompt, chat_template=chat_template)
            for name, prompt in prompts
        ]
        are_new = [prompt.messages is not None and add_generation_prompt for _, prompt in prompts]
        return [
            PromptRun(str(next(self._numbers)), text, ids, sampling, self._context, is_new_text=is_new, history_key=key)
            for (text, ids), is_new, sampling, key in zip(tokenised, are_new, samplings, keys, strict=True)
        ]

    def beam_runs(self, prompts: Sequence[tuple[str, Prompt]], params: BeamSearchParams) -> list[BeamRun]:
        """Return a beam search for each prompt, in order."""
        tokenised = [
            self._tokenised(prompt, name, add_generation_prompt=True, chat_template=None) for name, prompt in prompts
        ]
        return [BeamRun(str(next(self._numbers)), text, ids, params, self._context) for text, ids in tokenised]

    def _tokenised(
        self, prompt: Prompt, name: str, *, add_generation_prompt: bool, chat_template: str | None
    ) -> tuple[str | None, tuple[int, ...]]:
        """Return a prompt's text, if it has one, and its token ids."""
        codec = self._context.codec
        if prompt.token_ids is not None:
            return None, prompt.token_ids
        if prompt.text is not None:
            return prompt.text, codec.encode_now(prompt.text, add_special_tokens=True)
        if chat_template is None and not codec.has_chat_template:
            raise PromptError(f"{name}: this model has no chat template")
        try:
            text = codec.render_chat_now(
                prompt.messages or (), add_generation_prompt=add_generation_prompt, chat_template=chat_template
            )
        except InvalidRequest as error:
            raise PromptError(f"{name}: {error}") from error
        return text, codec.encode_now(text, add_special_tokens=False)  # the template has written special tokens


def named_prompts(prompts: PromptInput | Iterable[PromptInput]) -> list[tuple[str, Prompt]]:
    """Return the prompts with their names in errors."""
    if isinstance(prompts, PromptInput):
        return [("prompts", parse_prompt(prompts, "prompts"))]
    if not isinstance(prompts, Iterable):
        raise PromptError("prompts must be a text, a mapping, or several of them")
    named = ((f"prompts[{index}]", prompt) for index, prompt in enumerate(prompts))
    return [(name, parse_prompt(prompt, name)) for name, prompt in named]


def _sampling_defaults(config: ServiceConfig) -> dict[str, Any]:
    if not config.reads_generation_config:
        return {}
    return read_sampling_defaults(resolve_description(config.verifier_spec.model))


def _one_for_each(params: SamplingParams | Sequence[SamplingParams], num_prompts: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, Sequence) or not all(isinstance(item, SamplingParams) for item in params):
        raise ValueError("sampling_params must be a SamplingParams of outrider.cluster, or a list of them")
    if len(params) != num_prompts:
        raise ValueError(f"sampling_params must be one, or one for each of {num_prompts} prompts, not {len(params)}")
    return list(params)


def _checked_keys(keys: Sequence[str | None] | None, num_prompts: int) -> Sequence[str | None]:
    if keys is None:
        return [None] * num_prompts
    if isinstance(keys, str) or len(keys) != num_prompts:
        raise ValueError(f"history_keys must be one for each of {num_prompts} prompts")
    if any(key is not None and len(key) > MAX_HISTORY_KEY_CHARS for key in keys):
        raise ValueError(f"history_keys must be of at most {MAX_HISTORY_KEY_CHARS} characters each")
    return keys
