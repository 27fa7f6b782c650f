"""What a client asks for, from any wire format, checked field by field: `RequestInput` becomes a `ValidRequest`."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from outrider.cluster.common.api_keys import NO_KEY, KeyPolicy, ShownKey
from outrider.cluster.common.errors import ContextTooLong, InvalidRequest, require_field
from outrider.cluster.gateway.client_fields import ClientFields
from outrider.cluster.gateway.detokenizer import Detokenizer
from outrider.cluster.gateway.kv_transfer import FIELD, NO_TRANSFER, KVTransfer
from outrider.cluster.gateway.text_codec import TextCodec, check_bad_words
from outrider.verifier_service.messages.beam_search import BeamSearch
from outrider.verifier_service.messages.lossy import acceptance_rule, require_lossless
from outrider.verifier_service.messages.request import (
    AcceptanceRule,
    GenerationRequest,
    LogitBias,
    LogprobsMode,
    SamplingParams,
    StructuredOutput,
)
from outrider.verifier_service.messages.thought import Thought

MAX_CHOICES = 128  # of one prompt, as OpenAI
MAX_STOP_STRINGS = 16  # OpenAI has 4; agents and evaluations bring more
MAX_STOP_STRING_CHARS = 1024  # the search for a partial stop string is quadratic in it
MAX_STOP_TOKEN_IDS = 1024
MAX_LABEL_CHARS = 256  # of a session id or cache salt
MAX_HISTORY_KEY_CHARS = 128
MAX_REQUEST_ID_CHARS = 128
DEFAULT_MAX_TOKENS = 16  # of a completion, as OpenAI


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The served model, as clients may know it."""

    name: str
    max_model_len: int  # prompt and output together
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    created: int  # Unix time
    acceptance: AcceptanceRule = AcceptanceRule.STANDARD  # of requests that name none
    logprobs_mode: LogprobsMode = LogprobsMode.RAW  # the same
    # fields of `SamplingParams` of requests that leave them open; `max_tokens` bounds those of others, too
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    adapters: tuple[str, ...] = ()  # LoRA adapters; clients give an adapter's name as `model`
    rollouts: bool = False  # responses are remembered by prompt or `history_key`
    learns: bool = False  # a pool's drafters learn from requests that allow it
    hands_over: bool = False  # its verifiers hand requests over with their KV
    allows_lossy: bool = False  # requests may name a lossy `acceptance`
    tells_cached: bool = True  # answers say how many prompt tokens were in the prefix cache


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestInput(ClientFields):
    """One prompt in any wire format: typed, not checked. None: not given."""

    prompt: str | Sequence[int]
    prompt_field: str = "prompt"  # the prompt's name on the wire, for errors
    request_id: str | None = None
    model: str | None = None  # the served model's name, or an adapter's
    add_special_tokens: bool = True  # False: a chat template has written them
    is_new_text: bool = False  # the output does not go on in the prompt's text: a message of its own
    default_max_tokens: int | None = DEFAULT_MAX_TOKENS  # None: the rest of the context
    max_tokens_field: str = "max_tokens"
    logprobs: int | None = None
    logprobs_field: str = "logprobs"
    echo: bool | None = None
    structured: StructuredOutput | None = None
    thought: Thought | None = None  # which `structured` follows
    warnings: tuple[str, ...] = ()  # constraints that the grammar does not enforce
    prediction: str | None = None  # expected output, used as a draft
    kv_transfer: KVTransfer | None = None


