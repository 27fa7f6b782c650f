"""Prompts of `LLM`, `outrider generate` and `outrider bench`: texts, token ids, conversations."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.cluster.common.errors import InvalidRequest
from outrider.cluster.common.hints import did_you_mean
from outrider.cluster.gateway.structured_format import OPENAI_FIELDS, openai_structure
from outrider.cluster.offline.sampling_params import SamplingParams

PROMPT_FIELDS = ("prompt", "prompt_token_ids", "messages")  # a prompt has one of them
# a line's fields of structured output: those of HTTP
_STRUCTURE_FIELDS = tuple(name for name in OPENAI_FIELDS if name != "structured_outputs")


_BIAS_FIELDS = {"token_id", "bias"}  # of an item of a list of biases


class PromptError(ValueError):
    """An invalid prompt; the text names the prompt and the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt: exactly one of a text, token ids and a conversation."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None


PromptInput = str | Mapping | Prompt  # a mapping has one of PROMPT_FIELDS


def parse_prompt(value: Any, name: str) -> Prompt:
    """Read a prompt, called `name` in errors; raises `PromptError` naming the bad field."""
    if isinstance(value, Prompt):
        return value
    if isinstance(value, str):
        return Prompt(text=value)
    if not isinstance(value, Mapping):
        raise PromptError(f"{name} must be a text, or a mapping with prompt or prompt_token_ids")
    for field in sorted(value.keys() - set(PROMPT_FIELDS), key=str):
        raise PromptError(f"{name}: unknown field {field!r}{did_you_mean(str(field), PROMPT_FIELDS)}")
    if len(value) != 1:
        raise PromptError(f"{name}: give one of prompt, prompt_token_ids and messages")
    if "prompt" in value:
        if not isinstance(value["prompt"], str):
            raise PromptError(f"{name}: prompt must be a string")
        return Prompt(text=value["prompt"])
    if "messages" in value:
        return Prompt(messages=parse_messages(value["messages"], f"{name}: messages"))
    token_ids = value["prompt_token_ids"]
    if not isinstance(token_ids, list | tuple) or not all(type(token_id) is int for token_id in token_ids):
        raise PromptError(f"{name}: prompt_token_ids must be a list of integers")
    return Prompt(token_ids=tuple(token_ids))


def parse_messages(value: Any, name: str) -> tuple[Mapping[str, Any], ...]:
    """Read a conversation; the chat template checks the messages' contents."""
    is_conversation = isinstance(value, list | tuple) and all(isinstance(message, Mapping) for message in value)
    if not is_conversation or not value:
        raise PromptError(f"{name} must be a list of messages, at least one")
    return tuple(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLine:
    """One prompt with its sampling."""

    prompt: Prompt
    sampling: SamplingParams


def read_prompt_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSONL file: each line is a prompt (one of PROMPT_FIELDS), with sampling fields of its own."""
    lines = []
    # not at Unicode's line separators, which may stand within JSON
    for number, text in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
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


def parse_line(line: Mapping[str, Any], name: str, defaults: SamplingParams) -> PromptLine:
    """Read one line's prompt and sampling; raises `PromptError` naming the bad field."""
    prompt = {field: value for field, value in line.items() if field in PROMPT_FIELDS}
    fields = {field: value for field, value in line.items() if field not in PROMPT_FIELDS}
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    for field in sorted(fields.keys() - known - set(_STRUCTURE_FIELDS)):
        hint = did_you_mean(field, [*PROMPT_FIELDS, *_STRUCTURE_FIELDS, *known])
        raise PromptError(f"{name}: unknown field {field!r}{hint}")
    try:
        sampling = dataclasses.replace(defaults, **_with_python_types(fields))
    except (ValueError, InvalidRequest) as error:
        raise PromptError(f"{name}: {error}") from error
    return PromptLine(prompt=parse_prompt(prompt, name), sampling=sampling)


def _with_python_types(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Convert fields whose form in JSON differs: structured output, and biases by token id."""
    typed = {name: value for name, value in fields.items() if name not in OPENAI_FIELDS}
    if (structure := openai_structure(fields)) is not None:
        typed["structured_outputs"] = structure.output
    biases = fields.get("logit_bias")
    if isinstance(biases, list) and all(isinstance(item, dict) and item.keys() == _BIAS_FIELDS for item in biases):
        typed["logit_bias"] = {item["token_id"]: item["bias"] for item in biases}
    elif isinstance(biases, dict):  # {"token id": bias}, as over HTTP
        typed["logit_bias"] = {int(key) if key.isdecimal() else key: bias for key, bias in biases.items()}
    return typed
