"""All doors of a gateway under one contract: fields go in, a `Message` or a `Refused` comes out.

A door writes the fields in its own words; what it has no word for it names in `lacks`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import grpc
import httpx
from google.rpc import error_details_pb2, status_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from outrider.cluster import SamplingParams
from outrider.cluster.api.authentication import ApiKeyInterceptor, ApiKeyMiddleware
from outrider.cluster.common.api_keys import ApiKeys
from outrider.cluster.common.errors import OutriderError
from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.gateway.text_codec import TextCodec
from outrider.cluster.offline.prompt_run import PromptRun
from outrider.cluster.offline.prompt_runs import PromptRuns, named_prompts
from outrider.proto import generation_pb2 as pb
from outrider.proto import generation_pb2_grpc
from outrider.verifier_service.messages.request import FinishReason, RequestOutput, SpeculationPlan
from support.stack import Stack


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


FORMS = {
    "json_schema": "json",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.INTERNAL: 500,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}


@dataclass(slots=True, kw_only=True)
class Shown:
    """One choice; None: the door does not show it."""

    text: str | None = None
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    finish: str | None = None
    spans: list[tuple[str, int, int]] | None = None  # which weights drew which tokens


@dataclass(slots=True, kw_only=True)
class Message:
    """An answer, whole, or put together from its stream."""

    choices: list[Shown]
    usage: tuple[int, int] | None = None  # tokens of the prompt, and of all choices
    warnings: list[str] | None = None


@dataclass(slots=True)
class Refused(Exception):
    """An error, in HTTP's words."""

    status: int
    field: str | None = None
    text: str = ""
    retry_after: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """How a door is called, beside the fields."""

    stream: bool = False
    keys: ApiKeys | None = None  # in front of the door
    key: str = ""
    deadline_s: float | None = None
    on_port: bool = False  # HTTP: over a socket, whose end the service hears of


class Door:
    """A way in. `send` returns the whole answer, or raises `Refused`."""

    name: ClassVar[str]
    lacks: ClassVar[frozenset[str]] = frozenset()
    forms: ClassVar[frozenset[str]] = frozenset(FORMS)
    shows: ClassVar[frozenset[str]] = words("text token_ids logprobs usage warnings")
    has_keys: ClassVar[bool] = True

    def has(self, *names: str) -> bool:
        """Return whether it has a word for all these fields."""
        return not self.lacks & set(names)

    async def send(self, stack: Stack, call: Call = Call(), /, **fields: Any) -> Message:
        raise NotImplementedError

    def __repr__(self) -> str:
        return self.name


# --- HTTP ---


