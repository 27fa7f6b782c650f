"""docs/api.md has every field that a body may hold, and says of each what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from outrider.cluster.api.anthropic.options import SILENT_FIELDS
from outrider.cluster.api.openai.messages import MessagesBody
from outrider.cluster.api.openai.protocol import IGNORED_FIELDS, NEUTRAL_VALUES, ChatBody, CompletionBody
from outrider.cluster.api.openai.responses_protocol import ResponsesBody
from outrider.cluster.gateway.client_fields import CLIENT_FIELDS, RESPONSES, named_at, with_table
from outrider.cluster.replies.families import REASONING_FAMILIES, TOOL_FAMILIES
from outrider.proto import generation_pb2

TEXT = (Path(__file__).parents[4] / "docs" / "api.md").read_text()


def documented(section: str) -> dict[str, str]:
    """Return what a section's table says of each field."""
    body = TEXT.partition(f"## {section}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+?) \| (honoured|ignored|refused) \|", body, flags=re.MULTILINE)
    return {name: kind for names, kind in rows for name in re.findall(r"`(\w+)`", names)}


@pytest.mark.parametrize(
    ("section", "kinds"), [("Completions and chat", (ChatBody, CompletionBody)), ("Responses", (ResponsesBody,))]
)
def test_every_field_is_in_its_table(section, kinds):
    told = documented(section) | dict.fromkeys(
        CLIENT_FIELDS if section != "Responses" else named_at(RESPONSES), "honoured"
    )
    served = {name for kind in kinds for name in (*kind.model_fields, *kind.passed_fields)}
    refused = {"background", "conversation", "prompt", "top_logprobs"} if section == "Responses" else set()
    assert {name for name, kind in told.items() if kind == "honoured"} == served - refused
    assert {name for name, kind in told.items() if kind == "ignored"} <= IGNORED_FIELDS
    if section == "Responses":
        assert {name for name, kind in told.items() if kind == "refused"} == refused
    else:
        assert {name for name, kind in told.items() if kind == "ignored"} == IGNORED_FIELDS
        assert {name for name, kind in told.items() if kind == "refused"} == NEUTRAL_VALUES.keys() - {"echo"}


def test_every_field_of_anthropics_is_in_its_table():
    told = documented("Anthropic's messages")
    served = {*MessagesBody.model_fields, *MessagesBody.passed_fields} - SILENT_FIELDS
    assert {name for name, kind in told.items() if kind == "honoured"} | named_at(RESPONSES).keys() == served
    assert {name for name, kind in told.items() if kind == "ignored"} == SILENT_FIELDS


def test_the_table_of_fields_is_current():
    assert with_table(TEXT) == TEXT
    assert {field.name for field in generation_pb2.SamplingParams.DESCRIPTOR.fields} <= {
        *CLIENT_FIELDS,
        *("logprobs", "json_schema", "json_object", "regex", "grammar", "choice"),
    }


def test_every_parser_is_in_its_place():
    tools = TEXT.partition("## Tools\n")[2]
    for name in (*TOOL_FAMILIES, *REASONING_FAMILIES):
        assert f"`{name}`" in tools, name
