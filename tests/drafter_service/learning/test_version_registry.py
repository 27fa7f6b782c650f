"""What is on disk after every step, and after a process was killed in one."""

import json
import os

import pytest

from outrider.drafter_service.learning import version_registry as module
from outrider.drafter_service.learning.messages import FIRST_VERSION
from outrider.drafter_service.learning.version_registry import VersionRegistry, digest_of

NUM_KILL_POINTS = 36  # changes of the disk in the test below


class KilledError(BaseException):
    """The process ends here."""


def write(folder):
    folder.mkdir()
    (folder / "weights").write_text("w")


def published(registry, count):
    for _ in range(count):
        registry.publish(registry.add(write).name)
        registry.settle()


def names(folder):
    return sorted(path.name for path in (folder / "versions").iterdir())


def test_a_new_shelf_serves_what_the_pool_started_with(tmp_path):
    registry = VersionRegistry(tmp_path / "pool")
    assert (registry.serving, registry.predecessor, registry.is_watched) == (FIRST_VERSION, None, False)
    assert registry.fates == {"v0": "serves"}
    with pytest.raises(ValueError, match="there is none before it"):
        registry.roll_back("by hand")


def test_a_version_is_published_settled_and_rolled_back(tmp_path):
    registry = VersionRegistry(tmp_path)
    version = registry.add(write)
    assert (version.name, version.folder) == ("v1", str(tmp_path / "versions" / "v1"))
    assert registry.serving == FIRST_VERSION
    registry.publish("v1")
    assert (registry.serving, registry.predecessor, registry.is_watched) == (version, FIRST_VERSION, True)
    registry.settle()
    assert not VersionRegistry(tmp_path).is_watched
    registry.roll_back("rolled back: worse")
    for again in (registry, VersionRegistry(tmp_path)):
        assert (again.serving, again.is_watched) == (FIRST_VERSION, False)
        assert again.fates == {"v0": "serves", "v1": "rolled back: worse"}
    assert names(tmp_path) == []


def test_names_are_never_given_again(tmp_path):
    registry = VersionRegistry(tmp_path)
    registry.refuse(registry.add(write).name, "refused: worse")
    assert names(tmp_path) == []

    def fail(folder):
        write(folder)
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        registry.add(fail)
    assert names(tmp_path) == []
    assert VersionRegistry(tmp_path).add(write).name == "v3"


def test_the_last_three_that_served_and_a_candidate_are_kept(tmp_path):
    registry = VersionRegistry(tmp_path)
    published(registry, 5)
    registry.add(write)
    assert names(tmp_path) == ["v3", "v4", "v5", "v6"]
    assert registry.fates["v2"] == "replaced by v3"
    for expected in ("v4", "v3", "v0"):
        registry.roll_back("rolled back: by hand")
        assert registry.serving.name == expected
    assert names(tmp_path) == ["v6"]


def test_a_candidate_does_not_outlive_its_learner(tmp_path):
    VersionRegistry(tmp_path).add(write)
    registry = VersionRegistry(tmp_path)
    assert (registry.fates["v1"], names(tmp_path)) == ("given up: the learner started anew", [])


def test_a_version_that_is_watched_stays_so(tmp_path):
    registry = VersionRegistry(tmp_path)
    registry.publish(registry.add(write).name)
    again = VersionRegistry(tmp_path)
    assert (again.serving.name, again.predecessor, again.is_watched) == ("v1", FIRST_VERSION, True)


# --- killed ---


def kill_points(monkeypatch, number):
    """End the process at its so-manyth change of the disk."""
    count = 0

    def ending(change):
        def wrapped(*args, **options):
            nonlocal count
            count += 1
            if count >= number:  # nothing is tidied by a process that is gone
                raise KilledError
            return change(*args, **options)

        return wrapped

    monkeypatch.setattr(module.os, "replace", ending(os.replace))
    monkeypatch.setattr(module.Path, "rename", ending(module.Path.rename))
    monkeypatch.setattr(module.shutil, "rmtree", ending(module.shutil.rmtree))
    monkeypatch.setattr(module.os, "fsync", ending(os.fsync))


@pytest.mark.parametrize("number", range(1, NUM_KILL_POINTS + 2))
def test_whenever_it_is_killed_one_whole_version_serves(tmp_path, monkeypatch, number):
    registry = VersionRegistry(tmp_path)
    published(registry, 3)
    with monkeypatch.context() as patched:
        kill_points(patched, number)
        try:
            for _ in range(2):
                registry.publish(registry.add(write).name)
            registry.roll_back("rolled back: worse")
            registry.refuse(registry.add(write).name, "refused: worse")
            was_killed = False
        except KilledError:
            was_killed = True
    assert was_killed == (number < NUM_KILL_POINTS + 1), "all points are in the range"
    again = VersionRegistry(tmp_path)
    assert again.serving.name in ("v3", "v4", "v5")
    assert all((tmp_path / "versions" / name / "weights").exists() for name in names(tmp_path))
    assert all(name.startswith("v") for name in names(tmp_path)), "nothing half written is left"
    assert not (set(names(tmp_path)) - set(again.fates))
    known = set(again.fates)
    assert again.add(write).name not in known
    again.roll_back("rolled back: by hand")


def test_a_bad_state_is_named(tmp_path):
    registry = VersionRegistry(tmp_path)
    published(registry, 1)
    state = json.loads((tmp_path / "state.json").read_text())
    (tmp_path / "state.json").write_text(json.dumps(state | {"line": ["v0", "v9"]}))
    with pytest.raises(ValueError, match="the folder of v9 is missing"):
        VersionRegistry(tmp_path)
    for text in ("{", '{"strange": 1}', "[]"):
        (tmp_path / "state.json").write_text(text)
        with pytest.raises(ValueError, match="not a learner's state"):
            VersionRegistry(tmp_path)


def test_versions_of_other_first_weights_are_given_up(tmp_path):
    published(VersionRegistry(tmp_path, "one"), 2)
    assert VersionRegistry(tmp_path, "one").serving.name == "v2"
    other = VersionRegistry(tmp_path, "another")
    assert (other.serving, other.predecessor, other.is_watched) == (FIRST_VERSION, None, False)
    assert other.fates["v2"] == "given up: the pool starts with other weights"
    assert names(tmp_path) == []
    assert other.add(write).name == "v3"


def test_the_digest_is_of_the_weights_alone(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = digest_of(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert digest_of(tmp_path) == before
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    assert digest_of(tmp_path) != before
