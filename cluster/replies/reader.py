"""Split an answer, as it streams, into content, reasoning and tool calls, with transformers' response parser.

No text is lost: from the first call that is not in its family's form, the rest is content.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
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
from outrider.cluster.replies.parameters import parameter_schemas, tagged_value
from outrider.cluster.replies.streamed_calls import StreamedCalls
from outrider.cluster.replies.tools import Tool, ToolCall, ToolUse, joined_calls, new_call

logger = logging.getLogger(__name__)

CONTENT = "content"
STREAMED = "streamed_calls"  # the field of constrained calls
REASONING = ("reasoning_content", "reasoning", "thinking")  # names of the field in response templates
# of parsers and of what walks their results: MemoryError is how Python's own tells of deep nesting
_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError, MemoryError)
_JSON_WORDS = {"true": "True", "false": "False", "null": "None"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyPart:
    """A part of an answer."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    num_reasoning_tokens: int = 0

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class Thinking(enum.Enum):
    """Whether an answer begins with a thought."""

    OPEN = "open"  # it begins within one
    POSSIBLE = "possible"  # it may open one
    OVER = "over"  # it has none: what looks like one is text


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplySyntax:
    """How the served model writes calls and reasoning; None: not at all."""

    tool_call_parser: str | None = None  # of TOOL_FAMILIES
    reasoning_parser: str | None = None  # of REASONING_FAMILIES
    response_template: Mapping[str, Any] | None = None  # the tokenizer's; it overrides both

    def __post_init__(self) -> None:
        for name, families in (("tool_call_parser", TOOL_FAMILIES), ("reasoning_parser", REASONING_FAMILIES)):
            value = getattr(self, name)
            if value is not None and value not in families:
                raise ValueError(f"{name} must be one of {', '.join(families)}, not {value}")

    @property
    def tool_family(self) -> ToolFamily | None:
        """The model's family of tool calls; None: only its response template knows them, or it calls no tools."""
        return None if self.tool_call_parser is None else TOOL_FAMILIES[self.tool_call_parser]

    @property
    def forced_family(self) -> ToolFamily:
        """The family of calls that a grammar forces."""
        family = self.tool_family
        return PLAIN if family is None else family

    @property
    def thought_marks(self) -> tuple[str, ...]:
        """The marks before and after reasoning."""
        if self.response_template is not None:
            fields = self.response_template.get("fields") or {}
            field: Mapping[str, Any] = next((fields[name] for name in REASONING if name in fields), {})
            marks = [mark for mark in (field.get("open"), field.get("close")) if isinstance(mark, str)]
            return tuple(marks) if len(marks) == 2 else ()
        if self.reasoning_parser is None:
            return ()
        family = REASONING_FAMILIES[self.reasoning_parser]
        return (family.opening, family.closing)

    def thinking(self, prompt: str, said: str, *, begun: str = "", has_form: bool = False) -> Thinking:
        """Return whether an answer begins within a thought.

        `said` is the last message's text, behind which the prompt says how the answer begins; `begun` is what a
        continued message has said so far. `has_form`: the answer must have a form, which a model that has not been told
        to think may begin at once.
        """
        if not self.thought_marks:
            return Thinking.OVER
        opening, closing = self.thought_marks
        end = prompt.rstrip()
        place = prompt.rfind(said.strip()) if said.strip() else -1
        tail = begun if begun or place < 0 else prompt[place + len(said.strip()) :]
        if end.endswith(opening) or tail.rfind(opening) > tail.rfind(closing):
            return Thinking.OPEN
        if end.endswith(closing) or closing in tail or begun.strip():
            return Thinking.OVER
        is_begun = self.reasoning_parser is not None and REASONING_FAMILIES[self.reasoning_parser].is_begun
        return Thinking.OPEN if is_begun and self.response_template is None and not has_form else Thinking.POSSIBLE

    def reader(
        self,
        prompt: str,
        use: ToolUse,
        *,
        is_constrained: bool,
        thinking: Thinking | None = None,
        shows_reasoning: bool = True,
    ) -> ReplyReader | None:
        """Return the reader of an answer to this prompt; None: all of it is content.

        `is_constrained`: a grammar guarantees the form of calls, so that they can be streamed. Without `thinking`, the
        prompt's end says it. Calls of tools that may not be called are read and not shown.
        """
        make = functools.partial(ReplyReader, shows_calls=use.need != "none", shows_reasoning=shows_reasoning)
        if self.response_template is not None and use.need != "required":
            tools = use.tools if use.need == "none" else use.callable_tools
            return make(dict(self.response_template), prompt, tools)
        thinking = self.thinking(prompt, "") if thinking is None else thinking
        fields: dict[str, Any] = {}
        prefix, start = "", r"\A"
        if thinking is not Thinking.OVER:
            opening, closing = self.thought_marks
            opened, start = rf"\A\s*{re.escape(opening)}", rf"(?:\A|(?<={re.escape(closing)}))"
            if thinking is Thinking.OPEN:
                prefix, make = opening, functools.partial(make, again=opening)
            fields[REASONING[0]] = {"open_pattern": opened, "close": closing, "content_args": {"strip": False}}
        if self.reasoning_parser is not None and (own := REASONING_FAMILIES[self.reasoning_parser].fields) is not None:
            fields, start = dict(own), r"(?:\A|(?<=<\|end\|>)|(?<=assistant))"
        family = self._read_family(use)
        tools = use.callable_tools or use.tools
        if family is not None and is_constrained and family.written.is_json:
            template = _template({**fields, STREAMED: _streamed_field(family.written, start)})
            return make(template, prefix, tools, StreamedCalls(family.written, tools))
        if family is not None:
            fields = {**fields, **_starting_at(start, family.fields)}
        has_tags = family is not None and family.written.has_tags
        return make(_template(fields), prefix, tools, has_tags=has_tags) if fields else None

    def _read_family(self, use: ToolUse) -> ToolFamily | None:
        """Return the family whose calls an answer may have; where none may, only what its mark tells from text."""
        family = self.tool_family
        if use.need == "required":
            return self.forced_family
        if use.callable_tools:
            return family
        return family if use.tools and family is not None and family.written.trigger else None


