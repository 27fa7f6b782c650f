"""Failures of real processes and links, each driven against a live service while streams run.

`Drill.run` is one run of one case: streams begin, the failure strikes after some chunks, every stream is compared with
what plain decoding gives, the fleet is waited for. test_failures.py runs each case of a fleet once,
test_bad_drafters.py those of drafters and links, against a verifier without Ray; the soak runs all against whole
services, twenty times.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from ray import serve

from fakes.tcp_proxy import TcpProxy
from outrider.cluster.config.known_models import SMOLLM2
from outrider.cluster.config.service_config import APP_NAME
from outrider.cluster.replicas.app import build
from outrider.drafter_service.embedded import held_out_prompts
from outrider.lab.chat_prompts import PROMPTS
from services.external_drafter import HONEST, ExternalDrafter, Fault, external_drafter
from services.live_service import LiveService, SharedRay, Streamed
from services.local_verifier import LocalVerifier

MAX_TOKENS = 240
NUM_STREAMS = 4
STREAM_TIMEOUT_S = 120.0
ENGINE_TIMEOUT_S = 4.0
MAX_PAUSE_S = 60.0  # the only verifier of a service starts again
HANDOVER_STEP_S = 0.02
MAX_DRAFTER_PAUSE_S = 3.0  # a round's deadline is at most 1 s
SAMPLINGS: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"temperature": 0.8, "seed": 11})

PREFILL = "PrefillVerifier"  # deployment
NUM_DECODE = 2

Inject = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """One kind of failure; `prepare` looks up what to strike before the streams begin."""

    name: str
    prepare: Callable[[Any, int], Inject]  # of a `LiveService`, where it does more than to strike
    ends_streams: bool = False  # its clients are told so; everything else is invisible but for a pause
    strikes_early: bool = False  # as soon as the streams are asked for; else some chunks later

    @property
    def num_failing_streams(self) -> int:
        return NUM_STREAMS if self.ends_streams else 0


@dataclass(frozen=True)
class Outcome:
    """What one run did to its streams."""

    case: str
    num_hung: int
    num_lost: int  # tokens that plain decoding has and the stream has not
    num_doubled: int  # tokens that the stream has and plain decoding has not
    num_failed: int  # streams that ended in an error
    longest_pause_s: float
    recovered_s: float


def kill_rank(deployment: str, rank: int, number: int = signal.SIGKILL) -> Callable[[LiveService, int], Inject]:
    def prepare(service: LiveService, index: int) -> Inject:
        replicas = service.all_rank_pids(deployment)
        pid = replicas[index % len(replicas)][rank]
        return lambda: os.kill(pid, number)

    return prepare


def kill_replica(deployment: str) -> Callable[[LiveService, int], Inject]:
    def prepare(service: LiveService, index: int) -> Inject:
        pid = service.call(deployment, "pid")
        return lambda: os.kill(pid, signal.SIGKILL)

    return prepare


FLEET_CASES = (
    Case("drafter killed", kill_rank("Drafter", 0)),
    Case("drafter frozen (SIGSTOP)", kill_rank("Drafter", 0, signal.SIGSTOP)),
    Case("verifier's engine killed", kill_rank("Verifier", 0)),
    Case("whole verifier killed", kill_replica("Verifier")),
    Case("verifier frozen (SIGSTOP)", kill_rank("Verifier", 0, signal.SIGSTOP)),
    Case("router killed", kill_replica("Router")),
    Case("gateway killed", kill_replica("Gateway"), ends_streams=True),
)
REAL_CASES = tuple(
    case for case in FLEET_CASES if case.name in ("drafter killed", "whole verifier killed", "router killed")
)
VERIFIER_RANK_KILLED = Case("one TP rank of the only verifier killed", kill_rank("Verifier", 1))
PARALLEL_CASES = (Case("one TP rank of a drafter killed", kill_rank("Drafter", 1)), VERIFIER_RANK_KILLED)
LINK_CASES = ("link cut", "link half-open")


def within_handovers(
    strike: Callable[[LiveService, int], Inject],
) -> Callable[[LiveService, int], Inject]:
    """Strike a little later each time after prompts have come: while they are computed, sent, and taken over."""

    def prepare(service: LiveService, index: int) -> Inject:
        inject = strike(service, index)

        def later() -> None:
            time.sleep(HANDOVER_STEP_S * (1 + index % 20))
            inject()

        return later

    return prepare


def roll_out(service: LiveService, index: int) -> Inject:
    """Every verifier drains, one after another, while its requests run; all other replicas are replaced, too."""

    def inject() -> None:
        changed = service.config.with_options(drain_timeout_s=service.config.drain_timeout_s + 1 + index)
        serve.run(build(changed), name=APP_NAME, route_prefix="/")

    return inject


DECODE_KILLED = Case(
    "decode verifier's engine killed while it takes over",
    within_handovers(kill_rank("Verifier", 0)),
    strikes_early=True,
)
MOVED_DRAFTER_KILLED = Case("drafter of requests that were handed over killed", kill_rank("Drafter", 0))
HANDOVER_CASES = (
    Case(
        "prefill verifier's engine killed within a handover",
        within_handovers(kill_rank(PREFILL, 0)),
        strikes_early=True,
    ),
    Case(
        "whole prefill verifier killed within a handover", within_handovers(kill_replica(PREFILL)), strikes_early=True
    ),
    Case(
        "prefill verifier frozen (SIGSTOP) within a handover",
        within_handovers(kill_rank(PREFILL, 0, signal.SIGSTOP)),
        strikes_early=True,
    ),
    DECODE_KILLED,
    Case("verifiers drained with running requests", roll_out),
    MOVED_DRAFTER_KILLED,
)


def require_unharmed(outcome: Outcome, *, num_failed: int = 0, max_pause_s: float = math.inf) -> None:
    """Raise `AssertionError` unless no stream hung, changed or paused longer, and so many were told of a failure."""
    assert outcome.num_hung == outcome.num_lost == outcome.num_doubled == 0, outcome
    assert outcome.num_failed == num_failed, outcome
    assert outcome.longest_pause_s < max_pause_s, outcome


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The streams that are under way when a failure strikes: greedy and seeded ones in turn."""

    prompts: Sequence[str] = field(default_factory=held_out_prompts)
    num_streams: int = NUM_STREAMS
    max_tokens: int = MAX_TOKENS


