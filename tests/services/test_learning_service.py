"""A live service whose drafters learn: samples come, bad weights go, and whatever ends meanwhile, tokens stay."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.drafter_service import embedded
from services.failures import MAX_PAUSE_S, Case, Drill, Inject, require_unharmed
from services.live_service import LiveService, SharedRay, wait_for

# a learner trains and loads where nothing else runs, and is started anew within a test
pytestmark = [pytest.mark.service, pytest.mark.timeout(900)]

PATH = "/v1/learner"
KV_BYTES = 64 << 20
WAIT_S = 240.0
QUIET_S = 5.0  # several heartbeats
MAX_ROUNDS = 30  # of streams, until bad weights must be gone


@pytest.fixture(scope="module")
def service(shared_ray: SharedRay, tmp_path_factory: pytest.TempPathFactory) -> LiveService:
    """One verifier, one drafter with a model, and a learner that makes no candidates of its own."""
    folder = tmp_path_factory.mktemp("learner") / "versions"
    learner = {"folder": str(folder), "min_samples": 1_000_000, "shadow_share": 1.0}
    service = shared_ray.service(learner=learner, kv_cache_memory_bytes=KV_BYTES)
    wait_for(lambda: bool(learners(service)), WAIT_S)
    return service


@pytest.fixture(scope="module")
def drill(service: LiveService) -> Drill:
    return Drill(service, num_verifiers=1, num_drafters=1)


def learners(service: LiveService) -> list[dict[str, Any]]:
    answer = httpx.get(f"{service.base_url}{PATH}", timeout=30.0)
    return answer.raise_for_status().json()["data"]


def status(service: LiveService) -> dict[str, Any]:
    """Wait for the learner's word: for some seconds after its start there is none."""
    wait_for(lambda: bool(learners(service)), WAIT_S)
    (learner,) = learners(service)
    return learner


def publish(service: LiveService, folder: Path) -> str:
    """Publish by hand; return the new version once the drafter serves it."""
    before = status(service)["serving"]
    answer = httpx.post(f"{service.base_url}{PATH}/publish", json={"folder": str(folder)}, timeout=120.0)
    assert answer.status_code == 200, answer.text
    wait_for(lambda: status(service)["serving"] != before, WAIT_S)
    version = status(service)["serving"]
    wait_for(lambda: served(service) == {version}, WAIT_S)
    return version


def served(service: LiveService) -> set[str]:
    """Return the versions that drafters say they serve; before the first update it has no name."""
    states = service.call("Router", "snapshot").drafters
    return {state.report.load.weight_version or "v0" for state in states}


def poisoned(folder: Path) -> Path:
    """Return a copy of the draft model whose vocabulary is shuffled."""
    copy = Path(shutil.copytree(embedded.draft_path(), folder / "poisoned"))
    file = copy / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "embed_tokens" in name)
    order = torch.randperm(len(tensors[name]), generator=torch.Generator().manual_seed(0))
    save_file({**tensors, name: tensors[name][order].contiguous()}, file, metadata={"format": "pt"})
    return copy


