"""SGLang's native wire format, request side: the bodies of /generate and of the calls that change weights.

Source: sglang 0.5.23, srt.managers.io_struct. A null means the default, and an unknown field with an empty value is
no wish: trainers send both. An unknown field with a value is refused by name, as everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field

from outrider.cluster.api.openai.protocol import (
    MAX_PROMPTS,
    ModelBody,
    parse_body,
    token_biases,
    with_client_fields,
)
from outrider.cluster.common.errors import InvalidRequest
from outrider.cluster.gateway.client_fields import SGLANG, TokenIds, named_at
from outrider.cluster.gateway.request_parser import RequestInput
from outrider.cluster.gateway.structured_format import openai_structure

DEFAULT_NEW_TOKENS = 128  # as SGLang
OUTPUT_ONLY = -1  # a `logprob_start_len`

BodyT = TypeVar("BodyT", bound=ModelBody)
# AReaL writes a port as text
LooseInt = Annotated[int, Field(strict=False, ge=0, lt=1 << 31)]


def parse_sglang(body: object, kind: type[BodyT]) -> BodyT:
    """Check a body as `parse_body` does, without its unknown empty fields."""
    if isinstance(body, dict):
        body = {name: value for name, value in body.items() if value or name in kind.model_fields}
    return parse_body(body, kind)


_NAMES = named_at(SGLANG)


@with_client_fields(_NAMES)
class SGLangSampling(ModelBody):
    """`sampling_params` of /generate."""

    passed_fields: ClassVar[frozenset[str]] = frozenset(
        ("custom_params", "stream_interval", "spaces_between_special_tokens")  # without effect on the tokens
    )

    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None

    def fields(self) -> dict[str, Any]:
        """Return the fields of a `RequestInput`."""
        guided = {"guided_json": self.json_schema, "guided_regex": self.regex, "guided_grammar": self.ebnf}
        structure = openai_structure(guided)
        given = {ours: getattr(self, name) for ours, name in _NAMES.items()}
        max_tokens = DEFAULT_NEW_TOKENS if given["max_tokens"] is None else given["max_tokens"]
        return {
            **given,
            "max_tokens": max_tokens,
            "max_tokens_field": "max_new_tokens",
            "echo": True if max_tokens == 0 else None,  # only the prompt is scored
            "logit_bias": token_biases(given["logit_bias"] or {}),
            **({} if structure is None else {"structured": structure.output, "warnings": structure.warnings}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLangPrompt:
    """One prompt of a body, and what its answer shows beside the tokens."""

    input: RequestInput
    max_new_tokens: int
    has_logprobs: bool
    logprob_start: int  # first prompt token whose log probability is shown; OUTPUT_ONLY: none is
    num_top: int


class GenerateBody(ModelBody):
    """The body of /generate: one prompt, or a list of them; then most fields may be lists, too."""

    passed_fields: ClassVar[frozenset[str]] = frozenset(("routing_key", "custom_logit_processor_names", "log_metrics"))

    text: str | list[str] | None = None
    input_ids: TokenIds | list[TokenIds] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    stream: bool | None = None
    extra_key: str | list[str] | None = None
    cache_salt: str | list[str] | None = None
    priority: int | None = None
    session_id: str | None = None
    history_key: str | None = None  # ours
    store: bool | None = None  # ours

    @property
    def is_batch(self) -> bool:
        if self.text is not None:
            return isinstance(self.text, list)
        return bool(self.input_ids) and isinstance(self.input_ids[0], list)  # type: ignore[index]

    def prompts(self, answer_id: str, session_id: str | None) -> list[SGLangPrompt]:
        """Return the prompts in order; raises `InvalidRequest`. `session_id`: of a body that names none."""
        if (self.text is None) == (self.input_ids is None):
            raise InvalidRequest("text or input_ids must be given, and not both", "input_ids")
        field = "input_ids" if self.text is None else "text"
        given: Any = self.input_ids if self.text is None else self.text
        prompts = given if self.is_batch else [given]
        if not 1 <= len(prompts) <= MAX_PROMPTS:
            raise InvalidRequest(f"{field} must be 1 to {MAX_PROMPTS} prompts", field)
        num = len(prompts)
        rids = self._rids(num, answer_id)
        samplings = [parse_sglang(item or {}, SGLangSampling) for item in self._each("sampling_params", num)]
        salts = self._each("cache_salt" if self.extra_key is None else "extra_key", num)
        flags, starts = self._each("return_logprob", num), self._each("logprob_start_len", num)
        tops = self._each("top_logprobs_num", num)
        found = []
        for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
            has_logprobs, start, num_top = bool(flags[index]), starts[index], tops[index] or 0
            start = OUTPUT_ONLY if start is None else start
            fields = sampling.fields()
            found.append(
                SGLangPrompt(
                    input=RequestInput(
                        prompt=prompt,
                        prompt_field=field,
                        request_id=rids[index],
                        model=self.model,
                        logprobs=num_top if has_logprobs else None,
                        logprobs_field="top_logprobs_num",
                        prompt_logprobs=num_top if has_logprobs and start >= 0 else None,
                        cache_salt=salts[index],
                        priority=self.priority,
                        session_id=self.session_id or session_id,
                        history_key=self.history_key,
                        store=self.store,
                        **fields,
                    ),
                    max_new_tokens=fields["max_tokens"],
                    has_logprobs=has_logprobs,
                    logprob_start=start,
                    num_top=num_top,
                )
            )
        return found

    def _each(self, field: str, num: int) -> Sequence[Any]:
        """Return a field's value for each prompt."""
        value = getattr(self, field)
        if not isinstance(value, list):
            return [value] * num
        if len(value) != num:
            raise InvalidRequest(f"{field} must have one value for each of {num} prompts, not {len(value)}", field)
        return value

    def _rids(self, num: int, answer_id: str) -> Sequence[str]:
        """Return the requests' ids; one id for several prompts is numbered, as SGLang does."""
        if isinstance(self.rid, list):
            return self._each("rid", num)
        base = self.rid or answer_id
        return [base] if not self.is_batch else [f"{base}_{index}" for index in range(num)]


