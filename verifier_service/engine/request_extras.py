"""Per-request state beyond tokens: logit processors, grammars, prompt logprobs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from outrider.verifier_service.engine.request_limits import RequestLimits
from outrider.verifier_service.messages.beam_search import ends_by_text
from outrider.verifier_service.messages.draft import Draft
from outrider.verifier_service.messages.request import (
    FinishReason,
    GenerationRequest,
    Request,
    SamplingParams,
    TokenLogprobs,
)
from outrider.verifier_service.sampling.entries import VerificationEntry
from outrider.verifier_service.sampling.grammar import GrammarCompiler, GrammarState
from outrider.verifier_service.sampling.logits_processors import LogitEdits, LogitsProcessor
from outrider.verifier_service.sampling.logprobs import LogprobsQuery, shape_of_logprobs, token_logprobs
from outrider.verifier_service.sampling.thoughts import ThoughtState
from outrider.verifier_service.scheduling.outcome import Outcome
from outrider.verifier_service.scheduling.schedule import ScheduledRequest


class RequestExtras:
    """The extras of all requests of one engine; most requests have none."""

    def __init__(self, limits: RequestLimits, grammars: GrammarCompiler | None) -> None:
        """Without `grammars`, structured output is refused."""
        self._limits, self._grammars = limits, grammars
        self._processors: dict[str, LogitsProcessor] = {}
        self._grammar_states: dict[str, GrammarState | ThoughtState] = {}
        self._prompt_logprobs: dict[str, list[TokenLogprobs | None]] = {}  # until a request's first output

    @property
    def request_ids(self) -> set[str]:
        """The requests that have extras."""
        return {*self._processors, *self._grammar_states, *self._prompt_logprobs}

    def open_grammar(self, sampling: SamplingParams) -> GrammarState | ThoughtState | None:
        """Return the grammar's state before the first token; None: no grammar. Raises `ValueError`."""
        if ends_by_text(sampling) and self._grammars is None:
            raise ValueError("stop: this engine does not know the text of its tokens, which beam search needs")
        if not sampling.has_mask:
            return None
        if self._grammars is None:
            raise ValueError("structured: this engine does not know the text of its tokens")
        ends = (*sampling.stop_token_ids, *self._limits.eos_token_ids)
        if sampling.thought is not None:
            return self._grammars.open_after(sampling.thought, sampling.structured, ends)
        assert sampling.structured is not None
        return self._grammars.open(sampling.structured, ends)

    def add(self, message: GenerationRequest, grammar_state: GrammarState | ThoughtState | None) -> None:
        """Set up a request's extras."""
        request_id, sampling, num_prompt_tokens = message.request_id, message.sampling, len(message.prompt_token_ids)
        if grammar_state is not None:
            self._grammar_states[request_id] = grammar_state
        if LogitsProcessor.is_needed(sampling):
            self._processors[request_id] = LogitsProcessor(
                sampling,
                num_prompt_tokens=num_prompt_tokens,
                stop_token_ids=self._limits.stop_token_ids(sampling),
                vocab_size=self._limits.vocab_size,
                mask=grammar_state,
            )
        if sampling.prompt_logprobs is not None and not message.output_token_ids:
            self._prompt_logprobs[request_id] = [None] * num_prompt_tokens

    def forget(self, request_id: str) -> None:
        """Drop a request's extras."""
        self._processors.pop(request_id, None)
        self._grammar_states.pop(request_id, None)
        self._prompt_logprobs.pop(request_id, None)

    def needs_logits(self, requests: Sequence[Request]) -> bool:
        """Return whether the logits of any of them are edited, or read for more than their tokens."""
        others = self._prompt_logprobs.keys() | self._processors.keys()
        return any(
            request.sampling.logprobs is not None or request.sampling.beams is not None or request.request_id in others
            for request in requests
        )

    def are_edited(self, request_ids: Iterable[str]) -> bool:
        """Return whether the logits of any of them are edited, by what tokens come before."""
        return not self._processors.keys().isdisjoint(request_ids)

    def verification_entries(self, items: Sequence[ScheduledRequest]) -> list[VerificationEntry]:
        """Return what verification must know of the items that sample."""
        edited = self._processors
        return [
            VerificationEntry(
                (request := item.request).sampling,
                item.draft,
                len(request.token_ids),
                self._edits(request, item.draft) if request.request_id in edited else None,
            )
            for item in items
            if item.samples
        ]

    def _edits(self, request: Request, draft: Draft | None) -> LogitEdits | None:
        processor = self._processors[request.request_id]
        draft_token_ids, parents = ((), None) if draft is None else (draft.token_ids, draft.parents)
        return processor.edits(request.token_ids, draft_token_ids, parents)

    def error(self, request: Request) -> str | None:
        """Return the grammar's error, which ends the request; None: no error."""
        state = self._grammar_states.get(request.request_id)
        return None if state is None else state.error

    def until_finished(
        self, request: Request, verified: Sequence[int], num_tokens: int
    ) -> tuple[list[int], FinishReason | None]:
        """Cut verified tokens as `RequestLimits.until_finished` does; after one token if the grammar has failed."""
        if verified and self.error(request) is not None:
            return list(verified[:1]), FinishReason.ERROR
        return self._limits.until_finished(request, verified, num_tokens)

    def note_forced(self, outcomes: Sequence[Outcome]) -> None:
        """Set each request's `forced_ids` to the tokens that its grammar forces next, for the drafter."""
        states = self._grammar_states
        for request in (one.item.request for one in outcomes if one.finish_reason is None) if states else ():
            if (state := states.get(request.request_id)) is not None:
                is_wanted = request.plan.draft_length > 0
                output = request.token_ids[request.num_prompt_tokens :] if is_wanted else []
                request.forced_ids = state.forced_ids(output) if is_wanted else ()

    def keep_prompt_logprobs(self, outcomes: Sequence[Outcome], logits: torch.Tensor) -> None:
        """Keep the logprobs of the prompt tokens that the step's rows predict; a recomputed chunk gives the same."""
        if not self._prompt_logprobs:
            return
        kept: list[tuple[list[TokenLogprobs | None], int]] = []
        queries: list[LogprobsQuery] = []
        for outcome in outcomes:
            item, row = outcome.item, outcome.first_row - outcome.item.num_prompt_rows
            entries = self._prompt_logprobs.get(item.request.request_id)
            if entries is None:
                continue
            start = item.request.num_computed_tokens + 1
            token_ids = item.request.token_ids[start : start + item.num_prompt_rows]
            kept.append((entries, start))
            sampling, rows = item.request.sampling, range(row, row + len(token_ids))
            num_top, shape = sampling.prompt_logprobs or 0, shape_of_logprobs(sampling)
            queries.append(LogprobsQuery(rows=rows, token_ids=token_ids, num_top=num_top, shape=shape))
        for (entries, start), found in zip(kept, token_logprobs(logits, queries), strict=True):
            entries[start : start + len(found)] = found

    def take_prompt_logprobs(self, request: Request) -> tuple[TokenLogprobs | None, ...] | None:
        """Return a request's prompt logprobs, once; None if they were not asked for, or taken before."""
        found = self._prompt_logprobs.pop(request.request_id, None)
        return None if found is None else tuple(found)
