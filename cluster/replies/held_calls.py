"""Reads calls that a grammar holds to their form, piece by piece: a call is known by its name and the `{` behind it.

What is not held to a form is read when it is whole, for until then it may turn out to be text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from outrider.cluster.replies.families import NAME, WrittenCalls
from outrider.cluster.replies.tools import Tool, ToolCall, new_call


class HeldCalls:
    """The calls of one answer, from behind their trigger on; arguments are given out as they were generated.

    before begin {arguments} end between begin {arguments} end after
                 |<-given->|                  |<-given->|
    """

    def __init__(self, written: WrittenCalls, tools: Sequence[Tool]) -> None:
        begins = {written.begin.replace(NAME, tool.name) + "{": tool.name for tool in tools}
        # what may stand next, outside of arguments; with the name of the call that it begins
        self._next: Mapping[str, str] = {written.before + begin: name for begin, name in begins.items()}
        self._end = {written.end: ""}
        self._others = {written.between + begin: name for begin, name in begins.items()}
        if written.after:
            self._others[written.after] = ""
        self._after = written.after
        self.pending = ""  # what came and was not given out
        self._depth = 0  # of objects, within arguments
        self._is_quoted = False
        self._is_escaped = False  # the next character stands for itself

    @property
    def is_within(self) -> bool:
        """Return whether a call's arguments have begun and not ended."""
        return self._depth > 0

    @property
    def leftover(self) -> str:
        """Return what is no part of a call if nothing follows: not the beginning of a mark behind one."""
        is_mark = self._next is self._end or (self._next is self._others and self._after.startswith(self.pending))
        return "" if is_mark else self.pending

    def feed(self, text: str) -> Iterator[ToolCall]:
        """Take in what comes next; yield calls and, without a name, more of the arguments of the last one.

        Raises `ValueError` for what is not in the form; it is pending then.
        """
        self.pending += text
        while self.pending:
            if self._depth:
                yield ToolCall(arguments=self._arguments())
                continue
            mark = next((mark for mark in self._next if self.pending.startswith(mark)), None)
            if mark is None and any(mark.startswith(self.pending) for mark in self._next):
                return
            if mark is None:
                raise ValueError(f"not a call as it was to be written: {self.pending!r}")
            self.pending = self.pending.removeprefix(mark)
            if name := self._next[mark]:
                self._depth, self._next = 1, self._end
                yield new_call(name, "{")
            else:
                self._next = self._others if self._next is self._end else {}

    def _arguments(self) -> str:
        """Take what is pending of the arguments, to their end at most."""
        taken = 0
        for char in self.pending:
            taken += 1
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_quoted:
                self._is_escaped, self._is_quoted = char == "\\", char != '"'
            elif char == '"':
                self._is_quoted = True
            else:
                self._depth += (char == "{") - (char == "}")
                if not self._depth:
                    break
        arguments, self.pending = self.pending[:taken], self.pending[taken:]
        return arguments
