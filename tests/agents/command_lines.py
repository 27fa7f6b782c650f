"""Agents of the command line: how each is told of a server, asked once, and what shows that it understood.

What passes between agent and server is read at a relay, the same way for all.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agents import words
from agents.environment import command, plain_environment
from agents.relay import Exchange, Relay

TIMEOUT_S = 180.0
MIN_EVENTS = 3  # of an answer that came in pieces

Told = Callable[["Place", str, str], Mapping[str, str]]  # place, URL, model: writes files, returns variables


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The folders of one run."""

    home: Path
    work: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """One run of an agent."""

    returncode: int
    output: str  # both streams
    exchanges: Sequence[Exchange]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """An agent of the command line, on one of our APIs."""

    package: str
    api: str
    tell: Told
    line: tuple[str, ...]  # the command without its prompt; {model} stands for the model
    tool: str  # of its own, that the played model calls
    thought_field: str = ""  # of its next request, in which it sends a thought back
    form_line: tuple[str, ...] = ()  # more for an answer in a form; {file}: the schema's file, {schema}: its text
    form_prompt: str = words.ASK_FORM
    known_overflow: str  # what it says when it knows that the context is full
    lacks: Mapping[str, str] = field(default_factory=dict)  # columns without a meaning, and why

    def run(
        self,
        server: str,
        folder: Path,
        prompt: str,
        *,
        model: str = words.MODEL,
        more: str = "",
        extra: Sequence[str] = (),
    ) -> Ran:
        """Ask once, in a folder of its own; `more` comes through stdin."""
        place = Place(home=folder / "home", work=folder / "work")
        for path in (place.home, place.work):
            path.mkdir(parents=True)
        (place.work / "note.txt").write_text(words.FOUND + "\n")
        with Relay(server).running() as relay:
            variables = {**plain_environment(place.home), **self.tell(place, relay.url, model)}
            line = [part.replace("{model}", model) for part in self.line]
            ended = subprocess.run(
                [command(line[0]), *line[1:], *extra, prompt],
                cwd=place.work,
                env=variables,
                input=more,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
        return Ran(returncode=ended.returncode, output=ended.stdout + ended.stderr, exchanges=relay.exchanges)

    def tries(self, server: str, folder: Path) -> dict[str, str]:
        """Return by column what went wrong, or nothing."""
        ran = self.run(server, folder / "tool", words.ask_tool(self.tool))
        found = {
            words.FIRST: _unless(bool(ran.exchanges) and all(e.status == 200 for e in ran.exchanges), ran),
            words.STREAMED: _unless(all(e.num_events >= MIN_EVENTS for e in ran.exchanges), ran),
            words.CALL: _unless(_has_call(ran, self.tool), ran),
            words.RESULT: _unless(_has_result(ran), ran),
        }
        if self.thought_field:
            found[words.REASONING] = _unless(_has_thought(ran, self.thought_field), ran)
        if self.form_line:
            found[words.FORM] = self._try_form(server, folder)
        found[words.ERROR] = self._try_errors(server, folder)
        return found

    def _try_form(self, server: str, folder: Path) -> str:
        schema = json.dumps(words.SCHEMA)
        (folder / "schema.json").write_text(schema)
        values = {"{file}": str(folder / "schema.json"), "{schema}": schema}
        ran = self.run(
            server, folder / "form", self.form_prompt, extra=[values.get(part, part) for part in self.form_line]
        )
        plain = ran.output.replace("\\", "").replace(" ", "")
        return _unless(ran.returncode == 0 and '{"number":7}' in plain, ran)

    def _try_errors(self, server: str, folder: Path) -> str:
        ran = self.run(server, folder / "nobody", words.ASK_GREETING, model=words.NOBODY)
        named = ran.returncode != 0 and f"'{words.NOBODY}' does not exist" in ran.output.replace("\\'", "'")
        known = ran.returncode != 0 and f"selected model ({words.NOBODY})" in ran.output
        if failed := _unless(named or known, ran):
            return failed
        ran = self.run(server, folder / "long", "Sum it up.", more=words.TOO_LONG)
        return _unless(ran.returncode != 0 and self.known_overflow in ran.output, ran)


def _unless(went_well: bool, ran: Ran) -> str:
    """Return nothing, or what is worth to see of a run that went wrong."""
    if went_well:
        return ""
    passed = [f"{e.path} {e.status}, {e.num_events} events: {e.answer[-400:]!r}" for e in ran.exchanges]
    return "\n".join([f"ended with {ran.returncode}", *passed, ran.output[-2000:]])


def _has_call(ran: Ran, tool: str) -> bool:
    """Return whether the agent took the answer for a call of its tool: its next request repeats it."""
    (value,) = words.CALLS[tool].values()
    asked = json.dumps(ran.exchanges[-1].asked).replace("\\", "")
    return len(ran.exchanges) > 1 and f'"{tool}"' in asked and json.dumps(value).replace("\\", "") in asked


def _has_result(ran: Ran) -> bool:
    """Return whether the model was told what the tool found, and its answer ended the run."""
    return ran.returncode == 0 and words.FOUND in ran.exchanges[-1].body.decode() and words.DONE in ran.output


def _has_thought(ran: Ran, field: str) -> bool:
    """Return whether the agent knows the thought as one, and sends it back as such."""
    return words.THOUGHT in "".join(_values(ran.exchanges[-1].asked, field))


def _values(read: object, field: str) -> list[str]:
    """Return all texts of a field, wherever it stands."""
    if isinstance(read, list):
        return [text for item in read for text in _values(item, field)]
    if not isinstance(read, dict):
        return []
    own = [json.dumps(value) for name, value in read.items() if name == field]
    return own + [text for value in read.values() for text in _values(value, field)]


def _tell_codex(place: Place, url: str, model: str) -> Mapping[str, str]:
    (place.home / ".codex").mkdir()
    (place.home / ".codex" / "config.toml").write_text(
        f'model = "{model}"\nmodel_provider = "outrider"\n[model_providers.outrider]\nname = "Outrider"\n'
        f'base_url = "{url}/v1"\nenv_key = "OUTRIDER_KEY"\nwire_api = "responses"\n'
    )
    return {"OUTRIDER_KEY": "k"}


def _tell_claude(place: Place, url: str, model: str) -> Mapping[str, str]:
    names = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL")
    return {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "k", **dict.fromkeys(names, model)}


def _tell_qwen(place: Place, url: str, model: str) -> Mapping[str, str]:
    openai = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "k", "OPENAI_MODEL": model}
    return {**openai, "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "k", "ANTHROPIC_MODEL": model}


def _opencode_through(library: str) -> Told:
    def tell(place: Place, url: str, model: str) -> Mapping[str, str]:
        provider = {
            "npm": library,
            "name": "Outrider",
            "options": {"baseURL": f"{url}/v1", "apiKey": "k"},
            "models": {model: {"name": model}},
        }
        (place.work / "opencode.json").write_text(json.dumps({"provider": {"outrider": provider}}))
        return {}

    return tell


CODEX = Agent(
    package="@openai/codex",
    api="responses",
    tell=_tell_codex,
    line=("codex", "exec", "--json", "--skip-git-repo-check", "--sandbox", "danger-full-access"),
    tool="exec_command",
    thought_field="content",
    form_line=("--output-schema", "{file}"),
    known_overflow="ran out of room in the model's context window",
)
CLAUDE = Agent(
    package="@anthropic-ai/claude-code",
    api="messages",
    tell=_tell_claude,
    line=("claude", "--print", "--output-format", "stream-json", "--verbose"),
    tool="Bash",
    thought_field="thinking",
    form_line=("--json-schema", "{schema}"),
    form_prompt=words.ask_form_by("StructuredOutput"),
    known_overflow='"terminal_reason":"prompt_too_long"',
)
QWEN = Agent(
    package="@qwen-code/qwen-code",
    api="chat",
    tell=_tell_qwen,
    line=("qwen", "--auth-type", "openai", "--output-format", "stream-json"),
    tool="grep_search",
    thought_field="reasoning_content",
    form_line=("--json-schema", "{schema}"),
    form_prompt=words.ask_form_by("structured_output"),
    known_overflow="maximum context length is",
)
_NO_FORM = {words.FORM: "has no option for it"}
OPENCODE = Agent(
    package="opencode-ai",
    api="chat",
    tell=_opencode_through("@ai-sdk/openai-compatible"),
    line=("opencode", "run", "--format", "json", "--model", "outrider/{model}"),
    tool="bash",
    thought_field="reasoning_content",
    known_overflow="ContextOverflowError",
    lacks=_NO_FORM,
)
AGENTS = (
    CODEX,
    CLAUDE,
    QWEN,
    dataclasses.replace(
        QWEN, api="messages", line=("qwen", "--auth-type", "anthropic", *QWEN.line[3:]), thought_field="thinking"
    ),
    OPENCODE,
    dataclasses.replace(
        OPENCODE,
        api="responses",
        tell=_opencode_through("@ai-sdk/openai"),
        thought_field="",
        lacks={**_NO_FORM, words.REASONING: "reads summaries alone"},
    ),
    dataclasses.replace(
        OPENCODE, api="messages", tell=_opencode_through("@ai-sdk/anthropic"), thought_field="thinking"
    ),
)
