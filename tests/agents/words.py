"""What is said to agents and by them: also read in their environment, so that it imports nothing of ours."""

from __future__ import annotations

MODEL = "smollm2"
GREETING = "Hello there, I am played."
THOUGHT = "I should look first."
FOUND = "outrider-7"  # what a tool finds, and no prompt says
DONE = "The tool has found it."
STRUCTURED = {"number": 7}
SCHEMA = {
    "type": "object",
    "properties": {"number": {"type": "integer"}},
    "required": ["number"],
    "additionalProperties": False,
}
ASK_GREETING, ASK_FORM, ASK_THOUGHT = "Please greet me.", "Answer in the form.", "Please think aloud."
NOBODY = "nobody"  # a model that is not served
TOO_LONG = "word " * 132_000  # more tokens than the context has
TOOL = "look"
TOOL_SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
CALLS = {  # a tool of each client, and arguments that find what is in the folder's only file
    "exec_command": {"cmd": "cat note.txt"},
    "Bash": {"command": "cat note.txt"},
    "bash": {"command": "cat note.txt"},
    "grep_search": {"pattern": "outrider-[0-9]"},
    TOOL: {"place": "note"},
}
# of agents that have no form of answers, but a tool for it
FORM_TOOLS = ("StructuredOutput", "structured_output", "json_tool_call")

# the columns of docs/results/agents.md
FIRST, STREAMED, CALL, RESULT = "first turn", "streamed", "tool call", "tool result"
FORM, REASONING, ERROR = "structured output", "reasoning", "error recognised"
COLUMNS = (FIRST, STREAMED, CALL, RESULT, FORM, REASONING, ERROR)


def ask_tool(name: str) -> str:
    """Return a prompt that has the model call a tool."""
    return f"Call {name} once."


def ask_form_by(name: str) -> str:
    """Return a prompt that has the model call a tool with the form's content."""
    return f"{ASK_FORM} By {name}."
