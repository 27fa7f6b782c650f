"""Which drafters are behind the target, by how many updates, and what is said of them."""

from __future__ import annotations

import logging

import pytest

from outrider.verifier_service.drafting.followed_updates import MAX_DRAFTERS, MIN_DRAFT_TOKENS, FollowedUpdates
from outrider.verifier_service.messages.draft import DrafterEvent


def hear(updates: FollowedUpdates, version: str | None, drafter_id: str = "d") -> None:
    updates.hear(DrafterEvent(drafter_id=drafter_id, weight_version=version))


@pytest.fixture
def updates() -> FollowedUpdates:
    updates = FollowedUpdates()
    hear(updates, "")
    return updates


@pytest.fixture(autouse=True)
def warnings(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING)
    return caplog


def test_a_drafter_is_behind_by_the_updates_since_its_own_last_one(updates: FollowedUpdates):
    assert updates.num_behind("d") == 0
    updates.take_version("1")
    updates.take_version("2")
    assert updates.num_behind("d") == 2
    hear(updates, "draft-1")
    assert updates.num_behind("d") == 0
    updates.take_version("3")
    hear(updates, "draft-1")  # told again, as after a reconnection
    assert updates.num_behind("d") == 1


def test_look_ups_are_never_behind(updates: FollowedUpdates, warnings: pytest.LogCaptureFixture):
    hear(updates, None, "look-up")
    updates.take_version("1")
    updates.observe("look-up", 1000, 10)
    updates.take_version("2")
    assert updates.num_behind("look-up") is None
    assert all("look-up" not in record.message for record in warnings.records)


def test_a_drafter_that_was_updated_first_is_not_behind(updates: FollowedUpdates, warnings: pytest.LogCaptureFixture):
    hear(updates, "v1")
    updates.take_version("v1")
    updates.observe("d", 1000, 100)
    assert (updates.num_behind("d"), warnings.records) == (0, [])
    updates.take_version("v2")
    assert updates.num_behind("d") == 1


def test_a_drafter_met_later_is_placed_by_its_version(updates: FollowedUpdates):
    for version in ("v1", "v2", "v3"):
        updates.take_version(version)
    for drafter_id, version, num_behind in (("a", "v1", 2), ("b", "v3", 0), ("c", "another", 0), ("new", "", 3)):
        hear(updates, version, drafter_id)
        assert updates.num_behind(drafter_id) == num_behind, drafter_id


def test_a_drafter_that_begins_anew_has_the_weights_of_its_start(updates: FollowedUpdates):
    updates.take_version("v1")
    hear(updates, "v1")
    assert updates.num_behind("d") == 0
    hear(updates, "")
    assert updates.num_behind("d") == 1


def test_each_update_that_was_not_followed_is_one_warning(updates: FollowedUpdates, warnings: pytest.LogCaptureFixture):
    updates.observe("d", 200, 140)
    updates.take_version("v1")
    updates.observe("d", MIN_DRAFT_TOKENS - 1, 20)
    assert warnings.records == [], "too few to say something of"
    updates.observe("d", 1, 0)
    updates.observe("d", 1000, 0)
    (record,) = warnings.records
    assert record.levelno == logging.WARNING
    assert record.message == (
        "drafter d has weights of its own that are 1 updates of the target behind; acceptance 0.70 before, 0.20 now"
    )
    updates.take_version("v2")
    updates.observe("d", 10, 1)
    updates.take_version("v3")  # too soon to measure: it is said all the same, before the counts begin anew
    assert warnings.records[1].message.endswith("2 updates of the target behind; acceptance 0.70 before, 0.10 now")
    updates.take_version("v4")
    assert warnings.records[2].message.endswith(
        "3 updates of the target behind; acceptance 0.70 before, not measured now"
    )
    assert len(warnings.records) == 3


def test_a_drafter_that_follows_in_time_is_not_warned_of(updates: FollowedUpdates, warnings: pytest.LogCaptureFixture):
    updates.take_version("v1")
    updates.observe("d", 20, 1)
    hear(updates, "v1")
    updates.observe("d", 300, 150)
    updates.take_version("v2")
    updates.observe("d", MIN_DRAFT_TOKENS, 30)
    assert warnings.records[0].message.endswith("acceptance 0.50 before, 0.30 now")


def test_a_drafter_that_is_gone_is_not_warned_of(updates: FollowedUpdates, warnings: pytest.LogCaptureFixture):
    updates.take_version("v1")
    updates.hear(DrafterEvent(drafter_id="d", is_up=False))
    updates.take_version("v2")
    assert (warnings.records, updates.num_behind("d")) == ([], 2)


def test_only_so_many_drafters_are_remembered(updates: FollowedUpdates):
    for index in range(MAX_DRAFTERS):
        hear(updates, "", f"other {index}")
    assert updates.num_behind("d") is None
    assert updates.num_behind("other 0") == 0
