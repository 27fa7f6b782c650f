"""What a gateway remembers of a request that it streams: enough to go on at another verifier when one is lost.

Sans I/O: `Journal` knows what the client has got, `Attempts` where to try next and when to give up.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from outrider.cluster.common.errors import RequestFailed, Unavailable
from outrider.cluster.gateway.gateway import ModelInfo
from outrider.verifier_service.messages.request import (
    FinishReason,
    GenerationRequest,
    RequestOutput,
    SpeculationMetrics,
    SpeculationPlan,
)

MAX_ATTEMPTS = 3  # losses in a row without a token between them: the request may be what its verifiers die of
MAX_LOSSES = 10  # losses in all: so may one that they die of a few tokens later
RETRY_INTERVAL_S = 0.25
HANDOVER_S = 3.0  # a new request outlasts the moment in which a rolling update leaves no verifier that takes it


@dataclass(slots=True, kw_only=True)
class Journal:
    """One request and what has been published of it, by whichever verifiers.

    prompt |<- token_ids: published by lost verifiers ->|<- published by this one ->|<- to come: not known anywhere ->|

    Nothing that was drawn is drawn again. What comes is drawn afresh after the published tokens, so unseeded sampling
    keeps its law; the noise of a seeded request is keyed by the absolute position, so it stays what it was.
    """

    request: GenerationRequest
    model: ModelInfo
    token_ids: list[int] = field(init=False)
    finish_reason: FinishReason | None = None  # as published
    _num_published: int = 0  # outputs
    _num_published_before: int = 0  # by the verifiers that were lost
    _num_cached_tokens: int = 0
    _speculation: SpeculationMetrics | None = None  # of this verifier
    _speculation_before: SpeculationMetrics | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.output_token_ids)

    def publish(self, output: RequestOutput) -> RequestOutput:
        """Record a verifier's output; return it as the client sees it: with its own id and everybody's totals."""
        if self._num_published == 0:  # a later verifier finds in its cache what the client never had cached
            self._num_cached_tokens = output.num_cached_tokens
        self._num_published += 1
        self.token_ids.extend(output.token_ids)
        self.finish_reason = output.finish_reason
        self._speculation = output.speculation or self._speculation
        return replace(
            output,
            request_id=self.request.request_id,
            num_cached_tokens=self._num_cached_tokens,
            speculation=self._total_speculation(),
        )

    def close_account(self) -> bool:
        """Take over the counters of a verifier that was lost; return whether it published anything."""
        has_published = self._num_published > self._num_published_before
        self._num_published_before = self._num_published
        self._speculation_before, self._speculation = self._total_speculation(), None
        return has_published

    def continuation(self, request_id: str, plan: SpeculationPlan) -> GenerationRequest:
        """Return what to ask of the next verifier: all that follows what was published, under an id of its own.

        A verifier that only seems dead may still run the old one.
        """
        sampling = self.request.sampling
        if self._num_published > 0:
            sampling = replace(sampling, prompt_logprobs=None)  # they came with the first output
        return replace(
            self.request,
            request_id=request_id,
            plan=plan,
            sampling=sampling,
            output_token_ids=tuple(self.token_ids),
        )

    @property
    def ending(self) -> FinishReason | None:
        """Return why nothing can follow what was published; None: generation goes on."""
        if self.finish_reason is not None or not self.token_ids:
            return self.finish_reason
        sampling, num_output = self.request.sampling, len(self.token_ids)
        stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.model.eos_token_ids)}
        if self.token_ids[-1] in stops and num_output >= sampling.min_tokens:
            return FinishReason.STOP
        is_full = len(self.request.prompt_token_ids) + num_output >= self.model.max_model_len
        return FinishReason.LENGTH if is_full or num_output >= sampling.max_tokens else None

    def last_output(self) -> RequestOutput:
        """Return the end of a request of which everything was published but that it had ended."""
        return self.publish(RequestOutput(request_id="", token_ids=(), finish_reason=self.ending))

    def _total_speculation(self) -> SpeculationMetrics | None:
        before, current = self._speculation_before, self._speculation
        if before is None or current is None:
            return current or before
        # why it is off is for the verifier to say that runs it now
        return replace(before.plus(current), disabled_reason=current.disabled_reason)


@dataclass(slots=True, kw_only=True)
class Attempts:
    """Where a request has been tried: which verifiers to avoid now, whether to wait for one, when to give up.

    A new request waits for `HANDOVER_S` where no verifier takes it. One that a verifier has had waits for another for
    up to `failover_timeout_s` after each loss. Every `now_s` is of one monotonic clock.
    """

    failover_timeout_s: float
    excluded_verifier_ids: tuple[str, ...] = ()  # failed this request; tried again when there is no other
    _deadline_s: float | None = None  # None: no verifier has had it
    _handover_deadline_s: float | None = None  # of a new request
    _num_refused: int = 0  # attempts that reached no engine
    _num_fruitless: int = 0
    _num_losses: int = 0

    def lost(self, verifier_id: str, now_s: float, *, was_accepted: bool, has_published: bool, reason: str) -> None:
        """Count a verifier that was lost; raises `Unavailable` or `RequestFailed` when it was the last try.

        Only a verifier whose engine had the request can have died of it.
        """
        self.excluded_verifier_ids = (*self.excluded_verifier_ids, verifier_id)
        if not was_accepted:
            self._num_refused += 1
            is_over = self._is_handover_over(now_s) and self._num_refused >= MAX_ATTEMPTS
            if is_over and self._deadline_s is None:
                raise Unavailable(f"no verifier takes the request: {reason}")
            return
        self._deadline_s = now_s + self.failover_timeout_s
        self._num_losses += 1
        self._num_fruitless = 0 if has_published else self._num_fruitless + 1
        if self._num_fruitless == MAX_ATTEMPTS or self._num_losses == MAX_LOSSES:
            raise RequestFailed(f"given up after the loss of {self._num_losses} verifiers: {reason}")

    def none_found(self, now_s: float) -> float:
        """Return how long to wait before asking for a verifier again; raises `Unavailable` when it is no use."""
        excluded, self.excluded_verifier_ids = self.excluded_verifier_ids, ()
        if self._deadline_s is None:
            if self._is_handover_over(now_s) and not excluded:
                raise Unavailable("no verifier is ready")
        elif now_s >= self._deadline_s:
            raise Unavailable(f"the request lost its verifier; no other came within {self.failover_timeout_s:g} s")
        return RETRY_INTERVAL_S

    def _is_handover_over(self, now_s: float) -> bool:
        """Return whether a new request has waited long enough since it was first refused or found no verifier."""
        if self._handover_deadline_s is None:
            self._handover_deadline_s = now_s + HANDOVER_S
        return now_s >= self._handover_deadline_s