class Drill:
    """Runs failures against one service and knows what its streams should have brought."""

    def __init__(
        self,
        service: LiveService | LocalVerifier,
        *,
        num_verifiers: int,
        num_drafters: int,
        traffic: Traffic | None = None,
    ) -> None:
        self.service = service
        self._size = (num_verifiers, num_drafters)
        self._expected: dict[int, Streamed] = {}
        self._traffic = traffic or Traffic()

    def run(self, case: Case, index: int) -> Outcome:
        """Strike once while all streams run."""
        self.wait_until_whole()
        for stream in range(self._traffic.num_streams):
            self._expect(stream)
        inject = case.prepare(self.service, index)
        streams = self._streams_around(inject, strike_at=0 if case.strikes_early else 3 + index % 8)
        begin_s = time.monotonic()
        self.wait_until_whole()
        return self._outcome(case.name, streams, time.monotonic() - begin_s)

    def wait_until_whole(self) -> None:
        """Wait until every replica is back, holds nothing, and drafts come again."""
        self.service.wait_for_fleet(*self._size)
        self.service.wait_for_drafts()
        self.service.wait_until_idle()

    def _expect(self, stream: int) -> None:
        if stream not in self._expected:
            self._expected[stream] = self._stream(stream, disable_spec_decode=True)

    def _stream(self, stream: int, **body: Any) -> Streamed:
        sampling = SAMPLINGS[stream % len(SAMPLINGS)]
        prompt = self._traffic.prompts[stream % len(self._traffic.prompts)]
        return self.service.stream(
            prompt, max_tokens=self._traffic.max_tokens, ignore_eos=True, return_token_ids=True, **sampling, **body
        )

    def _streams_around(self, inject: Inject, strike_at: int) -> list[Streamed | Exception | None]:
        """Run all streams and strike when the first has brought `strike_at` chunks; None: hung."""
        is_time = threading.Event()

        def count(num_chunks: int) -> None:
            if num_chunks == strike_at:
                is_time.set()

        streams = range(self._traffic.num_streams)
        with ThreadPoolExecutor(len(streams)) as pool:
            futures = [pool.submit(self._stream, stream, on_chunk=count) for stream in streams]
            assert strike_at == 0 or is_time.wait(30), "no stream began"
            inject()
            return [_result(future) for future in futures]

    def _outcome(self, name: str, streams: list[Streamed | Exception | None], recovered_s: float) -> Outcome:
        expected = {index: stream.token_ids for index, stream in self._expected.items()}
        return outcome_of(name, streams, expected, recovered_s)


