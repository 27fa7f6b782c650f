"""What the played model says to agents: it answers what is asked, whoever asks, and in whichever order."""

from __future__ import annotations

import dataclasses
import json

from agents import words
from outrider.cluster.config.service_config import ServiceConfig
from outrider.lab.gateway.played_service import asked, played_config, played_spec
from outrider.lab.gateway.played_spec import PlayedSpec
from outrider.verifier_service.model.tokenizer import load_tokenizer

STEP_S = 0.02  # a client that is slower gets several tokens as one piece


def _call(name: str, arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def answers() -> dict[str, str]:
    """Return the answers by what a prompt has, the first that fits."""
    thought = f"<think>{words.THOUGHT}</think>"
    called = {words.ask_tool(name): f"{thought}{_call(name, given)}" for name, given in words.CALLS.items()}
    formed = {words.ask_form_by(name): _call(name, words.STRUCTURED) for name in words.FORM_TOOLS}
    return {
        words.FOUND: words.DONE,
        "title generator": "A title",  # opencode asks for one beside its first turn
        **called,
        **formed,
        words.ASK_FORM: json.dumps(words.STRUCTURED),
        words.ASK_THOUGHT: f"{thought}{words.GREETING}",
        "": words.GREETING,
    }


def agents_config() -> ServiceConfig:
    """Return a service that plays, with SmolLM2's tokenizer and 128 k of context, on free ports."""
    return played_config(model=words.MODEL, max_num_seqs=32, reasoning_parser="qwen3")


def agents_spec(config: ServiceConfig) -> PlayedSpec:
    """Return the engine that says these answers."""
    spec = played_spec(config, step_s=STEP_S)
    return dataclasses.replace(spec, says=asked(load_tokenizer(spec.verifier.model), answers()))
