"""Every failure of a fleet once, with real processes, a rolling update, and a trainer; `make soak` repeats them.

Ranks: test_parallel_service.py. Drafters and links: test_bad_drafters.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from ray import serve

from outrider.cluster.config.service_config import APP_NAME
from outrider.cluster.replicas.app import build
from outrider.drafter_service.embedded import held_out_prompts
from outrider.proto import generation_pb2, generation_pb2_grpc
from services.failures import (
    DECODE_KILLED,
    FLEET_CASES,
    MAX_PAUSE_S,
    MOVED_DRAFTER_KILLED,
    NUM_STREAMS,
    Case,
    Drill,
    HandoverDrill,
    fleet_drill,
    handover_drill,
    require_unharmed,
)
from services.live_service import LiveService, SharedRay
from services.trained import TAKEN, TRAINER_KILLED, VERIFIER_KILLED, TrainedDrill, trained_drill

# every replica that was lost starts again, on a busy machine in a minute
pytestmark = [pytest.mark.service, pytest.mark.timeout(600)]

PROMPT = held_out_prompts()[0]
MAX_TOKENS = 120


@pytest.fixture(scope="module")
def fleet(shared_ray: SharedRay) -> Drill:
    return fleet_drill(shared_ray)


@pytest.mark.parametrize("case", FLEET_CASES, ids=lambda case: case.name)
def test_a_fleet_loses_nothing(fleet: Drill, case: Case):
    require_unharmed(fleet.run(case, index=0), num_failed=case.num_failing_streams, max_pause_s=MAX_PAUSE_S)


def test_a_rolling_update_loses_no_request(fleet: Drill):
    """Every replica is replaced while requests come over HTTP and gRPC: none is lost, none changes."""
    service = fleet.service
    fleet.wait_until_whole()
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
            changed = service.config.with_options(max_num_batched_tokens=1024)
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


@pytest.fixture(scope="module")
def trained(shared_ray: SharedRay, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainedDrill]:
    with trained_drill(shared_ray, tmp_path_factory.mktemp("weights")) as drill:
        yield drill


@pytest.mark.parametrize("case", [TAKEN, VERIFIER_KILLED, TRAINER_KILLED], ids=lambda case: case.name)
def test_a_fleet_in_training_loses_nothing(trained: TrainedDrill, case: Case):
    """The fleet above; a trainer changes its weights, and processes end meanwhile."""
    require_unharmed(trained.run(case, index=1), max_pause_s=MAX_PAUSE_S)


@pytest.fixture(scope="module")
def handovers(shared_ray: SharedRay) -> HandoverDrill:
    return handover_drill(shared_ray)


@pytest.mark.parametrize("case", [DECODE_KILLED, MOVED_DRAFTER_KILLED], ids=lambda case: case.name)
def test_a_handover_loses_nothing(handovers: HandoverDrill, case: Case):
    """Draining is the rolling update above; givers that die are in the soak: their restart takes long."""
    handovers.wait_until_whole()
    before = handovers.num_handovers()
    require_unharmed(handovers.run(case, index=4), max_pause_s=MAX_PAUSE_S)
    if case is MOVED_DRAFTER_KILLED:  # which leaves every handover alone
        assert handovers.num_handovers()["taken"] >= before["taken"] + NUM_STREAMS
