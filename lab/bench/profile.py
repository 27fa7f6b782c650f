"""`outrider bench profile`: where a decoding step of our engine spends its time.

    so many requests decode together, each a token a step, or more where drafts are accepted
    once as they are: the parts of a step, as the engine names them, and encoding what it would tell its shell
    once with hooks on the model: which share of the forward is linear layers, attention, the rest

Nothing heavy is imported before the verb runs.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import markdown_table, numbers
from outrider.lab.report import describe_machine, files, show_page, write

if TYPE_CHECKING:
    from torch import nn

    from outrider.cluster.config.service_config import ServiceConfig
    from outrider.cluster.offline.engine import OfflineEngine
    from outrider.verifier_service.messages.request import GenerationRequest
    from outrider.verifier_service.model.runner import PackedModel

PHASES = ("schedule", "forward", "verify", "commit", "ask", "publish")  # of a step, in their order
PARTS = ("prepare", "linear layers", "attention", "rest of the model")  # of the forward
PROMPT_LENGTH = 64
WARM_STEPS = 8  # not counted, after the prompts
PLAIN_WIDTH = 160


@dataclass(slots=True)
class PhaseClock:
    """Note how long each part of a step took; parts that come several times in a step add up."""

    clock: Callable[[], float]
    steps: list[dict[str, float]] = field(default_factory=list)  # seconds
    _ended_s: float = 0.0

    def begin(self) -> None:
        """Start a step."""
        self.steps.append({})
        self._ended_s = self.clock()

    def end(self, name: str) -> None:
        """Count the time since the last part ended, or since the step began."""
        now_s = self.clock()
        step = self.steps[-1]
        step[name] = step.get(name, 0.0) + now_s - self._ended_s
        self._ended_s = now_s

    def medians_ms(self, names: Sequence[str]) -> dict[str, float]:
        """Return the median of each part over all steps."""
        return {name: 1e3 * statistics.median(step.get(name, 0.0) for step in self.steps) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The parts of a step with so many requests, in ms."""

    concurrency: int
    phases: dict[str, float]
    parts: dict[str, float]  # of a forward with hooks, which make it longer

    @property
    def step_ms(self) -> float:
        return sum(self.phases.values())

    @property
    def host_ms(self) -> float:
        """All that is not the model: it grows with the requests, not with the model."""
        return self.step_ms - self.phases["forward"] + self.parts["prepare"]


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("model", required=False)
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16"]), default="auto", show_default=True)
@click.option("--quantization", type=click.Choice(["int8", "fp8"]))
@click.option("--method", help="Draft with it, in this process: ngram, suffix. Default: speculation off.")
@click.option("--threads", "num_threads", type=click.IntRange(1), help="Default: one for each core.")
@click.option("--concurrency", "concurrencies", default="1,4,16,32", show_default=True, callback=numbers)
@click.option("--num-steps", type=click.IntRange(1), default=40, show_default=True, help="To take the medians of.")
@files("json", "markdown")
def profile(
    concurrencies: tuple[int, ...], num_steps: int, json_file: Path | None, markdown_file: Path | None, **options: Any
) -> None:
    """Show where a decoding step of MODEL, by default the embedded one, spends its time."""
    from outrider.cluster.offline.engine import OfflineEngine

    try:
        config = _config(max(concurrencies), **options)
        with OfflineEngine(config) as offline:
            profiles = [
                measure(offline, count, num_steps=num_steps, clock=time.perf_counter) for count in concurrencies
            ]
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    table, machine = to_markdown(profiles), str(describe_machine())
    show_page(f"{machine}; ms of a step\n\n{table}", PLAIN_WIDTH, markdown_file)
    rows = [
        {"concurrency": own.concurrency, "host_ms": own.host_ms, "phases_ms": own.phases, "parts_ms": own.parts}
        for own in profiles
    ]
    write(json_file, lambda: {"machine": machine, "rows": rows})


def _config(max_num_seqs: int, *, method: str | None, num_threads: int | None, **options: Any) -> ServiceConfig:
    from outrider.cluster.offline.llm import offline_config

    if method is not None:
        options["speculative_config"] = {"method": method, "location": "verifier"}
    config = offline_config(
        {
            **options,
            "threads_per_rank": num_threads or len(os.sched_getaffinity(0)),
            "max_num_seqs": max_num_seqs,
        }
    )
    return config if method is not None else config.with_options(num_speculative_tokens=0)


