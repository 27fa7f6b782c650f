"""Grammars that constrain tool calls to their family's form and their schemas.

For llguidance (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md): JSON schemas are embedded in a Lark
grammar, and special tokens are given by id.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from outrider.cluster.replies.families import NAME, WrittenCalls
from outrider.cluster.replies.parameters import Schema, branches, parameter_schemas, plain_strings
from outrider.cluster.replies.reader import ReplySyntax
from outrider.cluster.replies.tools import Tool, ToolUse
from outrider.verifier_service.messages.request import StructuredKind, StructuredOutput
from outrider.verifier_service.messages.structured_output import (
    LARK_MARK,
    check_structured,
    embedded_schema,
    fitted_schema,
    invalid,
    reason_of,
)

_TAG_NAME = re.compile(r"[^>\n]+")
_TAG_END = json.dumps("\n</parameter>\n")
MAX_CALLS = 16  # in one answer that must call: small models never stop


def calls_structure(
    use: ToolUse, syntax: ReplySyntax, special_ids: Mapping[str, int], instead: StructuredOutput | None = None
) -> StructuredOutput | None:
    """Return the structured output that constrains an answer's calls; None: calls are not constrained.

    `special_ids` are the tokenizer's special tokens; `instead` is the structure of an answer without calls. Raises
    `ValueError` for invalid schemas, except those that only the check of the whole structure finds.
    """
    if use.need == "required":
        written = syntax.forced_family.written
        return _grammar(_Writer(written, use, special_ids).rules("start", begin=written.trigger))
    family = syntax.tool_family
    if use.need != "auto" or family is None or not family.written.trigger:
        return None
    writer = _Writer(family.written, use, special_ids)
    calls = writer.rules("calls", begin="")
    if instead is not None and instead.kind is StructuredKind.JSON_SCHEMA:
        trigger = writer.literal(family.written.trigger)
        schema = embedded_schema(json.loads(instead.text), is_strict=instead.is_strict)
        return _grammar([f"start: {trigger} calls | schema", f"schema: %json {schema}", *calls])
    if instead is not None:
        return None
    is_lazy = "" if family.written.trigger in special_ids else "[lazy]"
    opened = f"opened{is_lazy}: TEXT {writer.literal(family.written.trigger)}"
    # TEXT has no special tokens: marks of reasoning that are special must be between texts
    marks = " | ".join(writer.literal(mark) for mark in syntax.thought_marks if mark in special_ids)
    thoughts = [f"thoughts: (TEXT ({marks}))*"] if marks else []
    begin = "thoughts " if marks else ""
    start = f"start: {begin}TEXT | {begin}opened calls"
    return _grammar([start, opened, r"TEXT: /(.|\n)*/", *thoughts, *calls])


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldCalls:
    """What the calls of an answer are held to."""

    use: ToolUse  # with schemas as far as they are held, by which calls are read
    structured: StructuredOutput | None = None  # None: nothing holds them
    left_out: tuple[str, ...] = ()  # constraints of the tools' schemas


def held_calls(
    use: ToolUse, syntax: ReplySyntax, special_ids: Mapping[str, int], instead: StructuredOutput | None = None
) -> HeldCalls:
    """Return what an answer's calls are held to, and the constraints of tools' schemas that this leaves out.

    Tools bring what no grammar can hold, and many tools more than one can: the largest schemas are left out first, down
    to the parameters' names. Raises `ValueError` for tools that are strict, or that must be called.
    """
    written = syntax.forced_family.written
    if use.need == "none" or (use.need == "auto" and (syntax.tool_family is None or not written.trigger)):
        return HeldCalls(use=use)
    fits = [_fitted_tool(tool, written) for tool in use.callable_tools]
    tools, names = [tool for tool, _ in fits], tuple(dict.fromkeys(name for _, left_out in fits for name in left_out))
    loose = sorted((tool for tool in tools if not tool.is_strict), key=lambda tool: -len(str(tool.parameters)))

    def without(num_loose: int) -> StructuredOutput | ValueError | None:
        """Return the structure without the largest schemas, or why there is none."""
        left_out = {tool.name for tool in loose[:num_loose]}
        held = tuple(_with_names_alone(tool) if tool.name in left_out else tool for tool in tools)
        try:
            structured = calls_structure(dataclasses.replace(use, tools=held), syntax, special_ids, instead)
            if structured is not None:
                check_structured(structured)
        except ValueError as error:
            return error
        return structured

    found = without(0)
    num_loose = 0
    if isinstance(found, ValueError):
        num_loose = (
            bisect.bisect_left(
                range(1, len(loose) + 1), True, key=lambda number: not isinstance(without(number), ValueError)
            )
            + 1
        )
        found = without(num_loose)
    if not isinstance(found, ValueError):
        left_out = (*names, *(f"all of {tool.name}" for tool in loose[:num_loose]))
        return HeldCalls(use=dataclasses.replace(use, tools=tuple(tools)), structured=found, left_out=left_out)
    if use.need == "required" or len(loose) < len(tools):
        raise found
    return HeldCalls(use=use, left_out=("all of the tools",))


def _fitted_tool(tool: Tool, written: WrittenCalls) -> tuple[Tool, tuple[str, ...]]:
    """Return a tool whose schema a grammar can hold, and what was left out for it; raises `ValueError` if strict."""
    try:
        text, left_out = fitted_schema(json.dumps(tool.parameters), is_strict=tool.is_strict)
    except ValueError as error:
        if not tool.is_strict:
            return _with_names_alone(tool), (f"all of {tool.name}",)
        raise invalid(StructuredKind.JSON_SCHEMA, f"{tool.name}: {reason_of(error)}") from error
    fitted = dataclasses.replace(tool, parameters=json.loads(text))
    names = [name.replace(" of /", f" of {tool.name}/", 1) for name in left_out]
    unfit = [key for key in parameter_schemas(fitted) if written.has_tags and not _TAG_NAME.fullmatch(key)]
    if unfit and not tool.is_strict:
        fitted = _without(fitted, unfit)
        names += [f"{tool.name}/properties/{key}" for key in unfit]
    return fitted, tuple(names)


def _without(tool: Tool, names: Collection[str]) -> Tool:
    """Return a tool without some of its parameters."""
    properties = {key: part for key, part in (tool.parameters.get("properties") or {}).items() if key not in names}
    required = [key for key in tool.parameters.get("required", ()) if key not in names]
    return dataclasses.replace(tool, parameters={**tool.parameters, "properties": properties, "required": required})


def _with_names_alone(tool: Tool) -> Tool:
    """Return a tool whose parameters may have any value."""
    properties, required = tool.parameters.get("properties"), tool.parameters.get("required")
    names = list(properties) if isinstance(properties, dict) else []
    needed = [name for name in required if name in names] if isinstance(required, list) else []
    parameters = {"type": "object", "properties": dict.fromkeys(names, True), "required": needed}
    return dataclasses.replace(tool, parameters=parameters)


def _grammar(rules: Sequence[str]) -> StructuredOutput:
    return StructuredOutput(kind=StructuredKind.GRAMMAR, text="\n".join([f"{LARK_MARK} {{}}", *rules]))


class _Writer:
    """Write the rules of one answer's calls."""

    def __init__(self, written: WrittenCalls, use: ToolUse, special_ids: Mapping[str, int]) -> None:
        self._written = written
        self._use = use
        self._special_ids = special_ids
        names = sorted(special_ids, key=len, reverse=True)
        self._special = re.compile("|".join(re.escape(name) for name in names)) if names else None

    def rules(self, name: str, *, begin: str) -> list[str]:
        """Return the rule `name` of all calls after `begin`, and the rules that it uses."""
        written = self._written
        more = f" ({self.literal(written.between)} call){{0,{MAX_CALLS - 1}}}" if self._use.is_parallel else ""
        whole = f"{name}: {self.literal(begin + written.before)} call{more} {self.literal(written.after)}"
        tools = self._use.callable_tools
        alternatives = " | ".join(f"call_{index}" for index in range(len(tools)))
        calls = [line for index, tool in enumerate(tools) for line in self._call(f"call_{index}", tool)]
        return [whole, f"call: {alternatives}", *calls]

    def literal(self, text: str) -> str:
        """Return a literal text, with special tokens by id."""
        if self._special is None:
            return json.dumps(text, ensure_ascii=False) if text else ""
        parts = []
        for plain, special in _split(self._special, text):
            parts += [json.dumps(plain, ensure_ascii=False)] if plain else []
            parts += [f"<[{self._special_ids[special]}]>"] if special else []
        return " ".join(parts)

    def _call(self, name: str, tool: Tool) -> list[str]:
        begin = self.literal(self._written.begin.replace(NAME, tool.name))
        end = self.literal(self._written.end)
        if self._written.is_json:
            return [f"{name}: {begin} %json {embedded_schema(tool.parameters, is_strict=tool.is_strict)} {end}"]
        arguments = (_keywords if self._written.has_keywords else _tags)(f"{name}_arguments", tool)
        return [f"{name}: {begin} {name}_arguments {end}", *arguments]


