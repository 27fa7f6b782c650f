from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from importlib.metadata import version

import httpx
import openai
import pytest

from fakes.backend import (
    SPACED_DECODERS,
    FakeBackend,
    build_gateway,
    build_tokenizer,
    says,
    spaced_ids,
    spaced_tokenizer,
)
from outrider.cluster.api.openai.endpoints import MAX_BODY_BYTES, build_api
from outrider.cluster.api.openai.protocol import MAX_TOKENIZED_CHARS
from outrider.cluster.gateway.text_codec import TextCodec
from outrider.verifier_service.messages.request import (
    SpeculationMetrics,
)
from support.stack import Stack
from support.waiting import healthy

SPECULATION = SpeculationMetrics(enabled=True, num_drafts=2, num_draft_tokens=6, num_accepted_tokens=3)
TEXT = "größer 日本"


def client_of(backend, tokenizer, is_healthy=healthy):
    return Stack(backend, tokenizer=tokenizer, is_healthy=is_healthy).client()


def client_to(gateway, is_healthy=healthy, **options):
    app = build_api(gateway, is_healthy, wall_clock=lambda: 1_700_000_000.0, **options)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")


def serving(backend, tokenizer):
    return Stack(backend, tokenizer=tokenizer).serving()


@pytest.fixture
def backend(tokenizer):
    return FakeBackend(lambda _: says(tokenizer, TEXT), speculation=SPECULATION)


async def test_the_openai_client_is_at_home(tokenizer, backend):
    async with serving(backend, tokenizer) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
        assert [model.id async for model in await client.models.list()] == ["tiny"]
        completion = await client.completions.create(model="tiny", prompt="the", n=2, seed=1, max_tokens=30)
        assert [choice.text for choice in completion.choices] == [TEXT, TEXT]
        assert completion.usage.completion_tokens == 2 * len(tokenizer.encode(TEXT))
        assert completion.usage.prompt_tokens == len(tokenizer.encode("the"))
        messages = [{"role": "user", "content": "fox"}]
        chat = await client.chat.completions.create(model="tiny", messages=messages, user="u")
        assert chat.choices[0].message.content == TEXT
        assert chat.choices[0].finish_reason == "length"
        assert chat.model_extra["metrics"]["speculative_decoding"]["mean_acceptance_length"] == 2.5
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model="tiny", prompt="the", best_of=2)
        assert refused.value.param == "best_of"


async def test_the_openai_client_streams(tokenizer, backend):
    async with serving(backend, tokenizer) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
        stream = await client.completions.create(model="tiny", prompt=["the", "fox"], stream=True)
        texts = {0: "", 1: ""}
        async for event in stream:
            texts[event.choices[0].index] += event.choices[0].text
        assert texts == {0: TEXT, 1: TEXT}
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": [{"type": "text", "text": "fox"}]}],
            stream=True,
            stream_options={"include_usage": True},
        )
        events = [event async for event in stream]
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content or "" for event in events[:-1]) == TEXT
    assert events[-2].choices[0].finish_reason == "length"
    assert events[-2].model_extra["metrics"]["speculative_decoding"]["num_accepted_tokens"] == 3
    assert events[-1].usage.completion_tokens == len(tokenizer.encode(TEXT))
    assert events[-1].choices == []


async def test_chat_goes_through_the_template(tokenizer, backend):
    async with client_of(backend, tokenizer) as client:
        await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "fox"}]})
    prompt = tokenizer.decode(list(backend.requests[0].prompt_token_ids))
    assert prompt == "<|start|>user\nfox<|end|><|start|>assistant\n"
    assert backend.requests[0].sampling.max_tokens == 64 - len(backend.requests[0].prompt_token_ids)


