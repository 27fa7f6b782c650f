"""Tool calls and reasoning of model families, under vLLM's names for their parsers.

For reading, a family has fields of transformers' response templates
(https://huggingface.co/docs/transformers/main/chat_response_parsing), whose parser reads them. For writing, by a
grammar that constrains a model's calls, it has `WrittenCalls`. Both follow the families' public chat templates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_CALL = {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.arguments}"}}
_PARAMETERS_CALL = {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.parameters}"}}
_EACH_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}}
_NAMED_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
IGNORED = "ignored"  # a field whose text is dropped
# DeepSeek's special tokens have full-width bars
_CALLS_BEGIN, _CALLS_END, _CALL_BEGIN, _CALL_SEP, _CALL_END = (
    f"<\uff5ctool\u2581{name}\uff5c>"
    for name in ("calls\u2581begin", "calls\u2581end", "call\u2581begin", "sep", "call\u2581end")
)
_BEGIN_OBJECT = '{"name": "NAME", "arguments": '
NAME = "NAME"  # placeholder of the function's name in `begin`


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCalls:
    """The form of calls: trigger before (begin arguments end) (between begin arguments end)* after."""

    trigger: str  # begins calls and no other text; "": calls are recognised by their form
    before: str = ""
    begin: str
    end: str
    between: str
    after: str = ""
    has_keywords: bool = False  # arguments are name=value, not a JSON object
    has_tags: bool = False  # arguments are tags, not a JSON object

    @property
    def is_json(self) -> bool:
        """Whether a call's arguments are one JSON object."""
        return not (self.has_keywords or self.has_tags)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFamily:
    """Tool calls of a family."""

    fields: dict[str, dict[str, Any]]  # of a response template; names are free
    written: WrittenCalls


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFamily:
    """Reasoning of a family."""

    opening: str
    closing: str
    is_begun: bool = False  # the answer begins within reasoning, even if the chat template did not open it
    fields: dict[str, dict[str, Any]] | None = None  # of a response template; None: text between the marks


def _json_calls(transform: dict[str, Any], **anchors: str | list[str]) -> dict[str, Any]:
    """Return a field of JSON between anchors; with `_EACH_CALL`, of a list of calls."""
    each = {"transform_each": True} if transform is _EACH_CALL else {}
    return {**anchors, "content": "json", "repeats": True, "transform": transform, **each}


def _mark(text: str) -> dict[str, dict[str, Any]]:
    return {IGNORED: {"open": text, "close_pattern": r"(?=[\s\S])", "repeats": True}}


def _written_list(trigger: str) -> WrittenCalls:
    return WrittenCalls(trigger=trigger, before="[", begin=_BEGIN_OBJECT, end="}", between=", ", after="]")


