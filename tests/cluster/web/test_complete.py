"""The playground's completions: a prompt, and tokens coloured by their origin."""

from __future__ import annotations

import pytest
from selenium.webdriver.common.keys import Keys

from browser import Page
from fakes.web_service import ATTACK, Service
from support.waiting import wait_until


def test_streamed_tokens_are_coloured_by_origin(page: Page, service: Service):
    ids = service.tokenizer.encode("abcdefg")
    attack = service.tokenizer.convert_tokens_to_ids(ATTACK)
    service.steps = [ids[:1], ids[1:5], [attack, ids[5]], ids[6:]]
    page.open("playground", "complete")
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
    page.open("playground", "complete")
    page.set("#prompt", "the")
    page.set("#max-tokens", "9")
    page.find("#generate").click()
    page.wait_for_status("finished")
    page.find("#speculation").click()
    assert not page.find("#draft-length").is_enabled()
    page.find("#generate").click()
    wait_until(lambda: len(service.backend.requests) == 2)
    on, off = (request.sampling for request in service.backend.requests)
    assert (on.num_speculative_tokens, on.seed) == (None, None)
    assert off.num_speculative_tokens == 0


@pytest.mark.parametrize("by_keyboard", [False, True])
def test_stopping_cancels_the_generation(page: Page, service: Service, by_keyboard: bool):
    ids = service.tokenizer.encode("abcde")
    service.steps = [ids[:1], ids[1:], None]
    page.open("playground", "complete")
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
    wait_until(lambda: service.backend.cancelled)
    assert page.text("#output") == "abcde"
    assert page.find("#generate").is_enabled()
    assert not page.find("#stop").is_enabled()


def test_a_refusal_is_shown_in_the_services_words(page: Page, service: Service):
    page.expected_error = "400"
    page.open("playground", "complete")
    page.set("#temperature", "1000000")
    page.find("#generate").click()
    page.wait_for_status("temperature must be in [0, 100]")
    assert service.backend.requests == []
