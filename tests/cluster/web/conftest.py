"""What the tests of the page share: one browser, a played service, and the page of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from selenium.webdriver.remote.webdriver import WebDriver

from browser import Page, browser, opened
from fakes.web_service import Service, build_service


@pytest.fixture(scope="session")
def driver() -> Iterator[WebDriver]:
    with browser() as driver:
        yield driver


@pytest.fixture
def service() -> Service:
    return build_service()


@pytest.fixture
def page(driver: WebDriver, service: Service) -> Iterator[Page]:
    with opened(driver, service.api()) as page:
        yield page
