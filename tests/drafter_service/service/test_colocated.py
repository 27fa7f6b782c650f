from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from fakes.engine_bench import MemoryDrafts
from outrider.drafter_service.service.colocated import JoinedDraftClient, open_local_drafter
from outrider.drafter_service.service.drafter_spec import DrafterSpec, num_scratch_blocks
from outrider.drafter_service.service.local_client import LocalDraftClient
from outrider.drafter_service.service.speculative_config import Location, Method, SpeculativeConfig
from outrider.verifier_service.engine.factory import build_engine
from outrider.verifier_service.engine.verifier_spec import VerifierSpec
from outrider.verifier_service.messages.draft import LOCAL_DRAFTER_ID, Close, DraftClient, DrafterEvent, VerifierMessage
from outrider.verifier_service.messages.request import GenerationRequest, SamplingParams, SpeculationPlan
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.runner import ModelRunner, ParallelRunner
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup
from tiny.models import make_checkpoint


class Recording:
    """Half of a joined client."""

    def __init__(self, drafter_id: str) -> None:
        self.sent: list[tuple[str, VerifierMessage]] = []
        self.event = DrafterEvent(drafter_id=drafter_id)

    def send(self, drafter_id: str, messages: Sequence[VerifierMessage]) -> None:
        self.sent.extend((drafter_id, message) for message in messages)

    def poll(self) -> list[DrafterEvent]:
        return [self.event]


def test_messages_go_to_the_drafter_that_they_name_and_events_come_from_all():
    local, links = Recording(LOCAL_DRAFTER_ID), Recording("far")
    joined = JoinedDraftClient(local, links)
    for drafter_id in (LOCAL_DRAFTER_ID, "far", "farther"):
        joined.send(drafter_id, [Close(request_id=drafter_id)])
    assert [to for to, _ in local.sent] == [LOCAL_DRAFTER_ID]
    assert [to for to, _ in links.sent] == ["far", "farther"]
    assert {event.drafter_id for event in joined.poll()} == {LOCAL_DRAFTER_ID, "far"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    make_checkpoint(path, num_hidden_layers=3)
    return path


@pytest.mark.parametrize("method", [Method.NGRAM, Method.EARLY_EXIT, Method.DRAFT_MODEL])
def test_a_drafter_beside_the_target_drafts_and_one_behind_a_link_may_too(folder: Path, method: Method):
    speculative = SpeculativeConfig(method=method, location=Location.VERIFIER)
    target = ModelConfig(path=str(folder), num_kv_blocks=32, block_size=4, device="cpu", max_model_len=64)
    spec = DrafterSpec(model=target, target=target, speculative=speculative, sampling_seed=1)
    scratch = num_scratch_blocks(spec, 4, 8)
    model = ModelConfig(
        path=str(folder),
        num_kv_blocks=32,
        block_size=4,
        device="cpu",
        max_model_len=64,
        num_scratch_blocks=scratch,
    )
    runner = ParallelRunner(ModelRunner(model, TensorParallelGroup.single()))
    draft_model = ParallelRunner(ModelRunner(target, TensorParallelGroup.single())) if spec.loads_model else None
    local, attach = open_local_drafter(spec, runner, draft_model)
    links = MemoryDrafts()
    links.events.append(DrafterEvent(drafter_id="far"))
    tokens = {name: generated(runner, client, attach) for name, client in clients_of(local, links).items()}
    assert tokens["joined"] == tokens["alone"]


def clients_of(local: LocalDraftClient, links: DraftClient) -> dict[str, DraftClient]:
    return {"joined": JoinedDraftClient(local, links), "alone": MemoryDrafts()}


def generated(runner: ParallelRunner, client: DraftClient, attach) -> list[int]:
    """Decode greedily; with the drafter, its drafts are verified and some of them are right."""
    engine = build_engine(runner, VerifierSpec(model=ModelConfig(path="loaded already")), client)
    attach(engine)
    request = GenerationRequest(
        request_id="r",
        prompt_token_ids=(5, 6, 7, 5, 6, 7, 5, 6),
        sampling=SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
        plan=SpeculationPlan(drafter_id=LOCAL_DRAFTER_ID, draft_length=3),
    )
    assert engine.add(request) is None
    outputs = [output for _ in range(30) for output in engine.step() or []]
    engine.check_integrity()
    assert not engine.has_work()
    metrics = outputs[-1].speculation
    assert metrics.enabled == isinstance(client, JoinedDraftClient)
    assert (metrics.num_draft_tokens > 0) == metrics.enabled
    return [token_id for output in outputs for token_id in output.token_ids]
