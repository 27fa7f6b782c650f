"""`outrider chat`: lines in, streamed answers out, each with its times and speculation.

tokens/s               completion tokens / time from sending the question to the end of its answer
first token            time from sending the question to the first text
accepted, tokens/step  of `metrics.speculative_decoding`: draft_acceptance_rate, mean_acceptance_length
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import click
import httpx

from outrider.cluster.client.openai_client import Server, ServerError, first_model, open_client, stream_events

RESET, SYSTEM, HELP = "/reset", "/system", "/help"
HELP_TEXT = f"""{RESET}         begin anew
{SYSTEM} TEXT   begin anew, with a first message that tells the model how to behave
{HELP}          this
Ctrl-C         stop an answer
Ctrl-D         leave"""
PROMPT = "> "
# the error texts of Outrider and vLLM
NO_CHAT_TEMPLATE = re.compile(r"no chat template|provide a chat template")
# control characters: a model's text must not control the terminal
UNSAFE = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "�")

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """The options of all requests."""

    model: str | None  # None: the first one listed by the server
    max_tokens: int
    temperature: float
    system: str | None

    def body(self, model: str) -> dict[str, Any]:
        return {
            "model": model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream_options": {"include_usage": True},
        }


@dataclass(slots=True)
class Answer:
    """One answer and its times."""

    text: str = ""
    begin_s: float = 0.0
    first_s: float | None = None
    end_s: float = 0.0
    num_tokens: int | None = None
    speculation: dict[str, Any] = field(default_factory=dict)

    def take(self, event: dict[str, Any], text: str, now_s: float) -> None:
        """Add an event of the stream, whose text is `text`."""
        if text and self.first_s is None:
            self.first_s = now_s
        self.text += text
        self.num_tokens = (event.get("usage") or {}).get("completion_tokens", self.num_tokens)
        self.speculation = (event.get("metrics") or {}).get("speculative_decoding") or self.speculation

    @property
    def summary(self) -> str:
        """Return the answer's figures, as far as the server reported them."""
        parts = []
        if self.num_tokens is not None and self.end_s > self.begin_s:
            parts = [f"{self.num_tokens} tokens", f"{self.num_tokens / (self.end_s - self.begin_s):.0f} tokens/s"]
        if self.first_s is not None:
            parts.append(f"first token after {(self.first_s - self.begin_s) * 1e3:.0f} ms")
        return ", ".join([*parts, *self._speculation_parts()])

    def _speculation_parts(self) -> Iterator[str]:
        if self.speculation.get("draft_acceptance_rate") is not None:
            yield f"{self.speculation['draft_acceptance_rate']:.0%} of drafts accepted"
            yield f"{self.speculation['mean_acceptance_length']:.2f} tokens/step"
        elif self.speculation.get("disabled_reason"):
            yield f"no speculation: {self.speculation['disabled_reason']}"


class Conversation(Protocol):
    """The conversation so far, in the form of an endpoint."""

    path: str

    def ask(self, line: str) -> dict[str, Any]:
        """Return the body's fields for the next line."""

    def text_of(self, choice: dict[str, Any]) -> str:
        """Return the text of a streamed choice."""

    def thought_of(self, choice: dict[str, Any]) -> str:
        """Return the reasoning of a streamed choice."""

    def commit(self, line: str, answer: str) -> None:
        """Add a line and its answer."""


class Messages:
    """A conversation of chat messages."""

    path = "/v1/chat/completions"

    def __init__(self, system: str | None) -> None:
        self._messages = [{"role": "system", "content": system}] if system else []

    def ask(self, line: str) -> dict[str, Any]:
        return {"messages": [*self._messages, {"role": "user", "content": line}]}

    def text_of(self, choice: dict[str, Any]) -> str:
        return choice.get("delta", {}).get("content") or ""

    def thought_of(self, choice: dict[str, Any]) -> str:
        return choice.get("delta", {}).get("reasoning_content") or ""

    def commit(self, line: str, answer: str) -> None:
        self._messages += [{"role": "user", "content": line}, {"role": "assistant", "content": answer}]


