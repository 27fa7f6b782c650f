"""No token of one request in another's answer: at the gateway and in the engine, whatever is cancelled meanwhile."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from contextlib import aclosing
from functools import cache
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fakes.backend import FakeBackend, Step, build_gateway, build_tokenizer
from fakes.engine_bench import EngineBench, make_request, tokens_of
from fakes.runner import continuation
from fuzz.budget import examples
from fuzz.tally import TALLY
from outrider.cluster.gateway.gateway import Gateway
from outrider.cluster.gateway.request_parser import RequestInput
from outrider.verifier_service.messages.draft import Commit, Draft, DrafterEvent
from outrider.verifier_service.messages.request import FinishReason, GenerationRequest, RequestOutput

# --- the gateway ---

TOKENIZER = build_tokenizer()


def own_tokens(request: GenerationRequest) -> list[list[int]]:
    """Say what follows from the prompt, the salt and the choice alone, in steps of one to three tokens."""
    key = [*request.prompt_token_ids, request.sampling.choice_index, *request.cache_salt.encode()]
    tokens = [2 + token for token in continuation(key, request.sampling.max_tokens, len(TOKENIZER) - 2)]
    steps: list[list[int]] = []
    while tokens:
        size = 1 + tokens[0] % 3
        steps.append(tokens[:size])
        tokens = tokens[size:]
    return steps


@dataclasses.dataclass(slots=True)
class UnevenBackend(FakeBackend):
    """A backend whose requests overtake each other."""

    async def _output(self, request: GenerationRequest, step: Step, *, is_last: bool) -> RequestOutput:
        for _ in range(sum(step) % 4):
            await asyncio.sleep(0)
        return await FakeBackend._output(self, request, step, is_last=is_last)


@dataclasses.dataclass(frozen=True, slots=True)
class Client:
    """What one client asks, and after how many chunks it leaves; None: it stays."""

    body: RequestInput
    delay: int
    leaves_after: int | None


BODIES = st.builds(
    RequestInput,
    prompt=st.lists(st.integers(2, 9), min_size=1, max_size=3),
    n=st.integers(1, 3),
    max_tokens=st.integers(1, 20),
    stop=st.none() | st.sampled_from(("e", "th", "\x0b")),
    cache_salt=st.none() | st.sampled_from("ab"),
)
CLIENTS = st.builds(Client, body=BODIES, delay=st.integers(0, 5), leaves_after=st.none() | st.integers(0, 6))
Heard = dict[int, list[tuple[int, str]]]  # ids and texts by choice


async def listen(gateway: Gateway, client: Client) -> Heard:
    """Return what a client has heard when it leaves."""
    for _ in range(client.delay):
        await asyncio.sleep(0)
    heard: Heard = {}
    request = await gateway.parse(client.body)
    num_chunks = 0
    async with aclosing(gateway.generate(request)) as chunks:
        async for chunk in chunks:
            assert chunk.request_id == request.request_id
            heard.setdefault(chunk.index, []).extend((token.id, token.text) for token in chunk.tokens)
            num_chunks += 1
            if num_chunks == client.leaves_after:
                break
    return heard


async def listen_together(clients: Sequence[Client]) -> None:
    backend = UnevenBackend(own_tokens)
    gateway = build_gateway(backend, TOKENIZER)
    together = await asyncio.gather(*(listen(gateway, client) for client in clients))
    assert gateway.num_running == 0
    for client, heard in zip(clients, together, strict=True):
        alone = await listen(
            build_gateway(FakeBackend(own_tokens), TOKENIZER), dataclasses.replace(client, leaves_after=None)
        )
        for index, tokens in heard.items():
            assert tokens == alone[index][: len(tokens)], "heard what it does not hear alone"
        if client.leaves_after is None:
            assert heard == alone
        TALLY.count("isolation: gateway requests", "whole" if client.leaves_after is None else "left early")


@examples(60)
@given(st.lists(CLIENTS, min_size=2, max_size=8))
def test_clients_hear_their_own_tokens(clients: list[Client]) -> None:
    asyncio.run(listen_together(clients))


# --- the engine ---

MAX_TOKENS = 12
PROMPTS = (*(tuple(range(1, end)) for end in (3, 6, 10, 11)), (1, 2, 3, 4, 9, 9), (7, 7, 7, 7, 7))
SMALL = {"num_blocks": 12, "block_size": 4}  # for a few requests: more are preempted
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.5, "seed": 1},
    {"temperature": 1.5, "seed": 2},
    {"frequency_penalty": 1.5, "logprobs": 1},
    {"min_tokens": 3, "stop_token_ids": tuple(range(0, 97, 5))},
    {"bad_words": tuple((a, b) for a in range(3, 97, 4) for b in range(5))},
)


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
    """A request by the numbers of its parts."""

    prompt: int
    sampling: int
    salt: str
    group: str | None
    priority: int
    draft_length: int

    def message(self, request_id: str) -> GenerationRequest:
        request = make_request(
            request_id,
            prompt=PROMPTS[self.prompt],
            draft_length=self.draft_length,
            drafter_id="d" if self.draft_length else None,
            **{"max_tokens": MAX_TOKENS, **SAMPLINGS[self.sampling]},
        )
        return dataclasses.replace(request, cache_salt=self.salt, group_id=self.group, priority=self.priority)


@cache
def solo_tokens(prompt: int, sampling: int) -> tuple[int, ...]:
    """Return the output of a request that is alone and plainly decoded."""
    bench = EngineBench(drafters=())
    ask = Ask(prompt=prompt, sampling=sampling, salt="", group=None, priority=0, draft_length=0)
    bench.engine.add(ask.message("solo"))
    return tokens_of(bench.finish()["solo"])


ASKS = st.builds(
    Ask,
    prompt=st.integers(0, len(PROMPTS) - 1),
    sampling=st.integers(0, len(SAMPLINGS) - 1),
    salt=st.sampled_from(("", "a", "b")),
    group=st.none() | st.sampled_from("gh"),
    priority=st.integers(-1, 1),
    draft_length=st.integers(0, 4),
)
Cancel = int  # of the request with this number, counted round
Answer = tuple[int, int]  # draft so many right tokens and then so many wrong ones for every open round
EVENTS = st.lists(
    st.one_of(ASKS, st.integers(0, 9), st.tuples(st.integers(0, 3), st.integers(0, 2)), st.none()), max_size=30
)


class Play:
    """Plays events to one engine and keeps what came of every request."""

    def __init__(self) -> None:
        self._bench = EngineBench(**SMALL, max_num_batched_tokens=16)
        self._asks: dict[str, Ask] = {}
        self._cancelled: set[str] = set()
        self._outputs: dict[str, list[RequestOutput]] = {}

    def play(self, event: Ask | Cancel | Answer | None) -> None:
        match event:
            case Ask():
                request_id = str(len(self._asks))
                self._asks[request_id] = event
                assert self._bench.engine.add(event.message(request_id)) is None
            case int() if self._asks:
                request_id = str(event % len(self._asks))
                self._cancelled |= {request_id} & self._bench.engine.requests.keys()
                self._bench.engine.cancel(request_id)
            case (num_right, num_wrong):
                self._draft(num_right, num_wrong)
        self._keep(self._bench.step() or [])

    def _draft(self, num_right: int, num_wrong: int) -> None:
        for _, message in self._bench.drafts.take():
            request = self._bench.engine.requests.get(message.request_id)
            if isinstance(message, Commit) and message.max_length > 0 and request is not None:
                ask = self._asks[message.request_id]
                right = solo_tokens(ask.prompt, ask.sampling)[request.num_output_tokens :][:num_right]
                draft = Draft(
                    request_id=message.request_id,
                    round_id=message.round_id,
                    position=message.position + len(message.token_ids),
                    token_ids=(right + (96,) * num_wrong)[: message.max_length],
                )
                self._bench.drafts.events.append(DrafterEvent(drafter_id="d", message=draft))

    def _keep(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self._cancelled, "an output of a cancelled request"
            self._outputs.setdefault(output.request_id, []).append(output)
        self._check_cached()

    def _check_cached(self) -> None:
        """A request that was never preempted has cached tokens from others of its salt only."""
        for request in self._bench.engine.requests.values():
            if request.num_cached_tokens and not request.num_preemptions:
                others = [
                    PROMPTS[ask.prompt] + solo_tokens(ask.prompt, ask.sampling)
                    for request_id, ask in self._asks.items()
                    if request_id != request.request_id and ask.salt == request.cache_salt
                ]
                cached = tuple(request.token_ids[: request.num_cached_tokens])
                assert any(tokens[: len(cached)] == cached for tokens in others), "a prefix of another salt"

    def finish(self) -> None:
        for outputs in self._bench.finish(max_steps=2000).values():
            self._keep(outputs)
        assert self._bench.engine.scheduler.kv_usage == 0.0
        for request_id, ask in self._asks.items():
            solo = solo_tokens(ask.prompt, ask.sampling)
            outputs = self._outputs.get(request_id, [])
            tokens = tokens_of(outputs)
            if request_id in self._cancelled:
                assert tokens == solo[: len(tokens)]
            else:
                assert tokens == solo
                assert outputs[-1].finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        num_cancelled = len(self._cancelled)
        TALLY.count("isolation: engine requests", "whole", len(self._asks) - num_cancelled)
        TALLY.count("isolation: engine requests", "cancelled", num_cancelled)


@examples(80)
@given(EVENTS)
def test_every_request_says_what_it_says_alone(events: list[Ask | Cancel | Answer | None]) -> None:
    play = Play()
    for event in events:
        play.play(event)
    play.finish()