def _keywords(name: str, tool: Tool) -> list[str]:
    """Return the rules of `key=value, ...`: required keys in the schema's order, then optional ones."""
    schemas = parameter_schemas(tool)
    required = [key for key in schemas if key in tool.parameters.get("required", ())]
    optional = [key for key in schemas if key not in required]
    rules = []
    values = {}
    for index, key in enumerate([*required, *optional]):
        values[key] = f"{name}_{index}"
        rules.append(f"{values[key]}: {json.dumps(key + '=')} %json {_embedded(schemas[key], tool)}")
    always = ' ", " '.join(values[key] for key in required)
    if required:
        return [f"{name}: {always}" + "".join(f' (", " {values[key]})?' for key in optional), *rules]
    chains = ['""']
    for index, key in enumerate(optional):
        chains.append(values[key] + "".join(f' (", " {values[later]})?' for later in optional[index + 1 :]))
    return [f"{name}: {' | '.join(chains)}", *rules]


def _embedded(schema: Schema, tool: Tool) -> str:
    return embedded_schema(schema, is_strict=tool.is_strict)


def _tags(name: str, tool: Tool) -> list[str]:
    """Return the rules of `<parameter=key>`, value and end tag on lines of their own, in the schema's order."""
    sequence = ['""']
    rules = []
    for index, (key, schema) in enumerate(parameter_schemas(tool).items()):
        if not _TAG_NAME.fullmatch(key):
            raise invalid(StructuredKind.JSON_SCHEMA, f"a parameter's name cannot stand in a tag: {key!r}")
        tag = f"{name}_{index}"
        sequence.append(tag if key in tool.parameters.get("required", ()) else f"{tag}?")
        opening = json.dumps(f"<parameter={key}>\n", ensure_ascii=False)
        if plain_strings(schema):
            rules += [f"{tag}: {opening} {tag.upper()}", f"{tag.upper()}: {_tagged_text(schema)}"]
        else:
            rules.append(f"{tag}: {opening} %json {_embedded(schema, tool)} {_TAG_END}")
    return [f"{name}: {' '.join(sequence)}", *rules]


