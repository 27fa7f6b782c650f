"""`outrider generate`: lines in, records out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.cluster.offline.llm import LLM, offline_config
from outrider.cluster.offline.outputs import CompletionOutput, RequestOutput
from outrider.cluster.offline.prompts import PromptError, parse_line, read_prompt_lines
from outrider.cluster.offline.sampling_params import SamplingParams
from outrider.verifier_service.messages.request import SpeculationMetrics
from outrider.verifier_service.model.tokenizer import load_tokenizer


def read_lines(
    prompt_texts: Sequence[str], prompts_file: Path | None, *, is_chat: bool, system: str | None
) -> list[dict[str, Any]]:
    """Return the lines to run; as a chat, texts become what a user says. Raises `PromptError` where there is none."""
    lines: list[dict[str, Any]] = [{"prompt": text} for text in prompt_texts]
    if prompts_file is not None:
        lines += read_prompt_lines(prompts_file)
    if not lines:
        raise PromptError("give --prompt or --prompts")
    if system is not None and not is_chat:
        raise PromptError("--system needs --chat")
    return [_as_chat(line, system) for line in lines] if is_chat else lines


def _as_chat(line: dict[str, Any], system: str | None) -> dict[str, Any]:
    """Return a line with its text as a message, and with a first message of the system's unless it has one."""
    rest = dict(line)
    if isinstance(line.get("prompt"), str) and "messages" not in line:
        rest["messages"] = [{"role": "user", "content": rest.pop("prompt")}]
    messages = rest.get("messages")
    if system is None or not isinstance(messages, list):
        return rest
    is_instructed = bool(messages) and isinstance(messages[0], dict) and messages[0].get("role") == "system"
    return rest if is_instructed else {**rest, "messages": [{"role": "system", "content": system}, *messages]}


def run(
    options: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], sampling: SamplingParams, *, drafter_process: bool
) -> Iterator[dict[str, Any]]:
    """Yield a record per prompt, of several outputs one each, in the order in which they finish."""
    parsed = [parse_line(line, f"prompt-{index}", sampling) for index, line in enumerate(lines)]
    with LLM(**options, drafter_process=drafter_process) as llm:
        prompts, samplings = [line.prompt for line in parsed], [line.sampling for line in parsed]
        for found in llm.as_completed(prompts, samplings):
            for output in found.outputs:
                yield to_record(found, output)


def ended_at_once(record: Mapping[str, Any]) -> bool:
    """Tell whether an output is the model's end and nothing else."""
    return not record["text"] and record["finish_reason"] == "stop"


def hint(model: str | None, *, is_chat: bool) -> str | None:
    """Return what to try where all outputs of a model ended at once; None: there is nothing to say."""
    if is_chat or load_tokenizer(offline_config({"model": model}).verifier_spec.model).chat_template is None:
        return None
    return "the model ended at once: it has a chat template, so --chat asks it as a user would"


def to_record(found: RequestOutput, output: CompletionOutput) -> dict[str, Any]:
    """Describe one output as `outrider generate --json` prints it."""
    fields: dict[str, Any] = {
        "request_id": f"prompt-{found.request_id}",
        "prompt_token_ids": found.prompt_token_ids,
        "token_ids": output.token_ids,
        "text": output.text,
        "finish_reason": output.finish_reason,
    }
    if output.index == 0:  # counters are the prompt's, of all its outputs
        fields["metrics"] = {"speculative_decoding": speculation_json(found.metrics)}
    fields |= {"index": output.index} if len(found.outputs) > 1 else {}
    return fields | ({"error": found.error} if output.finish_reason == "error" else {})


def speculation_json(metrics: SpeculationMetrics) -> dict[str, Any]:
    """Describe what speculation did, under the names of the ecosystem."""
    return {
        **dataclasses.asdict(metrics),
        "mean_acceptance_length": metrics.mean_acceptance_length,
        "draft_acceptance_rate": metrics.draft_acceptance_rate,
    }