# of the client and of the engine under one name; `RequestParser` reads some of them anew
_SAME = {each.name for each in fields(RequestInput)} & {each.name for each in fields(SamplingParams)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidRequest:
    """One prompt, checked: `RequestParser.parse` makes one, and `LLM`."""

    message: GenerationRequest  # of its only, or first, choice
    n: int
    stop: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    is_new_text: bool  # as in `RequestInput`
    num_prompt_logprobs: int | None  # as the client asked; with echo the engine may return more
    echo: tuple[str, ...] = ()  # the prompt, if it is shown before the output; with logprobs one text per token
    is_prompt_only: bool = False  # max_tokens is 0: the engine's one token is not shown
    warnings: tuple[str, ...] = ()

    @property
    def request_id(self) -> str:
        return self.message.request_id

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        return self.message.prompt_token_ids

    @property
    def sampling(self) -> SamplingParams:
        return self.message.sampling

    @property
    def adapter(self) -> str | None:
        return self.message.adapter

    @property
    def is_kept(self) -> bool:
        """Whether anything of the request may be left behind for later ones."""
        return self.message.history_key != ""

    def detokenizer(self, text: TextCodec) -> Detokenizer:
        """Return the detokenizer of one choice."""
        return text.detokenizer(
            skip_special_tokens=self.skip_special_tokens,
            prompt_ids=() if self.is_new_text else self.prompt_token_ids,
            stop=self.stop,
            include_stop=self.include_stop,
            min_tokens=self.sampling.min_tokens,
        )

    def choices(self) -> list[GenerationRequest]:
        """Return one request per choice; the noise of seeded choices differs by the choice index.

        A beam search is one request for all.
        """
        if self.n == 1 or self.sampling.beams is not None:
            return [self.message] * self.n
        first = self.sampling.choice_index
        return [
            dataclasses.replace(
                self.message,
                request_id=f"{self.request_id}-{index}",
                sampling=dataclasses.replace(self.sampling, choice_index=first + index),
            )
            for index in range(self.n)
        ]


class RequestParser:
    """Check a client's fields, and tokenise its texts."""

    def __init__(self, model: ModelInfo, text: TextCodec) -> None:
        self.model = model
        self.text = text

    async def parse(self, request: RequestInput, key: ShownKey = NO_KEY) -> ValidRequest:
        """Check wire input; raises `InvalidRequest` naming the field. `key`: the one that came with it."""
        request = self._with_defaults(request)
        is_kept = request.store is not False and key.policy is not KeyPolicy.NEVER and not request.use_beam_search
        num_choices = 1 if request.n is None else request.n
        require_field(1 <= num_choices <= MAX_CHOICES, "n", f"in [1, {MAX_CHOICES}]")
        stop = _stop_strings(request.stop)
        prompt_token_ids = await self._prompt_token_ids(request)
        num_free_tokens = self.model.max_model_len - len(prompt_token_ids)
        prediction = await self._prediction(request)
        with _naming_fields(request):
            message = GenerationRequest(
                request_id=_request_id(request.request_id),
                prompt_token_ids=prompt_token_ids,
                sampling=await self._sampling(request, num_free_tokens),
                group_id=uuid.uuid4().hex if num_choices > 1 and not request.use_beam_search else None,
                priority=request.priority or 0,
                target_inter_token_ms=request.target_inter_token_ms,
                session_id=_label(request.session_id, "session_id"),
                cache_salt=key.partition + (_label(request.cache_salt, "cache_salt") or ""),
                partition=key.partition,
                history_key=self._history_key(request, is_kept=is_kept),
                may_learn=is_kept and self.model.learns and self._is_open(request, key.policy),
                adapter=request.model if request.model in self.model.adapters else None,
                prediction_token_ids=prediction,
                **self._kv_transfer(request, num_choices),
            )
        return ValidRequest(
            message=message,
            n=num_choices,
            stop=stop,
            include_stop=bool(request.include_stop_str_in_output),
            skip_special_tokens=request.skip_special_tokens is not False,
            is_new_text=request.is_new_text,
            num_prompt_logprobs=request.prompt_logprobs,
            echo=await self._echo(request, prompt_token_ids) if request.echo else (),
            is_prompt_only=request.max_tokens == 0,
            warnings=_warnings(request, num_free_tokens),
        )

    def _with_defaults(self, request: RequestInput) -> RequestInput:
        """Return a request that is sampled as the model's files say where it leaves it open."""
        if request.use_beam_search:
            return request  # nothing is sampled
        defaults = {name: value for name, value in self.model.sampling_defaults.items() if name != "max_tokens"}
        missing = {name: value for name, value in defaults.items() if getattr(request, name) is None}
        return dataclasses.replace(request, **missing) if missing else request

    def _kv_transfer(self, request: RequestInput, num_choices: int) -> dict[str, Any]:
        """Return what a proxy wants of the prompt's KV; several choices share a prompt, which stays where they are."""
        wanted = request.kv_transfer or NO_TRANSFER
        require_field(self.model.hands_over or request.kv_transfer is None, FIELD, "left out: it is our own engine's")
        is_one_token = request.max_tokens == 1 or not wanted.hands_over
        require_field(is_one_token, request.max_tokens_field, f"1 with do_remote_decode in {FIELD}")
        wanted = wanted if num_choices == 1 and not request.use_beam_search else NO_TRANSFER
        return {"hands_over": wanted.hands_over, "kv_source": wanted.source}

    def _is_open(self, request: RequestInput, key_policy: KeyPolicy) -> bool:
        """Return whether no salt closes the request to learning; in rollouts a salt may be the policy's version."""
        return not request.cache_salt or self.model.rollouts or key_policy is KeyPolicy.SALTED

    def _history_key(self, request: RequestInput, *, is_kept: bool) -> str | None:
        """Return the key of the request's history; what is not kept has none, in rollouts and elsewhere."""
        key = request.history_key
        if not self.model.rollouts:
            require_field(key is None, "history_key", "left out: this service was not started with --rollouts")
        fits = key is None or len(key) <= MAX_HISTORY_KEY_CHARS
        require_field(fits, "history_key", f"at most {MAX_HISTORY_KEY_CHARS} characters")
        return key or None if is_kept else ""

    async def _prediction(self, request: RequestInput) -> tuple[int, ...]:
        if not request.prediction:
            return ()
        is_long = self.text.is_longer_than(request.prediction, self.model.max_model_len)
        require_field(not is_long, "prediction", f"at most what {self.model.max_model_len} tokens can have")
        return (await self.text.encode(request.prediction, add_special_tokens=False))[: self.model.max_model_len]

    async def _prompt_token_ids(self, request: RequestInput) -> tuple[int, ...]:
        field, limit = request.prompt_field, self.model.max_model_len
        if isinstance(request.prompt, str):
            if self.text.is_longer_than(request.prompt, limit):
                raise ContextTooLong(limit, f"{len(request.prompt)} characters, more than these can have", field)
            ids = await self.text.encode(request.prompt, add_special_tokens=request.add_special_tokens)
        else:
            ids = tuple(request.prompt)
        require_field(bool(ids), field, "at least one token: it is empty, and the tokenizer adds none")
        if len(ids) >= limit:
            raise ContextTooLong(limit, f"{len(ids)} tokens", field)
        self.require_in_vocabulary(ids, field)
        return ids

    async def _echo(self, request: RequestInput, prompt_token_ids: tuple[int, ...]) -> tuple[str, ...]:
        skip_special_tokens = request.skip_special_tokens is not False
        if request.logprobs is not None:
            return tuple(await self.text.token_texts(prompt_token_ids, skip_special_tokens=skip_special_tokens))
        if isinstance(request.prompt, str):
            return (request.prompt,)
        return (await self.text.decode(request.prompt, skip_special_tokens=skip_special_tokens),)

    def require_in_vocabulary(self, ids: Iterable[int], field: str) -> None:
        """Raise `InvalidRequest` naming the field unless all ids are in the model's vocabulary."""
        known = tuple(ids)  # of a long prompt, looked through at once: one by one takes ten times as long
        in_bounds = not known or (min(known) >= 0 and max(known) < self.model.vocab_size)
        require_field(in_bounds, field, f"token ids in [0, {self.model.vocab_size})")

    async def _sampling(self, request: RequestInput, num_free_tokens: int) -> SamplingParams:
        stop_token_ids = tuple(request.stop_token_ids or ())
        require_field(len(stop_token_ids) <= MAX_STOP_TOKEN_IDS, "stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS}")
        self.require_in_vocabulary(stop_token_ids, "stop_token_ids")
        allowed = request.allowed_token_ids
        require_field(allowed is None or len(allowed) > 0, "allowed_token_ids", "one token at least")
        self.require_in_vocabulary(allowed or (), "allowed_token_ids")
        logit_bias = request.logit_bias or {}
        self.require_in_vocabulary(logit_bias, "logit_bias")
        acceptance = self._acceptance(request.rejection_sample_method)
        if self.model.rollouts:
            require_lossless(acceptance)
        max_tokens = _max_tokens(request, num_free_tokens)
        read = {
            "top_k": self._top_k(request.top_k),
            "prompt_logprobs": _num_prompt_logprobs(request),
            "logprobs_mode": self._logprobs_mode(request),
            "num_speculative_tokens": self._draft_cap(request),
            "acceptance": acceptance,
            "max_tokens": min(max_tokens, self.model.sampling_defaults.get("max_tokens", max_tokens)),
            "stop_token_ids": stop_token_ids,
            "allowed_token_ids": tuple(allowed or ()),
            "logit_bias": tuple(LogitBias(token_id=id_, bias=bias) for id_, bias in logit_bias.items()),
            "bad_words": await self._bad_words(request.bad_words or ()),
            **_beams(request),
        }
        given = {name: getattr(request, name) for name in _SAME} | read
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})

    async def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        check_bad_words(words)
        sequences = await self.text.word_sequences(words) if words else ()
        self.require_in_vocabulary(itertools.chain.from_iterable(sequences), "bad_words")
        return sequences

    def _top_k(self, top_k: int | None) -> int | None:
        if top_k is None or top_k < -1:
            return top_k
        return 0 if top_k >= self.model.vocab_size else max(0, top_k)

    def _acceptance(self, name: str | None) -> AcceptanceRule:
        if name is None:
            return self.model.acceptance
        try:
            rule = acceptance_rule(name)
        except ValueError as error:
            raise InvalidRequest(f"rejection_sample_method {error}", "rejection_sample_method") from error
        is_allowed = not rule.is_lossy or self.model.allows_lossy
        require_field(
            is_allowed, "rejection_sample_method", f"no {rule}: the service has no --allow-typical-acceptance"
        )
        return rule

    def _logprobs_mode(self, request: RequestInput) -> LogprobsMode | None:
        """Return the mode; the model's is for requests with log probabilities alone: others may be lossy."""
        name = request.logprobs_mode
        if name is None:
            has_some = request.logprobs is not None or request.prompt_logprobs is not None
            return self.model.logprobs_mode if has_some else None
        modes = [mode.value for mode in LogprobsMode]
        require_field(name in modes, "logprobs_mode", f"one of {', '.join(modes)}")
        return LogprobsMode(name)

    def _draft_cap(self, request: RequestInput) -> int | None:
        cap = 0 if request.disable_spec_decode else request.num_speculative_tokens
        return None if cap is None else min(cap, self.model.max_model_len)


