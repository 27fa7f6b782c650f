"""Reads an answer as it comes: content, reasoning and tool calls. transformers' response parser does the splitting.

An answer that does not keep to its family's form loses nothing: from the call that cannot be read on, it is content.
"""

from __future__ import annotations

import ast
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.cluster.replies.families import (
    IGNORED,
    PLAIN,
    REASONING_FAMILIES,
    TOOL_FAMILIES,
    ToolFamily,
    WrittenCalls,
)
from outrider.cluster.replies.held_calls import HeldCalls
from outrider.cluster.replies.parameters import parameter_schemas, tagged_value
from outrider.cluster.replies.tools import Tool, ToolCall, ToolUse, joined_calls, new_call

logger = logging.getLogger(__name__)

CONTENT = "content"
HELD = "held_calls"  # a field of calls that are read as they come
REASONING = ("reasoning_content", "reasoning", "thinking")  # what response templates call it
_JSON_WORDS = {"true": "True", "false": "False", "null": "None"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a part of an answer says."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    num_reasoning_tokens: int = 0

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplySyntax:
    """How the served model writes calls and thoughts; None: it does neither, and all is content."""

    tool_call_parser: str | None = None  # of TOOL_FAMILIES
    reasoning_parser: str | None = None  # of REASONING_FAMILIES
    response_template: Mapping[str, Any] | None = None  # the tokenizer's own: goes before both

    def __post_init__(self) -> None:
        for name, families in (("tool_call_parser", TOOL_FAMILIES), ("reasoning_parser", REASONING_FAMILIES)):
            value = getattr(self, name)
            if value is not None and value not in families:
                raise ValueError(f"{name} must be one of {', '.join(families)}, not {value}")

    @property
    def tool_family(self) -> ToolFamily | None:
        """Return how the model calls tools; None: in a way that only its response template knows, or not at all."""
        return None if self.tool_call_parser is None else TOOL_FAMILIES[self.tool_call_parser]

    @property
    def forced_family(self) -> ToolFamily:
        """Return the form of calls that the model is made to write."""
        family = self.tool_family
        return PLAIN if family is None else family

    @property
    def thought_marks(self) -> tuple[str, ...]:
        """Return what stands before and behind a thought."""
        if self.reasoning_parser is None:
            return ()
        family = REASONING_FAMILIES[self.reasoning_parser]
        return (family.opening, family.closing)

    def reader(self, prompt: str, use: ToolUse, *, is_held: bool) -> ReplyReader | None:
        """Return what reads an answer to this prompt; None where all of it is content.

        `is_held`: a grammar holds calls to their form, so that they can be read as they come.
        """
        if use.need == "required":  # by a grammar that leaves no room for thoughts
            return self._reader({}, "", self.forced_family, use, is_held=is_held)
        if self.response_template is not None:
            return ReplyReader(dict(self.response_template), prompt, use.callable_tools)
        fields: dict[str, Any] = {}
        prefix = ""
        if self.reasoning_parser is not None:
            family = REASONING_FAMILIES[self.reasoning_parser]
            marks = {"open": family.opening, "close": family.closing}
            fields[REASONING[0]] = {**marks, "content_args": {"strip": False}}
            if family.is_begun or prompt.rstrip().endswith(family.opening):
                prefix = family.opening
        return self._reader(fields, prefix, self.tool_family if use.callable_tools else None, use, is_held=is_held)

    @staticmethod
    def _reader(
        fields: Mapping[str, Any], prefix: str, family: ToolFamily | None, use: ToolUse, *, is_held: bool
    ) -> ReplyReader | None:
        tools = use.callable_tools
        if family is not None and is_held and family.written.is_json:
            template = _template({**fields, HELD: _held_field(family.written)})
            return ReplyReader(template, prefix, tools, HeldCalls(family.written, tools))
        if family is not None:
            fields = {**fields, **family.fields}
        has_tags = family is not None and family.written.has_tags
        return ReplyReader(_template(fields), prefix, tools, has_tags=has_tags) if fields else None


def _held_field(written: WrittenCalls) -> dict[str, Any]:
    """Return a field of all that follows the trigger of calls or, where they have none, that looks like their first."""
    if written.trigger:
        return {"open": written.trigger, "content": "text"}
    return {"open_pattern": rf"\A(?={re.escape((written.before + written.begin)[0])})", "content": "text"}


def _template(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a response template of some fields and of content, to be read from the answer's beginning."""
    return {"start_anchor_pattern": r"\A", "fields": {CONTENT: {"content_args": {"strip": False}}, **fields}}


class ReplyReader:
    """One answer under way. White space between its parts belongs to none of them."""

    def __init__(
        self,
        template: dict[str, Any],
        prefix: str,
        tools: Sequence[Tool],
        held: HeldCalls | None = None,
        *,
        has_tags: bool = False,
    ) -> None:
        """`prefix` is what the prompt has written of the answer already; `held` reads the field `HELD`.

        `has_tags`: arguments are texts of tags, which their schemas tell how to read.
        """
        from transformers.utils.chat_parsing import ResponseParser  # takes seconds, and most answers need none

        self._parser = ResponseParser(template, prefix=prefix, tools=[tool.as_template_input() for tool in tools])
        self._held = held
        self._schemas = {tool.name: parameter_schemas(tool) for tool in tools} if has_tags else {}
        self._region: str | None = None
        for event in self._parser.initial_events:
            self._region = event["field"] if event["type"] != "region_close" else None
        self._is_first = True  # the region is the answer's first
        self._is_empty = True  # nothing but white space came in this region
        self._blank = ""  # white space that is not given out until more of its region follows
        self._ungiven = ""  # what came and was not given out: with a call open, from its opening on
        self._is_broken = False
        self.num_calls = 0

    def read(self, texts: Iterable[str], *, is_last: bool) -> Said:
        """Take in the texts of some tokens, the answer's last ones or not; return what they settle."""
        said: list[Said] = []
        for text in texts:
            was_thinking = self._is_thinking
            said.append(self._fed(text))
            said.append(Said(num_reasoning_tokens=int(was_thinking or self._is_thinking)))
        return joined([*said, self._finished()] if is_last else said)

    @property
    def _is_thinking(self) -> bool:
        return self._region in REASONING

    @property
    def is_within_call(self) -> bool:
        """Return whether a call was begun that has not ended, so that its arguments are no JSON yet."""
        return self._held is not None and self._held.is_within

    def _fed(self, text: str) -> Said:
        if self._is_broken:
            return Said(content=text)
        self._ungiven += text
        return self._read(lambda: self._parser.feed(text))

    def _finished(self) -> Said:
        if self._is_broken:
            return Said()
        said = self._read(lambda: self._parser.finalize()[1])
        has_blank = not (self._is_broken or self.num_calls or self._is_thinking)
        return joined([said, Said(content=self._blank)]) if has_blank else said

    def _read(self, parse: Callable[[], Sequence[Mapping[str, Any]]]) -> Said:
        """Return what events of the parser say; where it cannot go on, all that is left as content, as what follows."""
        said: list[Said] = []
        try:
            for event in parse():
                for part in self._settled(event):
                    said.append(part)
        except (ValueError, KeyError) as error:  # what the parser raises for what is not in its form
            logger.info("an answer is read no further: %s", error)
            self._is_broken = True
            self._region = CONTENT
            said.append(Said(content=self._blank + self._ungiven))
        return joined(said)

    def _settled(self, event: Mapping[str, Any]) -> Iterator[Said]:
        region = event["field"]
        is_text = region == CONTENT or region in REASONING
        match event["type"]:
            case "region_open":
                self._region = region
                self._ungiven = self._blank + self._ungiven
                self._is_empty, self._blank = True, ""
            case "region_chunk" if is_text:
                yield self._text(event["text"])
            case "region_chunk" if region == HELD:
                yield from self._held_calls(event["text"])
            case "region_close":
                self._is_first = False
                if region == HELD:
                    yield self._held_end()
                elif not is_text and region != IGNORED:
                    yield Said(calls=self._calls(event["value"]))

    def _text(self, text: str) -> Said:
        self._ungiven = self._ungiven.partition(text)[2]
        text = self._blank + text
        if self._is_empty and (self._is_thinking or not self._is_first):
            text = text.lstrip()
        kept = text.rstrip()
        self._blank = text[len(kept) :]
        self._is_empty = self._is_empty and not kept
        return Said(reasoning=kept) if self._is_thinking else Said(content=kept)

    def _calls(self, value: object) -> tuple[ToolCall, ...]:
        written = _pythonic_calls(value) if isinstance(value, str) else value
        calls = tuple(self._call(item) for item in (written if isinstance(written, list) else [written]))
        self.num_calls += len(calls)
        self._ungiven = ""
        return calls

    def _call(self, item: object) -> ToolCall:
        function = item["function"] if isinstance(item, dict) and "function" in item else item
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"a call without a name: {item!r}")
        name, arguments = function["name"], function.get("arguments", {})
        schemas = self._schemas.get(name)
        if schemas and isinstance(arguments, dict):
            arguments = {
                key: tagged_value(value, schemas[key]) if isinstance(value, str) and key in schemas else value
                for key, value in arguments.items()
            }
        return new_call(name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))

    def _held_calls(self, text: str) -> Iterator[Said]:
        assert self._held is not None
        try:
            for call in self._held.feed(text):
                self.num_calls += bool(call.name)
                yield Said(calls=(call,))
        finally:
            if self.num_calls:
                self._ungiven = self._held.pending

    def _held_end(self) -> Said:
        assert self._held is not None
        return Said(content=self._held.leftover if self.num_calls else self._ungiven)


