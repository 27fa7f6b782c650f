"""One prompt under way: outputs of which nobody wants the text are as others, without it, and make no text."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from fakes.backend import spaced_ids, spaced_tokenizer
from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.gateway.text_codec import TextCodec
from outrider.cluster.monitoring.metrics import GatewayMetrics
from outrider.cluster.offline.outputs import RequestOutput
from outrider.cluster.offline.prompt_run import PromptRun, RunContext
from outrider.cluster.offline.prompt_runs import PromptRuns
from outrider.cluster.offline.prompts import Prompt
from outrider.cluster.offline.sampling_params import SamplingParams
from outrider.cluster.router.planning import off
from outrider.verifier_service.messages.request import (
    AcceptanceRule,
    DisabledReason,
    FinishReason,
    LogprobsMode,
    SpeculationMetrics,
    TokenLogprobs,
)
from outrider.verifier_service.messages.request import RequestOutput as EngineOutput

METRICS = SpeculationMetrics(enabled=True, num_drafts=2, num_draft_tokens=4, num_accepted_tokens=1)
LOGPROBS = tuple(
    TokenLogprobs(token_id=token_id, logprob=-0.5, rank=1, top_token_ids=(token_id,), top_logprobs=(-0.5,))
    for token_id in (40, 41, 42)
)
STEPS: tuple[dict[str, Any], ...] = (
    {"token_ids": (40,), "num_cached_tokens": 3, "logprobs": LOGPROBS[:1]},
    {"token_ids": (41, 42), "num_draft_tokens": 2, "num_accepted_tokens": 1, "logprobs": LOGPROBS[1:]},
)


class CountingCodec(TextCodec):
    """Counts the detokenizers that it is asked for."""

    num_detokenizers = 0

    def detokenizer(self, **options: Any) -> Any:
        self.num_detokenizers += 1
        return super().detokenizer(**options)


@pytest.fixture
def context(tokenizer) -> RunContext:
    return RunContext(
        codec=CountingCodec(tokenizer),
        max_model_len=64,
        eos_token_ids=frozenset([2]),
        plan=off(DisabledReason.CONFIG),
        acceptance=AcceptanceRule.STANDARD,
        logprobs_mode=LogprobsMode.RAW,
        rollouts=False,
        metrics=GatewayMetrics(CollectorRegistry(), model_name="m"),
        clock=lambda: 0.0,
    )


def played(context: RunContext, last: dict[str, Any], **fields: Any) -> RequestOutput:
    """Return what comes of a prompt whose output takes STEPS and one more."""
    run = PromptRun("7", "text", (5, 6), SamplingParams(logprobs=0, **fields), context)
    (request,) = run.requests
    for step in (*STEPS, last):
        assert not run.is_finished
        run.absorb(EngineOutput(request_id=request.request_id, **step))
    assert run.is_finished
    return run.output()


@pytest.mark.parametrize(
    ("last", "fields"),
    [
        ({"token_ids": (), "finish_reason": FinishReason.LENGTH, "speculation": METRICS}, {}),
        ({"token_ids": (9,), "finish_reason": FinishReason.STOP, "logprobs": LOGPROBS[:1]}, {"stop_token_ids": [9]}),
        ({"token_ids": (2,), "finish_reason": FinishReason.STOP, "logprobs": LOGPROBS[:1]}, {}),
        ({"token_ids": (), "finish_reason": FinishReason.ERROR, "error": "it would not"}, {}),
    ],
    ids=["length", "stop token", "end", "error"],
)
def test_without_text_all_else_is_the_same(context: RunContext, last: dict[str, Any], fields: dict[str, Any]):
    told = played(context, last, **fields)
    assert context.codec.num_detokenizers == 1
    silent = played(context, last, detokenize=False, **fields)
    assert context.codec.num_detokenizers == 1, "nothing that makes text was built"
    (completion,) = silent.outputs
    assert (completion.text, completion.token_ids[:3]) == ("", [40, 41, 42])
    assert told.outputs[0].text != ""
    assert silent == dataclasses.replace(told, outputs=[dataclasses.replace(told.outputs[0], text="")])


@pytest.mark.parametrize(("is_new_text", "text"), [(False, " bee b"), (True, "bee b")])
def test_an_output_goes_on_in_the_prompts_text_unless_it_answers_a_chat(context: RunContext, is_new_text, text) -> None:
    ids = spaced_ids("▁bee", "▁", "b")
    context = dataclasses.replace(context, codec=CountingCodec(spaced_tokenizer()))
    run = PromptRun("7", None, tuple(spaced_ids("▁a")), SamplingParams(logprobs=0), context, is_new_text=is_new_text)
    drawn = tuple(dataclasses.replace(LOGPROBS[0], token_id=id_, top_token_ids=(id_,)) for id_ in ids)
    last = {"token_ids": tuple(ids), "logprobs": drawn, "finish_reason": FinishReason.LENGTH}
    run.absorb(EngineOutput(request_id=run.requests[0].request_id, **last))
    (output,) = run.output().outputs
    names = [entry[id_].decoded_token for entry, id_ in zip(output.logprobs, ids, strict=True)]
    assert (output.text, "".join(names)) == (text, text)


def test_chats_ask_for_texts_of_their_own(context: RunContext) -> None:
    codec = TextCodec(spaced_tokenizer(chat_template="{{ messages[-1]['content'] }}"))
    runs = PromptRuns(ServiceConfig(), context.plan, codec, max_model_len=64, eos_token_ids=frozenset())
    chat = Prompt(messages=({"role": "user", "content": "a"},))

    def begins(prompt: Prompt, **fields: Any) -> str:
        (run,) = runs.runs([("p", prompt)], None, **fields)
        return run.absorb(EngineOutput(request_id=run.requests[0].request_id, token_ids=tuple(spaced_ids("▁a")))).text

    assert [begins(Prompt(text="a")), begins(chat), begins(chat, add_generation_prompt=False)] == [" a", "a", " a"]
