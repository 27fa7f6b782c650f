"""The gRPC interface `vllm.grpc.engine.VllmEngine`, for gateways that are made for vLLM's engine.

Its messages are of the package smg-grpc-proto (extra `vllm-grpc`), and carry tokens, not text. Our own fields of a
request are in the call's metadata, see `client_fields`.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import logging
import time
import zipfile
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn, TypeAlias, get_args, get_type_hints

import grpc
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from outrider import __version__
from outrider.cluster.api.grpc_errors import abort
from outrider.cluster.common.errors import InvalidRequest, OutriderError
from outrider.cluster.gateway.choice import GatewayChunk, joined
from outrider.cluster.gateway.client_fields import METADATA, METADATA_PREFIX, VLLM, ClientFields, metadata_key, named_at
from outrider.cluster.gateway.gateway import Gateway
from outrider.cluster.gateway.request_parser import RequestInput, ValidRequest
from outrider.cluster.gateway.structured_format import message_structure
from outrider.cluster.peers.every_gateway import EveryGateway
from outrider.verifier_service.messages.request import FinishReason, StructuredKind, TokenLogprobs

logger = logging.getLogger(__name__)

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name
_SWITCHES = {metadata_key(name): name for name in named_at(METADATA)}
TOKENIZER_CHUNK_BYTES = 64 << 10  # as vLLM's own server

# as in RequestInput; where proto3's zero is "not given", its default means the same as vLLM's zero
SAMPLING_FIELDS = frozenset((*named_at(VLLM), "logprobs")) - {
    "stop",
    "stop_token_ids",
    "logit_bias",
    "skip_special_tokens",
}
UNSUPPORTED_SAMPLING_FIELDS = frozenset({"structural_tag", "grammar_from_first_token", "truncate_prompt_tokens"})
STRUCTURED_FIELDS = frozenset(StructuredKind)  # named as in the message
UNSUPPORTED_FIELDS = frozenset(
    {"kv_transfer_params", "kv_transfer_params_json", "mm_inputs", "extra_mm_inputs", "media_refs"}
)

Context: TypeAlias = grpc.aio.ServicerContext


def add_to_server(every: EveryGateway, server: grpc.aio.Server) -> None:
    """Serve the gateway as vLLM's engine too."""
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(VllmEngineServicer(every, time.time), server)


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """The service's calls. A cancelled or expired call stops its generation."""

    def __init__(self, every: EveryGateway, wall_clock: Callable[[], float]) -> None:  # Unix time, seconds
        self._gateway, self._every = every.own, every
        self._wall_clock = wall_clock
        self._started_s = wall_clock()
        self._last_request_s = 0.0

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        """Yield chunks and a `complete` per choice; without `stream`, only the latter, ordered by index."""
        self._last_request_s = self._wall_clock()
        try:
            valid = await self._gateway.parse(request_input(request, context.invocation_metadata()))
            for warning in valid.warnings:  # vLLM's messages have no field for it
                logger.warning("request %s: %s", valid.request_id, warning)
            answer = _streamed if request.stream else _collected
            async with aclosing(answer(self._gateway, valid)) as responses:  # type: ignore[type-var]
                async for response in responses:
                    yield response
        except OutriderError as error:
            await abort(context, error)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        await self._every.abort(request.request_ids)
        return pb.AbortResponse()

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        if self._gateway.is_draining:
            return pb.HealthCheckResponse(healthy=False, message="this server is shutting down")
        healthy = any(verifier["state"] == "ready" for verifier in self._gateway.load().get("verifiers", ()))
        return pb.HealthCheckResponse(healthy=healthy, message="serving" if healthy else "no verifier is ready")

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        model = self._gateway.model
        return pb.GetModelInfoResponse(
            model_path=model.name,
            served_model_name=model.name,
            tokenizer_path=model.name,
            is_generation=True,
            max_context_length=model.max_model_len,
            max_req_input_len=model.max_model_len - 1,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
        )

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(
            active_requests=self._gateway.num_running,
            is_paused=self._gateway.is_draining,
            last_receive_timestamp=self._last_request_s,
            uptime_seconds=self._wall_clock() - self._started_s,
            server_type="vllm-grpc",
            data_parallel_size=1,
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        loads = [] if request.dp_rank else [scheduler_load(self._gateway.load())]
        return pb.GetLoadsResponse(
            timestamp=datetime.fromtimestamp(self._wall_clock(), UTC).isoformat(),
            version=__version__,
            dp_rank_count=len(loads),
            loads=loads,
        )

    async def GetTokenizer(
        self, request: common.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common.GetTokenizerChunk]:
        with TemporaryDirectory() as folder:
            await self._gateway.text.save(Path(folder))
            archive = await asyncio.to_thread(zip_of, Path(folder))
        for chunk in tokenizer_chunks(archive):
            yield chunk

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> NoReturn:
        await _unimplemented(context, "this server generates text; it has no embeddings")

    async def FlushCache(self, request: common.FlushCacheRequest, context: Context) -> NoReturn:
        await _unimplemented(
            context, f"the prefix cache cannot be flushed; keep prompts apart by {metadata_key('cache_salt')}"
        )

    async def StartProfile(self, request: common.StartProfileRequest, context: Context) -> NoReturn:
        await _unimplemented(context, "this server has no profiler")

    async def StopProfile(self, request: common.StopProfileRequest, context: Context) -> NoReturn:
        await _unimplemented(context, "this server has no profiler")

    async def SubscribeKvEvents(self, request: common.SubscribeKvEventsRequest, context: Context) -> NoReturn:
        await _unimplemented(context, "KV cache events are not published; GetLoads has the load")


async def _unimplemented(context: Context, text: str) -> NoReturn:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, text)
    raise AssertionError("context.abort returned")


