"""What a request may ask of an engine, and where its output ends."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Sequence

from outrider.verifier_service.messages.request import FinishReason, GenerationRequest, Request, SamplingParams
from outrider.verifier_service.messages.wire import MAX_FRAME_BYTES
from outrider.verifier_service.sampling.logprobs import encoded_bytes

MAX_PROMPT_LOGPROBS_BYTES = MAX_FRAME_BYTES * 3 // 4  # all of them travel in one frame


class RequestLimits:
    """The limits of one model."""

    def __init__(self, *, vocab_size: int, max_model_len: int, eos_token_ids: Sequence[int]) -> None:
        self.vocab_size, self.max_model_len, self.eos_token_ids = vocab_size, max_model_len, eos_token_ids

    def check(self, message: GenerationRequest) -> None:
        """Raise `ValueError` naming the field that the model cannot serve."""
        for name in ("prompt_token_ids", "output_token_ids"):
            self._check_token_ids(name, getattr(message, name))
        self._check_token_ids("logit_bias", (item.token_id for item in message.sampling.logit_bias))
        self._check_token_ids("allowed_token_ids", message.sampling.allowed_token_ids)
        self._check_token_ids("bad_words", itertools.chain.from_iterable(message.sampling.bad_words))
        if message.sampling.beams is not None and message.sampling.beams.width > self.vocab_size:
            raise ValueError(f"n: {message.sampling.beams.width} beams of a vocabulary of {self.vocab_size} tokens")
        num_top = message.sampling.prompt_logprobs
        if num_top is not None and encoded_bytes(len(message.prompt_token_ids), num_top) > MAX_PROMPT_LOGPROBS_BYTES:
            raise ValueError(f"prompt_logprobs: too many for a prompt of {len(message.prompt_token_ids)} tokens")
        vocabulary = range(self.vocab_size)
        stops = {id_ for id_ in self.stop_token_ids(message.sampling) if id_ in vocabulary}
        if message.sampling.min_tokens and len(stops) == len(vocabulary):
            raise ValueError("min_tokens: every token of the vocabulary is a stop token")
        barred = {sequence[-1] for sequence in message.sampling.bad_words}
        if len(barred | (stops if message.sampling.min_tokens else set())) == len(vocabulary):
            raise ValueError("bad_words: every token of the vocabulary may be barred")

    def _check_token_ids(self, name: str, token_ids: Iterable[int]) -> None:
        if any(not 0 <= token_id < self.vocab_size for token_id in token_ids):
            raise ValueError(f"{name}: ids must be in [0, {self.vocab_size})")

    def stop_token_ids(self, sampling: SamplingParams) -> set[int]:
        """Return the tokens that end a request's output."""
        return {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.eos_token_ids)}

    def tell(self, request: Request, *, looks_closer: bool) -> None:
        """Tell a request what ends it; `looks_closer`: more than its stop tokens and its length may."""
        if request.sampling.beams is not None:  # its search ends it
            request.limit = sys.maxsize
            return
        request.stop_ids = frozenset(self.stop_token_ids(request.sampling))
        request.limit = 0 if looks_closer else self.room(request, 0)

    def room(self, request: Request, num_tokens: int) -> int:
        """Return how many more tokens a request may get once it has `num_tokens`."""
        left = request.num_prompt_tokens + request.sampling.max_tokens - num_tokens
        return min(left, self.max_model_len - num_tokens)

    def until_finished(
        self, request: Request, verified: Sequence[int], num_tokens: int
    ) -> tuple[list[int], FinishReason | None]:
        """Return the verified tokens up to the first that ends the request, and the finish reason or None.

        `num_tokens`: the request's tokens before them.
        """
        stops, room = request.stop_ids, self.room(request, num_tokens)
        committed: list[int] = []
        for token_id in verified:
            committed.append(token_id)
            if token_id in stops:
                return committed, FinishReason.STOP
            if len(committed) == room:
                return committed, FinishReason.LENGTH
        return committed, None
