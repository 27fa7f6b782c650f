"""`outrider generate`: lines in, texts or records out."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.cluster.offline.llm import LLM, offline_config
from outrider.cluster.offline.outputs import CompletionOutput, RequestOutput, TextPiece
from outrider.cluster.offline.prompts import PromptError, parse_line, read_prompt_lines
from outrider.cluster.offline.sampling_params import SamplingParams
from outrider.verifier_service.messages.request import SpeculationMetrics
from outrider.verifier_service.model.tokenizer import load_tokenizer


def read_lines(
    prompt_texts: Sequence[str], prompts_file: Path | None, *, is_chat: bool, system: str | None
) -> list[dict[str, Any]]:
    """Return the lines to run; in a chat, texts are user messages. Raises `PromptError` if there is none."""
    lines: list[dict[str, Any]] = [{"prompt": text} for text in prompt_texts]
    if prompts_file is not None:
        lines += read_prompt_lines(prompts_file)
    if not lines:
        raise PromptError("give --prompt or --prompts")
    if system is not None and not is_chat:
        raise PromptError("--system needs --chat")
    return [_as_chat(line, system) for line in lines] if is_chat else lines


def _as_chat(line: dict[str, Any], system: str | None) -> dict[str, Any]:
    """Return a line with its text as a user message, and with the system message unless it has one."""
    rest = dict(line)
    if isinstance(line.get("prompt"), str) and "messages" not in line:
        rest["messages"] = [{"role": "user", "content": rest.pop("prompt")}]
    messages = rest.get("messages")
    if system is None or not isinstance(messages, list):
        return rest
    is_instructed = bool(messages) and isinstance(messages[0], dict) and messages[0].get("role") == "system"
    return rest if is_instructed else {**rest, "messages": [{"role": "system", "content": system}, *messages]}


@dataclass(frozen=True, slots=True)
class Printed:
    """The next piece of output."""

    text: str
    is_silence: bool = False  # the output is empty: the model ended at once


def run(
    options: Mapping[str, Any],
    lines: Sequence[Mapping[str, Any]],
    sampling: SamplingParams,
    *,
    drafter_process: bool,
    as_json: bool,
) -> Generator[Printed]:
    """Yield the outputs' texts as they are generated, in the prompts' order; as JSON, a line per finished output."""
    parsed = [parse_line(line, f"prompt-{index}", sampling) for index, line in enumerate(lines)]
    with LLM(**options, drafter_process=drafter_process) as llm:
        prompts, samplings = [line.prompt for line in parsed], [line.sampling for line in parsed]
        if as_json:
            yield from _as_json(llm.as_completed(prompts, samplings))
        else:
            turns = [(str(number), index) for number, own in enumerate(samplings) for index in range(own.n)]
            yield from as_text(in_order(llm.as_generated(prompts, samplings), turns))


def in_order(pieces: Iterable[TextPiece], turns: Iterable[tuple[str, int]]) -> Iterator[TextPiece]:
    """Yield one output's pieces after the other's; later outputs' pieces are held back and joined.

    `turns` are the outputs' request ids and indices.
    """
    waiting = iter(turns)
    turn = next(waiting, None)
    held: dict[tuple[str, int] | None, list[TextPiece]] = defaultdict(list)
    for piece in pieces:
        held[piece.request_id, piece.index].append(piece)
        while begun := held.pop(turn, None):
            last = begun[-1]
            yield dataclasses.replace(last, text="".join(each.text for each in begun))
            if last.finish_reason is not None:
                turn = next(waiting, None)


def as_text(pieces: Iterable[TextPiece]) -> Iterator[Printed]:
    """Yield the text of outputs in order; an error is on a line of its own."""
    is_begun = False
    for piece in pieces:
        is_silence = ended_at_once(piece.text, piece.finish_reason) and not is_begun
        is_begun = is_begun or bool(piece.text)
        text = piece.text
        if piece.error is not None:
            text += f"\n{piece.error}" if is_begun else piece.error
        if piece.finish_reason is None:
            yield Printed(text)
        else:
            yield Printed(f"{text}\n", is_silence)
            is_begun = False


def _as_json(outputs: Iterable[RequestOutput]) -> Iterator[Printed]:
    for found in outputs:
        for output in found.outputs:
            is_silence = ended_at_once(output.text, output.finish_reason)
            yield Printed(f"{json.dumps(to_record(found, output))}\n", is_silence)


def ended_at_once(text: str, finish_reason: str | None) -> bool:
    """Return whether an output is empty since the model ended at once."""
    return not text and finish_reason == "stop"


def hint(model: str | None, *, is_chat: bool) -> str | None:
    """Return advice for a model whose outputs all ended at once; None: there is none."""
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
    if output.index == 0:  # counters are over all outputs of the prompt
        fields["metrics"] = {"speculative_decoding": speculation_json(found.metrics)}
    fields |= {"index": output.index} if len(found.outputs) > 1 else {}
    fields |= {"warnings": found.warnings} if found.warnings else {}
    return fields | ({"error": found.error} if output.finish_reason == "error" else {})


def speculation_json(metrics: SpeculationMetrics) -> dict[str, Any]:
    """Describe the speculation, under vLLM's names."""
    return {
        **dataclasses.asdict(metrics),
        "mean_acceptance_length": metrics.mean_acceptance_length,
        "draft_acceptance_rate": metrics.draft_acceptance_rate,
    }
