"""Calls in the form that a template takes them in, whichever kind it is of."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from fakes.backend import CALL_ARGUMENTS, CALL_TEMPLATES, build_tokenizer, calls_template, chat_of_call
from outrider.verifier_service.chat_template import ArgumentsError, ChatWriter

MAPPING = json.loads(CALL_ARGUMENTS)


class CountedTokenizer:
    """A tokenizer that counts how often its template is applied."""

    def __init__(self, chat_template: Any) -> None:
        self.own, self.num_applied = build_tokenizer(chat_template), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def apply_chat_template(self, *arguments: Any, **fields: Any) -> Any:
        self.num_applied += 1
        return self.own.apply_chat_template(*arguments, **fields)


def writer(kind: str) -> ChatWriter:
    return ChatWriter(build_tokenizer(calls_template(CALL_TEMPLATES[kind][0])))


@pytest.mark.parametrize("arguments", [CALL_ARGUMENTS, MAPPING])
@pytest.mark.parametrize("kind", CALL_TEMPLATES)
def test_a_template_gets_the_form_that_it_takes(kind: str, arguments: Any):
    messages = chat_of_call(arguments)
    before = copy.deepcopy(messages)
    assert writer(kind).write(messages) == f"[user]fox[assistant]{CALL_TEMPLATES[kind][1]}"
    assert messages == before


def test_what_is_shown_only_beside_tools_gets_its_form_too():
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    text = writer("joins where there are tools").write(chat_of_call(MAPPING), tools=[tool])
    assert text == f"[user]fox[assistant]!{CALL_ARGUMENTS}"


def test_a_template_is_asked_once_and_only_where_there_are_calls():
    tokenizer = CountedTokenizer(calls_template(CALL_TEMPLATES["joins"][0]))
    chats = ChatWriter(tokenizer)
    chats.write([{"role": "user", "content": "fox", "tool_calls": None}])
    assert tokenizer.num_applied == 1
    chats.write(chat_of_call(MAPPING))
    num_asked = tokenizer.num_applied - 2
    assert num_asked > 0
    chats.write(chat_of_call(MAPPING))
    assert tokenizer.num_applied == num_asked + 3
    walks = calls_template(CALL_TEMPLATES["walks"][0])
    assert chats.write(chat_of_call(CALL_ARGUMENTS), chat_template=walks).endswith(CALL_TEMPLATES["walks"][1])


def test_a_tokenizer_may_have_a_template_of_its_own_for_tools():
    default, tool_use = (calls_template(CALL_TEMPLATES[kind][0]) for kind in ("walks", "joins"))
    chats = ChatWriter(build_tokenizer({"default": default, "tool_use": tool_use}))  # type: ignore[arg-type]
    assert chats.write(chat_of_call(CALL_ARGUMENTS)).endswith("<city>größer")
    assert chats.write(chat_of_call(MAPPING), tools=[]).endswith(f"!{CALL_ARGUMENTS}")


def test_what_a_template_does_not_like_it_says_itself():
    with pytest.raises(Exception, match="no such role"):
        writer("joins").write([*chat_of_call(MAPPING), {"role": "tool", "content": "sunny", "tool_call_id": "c1"}])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ('{"city', "Unterminated string"),
        ("[1]", r"\[1\] is none"),
        ([1], r"\[1\] is none"),
        ('"a"', '"a" is none'),
        ('{"city": "\\ud800"}', "surrogates not allowed"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_what_is_no_object_is_named_where_a_mapping_is_wanted(arguments: Any, reason: str):
    named = r"^tool_calls: function.arguments of 'weather' \(c1\) must be a JSON object for this model's chat template"
    with pytest.raises(ArgumentsError, match=f"{named}.*{reason}"):
        writer("walks").write(chat_of_call(arguments))


@pytest.mark.parametrize("arguments", ["", " ", None, {}])
def test_no_arguments_are_an_empty_object(arguments: Any):
    assert writer("writes JSON").write(chat_of_call(arguments)).endswith("{}")


def test_what_is_no_json_is_named_where_text_is_wanted():
    with pytest.raises(ArgumentsError, match=r"must be JSON for .*: Object of type set is not JSON serializable"):
        writer("joins").write(chat_of_call({"city": {1}}))


@pytest.mark.parametrize("kind", ["joins", "walks"])
def test_a_call_may_stand_without_the_function_around_it(kind: str):
    body, written = CALL_TEMPLATES[kind]
    template = calls_template(body).replace("call.function.arguments", "(call.function or call).arguments")
    for arguments in (CALL_ARGUMENTS, MAPPING):
        messages = chat_of_call(arguments)
        messages[1]["tool_calls"] = [messages[1]["tool_calls"][0]["function"]]
        assert ChatWriter(build_tokenizer(template)).write(messages).endswith(written)


SYSTEM_FIRST = (  # as Qwen3.5's: a system message may only begin the chat
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
NO_SYSTEM = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + (
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
KNOWS_DEVELOPER = "{% for m in messages %}{% if m.role == 'developer' %}D:{% endif %}{{ m.content }};{% endfor %}"
SILENT = (
    "{% for m in messages %}{% if m.role in ('system', 'user') %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)


def said(*pairs: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in pairs]


@pytest.mark.parametrize(
    ("template", "chat", "text"),
    [
        (SILENT, said(("developer", "PIRATE"), ("user", "hi")), "[system]PIRATE[user]hi"),
        (KNOWS_DEVELOPER, said(("developer", "PIRATE"), ("user", "hi")), "D:PIRATE;hi;"),
        (SYSTEM_FIRST, said(("system", "X"), ("developer", "Y"), ("user", "hi")), "[system]X\n\nY[user]hi"),
        (SYSTEM_FIRST, said(("user", "hi"), ("developer", "Y"), ("user", "ho")), "[system]Y[user]hi[user]ho"),
        (SYSTEM_FIRST, said(("system", "X"), ("user", "hi"), ("system", "Y")), "[system]X\n\nY[user]hi"),
        (SILENT, said(("system", "X"), ("user", "hi"), ("system", "Y")), "[system]X[user]hi[system]Y"),
        (NO_SYSTEM, said(("system", "X"), ("system", "Y"), ("user", "hi")), "[user]X\n\nY\n\nhi"),
    ],
)
def test_system_texts_come_where_the_template_takes_them(template: str, chat: list[dict[str, Any]], text: str):
    before = copy.deepcopy(chat)
    assert ChatWriter(build_tokenizer(template)).write(chat, add_generation_prompt=False) == text
    assert chat == before


def test_what_no_form_helps_is_told_by_the_first_error():
    with pytest.raises(Exception, match="no system"):
        ChatWriter(build_tokenizer(NO_SYSTEM)).write(said(("system", "X"), ("assistant", "hi")))
