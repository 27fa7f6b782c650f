"""A request as vLLM's `SamplingParams`; a field that they lack is refused by name."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields
from typing import Any

from outrider.cluster.hosted.vllm_settings import CAP_KEY, SALT_KEY, STORE_KEY
from outrider.verifier_service.messages.request import (
    AcceptanceRule,
    CommonSampling,
    GenerationRequest,
    LogprobsMode,
    SamplingParams,
    StructuredKind,
    StructuredOutput,
)
from outrider.verifier_service.messages.structured_output import check_structured, with_guidance

# `CommonSampling` has vLLM's names, but for what is ours
_SAME = {each.name for each in fields(CommonSampling)} - {"choice_index", "num_speculative_tokens"}
_SAME -= {"typical_epsilon", "typical_delta"}


def sampling_of(request: GenerationRequest, *, has_drafts: bool) -> dict[str, Any]:
    """Return the arguments of vLLM's `SamplingParams`; raises `ValueError` naming an unsupported field.

    After a failover, vLLM takes the prompt and the published tokens as its prompt.
    """
    sampling, num_published = request.sampling, len(request.output_token_ids)
    _check(sampling, num_published, has_drafts=has_drafts)
    arguments: dict[str, Any] = {
        **{name: getattr(sampling, name) for name in _SAME},
        "seed": _seed(sampling, request.output_token_ids),
        "max_tokens": sampling.max_tokens - num_published,
        "min_tokens": max(0, sampling.min_tokens - num_published),
        "stop_token_ids": list(sampling.stop_token_ids),
        "detokenize": False,  # the gateway does
    }
    if sampling.allowed_token_ids:
        arguments["allowed_token_ids"] = list(sampling.allowed_token_ids)
    if sampling.logit_bias:
        arguments["logit_bias"] = {item.token_id: item.bias for item in sampling.logit_bias}
    if told := _told_to_plugin(request):
        arguments["extra_args"] = told
    return arguments


def _told_to_plugin(request: GenerationRequest) -> dict[str, Any]:
    """Return what the plug-in must know of a request: vLLM shows it no salt."""
    told: dict[str, Any] = {}
    if request.sampling.num_speculative_tokens is not None:
        told[CAP_KEY] = request.sampling.num_speculative_tokens
    if request.cache_salt:
        told[SALT_KEY] = request.cache_salt
    if request.history_key == "":
        told[STORE_KEY] = False
    elif request.may_learn:
        told[STORE_KEY] = True
    return told


def structured_of(structured: StructuredOutput) -> dict[str, Any]:
    """Return the arguments of vLLM's `StructuredOutputsParams`."""
    match structured.kind:
        case StructuredKind.JSON_SCHEMA:
            return {"json": _schema_of(structured)}
        case StructuredKind.JSON_OBJECT:
            return {"json_object": True}
        case StructuredKind.REGEX:
            return {"regex": structured.text}
        case StructuredKind.GRAMMAR:
            return {"grammar": structured.text}
        case StructuredKind.CHOICE:
            return {"choice": list(structured.choices)}


def _schema_of(structured: StructuredOutput) -> str:
    """Return a schema for vLLM's llguidance: as with ours, unsupported constraints are left out, unless strict."""
    if not check_structured(structured):
        return structured.text
    return json.dumps(with_guidance(json.loads(structured.text), defaults={}, is_lenient=True))


def _check(sampling: SamplingParams, num_published: int, *, has_drafts: bool) -> None:
    if sampling.beams is not None:
        raise ValueError("use_beam_search: our own engine has it; vLLM's is asked for one output a request")
    if sampling.acceptance is not AcceptanceRule.STANDARD:
        raise ValueError(f"acceptance: vLLM verifies by the standard rule, not {sampling.acceptance.value}")
    if sampling.logprobs_mode is not LogprobsMode.RAW:
        raise ValueError(f"logprobs_mode: vLLM's are {LogprobsMode.RAW} here, not {sampling.logprobs_mode.value}")
    if sampling.thought is not None and (sampling.structured is None or sampling.thought.max_tokens is not None):
        raise ValueError("thinking_token_budget: vLLM's engine is told of none")
    is_calls = sampling.structured is not None and sampling.structured.kind is StructuredKind.GRAMMAR
    if sampling.thought is not None and sampling.thought.is_open and not is_calls:  # that grammar knows thoughts
        raise ValueError("structured: vLLM's engine holds a form from the first token: this answer begins in a thought")
    if sampling.bad_words:
        raise ValueError("bad_words: vLLM takes none as tokens")
    if has_drafts and (sampling.min_p > 0.0 or sampling.logit_bias):
        name = "logit_bias" if sampling.logit_bias else "min_p"
        raise ValueError(f"{name}: vLLM takes none in a service that drafts")
    if num_published == 0:
        return
    if sampling.presence_penalty or sampling.frequency_penalty:
        # vLLM would count published tokens as prompt tokens, and so change the distribution
        name = "presence_penalty" if sampling.presence_penalty else "frequency_penalty"
        raise ValueError(f"{name}: a request that has lost its verifier cannot go on in vLLM with one")
    if sampling.structured is not None:
        raise ValueError("structured: a request that has lost its verifier cannot go on in vLLM in the midst of a form")


def _seed(sampling: SamplingParams, published: tuple[int, ...]) -> int | None:
    """Return vLLM's seed: one per choice, and another after a failover, whose tokens are sampled anew."""
    if sampling.seed is None:
        return None
    seed = sampling.seed + sampling.choice_index
    if published:
        digest = hashlib.blake2b(repr((seed, published)).encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, signed=True)
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)  # wraps to 64 bits
