"""From a chat to a request: the template renders the prompt, tools constrain the answer, a reader splits it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.cluster.api.openai.answer import Answer
from outrider.cluster.api.openai.chat_messages import template_input, unread_warnings
from outrider.cluster.api.openai.protocol import ChatBody
from outrider.cluster.common.errors import InvalidRequest
from outrider.cluster.gateway.request_parser import RequestInput
from outrider.cluster.gateway.structured_format import NamedStructure
from outrider.cluster.replies.grammar import calls_structure, left_out_of_calls
from outrider.cluster.replies.reader import ReplySyntax
from outrider.cluster.replies.tools import ToolUse
from outrider.verifier_service.messages.structured_output import check_structured, warning_of


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
        request = body.input(answer.id, prompt)
        warnings = (*warnings, *unread_warnings(body.messages), *use.warnings, *request.warnings)
        calls = self._calls_structure(request, use, answer)
        answer.reader = functools.partial(self.syntax.reader, prompt, use, is_constrained=calls is not None)
        is_read = answer.reader() is not None
        shows_special = is_read and request.skip_special_tokens is None  # the reader needs marks that may be special
        request = dataclasses.replace(
            request,
            structured=request.structured if calls is None else calls.output,
            warnings=warnings if calls is None else (*warnings, *calls.warnings),
            skip_special_tokens=False if shows_special else request.skip_special_tokens,
            is_new_text=fields["add_generation_prompt"],
        )
        answer.requests = [await answer.gateway.parse(request)]
        if answer.gateway.next_turn is not None and fields["add_generation_prompt"]:
            answer.follow = functools.partial(answer.gateway.next_turn.begin, answer.requests[0], messages, fields)

    def _calls_structure(self, request: RequestInput, use: ToolUse, answer: Answer) -> NamedStructure | None:
        if not use.callable_tools:
            return None
        if use.need == "required" and request.structured is not None:
            raise InvalidRequest("tool_choice: an answer that must call a tool has that form alone", "tool_choice")
        try:
            structured = calls_structure(use, self.syntax, answer.gateway.text.special_ids, request.structured)
            if structured is None:
                return None
            check_structured(structured)
            names = left_out_of_calls(use)
        except ValueError as error:
            reason = str(error).partition("can be followed: ")[2]
            raise InvalidRequest(f"tools: parameters that no answer can follow: {reason}", "tools") from error
        return NamedStructure(output=structured, field="tools", warnings=(warning_of("tools", names),) if names else ())
