"""`outrider chat`, driven through its standard input against the HTTP application on a real port."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result
from transformers import PreTrainedTokenizerFast

from fakes.backend import FakeBackend, build_tokenizer, says
from outrider.cluster.cli.main import main
from outrider.cluster.client.chat import Answer
from outrider.cluster.common.errors import Overloaded
from outrider.verifier_service.messages.request import GenerationRequest, SpeculationMetrics
from outrider.verifier_service.model.ranks import free_port
from services.served_app import served
from support.stack import Stack

SPECULATION = SpeculationMetrics(enabled=True, num_drafts=2, num_draft_tokens=6, num_accepted_tokens=3)
ANSWER = "the quick\x1b[2J fox"
SHOWN = "the quick�[2J fox"  # the terminal is not cleared


@pytest.fixture
def backend(tokenizer: PreTrainedTokenizerFast) -> FakeBackend:
    return FakeBackend(lambda _: says(tokenizer, ANSWER), speculation=SPECULATION)


@pytest.fixture
def chat_url(backend: FakeBackend, tokenizer: PreTrainedTokenizerFast) -> Iterator[str]:
    with served(Stack(backend, tokenizer=tokenizer, max_model_len=200).app) as url:
        yield url


@pytest.fixture
def text_url(backend: FakeBackend) -> Iterator[str]:
    """A server of a model that has no chat template."""
    with served(Stack(backend, tokenizer=build_tokenizer(chat_template=None)).app) as url:
        yield url


def chat(url: str, *lines: str, options: tuple[str, ...] = ()) -> Result:
    return CliRunner().invoke(
        main, ["chat", "--url", url, "--max-tokens", "20", *options], input="".join(f"{line}\n" for line in lines)
    )


def prompts(backend: FakeBackend, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    return [tokenizer.decode(request.prompt_token_ids) for request in backend.requests]


def test_a_conversation_goes_through_the_chat_template(
    chat_url: str, backend: FakeBackend, tokenizer: PreTrainedTokenizerFast
):
    result = chat(chat_url, "hi", "more", options=("--system", "be brief", "--temperature", "0.5"))
    assert result.exit_code == 0, result.output
    assert result.output.count(SHOWN) == 2
    assert "\x1b[2J" not in result.output
    assert "tiny at http" in result.output
    begin = "<|start|>system\nbe brief<|end|><|start|>user\nhi<|end|>"
    first, second = prompts(backend, tokenizer)
    assert first == begin + "<|start|>assistant\n"
    assert second == f"{begin}<|start|>assistant\n{ANSWER}<|end|><|start|>user\nmore<|end|><|start|>assistant\n"
    assert {(request.sampling.temperature, request.sampling.max_tokens) for request in backend.requests} == {(0.5, 20)}


def test_every_answer_says_what_it_cost(chat_url: str, tokenizer: PreTrainedTokenizerFast):
    output = chat(chat_url, "hi").output
    assert f"[{len(tokenizer.encode(ANSWER))} tokens, " in output
    assert "first token after" in output
    assert "50% of drafts accepted, 2.50 tokens/step]" in output


def test_a_model_without_a_chat_template_continues_the_text(
    text_url: str, backend: FakeBackend, tokenizer: PreTrainedTokenizerFast
):
    result = chat(text_url, "a", "b")
    assert result.exit_code == 0, result.output
    assert result.output.count("no chat template") == 1
    assert prompts(backend, tokenizer) == ["a\n", f"a\n{ANSWER}\nb\n"]


def test_reset_forgets_what_was_said(chat_url: str, backend: FakeBackend, tokenizer: PreTrainedTokenizerFast):
    chat(chat_url, "hi", "", "/reset", "more")
    assert prompts(backend, tokenizer)[1] == "<|start|>user\nmore<|end|><|start|>assistant\n"


def test_system_begins_anew_with_a_first_message(
    chat_url: str, backend: FakeBackend, tokenizer: PreTrainedTokenizerFast
):
    chat(chat_url, "hi", "/system be short", "more")
    assert prompts(backend, tokenizer)[1].startswith("<|start|>system\nbe short<|end|><|start|>user\nmore")


@pytest.mark.parametrize("line", ["/help", "/?", "/system"])
def test_help_says_what_there_is_and_asks_nothing(chat_url: str, backend: FakeBackend, line: str):
    result = chat(chat_url, line)
    assert "/reset" in result.output.splitlines()[-6]
    assert backend.requests == []


def test_a_refusal_is_shown_and_the_line_forgotten(
    chat_url: str, backend: FakeBackend, tokenizer: PreTrainedTokenizerFast
):
    def busy_at_first(request: GenerationRequest) -> list:
        return [Overloaded("too much to do")] if len(backend.requests) == 1 else says(tokenizer, "fox")

    backend.script = busy_at_first
    result = chat(chat_url, "hi", "more")
    assert result.exit_code == 0
    assert "too much to do" in result.output
    assert prompts(backend, tokenizer)[1] == "<|start|>user\nmore<|end|><|start|>assistant\n"


def test_an_error_within_a_stream_is_shown(chat_url: str, backend: FakeBackend, tokenizer: PreTrainedTokenizerFast):
    backend.script = lambda _: [*says(tokenizer, "the"), Overloaded("cut off")]
    result = chat(chat_url, "hi")
    assert "the" in result.output
    assert "cut off" in result.output


def test_a_model_that_is_not_there_is_named(chat_url: str):
    assert "'other' does not exist" in chat(chat_url, "hi", options=("--model", "other")).output


def test_no_server_is_an_error():
    result = chat(f"http://127.0.0.1:{free_port()}", "hi")
    assert result.exit_code == 1
    assert "Error: ConnectError" in result.output


def test_a_summary_leaves_out_what_is_not_known():
    assert Answer(begin_s=1.0, first_s=1.25, end_s=3.0).summary == "first token after 250 ms"
    plain = Answer(begin_s=1.0, first_s=1.25, end_s=3.0, num_tokens=8, speculation={"disabled_reason": "load"})
    assert plain.summary == "8 tokens, 4 tokens/s, first token after 250 ms, no speculation: load"
    assert Answer().summary == ""
