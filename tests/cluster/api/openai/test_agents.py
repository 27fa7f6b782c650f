"""An agent of a framework that people use, at work with three tools: a scripted model, a real server."""

from __future__ import annotations

import pytest
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from fakes.backend import build_tokenizer, says
from outrider.cluster.replies.reader import ReplySyntax
from outrider.verifier_service.messages.request import FinishReason, StructuredKind
from services.served_app import served
from support.stack import Stack

TEMPLATE = (
    "{% for t in tools %}<{{ t.function.name }}>{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
)
# what the model says once the last message is this
SCRIPT = {
    "[user]fox": '<think>add first</think>\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>',
    "[tool]5": 'Then twice.\n<tool_call>\n{"name": "double", "arguments": {"number": 5}}\n</tool_call>',
    "[tool]10": '<tool_call>\n{"name": "name_of", "arguments": {"number": 10}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a": 10, "b": 1}}\n</tool_call>',
    "[tool]ten[tool]11": "It is ten, and eleven is next.",
}


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def double(number: int) -> int:
    """Double a number."""
    return 2 * number


@tool
def name_of(number: int) -> str:
    """Name a number."""
    return {10: "ten"}[number]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_an_agent_finishes_a_task_of_three_tools(api, is_streamed):
    tokenizer = build_tokenizer(TEMPLATE)

    def script(request):
        prompt = tokenizer.decode(request.prompt_token_ids)
        (answer,) = [text for end, text in SCRIPT.items() if prompt.endswith(f"{end}[assistant]")]
        return says(tokenizer, answer)

    syntax = ReplySyntax(tool_call_parser="hermes", reasoning_parser="qwen3")
    options = {"finish_reason": FinishReason.STOP, "max_model_len": 2048}
    stack = Stack(script, tokenizer=tokenizer, api={"reply_syntax": syntax}, **options)
    with served(stack.app) as url:
        model = ChatOpenAI(
            base_url=f"{url}/v1",
            api_key="x",
            model="tiny",
            use_responses_api=api == "responses",
            streaming=is_streamed,
            max_retries=0,
        )
        agent = create_agent(model, [add, double, name_of])
        result = agent.invoke({"messages": [{"role": "user", "content": "fox"}]})
    last = result["messages"][-1]
    assert last.text == "It is ten, and eleven is next."
    called = [call["name"] for message in result["messages"] for call in getattr(message, "tool_calls", ())]
    assert called == ["add", "double", "name_of", "add"]
    assert len(stack.requests) == 4
    assert all(request.sampling.structured.kind is StructuredKind.GRAMMAR for request in stack.requests)
