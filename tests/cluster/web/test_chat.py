"""The playground's chat: roles, history, Markdown, stopping."""

from __future__ import annotations

import time

import pytest
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver

from browser import Page, opened
from fakes.web_service import ATTACK, Service, build_service
from support.waiting import wait_until

ANSWER = "#messages li:last-child .content"
STATUS = "#chat-status"


def say(page: Page, text: str, ending: str = "finished") -> None:
    page.set("#message", text + Keys.ENTER)
    page.wait_for_status(ending, STATUS)


def test_the_chat_comes_first_and_sends_roles_and_history(page: Page, service: Service):
    page.open("playground")
    page.set("#system", "be brief")
    for number, answer in enumerate(["a **fox**", "a dog"], start=1):
        service.say(answer)
        say(page, f"who {number}?")
    assert service.prompts() == [
        "<|start|>system\nbe brief<|end|><|start|>user\nwho 1?<|end|><|start|>assistant\n",
        "<|start|>system\nbe brief<|end|><|start|>user\nwho 1?<|end|><|start|>assistant\na **fox**<|end|>"
        "<|start|>user\nwho 2?<|end|><|start|>assistant\n",
    ]
    assert page.texts("#messages li > span") == ["user", "assistant"] * 2
    assert page.texts("#messages .content") == ["who 1?", "a fox", "who 2?", "a dog"]
    assert page.find("#message").get_property("value") == ""
    figures = page.figures("#chat-figures")
    num_tokens = len(service.tokenizer.encode("a dog"))
    assert (figures["tokens"], figures["tokens/verification"]) == (str(num_tokens), "2.33")
    assert float(figures["tokens/s"]) > 0


def test_a_new_chat_forgets_and_stops_what_is_under_way(page: Page, service: Service):
    service.steps = [service.tokenizer.encode("abc"), None]
    page.open("playground")
    page.set("#message", "who?" + Keys.ENTER)
    page.wait(lambda: page.texts(ANSWER) == ["abc"])
    page.find("#new-chat").click()
    wait_until(lambda: service.backend.cancelled)
    page.wait(lambda: page.texts("#messages li") == [])
    assert page.figures("#chat-figures") == {}
    service.say("a dog")
    say(page, "and now?")
    assert service.prompts()[1] == "<|start|>user\nand now?<|end|><|start|>assistant\n"


@pytest.mark.parametrize("by_keyboard", [False, True])
def test_what_was_stopped_stays_in_the_history(page: Page, service: Service, by_keyboard: bool):
    service.steps = [service.tokenizer.encode("ab"), service.tokenizer.encode("cd"), None]
    page.open("playground")
    page.set("#message", "who?" + Keys.ENTER)
    page.wait(lambda: page.texts(ANSWER) == ["abcd"])
    if by_keyboard:
        page.find("#message").send_keys(Keys.ESCAPE)
    else:
        page.find("#chat-stop").click()
    page.wait_for_status("stopped", STATUS)
    wait_until(lambda: service.backend.cancelled)
    assert page.texts("#messages .content") == ["who?", "abcd"]
    assert page.find("#send").is_enabled()
    assert not page.find("#chat-stop").is_enabled()
    service.say("a dog")
    say(page, "go on")
    assert service.prompts()[1] == (
        "<|start|>user\nwho?<|end|><|start|>assistant\nabcd<|end|><|start|>user\ngo on<|end|><|start|>assistant\n"
    )


def test_enter_sends_and_shift_enter_is_a_new_line(page: Page, service: Service):
    service.say("a dog")
    page.open("playground")
    page.set("#message", "one")
    page.find("#message").send_keys(Keys.SHIFT, Keys.ENTER)
    assert service.backend.requests == []
    say(page, "one" + Keys.SHIFT + Keys.ENTER + Keys.NULL + "two")
    assert page.texts("#messages .content") == ["one\ntwo", "a dog"]
    assert len(service.backend.requests) == 1


def test_while_an_answer_comes_nothing_else_is_sent(page: Page, service: Service):
    service.steps = [service.tokenizer.encode("ab"), None]
    page.open("playground")
    page.set("#message", "who?" + Keys.ENTER)
    page.wait(lambda: page.texts(ANSWER) == ["ab"])
    page.find("#message").send_keys("and?" + Keys.ENTER)
    time.sleep(0.3)
    assert len(service.backend.requests) == 1
    assert page.find("#message").get_property("value") == "and?"
    assert page.text(STATUS) == "generating…"


