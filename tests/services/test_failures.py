"""Every failure once, with real processes, and a rolling update; `make soak` repeats each failure twenty times."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import grpc
import pytest
from ray import serve

from outrider.cluster.config.service_config import APP_NAME
from outrider.cluster.replicas.app import build
from outrider.drafter_service.embedded import held_out_prompts
from outrider.proto import generation_pb2, generation_pb2_grpc
from services.external_drafter import FAULTS, Fault
from services.failures import (
    FLEET_CASES,
    LINK_CASES,
    PARALLEL_CASES,
    Case,
    DrafterDrill,
    Drill,
    Outcome,
    drafter_drill,
    fleet_drill,
    parallel_drill,
    require_unharmed,
)
from services.live_service import LiveService

# every replica that was lost starts again, on a busy machine in a minute
pytestmark = [pytest.mark.service, pytest.mark.timeout(600)]

MAX_PAUSE_S = 60.0  # the only verifier of a service starts again
MAX_DRAFTER_PAUSE_S = 3.0  # a round's deadline is at most 1 s
PROMPT = held_out_prompts()[0]
MAX_TOKENS = 120


@pytest.fixture(scope="module")
def drill(request: pytest.FixtureRequest) -> Iterator[Drill | DrafterDrill]:
    """What a test's `drills` names; the one before is closed first: two services in a process would share its Ray."""
    with request.param() as opened:
        yield opened


def drills(opener: Callable[[], AbstractContextManager[Drill | DrafterDrill]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("drill", [opener], indirect=True, ids=[opener.__name__])


def require_short_pause(outcome: Outcome, max_pause_s: float, *, num_failed: int = 0) -> None:
    require_unharmed(outcome, num_failed=num_failed)
    assert outcome.longest_pause_s < max_pause_s, outcome


@drills(fleet_drill)
@pytest.mark.parametrize("case", FLEET_CASES, ids=lambda case: case.name)
def test_a_fleet_loses_nothing(drill: Drill, case: Case):
    outcome = drill.run(case, index=0)
    require_short_pause(outcome, MAX_PAUSE_S, num_failed=case.num_failing_streams)


@drills(fleet_drill)
def test_a_rolling_update_loses_no_request(drill: Drill):
    """Every replica is replaced while requests come over HTTP and gRPC: none is lost, none changes."""
    service = drill.service
    drill.wait_until_whole()
    expected = service.stream(PROMPT, max_tokens=MAX_TOKENS, ignore_eos=True, disable_spec_decode=True).text
    before = replica_pids(service)
    is_updated = threading.Event()

    def ask(over_grpc: bool) -> list[str]:
        texts = []
        while not is_updated.is_set():
            if over_grpc:
                texts.append(generate_over_grpc(service))
            else:
                texts.append(service.stream(PROMPT, max_tokens=MAX_TOKENS, ignore_eos=True).text)
        return texts

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(ask, over_grpc) for over_grpc in (False, False, True, True)]
        try:
            changed = dataclasses.replace(service.config, max_num_batched_tokens=1024)
            serve.run(build(changed), name=APP_NAME, route_prefix="/")
            service.wait_for_fleet(2, 2)
            service.wait_for_drafts()
        finally:
            is_updated.set()
        texts = [text for client in clients for text in client.result(timeout=120)]
    assert len(texts) > len(clients), "requests went on during the update"
    assert set(texts) == {expected}
    assert before.isdisjoint(replica_pids(service)), "every replica was replaced"
    service.wait_until_idle()


def generate_over_grpc(service: LiveService) -> str:
    """Ask as clients that expect rolling updates do: a call that has not begun is sent again."""
    with grpc.insecure_channel(service.grpc_address) as channel:
        sampling = generation_pb2.SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
        request = generation_pb2.GenerateRequest(text=PROMPT, sampling=sampling)
        stream = generation_pb2_grpc.InferenceStub(channel).Generate(request, wait_for_ready=True, timeout=60)
        return "".join(chunk.text for chunk in stream)


def replica_pids(service: LiveService) -> set[int]:
    """Return the processes of every engine, and of the router and the gateway."""
    engines = [pid for name in ("Verifier", "Drafter") for pids in service.all_rank_pids(name) for pid in pids]
    return {*engines, service.call("Router", "pid"), service.call("Gateway", "pid")}


@drills(parallel_drill)
@pytest.mark.parametrize("case", PARALLEL_CASES, ids=lambda case: case.name)
def test_a_lost_rank_loses_nothing(drill: Drill, case: Case):
    require_short_pause(drill.run(case, index=0), MAX_PAUSE_S)


@drills(drafter_drill)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_bad_drafter_changes_nothing(drill: DrafterDrill, fault: Fault):
    require_short_pause(drill.run_fault(fault, index=0), MAX_DRAFTER_PAUSE_S)


@drills(drafter_drill)
@pytest.mark.parametrize("name", LINK_CASES)
def test_a_broken_link_changes_nothing(drill: DrafterDrill, name: str):
    require_short_pause(drill.run_link(name, index=0), MAX_DRAFTER_PAUSE_S)