def request_input(request: pb.GenerateRequest, metadata: Iterable[tuple[str, str | bytes]] = ()) -> RequestInput:
    """Read a message and its call's metadata; raises `InvalidRequest` naming a field that is not served."""
    sampling = _given(request.sampling_params, UNSUPPORTED_SAMPLING_FIELDS)
    given = _given(request, UNSUPPORTED_FIELDS)
    if given.get("data_parallel_rank"):
        raise InvalidRequest("data_parallel_rank must be 0: this server is one rank", "data_parallel_rank")
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidRequest("input must be given as tokenized or text", "input")
    form = request.sampling_params.WhichOneof("constraint")
    return RequestInput(
        request_id=request.request_id or None,
        prompt=request.text if kind == "text" else list(request.tokenized.input_ids),
        prompt_field="text" if kind == "text" else "input_ids",
        default_max_tokens=None,
        stop=list(request.sampling_params.stop),
        stop_token_ids=list(request.sampling_params.stop_token_ids),
        logit_bias=dict(request.sampling_params.logit_bias),
        skip_special_tokens=request.sampling_params.skip_special_tokens,  # stop strings depend on it
        **{name: sampling[name] for name in SAMPLING_FIELDS if name in sampling},
        **message_structure(request.sampling_params, form if form in STRUCTURED_FIELDS else None),
        **_switches(metadata),
    )


def _given(message: pb.GenerateRequest | pb.SamplingParams, unsupported: frozenset[str]) -> dict[str, Any]:
    """Return the set fields, by name; a field of value zero without presence is not among them."""
    given = {field.name: value for field, value in message.ListFields()}
    for name in given:
        if name in unsupported:
            raise InvalidRequest(f"{name} is not supported by this server", name)
    return given


def _switches(metadata: Iterable[tuple[str, str | bytes]]) -> dict[str, Any]:
    """Read our own metadata into fields of `RequestInput`; an unknown name is refused."""
    switches = {}
    for key, value in metadata:
        if not key.startswith(METADATA_PREFIX):
            continue
        name = _SWITCHES.get(key.replace("_", "-"))
        if name is None or isinstance(value, bytes):
            raise InvalidRequest(f"{key} is not known; there are {', '.join(_SWITCHES)}", key)
        read, expectation = next(reader for kind, reader in _READERS.items() if kind in get_args(_KINDS[name]))
        try:
            switches[name] = read(value)
        except (ValueError, KeyError) as error:
            raise InvalidRequest(f"{key} must be {expectation}", key) from error
    return switches


def _boolean(text: str) -> bool:
    return {"true": True, "1": True, "false": False, "0": False}[text.lower()]


_KINDS = get_type_hints(ClientFields)
_READERS: Mapping[type, tuple[Callable[[str], Any], str]] = {
    bool: (_boolean, "true or false"),
    int: (int, "an integer"),
    float: (float, "a number"),
    str: (str, "text"),
}


async def _streamed(gateway: Gateway, request: ValidRequest) -> AsyncIterator[pb.GenerateResponse]:
    parts: dict[int, list[GatewayChunk]] = {}
    async with aclosing(gateway.generate(request)) as chunks:  # type: ignore[type-var]
        async for chunk in chunks:
            parts.setdefault(chunk.index, []).append(chunk)
            if chunk.token_ids or chunk.prompt_logprobs is not None:
                yield pb.GenerateResponse(chunk=_chunk_message(chunk, request))
            if chunk.finish_reason is not None:
                yield pb.GenerateResponse(complete=_complete_message(joined(parts.pop(chunk.index)), request))


