"""Turn the prompts of `outrider generate` and `outrider bench` into requests, and results into JSON lines."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from outrider.cluster.common.errors import InvalidRequest
from outrider.cluster.common.hints import did_you_mean
from outrider.cluster.gateway.structured_format import OPENAI_FIELDS, openai_structure
from outrider.verifier_service.messages.request import (
    AcceptanceRule,
    FinishReason,
    GenerationRequest,
    RequestOutput,
    SamplingParams,
    SpeculationMetrics,
    SpeculationPlan,
)
from outrider.verifier_service.messages.wire import decode, encode

# what an object or a name of our own stands for is spelled as over HTTP
SAMPLING_FIELDS = {field.name for field in dataclasses.fields(SamplingParams)} - {"structured", "acceptance"}
ACCEPTANCE_FIELD = "rejection_sample_method"


class PromptError(ValueError):
    """A prompt line that cannot be used; the text names the line and the field."""


def read_prompt_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSONL file: each line gives `prompt` or `prompt_token_ids`, and may carry its own sampling fields."""
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise PromptError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(line, dict):
            raise PromptError(f"{path}:{number}: expected an object")
        lines.append(line)
    return lines


def parse_request(
    line: Mapping[str, Any],
    *,
    request_id: str,
    defaults: SamplingParams,
    plan: SpeculationPlan,
    tokenizer: PreTrainedTokenizerBase,
) -> GenerationRequest:
    """Build one request; raises `PromptError` naming the field that is wrong."""
    own_names = ("prompt", "prompt_token_ids", ACCEPTANCE_FIELD, *OPENAI_FIELDS)
    overrides = {name: value for name, value in line.items() if name not in own_names}
    if unknown := overrides.keys() - SAMPLING_FIELDS:
        name = min(unknown)
        hint = did_you_mean(name, [*own_names, *SAMPLING_FIELDS])
        raise PromptError(f"{request_id}: unknown field {name!r}{hint}")
    try:
        overrides |= _spelled_as_over_http(line)
        sampling = dataclasses.replace(defaults, **{name: _tuple(value) for name, value in overrides.items()})
        sampling = decode(encode(sampling), (SamplingParams,))  # the codec knows the types of all fields
    except (TypeError, ValueError, InvalidRequest) as error:
        raise PromptError(f"{request_id}: {error}") from error
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=_prompt_token_ids(line, request_id, tokenizer),
        sampling=sampling,
        plan=plan,
    )


def _spelled_as_over_http(line: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if ACCEPTANCE_FIELD in line:
        fields["acceptance"] = AcceptanceRule(line[ACCEPTANCE_FIELD])
    if (structure := openai_structure(line)) is not None:
        fields["structured"] = structure.output
    return fields


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _prompt_token_ids(
    line: Mapping[str, Any], request_id: str, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    if ("prompt" in line) == ("prompt_token_ids" in line):
        raise PromptError(f"{request_id}: give either prompt or prompt_token_ids")
    if "prompt" in line:
        if not isinstance(line["prompt"], str):
            raise PromptError(f"{request_id}: prompt must be a string")
        return tuple(tokenizer(line["prompt"])["input_ids"])
    token_ids = line["prompt_token_ids"]
    if not isinstance(token_ids, list) or not all(type(token_id) is int for token_id in token_ids):
        raise PromptError(f"{request_id}: prompt_token_ids must be a list of integers")
    return tuple(token_ids)


@dataclass(slots=True)
class Result:
    """Everything one request produced."""

    request: GenerationRequest
    token_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    speculation: SpeculationMetrics | None = None

    def extend(self, output: RequestOutput) -> None:
        """Take in one step's output."""
        self.token_ids.extend(output.token_ids)
        self.finish_reason, self.error, self.speculation = output.finish_reason, output.error, output.speculation


def collect(requests: Sequence[GenerationRequest], outputs: Iterable[RequestOutput]) -> Iterator[Result]:
    """Yield each request's result as it finishes."""
    results = {request.request_id: Result(request) for request in requests}
    for output in outputs:
        result = results[output.request_id]
        result.extend(output)
        if result.finish_reason is not None:
            yield result


def result_json(result: Result, text: str) -> dict[str, Any]:
    """Describe a result as `outrider generate --json` prints it."""
    assert result.finish_reason is not None
    fields: dict[str, Any] = {
        "request_id": result.request.request_id,
        "prompt_token_ids": list(result.request.prompt_token_ids),
        "token_ids": result.token_ids,
        "text": text,
        "finish_reason": result.finish_reason.value,
        "metrics": {"speculative_decoding": speculation_json(result.speculation or SpeculationMetrics())},
    }
    return fields | ({"error": result.error} if result.error else {})


def speculation_json(metrics: SpeculationMetrics) -> dict[str, Any]:
    """Describe what speculation did, under the names of the ecosystem."""
    return {
        **dataclasses.asdict(metrics),
        "mean_acceptance_length": metrics.mean_acceptance_length,
        "draft_acceptance_rate": metrics.draft_acceptance_rate,
    }
