"""The playground's race: one prompt with speculation off and on."""

from __future__ import annotations

import re

import pytest
from selenium.webdriver.remote.webdriver import WebDriver

from browser import Page, opened
from fakes.web_service import Service, build_service, in_steps, is_plain
from support.waiting import wait_until

TEXT = "the quick brown fox jumps over the lazy dog"
STATUS = "#race-status"
PACE_S = 0.05


@pytest.fixture
def ids(service: Service) -> list[int]:
    return service.tokenizer.encode(TEXT)


def race(page: Page, ending: str) -> None:
    page.find("#race-start").click()
    page.wait(lambda: ending in page.text(STATUS))


def test_two_lanes_run_at_once_and_the_faster_one_is_marked(page: Page, service: Service, ids: list[int]):
    service.steps, service.plain_steps = in_steps(ids, 4), in_steps(ids, 1)
    service.drafting.pace_s = PACE_S
    page.open("playground", "race")
    page.set("#draft-length", "3")
    page.set("#seed", "7")
    page.set("#race-prompt", "the")
    race(page, "won")
    found = re.fullmatch(r"speculation on won: ((\d+\.\d\d) . as fast); same text", page.text(STATUS))
    assert found
    assert float(found[2]) > 1.3
    assert page.find(STATUS).get_attribute("data-kind") == "good"
    assert page.text("#lane-on .badge") == found[1]
    assert not page.find("#lane-off .badge").is_displayed()
    for lane in ("on", "off"):
        assert page.text(f"#lane-{lane} .output") == TEXT
        assert page.figures(f"#lane-{lane} .figures")["tokens"] == str(len(ids))
        progress = page.find(f"#lane-{lane} progress")
        assert progress.get_property("value") == progress.get_property("max") == 256
    assert {origin for origin, _ in page.tokens("#lane-off .output")} == {"token plain"}
    assert "token accepted" in {origin for origin, _ in page.tokens("#lane-on .output")}
    assert service.drafting.max_running == 2


def test_only_one_lane_goes_without_speculation_and_all_else_is_the_same(page: Page, service: Service):
    service.say("a dog")
    page.open("playground")
    page.find("#speculation").click()  # the other modes' own
    page.choose("race")
    page.set("#draft-length", "3")
    page.set("#race-prompt", "the")
    race(page, "same text")
    requests = sorted(service.backend.requests, key=is_plain)
    assert [request.sampling.num_speculative_tokens for request in requests] == [3, 0]
    on, off = (request.sampling for request in requests)
    assert (on.temperature, on.max_tokens) == (off.temperature, off.max_tokens) == (0.0, 256)
    assert on.seed is not None
    assert on.seed == off.seed
    assert service.prompts() == ["<|start|>user\nthe<|end|><|start|>assistant\n"] * 2
    assert requests[0].cache_salt != requests[1].cache_salt


def test_speculation_may_lose(page: Page, service: Service, ids: list[int]):
    service.steps, service.plain_steps = in_steps(ids, 1), in_steps(ids, 4)
    service.drafting.pace_s = PACE_S
    page.open("playground", "race")
    race(page, "speculation off won: ")
    assert page.find("#lane-off .badge").is_displayed()
    assert not page.find("#lane-on .badge").is_displayed()


def test_one_after_another_each_lane_is_alone(page: Page, service: Service, ids: list[int]):
    service.steps = in_steps(ids, 4)
    service.drafting.pace_s = PACE_S
    page.open("playground", "race")
    page.find("#race-alone").click()
    race(page, "same text")
    assert [is_plain(request) for request in service.backend.requests] == [True, False]
    assert service.drafting.max_running == 1


def test_texts_that_differ_are_a_warning_where_nothing_is_drawn(page: Page, service: Service):
    service.plain_steps = [service.tokenizer.encode("a dog")]
    service.steps = [service.tokenizer.encode("a fox")]
    page.open("playground", "race")
    race(page, "texts differ")
    assert page.find(STATUS).get_attribute("data-kind") == "warn"
    page.set("#race-temperature", "0.8")
    race(page, "texts differ, as draws may")
    assert page.find(STATUS).get_attribute("data-kind") == "good"


def test_stopping_stops_both_lanes(page: Page, service: Service, ids: list[int]):
    service.steps = [ids[:5], None]
    page.open("playground", "race")
    page.find("#race-start").click()
    page.wait(lambda: len(page.tokens("#lane-on .output")) == len(page.tokens("#lane-off .output")) == 5)
    page.find("#race-stop").click()
    page.wait_for_status("stopped", STATUS)
    wait_until(lambda: len(service.backend.cancelled) == 2)
    assert not page.find("#lane-on .badge").is_displayed()


def test_a_lane_that_fails_ends_the_race(page: Page, service: Service, ids: list[int]):
    service.steps, service.plain_steps = [ids[:2], RuntimeError("broken")], [ids[:2], None]
    page.open("playground", "race")
    page.find("#race-start").click()
    wait_until(lambda: service.backend.cancelled)
    page.wait(page.find("#race-start").is_enabled)
    assert page.find(STATUS).get_attribute("data-kind") == "bad"


def test_a_model_that_cannot_chat_goes_on_with_the_prompt(driver: WebDriver):
    service = build_service(chat_template=None)
    service.say("a dog")
    with opened(driver, service.api()) as page:
        page.expected_error = "400"
        page.open("playground", "race")
        page.set("#race-prompt", "the")
        race(page, "same text")
        assert service.prompts() == ["the", "the"]
