"""Calls as families write them, by their own tables."""

from __future__ import annotations

import json

from outrider.cluster.replies.families import NAME
from outrider.cluster.replies.reader import ReplySyntax


def written(family, calls):
    """Write calls, pairs of a name and arguments, as a family's grammar makes a model write them; None: no family."""
    form = ReplySyntax(tool_call_parser=family).forced_family.written
    parts = [form.begin.replace(NAME, name) + _arguments(form, arguments) + form.end for name, arguments in calls]
    return form.trigger + form.before + form.between.join(parts) + form.after


def _arguments(form, arguments):
    if form.has_keywords:
        return ", ".join(f"{key}={json.dumps(value)}" for key, value in arguments.items())
    if form.has_tags:
        return "".join(f"<parameter={key}>\n{_as_text(value)}\n</parameter>\n" for key, value in arguments.items())
    return json.dumps(arguments, ensure_ascii=False)


def _as_text(value):
    return value if isinstance(value, str) else json.dumps(value)
