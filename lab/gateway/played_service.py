"""A whole service of this machine whose verifier plays: gateway, router and Serve are what they are for any model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.replicas.app import build
from outrider.cluster.replicas.serving import running_service
from outrider.lab.gateway.played_spec import Asked, OnTime, PlayedSpec, Scripted
from outrider.verifier_service.model.architectures import read_description, read_eos_token_ids, resolve_description
from outrider.verifier_service.model.ranks import free_ports
from outrider.verifier_service.model.tokenizer import load_tokenizer

TEXT = " The river ran past the old mill and under the bridge, and nobody in the village knew where it went after that."
UNREADABLE = "\ufffd"  # what a decoder writes for a part of a character


def played_config(*, model: str | None, max_num_seqs: int, **options: Any) -> ServiceConfig:
    """Return the configuration of a service without drafts, on free ports; `model` lends its tokenizer."""
    port, grpc_port = free_ports(2)
    usual = {"port": port, "grpc_port": grpc_port, "speculation": "off", "num_speculative_tokens": 0}
    usual |= {"num_drafters": "0", "tool_call_parser": "hermes", "max_queued_requests": max(1024, max_num_seqs)}
    return ServiceConfig(model=model, max_num_seqs=max_num_seqs, **{**usual, **options})


def played_spec(config: ServiceConfig, *, step_s: float) -> PlayedSpec:
    """Return an engine for a configuration that says a text on time, each token a piece of text by itself."""
    model = config.verifier_spec.model
    folder = resolve_description(model)
    description = read_description(folder, model)
    return PlayedSpec(
        verifier=config.verifier_spec,
        vocab_size=description.vocab_size,
        eos_token_ids=read_eos_token_ids(folder, description, model),
        says=OnTime(token_ids=whole_tokens(load_tokenizer(model), TEXT)),
        step_s=step_s,
    )


def whole_tokens(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Return the tokens of a text that have a text of their own: each makes an event.

    Raises `ValueError` if there are none.
    """
    texts = {token_id: tokenizer.decode([token_id]) for token_id in tokenizer.encode(text, add_special_tokens=False)}
    token_ids = tuple(token_id for token_id, own in texts.items() if own.strip() and UNREADABLE not in own)
    if not token_ids:
        raise ValueError("model: no token of its tokenizer is a whole piece of text")
    return token_ids


def scripted(tokenizer: Any, answers: tuple[str, ...]) -> Scripted:
    """Return a script of texts."""
    return Scripted(sequences=tuple(_ids(tokenizer, text) for text in answers))


def asked(tokenizer: Any, answers: Mapping[str, str]) -> Asked:
    """Return the answers to prompts that have a text, the first that fits; the last text is empty."""
    return Asked(replies=tuple((text, _ids(tokenizer, answer)) for text, answer in answers.items()))


def _ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


@contextlib.contextmanager
def played_service(
    config: ServiceConfig, spec: PlayedSpec, on_phase: Callable[[str], None] = lambda phase: None
) -> Iterator[ServiceConfig]:
    """Run the service with the engine that plays, on a Ray of its own."""
    with running_service(config, on_phase, build=partial(build, main=spec)) as running:
        yield running
