"""Loads a live service over both protocols, and reads what its processes hold. One thread per client."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from outrider.proto import generation_pb2, generation_pb2_grpc
from outrider.proto.generation_pb2 import GenerateRequest
from services.live_service import LiveService, SharedRay

ANSWER_TIMEOUT_S = 120.0
NUM_EQUAL_LOOKS = 3
MAX_GROWTH = 1.1  # of resident memory, after a warm-up
STATM_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
MAX_NUM_SEQS = 16
MAX_QUEUED = 192


def loaded_service(shared_ray: SharedRay) -> LiveService:
    """Return a service whose engines check their books after each step, and whose queues are soon full."""
    return shared_ray.service(
        check_integrity=True,
        max_num_seqs=MAX_NUM_SEQS,
        max_queued_requests=MAX_QUEUED,
        kv_cache_memory_bytes=64 << 20,
    )


@dataclass(frozen=True)
class Ask:
    """A prompt and how to go on from it."""

    prompt: str | tuple[int, ...]
    max_tokens: int
    seed: int | None = None  # None: greedy
    priority: int = 0

    @property
    def body(self) -> dict[str, Any]:
        """The fields of an OpenAI completion."""
        sampling = {"temperature": 0} if self.seed is None else {"temperature": 0.8, "seed": self.seed}
        limits = {"max_tokens": self.max_tokens, "ignore_eos": True, "priority": self.priority}
        return {"prompt": self.prompt, **limits, **sampling}

    @property
    def message(self) -> GenerateRequest:
        sampling = generation_pb2.SamplingParams(
            max_tokens=self.max_tokens, ignore_eos=True, temperature=0.0 if self.seed is None else 0.8, seed=self.seed
        )
        if isinstance(self.prompt, str):
            return GenerateRequest(text=self.prompt, sampling=sampling, priority=self.priority)
        token_ids = generation_pb2.TokenIds(ids=self.prompt)
        return GenerateRequest(token_ids=token_ids, sampling=sampling, priority=self.priority)


def asks_of(prompts: Sequence[str], max_tokens: int) -> list[Ask]:
    """Return a greedy ask and a seeded one for each prompt."""
    return [Ask(prompt, max_tokens, seed) for prompt in prompts for seed in (None, 7)]


def short_asks(prompts: Sequence[str]) -> list[Ask]:
    """Return asks for one token, for two, and for as many as it takes for a draft."""
    return [Ask(prompt, num, seed) for prompt in prompts for num, seed in ((1, None), (2, 5), (6, None))]


@dataclass(frozen=True)
class Answer:
    """What an HTTP request was answered with."""

    status: int
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def text(self) -> str:
        assert self.status == 200, self.body
        return self.body["choices"][0]["text"]


class Client(Protocol):
    def complete(self, ask: Ask) -> str: ...

    def close(self) -> None: ...


class HttpClient:
    """One kept-alive connection."""

    def __init__(self, service: LiveService) -> None:
        config = service.config
        self._model = config.model.name
        self._connection = http.client.HTTPConnection(config.host, config.port, timeout=ANSWER_TIMEOUT_S)

    def post(self, ask: Ask) -> Answer:
        body = json.dumps({"model": self._model, **ask.body})
        self._connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, headers, json.loads(response.read()))

    def complete(self, ask: Ask) -> str:
        return self.post(ask).text

    def close(self) -> None:
        self._connection.close()


def post(service: LiveService, ask: Ask) -> Answer:
    """Ask once over HTTP, whatever the answer."""
    with closing(HttpClient(service)) as client:
        return client.post(ask)


class GrpcClient:
    """One channel."""

    def __init__(self, service: LiveService) -> None:
        # channels to one address share a connection unless told otherwise
        self._channel = grpc.insecure_channel(service.grpc_address, options=[("grpc.use_local_subchannel_pool", 1)])
        self.stub = generation_pb2_grpc.InferenceStub(self._channel)

    def complete(self, ask: Ask) -> str:
        return self.stub.GenerateUnary(ask.message, timeout=ANSWER_TIMEOUT_S).choices[0].text

    def stream(self, ask: Ask, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        """Return the call, which iterates over the chunks."""
        return self.stub.Generate(ask.message, timeout=timeout_s)

    def unary(self, ask: Ask) -> Any:
        """Return the future of an answer."""
        return self.stub.GenerateUnary.future(ask.message, timeout=ANSWER_TIMEOUT_S)

    def close(self) -> None:
        self._channel.close()


@contextmanager
def grpc_client(service: LiveService) -> Iterator[GrpcClient]:
    client = GrpcClient(service)
    try:
        yield client
    finally:
        client.close()


@contextmanager
def busy_verifier(service: LiveService, num_running: int, max_tokens: int) -> Iterator[None]:
    """Keep so many requests running: until they are cancelled at the end, others have to wait behind them."""
    with grpc_client(service) as client:
        calls = [client.stream(Ask("import os\n", max_tokens, seed)) for seed in range(num_running)]
        for call in calls:
            next(call)
        try:
            yield
        finally:
            for call in calls:
                call.cancel()


def expected_texts(service: LiveService, asks: Sequence[Ask]) -> dict[Ask, str]:
    """Return what each ask is answered with when it is alone and nothing is drafted."""
    return {ask: service.stream(disable_spec_decode=True, **ask.body).text for ask in asks}


@dataclass(frozen=True)
class LoadResult:
    """What became of many short requests."""

    latencies_s: tuple[float, ...]
    num_wrong: int  # answered with another text than alone
    errors: tuple[str, ...]
    elapsed_s: float

    def latency_ms(self, share: float) -> float:
        """Return the latency that this share of the requests did not exceed."""
        ordered = sorted(self.latencies_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3

    @property
    def requests_per_s(self) -> float:
        return len(self.latencies_s) / self.elapsed_s


class ClosedLoop:
    """Ask one after another from each of `concurrency` clients, every other one over gRPC."""

    def __init__(self, service: LiveService, expected: dict[Ask, str], concurrency: int) -> None:
        self._expected = expected
        self._asks = itertools.cycle(expected)
        self._lock = threading.Lock()
        kinds = itertools.cycle((HttpClient, GrpcClient))
        self._clients: list[Client] = [kind(service) for kind, _ in zip(kinds, range(concurrency), strict=False)]
        self._latencies_s: list[float] = []
        self._num_wrong = 0
        self._errors: list[str] = []
        self._is_stopped = False

    def run(self, is_over: Callable[[], bool]) -> LoadResult:
        """Ask until `is_over()`, which is called once before each request, one call at a time."""
        begin_s = time.monotonic()
        with ThreadPoolExecutor(len(self._clients)) as pool:
            futures = [pool.submit(self._ask_all, client, is_over) for client in self._clients]
            try:
                for future in futures:
                    future.result()
            finally:
                self._is_stopped = True  # at Ctrl-C too
        return LoadResult(
            tuple(self._latencies_s), self._num_wrong, tuple(self._errors), elapsed_s=time.monotonic() - begin_s
        )

    def _ask_all(self, client: Client, is_over: Callable[[], bool]) -> None:
        try:
            while (ask := self._next(is_over)) is not None:
                self._ask(client, ask)
        finally:
            client.close()

    def _next(self, is_over: Callable[[], bool]) -> Ask | None:
        with self._lock:
            return None if self._is_stopped or is_over() else next(self._asks)

    def _ask(self, client: Client, ask: Ask) -> None:
        begin_s = time.monotonic()
        try:
            text = client.complete(ask)
        except (AssertionError, OSError, http.client.HTTPException, grpc.RpcError) as error:
            self._errors.append(f"{type(error).__name__}: {error}"[:300])
            return
        self._latencies_s.append(time.monotonic() - begin_s)
        self._num_wrong += text != self._expected[ask]


def ask_many(service: LiveService, expected: dict[Ask, str], *, num_requests: int, concurrency: int) -> LoadResult:
    """Ask so many times, the asks in turn; HTTP keep-alive and gRPC half and half."""
    left = iter(range(num_requests))
    return ClosedLoop(service, expected, concurrency).run(lambda: next(left, None) is None)


def stream_all(service: LiveService, asks: Sequence[Ask]) -> list[str]:
    """Stream all asks at once over HTTP and gRPC by turns; return their texts."""

    def over_grpc(ask: Ask) -> str:
        return "".join(chunk.text for chunk in client.stream(ask))

    def over_http(ask: Ask) -> str:
        return service.stream(**ask.body).text

    with grpc_client(service) as client, ThreadPoolExecutor(len(asks)) as pool:
        ways = itertools.cycle((over_http, over_grpc))
        futures = [pool.submit(way, ask) for way, ask in zip(ways, asks, strict=False)]
        return [future.result() for future in futures]


@dataclass(frozen=True)
class Process:
    """What one process of a service holds."""

    pid: int
    rss_bytes: int
    num_fds: int


def processes(service: LiveService) -> dict[str, Process]:
    """Look at every process of a service with one replica of everything."""
    pids = {
        "gateway": service.call("Gateway", "pid"),
        "router": service.call("Router", "pid"),
        "verifier shell": service.call("Verifier", "pid"),
        "verifier engine": service.call("Verifier", "rank_pids")[0],
        "drafter shell": service.call("Drafter", "pid"),
        "drafter engine": service.call("Drafter", "rank_pids")[0],
    }
    return {name: _process(pid) for name, pid in pids.items()}


def _process(pid: int) -> Process:
    with open(f"/proc/{pid}/statm", encoding="ascii") as statm:
        num_resident_pages = int(statm.read().split()[1])
    return Process(pid, num_resident_pages * STATM_PAGE_BYTES, len(os.listdir(f"/proc/{pid}/fd")))


def settled_processes(service: LiveService, timeout_s: float = 30.0) -> dict[str, Process]:
    """Look again and again until no descriptor opens or closes any more: connections take a moment to close."""
    deadline_s = time.monotonic() + timeout_s
    looks = [processes(service)]
    while len(looks) < NUM_EQUAL_LOOKS or len({_num_fds(look) for look in looks[-NUM_EQUAL_LOOKS:]}) > 1:
        assert time.monotonic() < deadline_s, f"descriptors do not settle: {looks[-1]}"
        time.sleep(0.5)
        looks.append(processes(service))
    return looks[-1]


def _num_fds(held: dict[str, Process]) -> tuple[int, ...]:
    return tuple(process.num_fds for process in held.values())


def require_flat(before: dict[str, Process], after: dict[str, Process]) -> None:
    """Raise `AssertionError` unless the same processes hold as many descriptors and hardly more memory."""
    for name, process in after.items():
        change = f"{name}: {before[name]} -> {process}"
        assert process.pid == before[name].pid, change
        assert process.num_fds == before[name].num_fds, change
        assert process.rss_bytes < MAX_GROWTH * before[name].rss_bytes, change
