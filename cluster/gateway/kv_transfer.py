"""vLLM's `kv_transfer_params`: a proxy sends a prompt to one service, and the whole request to another.

    prompt    {"do_remote_decode": true}, max_tokens 1 ──▶ an answer with the params of the second request
    request   {"do_remote_prefill": true, "remote_host", "remote_port", "remote_request_id", …}

The names are those of vLLM's NIXL connector, so that its proxies need not know whom they talk to. The second service
draws all tokens itself, the first one, too.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.cluster.common.errors import InvalidRequest
from outrider.verifier_service.messages.handover import KVSource
from outrider.verifier_service.messages.request import FinishReason, GenerationRequest, RequestOutput

FIELD = "kv_transfer_params"
MAX_TEXT_CHARS = 512  # of a host or a request's name


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransfer:
    """What a request says about its prompt's KV."""

    hands_over: bool = False  # it stays for another request to take
    source: KVSource | None = None  # where it is


NO_TRANSFER = KVTransfer()


def read_kv_transfer(params: Mapping[str, Any] | None, *, stream: bool) -> KVTransfer | None:
    """Read a body's params; None: they ask for nothing. Raises `InvalidRequest` naming the bad one.

    Further keys are the proxies' own, or those of other connectors.
    """
    if params is None:
        return None
    switches = {name: params.get(name) for name in ("do_remote_decode", "do_remote_prefill")}
    for name, value in switches.items():
        _require(value is None or isinstance(value, bool), name, "true, false or null")
    _require(not all(switches.values()), "do_remote_decode", "false where do_remote_prefill is true")
    if switches["do_remote_decode"]:
        if stream:
            raise InvalidRequest(f"stream must be false with do_remote_decode in {FIELD}", "stream")
        return KVTransfer(hands_over=True)
    if not switches["do_remote_prefill"]:
        return None
    for name in ("remote_host", "remote_request_id"):
        is_text = isinstance(params.get(name), str) and 1 <= len(params[name]) <= MAX_TEXT_CHARS
        _require(is_text, name, f"a text of 1 to {MAX_TEXT_CHARS} characters")
    port = params.get("remote_port")
    is_port = isinstance(port, int) and not isinstance(port, bool) and 1 <= port < 1 << 16
    _require(is_port, "remote_port", f"a whole number in [1, {(1 << 16) - 1}]")
    endpoint = f"{params['remote_host']}:{port}"
    return KVTransfer(source=KVSource(endpoint=endpoint, request_id=params["remote_request_id"], draws_anew=True))


def _require(condition: bool, name: str, expectation: str) -> None:
    if not condition:
        raise InvalidRequest(f"{FIELD}: {name} must be {expectation}", FIELD)


@dataclass(slots=True, kw_only=True)
class KeptOutput(RequestOutput):
    """A prompt's one token: the prompt's KV is kept for a while, for another request to take."""

    kept: KVSource
    kept_by: str  # the verifier's id

    @classmethod
    def of(cls, output: RequestOutput, kept: KVSource, kept_by: str) -> KeptOutput:
        values = {known.name: getattr(output, known.name) for known in dataclasses.fields(RequestOutput)}
        return cls(**{**values, "finish_reason": FinishReason.LENGTH, "is_held": False}, kept=kept, kept_by=kept_by)

    @property
    def params(self) -> dict[str, Any]:
        """The params of the request that may take it."""
        host, _, port = self.kept.endpoint.rpartition(":")
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.kept_by,
            "remote_block_ids": [],  # the verifier finds the KV by the request's name
            "remote_host": host,
            "remote_port": int(port),
            "remote_request_id": self.kept.request_id,
        }


def prompt_digest(request: GenerationRequest) -> str:
    """Return a digest of all that the KV of a prompt depends on, beside the weights, and of who may share it."""
    text = f"{request.adapter}/{request.cache_salt}/{request.prompt_token_ids}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def offering(message: GenerationRequest) -> GenerationRequest:
    """Return the message of a request whose KV another request takes, perhaps a stranger's.

    Its name ends with the prompt's digest: who names it with another prompt names nothing. Its one token must not end
    it, or nothing would be kept.
    """
    sampling = dataclasses.replace(message.sampling, max_tokens=message.sampling.max_tokens + 1)
    name = f"{message.request_id}.{prompt_digest(message)}"
    return dataclasses.replace(message, request_id=name, hands_over=True, sampling=sampling)