def test_an_answer_is_shown_as_markdown_or_as_its_tokens(page: Page, service: Service):
    service.say("a **fox**")
    page.open("playground")
    say(page, "who?")
    assert page.markup(ANSWER) == "<p>a <strong>fox</strong></p>"
    assert not page.find("#chat-legend").is_displayed()
    page.find("#show-origins").click()
    shown = page.tokens(ANSWER)
    assert "".join(text for _, text in shown) == "a **fox**"
    assert {origin for origin, _ in shown} >= {"token plain", "token accepted"}
    counted = page.find("#chat-legend").text.split()
    assert counted[:2] == ["accepted", str(sum(origin == "token accepted" for origin, _ in shown))]
    page.find("#show-origins").click()
    assert page.markup(ANSWER) == "<p>a <strong>fox</strong></p>"


TOOLS = '[{"type": "function", "function": {"name": "weather"}}]'
CALLS = "\n".join(
    f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>' for city in ("Rom", "Oslo")
)


def test_calls_are_blocks_and_their_results_are_asked_for_one_by_one(page: Page, service: Service):
    service.say(f"<think>hm</think>See.{CALLS}")
    page.open("playground")
    page.set("#tools", TOOLS)
    say(page, "who?")
    assert page.texts(f"{ANSWER} .call") == ['weather({"city": "Rom"})', 'weather({"city": "Oslo"})']
    assert page.texts(f"{ANSWER} details > summary") == ["thought"]
    assert page.texts(f"{ANSWER} > p") == ["See."]
    assert page.find("#message").get_attribute("placeholder") == "What weather returns"
    say(page, "sunny", ending="and what weather returns?")
    assert len(service.backend.requests) == 1
    service.say("Take a hat.")
    say(page, "rainy")
    assert page.texts("#messages li > span") == ["user", "assistant", "tool", "tool", "assistant"]
    assert service.prompts()[1] == (
        "<|start|>user\nwho?<|end|><|start|>assistant\nSee.<|end|><|start|>tool\nsunny<|end|>"
        "<|start|>tool\nrainy<|end|><|start|>assistant\n"
    )
    assert page.find("#message").get_attribute("placeholder") == "Say something"


def test_a_call_that_was_cut_off_is_shown_and_goes_no_further(page: Page, service: Service):
    service.say(f"See.{CALLS[:58]}")
    page.open("playground")
    page.set("#tools", TOOLS)
    say(page, "who?")
    assert page.texts(f"{ANSWER} .call") == ['weather({"city": "Rom)']
    assert page.find("#message").get_attribute("placeholder") == "Say something"
    service.say("Ah.")
    say(page, "go on")
    assert service.prompts()[1] == (
        "<|start|>user\nwho?<|end|><|start|>assistant\nSee.<|end|><|start|>user\ngo on<|end|><|start|>assistant\n"
    )


def test_tools_that_are_no_list_are_not_sent(page: Page, service: Service):
    page.open("playground")
    page.set("#tools", "{")
    page.set("#message", "who?" + Keys.ENTER)
    time.sleep(0.3)
    assert service.backend.requests == []
    assert page.driver.execute_script("return document.querySelector('#tools').validity.customError")


def test_an_answer_that_ends_at_once_says_so(page: Page, service: Service):
    service.steps = [[]]
    page.open("playground")
    say(page, "who?", ending="the model ended at once")


def test_an_attack_stays_text(page: Page, service: Service):
    attack = service.tokenizer.convert_tokens_to_ids(ATTACK)
    script = "<script>document.title='owned'</script>"
    service.steps = [[attack], service.tokenizer.encode(f"\n\n**{script}**\n\n[click](javascript:alert(1))"), [attack]]
    page.open("playground")
    say(page, ATTACK)
    for _ in range(2):
        assert page.text(ANSWER).count(ATTACK) == 2
        assert script in page.text(ANSWER)
        assert page.texts(f"{ANSWER} :is(img, script, a)") == []
        assert page.driver.title == "Outrider"
        page.find("#show-origins").click()
    assert "[click](javascript:alert(1))" in page.text(ANSWER)


def test_without_a_chat_template_the_services_words_are_shown(driver: WebDriver):
    service = build_service(chat_template=None)
    with opened(driver, service.api()) as page:
        page.expected_error = "400"
        page.open("playground")
        say(page, "who?", ending="messages: this model's tokenizer has no chat template; use /v1/completions")
        assert page.find(STATUS).get_attribute("data-kind") == "bad"
        assert page.texts("#messages li") == []
        assert page.find("#message").get_property("value") == "who?"


def test_options_that_are_wrong_are_shown_and_nothing_is_sent(page: Page, service: Service):
    page.open("playground")
    page.find("#options-fold summary").click()
    assert not page.find("#max-tokens").is_displayed()
    page.driver.execute_script("document.querySelector('#max-tokens').value = 'many'")
    page.set("#message", "who?" + Keys.ENTER)
    page.wait(page.find("#max-tokens").is_displayed)
    assert service.backend.requests == []
    assert page.texts("#messages li") == []