@contextlib.contextmanager
def _naming_fields(request: RequestInput) -> Iterator[None]:
    """Turn the engine's errors, whose text begins with a field's name, into `InvalidRequest` with the client's name."""
    try:
        yield
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        field = request.logprobs_field if name == "logprobs" else name
        raise InvalidRequest(f"{field} {rest}", field) from error


def _beams(request: RequestInput) -> dict[str, Any]:
    """Return the fields of a beam search; its temperature, as vLLM's, changes nothing."""
    if not request.use_beam_search:
        require_field(request.length_penalty in (None, 1), "length_penalty", "1, or left out, without use_beam_search")
        return {}
    penalty = 1.0 if request.length_penalty is None else request.length_penalty
    beams = BeamSearch(width=request.n or 1, length_penalty=penalty, stop=_stop_strings(request.stop))
    return {"beams": beams, "temperature": 0.0, "num_speculative_tokens": 0}


def _max_tokens(request: RequestInput, num_free_tokens: int) -> int:
    """Return the output's limit, at most the free tokens: agents ask for the most that any model has."""
    if request.max_tokens is None:
        default = request.default_max_tokens
        return num_free_tokens if default is None else min(default, num_free_tokens)
    smallest = 0 if request.echo else 1
    require_field(request.max_tokens >= smallest, request.max_tokens_field, f"at least {smallest}")
    return max(1, min(request.max_tokens, num_free_tokens))


