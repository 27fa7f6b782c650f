"""`outrider learner`: what it shows, what it sends, and errors of one line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from fastapi import FastAPI

from browser import serving
from fakes.command_line import assert_usage_error, invoke
from fakes.fleet_snapshots import LEARNER, busy_fleet
from outrider.cluster.api.authentication import ApiKeyMiddleware
from outrider.cluster.api.learner_routes import add_learner_actions, add_learner_status
from outrider.cluster.api.openai.endpoints import prepare
from outrider.cluster.common.api_keys import ApiKeys, hash_api_key
from outrider.cluster.gateway.learner_control import LearnerControl
from outrider.drafter_service.learning.messages import Action, Answer
from tiny.played_learners import PlayedLearner

OTHER = replace(LEARNER, pool="look", serving="v0", versions=(), loss=None, last_event="\x1b[2J")


class Service:
    """A server of learners, and what they were asked."""

    def __init__(self) -> None:
        self.snapshot = busy_fleet()
        self.learner = PlayedLearner()
        control = LearnerControl({"default": self.learner}, lambda: self.snapshot)
        self.app = FastAPI()
        prepare(self.app)
        add_learner_status(self.app, control)
        add_learner_actions(self.app, control)
        self.url = ""


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    with serving(service.app) as service.url:
        yield service


def test_the_status_is_a_table_of_versions_and_the_last_event(service: Service):
    shown = invoke("learner", "status", "--url", service.url)
    assert shown.exit_code == 0, shown.output
    lines = [" ".join(line.split()) for line in shown.output.splitlines()]
    assert lines == [
        "default watch",
        "37 samples of 3.0 MiB; 402 seen, 13 dropped on the way",
        "150 training steps in 62 CPU s, loss 0.875",
        "7 candidates: 4 published, 3 refused, 2 rolled back",
        "version fate rounds drafted named acceptance named per round",
        "v2 replaced by v4 400 1600 700 43.8% 1.75",
        "v3 refused: worse on held-out text 0 0 0 - -",
        "v4 serves 80 320 160 50.0% 2.00",
        "last: v4 serves: in 512 rounds of its trial it named 0.25 tokens more than v2",
    ]


def test_the_status_of_one_pool_can_be_asked_for_and_none_may_have_reported(service: Service):
    service.snapshot = replace(service.snapshot, learners=(LEARNER, OTHER))
    both = invoke("learner", "status", "--url", service.url).output
    assert "default" in both
    one = invoke("learner", "status", "--url", service.url, "--pool", "look").output
    assert one.startswith("look")
    assert "default" not in one
    assert "\x1b" not in one, "what a server says does not control the terminal"
    service.snapshot = replace(service.snapshot, learners=())
    assert "no learner has reported yet" in invoke("learner", "status", "--url", service.url).output


@pytest.mark.parametrize("action", list(Action))
def test_every_action_is_sent_and_its_answer_shown(service: Service, action: Action):
    service.learner.answer = Answer(call_id="", text="v2 serves again")
    folder = ["--folder", "/f"] if action in (Action.PUBLISH, Action.EXPORT) else []
    result = invoke("learner", action.value, "--url", service.url, "--pool", "default", *folder)
    assert (result.exit_code, result.output) == (0, "default: v2 serves again\n")
    assert service.learner.asked == [(action, "/f" if folder else "")]


@pytest.mark.parametrize("action", ["publish", "export"])
def test_a_folder_is_needed_where_there_must_be_one(action: str):
    assert_usage_error(invoke("learner", action), "--folder")


@pytest.mark.parametrize("arguments", [("pause", "--folder", "/f"), ("train",), ("status", "--interval", "1")])
def test_what_is_not_there_is_a_usage_error(arguments: tuple[str, ...]):
    assert_usage_error(invoke("learner", *arguments))


def test_what_goes_wrong_is_one_line(service: Service):
    service.learner.answer = Answer(call_id="", error="there is no version before v0")
    refused = invoke("learner", "rollback", "--url", service.url)
    assert refused.exit_code == 1
    assert refused.output == "Error: HTTP 400: the learner of pool default: there is no version before v0\n"
    unknown = invoke("learner", "pause", "--url", service.url, "--pool", "other")
    assert unknown.output == "Error: HTTP 400: pool must be one that learns: default\n"
    nobody = invoke("learner", "status", "--url", "http://127.0.0.1:9")
    assert nobody.exit_code == 1
    assert nobody.output.startswith("Error: ConnectError")
    assert len(nobody.output.splitlines()) == 1


def test_where_nothing_learns_it_says_so():
    app = FastAPI()
    prepare(app)
    with serving(app) as url:
        result = invoke("learner", "status", "--url", url)
    assert (result.exit_code, len(result.output.splitlines())) == (1, 1)
    assert result.output.startswith(f"Error: nothing learns at {url}")


def test_a_key_is_shown(service: Service):
    with serving(ApiKeyMiddleware(service.app, ApiKeys([hash_api_key("secret")]))) as url:
        assert invoke("learner", "status", "--url", url).exit_code == 1
        assert invoke("learner", "status", "--url", url, "--api-key", "secret").exit_code == 0
        assert invoke("learner", "pause", "--url", url, "--api-key", "wrong").exit_code == 1
    assert service.learner.asked == []