def outcome_of(
    name: str, streams: list[Streamed | Exception | None], expected: Mapping[int, list[int]], recovered_s: float
) -> Outcome:
    """Compare what streams brought with what they should have brought, by index."""
    finished = {index: stream for index, stream in enumerate(streams) if isinstance(stream, Streamed)}
    changes = [_changes(expected[index], stream.token_ids) for index, stream in finished.items()]
    return Outcome(
        case=name,
        num_hung=sum(stream is None for stream in streams),
        num_lost=sum(lost for lost, _ in changes),
        num_doubled=sum(doubled for _, doubled in changes),
        num_failed=sum(isinstance(stream, Exception) for stream in streams),
        longest_pause_s=max((stream.longest_pause_s for stream in finished.values()), default=0.0),
        recovered_s=recovered_s,
    )


class HandoverDrill(Drill):
    """Requests whose prompts one verifier computes and another goes on with; their tokens are one verifier's own."""

    def num_handovers(self) -> dict[str, int]:
        """Return how many requests were handed over since the gateway began, by outcome."""
        assert isinstance(self.service, LiveService)
        text = httpx.get(f"{self.service.base_url}/metrics", timeout=30.0).text
        found = re.findall(r'^outrider_handovers_total{.*outcome="(\w+)".*} ([0-9.e+]+)$', text, re.MULTILINE)
        counts: Counter[str] = Counter()
        for outcome, count in found:
            counts[outcome] += int(float(count))
        return counts

    def _expect(self, stream: int) -> None:
        """Ask one verifier for all streams at once: this service would hand the request over, too."""
        if self._expected:
            return
        service = self.service
        with closing(LocalVerifier()) as alone:
            self.service = alone
            for each in range(self._traffic.num_streams):
                self._expected[each] = self._stream(each, disable_spec_decode=True)
        self.service = service


class DrafterDrill(Drill):
    """The failures of a drafter and of the link to it, played by a drafter in this process."""

    def __init__(self, service: LiveService | LocalVerifier, drafter: ExternalDrafter) -> None:
        super().__init__(service, num_verifiers=1, num_drafters=1)
        self._drafter = drafter
        self._proxy: TcpProxy | None = None

    def run_fault(self, fault: Fault, index: int) -> Outcome:
        """Turn a drafter that was honest into one with a fault; a wrong vocabulary is said at the handshake."""
        self._drafter.join(HONEST)
        strike = self._set if fault.vocab_fingerprint is None else self._drafter.join
        return self.run(Case(fault.name, lambda *_: lambda: strike(fault)), index)

    def run_link(self, name: str, index: int) -> Outcome:
        """Cut the link, or let it fall silent."""
        with self._proxied() as proxy:
            strike = proxy.cut if name == "link cut" else proxy.lose_packets
            return self.run(Case(name, lambda *_: strike), index)

    def wait_until_whole(self) -> None:
        """End the fault first: only then can the drafter be used again."""
        if self._proxy is not None:
            self._proxy.heal()
        self._drafter.port.fault = HONEST
        if self._drafter.is_refused:
            self._drafter.join(HONEST)
        super().wait_until_whole()

    def _set(self, fault: Fault) -> None:
        self._drafter.port.fault = fault

    @contextmanager
    def _proxied(self) -> Iterator[TcpProxy]:
        def route(endpoint: str) -> str:
            self._proxy = TcpProxy(endpoint)
            return self._proxy.address

        self._drafter.join(HONEST, route)
        assert self._proxy is not None
        try:
            yield self._proxy
        finally:
            self._drafter.leave()
            self._proxy.close()
            self._proxy = None


