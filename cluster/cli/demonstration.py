"""`outrider demo`: start the service, stream over HTTP and gRPC with speculation off and on, stop cleanly."""

from __future__ import annotations

import dataclasses
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import click
import grpc

from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.replicas.serving import running_service, tell_phases
from outrider.drafter_service.embedded import held_out_prompts
from outrider.proto import generation_pb2, generation_pb2_grpc
from outrider.verifier_service.model.ranks import free_ports

NUM_PROMPTS = 3
MAX_TOKENS = 96
START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One streamed completion."""

    text: str
    num_tokens: int
    seconds: float
    speculation: dict[str, Any]


Ask = Callable[[str, bool], Answer]  # prompt, whether to speculate


def run(config: ServiceConfig) -> None:
    """Serve on free ports, ask every prompt twice by each protocol, show what came."""
    port, grpc_port = free_ports(2)
    config = dataclasses.replace(config, port=port, grpc_port=grpc_port)
    on_phase = tell_phases(click.echo)
    with running_service(config, on_phase):
        base_url = f"http://{config.host}:{config.port}"
        on_phase("waiting for the first drafts")
        _wait_for_drafts(base_url, config)
        on_phase(f"ready: {base_url} and grpc {config.host}:{config.grpc_port}\n")
        with grpc.insecure_channel(f"{config.host}:{config.grpc_port}") as channel:
            stub = generation_pb2_grpc.InferenceStub(channel)
            protocols: dict[str, Ask] = {
                "HTTP": lambda prompt, speculate: _ask_http(base_url, config.model_name, prompt, speculate),
                "gRPC": lambda prompt, speculate: _ask_grpc(stub, prompt, speculate),
            }
            for name, ask in protocols.items():
                _show(name, ask)
        click.echo("stopping …")


def _show(protocol: str, ask: Ask) -> None:
    off, on = [], []
    for prompt in held_out_prompts()[:NUM_PROMPTS]:
        off.append(ask(prompt, False))
        on.append(ask(prompt, True))
        click.echo(f"--- {protocol} ---")
        click.secho(prompt, dim=True, nl=False)
        click.echo(on[-1].text)
        if on[-1].text != off[-1].text:
            raise click.ClickException(f"{protocol}: greedy text changed with speculation")
    num_drafts = sum(answer.speculation["num_drafts"] for answer in on)
    num_accepted = sum(answer.speculation["num_accepted_tokens"] for answer in on)
    num_drafted = sum(answer.speculation["num_draft_tokens"] for answer in on)
    slower = (
        "\nThis target is so small that drafting for it costs more than it saves; left to decide, the router switches "
        "it off. `outrider bench` shows from which size on it pays."
    )
    click.secho(
        f"\n{protocol}: {_rate(off):.0f} tokens/s with speculation off, {_rate(on):.0f} on; "
        f"{num_accepted} of {num_drafted} draft tokens accepted, "
        f"mean acceptance length {1 + num_accepted / max(1, num_drafts):.2f}; same text"
        f"{slower if _rate(on) < _rate(off) else ''}\n",
        bold=True,
    )


def _rate(answers: list[Answer]) -> float:
    return sum(answer.num_tokens for answer in answers) / sum(answer.seconds for answer in answers)


def _ask_http(base_url: str, model: str, prompt: str, speculate: bool) -> Answer:
    body = {
        "model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True}, "disable_spec_decode": not speculate,
    }  # fmt: skip
    begin_s, text, num_tokens, speculation = time.monotonic(), "", 0, {}
    for event in _events(f"{base_url}/v1/completions", body):
        text += "".join(choice["text"] for choice in event["choices"])
        if event.get("usage"):
            num_tokens = event["usage"]["completion_tokens"]
        if event.get("metrics"):
            speculation = event["metrics"]["speculative_decoding"]
    return Answer(text=text, num_tokens=num_tokens, seconds=time.monotonic() - begin_s, speculation=speculation)


def _events(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a server-sent event stream."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        for line in response:
            payload = line.decode().removeprefix("data:").strip()
            if payload and payload != "[DONE]":
                yield json.loads(payload)


def _ask_grpc(stub: generation_pb2_grpc.InferenceStub, prompt: str, speculate: bool) -> Answer:
    sampling = generation_pb2.SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, disable_spec_decode=not speculate)
    begin_s, text, num_tokens, speculation = time.monotonic(), "", 0, {}
    for chunk in stub.Generate(generation_pb2.GenerateRequest(text=prompt, sampling=sampling)):
        text += chunk.text
        if chunk.HasField("usage"):
            num_tokens = chunk.usage.completion_tokens
            speculation = {
                name: getattr(chunk.speculative_decoding, name)
                for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
            }
    return Answer(text=text, num_tokens=num_tokens, seconds=time.monotonic() - begin_s, speculation=speculation)


def _wait_for_drafts(base_url: str, config: ServiceConfig) -> None:
    """Wait until the first drafts are verified: verifier and drafter have found each other."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            answer = _ask_http(base_url, config.model_name, "import os\n", True)
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
        else:
            if answer.speculation["num_drafts"]:
                return
        time.sleep(0.2)
    raise click.ClickException(f"no draft was verified within {START_TIMEOUT_S:.0f} s")