async def test_every_form_of_prompt(tokenizer, backend):
    async with client_of(backend, tokenizer) as client:
        for prompt, n, num_choices in (("a", 1, 1), (["a", "b"], 2, 4), ([5, 6], 1, 1), ([[5], [6], [7]], 1, 3)):
            answer = (await client.post("/v1/completions", json={"prompt": prompt, "n": n})).json()
            assert [choice["index"] for choice in answer["choices"]] == list(range(num_choices))
    assert len({request.request_id for request in backend.requests}) == 9


@pytest.mark.parametrize("stream", [True, False])
async def test_choices_of_several_prompts_are_in_the_order_of_their_prompts(tokenizer, stream):
    backend = FakeBackend(lambda request: [list(request.prompt_token_ids)])
    texts = dict.fromkeys(range(6), "")
    async with client_of(backend, tokenizer) as client:
        body = {"prompt": ["a", "b", "c"], "n": 2, "stream": stream, "max_tokens": 1}
        answer = await client.post("/v1/completions", json=body)
        for event in events_of(answer) if stream else [answer.json()]:
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
    assert texts == dict(enumerate("aabbcc"))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "top_logprobs": 1}, "top_logprobs"),
        ({"prompt": "a", "logprobs_mode": "processed"}, "logprobs_mode"),
        ({"prompt": "a", "logprobs_mode": "processed_logits"}, "logprobs_mode"),
        ({"prompt": "a", "logprobs_mode": 1}, "logprobs_mode"),
        (
            {"prompt": "a", "logprobs_mode": "processed_logprobs", "rejection_sample_method": "typical"},
            "rejection_sample_method",
        ),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": ["a"] * 65, "n": 16}, "n"),
        ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format"),
        ({"prompt": "a", "response_format": "json_object"}, "response_format"),
        ({"prompt": "a", "guided_json": {"type": "nope"}}, "guided_json"),
        ({"prompt": "a", "structured_outputs": {"regex": "(("}}, "structured_outputs.regex"),
        ({"prompt": "a", "tools": [{}]}, "tools"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "suffix": "x"}, "suffix"),
        ({"prompt": "a", "temprature": 1}, "temprature"),
        ({"prompt": "a", "stream_options": {"include_usag": True}}, "stream_options"),
        ([], None),
    ],
)
async def test_what_would_be_left_undone_is_refused(tokenizer, backend, body, param):
    async with client_of(backend, tokenizer) as client:
        answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert backend.requests == []


async def test_neutral_values_and_harmless_fields_are_accepted(tokenizer, backend):
    neutral = {"presence_penalty": 0, "frequency_penalty": 0.0, "best_of": 1, "suffix": None, "logprobs": None}
    harmless = {"user": "u", "metadata": {}, "response_format": {"type": "text"}, "disable_speculative_decoding": True}
    harmless["stream_options"] = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    async with client_of(backend, tokenizer) as client:
        answer = await client.post("/v1/completions", json={"prompt": "a", **neutral, **harmless})
    assert answer.status_code == 200
    assert backend.requests[0].sampling.num_speculative_tokens == 0


async def test_a_typo_gets_a_hint(tokenizer, backend):
    async with client_of(backend, tokenizer) as client:
        answer = await client.post("/v1/completions", json={"prompt": "a", "temprature": 1})
    assert "'temperature'" in answer.json()["error"]["message"]


async def test_an_adapter_goes_by_its_name_as_a_model(tokenizer, backend):
    gateway = build_gateway(backend, tokenizer, adapters=("poet",))
    async with client_to(gateway) as client:
        models = (await client.get("/v1/models")).json()["data"]
        assert [(model["id"], model.get("parent")) for model in models] == [("tiny", None), ("poet", "tiny")]
        assert (await client.get("/v1/models/poet")).json()["parent"] == "tiny"
        for name in ("poet", "tiny"):
            answer = await client.post("/v1/completions", json={"prompt": "a", "model": name})
            assert answer.json()["model"] == name
        chat = {"messages": [{"role": "user", "content": "fox"}], "model": "poet"}
        assert (await client.post("/v1/chat/completions", json=chat)).json()["model"] == "poet"
    assert [request.adapter for request in backend.requests] == ["poet", None, "poet"]


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/v1/models/tiny", "/metrics", "/version", "/"])
async def test_head_is_answered_as_get_is_without_the_body(tokenizer, backend, path):
    async with client_of(backend, tokenizer) as client:
        head, whole = await client.head(path), await client.get(path)
        assert (head.status_code, head.content, whole.status_code) == (200, b"", 200)
        assert head.headers.get("content-type") == whole.headers.get("content-type")
        assert (await client.head("/v1/completions")).status_code == 405
        assert (await client.head("/nobody")).status_code == 404


