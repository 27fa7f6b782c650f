"""The OpenAI wire format, request side: JSON bodies become `RequestInput`s. format.py has the answer side."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from outrider.cluster.api.openai.chat_messages import Messages
from outrider.cluster.common.errors import InvalidRequest
from outrider.cluster.common.hints import did_you_mean, misspelt
from outrider.cluster.gateway.client_fields import CLIENT_FIELDS, Texts, TokenIds, kind_of
from outrider.cluster.gateway.kv_transfer import read_kv_transfer
from outrider.cluster.gateway.request_parser import RequestInput
from outrider.cluster.gateway.structured_format import OPENAI_FIELDS, openai_structure
from outrider.cluster.replies.tools import Tool, ToolUse, read_tool_use

MAX_PROMPTS = 256  # of one completions body
MAX_TOTAL_CHOICES = 1024  # of all prompts of one completions body
MAX_TOKENIZED_CHARS = 1 << 20  # of /tokenize; of a chat, once its template has rendered it
MAX_DETOKENIZED_TOKENS = 1 << 20
RESERVED_KWARGS = frozenset(  # arguments of apply_chat_template
    (
        "tools",
        "messages",
        "conversation",
        "chat_template",
        "tokenize",
        "tokenizer",
        "return_dict",
        "return_tensors",
        "add_generation_prompt",
        "continue_final_message",
    )
)

# Accepted, without effect on the tokens.
IGNORED_FIELDS = frozenset(
    (
        "user",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "verbosity",
        "client_metadata",
        "spaces_between_special_tokens",  # vLLM's: no decoder here adds spaces
        "vllm_xargs",  # vLLM's: for plug-ins of its engine
    )
)
# Not served: only values that change nothing are accepted.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "echo": (False,),
    "typical_p": (1,),
    "max_new_tokens": (),  # the name that other servers have for max_tokens
    "logits_processors": ([],),
    "documents": ([],),
    "regex": (),  # SGLang's, as the next
    "ebnf": (),
    "structural_tag": (),
    "stop_regex": (),
    "lora_path": (),
    "truncate_prompt_tokens": (),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "chat_template": (),
    "functions": ([],),  # the former name of tools
    "function_call": ("none", "auto"),
}

_INSTEAD = {
    "functions": ": tools and tool_choice are",
    "function_call": ": tools and tool_choice are",
    "max_new_tokens": ": max_tokens is",
    "regex": ": structured_outputs is",
    "ebnf": ": structured_outputs is",
}

BodyT = TypeVar("BodyT", bound="ModelBody")


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool = False
    include_obfuscation: bool | None = None  # OpenAI's: accepted, without effect
    continuous_usage_stats: bool | None = None  # vLLM's: accepted, without effect

    def model_post_init(self, _: Any) -> None:
        for name in self.model_extra or {}:
            if hint := misspelt(name, StreamOptions.model_fields):
                raise InvalidRequest(f"stream_options: unknown field {name!r}{hint}", "stream_options")


class ModelBody(BaseModel):
    """The base of all bodies. Unknown fields are kept, to be refused by name, or named in a warning."""

    model_config = ConfigDict(strict=True, extra="allow")
    passed_fields: ClassVar[frozenset[str]] = frozenset()  # more fields, which another body checks
    passes_over_unknown: ClassVar[bool] = False  # clients send what other servers know: only misspelt names are refused

    model: str | None = None

    def unread_warnings(self) -> tuple[str, ...]:
        """Return a warning for each field that has a value and is unknown."""
        known = IGNORED_FIELDS | self.passed_fields | NEUTRAL_VALUES.keys()
        extra = self.model_extra or {}
        return tuple(f"{name}: unknown here, passed over" for name in extra if extra[name] and name not in known)


def with_client_fields(names: Mapping[str, str]) -> Callable[[type[BodyT]], type[BodyT]]:
    """Add fields to a body: `names` has each `ClientFields`' name in the body."""
    added: dict[str, Any] = {name: (kind_of(ours), None) for ours, name in names.items()}

    def add(body: type[BodyT]) -> type[BodyT]:
        return create_model(body.__name__, __base__=body, __module__=body.__module__, __doc__=body.__doc__, **added)

    return add