def _warnings(request: RequestInput, num_free_tokens: int) -> tuple[str, ...]:
    """Return the request's warnings, and one if its output's limit is above the free tokens."""
    if request.max_tokens is None or request.max_tokens <= num_free_tokens:
        return request.warnings
    told = f"{request.max_tokens_field}: the context has room for {num_free_tokens} tokens after this prompt"
    return (*request.warnings, told)


def _num_prompt_logprobs(request: RequestInput) -> int | None:
    """Return the number of log probabilities per prompt token; an echoed prompt has as many as the output."""
    wanted = [request.prompt_logprobs, request.logprobs if request.echo else None]
    return max((num for num in wanted if num is not None), default=None)


def _stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    require_field(len(strings) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings")
    fits = all(1 <= len(string) <= MAX_STOP_STRING_CHARS for string in strings)
    require_field(fits, "stop", f"strings of 1 to {MAX_STOP_STRING_CHARS} characters")
    return strings


def is_safe_id(text: str) -> bool:
    """Return whether a client's id is safe in headers and logs."""
    return 1 <= len(text) <= MAX_REQUEST_ID_CHARS and text.isascii() and text.isprintable()


def _request_id(given: str | None) -> str:
    if not given:
        return uuid.uuid4().hex
    require_field(is_safe_id(given), "request_id", f"at most {MAX_REQUEST_ID_CHARS} printable ASCII characters")
    return given


def _label(given: str | None, field: str) -> str | None:
    require_field(given is None or len(given) <= MAX_LABEL_CHARS, field, f"at most {MAX_LABEL_CHARS} characters")
    return given or None
