"""What a gateway prefills after a chat's answer, for whom, and where; the scheduler's side: test_background."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp

from fakes.backend import BRACKETS, CHAT_TEMPLATE, FakeBackend, build_gateway, build_tokenizer, says
from fakes.played_fleet import HANGS, EngineVerifier, Fleet, ScriptedVerifier, fleet_of, snapshot_of
from outrider.cluster.api.authentication import ApiKeyMiddleware
from outrider.cluster.api.openai.endpoints import build_api
from outrider.cluster.common.api_keys import ApiKeys, hash_api_key
from outrider.cluster.common.errors import Unavailable
from outrider.cluster.gateway import next_turn
from outrider.cluster.gateway.gateway import Gateway
from outrider.cluster.gateway.next_turn import next_turn_tokens
from outrider.cluster.gateway.routed_backend import AFFINITY_PREFIX_TOKENS
from outrider.cluster.gateway.text_codec import TextCodec
from outrider.cluster.replies.reader import ReplySyntax
from outrider.verifier_service.messages.request import GenerationRequest, RequestOutput
from support.waiting import healthy

FORGETS = CHAT_TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'].split('</think>')[-1] }}")
ASKED = {"role": "user", "content": "fox"}


def client_of(app: ASGIApp) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")


class Prefills:
    """A `PrefillBackend` that records what it is asked for and answers `answer`, or raises it."""

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer
        self.requests: list[GenerationRequest] = []

    async def prefill(self, request: GenerationRequest) -> RequestOutput | None:
        self.requests.append(request)
        if self.answer is HANGS:
            await asyncio.get_running_loop().create_future()
        if isinstance(self.answer, Exception):
            raise self.answer
        return RequestOutput(request_id=request.request_id, token_ids=(1,), num_cached_tokens=3)


class Chats:
    """A gateway over a fake target that says one text, and what it prefills."""

    def __init__(self, text: str, template: str = CHAT_TEMPLATE, answer: Any = None) -> None:
        self.tokenizer = build_tokenizer(template)
        self.prefills = Prefills(answer)
        backend = FakeBackend(lambda _: says(self.tokenizer, text))
        self.gateway: Gateway = build_gateway(backend, self.tokenizer, max_model_len=256, prefills=self.prefills)

    async def ask(self, path: str = "/v1/chat/completions", **body: Any) -> list[str]:
        """Return the texts that are prefilled after an answer."""
        content = {"input": "fox"} if path == "/v1/responses" else {"messages": [ASKED]}
        async with client_of(build_api(self.gateway, healthy)) as client:
            answer = await client.post(path, json={"model": "tiny", **content, **body})
        assert answer.status_code == 200, answer.text
        await self.gateway.next_turn.settle()
        return [self.tokenizer.decode(request.prompt_token_ids) for request in self.prefills.requests]

    def count(self, name: str, **labels: str) -> float:
        labels = {"model_name": "tiny", "engine": "0", **labels}
        return self.gateway.metrics.registry.get_sample_value(f"outrider_next_turn_{name}_total", labels) or 0.0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_after_an_answer_the_chat_up_to_the_next_users_words_is_prefilled(path: str, stream: bool):
    chats = Chats("the dog")
    said = "<|start|>user\nfox<|end|><|start|>assistant\nthe dog<|end|><|start|>user\n"
    assert await chats.ask(path, stream=stream) == [said]
    (request,) = chats.prefills.requests
    assert request.is_background
    assert (request.sampling.max_tokens, request.sampling.num_speculative_tokens) == (1, 0)
    assert chats.count("prefills", outcome="done") == 1
    assert chats.count("prefilled_tokens") == len(request.prompt_token_ids) - 3


async def test_the_text_is_the_templates_not_the_models():
    """What the model thought is not in the next turn, so that the KV of its answer is of no use there."""
    chats = Chats("no dog</think>the dog", FORGETS)
    assert await chats.ask() == ["<|start|>user\nfox<|end|><|start|>assistant\nthe dog<|end|><|start|>user\n"]


@pytest.mark.parametrize(
    "template", [CHAT_TEMPLATE, BRACKETS, CHAT_TEMPLATE.replace("m['content']", "m['content']|trim")]
)
@pytest.mark.parametrize("words", ["a", "\n1", "the", " lazy", "größer", "\n\n", "7"])
def test_every_next_turn_begins_with_what_was_prefilled(template: str, words: str):
    tokenizer = build_tokenizer(template)
    chat = [ASKED, {"role": "assistant", "content": "the dog"}]
    ahead = next_turn_tokens(TextCodec(tokenizer), chat, {})
    turn = tokenizer.apply_chat_template([*chat, {"role": "user", "content": words}], add_generation_prompt=True)
    ids = tuple(turn["input_ids"])
    num_shared = next((i for i, (ours, its) in enumerate(zip(ahead, ids, strict=False)) if ours != its), len(ahead))
    assert len(ahead) - num_shared <= 1  # the last token may merge with the user's first
    assert tokenizer.decode(ahead).startswith(tokenizer.apply_chat_template(chat, tokenize=False)[:-1])


@pytest.mark.parametrize(
    "body", [{"store": False}, {"n": 2}, {"add_generation_prompt": False}], ids=lambda body: next(iter(body))
)
async def test_what_may_not_be_kept_or_has_no_one_next_turn_is_left_out(body: dict[str, Any]):
    assert await Chats("the dog").ask(**body) == []


async def test_a_key_that_keeps_nothing_prefills_nothing():
    chats = Chats("the dog")
    keys = ApiKeys((f"{hash_api_key('silent')}:never", f"{hash_api_key('salted')}:salted"))
    app = ApiKeyMiddleware(build_api(chats.gateway, healthy), keys)
    async with client_of(app) as client:
        for key in ("silent", "salted"):
            headers = {"authorization": f"Bearer {key}"}
            body = {"model": "tiny", "messages": [ASKED], "cache_salt": "s", "session_id": key}
            assert (await client.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
    await chats.gateway.next_turn.settle()
    (request,) = chats.prefills.requests
    shown = keys.admit([("x-api-key", "salted")])
    assert shown is not None
    assert (request.cache_salt, request.session_id, request.history_key) == (f"{shown.partition}s", "salted", "")
    assert not request.may_learn


@pytest.mark.parametrize("stream", [False, True])
async def test_after_a_tool_call_nothing_is_prefilled(stream: bool):
    chats = Chats('See.\n<tool_call>\n{"name": "weather", "arguments": {"city": "fox"}}\n</tool_call>')
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    app = build_api(chats.gateway, healthy, reply_syntax=ReplySyntax(tool_call_parser="hermes"))
    async with client_of(app) as client:
        body = {"model": "tiny", "messages": [ASKED], "tools": [tool], "stream": stream}
        answer = await client.post("/v1/chat/completions", json=body)
    assert '"tool_calls"' in answer.text
    await chats.gateway.next_turn.settle()
    assert chats.prefills.requests == []


@pytest.mark.parametrize(
    ("answer", "outcome"), [(Unavailable("gone"), "failed"), (KeyError("a bug"), "failed"), (HANGS, "late")]
)
async def test_no_answer_fails_when_a_prefill_does(answer: Any, outcome: str, monkeypatch: pytest.MonkeyPatch):
    chats = Chats("the dog", answer=answer)
    chats.gateway.next_turn._patience_s = 0.05
    assert len(await chats.ask()) == 1
    assert chats.count("prefills", outcome=outcome) == 1
    monkeypatch.setattr(next_turn, "MAX_IN_FLIGHT", 0)
    await chats.ask()
    assert chats.count("prefills", outcome="skipped") == 1


async def test_those_under_way_end_with_the_gateway():
    chats = Chats("the dog", answer=HANGS)
    asking = asyncio.ensure_future(chats.ask())
    while not chats.prefills.requests:
        await asyncio.sleep(0.001)
    await chats.gateway.next_turn.close()
    assert not chats.gateway.next_turn._tasks
    asking.cancel()


# --- the way to the verifier ---

SHORT = (1, 2, 3)
LONG = tuple(range(1, 61))


def asked(prompt: tuple[int, ...], **fields: Any) -> GenerationRequest:
    return dataclasses.replace(
        GenerationRequest(request_id="mine", prompt_token_ids=prompt, sampling=next_turn._ONE_TOKEN), **fields
    )


async def prefilled(fleet: Fleet, names: tuple[str, ...], request: GenerationRequest) -> RequestOutput | None:
    snapshot = snapshot_of(*names)
    endpoint = fleet.router.endpoints["v0"]
    states = [
        dataclasses.replace(s, report=dataclasses.replace(s.report, endpoint=endpoint)) for s in snapshot.verifiers
    ]
    fleet.router.know(dataclasses.replace(snapshot, verifiers=tuple(states)))
    return await fleet.backend.prefill(request)


@pytest.mark.parametrize(
    ("names", "request_", "is_sent"),
    [
        (("v0",), asked(SHORT), True),
        (("v0", "v1"), asked(SHORT), False),
        (("v0", "v1"), asked(SHORT, session_id="s"), True),
        (("v0", "v1"), asked((1,) * AFFINITY_PREFIX_TOKENS), True),
        ((), asked(SHORT), False),
    ],
    ids=["one verifier", "two and no key", "a session", "a long prefix", "none"],
)
async def test_it_goes_where_the_next_turn_will_go(names: tuple[str, ...], request_: GenerationRequest, is_sent: bool):
    verifier = ScriptedVerifier([(1,)])
    async with fleet_of(verifier) as fleet:
        output = await prefilled(fleet, names, request_)
        assert (output is not None) is is_sent
        assert len(verifier.requests) == is_sent
        assert fleet.router.asks == []  # it is not counted as load
        assert all(state.num_assigned == 0 for state in fleet.router.view.fleet.verifiers)


async def test_a_lost_verifier_is_unavailable():
    async with fleet_of(ScriptedVerifier([], end=HANGS, accepts=False)) as fleet:
        fleet.router.endpoints["v0"] = "127.0.0.1:1"
        with pytest.raises(Unavailable):
            await prefilled(fleet, ("v0",), asked(SHORT))


async def test_the_next_turn_finds_all_whole_blocks_in_the_cache():
    verifier = EngineVerifier(num_blocks=64, block_size=4, max_model_len=128)
    async with fleet_of(verifier) as fleet:
        output = await prefilled(fleet, ("v0",), dataclasses.replace(asked(LONG), is_background=True))
        assert output is not None
        assert output.num_cached_tokens == 0
        turn = GenerationRequest(request_id="turn", prompt_token_ids=(*LONG, 70, 71), sampling=next_turn._ONE_TOKEN)
        (answer,) = await fleet.generate(turn)
    assert answer.num_cached_tokens == len(LONG) // 4 * 4
