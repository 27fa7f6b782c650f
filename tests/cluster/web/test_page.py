"""The web page as a browser sees it: a headless Chromium against the real application with a backend that plays."""

from __future__ import annotations

import dataclasses
import re
import time

import httpx
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver
from starlette.types import ASGIApp

from browser import Page, opened
from fakes.web_service import ATTACK, Service
from outrider.cluster.api.authentication import ApiKeyMiddleware
from outrider.cluster.common.api_keys import ApiKeys, hash_api_key
from outrider.cluster.web.page import FILES, FOLDER

KEY = "sk-right"


# --- the files ---


def client_of(app: ASGIApp) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def test_the_files_are_open_and_their_data_needs_a_key(service: Service):
    async with client_of(ApiKeyMiddleware(service.api(), ApiKeys([hash_api_key(KEY)]))) as client:
        for path in FILES:
            answer = await client.get(path)
            assert answer.status_code == 200
            assert answer.headers["content-security-policy"].startswith("default-src 'self'; ")
            assert answer.headers["x-content-type-options"] == "nosniff"
        assert (await client.get("/load")).status_code == 401
        assert (await client.get("/web/nothing.js")).status_code == 401


async def test_what_the_page_names_is_served_as_what_it_is(service: Service):
    async with client_of(service.api()) as client:
        markup = (await client.get("/")).text
        kinds = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
        named = set(re.findall(r'(?:src|href)="([^"#]+)"', markup))
        for script in FOLDER.glob("*.js"):
            named |= {f"web/{name}" for name in re.findall(r'from "\./(.+)"', script.read_text())}
        assert named == {path.removeprefix("/") for path in FILES} - {""}
        for path in named:
            kind = kinds[path[path.rindex(".") :]]
            assert (await client.get(f"/{path}")).headers["content-type"].split(";")[0] == kind
    assert {path.name for path in FOLDER.iterdir()} == set(FILES.values())


async def test_the_page_asks_nobody_else_and_holds_no_script(service: Service):
    async with client_of(service.api()) as client:
        texts = [(await client.get(path)).text.replace("http://www.w3.org/2000/svg", "") for path in FILES]
    assert not [text for text in texts if re.search(r"https?:|\bon\w+=|style=|innerHTML|insertAdjacentHTML", text)]
    assert re.findall(r"<script[^>]*>", texts[0]) == ['<script type="module" src="web/app.js">']
    assert "<style" not in texts[0]


# --- the browser ---


def test_the_fleet_is_shown_and_follows_what_happens(page: Page, service: Service):
    page.open("fleet")
    page.wait(lambda: len(page.rows("verifiers")) == 2)
    v0 = ["v0", "ready", "6", "2", "63 %", "120.0", "50.0 ms", "up to 3", "75 %", "3.25"]
    assert page.rows("verifiers")[0] == v0
    assert page.rows("verifiers")[1][:2] == ["v1", "draining"]
    assert page.rows("verifiers")[1][7] == "off: warmup"
    assert page.rows("drafters")[0] == ["d0", "ready", "default", "6", "1", "4.0 ms", "2", "0"]
    assert page.rows("decisions") == [["on", "pays", "31", "74 %"], ["off", "load", "11", "26 %"]]
    learner = page.rows("learners")[0]
    assert learner[:6] == ["default", "watch", "v4", "37", "150", "v2 1.75, v4 2.00"]
    assert learner[6].startswith("v4 serves: in 512 rounds")
    assert page.text("#fleet-status") == "live"
    service.change(verifier_id=ATTACK, num_running=7, kv_usage=0.95, tokens_per_s=240.0)
    page.wait(lambda: page.rows("verifiers")[0][2] == "7")
    assert page.rows("verifiers")[0][:6] == [ATTACK, "ready", "7", "2", "95 %", "240.0"]
    assert page.figures("#totals")["tokens/s"] == "240.0"
    assert page.driver.title == "Outrider"


def test_the_chart_breaks_where_nobody_looked_and_an_empty_table_is_as_wide_as_its_head(page: Page, service: Service):
    service.snapshot = dataclasses.replace(service.snapshot, drafters=(), learners=())
    page.open("fleet")
    page.wait(lambda: page.rows("drafters") == [["none"]])
    assert page.driver.execute_script("return document.querySelector('#drafters tbody th').colSpan") == 8
    assert not page.find("#learning").is_displayed(), "nothing learns"

    def stretches() -> int:
        return page.find("#history-line").get_attribute("d").count("M")

    page.wait(lambda: page.find("#history-line").get_attribute("d").count("L") >= 1)
    assert stretches() == 1
    page.driver.execute_script("location.hash = 'playground'")
    time.sleep(5.0)
    page.driver.execute_script("location.hash = 'fleet'")
    page.wait(lambda: stretches() == 2)
    assert page.find("#history-ground").get_attribute("d").count("Z") == 2


def test_the_modes_of_the_playground_are_chosen_by_keyboard_too(page: Page):
    page.open("playground")
    for mode, option in [("chat", "#system"), ("race", "#race-temperature"), ("complete", "#temperature")]:
        assert page.find(f"#{mode}").is_displayed()
        assert page.find(option).is_displayed()
        assert page.driver.execute_script("return document.querySelectorAll('.bench > div:not([hidden])').length") == 1
        page.find("#modes input:checked").send_keys(Keys.ARROW_RIGHT)


def test_a_key_is_asked_for_and_kept_for_the_session_only(driver: WebDriver, service: Service):
    with opened(driver, ApiKeyMiddleware(service.api(), ApiKeys([hash_api_key(KEY)]))) as page:
        page.expected_error = "401"
        page.open("fleet")
        page.wait(lambda: "API key is needed" in page.text("#fleet-status"))
        assert page.rows("verifiers") == []
        page.set("#key", KEY + Keys.ENTER)
        page.wait(lambda: len(page.rows("verifiers")) == 2)
        page.wait(lambda: page.text("#model") == "tiny")
        service.steps = [[5]]
        page.find("nav a[href='#playground']").click()
        page.set("#message", "the" + Keys.ENTER)
        page.wait_for_status("finished", "#chat-status")
        stored = driver.execute_script("return [Object.values(sessionStorage), localStorage.length, document.cookie]")
        assert stored == [[KEY], 0, ""]
        assert KEY not in driver.current_url