@pytest.fixture(scope="module")
def another(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a draft model whose every matrix differs from the first one's by so little that it drafts as well."""
    copy = Path(shutil.copytree(embedded.draft_path(), tmp_path_factory.mktemp("another") / "draft"))
    file = copy / "model.safetensors"
    tensors = load_file(file)
    scaled = {name: (1.01 * tensor.float()).to(tensor.dtype) for name, tensor in tensors.items() if tensor.dim() > 1}
    save_file(tensors | scaled, file, {"format": "pt"})
    return copy


def undisturbed(name: str) -> Case:
    return Case(name, lambda service, index: lambda: None)


def killed(deployment: str) -> Callable[[LiveService, int], Inject]:
    def prepare(service: LiveService, index: int) -> Inject:
        return lambda: service.kill(deployment)

    return prepare


def test_what_may_be_learned_from_reaches_the_learner_and_nothing_else(service: LiveService, drill: Drill):
    wait_for(lambda: samples_come(service), WAIT_S)
    service.wait_until_idle()
    before = settled(service)
    for body in ({"store": False}, {"cache_salt": "a"}):
        service.stream("import os\n", max_tokens=16, **body)
    assert settled(service) == before
    require_unharmed(drill.run(undisturbed("samples are taken"), index=0), max_pause_s=MAX_PAUSE_S)
    wait_for(lambda: status(service)["num_seen"] > before, WAIT_S)
    assert status(service)["num_bytes"] > 0
    assert (status(service)["phase"], status(service)["serving"]) == ("collecting", "v0")


def samples_come(service: LiveService) -> bool:
    """Send a request each time: a drafter takes samples once its learner's first heartbeat has asked for them."""
    service.stream("import os\n", max_tokens=16)
    return int(status(service)["num_seen"]) > 0


def settled(service: LiveService) -> int:
    """Return how many samples the learner has seen, once no more come."""
    time.sleep(QUIET_S)
    return int(status(service)["num_seen"])


def test_bad_weights_that_are_let_through_are_rolled_back_and_no_token_changes(
    service: LiveService, drill: Drill, tmp_path: Path
):
    before = status(service)
    version = publish(service, poisoned(tmp_path))
    for _ in range(MAX_ROUNDS):
        require_unharmed(drill.run(undisturbed("bad weights serve"), index=0), max_pause_s=MAX_PAUSE_S)
        if status(service)["serving"] == before["serving"]:
            break
    after = status(service)
    assert (after["serving"], after["num_rolled_back"]) == (before["serving"], before["num_rolled_back"] + 1)
    (fate,) = (record["fate"] for record in after["versions"] if record["name"] == version)
    assert fate.startswith("rolled back")
    wait_for(lambda: served(service) <= {before["serving"]}, WAIT_S)


def test_a_learner_that_is_killed_loses_nothing_and_comes_back_with_its_version(
    service: LiveService, drill: Drill, another: Path
):
    version = publish(service, another)
    (pid,) = service.call("Learner", "rank_pids")
    require_unharmed(drill.run(Case("learner's process killed", killed("Learner")), index=1), max_pause_s=MAX_PAUSE_S)

    def is_back() -> bool:
        return service.call("Learner", "status") is not None and service.call("Learner", "rank_pids") != [pid]

    service._wait(is_back, WAIT_S)
    assert status(service)["serving"] == version
    assert served(service) == {version}


def test_a_new_drafter_begins_with_the_version_that_serves(service: LiveService, drill: Drill):
    version = status(service)["serving"]
    assert version != "v0", "the test before has published one"
    require_unharmed(drill.run(Case("drafter killed", killed("Drafter")), index=2), max_pause_s=MAX_PAUSE_S)
    assert served(service) == {version}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_operators_are_answered_and_a_copy_of_what_serves_can_be_had(
    service: LiveService, another: Path, tmp_path: Path
):
    for action, phase in (("pause", "paused"), ("resume", None)):
        answer = httpx.post(f"{service.base_url}{PATH}/{action}", timeout=60.0)
        assert answer.status_code == 200, answer.text
        wait_for(lambda expected=phase: (status(service)["phase"] == "paused") == (expected == "paused"), WAIT_S)
    copy = Path(service.config.learner_folder(service.config.pools["default"])) / "exports" / "copy"
    beyond = httpx.post(f"{service.base_url}{PATH}/export", json={"folder": str(tmp_path / "copy")}, timeout=60.0)
    assert (beyond.status_code, (tmp_path / "copy").exists()) == (400, False)
    answer = httpx.post(f"{service.base_url}{PATH}/export", json={"folder": "copy"}, timeout=60.0)
    assert answer.status_code == 200, answer.text
    exported, first = load_file(copy / "model.safetensors"), load_file(embedded.draft_path() / "model.safetensors")
    assert status(service)["serving"] != "v0", "a test before has published another one"
    assert same(exported, load_file(another / "model.safetensors"))
    assert not same(exported, first)