class HttpDoor(Door):
    """A path whose body is JSON and whose stream is server-sent events."""

    path: ClassVar[str]
    prompt_field: ClassVar[str] = "prompt"
    renamed: ClassVar[Mapping[str, str]] = {"include_stop": "include_stop_str_in_output"}
    outside: ClassVar[frozenset[str] | None] = (
        None  # fields beside `sampling_params`; None: there is no such dictionary
    )

    def body(self, stack: Stack, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the body; `form` is a pair of a form's kind and what describes it."""
        fields = {"prompt": "the", **fields}
        body = {self.prompt_field: self.prompt(stack, fields.pop("prompt"))}
        if (form := fields.pop("form", None)) is not None:
            fields |= self.formed(*form)
        if "prediction" in fields:
            fields["prediction"] = {"type": "content", "content": fields["prediction"]}
        flat = {self.renamed.get(name, name): value for name, value in fields.items()}
        if self.outside is None:
            return body | flat
        beside = {name: flat.pop(name) for name in self.outside & flat.keys()}
        return {**body, **beside, "sampling_params": flat}

    def prompt(self, stack: Stack, text: Any) -> Any:
        return text

    def formed(self, kind: str, described: Any) -> dict[str, Any]:
        return {"structured_outputs": {FORMS[kind]: described}}

    def whole(self, answer: Any) -> Message:
        raise NotImplementedError

    def streamed(self, events: Sequence[Any]) -> Message:
        raise NotImplementedError

    async def send(self, stack: Stack, call: Call = Call(), /, **fields: Any) -> Message:
        body = self.body(stack, fields) | ({"stream": True} if call.stream else {})
        headers = {"authorization": f"Bearer {call.key}"} if call.key else {}
        async with self._client(stack, call) as client:
            answer = await client.post(self.path, json=body, headers=headers)
        if answer.status_code != 200:
            error = answer.json()["error"]
            raise Refused(answer.status_code, error.get("param"), error["message"], answer.headers.get("retry-after"))
        if not call.stream:
            return self.whole(answer.json())
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        events = [json.loads(line) for line in lines if line != "[DONE]"]
        for event in events:
            if error := event.get("error") or (event.get("response") or {}).get("error"):
                raise Refused(200, error.get("param"), error["message"])
        return self.streamed(events)

    @asynccontextmanager
    async def _client(self, stack: Stack, call: Call) -> AsyncIterator[httpx.AsyncClient]:
        if call.on_port:
            async with stack.serving() as url, httpx.AsyncClient(base_url=url) as client:
                yield client
            return
        keys = call.keys
        async with stack.client((lambda app: ApiKeyMiddleware(app, keys)) if keys else lambda app: app) as client:
            yield client


class Completions(HttpDoor):
    name, path = "completions", "/v1/completions"
    lacks = words("prediction request_id")

    def body(self, stack: Stack, fields: dict[str, Any]) -> dict[str, Any]:
        return {"return_token_ids": True, **super().body(stack, fields)}

    def whole(self, answer: Any) -> Message:
        usage = answer["usage"]
        return Message(
            choices=[self.shown([choice]) for choice in answer["choices"]],
            usage=(usage["prompt_tokens"], usage["completion_tokens"]),
            warnings=answer.get("warnings", []),
        )

    def streamed(self, events: Sequence[Any]) -> Message:
        parts = [choice for event in events for choice in event["choices"]]
        indices = sorted({part["index"] for part in parts})
        shown = [self.shown([part for part in parts if part["index"] == index]) for index in indices]
        return Message(choices=shown, warnings=events[0].get("warnings", []))

    def shown(self, parts: Sequence[Any]) -> Shown:
        return Shown(
            text="".join(self.text(part) for part in parts),
            token_ids=[id_ for part in parts for id_ in part.get("token_ids") or ()],
            logprobs=[value for part in parts for value in self.logprobs(part.get("logprobs") or {})],
            finish=parts[-1]["finish_reason"],
        )

    def text(self, part: Any) -> str:
        return part["text"]

    def logprobs(self, logprobs: Any) -> list[float]:
        return logprobs.get("token_logprobs", [])


class Chat(Completions):
    name, path, prompt_field = "chat", "/v1/chat/completions", "messages"
    lacks = words("echo request_id")

    def prompt(self, stack: Stack, text: Any) -> Any:
        return [{"role": "user", "content": text}]

    def body(self, stack: Stack, fields: dict[str, Any]) -> dict[str, Any]:
        body = super().body(stack, fields)
        return body | ({"logprobs": True, "top_logprobs": body["logprobs"]} if "logprobs" in body else {})

    def formed(self, kind: str, described: Any) -> dict[str, Any]:
        if kind == "json_schema":
            return {"response_format": {"type": kind, "json_schema": {"name": "n", "schema": described}}}
        return {"response_format": {"type": kind}} if kind == "json_object" else super().formed(kind, described)

    def text(self, part: Any) -> str:
        return (part.get("message") or part["delta"]).get("content") or ""

    def logprobs(self, logprobs: Any) -> list[float]:
        return [item["logprob"] for item in logprobs.get("content") or ()]


class Responses(HttpDoor):
    name, path, prompt_field = "responses", "/v1/responses", "input"
    renamed: ClassVar[Mapping[str, str]] = {"max_tokens": "max_output_tokens"}
    lacks = words("n logprobs prompt_logprobs logprobs_mode skip_special_tokens include_stop echo request_id") | {
        "rejection_sample_method"
    }
    forms = words("json_schema json_object")
    shows = words("text usage warnings")

    def formed(self, kind: str, described: Any) -> dict[str, Any]:
        return {"text": {"format": {"type": kind} | ({"name": "n", "schema": described} if described != True else {})}}  # noqa: E712

    def whole(self, answer: Any) -> Message:
        parts = [part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"]]
        usage = answer["usage"]
        return Message(
            choices=[Shown(text="".join(parts), finish=answer["status"])],
            usage=(usage["input_tokens"], usage["output_tokens"]),
            warnings=answer.get("warnings", []),
        )

    def streamed(self, events: Sequence[Any]) -> Message:
        message = self.whole(events[-1]["response"])
        deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
        assert message.choices[0].text == "".join(deltas)
        return message


class Messages(HttpDoor):
    """Anthropic's."""

    name, path, prompt_field = "messages", "/v1/messages", "messages"
    renamed: ClassVar[Mapping[str, str]] = {"stop": "stop_sequences"}
    lacks, shows = Responses.lacks, Responses.shows
    forms = words("json_schema")

    def prompt(self, stack: Stack, text: Any) -> Any:
        return [{"role": "user", "content": text}]

    def body(self, stack: Stack, fields: dict[str, Any]) -> dict[str, Any]:
        stops = {"stop": [fields["stop"]]} if isinstance(fields.get("stop"), str) else {}
        return super().body(stack, {"max_tokens": 40, **fields, **stops})

    def formed(self, kind: str, described: Any) -> dict[str, Any]:
        return {"output_config": {"format": {"type": kind, "schema": described}}}

    def whole(self, answer: Any) -> Message:
        text = "".join(block["text"] for block in answer["content"] if block["type"] == "text")
        return self._message(text, answer["stop_reason"], answer["usage"], answer.get("warnings", []))

    def streamed(self, events: Sequence[Any]) -> Message:
        text = "".join(e["delta"].get("text", "") for e in events if e["type"] == "content_block_delta")
        last = next(event for event in events if event["type"] == "message_delta")
        warnings = events[0]["message"].get("warnings", [])
        return self._message(text, last["delta"]["stop_reason"], last["usage"], warnings)

    def _message(self, text: str, finish: str, usage: Any, warnings: list[str]) -> Message:
        num_prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
        shown = Shown(text=text, finish=finish)
        return Message(choices=[shown], usage=(num_prompt, usage["output_tokens"]), warnings=warnings)


class VllmTokens(Completions):
    """vLLM's token door, which rollouts have."""

    name, path, prompt_field = "vllm-http", "/inference/v1/generate", "token_ids"
    outside = words("priority cache_salt history_key store request_id model return_token_ids")
    lacks = words("session_id prediction echo")
    shows = words("token_ids logprobs spans usage")

    def prompt(self, stack: Stack, text: Any) -> Any:
        return stack.tokenizer.encode(text) if isinstance(text, str) else text

    def shown(self, parts: Sequence[Any]) -> Shown:
        shown = super().shown(parts)
        shown.text, shown.spans = None, spans_of(parts[-1])
        return shown

    def text(self, part: Any) -> str:
        return ""

    def logprobs(self, logprobs: Any) -> list[float]:
        return [entry["logprob"] for entry in logprobs.get("content", ())]


class Sglang(HttpDoor):
    """SGLang's native door, which rollouts have."""

    name, path, prompt_field = "sglang", "/generate", "input_ids"
    renamed: ClassVar[Mapping[str, str]] = {
        "max_tokens": "max_new_tokens",
        "min_tokens": "min_new_tokens",
        "seed": "sampling_seed",
        "include_stop": "no_stop_trim",
        "request_id": "rid",
    }
    outside = words(
        "priority session_id cache_salt history_key store rid model return_logprob top_logprobs_num logprob_start_len"
    )
    lacks = words("bad_words allowed_token_ids num_speculative_tokens target_inter_token_ms logprobs_mode") | words(
        "prediction rejection_sample_method echo"
    )
    forms = words("json_schema regex grammar")
    shows = words("text token_ids logprobs usage spans")

    def prompt(self, stack: Stack, text: Any) -> Any:
        return stack.tokenizer.encode(text) if isinstance(text, str) else text

    def formed(self, kind: str, described: Any) -> dict[str, Any]:
        return {"ebnf" if kind == "grammar" else kind: as_text(described)}

    def body(self, stack: Stack, fields: dict[str, Any]) -> dict[str, Any]:
        asked = {name: fields.pop(name) for name in ("logprobs", "prompt_logprobs") if name in fields}
        if asked:
            fields |= {"return_logprob": True, "top_logprobs_num": next(iter(asked.values()))}
        if "prompt_logprobs" in asked:
            fields["logprob_start_len"] = 0
        return super().body(stack, fields)

    def whole(self, answer: Any) -> Message:
        objects = answer if isinstance(answer, list) else [answer]
        metas = [found["meta_info"] for found in objects]
        usage = (metas[0]["prompt_tokens"], sum(meta["completion_tokens"] for meta in metas))
        return Message(choices=[self._shown(found) for found in objects], usage=usage)

    def _shown(self, found: Any) -> Shown:
        meta = found["meta_info"]
        return Shown(
            text=found["text"],
            token_ids=found["output_ids"],
            logprobs=[entry[0] for entry in meta.get("output_token_logprobs", ())],
            finish=meta["finish_reason"]["type"],
            spans=spans_of(meta),
        )

    def streamed(self, events: Sequence[Any]) -> Message:
        last = {event.get("index", 0): event for event in events}  # each has all so far
        return self.whole([last[index] for index in sorted(last)])


def spans_of(told: Any) -> list[tuple[str, int, int]]:
    return [(span["version"], span["start"], span["end"]) for span in told["weight_versions"]]


def as_text(described: Any) -> Any:
    """Return a form as text, where a door wants a schema so."""
    return json.dumps(described) if isinstance(described, dict) else described


# --- gRPC ---


class GrpcDoor(Door):
    """A gRPC service of the gateway."""

    async def send(self, stack: Stack, call: Call = Call(), /, **fields: Any) -> Message:
        interceptors = [ApiKeyInterceptor(call.keys)] if call.keys else []
        metadata = (("authorization", f"Bearer {call.key}"),) if call.key else ()
        async with stack.rpc(interceptors=interceptors) as rpc:
            try:
                return await self.ask(stack, rpc.channel, call, metadata, {"prompt": "the", **fields})
            except grpc.aio.AioRpcError as error:
                raise_refused(error)

    async def ask(
        self, stack: Stack, channel: grpc.aio.Channel, call: Call, metadata: Any, fields: dict[str, Any]
    ) -> Message:
        raise NotImplementedError


def raise_refused(error: grpc.aio.AioRpcError) -> NoReturn:
    """Raise a gRPC error in HTTP's words."""
    trailing = dict(error.trailing_metadata() or ())
    field_ = None
    if "grpc-status-details-bin" in trailing:
        status = status_pb2.Status.FromString(trailing["grpc-status-details-bin"])
        assert (status.code, status.message) == (error.code().value[0], error.details())
        bad_request = error_details_pb2.BadRequest()
        if status.details and status.details[0].Unpack(bad_request):
            field_ = bad_request.field_violations[0].field
    raise Refused(STATUSES[error.code()], field_, error.details() or "", trailing.get("retry-after")) from error


class Grpc(GrpcDoor):
    name = "grpc"
    lacks = words("allowed_token_ids echo model")
    shows = words("text token_ids logprobs usage warnings spans")
    outside = words("priority session_id cache_salt target_inter_token_ms history_key store prediction request_id")
    renamed: ClassVar[Mapping[str, str]] = {"include_stop": "include_stop_str_in_output"}

    def request(self, stack: Stack, fields: dict[str, Any]) -> pb.GenerateRequest:
        prompt, form = fields.pop("prompt"), fields.pop("form", None)
        given = {"text": prompt} if isinstance(prompt, str) else {"token_ids": pb.TokenIds(ids=prompt)}
        given |= {name: fields.pop(name) for name in self.outside & fields.keys()}
        if form is not None:
            fields[form[0]] = pb.TextChoices(choices=form[1]) if form[0] == "choice" else as_text(form[1])
        return pb.GenerateRequest(**given, sampling=pb.SamplingParams(**written(fields, self.renamed)))

    async def ask(
        self, stack: Stack, channel: grpc.aio.Channel, call: Call, metadata: Any, fields: dict[str, Any]
    ) -> Message:
        stub, request = generation_pb2_grpc.InferenceStub(channel), self.request(stack, fields)
        if call.stream:
            stream = stub.Generate(request, metadata=metadata, timeout=call.deadline_s)
            return self._streamed([chunk async for chunk in stream])
        answer = await stub.GenerateUnary(request, metadata=metadata, timeout=call.deadline_s)
        usage = (answer.usage.prompt_tokens, answer.usage.completion_tokens)
        choices = [self._shown([choice]) for choice in answer.choices]
        return Message(choices=choices, usage=usage, warnings=list(answer.warnings))

    def _streamed(self, chunks: Sequence[Any]) -> Message:
        indices = sorted({chunk.index for chunk in chunks})
        parts = [[chunk for chunk in chunks if chunk.index == index] for index in indices]
        num_output = sum(part[-1].usage.completion_tokens for part in parts)
        assert not any(chunk.warnings for chunk in chunks[1:])
        return Message(
            choices=[self._shown(part) for part in parts],
            usage=(parts[0][-1].usage.prompt_tokens, num_output),
            warnings=list(chunks[0].warnings),
        )

    def _shown(self, parts: Sequence[Any]) -> Shown:
        starts = itertools.accumulate((len(part.token_ids) for part in parts), initial=0)
        spans = [
            (span.version, start + span.start, start + span.end)
            for part, start in zip(parts, starts, strict=False)
            for span in part.weight_versions
        ]
        return Shown(
            text="".join(part.text for part in parts),
            token_ids=[id_ for part in parts for id_ in part.token_ids],
            logprobs=[entry.logprob for part in parts for entry in part.logprobs],
            finish=pb.FinishReason.Name(parts[-1].finish_reason).removeprefix("FINISH_REASON_").lower(),
            spans=joined_spans(spans),
        )


class VllmGrpc(GrpcDoor):
    """vLLM's engine service: tokens, no text; our own fields are metadata."""

    name = "vllm-grpc"
    lacks = words("bad_words allowed_token_ids prediction echo skip_special_tokens rejection_sample_method model")
    shows = words("token_ids logprobs usage")
    switches: ClassVar[frozenset[str]] = words(
        "num_speculative_tokens target_inter_token_ms session_id history_key store priority cache_salt logprobs_mode"
    )

    def request(self, stack: Stack, fields: dict[str, Any]) -> vllm.GenerateRequest:
        prompt, form = fields.pop("prompt"), fields.pop("form", None)
        ids = stack.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        request_id = fields.pop("request_id", "")
        if form is not None:
            fields[form[0]] = vllm.ChoiceConstraint(choices=form[1]) if form[0] == "choice" else as_text(form[1])
        sampling = vllm.SamplingParams(**written(fields, Grpc.renamed))
        tokenized = vllm.TokenizedInput(original_text="ignored", input_ids=ids)
        return vllm.GenerateRequest(request_id=request_id, tokenized=tokenized, sampling_params=sampling)

    async def ask(
        self, stack: Stack, channel: grpc.aio.Channel, call: Call, metadata: Any, fields: dict[str, Any]
    ) -> Message:
        switched = {name: fields.pop(name) for name in self.switches & fields.keys()}
        own = tuple((f"x-outrider-{name.replace('_', '-')}", str(value)) for name, value in switched.items())
        request = self.request(stack, fields)
        request.stream = call.stream
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        answers = stub.Generate(request, metadata=(*metadata, *own), timeout=call.deadline_s)
        return self._message([answer async for answer in answers])

    def _message(self, answers: Sequence[Any]) -> Message:
        completes = {answer.complete.index: answer.complete for answer in answers if answer.HasField("complete")}
        choices = []
        for index, complete in sorted(completes.items()):
            chunks = [answer.chunk for answer in answers if answer.HasField("chunk") and answer.chunk.index == index]
            if chunks:
                assert [id_ for chunk in chunks for id_ in chunk.token_ids] == list(complete.output_ids)
            logprobs = [
                value for part in (*chunks, complete) for value in part.output_logprobs.token_logprobs
            ]  # in a stream, chunks alone have them
            choices.append(Shown(token_ids=list(complete.output_ids), logprobs=logprobs, finish=complete.finish_reason))
        num_output = sum(complete.completion_tokens for complete in completes.values())
        return Message(choices=choices, usage=(completes[0].prompt_tokens, num_output))


def written(fields: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    """Return fields as a message's constructor takes them."""
    listed = {"stop"} & {name for name, value in fields.items() if isinstance(value, str)}
    return {renamed.get(name, name): [value] if name in listed else value for name, value in fields.items()}


def joined_spans(spans: Sequence[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Return spans with those of one version that touch as one."""
    found: list[tuple[str, int, int]] = []
    for version, start, end in spans:
        if found and found[-1][0] == version and found[-1][2] == start:
            found[-1] = (version, found[-1][1], end)
        else:
            found.append((version, start, end))
    return found


# --- without a server ---


class Offline(Door):
    """`LLM`'s way from parameters to outputs, with the backend in place of its engine."""

    name = "LLM"
    lacks = words(
        "priority target_inter_token_ms session_id cache_salt history_key store prediction echo request_id model"
    )
    shows = words("text token_ids logprobs usage warnings")
    renamed: ClassVar[Mapping[str, str]] = {"include_stop": "include_stop_str_in_output"}
    has_keys = False

    async def send(self, stack: Stack, call: Call = Call(), /, **fields: Any) -> Message:
        prompt, form = fields.pop("prompt", "the"), fields.pop("form", None)
        if form is not None:
            fields["structured_outputs"] = {FORMS[form[0]]: form[1]}
        given = {self.renamed.get(name, name): value for name, value in fields.items()}
        model = stack.gateway.model
        try:
            (run,) = PromptRuns(
                ServiceConfig(generation_config="vllm"),
                SpeculationPlan(draft_length=3),
                TextCodec(stack.tokenizer),
                max_model_len=model.max_model_len,
                eos_token_ids=frozenset(model.eos_token_ids),
            ).runs(
                named_prompts(prompt if isinstance(prompt, str) else {"prompt_token_ids": list(prompt)}),
                SamplingParams(**given),
            )
        except ValueError as error:
            raise Refused(400, re.match(r"\w*", str(error))[0], str(error)) from error
        texts = await self._run(stack, run)
        output = run.output()
        if output.error is not None:
            raise Refused(500, None, output.error)
        return Message(
            choices=[
                Shown(
                    text=texts[shown.index] if call.stream else shown.text,
                    token_ids=shown.token_ids,
                    logprobs=[next(iter(entry.values())).logprob for entry in shown.logprobs or ()],
                    finish=shown.finish_reason,
                )
                for shown in output.outputs
            ],
            usage=(len(output.prompt_token_ids), sum(len(shown.token_ids) for shown in output.outputs)),
            warnings=output.warnings,
        )

    async def _run(self, stack: Stack, run: PromptRun) -> dict[int, str]:
        """Run all outputs to their ends; return the texts that came piece by piece."""
        texts: dict[int, str] = {}

        async def play(request: Any) -> None:
            ended = asyncio.get_running_loop().create_future()

            def hear(output: RequestOutput) -> None:
                if ended.done():
                    return
                piece = run.absorb(output)
                texts[piece.index] = texts.get(piece.index, "") + piece.text
                if piece.finish_reason is not None:
                    ended.set_result(None)

            try:
                await stack.backend.generate(request, hear)
            except OutriderError as error:
                failed = RequestOutput(
                    request_id=request.request_id, finish_reason=FinishReason.ERROR, error=str(error)
                )
                hear(failed)

        await asyncio.gather(*(play(request) for request in run.requests))
        return texts


DOORS: tuple[Door, ...] = (
    Completions(),
    Chat(),
    Responses(),
    Messages(),
    Grpc(),
    VllmGrpc(),
    Sglang(),
    VllmTokens(),
    Offline(),
)
HTTP_DOORS = tuple(door for door in DOORS if isinstance(door, HttpDoor))
SERVED_DOORS = tuple(door for door in DOORS if door.has_keys)