async def test_models_health_and_metrics(tokenizer, backend):
    async with client_of(backend, tokenizer) as client:
        answer = await client.post("/v1/completions", json={"prompt": "a", "stream": True})
        assert answer.text.endswith("data: [DONE]\n\n")
        missing = await client.post("/v1/completions", json={"prompt": "a", "model": "other"})
        assert (missing.status_code, missing.json()["error"]["param"]) == (404, "model")
        assert (await client.get("/v1/models/tiny")).json()["max_model_len"] == 64
        assert (await client.get("/v1/models/other")).status_code == 404
        assert (await client.get("/nowhere")).json()["error"]["type"] == "invalid_request_error"
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 200
        told = (await client.get("/version")).json()
        assert told == {"version": version("outrider"), "batch_invariant": None, "batch_dependent": None}
        assert "vllm:generation_tokens_total" in (await client.get("/metrics")).text

    async def ill():
        return False

    async with client_of(backend, tokenizer, ill) as client:
        assert (await client.get("/health")).status_code == 503
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/live")).status_code == 200


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}


@pytest.mark.parametrize(
    ("messages", "template"),
    [
        ([{"role": "user", "content": "a"}], None),
        ([{"role": "bad", "content": "a"}], "default"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}], "default"),
        ([], "default"),
    ],
)
async def test_messages_that_do_not_fit_are_refused(tokenizer, backend, messages, template):
    own = tokenizer if template else build_tokenizer(chat_template=None)
    async with client_of(backend, own) as client:
        answer = await client.post("/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"


async def test_an_image_is_refused_and_not_passed_over(tokenizer, backend):
    parts = [{"type": "text", "text": "what is this?"}, IMAGE]
    async with client_of(backend, tokenizer) as client:
        body = {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": parts}]}
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "messages"
    assert error["message"].startswith("messages: content of type 'image_url'")


MESSAGES = [{"role": "user", "content": "fox"}]
GENERATION_PATHS = [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": MESSAGES})]


def events_of(answer):
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("stream", [True, False])
async def test_completions_show_log_probabilities_beside_the_text(tokenizer, stream):
    ids = tokenizer.encode("a日b")
    backend = FakeBackend(lambda _: [ids[:2], ids[2:]])
    async with client_of(backend, tokenizer) as client:
        body = {"prompt": "ab", "logprobs": 2, "stream": stream, "echo": True}
        answer = await client.post("/v1/completions", json=body)
    objects = events_of(answer) if stream else [answer.json()]
    lists = [choice["logprobs"] for shown in objects for choice in shown["choices"]]
    joined = {name: [item for part in lists for item in part[name]] for name in lists[0]}
    prompt = tokenizer.encode("ab")
    assert joined["tokens"] == ["a", "b", "a", "bytes:\\xe6\\x97", "bytes:\\xa5", "b"]
    assert joined["text_offset"] == [0, 1, 2, 3, 3, 4], "where each token stands in the echoed prompt and the output"
    assert joined["token_logprobs"] == [None, *[-1.5] * 5]
    assert joined["top_logprobs"][0] is None
    assert joined["top_logprobs"][1] == {tokenizer.decode([prompt[1] + 1]): -0.25, "b": -1.5}
    assert backend.requests[0].sampling.prompt_logprobs == 2
    assert all("prompt_logprobs" not in choice for shown in objects for choice in shown["choices"])


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("echo", [True, False])
@pytest.mark.parametrize("kind", SPACED_DECODERS)
async def test_prompt_and_text_are_what_the_tokenizer_says_of_all_tokens(kind, echo, stream):
    tokenizer = spaced_tokenizer(kind)
    prompt, ids = spaced_ids("<s>", "▁a", "b", "▁"), spaced_ids("▁bee", "b", "日", "▁a")
    body = {"prompt": prompt, "stream": stream, "echo": echo}
    async with client_of(FakeBackend(lambda _: [[id_] for id_ in ids]), tokenizer) as client:
        plain = await client.post("/v1/completions", json=body)
        named = await client.post("/v1/completions", json={**body, "logprobs": 0})
    texts = ["".join(choice["text"] for choice in choices_of(answer, stream)) for answer in (plain, named)]
    before = "" if echo else tokenizer.decode(prompt, skip_special_tokens=True)
    assert [before + text for text in texts] == [tokenizer.decode(prompt + ids, skip_special_tokens=True)] * 2
    lists = [choice["logprobs"] for choice in choices_of(named, stream)]
    names, offsets = ([item for part in lists for item in part[name]] for name in ("tokens", "text_offset"))
    placed = zip(names, offsets, strict=True)
    spoken = [(name, offset) for name, offset in placed if name != "<s>" and "bytes:" not in name]
    assert [texts[0][offset:].startswith(name) for name, offset in spoken] == [True] * len(spoken)
    assert "".join(name for name, _ in spoken) == texts[0].replace("日", "")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_chats_answer_is_a_text_of_its_own_unless_it_continues_a_message(stream):
    template = "{{ messages[-1]['content'] }}{% if add_generation_prompt %}.{% endif %}"
    tokenizer = spaced_tokenizer(chat_template=template)
    backend = FakeBackend(lambda _: [[id_] for id_ in spaced_ids("▁bee", "▁a")])
    body = {"messages": [{"role": "assistant", "content": "a"}], "logprobs": True, "stream": stream}
    async with client_of(backend, tokenizer) as client:
        answer = await client.post("/v1/chat/completions", json=body)
        more = await client.post("/v1/chat/completions", json={**body, "continue_final_message": True})
    for told, text in ((answer, "bee a"), (more, " bee a")):
        choices = choices_of(told, stream)
        said = [choice["delta" if stream else "message"].get("content") or "" for choice in choices]
        tokens = [item for choice in choices for item in choice["logprobs"]["content"]]
        assert ("".join(said), "".join(item["token"] for item in tokens)) == (text, text)
        assert bytes(value for item in tokens for value in item["bytes"]).decode() == text


def choices_of(answer, stream):
    return [choice for shown in (events_of(answer) if stream else [answer.json()]) for choice in shown["choices"]]


class NotNumbers(FakeBackend):
    """A model whose second token has a log probability that is not a number."""

    async def generate(self, request, hear):
        def spoil(output):
            if len(self.script(request)) > 1 and output.finish_reason is not None:
                spoilt = [dataclasses.replace(one, logprob=math.nan) for one in output.logprobs]
                output.logprobs = tuple(spoilt)
            hear(output)

        await super().generate(request, spoil)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_no_answer_has_a_log_probability_that_json_has_no_word_for(tokenizer, path):
    logprobs = {"logprobs": True, "top_logprobs": 1} if "chat" in path else {"logprobs": 1}
    body = {"prompt": "ab"} if "chat" not in path else {"messages": [{"role": "user", "content": "ab"}]}
    async with client_of(NotNumbers(lambda _: [[5], [6]]), tokenizer) as client:
        whole = await client.post(path, json=body | logprobs)
        assert whole.status_code == 500
        assert "not a number" in whole.json()["error"]["message"]
        streamed = await client.post(path, json=body | logprobs | {"stream": True})
    assert "NaN" not in streamed.text
    assert (
        "not a number" in json.loads(streamed.text.strip().splitlines()[-1].removeprefix("data: "))["error"]["message"]
    )


async def test_the_prompt_alone_is_scored_without_output(tokenizer, backend):
    async with client_of(backend, tokenizer) as client:
        body = {"prompt": "ab", "max_tokens": 0, "echo": True, "logprobs": 1}
        answer = (await client.post("/v1/completions", json=body)).json()
    assert answer["choices"][0]["text"] == "ab"
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None, -1.5]
    assert answer["usage"]["completion_tokens"] == 0


async def test_chats_show_log_probabilities_as_the_openai_client_reads_them(tokenizer):
    ids = tokenizer.encode("a日")
    backend = FakeBackend(lambda _: [[id_] for id_ in ids])
    ask = {"model": "tiny", "messages": MESSAGES, "logprobs": True, "top_logprobs": 3}
    async with serving(backend, tokenizer) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
        whole = (await client.chat.completions.create(**ask)).choices[0].logprobs.content
        stream = await client.chat.completions.create(**ask, stream=True)
        parts = [item async for event in stream for item in event.choices[0].logprobs.content]
    assert [item.model_dump() for item in whole] == [item.model_dump() for item in parts]
    assert bytes(byte for item in whole for byte in item.bytes).decode() == "a日"
    assert (whole[0].token, whole[0].logprob) == ("a", -1.5)
    assert [top.logprob for top in whole[0].top_logprobs] == [-0.25, -1.5, -9999.0], "JSON has no -inf"


@pytest.mark.parametrize(("path", "prompt"), GENERATION_PATHS)
async def test_prompt_log_probabilities_are_vllms(tokenizer, backend, path, prompt):
    async with client_of(backend, tokenizer) as client:
        answer = (await client.post(path, json={**prompt, "prompt_logprobs": 1, "n": 2})).json()
    holder = answer if "messages" in prompt else answer["choices"][1]
    ids = backend.requests[0].prompt_token_ids
    assert len(holder["prompt_logprobs"]) == len(ids)
    assert holder["prompt_logprobs"][0] is None
    if len(ids) > 1:
        own, top = holder["prompt_logprobs"][1].items()
        decoded = tokenizer.decode([ids[1]])
        assert own == (str(ids[1]), {"logprob": -1.5, "rank": 2, "decoded_token": decoded})
        assert (top[0], top[1]["rank"]) == (str(ids[1] + 1), 1)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "prompt"), GENERATION_PATHS)
