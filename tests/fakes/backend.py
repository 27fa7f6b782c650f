"""A backend that plays scripts: tokens, pauses, failures; it records what was asked and what was cancelled."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from outrider.cluster.gateway.gateway import Gateway
from outrider.cluster.gateway.next_turn import PrefillBackend
from outrider.cluster.gateway.request_parser import ModelInfo
from outrider.cluster.gateway.rollout_memory import RolloutMemory
from outrider.cluster.monitoring.metrics import GatewayMetrics
from outrider.verifier_service.messages.request import (
    FinishReason,
    GenerationRequest,
    LogprobsMode,
    RequestOutput,
    SpeculationMetrics,
    TokenLogprobs,
)
from support.clock import Clock

EOS = "<|end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
    "<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
BRACKETS = (  # a chat template whose texts are told apart at sight
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CALL_ARGUMENTS = '{"city": "größer"}'
CALL_TEMPLATES = {  # how templates of each kind write the arguments of a call, and what comes of CALL_ARGUMENTS
    "joins": ("{{ '!' + arguments }}", f"!{CALL_ARGUMENTS}"),
    "joins without content": ("{% if not m.content %}{{ '!' + arguments }}{% endif %}", f"!{CALL_ARGUMENTS}"),
    "joins where there are tools": ("{% if tools %}{{ '!' + arguments }}{% endif %}", ""),
    "prints": ("{{ arguments }}", CALL_ARGUMENTS),
    "walks": ("{% for key, value in arguments|items %}<{{ key }}>{{ value }}{% endfor %}", "<city>größer"),
    "walks keys": ("{% for key in arguments %}{{ key }}={{ arguments[key] }}{% endfor %}", "city=größer"),
    "takes both": ("{{ arguments if arguments is string else arguments|tojson }}", CALL_ARGUMENTS),
    "writes JSON": ("{{ arguments|tojson }}", CALL_ARGUMENTS),
    "writes all as JSON": ("{{ call.function|tojson }}", f'{{"name": "weather", "arguments": {CALL_ARGUMENTS}}}'),
    "wants long ids": (
        "{% if call.id|length not in (2, 9) %}{{ raise_exception('no id') }}{% endif %}{{ '!' + arguments }}",
        f"!{CALL_ARGUMENTS}",
    ),
    "ignores": ("", ""),
}
Step = Sequence[int] | Exception | None  # tokens of one step; an error; None: wait for ever


def calls_template(body: str) -> str:
    """Return BRACKETS with calls, whose arguments a body of CALL_TEMPLATES writes; it refuses what tools answer."""
    calls = "{% for call in m.tool_calls or [] %}{% set arguments = call.function.arguments %}" + body + "{% endfor %}"
    refused = "{% if m.role == 'tool' %}{{ raise_exception('no such role') }}{% endif %}"
    return BRACKETS.replace("{% endfor %}", refused + calls + "{% endfor %}", 1)


def chat_of_call(arguments: Any) -> list[dict[str, Any]]:
    """Return a conversation in which a call was made."""
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [{"role": "user", "content": "fox"}, {"role": "assistant", "content": "", "tool_calls": [call]}]


def build_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Train a tiny byte-level BPE: every byte is a token, so characters are split over tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<|start|>", EOS], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog, größer 日本語"] * 4, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS)
    wrapped.chat_template = chat_template
    return wrapped


SPACED_WORDS = ("<s>", "<unk>", "▁", "▁a", "▁bee", "a", "b", ".", "▁▁", "\n", "[/INST]")
SPACED_DECODERS = {  # of tokenizers that write a space into the token behind it
    "sentencepiece": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")]),
    "metaspace first": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]),
    "metaspace never": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")]),
    "no strip": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
}


def spaced_tokenizer(kind: str = "sentencepiece", chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose decoder may drop a text's first space; bytes fall back to tokens of their own."""
    words = [*SPACED_WORDS, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.WordLevel({word: id_ for id_, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = SPACED_DECODERS[kind]
    special = {"bos_token": "<s>", "additional_special_tokens": ["[/INST]"]}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    wrapped.chat_template = chat_template
    return wrapped


def spaced_ids(*pieces: str) -> list[int]:
    """Return the ids of pieces of a `spaced_tokenizer`; a character that is none is its bytes."""
    ids: list[int] = []
    for piece in pieces:
        known = [SPACED_WORDS.index(piece)] if piece in SPACED_WORDS else None
        ids += known or [len(SPACED_WORDS) + byte for byte in piece.encode()]
    return ids


def fake_logprobs(token_id: int, num_top: int | None) -> TokenLogprobs:
    """Return a token's made-up log probability: its rank is 2, behind the token with the next id."""
    top = [(token_id + 1, -0.25), (token_id, -1.5), (token_id + 2, -math.inf)][: num_top or 0]
    ids, logprobs = tuple(id_ for id_, _ in top), tuple(logprob for _, logprob in top)
    return TokenLogprobs(token_id=token_id, logprob=-1.5, rank=2, top_token_ids=ids, top_logprobs=logprobs)


@dataclass(slots=True)
class FakeBackend:
    """Play `script(request)`; the last step's output finishes with `finish_reason` and `speculation`.

    A step of several tokens is a draft that was right, and the bonus token behind it.
    """

    script: Callable[[GenerationRequest], Sequence[Step]]
    finish_reason: FinishReason | None = FinishReason.LENGTH
    speculation: SpeculationMetrics | None = None
    error: str | None = None
    pace_s: float = 0.0  # before each step
    requests: list[GenerationRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    num_waiting: int = 0
    waiting: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, request: GenerationRequest, hear: Callable[[RequestOutput], None]) -> None:
        self.requests.append(request)
        steps = self.script(request)
        finished = False
        try:
            for number, step in enumerate(steps, start=1):
                output = await self._output(request, step, is_last=number == len(steps))
                if number == 1:
                    output = dataclasses.replace(output, prompt_logprobs=_prompt_logprobs(request))
                finished = output.finish_reason is not None
                hear(output)
        except asyncio.CancelledError:
            if not finished:
                self.cancelled.append(request.request_id)
            raise

    async def until_waiting(self, num_waiting: int) -> None:
        """Return once so many generations wait for ever."""
        while self.num_waiting < num_waiting:
            self.waiting.clear()
            await self.waiting.wait()

    async def _output(self, request: GenerationRequest, step: Step, *, is_last: bool) -> RequestOutput:
        await asyncio.sleep(self.pace_s)
        if isinstance(step, BaseException):
            raise step
        if step is None:
            self.num_waiting += 1
            self.waiting.set()
            await asyncio.get_running_loop().create_future()
        num_top = request.sampling.logprobs
        return RequestOutput(
            request_id=request.request_id,
            token_ids=tuple(step or ()),
            num_draft_tokens=max(0, len(step or ()) - 1),
            num_accepted_tokens=max(0, len(step or ()) - 1),
            follows_leaf=True,
            logprobs=None if num_top is None else tuple(fake_logprobs(id_, num_top) for id_ in step or ()),
            num_cached_tokens=2,
            finish_reason=self.finish_reason if is_last else None,
            error=self.error,
            speculation=self.speculation if is_last else None,
        )


def _prompt_logprobs(request: GenerationRequest) -> tuple[TokenLogprobs | None, ...] | None:
    num_top = request.sampling.prompt_logprobs
    if num_top is None:
        return None
    return (None, *(fake_logprobs(id_, num_top) for id_ in request.prompt_token_ids[1:]))


def build_gateway(
    backend: FakeBackend,
    tokenizer: PreTrainedTokenizerFast,
    *,
    max_model_len: int = 64,
    adapters: tuple[str, ...] = (),
    logprobs_mode: LogprobsMode = LogprobsMode.RAW,
    rollouts: bool = False,
    learns: bool = False,
    hands_over: bool = False,
    sampling_defaults: dict[str, Any] | None = None,
    allows_lossy: bool = False,
    tells_cached: bool = True,
    memory: RolloutMemory | None = None,
    fleet_load: Callable[[], dict[str, Any]] = dict,
    prefills: PrefillBackend | None = None,
    stream_interval: int = 1,
) -> Gateway:
    model = ModelInfo(
        name="tiny",
        max_model_len=max_model_len,
        vocab_size=len(tokenizer),
        eos_token_ids=(tokenizer.eos_token_id,),
        created=1_700_000_000,
        adapters=adapters,
        logprobs_mode=logprobs_mode,
        rollouts=rollouts,
        learns=learns,
        hands_over=hands_over,
        sampling_defaults=sampling_defaults or {},
        allows_lossy=allows_lossy,
        tells_cached=tells_cached,
    )
    metrics = GatewayMetrics(CollectorRegistry(), model_name="tiny")
    return Gateway(
        model,
        tokenizer,
        backend,
        metrics,
        Clock(tick_s=1.0),
        fleet_load=fleet_load,
        memory=memory,
        prefills=prefills,
        stream_interval=stream_interval,
    )


def says(tokenizer: PreTrainedTokenizerFast, text: str) -> list[list[int]]:
    """Return a script that says `text`, a token a step."""
    return [[token_id] for token_id in tokenizer.encode(text)]