def measure(offline: OfflineEngine, concurrency: int, *, num_steps: int, clock: Callable[[], float]) -> Profile:
    """Decode with so many requests, with the engine as it is and with hooks on its model."""
    plain = _decode(offline, concurrency, num_steps, PhaseClock(clock))
    hooked = PhaseClock(clock)
    with _hooks(offline.model, hooked.end):
        _decode(offline, concurrency, num_steps, hooked)
    return Profile(concurrency=concurrency, phases=plain.medians_ms(PHASES), parts=hooked.medians_ms(PARTS))


def _decode(offline: OfflineEngine, concurrency: int, num_steps: int, phases: PhaseClock) -> PhaseClock:
    from outrider.verifier_service.engine.loop import update_frames
    from outrider.verifier_service.messages.engine import EngineUpdate, Published

    engine = offline.engine
    engine.on_phase = phases.end
    requests = [_request(index, offline) for index in range(concurrency)]
    for request in requests:
        if (refusal := engine.add(request)) is not None:
            raise ValueError(refusal.error)
    num_warm = 0
    while num_warm < WARM_STEPS or len(phases.steps) < num_steps:
        is_warm = num_warm < WARM_STEPS
        phases.begin()
        outputs = engine.step()
        if outputs:
            list(update_frames(EngineUpdate(outputs=tuple(map(Published.of, outputs)))))
            phases.end("publish")
        is_decoding = all(request.is_decoding for request in engine.requests.values())
        if is_warm or not is_decoding or not outputs:
            phases.steps.pop()
        num_warm += is_decoding and is_warm
    engine.on_phase = lambda name: None
    for request in requests:
        engine.cancel(request.request_id)
    return phases


def _request(index: int, offline: OfflineEngine) -> GenerationRequest:
    """Make a request that goes on for as long as the model allows, with a prompt that no other shares."""
    from outrider.verifier_service.messages.request import GenerationRequest, SamplingParams, SpeculationPlan

    length = offline.config.max_draft_length if offline.config.pools else 0
    return GenerationRequest(
        request_id=f"profile-{index}",
        prompt_token_ids=tuple(10 + (index * 31 + place * 7) % 200 for place in range(PROMPT_LENGTH)),
        sampling=SamplingParams(temperature=0.0, max_tokens=offline.max_model_len - PROMPT_LENGTH, ignore_eos=True),
        plan=SpeculationPlan(draft_length=length, is_pinned=length > 0),
    )


@contextlib.contextmanager
def _hooks(model: PackedModel, end: Callable[[str], None]) -> Iterator[None]:
    """Tell the parts of a forward as they end."""
    from outrider.verifier_service.model.decoder import Attention, Decoder, DecoderLayer
    from outrider.verifier_service.model.packed_linear import Int8Linear, PackedLinear, PanelLinear, PlainLinear

    if not isinstance(model, Decoder):
        raise ValueError("this architecture runs the library's code, which has no parts that we know")
    is_attending = False

    def enter(attends: bool) -> None:
        nonlocal is_attending
        is_attending = attends

    with contextlib.ExitStack() as hooks:

        def before(module: nn.Module, act: Callable[[], None]) -> None:
            hooks.callback(module.register_forward_pre_hook(lambda *_: act()).remove)

        def after(module: nn.Module, act: Callable[[], None]) -> None:
            hooks.callback(module.register_forward_hook(lambda *_: act()).remove)

        before(model, lambda: end("prepare"))
        for layer in model.layers:  # in one call a layer has no parts
            hooks.callback(setattr, layer, "whole", layer.whole)
            cast(DecoderLayer, layer).whole = None
        for module in model.modules():
            if isinstance(module, Attention):
                before(module, lambda: enter(True))
                after(module, lambda: enter(False))
            elif isinstance(module, Int8Linear | PackedLinear | PanelLinear | PlainLinear):
                before(module, lambda: end("attention" if is_attending else "rest of the model"))
                after(module, lambda: end("linear layers"))
        after(model, lambda: end("rest of the model"))
        yield


def to_markdown(profiles: Sequence[Profile]) -> str:
    """Write a row for each number of requests."""
    headings = ("requests", "step", *PHASES, *PARTS, "host")
    rows = [(str(own.concurrency), *(f"{value:.2f}" for value in _values(own))) for own in profiles]
    return "\n".join(markdown_table(headings, rows, num_left=0))


def _values(own: Profile) -> list[float]:
    return [own.step_ms, *own.phases.values(), *own.parts.values(), own.host_ms]