async def test_token_ids_origins_and_texts_on_request(tokenizer, path, prompt, stream):
    ids = tokenizer.encode("a日b")
    backend = FakeBackend(lambda _: [ids[:2], ids[2:3], ids[3:]])
    async with client_of(backend, tokenizer) as client:
        plain = await client.post(path, json={**prompt, "stream": stream})
        answer = await client.post(path, json={**prompt, "stream": stream, "return_token_ids": True})
    assert "token" not in plain.text.replace("_tokens", "")
    objects = events_of(answer) if stream else [answer.json()]
    choices = [choice for shown in objects for choice in shown["choices"]]
    assert [id_ for choice in choices for id_ in choice["token_ids"]] == ids
    origins = ["accepted", "bonus", "plain", "plain"]
    assert [origin for choice in choices for origin in choice["token_origins"]] == origins
    holder = objects[0] if "messages" in prompt else choices[0]
    assert holder["prompt_token_ids"] == list(backend.requests[0].prompt_token_ids)
    if stream:
        tokens = [token for choice in choices for token in choice["tokens"]]
        assert [(token["id"], token["origin"]) for token in tokens] == list(zip(ids, origins, strict=True))
        assert "".join(token["text"] for token in tokens) == "a日b"


async def test_tokenize_and_detokenize_are_vllms(tokenizer, backend):
    async with client_of(backend, tokenizer) as client:
        answer = (await client.post("/tokenize", json={"prompt": "fox 日", "return_token_strs": True})).json()
        ids = tokenizer.encode("fox 日")
        strings = tokenizer.convert_ids_to_tokens(ids)
        assert answer == {"count": len(ids), "max_model_len": 64, "tokens": ids, "token_strs": strings}
        chat = (await client.post("/tokenize", json={"messages": MESSAGES})).json()
        text = "<|start|>user\nfox<|end|><|start|>assistant\n"
        assert tokenizer.decode(chat["tokens"]) == text
        short = (await client.post("/tokenize", json={"messages": MESSAGES, "add_generation_prompt": False})).json()
        assert short["count"] < chat["count"]
        back = await client.post("/detokenize", json={"tokens": chat["tokens"]})
        assert back.json() == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": "a" * ((1 << 20) + 1)}, "prompt"),
        ("/tokenize", {"promt": "a", "prompt": "a"}, "promt"),
        ("/detokenize", {"tokens": [9999]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
async def test_what_cannot_be_tokenized_is_refused(tokenizer, backend, path, body, param):
    async with client_of(backend, tokenizer) as client:
        answer = await client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_a_long_chat_is_not_tokenised_for_nothing(tokenizer, backend):
    messages = [{"role": "user", "content": "a" * MAX_TOKENIZED_CHARS}]
    async with client_of(backend, tokenizer) as client:
        answer = await client.post("/tokenize", json={"messages": messages})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b"[" * 100_000 + b"]" * 100_000, 400, "nested too deeply"),
        (b'{"prompt": "a", "promt": ' + b'{"a":' * 300 + b"1" + b"}" * 301, 400, "unknown field 'promt'"),
        (b'{"prompt": "a", "speculative_prefill": true}', 400, "speculative prefill is not served: "),
        (b'{"prompt": "a", "rejection_sample_method": "judge"}', 400, "lossy judges are not served: "),
        (b'{"prompt": "\\ud800"}', 400, "surrogate"),
        (b'{"prompt": "a", "model": "\\udc00"}', 400, "surrogate"),
        (b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}", 400, "not JSON"),
        (b'{"prompt": "a", "temperature": NaN}', 400, "temperature"),
        (b'{"prompt": "a", "metadata": {"a": 1e999}}', 400, "metadata: numbers must be finite"),
        (b"\xff", 400, "not JSON"),
        (b" " * (MAX_BODY_BYTES + 1), 413, "bytes"),
    ],
)
async def test_hostile_bodies_are_refused(tokenizer, backend, body, status, text):
    async with client_of(backend, tokenizer) as client:
        answer = await client.post("/v1/completions", content=body)
    assert answer.status_code == status
    assert text in answer.json()["error"]["message"]


