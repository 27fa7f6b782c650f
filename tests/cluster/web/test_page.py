"""The web page as a browser sees it: a headless Chromium against the real application with a backend that plays."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import uvicorn
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait
from starlette.types import ASGIApp
from transformers import PreTrainedTokenizerFast

from fakes.backend import FakeBackend, build_gateway, build_tokenizer
from fakes.fleet_snapshots import BUSY_VERIFIER, DECIDED_AT_S, busy_fleet
from fakes.reports import changed
from outrider.cluster.api.authentication import ApiKeyMiddleware
from outrider.cluster.api.openai.endpoints import build_api
from outrider.cluster.common.api_keys import ApiKeys, hash_api_key
from outrider.cluster.monitoring.fleet_load import fleet_load
from outrider.cluster.router.fleet import FleetSnapshot
from outrider.cluster.web.page import FILES, FOLDER
from outrider.verifier_service.messages.request import GenerationRequest, RequestOutput, SpeculationMetrics

KEY = "sk-right"
ATTACK = "<img src=x onerror=\"document.title='owned'\">"
NUM_DRAFT_TOKENS = 3
WAIT_S = 30.0
SPECULATION = SpeculationMetrics(enabled=True, num_drafts=3, num_draft_tokens=9, num_accepted_tokens=4)


# --- the service ---


@dataclass(slots=True)
class DraftingBackend:
    """Play steps that each, but for the first, verified a draft of `NUM_DRAFT_TOKENS` tokens."""

    played: FakeBackend

    async def generate(self, request: GenerationRequest) -> AsyncIterator[RequestOutput]:
        num_draft_tokens = 0
        async with aclosing(self.played.generate(request)) as outputs:
            async for output in outputs:
                is_full = output.num_accepted_tokens == num_draft_tokens
                yield dataclasses.replace(output, num_draft_tokens=num_draft_tokens, follows_leaf=is_full)
                num_draft_tokens = NUM_DRAFT_TOKENS


@dataclass(slots=True)
class Service:
    """What the page talks to, and what it was asked."""

    tokenizer: PreTrainedTokenizerFast
    steps: list[list[int] | None] = field(default_factory=list)
    snapshot: FleetSnapshot = field(default_factory=busy_fleet)
    backend: FakeBackend = field(init=False)

    def __post_init__(self) -> None:
        self.backend = FakeBackend(lambda _: self.steps, speculation=SPECULATION)

    def api(self) -> ASGIApp:
        gateway = build_gateway(DraftingBackend(self.backend), self.tokenizer, fleet_load=self._load)
        return build_api(gateway, is_healthy)

    def _load(self) -> dict[str, Any]:
        return fleet_load(self.snapshot, DECIDED_AT_S + 0.5)

    def change(self, **changes: Any) -> None:
        """Change the first verifier's report."""
        busy, idle = busy_fleet().verifiers
        busy = dataclasses.replace(busy, report=changed(BUSY_VERIFIER, **changes))
        self.snapshot = dataclasses.replace(self.snapshot, verifiers=(busy, idle))


async def is_healthy() -> bool:
    return True