def _tagged_text(schema: Schema) -> str:
    """Return the terminal of an unquoted string and its end tag, as one lexeme.

    A string of bounded length may not contain `<`: counting characters while looking for the end tag takes too many
    states.
    """
    alternatives = ['"null"'] if any(branch.get("type") == "null" for branch in branches(schema)) else []
    for branch in plain_strings(schema):
        if "enum" in branch or "const" in branch:
            choices = branch["enum"] if "enum" in branch else [branch["const"]]
            alternatives += [json.dumps(choice, ensure_ascii=False) for choice in choices]
        elif "minLength" in branch or "maxLength" in branch:
            alternatives.append(f"/[^<]{{{branch.get('minLength', 0)},{branch.get('maxLength', '')}}}/")
        else:
            alternatives.append(r"(/(?s:.*)/ & ~/(?s:.*)<\/parameter>(?s:.*)/)")
    return f"({' | '.join(alternatives)}) {_TAG_END}"


def _split(special: re.Pattern[str], text: str) -> list[tuple[str, str]]:
    """Split a text at special tokens: pairs of plain text and the special token after it; either may be empty."""
    pairs, start = [], 0
    for match in special.finditer(text):
        pairs.append((text[start : match.start()], match.group()))
        start = match.end()
    return [*pairs, (text[start:], "")]
