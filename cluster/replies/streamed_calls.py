"""Read constrained calls piece by piece: with a grammar, a call is certain once its name and `{` have arrived.

Unconstrained calls are read once they are whole: until then they may turn out to be text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from outrider.cluster.replies.families import NAME, WrittenCalls
from outrider.cluster.replies.tools import Tool, ToolCall, new_call


class StreamedCalls:
    """The calls of one answer, after their trigger; arguments are streamed as generated.

    before begin {arguments} end between begin {arguments} end after
                 |<-yield->|                  |<-yield->|
    """

    def __init__(self, written: WrittenCalls, tools: Sequence[Tool]) -> None:
        begins = {written.begin.replace(NAME, tool.name) + "{": tool.name for tool in tools}
        # texts that may follow, outside of arguments: {text: name of the call that it begins}
        self._next: Mapping[str, str] = {written.before + begin: name for begin, name in begins.items()}
        self._end = {written.end: ""}
        self._others = {written.between + begin: name for begin, name in begins.items()}
        if written.after:
            self._others[written.after] = ""
        self._after = written.after
        self.pending = ""  # text that has not been yielded
        self._depth = 0  # of braces, within arguments
        self._is_quoted = False
        self._is_escaped = False  # the next character is escaped

    @property
    def is_within(self) -> bool:
        """Whether a call's arguments have begun and not ended."""
        return self._depth > 0

    @property
    def leftover(self) -> str:
        """The pending text, if the answer ends here; empty if it is the beginning of a mark after a call."""
        is_mark = self._next is self._end or (self._next is self._others and self._after.startswith(self.pending))
        return "" if is_mark else self.pending

    def feed(self, text: str) -> Iterator[ToolCall]:
        """Read more text; yield calls, and without a name, more arguments of the last call.

        Raises `ValueError` for text that is not in the form; it stays pending.
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
        """Take the pending text, up to the end of the arguments."""
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