class PauseBody(ModelBody):
    passed_fields: ClassVar[frozenset[str]] = frozenset(("torch_empty_cache",))
    mode: str | None = None
    lease_s: float | None = None  # ours


class AbortBody(ModelBody):
    passed_fields: ClassVar[frozenset[str]] = frozenset(("abort_message", "http_worker_ipc"))
    rid: str | None = None
    abort_all: bool | None = None


class GroupBody(ModelBody):
    """The body of /init_weights_update_group."""

    passed_fields: ClassVar[frozenset[str]] = frozenset(("pp_rank",))
    master_address: str
    master_port: LooseInt
    rank_offset: LooseInt
    world_size: LooseInt
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class LeaveGroupBody(ModelBody):
    group_name: str = "weight_update_group"


class _UpdateBody(ModelBody):
    """What both ways of an update share. No KV of older weights is found: `flush_cache` has nothing to do."""

    passed_fields: ClassVar[frozenset[str]] = frozenset(
        ("flush_cache", "is_async", "torch_empty_cache", "keep_pause", "recapture_cuda_graph", "token_step")
    )
    load_format: str | None = None
    weight_version: str | None = None
    abort_all_requests: bool | None = None


class GroupUpdateBody(_UpdateBody):
    """The body of /update_weights_from_distributed: one bucket of tensors."""

    selector: Literal["target"] | None = None  # drafters take theirs from a folder
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"

    @property
    def is_flattened(self) -> bool:
        if self.load_format not in (None, "flattened_bucket"):
            raise InvalidRequest("load_format must be flattened_bucket, or left out", "load_format")
        return self.load_format is not None


class FolderUpdateBody(_UpdateBody):
    """The body of /update_weights_from_disk."""

    model_path: str
    selector: str | None = None  # target, or draft: heads and draft models

    def model_post_init(self, _: Any) -> None:
        if self.load_format not in (None, "auto", "safetensors"):
            raise InvalidRequest("load_format must be auto or safetensors", "load_format")
        if self.selector not in (None, "target", "draft"):
            raise InvalidRequest("selector must be target or draft", "selector")
