"""A request's journal: its published tokens, from which another verifier goes on when one is lost.

Sans I/O: `Journal` holds what the client has received, `Attempts` decides where to retry and when to give up.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from outrider.cluster.common.errors import RequestFailed, Unavailable
from outrider.cluster.gateway.request_parser import ModelInfo
from outrider.verifier_service.messages.handover import KVSource
from outrider.verifier_service.messages.request import (
    FinishReason,
    GenerationRequest,
    RequestOutput,
    SpeculationMetrics,
    SpeculationPlan,
)

MAX_ATTEMPTS = 3  # losses in a row without a token between them: the request itself may crash its verifiers
MAX_LOSSES = 10  # losses in all: the request may crash them a few tokens later
RETRY_INTERVAL_S = 0.25
HANDOVER_S = 3.0  # in a rolling update, for a moment no verifier takes requests: a new request waits so long


@dataclass(slots=True, kw_only=True)
class Journal:
    """One request and its published tokens, whichever verifiers sampled them.

    prompt |<- token_ids: published by lost verifiers ->|<- published by the current one ->|<- not sampled yet ->|

    No published token is sampled again, so unseeded sampling keeps its law. A seeded request's noise is keyed by the
    absolute position, so its tokens stay the same. Both hold for weights of one version; every output names its own.
    """

    request: GenerationRequest
    model: ModelInfo
    token_ids: list[int] = field(init=False)
    finish_reason: FinishReason | None = None  # that was published
    weight_version: str = ""  # of the weights that drew the last published tokens; empty: unknown
    _num_published: int = 0  # outputs
    _num_published_before: int = 0  # outputs, by lost verifiers
    _num_cached_tokens: int = 0
    _speculation: SpeculationMetrics | None = None  # of the current verifier
    _speculation_before: SpeculationMetrics | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.output_token_ids)

    def publish(self, output: RequestOutput) -> RequestOutput:
        """Record a verifier's output; return it, now with the client's request id and the totals over all verifiers."""
        if self._num_published == 0:  # a later verifier also finds what the lost one computed
            self._num_cached_tokens = output.num_cached_tokens
        self._num_published += 1
        self.token_ids.extend(output.token_ids)
        self.weight_version = output.weight_version or self.weight_version
        self.finish_reason = output.finish_reason
        self._speculation = output.speculation or self._speculation
        output.request_id = self.request.request_id  # in place: a copy costs more than the rest
        output.num_cached_tokens = self._num_cached_tokens
        output.is_held = False
        output.speculation = self._total_speculation()
        return output

    def close_account(self) -> bool:
        """Add a lost verifier's counters to the totals; return whether it published anything."""
        has_published = self._num_published > self._num_published_before
        self._num_published_before = self._num_published
        self._speculation_before, self._speculation = self._total_speculation(), None
        return has_published

    def continuation(self, request_id: str, plan: SpeculationPlan, source: KVSource | None = None) -> GenerationRequest:
        """Return the request for the next verifier: it goes on after the published tokens.

        With a `source` that verifier takes over the KV that is there; without one it computes all KV again. It needs a
        new id: the lost verifier may still be running the old one.
        """
        sampling = self.request.sampling
        if self._num_published > 0 or source is not None:
            sampling = replace(sampling, prompt_logprobs=None)  # the first output had them
        return replace(
            self.request,
            request_id=request_id,
            plan=plan,
            sampling=sampling,
            output_token_ids=tuple(self.token_ids),
            hands_over=False,
            kv_source=source,
        )

    @property
    def ending(self) -> FinishReason | None:
        """Why the published tokens are the whole output; None: generation goes on."""
        if self.finish_reason is not None or not self.token_ids:
            return self.finish_reason
        sampling, num_output = self.request.sampling, len(self.token_ids)
        stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.model.eos_token_ids)}
        if self.token_ids[-1] in stops and num_output >= sampling.min_tokens:
            return FinishReason.STOP
        is_full = len(self.request.prompt_token_ids) + num_output >= self.model.max_model_len
        return FinishReason.LENGTH if is_full or num_output >= sampling.max_tokens else None

    def last_output(self) -> RequestOutput:
        """Publish the final output, when only the finish reason was lost."""
        return self.publish(RequestOutput(request_id="", token_ids=(), finish_reason=self.ending))

    def _total_speculation(self) -> SpeculationMetrics | None:
        before, current = self._speculation_before, self._speculation
        if before is None or current is None:
            return current or before
        # the reason is the current verifier's
        return replace(before.plus(current), disabled_reason=current.disabled_reason)


@dataclass(slots=True, kw_only=True)
class Attempts:
    """A request's attempts: which verifiers to avoid, whether to wait for one, when to give up.

    A new request waits up to `HANDOVER_S` for a verifier that takes it. A request that was accepted once waits up to
    `failover_timeout_s` after each loss. Every `now_s` is of one monotonic clock.
    """

    failover_timeout_s: float
    excluded_verifier_ids: tuple[str, ...] = ()  # they failed this request; they are tried again if there is no other
    _deadline_s: float | None = None  # None: no verifier has accepted it
    _handover_deadline_s: float | None = None  # of a new request
    _num_refused: int = 0  # attempts that reached no engine
    _num_fruitless: int = 0
    _num_losses: int = 0

    def lost(self, verifier_id: str, now_s: float, *, was_accepted: bool, has_published: bool, reason: str) -> None:
        """Count a lost verifier; raises `Unavailable` or `RequestFailed` after the last attempt.

        `was_accepted`: its engine had the request, so the request may have crashed it.
        """
        self.excluded_verifier_ids = (*self.excluded_verifier_ids, verifier_id)
        if not was_accepted:
            self._num_refused += 1
            is_over = self._wait_for_handover(now_s) and self._num_refused >= MAX_ATTEMPTS
            if is_over and self._deadline_s is None:
                raise Unavailable(f"no verifier takes the request: {reason}")
            return
        self._deadline_s = now_s + self.failover_timeout_s
        self._num_losses += 1
        self._num_fruitless = 0 if has_published else self._num_fruitless + 1
        if self._num_fruitless == MAX_ATTEMPTS or self._num_losses == MAX_LOSSES:
            raise RequestFailed(f"given up after the loss of {self._num_losses} verifiers: {reason}")

    def none_found(self, now_s: float) -> float:
        """Return how long to wait before the router is asked again; raises `Unavailable` when the time is up."""
        excluded, self.excluded_verifier_ids = self.excluded_verifier_ids, ()
        if self._deadline_s is None:
            if self._wait_for_handover(now_s) and not excluded:
                raise Unavailable("no verifier is ready")
        elif now_s >= self._deadline_s:
            raise Unavailable(f"the request lost its verifier; no other came within {self.failover_timeout_s:g} s")
        return RETRY_INTERVAL_S

    def _wait_for_handover(self, now_s: float) -> bool:
        """Start to wait for `HANDOVER_S` at the first call; return whether that time is over."""
        if self._handover_deadline_s is None:
            self._handover_deadline_s = now_s + HANDOVER_S
        return now_s >= self._handover_deadline_s
