"""The page on a phone: nothing is cut off, nothing scrolls sideways, and fingers hit what they aim at."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from selenium.webdriver.common.keys import Keys

from browser import Page
from fakes.web_service import Service

SCREENS = [(390, 844), (320, 568)]
MIN_TARGET = 40
OTHER_MODES = [("race", "#race-start", "#race-status"), ("complete", "#generate", "#run-status")]
# What reaches beyond the screen, unless it scrolls within a box of its own, and what is wider than its own box.
CUT_OFF = """
    const scrolls = (e) => ["auto", "scroll"].includes(getComputedStyle(e).overflowX);
    const held = (e) => { for (let p = e.parentElement; p; p = p.parentElement) if (scrolls(p)) return true; };
    const shown = [...document.querySelectorAll("body *")].filter((e) => e.checkVisibility() && !held(e));
    const beyond = shown.filter((e) => e.getBoundingClientRect().right > innerWidth + 0.5);
    const wide = shown.filter((e) => !scrolls(e) && e.matches("dl, dl *, label, button, nav, fieldset")
        && e.clientWidth && e.scrollWidth > e.clientWidth);
    return [...beyond, ...wide].map((e) => `${e.tagName} ${e.id} ${e.className} ${e.textContent.slice(0, 40)}`);
"""
SMALL_TARGETS = """
    const ticked = ":is([type=checkbox], [type=radio])";
    const targets = `a, button, summary, textarea, input:not(${ticked}), label:has(${ticked})`;
    return [...document.querySelectorAll(targets)].filter((e) => e.checkVisibility()
        && e.getBoundingClientRect().height < arguments[0]).map((e) => `${e.tagName} ${e.id} ${e.textContent}`);
"""


@pytest.fixture(params=SCREENS, ids=str)
def phone(page: Page, request: pytest.FixtureRequest) -> Iterator[Page]:
    width, height = request.param
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": True}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)  # windows have a minimum width
    yield page
    page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def assert_fits(page: Page) -> None:
    script = "return [screen.width, innerWidth, document.documentElement.scrollWidth]"
    assert len(set(page.driver.execute_script(script))) == 1
    assert page.driver.execute_script(CUT_OFF) == []
    assert page.driver.execute_script(SMALL_TARGETS, MIN_TARGET) == []


def test_the_fleet_fits(phone: Page, service: Service):
    service.change(tokens_per_s=123456.7)
    phone.open("fleet")
    phone.wait(lambda: len(phone.rows("verifiers")) == 2)
    assert_fits(phone)


def test_the_chat_fits(phone: Page, service: Service):
    service.say("# A title\n\n```\n" + "long " * 40 + "\n```\n\n" + "w" * 200 + "\n\n- a\n  - b")
    phone.open("playground")
    assert not phone.find("#max-tokens").is_displayed()  # folded
    for _ in range(3):
        phone.set("#message", "q" * 100 + Keys.ENTER)
        phone.wait_for_status("finished", "#chat-status")
    phone.find("#show-origins").click()
    assert_fits(phone)
    phone.find("#show-origins").click()
    phone.find("#options-fold summary").click()
    assert_fits(phone)
    box = phone.find("#message").rect
    bottom = phone.driver.execute_script("return scrollY + innerHeight")
    assert box["y"] + box["height"] <= bottom  # the box to type into stays in sight


@pytest.mark.parametrize(("mode", "start", "status"), OTHER_MODES)
def test_the_other_modes_fit(phone: Page, service: Service, mode: str, start: str, status: str):
    service.say("w" * 300)
    phone.open("playground", mode)
    phone.find(start).click()
    phone.wait(lambda: phone.text(status) not in ("", "generating…"))
    phone.find("#options-fold summary").click()
    assert_fits(phone)
