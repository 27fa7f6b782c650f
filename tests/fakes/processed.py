"""References of what logits become before a token is drawn: our processors, slowly, and the library's warpers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider.verifier_service.messages.request import SamplingParams, VerificationMode


def processed_row(
    logits: torch.Tensor,
    sampling: SamplingParams,
    *,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_token_ids: Collection[int] = (),
) -> torch.Tensor:
    """Return one position's logits as they are sampled from: float32 [vocab_size], before temperature."""
    row = logits.clone()
    for item in sampling.logit_bias:
        row[item.token_id] += item.bias
    for token_id in range(len(row)):
        if token_id in stop_token_ids and len(output) < sampling.min_tokens:
            row[token_id] = -torch.inf
        if token_id in prompt or token_id in output:
            factor = sampling.repetition_penalty
            row[token_id] = row[token_id] / factor if row[token_id] > 0.0 else row[token_id] * factor
        row[token_id] -= sampling.frequency_penalty * output.count(token_id)
        row[token_id] -= sampling.presence_penalty * (token_id in output)
    for *begin, last in sampling.bad_words:
        if list(output)[len(output) - len(begin) :] == begin and len(begin) <= len(output):
            row[last] = -torch.inf
    if sampling.allowed_token_ids:
        row[sorted({*range(len(row))} - {*sampling.allowed_token_ids})] = -torch.inf
    return row


def warpers(sampling: SamplingParams) -> LogitsProcessorList:
    """Return what transformers' `generate` warps its scores with."""
    found = LogitsProcessorList()
    if sampling.mode is VerificationMode.GREEDY:
        return found
    found.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        found.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        found.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        found.append(MinPLogitsWarper(sampling.min_p))
    return found