def _pythonic_calls(text: str) -> list[dict[str, Any]]:
    """Read `[name(key=value, ...), ...]`; raises `ValueError`. Values are Python's literals or JSON's."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, RecursionError) as error:
        raise ValueError(f"not calls in Python: {error}") from error
    if not isinstance(tree, ast.List):
        raise ValueError("not a list of calls")
    calls = []
    for node in tree.elts:
        if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
            raise ValueError(f"not a call with keywords: {ast.unparse(node)}")
        arguments = {str(keyword.arg): _literal(keyword.value) for keyword in node.keywords}
        calls.append({"name": ast.unparse(node.func), "arguments": arguments})
    return calls


def _literal(node: ast.expr) -> Any:
    for name in ast.walk(node):
        if isinstance(name, ast.Name) and name.id in _JSON_WORDS:
            name.id = _JSON_WORDS[name.id]
    return ast.literal_eval(ast.unparse(node))


def joined(parts: Sequence[Said]) -> Said:
    """Return what parts of an answer say together."""
    return Said(
        content="".join(part.content for part in parts),
        reasoning="".join(part.reasoning for part in parts),
        calls=joined_calls(call for part in parts for call in part.calls),
        num_reasoning_tokens=sum(part.num_reasoning_tokens for part in parts),
    )
