"""A pool whose drafts the price keeps off learns all the same: from the verifier's step to the learner's reservoir."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fakes.engine_bench import EngineBench, greedy_tokens, make_request
from outrider.cluster.replicas.learner_heartbeats import LearnerHeartbeats
from outrider.drafter_service.engine.learning_messages import SetLearning
from outrider.drafter_service.engine.messages import DrafterUpdate
from outrider.drafter_service.learning.learner import Learner
from outrider.drafter_service.learning.messages import DesiredState, Heartbeat, LearnerSettings
from outrider.drafter_service.learning.reservoir import Reservoir
from outrider.drafter_service.learning.version_registry import VersionRegistry
from outrider.drafter_service.observing.engine_learning import EngineLearning
from outrider.drafter_service.service.local_client import LocalDraftClient
from outrider.verifier_service.messages.draft import LOCAL_DRAFTER_ID, DraftNeeds
from outrider.verifier_service.messages.engine import ControlResult
from outrider.verifier_service.messages.request import DisabledReason
from outrider.verifier_service.pricing.draft_pricing import DraftPricing
from outrider.verifier_service.pricing.offer import Ask, AskLength
from tiny.scripted_drafter import ScriptedDrafter, scripted_engine

NUM_REQUESTS, NUM_TOKENS = 24, 12


class NothingPays(DraftPricing):
    """A price at which no draft is worth its verification."""

    def ask_all(self, asks: Sequence[Ask]) -> list[AskLength]:
        return [AskLength(0, DisabledReason.LOAD)] * len(asks)


class Pool:
    """A verifier, a drafter and a learner, with everything between them but the processes."""

    def __init__(self, folder: Path, needs: DraftNeeds) -> None:
        drafter = scripted_engine(ScriptedDrafter(needs=needs, vocab_size=97))
        drafter.needs = replace(needs, learns=True)
        self.drafter = drafter
        self.learning = EngineLearning(drafter, lambda folder: ScriptedDrafter(needs=needs))
        drafts = LocalDraftClient(drafter)
        self.bench = EngineBench(drafts=drafts, needs=needs, pricing=NothingPays())
        self.learner = Learner(
            pool="p",
            registry=VersionRegistry(folder, ""),
            reservoir=Reservoir(1 << 20),
            training=None,
            settings=LearnerSettings(),
            brings_texts=False,
            clock=lambda: 0.0,
            cpu_clock=lambda: 0.0,
            export_root=folder,
        )
        self.heartbeats = LearnerHeartbeats(
            "d", own_folder="", heartbeat=self.heartbeat, control=self.control, clock=lambda: 0.0
        )

    async def heartbeat(self, heartbeat: Heartbeat) -> DesiredState:
        self.learner.heartbeat(heartbeat)
        return self.learner.desired

    async def control(self, message: object) -> ControlResult:
        assert isinstance(message, SetLearning)
        self.learning.set(message)
        return ControlResult(call_id=message.call_id)

    async def serve(self, *, may_learn: bool) -> None:
        await self.heartbeats.heartbeat_once()  # the learner asks for samples
        for index in range(NUM_REQUESTS):
            request = make_request(
                f"r{index}", prompt=(5, 9, index), draft_length=3, drafter_id=LOCAL_DRAFTER_ID, max_tokens=NUM_TOKENS
            )
            assert self.bench.engine.add(replace(request, may_learn=may_learn)) is None
        self.bench.finish()
        self.bench.step()  # the drafter hears of the last ones
        samples, num_dropped = self.learning.take_samples()
        assert not num_dropped
        self.heartbeats.take(DrafterUpdate(samples=tuple(samples)))
        await self.heartbeats.heartbeat_once()


NEEDS = [DraftNeeds(), DraftNeeds(taps=(0,)), DraftNeeds(taps=(-1,), last_state_only=True)]


@pytest.mark.parametrize("needs", NEEDS, ids=["text", "states", "last_states"])
async def test_samples_of_every_request_arrive_though_no_draft_pays(tmp_path: Path, needs: DraftNeeds):
    pool = Pool(tmp_path / "registry", needs)
    await pool.serve(may_learn=True)
    assert pool.drafter.counters.num_drafts == 0, "nothing was drafted"
    assert pool.learner.status.num_seen == NUM_REQUESTS
    for kept in pool.learner._reservoir.texts(10_000):
        index = kept.token_ids[2]
        assert kept.token_ids == (5, 9, index, *greedy_tokens(NUM_TOKENS, (5, 9, index)))
        assert kept.num_prompt_tokens == 3
    assert len(pool.drafter._sessions) == 0


async def test_what_must_not_be_learnt_from_does_not_leave_the_verifier(tmp_path: Path):
    pool = Pool(tmp_path / "registry", DraftNeeds(taps=(0,)))
    await pool.serve(may_learn=False)
    assert pool.learner.status.num_seen == 0
    assert len(pool.drafter._sessions) == 0
