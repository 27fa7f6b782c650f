"""A verifier's engine without a model: a forward is a pause, and what it would have chosen is known.

Scheduler, KV books, step loop, grammars, log probabilities and the frames to the shell are the real ones, so that what
a rank takes here is what ours takes beside its forward. Log probabilities are of a uniform law. Masks of grammars are
made, and not followed: a request whose script breaks its grammar ends with an error.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from outrider.lab.gateway.played_spec import Asked, OnTime, PlayedSpec
from outrider.verifier_service.engine.engine import VerifierEngine
from outrider.verifier_service.engine.factory import build_engine
from outrider.verifier_service.engine.loop import EngineLoop
from outrider.verifier_service.links.relay_client import RelayDraftClient
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.messages.engine import EngineReady
from outrider.verifier_service.messages.request import Request
from outrider.verifier_service.messages.tree import VerifiedTokens
from outrider.verifier_service.messages.wire import encode
from outrider.verifier_service.model.ranks import RankSpec, connect, keep_loaded
from outrider.verifier_service.model.state_pool import StatePool
from outrider.verifier_service.model.tokenizer import load_tokenizer
from outrider.verifier_service.sampling.entries import VerificationEntry
from outrider.verifier_service.sampling.unread import UnreadTokens
from outrider.verifier_service.sampling.verification import DoneVerification
from outrider.verifier_service.start_phases import begin_phases, tell_phase

BLOCK_SIZE = 16
NUM_BLOCKS = 1 << 18  # 4 M tokens: nobody is preempted


class Voice(Protocol):
    """Whoever knows what requests say."""

    def next_token(self, request: Request) -> int:
        """Return the token after those that a request has."""

    def forget(self, requests: Mapping[str, Request]) -> None:
        """Forget all requests but these."""


class TimedVoice:
    """Says the same to everybody; see `OnTime`."""

    def __init__(self, says: OnTime) -> None:
        self._token_ids = says.token_ids

    def next_token(self, request: Request) -> int:
        return self._token_ids[request.num_output_tokens % len(self._token_ids)]

    def forget(self, requests: Mapping[str, Request]) -> None:
        """Do nothing: nothing is known of any."""


class ScriptedVoice:
    """Says one sequence to each, which is chosen at its first token; see `Scripted` and `Asked`."""

    def __init__(self, choose: Callable[[Request], Sequence[int]], eos_token_id: int) -> None:
        self._choose = choose
        self._eos_token_id = eos_token_id
        self._scripts: dict[str, Sequence[int]] = {}  # of running requests

    def next_token(self, request: Request) -> int:
        script = self._scripts.get(request.request_id)
        if script is None:
            script = self._scripts[request.request_id] = self._choose(request)
        place = request.num_output_tokens
        return script[place] if place < len(script) else self._eos_token_id

    def forget(self, requests: Mapping[str, Request]) -> None:
        if not self._scripts.keys() <= requests.keys():
            self._scripts = {name: script for name, script in self._scripts.items() if name in requests}


def voice_of(spec: PlayedSpec) -> Voice:
    """Return who speaks."""
    if isinstance(spec.says, OnTime):
        return TimedVoice(spec.says)
    if isinstance(spec.says, Asked):
        return ScriptedVoice(_asked(spec.says, load_tokenizer(spec.verifier.model)), spec.eos_token_ids[0])
    turns = itertools.cycle(spec.says.sequences)
    return ScriptedVoice(lambda request: next(turns), spec.eos_token_ids[0])


def _asked(says: Asked, tokenizer: Any) -> Callable[[Request], Sequence[int]]:
    def choose(request: Request) -> Sequence[int]:
        prompt = tokenizer.decode(request.token_ids[: request.num_prompt_tokens])
        return next(sequence for text, sequence in says.replies if text in prompt)

    return choose


class PlayedRunner:
    """A `Runner` whose forward is a pause; its `verify` is the engine's."""

    block_size, num_blocks = BLOCK_SIZE, NUM_BLOCKS
    states: StatePool | None = None

    def __init__(self, spec: PlayedSpec, *, pause: Callable[[float], None] = time.sleep) -> None:
        self.vocab_size, self.max_model_len = spec.vocab_size, spec.max_model_len
        self.eos_token_ids = spec.eos_token_ids
        self.requests: Mapping[str, Request] = {}  # the engine's
        self._step_s, self._pause = spec.step_s, pause
        self._voice = voice_of(spec)
        self._logits = torch.zeros(1, spec.vocab_size)  # float32

    def execute(self, batch: ScheduledBatch, chosen: torch.Tensor | None = None) -> torch.Tensor:
        """Return the same row for all, float32 [len(batch.logits_indices), vocab_size], in the memory of one."""
        if self._step_s:
            self._pause(self._step_s)
        return self._logits.expand(len(batch.logits_indices), -1)

    def verify(
        self,
        logits: torch.Tensor,
        entries: Sequence[VerificationEntry],
        rng: torch.Generator,
        rows: Sequence[int] | None = None,
        unread: UnreadTokens | None = None,
    ) -> DoneVerification:
        """Choose what the voice says, without a look at the logits."""
        # an entry does not name its request, but its sampling parameters are that request's own object
        asking = {id(request.sampling): request for request in self.requests.values()}
        said = [self._voice.next_token(asking[id(entry.sampling)]) for entry in entries]
        self._voice.forget(self.requests)
        return DoneVerification([VerifiedTokens([token_id], ()) for token_id in said], None)


def played_engine(spec: PlayedSpec, links: RelayDraftClient, runner: PlayedRunner) -> VerifierEngine:
    """Return the engine around a played runner, which gets to know its requests."""
    engine = build_engine(runner, spec.verifier, links, verify=runner.verify)
    runner.requests = engine.requests
    return engine


def run_played_rank(spec: PlayedSpec, rank: RankSpec) -> None:
    """Run as the only rank of a verifier until its shell goes away."""
    begin_phases("verifier", "playing its model")
    runner, links = PlayedRunner(spec), RelayDraftClient()
    engine = played_engine(spec, links, runner)
    keep_loaded()
    shell = connect(rank.shell_address)
    ready = EngineReady(
        vocab_size=runner.vocab_size,
        max_model_len=runner.max_model_len,
        eos_token_ids=runner.eos_token_ids,
        num_kv_blocks=runner.num_blocks,
        step_times=(),
    )
    shell.send_bytes(encode(ready))
    tell_phase("ready")
    with contextlib.closing(links):
        EngineLoop(engine, links, shell, clock=time.monotonic).run()
