"""Ask a service by either protocol: both clients bring the same answers, token by token, with each token's origin."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import httpx

from outrider.cluster.client.openai_client import Server, open_client, stream_events
from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.gateway.text_codec import TextCodec
from outrider.lab.demo.questions import Question
from outrider.proto import generation_pb2, generation_pb2_grpc
from outrider.verifier_service.messages.link import NO_PROXY

ACCEPTED, PLAIN = "accepted", "plain"  # origins of tokens, beside recovered and bonus
_ORIGIN_PREFIX = "TOKEN_ORIGIN_"


@dataclass(frozen=True, slots=True)
class Token:
    """A token as it came: its text, where it came from, when it was here."""

    id: int
    text: str
    origin: str
    arrived_s: float


OnTokens = Callable[[Sequence[Token]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """What a service says of one request's drafts at its end."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    disabled_reason: str | None = None  # why it drafted no longer; None: it might to the end


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One streamed answer."""

    tokens: tuple[Token, ...]
    speculation: Speculation

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    @property
    def token_ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def num_steps(self) -> int:
        """How many steps of the verifier made it: each brings what is accepted and one token more."""
        return len(self.tokens) - self.speculation.num_accepted_tokens

    @property
    def decode_s(self) -> float:
        """Seconds from the first token to the last: the prompt is read before, drafts or not."""
        return self.tokens[-1].arrived_s - self.tokens[0].arrived_s if self.tokens else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """How an answer is wanted; all are greedy."""

    max_tokens: int
    may_draft: bool = True
    ignore_eos: bool = False


class Client(Protocol):
    """One way to ask."""

    name: str

    async def ask(self, question: Question, wish: Wish, on_tokens: OnTokens = lambda tokens: None) -> Answer:
        """Stream an answer; `on_tokens` is told what each message brings."""


class HttpClient:
    """Asks through the OpenAI endpoints, which tell each token's text and origin."""

    name = "HTTP"

    def __init__(self, client: httpx.AsyncClient, model: str) -> None:
        self._client = client
        self._model = model

    async def ask(self, question: Question, wish: Wish, on_tokens: OnTokens = lambda tokens: None) -> Answer:
        tokens: list[Token] = []
        speculation: dict[str, Any] = {}
        async with aclosing(stream_events(self._client, question.path, self._body(question, wish))) as events:
            async for event in events:
                now_s = time.monotonic()
                shown = [token for choice in event.get("choices", ()) for token in choice.get("tokens", ())]
                new = [Token(token["id"], token["text"], token["origin"], now_s) for token in shown]
                speculation = (event.get("metrics") or {}).get("speculative_decoding") or speculation
                tokens += new
                on_tokens(new)
        return Answer(tokens=tuple(tokens), speculation=_speculation(speculation))

    def _body(self, question: Question, wish: Wish) -> dict[str, Any]:
        return {
            **question.fields,
            "model": self._model,
            "max_tokens": wish.max_tokens,
            "temperature": 0,
            "ignore_eos": wish.ignore_eos,
            "disable_spec_decode": not wish.may_draft,
            "return_token_ids": True,
        }


class GrpcClient:
    """Asks through `outrider.v1.Inference`, which brings ids, origins and the text of a message as a whole."""

    name = "gRPC"

    def __init__(self, channel: grpc.aio.Channel, codec: TextCodec) -> None:
        self._stub = generation_pb2_grpc.InferenceStub(channel)
        self._codec = codec

    async def ask(self, question: Question, wish: Wish, on_tokens: OnTokens = lambda tokens: None) -> Answer:
        detokenizer = self._codec.detokenizer()
        tokens: list[Token] = []
        speculation = Speculation()
        async for chunk in self._stub.Generate(_generate_request(question, wish)):
            now_s = time.monotonic()
            texts = detokenizer.push(chunk.token_ids)
            if chunk.finish_reason:
                texts += detokenizer.flush()
                speculation = _speculation_of(chunk.speculative_decoding)
            # a message holds whole tokens, so that each has its text by its end
            origins = [_origin_name(origin) for origin in chunk.token_origins]
            new = [Token(*one, now_s) for one in zip(chunk.token_ids, texts, origins, strict=True)]
            tokens += new
            on_tokens(new)
        return Answer(tokens=tuple(tokens), speculation=speculation)


@asynccontextmanager
async def open_clients(config: ServiceConfig, codec: TextCodec) -> AsyncIterator[tuple[HttpClient, GrpcClient]]:
    """Connect to a service on this machine by both protocols."""
    async with (
        open_client(Server(url=f"http://{config.address(config.port)}")) as client,
        grpc.aio.insecure_channel(config.address(config.grpc_port), options=[NO_PROXY]) as channel,
    ):
        yield HttpClient(client, config.model.name), GrpcClient(channel, codec)


def _generate_request(question: Question, wish: Wish) -> generation_pb2.GenerateRequest:
    sampling = generation_pb2.SamplingParams(
        max_tokens=wish.max_tokens,
        temperature=0.0,
        ignore_eos=wish.ignore_eos,
        disable_spec_decode=not wish.may_draft,
    )
    return generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=question.token_ids), sampling=sampling)


def _origin_name(origin: int) -> str:
    return str(generation_pb2.TokenOrigin.Name(origin)).removeprefix(_ORIGIN_PREFIX).lower()


def _speculation(metrics: dict[str, Any]) -> Speculation:
    return Speculation(**{name: metrics[name] for name in Speculation.__slots__ if name in metrics})


def _speculation_of(metrics: generation_pb2.SpeculativeDecodingMetrics) -> Speculation:
    return Speculation(
        num_drafts=metrics.num_drafts,
        num_draft_tokens=metrics.num_draft_tokens,
        num_accepted_tokens=metrics.num_accepted_tokens,
        disabled_reason=metrics.disabled_reason or None,
    )