async def _collected(gateway: Gateway, request: ValidRequest) -> AsyncIterator[pb.GenerateResponse]:
    for whole in await gateway.whole(request):
        message = _complete_message(whole, request)
        _fill_logprobs(message, whole, request)
        yield pb.GenerateResponse(complete=message)


def _chunk_message(chunk: GatewayChunk, request: ValidRequest) -> pb.GenerateStreamChunk:
    """Return a choice's new tokens; `completion_tokens` counts these alone, as in vLLM's own server."""
    message = pb.GenerateStreamChunk(
        index=chunk.index,
        token_ids=chunk.token_ids,
        prompt_tokens=len(request.prompt_token_ids),
        completion_tokens=len(chunk.token_ids),
        cached_tokens=0 if chunk.usage is None else chunk.usage.num_cached_tokens,
    )
    _fill_logprobs(message, chunk, request)
    return message


def _complete_message(whole: GatewayChunk, request: ValidRequest) -> pb.GenerateComplete:
    """Return a finished choice with all its tokens, but without streamed log probabilities."""
    assert whole.finish_reason is not None
    assert whole.usage is not None
    speculation = whole.speculation
    message = pb.GenerateComplete(
        index=whole.index,
        output_ids=whole.token_ids,
        finish_reason=whole.finish_reason.value,
        prompt_tokens=whole.usage.num_prompt_tokens,
        completion_tokens=whole.usage.num_completion_tokens,
        cached_tokens=whole.usage.num_cached_tokens,
        spec_draft_tokens=0 if speculation is None else speculation.num_draft_tokens,
        spec_accepted_tokens=0 if speculation is None else speculation.num_accepted_tokens,
    )
    last_ids = whole.token_ids[-1:]
    if whole.stop_string is not None:
        message.matched_stop_str = whole.stop_string
    elif whole.finish_reason is FinishReason.STOP and set(last_ids) & set(request.sampling.stop_token_ids):
        message.matched_token_id = last_ids[0]
    return message


def _fill_logprobs(
    message: pb.GenerateStreamChunk | pb.GenerateComplete, chunk: GatewayChunk, request: ValidRequest
) -> None:
    entries = chunk.logprobs
    if entries:
        output = message.output_logprobs
        output.token_ids.extend(entry.token_id for entry in entries)
        output.token_logprobs.extend(entry.logprob for entry in entries)
        if request.sampling.logprobs:
            output.top_logprobs.extend(_top(entry) for entry in entries)
    if chunk.prompt_logprobs is not None:
        prompt = message.input_logprobs
        prompt.token_ids.extend(request.prompt_token_ids)
        for entry in chunk.prompt_logprobs:
            prompt.token_logprobs.add(value=None if entry is None else entry.logprob)
            if request.num_prompt_logprobs:
                prompt.top_logprobs.append(pb.TopLogProbs() if entry is None else _top(entry))


def _top(entry: TokenLogprobs) -> pb.TopLogProbs:
    return pb.TopLogProbs(token_ids=entry.top_token_ids, values=entry.top_logprobs)


def scheduler_load(load: Mapping[str, Any]) -> pb.SchedulerLoad:
    """Show the fleet as one scheduler: sums of `fleet_load`, and the mean KV usage of its verifiers."""
    totals, verifiers = load.get("totals", {}), load.get("verifiers", ())
    num_running, num_waiting = totals.get("num_running", 0), totals.get("num_waiting", 0)
    return pb.SchedulerLoad(
        num_running_reqs=num_running,
        num_waiting_reqs=num_waiting,
        num_total_reqs=num_running + num_waiting,
        token_usage=sum(verifier["kv_usage"] for verifier in verifiers) / max(1, len(verifiers)),
        gen_throughput=totals.get("tokens_per_s", 0.0),
    )


def zip_of(folder: Path) -> bytes:
    """Return a folder's files as a ZIP archive; its bytes do not depend on the files' times."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for path in sorted(folder.iterdir()):
            file.writestr(zipfile.ZipInfo(path.name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return archive.getvalue()


def tokenizer_chunks(archive: bytes) -> Iterator[common.GetTokenizerChunk]:
    """Split an archive into messages; the last one has its fingerprint."""
    for start in range(0, len(archive), TOKENIZER_CHUNK_BYTES):
        data = archive[start : start + TOKENIZER_CHUNK_BYTES]
        is_last = start + len(data) == len(archive)
        yield common.GetTokenizerChunk(data=data, sha256=hashlib.sha256(archive).hexdigest() if is_last else "")