@contextmanager
def serving(app: ASGIApp) -> Iterator[str]:
    """Serve on a thread; yield the address."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


def until(condition: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.01)


@pytest.fixture
def service() -> Service:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([ATTACK])
    return Service(tokenizer)


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


@pytest.fixture(scope="module")
def driver() -> Iterator[WebDriver]:
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        reason = "needs chromium and chromedriver: `make system-deps` installs them"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
    yield driver
    driver.quit()


@dataclass(slots=True)
class Page:
    """The page in the browser."""

    driver: WebDriver
    url: str
    expected_error: str = ""  # a part of those console messages that the test provokes

    def open(self, view: str) -> None:
        self.driver.get("about:blank")
        self.driver.get(f"{self.url}/#{view}")

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def set(self, selector: str, value: str) -> None:
        self.find(selector).clear()
        self.find(selector).send_keys(value)

    def rows(self, table: str) -> list[list[str]]:
        script = "return [...document.querySelectorAll(arguments[0])].map(r => [...r.cells].map(c => c.textContent))"
        return self.driver.execute_script(script, f"#{table} tbody tr")

    def figures(self, selector: str) -> dict[str, str]:
        script = """return Object.fromEntries(
            [...document.querySelectorAll(arguments[0])].map(p => [...p.children].map(c => c.textContent))
        )"""
        return self.driver.execute_script(script, f"{selector} > div")

    def tokens(self) -> list[list[str]]:
        script = "return [...document.querySelectorAll('#output > *')].map(t => [t.className, t.textContent])"
        return self.driver.execute_script(script)

    def text(self, selector: str) -> str:
        return self.find(selector).get_property("textContent")

    def wait(self, condition: Callable[[], Any]) -> None:
        WebDriverWait(self.driver, WAIT_S, poll_frequency=0.05).until(lambda _: condition())

    def wait_for_status(self, beginning: str) -> None:
        self.wait(lambda: self.text("#run-status").startswith(beginning))

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]


@contextmanager
def opened(driver: WebDriver, app: ASGIApp) -> Iterator[Page]:
    """Serve and yield the page; in the end the console must hold no error that the test did not expect."""
    with serving(app) as url:
        page = Page(driver, url)
        yield page
        driver.get("about:blank")
        unexpected = [text for text in page.errors() if not page.expected_error or page.expected_error not in text]
        assert not unexpected


@pytest.fixture
def page(driver: WebDriver, service: Service) -> Iterator[Page]:
    with opened(driver, service.api()) as page:
        yield page


def test_the_fleet_is_shown_and_follows_what_happens(page: Page, service: Service):
    page.open("fleet")
    page.wait(lambda: len(page.rows("verifiers")) == 2)
    v0 = ["v0", "ready", "6", "2", "63 %", "120.0", "50.0 ms", "up to 3", "75 %", "3.25"]
    assert page.rows("verifiers")[0] == v0
    assert page.rows("verifiers")[1][:2] == ["v1", "draining"]
    assert page.rows("verifiers")[1][7] == "off: warmup"
    assert page.rows("drafters")[0] == ["d0", "ready", "default", "6", "1", "4.0 ms", "2", "0"]
    assert page.rows("decisions") == [["on", "pays", "31", "74 %"], ["off", "load", "11", "26 %"]]
    assert page.text("#fleet-status") == "live"
    service.change(verifier_id=ATTACK, num_running=7, kv_usage=0.95, tokens_per_s=240.0)
    page.wait(lambda: page.rows("verifiers")[0][2] == "7")
    assert page.rows("verifiers")[0][:6] == [ATTACK, "ready", "7", "2", "95 %", "240.0"]
    assert page.figures("#totals")["tokens/s"] == "240.0"
    assert page.driver.title == "Outrider"


def test_streamed_tokens_are_coloured_by_origin(page: Page, service: Service):
    ids = service.tokenizer.encode("abcdefg")
    attack = service.tokenizer.convert_tokens_to_ids(ATTACK)
    service.steps = [ids[:1], ids[1:5], [attack, ids[5]], ids[6:]]
    page.open("playground")
    for selector, value in {"#prompt": "the", "#temperature": "0.5", "#seed": "7", "#draft-length": "3"}.items():
        page.set(selector, value)
    page.set("#max-tokens", "9")
    page.find("#generate").click()
    page.wait_for_status("finished: length")
    origins = ["plain", *["accepted"] * 3, "bonus", "accepted", "recovered", "recovered"]
    texts = ["a", "b", "c", "d", "e", ATTACK, "f", "g"]
    assert page.tokens() == [[f"token {origin}", text] for origin, text in zip(origins, texts, strict=True)]
    assert page.text("#output") == "".join(texts)
    assert page.driver.title == "Outrider"
    assert page.find("#legend").text.split() == ["accepted", "4", "recovered", "2", "bonus", "1", "plain", "1"]
    figures = page.figures("#run-figures")
    assert (figures["tokens"], figures["of the text from drafts"]) == ("8", "50 %")
    assert (figures["draft tokens accepted"], figures["tokens/verification"]) == ("44 %", "2.33")
    assert float(figures["tokens/s"]) > 0
    sampling = service.backend.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed, sampling.num_speculative_tokens) == (9, 0.5, 7, 3)


def test_what_is_not_asked_for_is_left_to_the_service_and_speculation_can_be_off(page: Page, service: Service):
    service.steps = [[5]]
    page.open("playground")
    page.set("#prompt", "the")
    page.set("#max-tokens", "9")
    page.find("#generate").click()
    page.wait_for_status("finished")
    page.find("#speculation").click()
    assert not page.find("#draft-length").is_enabled()
    page.find("#generate").click()
    until(lambda: len(service.backend.requests) == 2)
    on, off = (request.sampling for request in service.backend.requests)
    assert (on.num_speculative_tokens, on.seed) == (None, None)
    assert off.num_speculative_tokens == 0


@pytest.mark.parametrize("by_keyboard", [False, True])
def test_stopping_cancels_the_generation(page: Page, service: Service, by_keyboard: bool):
    ids = service.tokenizer.encode("abcde")
    service.steps = [ids[:1], ids[1:], None]
    page.open("playground")
    page.set("#max-tokens", "9")
    page.set("#prompt", "the")
    if by_keyboard:
        page.find("#prompt").send_keys(Keys.CONTROL, Keys.ENTER)
    else:
        page.find("#generate").click()
    page.wait(lambda: len(page.tokens()) == 5)
    assert page.text("#run-status") == "generating…"
    page.wait(lambda: page.figures("#run-figures")["tokens/verification"] == "4.00")
    if by_keyboard:
        page.find("body").send_keys(Keys.ESCAPE)
    else:
        page.find("#stop").click()
    page.wait_for_status("stopped")
    until(lambda: service.backend.cancelled)
    assert page.text("#output") == "abcde"
    assert page.find("#generate").is_enabled()
    assert not page.find("#stop").is_enabled()


def test_a_refusal_is_shown_in_the_services_words(page: Page, service: Service):
    page.expected_error = "400"
    page.open("playground")
    page.set("#max-tokens", "1000")
    page.find("#generate").click()
    page.wait_for_status("max_tokens must be at most")
    assert service.backend.requests == []


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
        page.set("#max-tokens", "9")
        page.find("#generate").click()
        page.wait_for_status("finished")
        stored = driver.execute_script("return [Object.values(sessionStorage), localStorage.length, document.cookie]")
        assert stored == [[KEY], 0, ""]
        assert KEY not in driver.current_url
