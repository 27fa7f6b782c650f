"""A verifier with a drafter in its engine process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.drafter_service.service.drafter_spec import ColocatedSpec, DrafterSpec
from outrider.drafter_service.service.local_client import LocalDraftClient
from outrider.drafter_service.service.own_weights import DrafterControl, OwnWeights
from outrider.drafter_service.service.rank_main import build_draft_engine
from outrider.drafter_service.target.target_view import TargetView
from outrider.verifier_service.engine.engine import VerifierEngine
from outrider.verifier_service.engine.factory import AddedDrafter, run_verifier_rank
from outrider.verifier_service.engine.pipelined import PipelinedEngine
from outrider.verifier_service.messages.draft import LOCAL_DRAFTER_ID, DraftClient, DrafterEvent, VerifierMessage
from outrider.verifier_service.messages.engine import WeightChange
from outrider.verifier_service.model.ranks import RankSpec
from outrider.verifier_service.model.runner import ModelRunner, ParallelRunner
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup
from outrider.verifier_service.refit.rank_weights import RankWeights


class JoinedDraftClient:
    """A `DraftClient` of the drafter in this process and of drafters behind links."""

    def __init__(self, local: LocalDraftClient, links: DraftClient) -> None:
        self._local, self._links = local, links

    def send(self, drafter_id: str, messages: Sequence[VerifierMessage]) -> None:
        (self._local if drafter_id == LOCAL_DRAFTER_ID else self._links).send(drafter_id, messages)

    def poll(self) -> list[DrafterEvent]:
        return [*self._links.poll(), *self._local.poll()]


def open_local_drafter(
    spec: DrafterSpec,
    target: ParallelRunner,
    draft_model: ParallelRunner | None,
    change_model: Callable[[WeightChange], int] | None = None,
) -> tuple[LocalDraftClient, Callable[[VerifierEngine], None]]:
    """Build the drafter beside a loaded target; also return a function that gives it the engine, once built.

    `change_model` changes the weights of the draft model; None: they cannot change.
    """
    view, weights = TargetView(target), OwnWeights(spec.speculative, change_model)
    engine = build_draft_engine(spec, runner=draft_model, view=view, weights=weights)
    client = LocalDraftClient(engine, DrafterControl(engine, weights), begins_early=target.device.type != "cpu")

    def attach(verifier: VerifierEngine) -> None:
        view.attach(verifier)
        if isinstance(verifier, PipelinedEngine):
            verifier.drafts_here = client

    return client, attach


def run_colocated_rank(spec: ColocatedSpec, rank: RankSpec) -> None:
    """Run one rank of a verifier, on rank 0 with the drafter, until its shell, or rank 0, is gone."""

    def make_drafts(runner: ParallelRunner, links: DraftClient) -> AddedDrafter:
        draft_model, change_model = None, None
        if spec.drafter.loads_model:
            assert spec.drafter.model is not None
            share = ModelRunner(spec.drafter.model, TensorParallelGroup.single())
            draft_model, change_model = ParallelRunner(share), RankWeights(share).change
        local, attach = open_local_drafter(spec.drafter, runner, draft_model, change_model)
        return AddedDrafter(JoinedDraftClient(local, links), attach, local.change_weights)

    run_verifier_rank(spec.verifier, rank, make_drafts)
