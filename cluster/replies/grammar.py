"""Grammars that constrain tool calls to their family's form and their schemas.

For llguidance (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md): JSON schemas are embedded in a Lark
grammar, and special tokens are given by id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from outrider.cluster.replies.families import NAME, WrittenCalls
from outrider.cluster.replies.parameters import Schema, branches, parameter_schemas, plain_strings
from outrider.cluster.replies.reader import ReplySyntax
from outrider.cluster.replies.tools import Tool, ToolUse
from outrider.verifier_service.messages.request import StructuredKind, StructuredOutput
from outrider.verifier_service.messages.structured_output import LARK_MARK, check_structured, embedded_schema, invalid

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


def left_out_of_calls(use: ToolUse) -> tuple[str, ...]:
    """Return the constraints of the parameters that the grammar does not enforce."""
    return tuple(dict.fromkeys(name for tool in use.callable_tools for name in check_structured(_form_of(tool))))


def _form_of(tool: Tool) -> StructuredOutput:
    text = json.dumps(tool.parameters)
    return StructuredOutput(kind=StructuredKind.JSON_SCHEMA, text=text, is_strict=tool.is_strict)


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
        check_structured(_form_of(tool))
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
        if not re.fullmatch(r"[^>\n]+", key):
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
