"""The OpenAI wire format: request bodies in, response objects out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from outrider.cluster.errors import InvalidRequest, OutriderError, mapping_of
from outrider.cluster.gateway import GatewayChunk, RequestInput, Usage
from outrider.verifier_service.request import SpeculationMetrics

MAX_PROMPTS = 256  # of one completions body

# Accepted and without effect on the tokens.
IGNORED_FIELDS = frozenset(
    (
        "user",
        "store",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
        "prediction",
        "priority",
        "session_id",
        "cache_salt",
    )
)
# Would change the result and are not served yet: only these values, which change nothing, are accepted.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "logprobs": (False,),
    "top_logprobs": (),
    "prompt_logprobs": (),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "best_of": (1,),
    "suffix": ("",),
    "echo": (False,),
    "min_tokens": (0,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}

BodyT = TypeVar("BodyT", bound="_Body")


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool = False


class _Body(BaseModel):
    """What completions and chat completions share. Unknown fields are kept, to be refused by name."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    disable_spec_decode: bool | None = Field(
        default=None, validation_alias=AliasChoices("disable_spec_decode", "disable_speculative_decoding")
    )
    num_speculative_tokens: int | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_fields(self) -> dict[str, Any]:
        """Return the fields that `RequestInput` has under the same name."""
        names = (
            "n temperature top_p top_k min_p seed stop stop_token_ids ignore_eos max_tokens disable_spec_decode "
            "num_speculative_tokens"
        )
        return {name: getattr(self, name) for name in names.split()}


class CompletionBody(_Body):
    prompt: str | list[str] | list[int] | list[list[int]]

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts one by one, whichever of the four forms they came in."""
        prompt = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [prompt]
        if not 1 <= len(prompt) <= MAX_PROMPTS:
            raise InvalidRequest(f"prompt must be 1 to {MAX_PROMPTS} prompts and not empty", "prompt")
        return list(prompt)  # type: ignore[arg-type]

    def inputs(self, request_id: str) -> list[RequestInput]:
        prompts = self.prompts()
        ids = [request_id] if len(prompts) == 1 else [f"{request_id}-{index}" for index in range(len(prompts))]
        fields = self.sampling_fields()
        return [RequestInput(request_id=id_, prompt=prompt, **fields) for id_, prompt in zip(ids, prompts, strict=True)]


class ContentPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: str
    text: str | None = None


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: str | list[ContentPart] | None = None

    def as_template_input(self) -> dict[str, Any]:
        """Return the message as chat templates expect it, its text parts joined."""
        if isinstance(self.content, list):
            for part in self.content:
                if part.type != "text" or part.text is None:
                    raise InvalidRequest(f"messages: content of type {part.type!r} is not supported", "messages")
            return {"role": self.role, "content": "".join(part.text or "" for part in self.content)}
        return {"role": self.role, "content": self.content or ""}


class ChatBody(_Body):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None

    def input(self, request_id: str, tokenizer: Any) -> RequestInput:
        """Write the messages through the tokenizer's chat template."""
        fields = self.sampling_fields()
        if self.max_completion_tokens is not None:
            fields |= {"max_tokens": self.max_completion_tokens, "max_tokens_field": "max_completion_tokens"}
        return RequestInput(
            request_id=request_id,
            prompt=self._templated(tokenizer),
            prompt_field="messages",
            add_special_tokens=False,
            default_max_tokens=None,
            **fields,
        )

    def _templated(self, tokenizer: Any) -> str:
        if not getattr(tokenizer, "chat_template", None):
            raise InvalidRequest(
                "messages: this model's tokenizer has no chat template; use /v1/completions", "messages"
            )
        messages = [message.as_template_input() for message in self.messages]
        try:
            return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # whatever a model's template raises, these messages do not fit it
            raise InvalidRequest(f"messages do not fit the model's chat template: {error}", "messages") from error


def parse_body(body: object, kind: type[BodyT]) -> BodyT:
    """Check a JSON body's types and refuse what would silently be left undone; raise `InvalidRequest`."""
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    try:
        parsed = kind.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0]) if first["loc"] else None
        raise InvalidRequest(f"{field}: {first['msg']}", field) from error
    for name, value in (parsed.model_extra or {}).items():
        _check_extra(name, value, kind)
    return parsed