_HERMES = ToolFamily(
    fields={"tool_calls": _json_calls(_CALL, open="<tool_call>", close="</tool_call>")},
    written=WrittenCalls(
        trigger="<tool_call>",
        before="\n",
        begin=_BEGIN_OBJECT,
        end="}\n</tool_call>",
        between="\n<tool_call>\n",
    ),
)
# the form of forced calls, for a model without a family
PLAIN = ToolFamily(
    fields={"tool_calls": _json_calls(_EACH_CALL, open_pattern=r"\A\s*(?=\[)")}, written=_written_list(trigger="")
)
TOOL_FAMILIES: dict[str, ToolFamily] = {
    "hermes": _HERMES,
    "qwen": _HERMES,
    "qwen3_coder": ToolFamily(
        fields={
            "tool_calls": {
                "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
                # a string argument may contain the end mark
                "close_pattern": r"(?<=(?:</parameter>|<function=[^>\n]+>)\s*)</function>\s*</tool_call>",
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>(?P<line>\n)?(?P<value>.*?)(?(line)\n)</parameter>"
                },
                "repeats": True,
                "transform": _NAMED_CALL,
            }
        },
        written=WrittenCalls(
            trigger="<tool_call>",
            before="\n",
            begin="<function=NAME>\n",
            end="</function>\n</tool_call>",
            between="\n<tool_call>\n",
            has_tags=True,
        ),
    ),
    "llama3_json": ToolFamily(
        fields={
            "tool_calls": _json_calls(
                _PARAMETERS_CALL,
                open_pattern=r'(?:<\|python_tag\|>\s*)?(?=\{\s*"(?:name|type)"\s*:)',
                close_pattern=r";\s*(?=\{)",
            )
        },
        written=WrittenCalls(trigger="", begin='{"name": "NAME", "parameters": ', end="}", between="; "),
    ),
    "mistral": ToolFamily(
        fields={
            "tool_calls": _json_calls(_EACH_CALL, open_pattern=r"\[TOOL_CALLS\]\s*(?=\[)"),
            "named_tool_calls": _json_calls(
                _NAMED_CALL,
                open_pattern=r"\[TOOL_CALLS\]\s*(?P<name>[A-Za-z0-9_.-]+)\s*(?:\[ARGS\])?\s*(?=\{)",
                close_pattern=r"(?=\[TOOL_CALLS\])",
            ),
        },
        written=_written_list(trigger="[TOOL_CALLS]"),
    ),
    "granite": ToolFamily(
        fields={"tool_calls": _json_calls(_EACH_CALL, open=["<|tool_call|>", "<tool_call>"])},
        written=_written_list(trigger="<|tool_call|>"),
    ),
    "pythonic": ToolFamily(
        fields={"pythonic_tool_calls": {"open_pattern": r"\A\s*(?=\[\s*[A-Za-z_][\w.]*\()", "content": "text"}},
        written=WrittenCalls(
            trigger="", before="[", begin="NAME(", end=")", between=", ", after="]", has_keywords=True
        ),
    ),
    "deepseek_v3": ToolFamily(
        fields={
            "tool_calls": _json_calls(
                _NAMED_CALL,
                open_pattern=f"(?:{_CALLS_BEGIN})?{_CALL_BEGIN}function{_CALL_SEP}(?P<name>[^\\n]+)\\n```json\\n",
                close=f"\n```{_CALL_END}",
            ),
            **_mark(_CALLS_END),
        },
        written=WrittenCalls(
            trigger=_CALLS_BEGIN,
            begin=f"{_CALL_BEGIN}function{_CALL_SEP}NAME\n```json\n",
            end=f"\n```{_CALL_END}",
            between="\n",
            after=_CALLS_END,
        ),
    ),
    "deepseek_v31": ToolFamily(
        fields={
            "tool_calls": _json_calls(
                _NAMED_CALL,
                open_pattern=f"(?:{_CALLS_BEGIN})?{_CALL_BEGIN}(?P<name>[^<\\n]+){_CALL_SEP}",
                close=_CALL_END,
            ),
            **_mark(_CALLS_END),
        },
        written=WrittenCalls(
            trigger=_CALLS_BEGIN, begin=f"{_CALL_BEGIN}NAME{_CALL_SEP}", end=_CALL_END, between="", after=_CALLS_END
        ),
    ),
}
# harmony, the format of gpt-oss: messages in channels, analysis for thoughts, final for the answer, commentary for
# calls and for what is said before them (https://developers.openai.com/cookbook/articles/openai-harmony)
_TURN = r"(?:<\|end\|>)?(?:<\|start\|>assistant)?"
TOOL_FAMILIES["openai"] = ToolFamily(
    fields={
        "tool_calls": _json_calls(
            _NAMED_CALL,
            open_pattern=_TURN
            + r"(?:<\|channel\|>\w+)?\s*to=functions\.(?P<name>[\w.-]+)(?:<\|channel\|>\w+)?"
            + r"\s*(?:<\|constrain\|>)?\s*(?:json)?\s*<\|message\|>",
            close="<|call|>",
        )
    },
    written=WrittenCalls(
        trigger="",
        begin="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
        end="<|call|>",
        between="<|start|>assistant",
    ),
)
_HARMONY_FIELDS = {
    "reasoning_content": {
        "open_pattern": _TURN + r"<\|channel\|>analysis\s*<\|message\|>",
        "close_pattern": r"<\|end\|>|(?=<\|start\|>|<\|channel\|>)",
        "content_args": {"strip": False},
        "repeats": True,
    },
    IGNORED: {
        "open_pattern": _TURN + r"<\|channel\|>(?:final|commentary)\s*(?:<\|constrain\|>\w+\s*)?<\|message\|>"
        r"|<\|end\|>|<\|return\|>",
        "close_pattern": r"(?=[\s\S])",
        "repeats": True,
    },
}
REASONING_FAMILIES: dict[str, ReasoningFamily] = {
    "deepseek_r1": ReasoningFamily(opening="<think>", closing="</think>", is_begun=True),
    "qwen3": ReasoningFamily(opening="<think>", closing="</think>"),
    "mistral": ReasoningFamily(opening="[THINK]", closing="[/THINK]"),
    "openai_gptoss": ReasoningFamily(
        opening="<|channel|>analysis<|message|>", closing="<|channel|>final<|message|>", fields=_HARMONY_FIELDS
    ),
    "granite": ReasoningFamily(opening="Here is my thought process:", closing="Here is my response:"),
}