def _result(future: Any) -> Streamed | Exception | None:
    try:
        return future.result(timeout=STREAM_TIMEOUT_S)
    except TimeoutError:
        return None
    except (AssertionError, httpx.HTTPError) as error:
        return error


def _changes(expected: list[int], streamed: list[int]) -> tuple[int, int]:
    """Count the tokens that are missing from `streamed` and those that are too many."""
    blocks = difflib.SequenceMatcher(a=expected, b=streamed, autojunk=False).get_matching_blocks()
    num_common = sum(block.size for block in blocks)
    return len(expected) - num_common, len(streamed) - num_common


def fleet_service(shared_ray: SharedRay) -> LiveService:
    """Two verifiers and two drafters; in rollouts, so that a trainer may change their weights (trained.py)."""
    return shared_ray.service(num_verifiers=2, num_drafters=2, rollouts=True, engine_timeout_s=ENGINE_TIMEOUT_S)


def fleet_drill(shared_ray: SharedRay) -> Drill:
    """Two verifiers and two drafters."""
    return Drill(fleet_service(shared_ray), num_verifiers=2, num_drafters=2)


def handover_drill(shared_ray: SharedRay) -> HandoverDrill:
    """A verifier for prompts, two that decode, and two drafters; a prompt takes several steps."""
    service = shared_ray.service(
        num_prefill_verifiers=1,
        num_verifiers=NUM_DECODE,
        num_drafters=2,
        max_num_batched_tokens=64,
        engine_timeout_s=ENGINE_TIMEOUT_S,
    )
    texts = held_out_prompts()
    prompts = ["".join(texts[place : place + 3]) for place in range(0, 3 * NUM_STREAMS, 3)]
    traffic = Traffic(prompts=prompts, max_tokens=MAX_TOKENS)
    return HandoverDrill(service, num_verifiers=1 + NUM_DECODE, num_drafters=2, traffic=traffic)


def real_drill(shared_ray: SharedRay) -> Drill:
    """Two verifiers of SmolLM2 and two drafters with its EAGLE-3 head, eight streams."""
    prompts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
    service = shared_ray.service(model=SMOLLM2, dtype="float32", num_verifiers=2, num_drafters=2, max_model_len=1024)
    traffic = Traffic(prompts=prompts, num_streams=8, max_tokens=96)
    return Drill(service, num_verifiers=2, num_drafters=2, traffic=traffic)


def parallel_drill(shared_ray: SharedRay) -> Drill:
    """One verifier of two ranks and one drafter of two ranks."""
    service = shared_ray.service(tensor_parallel_size=2, draft_tensor_parallel_size=2)
    return Drill(service, num_verifiers=1, num_drafters=1)


@contextmanager
def drafter_drill(shared_ray: SharedRay) -> Iterator[DrafterDrill]:
    """One verifier of a whole service, and a drafter in this process."""
    service = shared_ray.service(num_drafters=0, wait_for_drafts=False)
    with external_drafter(service) as drafter:
        yield DrafterDrill(service, drafter)


@contextmanager
def local_drill() -> Iterator[DrafterDrill]:
    """One verifier without Ray, and a drafter in this process."""
    with closing(LocalVerifier()) as verifier, external_drafter(verifier) as drafter:
        yield DrafterDrill(verifier, drafter)
