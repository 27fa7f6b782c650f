"""Who changes a live service's weights while streams run, a trainer or a learner, and what goes wrong with it.

A trainer's updates bring one of two sets of weights in turn, whose answers differ. Each token of a stream must be the
one that plain decoding draws by the weights that its span names, behind the tokens before it. Running requests give up
their KV for an update (`retract`), so that none goes on with KV of other weights.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file, save_file

from fakes.collected import collect
from outrider.cluster.config.pool_options import checkpoint_of
from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.offline.engine import OfflineEngine
from outrider.drafter_service.learning.messages import FIRST_VERSION
from outrider.verifier_service.messages.request import GenerationRequest, SamplingParams
from services.failures import (
    ENGINE_TIMEOUT_S,
    SAMPLINGS,
    Case,
    Drill,
    Inject,
    Outcome,
    fleet_service,
    kill_rank,
    kill_replica,
    outcome_of,
)
from services.live_service import LiveService, SharedRay, Streamed, wait_for
from tiny.refits import trainer

NUM_VERIFIERS = 2
CALL_TIMEOUT_S = 120.0
CATCH_UP_TIMEOUT_S = 90.0
UPDATE = "/update_weights_from_disk"
FIRST, SECOND = "first", "second"  # sets of weights, after which versions are called
NOISE = 0.3  # of a matrix's own spread


class TwoWeights:
    """The weights that a service starts with and others of the same model, and what each draws."""

    def __init__(self, first: Path, folder: Path) -> None:
        """`folder`: where the others are written."""
        self.folders = {FIRST: first, SECOND: Path(shutil.copytree(first, folder / SECOND))}
        tensors, generator = load_file(first / "model.safetensors"), torch.Generator().manual_seed(3)
        for name, tensor in tensors.items():
            if tensor.dim() > 1:
                drawn = torch.randn(tensor.shape, generator=generator)
                tensors[name] = tensor + (NOISE * tensor.float().std() * drawn).to(tensor.dtype)
        save_file(tensors, self.folders[SECOND] / "model.safetensors", {"format": "pt"})
        self._turns = itertools.cycle((SECOND, FIRST))
        self._numbers = itertools.count(1)
        options: dict[str, Any] = {"num_drafters": 0, "threads_per_rank": 1, "kv_cache_memory_bytes": 64 << 20}
        self._engines = {
            name: OfflineEngine(ServiceConfig(model=str(path), **options)) for name, path in self.folders.items()
        }

    def update(self, name: str | None = None) -> dict[str, str]:
        """Return the body of an update, by default to the weights whose turn it is; every version has its own name."""
        chosen = name or next(self._turns)
        return {"model_path": str(self.folders[chosen]), "weight_version": f"{chosen} {next(self._numbers)}"}

    def drawn(self, streamed: Streamed, sampling: dict[str, Any], max_tokens: int) -> list[int]:
        """Return what plain decoding draws behind a stream's own tokens, span by span, and at last to the end."""
        assert len(streamed.weight_versions) == len(streamed.token_ids), "tokens of no version"
        expected: list[int] = []
        spans = [(version, len(list(group))) for version, group in itertools.groupby(streamed.weight_versions)]
        for place, (version, num_tokens) in enumerate(spans):
            before = tuple(streamed.token_ids[: len(expected)])
            tokens = self._decode(version, streamed.prompt_token_ids, before, sampling, max_tokens)
            expected += tokens if place == len(spans) - 1 else tokens[:num_tokens]
        return expected

    def _decode(
        self, version: str, prompt: list[int], before: tuple[int, ...], sampling: dict[str, Any], max_tokens: int
    ) -> list[int]:
        """Return the tokens behind those `before`."""
        request = GenerationRequest(
            request_id="reference",
            prompt_token_ids=tuple(prompt),
            output_token_ids=before,
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True, num_speculative_tokens=0, **sampling),
        )
        name = SECOND if version.startswith(SECOND) else FIRST
        (result,) = collect([request], list(self._engines[name].generate([request])))
        return list(result.token_ids)

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()


@dataclass(frozen=True)
class TrainedService(LiveService):
    """A service whose weights change."""

    weights: TwoWeights


class TrainedDrill(Drill):
    """After each failure all verifiers must serve one version: the last that any of them took."""

    service: TrainedService

    def wait_until_whole(self) -> None:
        super().wait_until_whole()
        wait_for(lambda: len(_versions(self.service)) == 1, CATCH_UP_TIMEOUT_S)
        body = {"text": "import os\n", "sampling_params": {"max_new_tokens": 2}}
        drawn = _post(self.service, "/generate", body).json()["meta_info"]["weight_version"]
        assert {drawn} == {version for version, _ in _versions(self.service)}

    def close(self) -> None:
        """Leave the service with its first weights, for others who share it."""
        with contextlib.suppress(httpx.ConnectError):  # another service has taken its place
            _update(self.service, self.service.weights.update(FIRST))
        self.service.weights.close()

    def _expect(self, stream: int) -> None:
        """Nothing is known before a stream says which weights drew it."""

    def _outcome(self, name: str, streams: list[Streamed | Exception | None], recovered_s: float) -> Outcome:
        expected = {
            index: self.service.weights.drawn(stream, SAMPLINGS[index % len(SAMPLINGS)], self._traffic.max_tokens)
            for index, stream in enumerate(streams)
            if isinstance(stream, Streamed)
        }
        return outcome_of(name, streams, expected, recovered_s)


def _versions(service: Any) -> set[tuple[str, str]]:
    """Return the verifiers' versions, each with its digest: two models never have one name."""
    loads = [state.report.load for state in service.call("Router", "snapshot").verifiers]
    assert not any(load.weights_error for load in loads)
    return {(load.weight_version, load.weights_digest) for load in loads}


def _post(service: LiveService, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{service.base_url}{path}", json=body, timeout=CALL_TIMEOUT_S)


def _update(service: TrainedService, body: dict[str, str] | None = None) -> httpx.Response:
    """Take weights, by default those whose turn it is, between a pause and its end."""
    _post(service, "/pause_generation", {"mode": "retract"})
    answer = _post(service, UPDATE, body or service.weights.update())
    wait_for(lambda: _post(service, "/continue_generation", {}).status_code == 200, CATCH_UP_TIMEOUT_S)
    return answer


def _takes_weights(service: TrainedService, index: int) -> Inject:
    def inject() -> None:
        assert _update(service).status_code == 200

    return inject


def _while_updating(
    strike: Callable[[LiveService, int], Inject], update: Callable[[Any], object] = _update
) -> Callable[[Any, int], Inject]:
    """Strike a little later in an update each time. Whether the update succeeds is open: it ends."""

    def prepare(service: Any, index: int) -> Inject:
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


def _cut_checkpoint(service: TrainedService, index: int) -> Inject:
    """A folder whose tensors end too early is refused whole."""

    def inject() -> None:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(shutil.copytree(service.config.model.target_path, Path(folder) / "cut"))
            tensors = copy / "model.safetensors"
            os.truncate(tensors, tensors.stat().st_size - 4096)
            assert _update(service, {"model_path": str(copy)}).status_code == 400

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


@contextlib.contextmanager
def trained_drill(shared_ray: SharedRay, folder: Path) -> Iterator[TrainedDrill]:
    """The fleet of other failures, in rollouts; `folder`: for the other weights."""
    config = fleet_service(shared_ray).config
    weights = TwoWeights(Path(config.model.target_path), folder)
    drill = TrainedDrill(TrainedService(config, weights), num_verifiers=NUM_VERIFIERS, num_drafters=2)
    yield drill
    drill.close()


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
