"""From a chat to a request: the template renders the prompt, tools constrain the answer, a reader splits it."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.cluster.api.openai.answer import Answer
from outrider.cluster.api.openai.chat_messages import template_input, unread_warnings
from outrider.cluster.api.openai.protocol import ChatBody
from outrider.cluster.common.errors import InvalidRequest
from outrider.cluster.gateway.request_parser import RequestInput
from outrider.cluster.replies.grammar import HeldCalls, held_calls
from outrider.cluster.replies.reader import ReplyReader, ReplySyntax, Thinking
from outrider.cluster.replies.tools import ToolUse
from outrider.verifier_service.messages.structured_output import reason_of, warning_of
from outrider.verifier_service.messages.thought import Thought

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chats:
    """Make requests of chats, in the served model's syntax."""

    syntax: ReplySyntax

    async def open(self, answer: Answer, body: ChatBody, warnings: Sequence[str] = ()) -> None:
        """Set an answer's request and reader; raises `InvalidRequest` naming the field.

        `warnings`: those of a body that this chat was made of.
        """
        text, use = answer.gateway.text, body.tool_use()
        shown = () if use.need == "none" else use.tools  # a model that sees tools calls them
        messages, fields = template_input(body.messages), body.template_fields(shown)
        prompt = await text.render_chat(messages, **fields)
        read = functools.partial(self._read, answer, body, prompt, messages[-1]["content"], use)
        request, reader = await asyncio.to_thread(read) if use.tools or body.has_structure else read()
        warnings = (*warnings, *unread_warnings(body.messages), *use.warnings, *request.warnings)
        for warning in warnings:
            logger.info("request %s: %s", answer.id, warning)
        answer.reader = reader
        shows_special = reader() is not None and request.skip_special_tokens is None  # marks may be special tokens
        skips_special = False if shows_special else request.skip_special_tokens
        request = dataclasses.replace(
            request,
            warnings=warnings,
            skip_special_tokens=skips_special,
            is_new_text=fields["add_generation_prompt"],
        )
        answer.requests = [await answer.gateway.parse(request)]
        if answer.gateway.next_turn is not None and fields["add_generation_prompt"]:
            answer.follow = functools.partial(answer.gateway.next_turn.begin, answer.requests[0], messages, fields)

    def _read(
        self, answer: Answer, body: ChatBody, prompt: str, said: str, use: ToolUse
    ) -> tuple[RequestInput, Callable[[], ReplyReader | None]]:
        """Return the request and what makes a reader of its answer."""
        request = body.input(answer.id, prompt)
        calls = self._held_calls(request, use, answer)
        has_form = use.need == "required" or request.structured is not None
        begun = said if body.continue_final_message else ""
        thinking = self.syntax.thinking(prompt, said, begun=begun, has_form=has_form)
        structured = calls.structured or request.structured
        told = (warning_of("tools", calls.left_out),) if calls.left_out else ()
        request = dataclasses.replace(
            request,
            structured=structured,
            thought=self._thought(thinking, body.thinking_token_budget, has_form=structured is not None),
            warnings=(*request.warnings, *told),
        )
        reader = functools.partial(
            self.syntax.reader,
            prompt,
            calls.use,
            is_constrained=calls.structured is not None,
            thinking=thinking,
            shows_reasoning=body.include_reasoning is not False,
        )
        return request, reader

    def _thought(self, thinking: Thinking, budget: int | None, *, has_form: bool) -> Thought | None:
        """Return the thought that a form follows or that has a budget; None: the answer has none, or it is free."""
        if budget is not None and not self.syntax.thought_marks:
            raise InvalidRequest("thinking_token_budget: this model's thoughts are not marked", "thinking_token_budget")
        if thinking is Thinking.OVER or not (has_form or budget is not None):
            return None
        opening, closing = self.syntax.thought_marks
        try:
            return Thought(opening=opening, closing=closing, is_open=thinking is Thinking.OPEN, max_tokens=budget)
        except ValueError as error:
            raise InvalidRequest(str(error), "thinking_token_budget") from error

    def _held_calls(self, request: RequestInput, use: ToolUse, answer: Answer) -> HeldCalls:
        if not use.callable_tools:
            return HeldCalls(use=use)
        if use.need == "required" and request.structured is not None:
            raise InvalidRequest("tool_choice: an answer that must call a tool has that form alone", "tool_choice")
        try:
            return held_calls(use, self.syntax, answer.gateway.text.special_ids, request.structured)
        except ValueError as error:
            message = f"tools: parameters that no answer can follow: {reason_of(error)}"
            raise InvalidRequest(message, "tools") from error