async def test_a_body_is_bounded_while_it_is_read(tokenizer, backend):
    num_read = 0

    async def endless():
        nonlocal num_read
        while num_read < 100:
            num_read += 1
            yield b" " * (1 << 20)

    async with client_of(backend, tokenizer) as client:
        answer = await client.post("/v1/completions", content=endless())
    assert answer.status_code == 413
    assert num_read < 20


async def test_a_body_that_stalls_is_given_up(tokenizer, backend):
    async def stalling():
        yield b'{"prompt": '
        await asyncio.Event().wait()

    async with client_to(build_gateway(backend, tokenizer), body_timeout_s=0.05) as client:
        answer = await client.post("/v1/completions", content=stalling())
    assert answer.status_code == 408
    assert answer.json()["error"]["code"] == "body_too_slow"
    assert "within 0.05 s" in answer.json()["error"]["message"]


async def test_a_draining_gateway_is_not_ready_and_answers_what_still_reaches_it(tokenizer, backend):
    gateway = build_gateway(backend, tokenizer)
    gateway.drain()
    async with client_to(gateway) as client:
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/live")).status_code == 200
        answer = await client.post("/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 200


async def test_load_is_the_gateways_and_the_fleets(tokenizer):
    backend = FakeBackend(lambda _: [None])
    gateway = build_gateway(backend, tokenizer, fleet_load=lambda: {"verifiers": []})
    async with client_to(gateway) as client:
        call = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"}))
        await backend.until_waiting(1)
        assert (await client.get("/load")).json() == {"server_load": 1, "verifiers": []}
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)