@with_client_fields({name: name for name in CLIENT_FIELDS})
class GenerationBody(ModelBody):
    """The fields of both completions and chat completions."""

    passes_over_unknown = True

    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def has_structure(self) -> bool:
        """Whether a form is asked for, which may take long to look at: in a thread, then."""
        return any(getattr(self, name) is not None for name in OPENAI_FIELDS)

    def shared_fields(self) -> dict[str, Any]:
        """Return the fields that have the same name in `RequestInput`."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in ("model", *CLIENT_FIELDS)}
        structure = openai_structure({name: getattr(self, name) for name in OPENAI_FIELDS})
        if structure is not None:
            fields |= {"structured": structure.output}
        return fields | {
            "warnings": (*self.unread_warnings(), *(() if structure is None else structure.warnings)),
            "logit_bias": token_biases(fields["logit_bias"] or {}),
            "kv_transfer": read_kv_transfer(self.kv_transfer_params, stream=bool(self.stream)),
        }


def token_biases(logit_bias: dict[str, float]) -> dict[int, float]:
    """Return biases by token id; raises `InvalidRequest`."""
    try:
        return {int(token_id): bias for token_id, bias in logit_bias.items()}
    except ValueError as error:
        raise InvalidRequest("logit_bias must have token ids as keys", "logit_bias") from error


class CompletionBody(GenerationBody):
    prompt: str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None

    def prompts(self) -> list[str | list[int]]:
        """Return a list of prompts, from any of the four forms."""
        prompt = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [prompt]
        if not 1 <= len(prompt) <= MAX_PROMPTS:
            raise InvalidRequest(f"prompt must be 1 to {MAX_PROMPTS} prompts and not empty", "prompt")
        return list(prompt)  # type: ignore[arg-type]

    def inputs(self, request_id: str) -> list[RequestInput]:
        prompts, fields = self.prompts(), self.shared_fields()
        if len(prompts) * (fields["n"] or 1) > MAX_TOTAL_CHOICES:
            raise InvalidRequest(f"n times the number of prompts must be at most {MAX_TOTAL_CHOICES}", "n")
        ids = [request_id] if len(prompts) == 1 else [f"{request_id}-{index}" for index in range(len(prompts))]
        fields |= {
            "logprobs": self.logprobs,
            "echo": self.echo,
            "add_special_tokens": self.add_special_tokens is not False,
        }
        if len(prompts) > 1:  # an answer can say of one prompt alone where its KV is
            fields["kv_transfer"] = None
        return [RequestInput(request_id=id_, prompt=prompt, **fields) for id_, prompt in zip(ids, prompts, strict=True)]


class _TemplateFields(ModelBody):
    """The fields for a chat template, beside the messages."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: list[dict[str, Any]] | None = None

    def template_fields(self, tools: Sequence[Tool]) -> dict[str, Any]:
        """Return the template's arguments; raises `InvalidRequest` if they contradict each other."""
        are_both_asked = self.continue_final_message and self.add_generation_prompt
        if are_both_asked and "add_generation_prompt" in self.model_fields_set:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message cannot both be true", "add_generation_prompt"
            )
        kwargs = dict(self.chat_template_kwargs or {})
        for name in kwargs.keys() & RESERVED_KWARGS:
            raise InvalidRequest(f"chat_template_kwargs: {name!r} has a field of its own", "chat_template_kwargs")
        if self.reasoning_effort is not None:
            kwargs["reasoning_effort"] = self.reasoning_effort
        return {
            **kwargs,
            "tools": [tool.as_template_input() for tool in tools] or None,
            "add_generation_prompt": self.add_generation_prompt and not self.continue_final_message,
            "continue_final_message": self.continue_final_message,
        }


