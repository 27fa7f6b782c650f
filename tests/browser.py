"""A headless Chromium, and the web page in it."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import uvicorn
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait
from starlette.types import ASGIApp

from support.waiting import wait_until

WAIT_S = 30.0


@contextmanager
def browser() -> Iterator[WebDriver]:
    """Start a Chromium; without one the test is skipped, or fails where it should have one."""
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
    try:
        yield driver
    finally:
        driver.quit()


@dataclass(slots=True)
class Page:
    """The page in the browser."""

    driver: WebDriver
    url: str
    expected_error: str = ""  # a part of those console messages that the test provokes

    def open(self, view: str, mode: str = "") -> None:
        """Open a view afresh, and where it has modes, one of them."""
        self.driver.get("about:blank")
        self.driver.get(f"{self.url}/#{view}")
        if mode:
            self.choose(mode)

    def choose(self, mode: str) -> None:
        """Choose a mode of the playground."""
        self.find(f"#modes label:has([value={mode}])").click()

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

    def tokens(self, selector: str = "#output") -> list[list[str]]:
        script = "return [...document.querySelectorAll(arguments[0])].map(t => [t.className, t.textContent])"
        return self.driver.execute_script(script, f"{selector} > *")

    def text(self, selector: str) -> str:
        return self.find(selector).get_property("textContent")

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)"
        return self.driver.execute_script(script, selector)

    def markup(self, selector: str) -> str:
        return self.find(selector).get_property("innerHTML")

    def wait(self, condition: Callable[[], Any]) -> None:
        WebDriverWait(self.driver, WAIT_S, poll_frequency=0.05).until(lambda _: condition())

    def wait_for_status(self, beginning: str, selector: str = "#run-status") -> None:
        self.wait(lambda: self.text(selector).startswith(beginning))

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


@contextmanager
def serving(app: ASGIApp) -> Iterator[str]:
    """Serve on a thread; yield the address."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join()