class Text:
    """One text, which the user and a base model continue in turn."""

    path = "/v1/completions"

    def __init__(self, system: str | None) -> None:
        self._text = f"{system}\n" if system else ""

    def ask(self, line: str) -> dict[str, Any]:
        return {"prompt": f"{self._text}{line}\n"}

    def text_of(self, choice: dict[str, Any]) -> str:
        return choice.get("text") or ""

    def thought_of(self, choice: dict[str, Any]) -> str:
        return ""

    def commit(self, line: str, answer: str) -> None:
        self._text += f"{line}\n{answer}\n"


def run(server: Server, options: ChatOptions, clock: Clock) -> None:
    """Chat until the input ends; raises `ServerError` if there is no server."""
    with asyncio.Runner() as runner:
        client = open_client(server)
        try:
            model = options.model or runner.run(first_model(client))
            click.secho(f"{model} at {server.base_url}; {HELP} says what else there is, Ctrl-D leaves", dim=True)
            chat = _Chat(client, model, options, clock)
            for line in _lines():
                chat.hear(runner, line)
        finally:
            runner.run(client.aclose())


def _lines() -> Iterator[str]:
    while True:
        try:
            line = input(PROMPT)
        except (EOFError, KeyboardInterrupt):
            click.echo()
            return
        if line.strip():
            yield line


class _Chat:
    """The conversation in progress."""

    def __init__(self, client: httpx.AsyncClient, model: str, options: ChatOptions, clock: Clock) -> None:
        self._client = client
        self._model = model
        self._options = options
        self._clock = clock
        self._kind: type[Messages] | type[Text] = Messages
        self._conversation: Conversation = Messages(options.system)

    def hear(self, runner: asyncio.Runner, line: str) -> None:
        """Answer one line; on an error, show it and drop the line."""
        if line.startswith("/"):
            self._obey(*line.strip().partition(" ")[::2])
            return
        answer = Answer()
        try:
            runner.run(self._answer(line, answer))
        except KeyboardInterrupt:
            click.secho("\n[stopped]", dim=True)
        except ServerError as error:
            click.secho(f"\n{error}", fg="red", err=True)
            return
        self._conversation.commit(line, answer.text)
        click.secho(f"\n[{answer.summary}]", dim=True)

    def _obey(self, command: str, rest: str) -> None:
        """Run a slash command."""
        if command == SYSTEM and rest.strip():
            self._options = replace(self._options, system=rest.strip())
        if command == RESET or (command == SYSTEM and rest.strip()):
            self._conversation = self._kind(self._options.system)
            click.secho("a new conversation", dim=True)
        else:
            click.secho(HELP_TEXT, dim=True)

    async def _answer(self, line: str, answer: Answer) -> None:
        try:
            await self._stream(line, answer)
        except ServerError as error:
            if self._kind is Text or not NO_CHAT_TEMPLATE.search(str(error)):
                raise
            click.secho("This model has no chat template: it continues your text instead.", dim=True)
            self._kind, self._conversation = Text, Text(self._options.system)
            await self._stream(line, answer)

    async def _stream(self, line: str, answer: Answer) -> None:
        conversation = self._conversation
        body = {**self._options.body(self._model), **conversation.ask(line)}
        answer.begin_s = answer.end_s = self._clock()
        is_thinking = False
        async with contextlib.aclosing(stream_events(self._client, conversation.path, body)) as events:
            async for event in events:
                choices = event.get("choices", ())
                thought = "".join(conversation.thought_of(choice) for choice in choices)
                text = "".join(conversation.text_of(choice) for choice in choices)
                answer.end_s = self._clock()
                answer.take(event, text, answer.end_s)
                if thought:
                    click.secho(thought.translate(UNSAFE), nl=False, dim=True)
                if text and is_thinking:
                    click.echo("\n")
                is_thinking = bool(thought) or (is_thinking and not text)
                click.echo(text.translate(UNSAFE), nl=False)