class ChatBody(GenerationBody, _TemplateFields):
    messages: Messages
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    prediction: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    include_reasoning: bool | None = None  # vLLM's, as the next
    thinking_token_budget: int | None = None

    def predicted_text(self) -> str | None:
        """Return the client's predicted output; raises `InvalidRequest`."""
        if self.prediction is None:
            return None
        if self.prediction.get("type") != "content" or self.prediction.keys() - {"type", "content"}:
            raise InvalidRequest('prediction must be {"type": "content", "content": …}', "prediction")
        content = self.prediction.get("content")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
        if not all(isinstance(text, str) for text in texts):
            raise InvalidRequest("prediction: its content must be text, or parts of type text", "prediction")
        return "".join(text for text in texts if isinstance(text, str))

    def tool_use(self) -> ToolUse:
        """Return the tools and how the model may use them; raises `InvalidRequest`."""
        return read_tool_use(self.tools or [], self.tool_choice, self.parallel_tool_calls)

    def input(self, request_id: str, prompt: str) -> RequestInput:
        """Return the request; `prompt` is the messages, rendered by the model's chat template."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
        fields = self.shared_fields()
        if self.max_completion_tokens is not None:
            fields |= {"max_tokens": self.max_completion_tokens, "max_tokens_field": "max_completion_tokens"}
        return RequestInput(
            request_id=request_id,
            prompt=prompt,
            prompt_field="messages",
            add_special_tokens=bool(self.add_special_tokens),  # a chat template writes them itself
            default_max_tokens=None,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            logprobs_field="top_logprobs",
            prediction=self.predicted_text(),
            **fields,
        )


class TokenizeBody(_TemplateFields):
    """The body of /tokenize: a prompt or messages."""

    prompt: str | None = Field(default=None, max_length=MAX_TOKENIZED_CHARS)
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def model_post_init(self, _: Any) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("prompt or messages must be given, and not both", "prompt")


class DetokenizeBody(ModelBody):
    tokens: TokenIds = Field(max_length=MAX_DETOKENIZED_TOKENS)


def parse_json(body: bytes) -> object:
    """Read a JSON body; raises `InvalidRequest` if it is not JSON, or has what no answer could repeat."""
    floats: list[float] = []

    def number(text: str) -> float:
        floats.append(float(text))
        return floats[-1]

    try:
        # given bytes, json would accept surrogates and UTF-16
        value: object = json.loads(body.decode("utf-8-sig"), parse_float=number, parse_constant=number)
        if b"\\u" in body:  # half of a surrogate pair can only be an escape
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest("the body has half of a surrogate pair in a string") from error
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error
    if not all(map(math.isfinite, floats)):
        raise _infinite(value)
    return value


def _infinite(body: object) -> InvalidRequest:
    """Return the error of a body with a number that is not finite, which names the field."""
    for name, value in body.items() if isinstance(body, dict) else ():
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            return InvalidRequest(f"{name}: numbers must be finite", name)
    return InvalidRequest("numbers must be finite")


def parse_body(body: object, kind: type[BodyT]) -> BodyT:
    """Check a JSON body's types, and refuse fields that would have no effect; raises `InvalidRequest`."""
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    try:
        parsed = kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        field = str(first["loc"][0]) if first["loc"] else None
        raise InvalidRequest(f"{field}: {first['msg']}", field) from error
    for name, value in (parsed.model_extra or {}).items():
        _check_extra(name, value, kind)
    return parsed


def _check_extra(name: str, value: object, kind: type[ModelBody]) -> None:
    if value is None or name in IGNORED_FIELDS | kind.passed_fields:
        return
    if name not in NEUTRAL_VALUES:
        known = [*kind.model_fields, *kind.passed_fields, *NEUTRAL_VALUES]
        is_anothers = name in ChatBody.model_fields or name in CompletionBody.model_fields
        if kind.passes_over_unknown and not is_anothers and not misspelt(name, known):
            return
        raise InvalidRequest(f"unknown field {name!r}{did_you_mean(name, known)}", name)
    # a boolean is not a number here, though 1 == True
    if not any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in NEUTRAL_VALUES[name]):
        raise InvalidRequest(f"{name} is not supported{_INSTEAD.get(name, '')}", name)