def _starting_at(start: str, fields: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return fields whose calls may begin where `start` matches, if they may only begin an answer."""
    found: dict[str, dict[str, Any]] = {}
    for name, field in fields.items():
        pattern = field.get("open_pattern", "")
        found[name] = {**field, "open_pattern": pattern.replace(r"\A", start, 1)} if pattern else dict(field)
    return found


def _streamed_field(written: WrittenCalls, start: str) -> dict[str, Any]:
    """Return a field of all text after the calls' trigger; without one, of text at `start` that begins like a call."""
    if written.trigger:
        return {"open": written.trigger, "content": "text"}
    return {"open_pattern": rf"{start}\s*(?={re.escape((written.before + written.begin)[0])})", "content": "text"}


def _template(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a response template of content and other fields, which starts at the answer's beginning."""
    return {"start_anchor_pattern": r"\A", "fields": {CONTENT: {"content_args": {"strip": False}}, **fields}}


class ReplyReader:
    """One answer, as it streams. White space between its parts is dropped."""

    def __init__(
        self,
        template: dict[str, Any],
        prefix: str,
        tools: Sequence[Tool],
        streamed: StreamedCalls | None = None,
        *,
        has_tags: bool = False,
        shows_calls: bool = True,
        shows_reasoning: bool = True,
        again: str = "",
    ) -> None:
        """`prefix` is the beginning of the answer that the prompt contains; `streamed` reads the field `STREAMED`.

        `has_tags`: arguments are tags, whose text is read by their schemas. `again`: the mark of a thought that the
        prompt has opened; some models open it once more.
        """
        self._again = again
        self._shows_calls, self._shows_reasoning = shows_calls, shows_reasoning
        from transformers.utils.chat_parsing import (
            ResponseParser,  # imported late: it takes seconds, and most answers need none
        )

        self._parser = ResponseParser(template, prefix=prefix, tools=[tool.as_template_input() for tool in tools])
        self._streamed = streamed
        self._schemas = {tool.name: parameter_schemas(tool) for tool in tools} if has_tags and shows_calls else {}
        self._region: str | None = None
        for event in self._parser.initial_events:
            self._region = event["field"] if event["type"] != "region_close" else None
        self._is_first = True  # the region is the answer's first
        self._is_empty = True  # the region has only white space so far
        self._blank = ""  # trailing white space, held back until its region goes on
        self._pending = ""  # text that is not part of a result yet: of an open call, all of it
        self._is_broken = False
        self.num_calls = 0

    def read(self, texts: Iterable[str], *, is_last: bool) -> ReplyPart:
        """Read the texts of more tokens; `is_last`: the answer ends with them. Return the new part."""
        said: list[ReplyPart] = []
        for text in texts:
            was_thinking = self._is_thinking
            said.append(self._feed(text))
            said.append(ReplyPart(num_reasoning_tokens=int(was_thinking or self._is_thinking)))
        part = joined([*said, self._finish()] if is_last else said)
        if self._shows_calls and self._shows_reasoning:
            return part
        calls, reasoning = part.calls if self._shows_calls else (), part.reasoning if self._shows_reasoning else ""
        return dataclasses.replace(part, calls=calls, reasoning=reasoning)

    @property
    def _is_thinking(self) -> bool:
        return self._region in REASONING

    @property
    def is_within_call(self) -> bool:
        """Whether a call is open: its arguments are not valid JSON yet."""
        return self._streamed is not None and self._streamed.is_within

    def _feed(self, text: str) -> ReplyPart:
        if self._is_broken:
            return ReplyPart(content=text)
        self._pending += text
        return self._read(lambda: self._parser.feed(text))

    def _finish(self) -> ReplyPart:
        if self._is_broken:
            return ReplyPart()
        said = self._read(lambda: self._parser.finalize()[1])
        has_blank = not (self._is_broken or self.num_calls or self._is_thinking)
        return joined([said, ReplyPart(content=self._blank)]) if has_blank else said

    def _read(self, parse: Callable[[], Sequence[Mapping[str, Any]]]) -> ReplyPart:
        """Return the parser's events as a part; if it fails, the pending text and all later text are content."""
        said: list[ReplyPart] = []
        try:
            for event in parse():
                for part in self._parts_of(event):
                    said.append(part)
        except _UNREADABLE as error:  # the text is not in the template's form, or nested beyond what can be read
            logger.info("an answer is read no further: %s", error)
            self._is_broken = True
            self._region = CONTENT
            said.append(ReplyPart(content=self._blank + self._pending))
        return joined(said)

    def _parts_of(self, event: Mapping[str, Any]) -> Iterator[ReplyPart]:
        region = event["field"]
        is_text = region == CONTENT or region in REASONING
        match event["type"]:
            case "region_open":
                self._region = region
                self._pending = self._blank + self._pending
                self._is_empty, self._blank = True, ""
            case "region_chunk" if is_text:
                yield self._text(event["text"])
            case "region_chunk" if region == STREAMED:
                yield from self._streamed_calls(event["text"])
            case "region_close":
                self._is_first = False
                if region == STREAMED:
                    yield self._streamed_end()
                elif not is_text and region != IGNORED:
                    yield ReplyPart(calls=self._calls(event["value"]))

    def _text(self, text: str) -> ReplyPart:
        self._pending = self._pending.partition(text)[2]
        text = self._blank + text
        if self._is_empty and (self._is_thinking or not self._is_first):
            text = text.lstrip()
        if self._again and self._is_thinking and self._is_empty:
            if self._again.startswith(text):
                self._blank = text
                return ReplyPart()
            text, self._again = text.removeprefix(self._again).lstrip(), ""
        kept = text.rstrip()
        self._blank = text[len(kept) :]
        self._is_empty = self._is_empty and not kept
        return ReplyPart(reasoning=kept) if self._is_thinking else ReplyPart(content=kept)

    def _calls(self, value: object) -> tuple[ToolCall, ...]:
        written = _pythonic_calls(value) if isinstance(value, str) else value
        calls = tuple(self._call(item) for item in (written if isinstance(written, list) else [written]))
        self.num_calls += len(calls)
        self._pending = ""
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
        return new_call(name, _arguments_text(arguments))

    def _streamed_calls(self, text: str) -> Iterator[ReplyPart]:
        assert self._streamed is not None
        try:
            for call in self._streamed.feed(text):
                self.num_calls += bool(call.name)
                yield ReplyPart(calls=(call,))
        finally:
            if self.num_calls:
                self._pending = self._streamed.pending

    def _streamed_end(self) -> ReplyPart:
        assert self._streamed is not None
        return ReplyPart(content=self._streamed.leftover if self.num_calls else self._pending)


def _arguments_text(arguments: object) -> str:
    """Return arguments as JSON; raises `ValueError` if they are no object of JSON, or no UTF-8."""
    if isinstance(arguments, str):
        given = arguments
        arguments = json.loads(given) if given.strip() else {}
    else:
        given = ""
    if arguments is None:  # some models write it for no arguments
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError("arguments must be an object")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()  # half of a surrogate pair may have been escaped
    return given if given.strip() else text


def _pythonic_calls(text: str) -> list[dict[str, Any]]:
    """Read `[name(key=value, ...), ...]`; raises `ValueError`. Values are Python's literals or JSON's."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
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


def joined(parts: Sequence[ReplyPart]) -> ReplyPart:
    """Join parts of an answer."""
    return ReplyPart(
        content="".join(part.content for part in parts),
        reasoning="".join(part.reasoning for part in parts),
        calls=joined_calls(call for part in parts for call in part.calls),
        num_reasoning_tokens=sum(part.num_reasoning_tokens for part in parts),
    )
