"""Who changes a live service's weights while streams run, a trainer or a learner, and what goes wrong with it.

All of a trainer's updates bring the very weights that are there, under versions of their own: so every stream must have
the tokens of plain decoding, whichever versions drew them, and what counts is that none is lost. That other weights
give other tokens: tests/cluster/api/rollouts, and the study `updates`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from outrider.cluster.config.pool_options import checkpoint_of
from outrider.drafter_service.learning.messages import FIRST_VERSION
from services.failures import ENGINE_TIMEOUT_S, Case, Drill, Inject, fleet_service, kill_rank, kill_replica
from services.live_service import LiveService, SharedRay, wait_for
from tiny.refits import trainer

NUM_VERIFIERS = 2
CALL_TIMEOUT_S = 120.0
CATCH_UP_TIMEOUT_S = 90.0
UPDATE = "/update_weights_from_disk"


class TrainedDrill(Drill):
    """After each failure all verifiers must serve one version: the last that any of them took."""

    def wait_until_whole(self) -> None:
        super().wait_until_whole()
        assert isinstance(self.service, LiveService)
        wait_for(lambda: len(_versions(self.service)) == 1, CATCH_UP_TIMEOUT_S)
        body = {"text": "import os\n", "sampling_params": {"max_new_tokens": 2}}
        drawn = _post(self.service, "/generate", body).json()["meta_info"]["weight_version"]
        assert {drawn} == _versions(self.service)


def _versions(service: Any) -> set[str]:
    loads = [state.report.load for state in service.call("Router", "snapshot").verifiers]
    assert not any(load.weights_error for load in loads)
    return {load.weight_version for load in loads}


def _post(service: LiveService, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{service.base_url}{path}", json=body, timeout=CALL_TIMEOUT_S)


def _update(service: LiveService, folder: str | None = None) -> httpx.Response:
    return _post(service, UPDATE, {"model_path": folder or service.config.model.target_path})


def _takes_weights(service: LiveService, index: int) -> Inject:
    def inject() -> None:
        assert _update(service).status_code == 200

    return inject


def _while_updating(
    strike: Callable[[LiveService, int], Inject], update: Callable[[LiveService], object] = _update
) -> Callable[[LiveService, int], Inject]:
    """Strike a little later in an update each time. Whether the update succeeds is open: it ends."""

    def prepare(service: LiveService, index: int) -> Inject:
        inject = strike(service, index)

        def during() -> None:
            updating = threading.Thread(target=update, args=(service,))
            updating.start()
            time.sleep(0.01 * (index % 10))
            inject()
            updating.join(CALL_TIMEOUT_S)
            assert not updating.is_alive()

        return during

    return prepare


def _cut_checkpoint(service: LiveService, index: int) -> Inject:
    """A folder whose tensors end too early is refused whole."""

    def inject() -> None:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(shutil.copytree(service.config.model.target_path, Path(folder) / "cut"))
            tensors = copy / "model.safetensors"
            os.truncate(tensors, tensors.stat().st_size - 4096)
            assert _update(service, str(copy)).status_code == 400

    return inject


def _trainer_dies(service: LiveService, index: int) -> Inject:
    """A trainer joins, sends a part, and dies within the next broadcast; the weights stay the old ones."""

    def inject() -> None:
        folder = service.config.model.target_path
        with trainer(num_ranks=NUM_VERIFIERS) as training:
            joining = training.joins()
            fields = ("master_address", "master_port", "rank_offset", "world_size", "group_name", "backend")
            body = {name: getattr(joining, name) for name in fields}
            answer = _post(service, "/init_weights_update_group", body)
            assert answer.status_code == 200, answer.text
            first, second = training.buckets(folder, 2)
            assert _receive(service, training.sends(folder, first)).status_code == 200
            message = training.tells(folder, second)
            answers: list[httpx.Response] = []
            receiving = threading.Thread(target=lambda: answers.append(_receive(service, message)))
            receiving.start()
            time.sleep(0.02 * (index % 5))
            training.dies()
            receiving.join(CALL_TIMEOUT_S)
            assert [answer.status_code for answer in answers] == [400]

    return inject


def _receive(service: LiveService, message: Any) -> httpx.Response:
    body = {"names": message.names, "dtypes": message.dtypes, "shapes": message.shapes}
    return _post(service, "/update_weights_from_distributed", {**body, "group_name": message.group_name})


TAKEN = Case("weights from a folder", _takes_weights)
VERIFIER_KILLED = Case("verifier killed while it takes weights", _while_updating(kill_rank("Verifier", 0)))
TRAINER_KILLED = Case("trainer killed within a broadcast", _trainer_dies)
TRAINED_CASES = (
    TAKEN,
    VERIFIER_KILLED,
    TRAINER_KILLED,
    Case("router killed while weights are taken", _while_updating(kill_replica("Router"))),
    Case("a checkpoint that ends too early", _cut_checkpoint),
)


def trained_drill(shared_ray: SharedRay) -> TrainedDrill:
    """The fleet of other failures, in rollouts."""
    return TrainedDrill(fleet_service(shared_ray), num_verifiers=NUM_VERIFIERS, num_drafters=2)


class LearningDrill(Drill):
    """After each failure all drafters must serve the version that the learner says."""

    def wait_until_whole(self) -> None:
        super().wait_until_whole()
        assert isinstance(self.service, LiveService)
        wait_for(lambda: _learned_versions(self.service) == 1, CATCH_UP_TIMEOUT_S)


def _learned_versions(service: LiveService) -> int:
    """Return how many versions drafters serve, together with the learner's; 0: the learner does not answer."""
    try:
        answer = httpx.get(f"{service.base_url}/v1/learner", timeout=CALL_TIMEOUT_S).json()
    except httpx.HTTPError:
        return 0
    loads = [state.report.load for state in service.call("Router", "snapshot").drafters]
    drafted = {load.weight_version or FIRST_VERSION.name for load in loads}
    return len(drafted | {learner["serving"] for learner in answer["data"]}) if answer["data"] else 0


def _publish(service: LiveService) -> None:
    """Publish the drafter's own weights by hand, under the next version; the learner may be gone."""
    body = {"folder": str(checkpoint_of(service.config.speculative, service.config.model.model))}
    httpx.post(f"{service.base_url}/v1/learner/publish", json=body, timeout=CALL_TIMEOUT_S)


LEARNING_CASES = tuple(
    Case(f"{name} killed while a version is published", _while_updating(strike, _publish))
    for name, strike in (
        ("learner's process", kill_rank("Learner", 0)),
        ("learner's replica", kill_replica("Learner")),
        ("drafter", kill_rank("Drafter", 0)),
    )
)


def learning_drill(shared_ray: SharedRay, folder: Path) -> LearningDrill:
    """A verifier, and two drafters that learn."""
    learner = {"folder": str(folder), "min_samples": 4, "num_steps": 4}
    service = shared_ray.service(num_verifiers=1, num_drafters=2, learner=learner, engine_timeout_s=ENGINE_TIMEOUT_S)
    return LearningDrill(service, num_verifiers=1, num_drafters=2)