async def test_a_generation_that_is_cancelled_from_within_is_answered(tokenizer):
    """Nobody cancelled the request: it must not wait for ever."""
    backend = FakeBackend(lambda _: [[5], asyncio.CancelledError()])
    async with asyncio.timeout(10), client_of(backend, tokenizer) as client:
        answer = await client.post("/v1/completions", json={"prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "internal error")


@pytest.mark.parametrize("content", ["the fox", [{"type": "text", "text": "the "}, {"type": "text", "text": "fox"}]])
async def test_a_prediction_reaches_the_engine(tokenizer, backend, content):
    async with serving(backend, tokenizer) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
        prediction = {"type": "content", "content": content}
        await client.chat.completions.create(model="tiny", messages=MESSAGES, prediction=prediction)
    assert backend.requests[0].prediction_token_ids == tuple(tokenizer.encode("the fox"))


@pytest.mark.parametrize(
    "prediction",
    [
        {"type": "text", "content": "a"},
        {"type": "content"},
        {"type": "content", "content": [{"type": "image"}]},
        {"type": "content", "content": "a", "more": 1},
        {"type": "content", "content": "fox" * 100_000},
    ],
)
async def test_a_prediction_that_cannot_be_read_is_refused(tokenizer, backend, prediction):
    async with client_of(backend, tokenizer) as client:
        answer = await client.post("/v1/chat/completions", json={"messages": MESSAGES, "prediction": prediction})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prediction")


async def test_embeddings_are_refused_by_name(tokenizer, backend):
    async with serving(backend, tokenizer) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
        with pytest.raises(openai.BadRequestError, match="embeddings is not served"):
            await client.embeddings.create(model="tiny", input="a")


async def test_who_speaks_reaches_the_template(tokenizer, backend):
    messages = [{"role": "user", "content": "a", "name": "Ann", "refusal": None, "annotations": []}]
    asked = []

    class Template(TextCodec):
        async def render_chat(self, messages, **options):
            asked.extend(messages)
            return await super().render_chat(messages, **options)

    gateway = build_gateway(backend, tokenizer)
    gateway.text = Template(tokenizer)
    async with client_to(gateway) as client:
        assert (await client.post("/v1/chat/completions", json={"messages": messages})).status_code == 200
    assert asked == [{"role": "user", "content": "a", "name": "Ann"}]


@pytest.mark.parametrize("field", ["audio", "contents"])
async def test_what_a_message_says_besides_is_refused_by_name(tokenizer, backend, field):
    message = {"role": "assistant", "content": "a"}
    async with client_of(backend, tokenizer) as client:
        bodies = [{"messages": [message | {field: value}, *MESSAGES]} for value in (None, "x")]
        kept, refused = [await client.post("/v1/chat/completions", json=body) for body in bodies]
    assert (kept.status_code, refused.status_code) == (200, 400)
    assert f"'{field}' is not supported" in refused.json()["error"]["message"]


async def test_a_client_that_leaves_within_its_body_is_no_failure_of_ours(tokenizer, backend, caplog):
    messages = [{"type": "http.disconnect"}, {"type": "http.request", "body": b'{"pro', "more_body": True}]
    sent = []

    async def receive():
        return messages.pop()

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    app = Stack(backend, tokenizer=tokenizer).app
    await app({**scope, "raw_path": b"", "root_path": "", "scheme": "http", "http_version": "1.1"}, receive, send)
    assert sent[0]["status"] == 400
    assert caplog.records == []