def _check_extra(name: str, value: object, kind: type[_Body]) -> None:
    if value is None or name in IGNORED_FIELDS:
        return
    if name not in NEUTRAL_VALUES:
        known = [*kind.model_fields, *NEUTRAL_VALUES]
        close = difflib.get_close_matches(name, known, n=1)
        raise InvalidRequest(f"unknown field {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""), name)
    # `0 == False`, but logprobs=0 asks for something and presence_penalty=0.0 does not
    neutral = any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in NEUTRAL_VALUES[name])
    if not neutral:
        raise InvalidRequest(f"{name} is not supported yet", name)


def error_object(error: OutriderError) -> dict[str, Any]:
    """Render an error as OpenAI does."""
    mapping = mapping_of(error)
    param = error.field if isinstance(error, InvalidRequest) else None
    return {"error": {"message": str(error), "type": mapping.openai_type, "param": param, "code": mapping.openai_code}}


def usage_object(usages: Iterable[Usage], prompts: Iterable[Usage]) -> dict[str, Any]:
    """Sum the choices' completion tokens, and count each prompt once: `prompts` has one usage per prompt."""
    prompts = list(prompts)
    num_prompt_tokens = sum(usage.num_prompt_tokens for usage in prompts)
    num_completion_tokens = sum(usage.num_completion_tokens for usage in usages)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(usage.num_cached_tokens for usage in prompts)},
    }


def metrics_object(speculations: Sequence[SpeculationMetrics | None]) -> dict[str, Any]:
    """Render the speculation of one or several choices; null where the engine reported none."""
    known = [speculation for speculation in speculations if speculation is not None]
    return {"speculative_decoding": _speculation_object(_total(known)) if known else None}


def _total(speculations: Sequence[SpeculationMetrics]) -> SpeculationMetrics:
    positions = max(len(speculation.num_accepted_per_position) for speculation in speculations)
    per_position = [
        sum(s.num_accepted_per_position[i] for s in speculations if i < len(s.num_accepted_per_position))
        for i in range(positions)
    ]
    return SpeculationMetrics(
        enabled=any(s.enabled for s in speculations),
        disabled_reason=next((s.disabled_reason for s in speculations if s.disabled_reason is not None), None),
        num_drafts=sum(s.num_drafts for s in speculations),
        num_draft_tokens=sum(s.num_draft_tokens for s in speculations),
        num_accepted_tokens=sum(s.num_accepted_tokens for s in speculations),
        num_cut_tokens=sum(s.num_cut_tokens for s in speculations),
        num_empty_rounds=sum(s.num_empty_rounds for s in speculations),
        num_accepted_per_position=per_position,
    )


def _speculation_object(speculation: SpeculationMetrics) -> dict[str, Any]:
    return {
        "enabled": speculation.enabled,
        "disabled_reason": speculation.disabled_reason,
        "mean_acceptance_length": speculation.mean_acceptance_length,
        "draft_acceptance_rate": speculation.draft_acceptance_rate,
        "num_drafts": speculation.num_drafts,
        "num_draft_tokens": speculation.num_draft_tokens,
        "num_accepted_tokens": speculation.num_accepted_tokens,
        "num_cut_tokens": speculation.num_cut_tokens,
        "num_empty_rounds": speculation.num_empty_rounds,
        "num_accepted_per_position": list(speculation.num_accepted_per_position),
    }


class CompletionFormat:
    """How /v1/completions shapes its objects."""

    id_prefix = "cmpl-"
    object_name = chunk_object_name = "text_completion"

    def choice(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}

    def chunk_choice(self, chunk: GatewayChunk, index: int, *, is_first: bool) -> dict[str, Any]:
        return self.choice(index, chunk.text, chunk.finish_reason.value if chunk.finish_reason else None)


class ChatFormat:
    """How /v1/chat/completions shapes its objects: the first chunk of a choice carries the role."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def choice(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": finish_reason}

    def chunk_choice(self, chunk: GatewayChunk, index: int, *, is_first: bool) -> dict[str, Any]:
        delta: Mapping[str, str] = {"content": chunk.text} if chunk.text or is_first else {}
        if is_first:
            delta = {"role": "assistant", **delta}
        reason = chunk.finish_reason.value if chunk.finish_reason else None
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


Format = CompletionFormat | ChatFormat
