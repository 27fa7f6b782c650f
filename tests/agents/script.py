"""What the played model says to agents: it answers what is asked, whoever asks, and in whichever order."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

from outrider.cluster.config.service_config import ServiceConfig
from outrider.lab.gateway.played_service import asked, played_config, played_spec
from outrider.lab.gateway.played_spec import PlayedSpec
from outrider.verifier_service.model.tokenizer import load_tokenizer

GREETING = "Hello there, I am played."
THOUGHT = "I should look first."
FOUND = "outrider-7"  # what a tool finds, and no prompt says
DONE = "The tool has found it."
STRUCTURED = {"number": 7}
STRUCTURED_SCHEMA = {
    "type": "object",
    "properties": {"number": {"type": "integer"}},
    "required": ["number"],
    "additionalProperties": False,
}
ASK_GREETING, ASK_STRUCTURED, ASK_THOUGHT = "Please greet me.", "Answer in the form.", "Please think aloud."


def ask_tool(name: str) -> str:
    """Return a prompt that has the model call a tool."""
    return f"Call {name} once."


# of each client, a tool of its own and arguments that find what is in the folder's only file
CALLS: Mapping[str, Mapping[str, str]] = {
    "exec_command": {"cmd": "cat note.txt"},
    "Bash": {"command": "cat note.txt"},
    "grep_search": {"pattern": "outrider-[0-9]"},
    "grep": {"pattern": "outrider-[0-9]"},
    "look": {"place": "note"},
}
# agents that know no form of answers have a tool for it; the file is asked for one
FORMS = {"StructuredOutput": STRUCTURED, "structured_output": STRUCTURED}


def _call(name: str, arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def answers() -> dict[str, str]:
    """Return the answers by what a prompt has, the first that fits."""
    called = {ask_tool(name): f"<think>{THOUGHT}</think>{_call(name, given)}" for name, given in CALLS.items()}
    formed = {f"{ASK_STRUCTURED} By {name}.": _call(name, given) for name, given in FORMS.items()}
    return {
        FOUND: DONE,
        "title generator": "A title",  # opencode asks for one beside its first turn
        **called,
        **formed,
        ASK_STRUCTURED: json.dumps(STRUCTURED),
        ASK_THOUGHT: f"<think>{THOUGHT}</think>{GREETING}",
        "": GREETING,
    }


def agents_config() -> ServiceConfig:
    """Return a service that plays, with SmolLM2's tokenizer and 128 k of context, on free ports."""
    return played_config(model="smollm2", max_num_seqs=32, reasoning_parser="qwen3")


def agents_spec(config: ServiceConfig) -> PlayedSpec:
    """Return the engine that says these answers."""
    spec = played_spec(config, step_s=0.001)
    return dataclasses.replace(spec, says=asked(load_tokenizer(spec.verifier.model), answers()))
