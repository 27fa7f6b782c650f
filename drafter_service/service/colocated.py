"""A verifier with a drafter in its engine process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.drafter_service.service.drafter_spec import ColocatedSpec, DrafterSpec
from outrider.drafter_service.service.local_client import LocalDraftClient
from outrider.drafter_service.service.rank_main import build_draft_engine
from outrider.drafter_service.target.target_view import TargetView
from outrider.verifier_service.engine.engine import VerifierEngine
from outrider.verifier_service.engine.factory import run_verifier_rank
from outrider.verifier_service.messages.draft import LOCAL_DRAFTER_ID, DraftClient, DrafterEvent, VerifierMessage
from outrider.verifier_service.model.ranks import RankSpec
from outrider.verifier_service.model.runner import ModelRunner, ParallelRunner
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup


class JoinedDraftClient:
    """A `DraftClient` of the drafter in this process and of drafters behind links."""

    def __init__(self, local: LocalDraftClient, links: DraftClient) -> None:
        self._local, self._links = local, links

    def send(self, drafter_id: str, messages: Sequence[VerifierMessage]) -> None:
        (self._local if drafter_id == LOCAL_DRAFTER_ID else self._links).send(drafter_id, messages)

    def poll(self) -> list[DrafterEvent]:
        return [*self._links.poll(), *self._local.poll()]


def open_local_drafter(
    spec: DrafterSpec, target: ParallelRunner, draft_model: ParallelRunner | None
) -> tuple[LocalDraftClient, Callable[[VerifierEngine], None]]:
    """Build the drafter beside a loaded target; also return a function that gives it the engine, once built."""
    view = TargetView(target)
    return LocalDraftClient(build_draft_engine(spec, runner=draft_model, view=view)), view.attach


def _load_draft_model(spec: DrafterSpec) -> ParallelRunner | None:
    if not spec.loads_model:
        return None
    assert spec.model is not None
    return ParallelRunner(ModelRunner(spec.model, TensorParallelGroup.single()))


def run_colocated_rank(spec: ColocatedSpec, rank: RankSpec) -> None:
    """Run one rank of a verifier, on rank 0 with the drafter, until its shell, or rank 0, is gone."""

    def make_drafts(runner: ParallelRunner, links: DraftClient) -> tuple[DraftClient, Callable[[VerifierEngine], None]]:
        local, attach = open_local_drafter(spec.drafter, runner, _load_draft_model(spec.drafter))
        return JoinedDraftClient(local, links), attach

    run_verifier_rank(spec.verifier, rank, make_drafts)
