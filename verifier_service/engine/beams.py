"""Beam searches beside the step loop: each is a few running requests, whose next tokens are chosen together.

    step    every beam is an ordinary request: one token each, in one step, next to each other
    read    the likeliest tokens of their rows
    choose  the next beams of all rows (`sampling.beam_search`), which may part, or end
    go on   each request gets the tokens and shares the blocks of the beam that it follows from; the others are freed

A beam writes into a block of its own: the last one is copied if two beams go on in it. A beam whose row is here stands
still until those of its siblings are. If one of them loses its KV to a more senior request, the search starts anew:
beams that wait for blocks while their siblings hold some could block each other for ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from outrider.verifier_service.engine.launched_step import LaunchedStep
from outrider.verifier_service.engine.request_limits import RequestLimits
from outrider.verifier_service.messages.request import (
    FinishReason,
    Request,
    RequestOutput,
    SpeculationMetrics,
    TokenLogprobs,
)
from outrider.verifier_service.sampling.beam_search import Beam, Search, ends_in_text
from outrider.verifier_service.sampling.grammar import GrammarCompiler
from outrider.verifier_service.sampling.logprobs import LogprobsQuery, token_logprobs
from outrider.verifier_service.scheduling.outcome import Outcome
from outrider.verifier_service.scheduling.scheduler import Scheduler


@dataclass(slots=True)
class _Group:
    search: Search
    requests: list[Request]  # one for each live beam, in order; the first is the client's
    rows: dict[str, TokenLogprobs] = field(default_factory=dict)  # read in this round, by request

    @property
    def is_broken(self) -> bool:
        """Whether a beam has lost its KV since the first row was read."""
        has_begun = len(self.requests) > 1 or bool(self.rows)
        return has_begun and not all(request.block_table for request in self.requests)


class BeamSearches:
    """All beam searches of an engine."""

    def __init__(
        self,
        requests: dict[str, Request],
        scheduler: Scheduler,
        limits: RequestLimits,
        grammars: GrammarCompiler | None,
        *,
        ended: Callable[[Request, FinishReason | None], RequestOutput],
        forget: Callable[[Request], None],
    ) -> None:
        """`requests` are the engine's, by id. `ended` makes an output, `forget` ends a request and frees its KV."""
        self._requests, self._scheduler, self._limits, self._grammars = requests, scheduler, limits, grammars
        self._ended, self._forget = ended, forget
        self._groups: dict[str, _Group] = {}  # by the client's request
        self._group_of: dict[str, _Group] = {}  # by each of a group's requests

    @property
    def request_ids(self) -> set[str]:
        """The requests with any state here."""
        return {*self._group_of, *self._groups}

    def add(self, request: Request) -> None:
        """Begin a search, if the request, which the scheduler has, asks for one."""
        if request.sampling.beams is not None:
            group = _Group(self._search_of(request), [request])
            self._groups[request.request_id] = self._group_of[request.request_id] = group

    def drop(self, request_id: str) -> list[Request]:
        """Drop a request; return the other beams' requests if it is the client's, so that they are forgotten, too."""
        group = self._group_of.pop(request_id, None)
        if group is None or self._groups.pop(request_id, None) is None:
            return []
        return group.requests[1:]

    def restart_broken(self) -> None:
        """Start the searches anew whose beams have not all kept their KV. No step with beams may be in flight."""
        for group in [group for group in self._groups.values() if group.is_broken]:
            for fork in group.requests[1:]:
                self._forget(fork)
            first = group.requests[0]
            self._scheduler.remove(first.request_id)
            del first.token_ids[first.num_prompt_tokens :]
            first.block_hashes.clear()
            first.stands_until_s = None
            self._scheduler.add(first)
            group.search, group.requests, group.rows = self._search_of(first), [first], {}

    def advance(
        self, step: LaunchedStep, outcomes: Sequence[Outcome], outputs: Iterable[RequestOutput]
    ) -> list[RequestOutput]:
        """Read a committed step's rows, and choose; return the outputs, with searches' own in place of beams'."""
        told = [output for output in outputs if output.request_id not in self._group_of]
        if self._groups:
            self._read(step, outcomes)
            told += self._choose()
        return told

    def _search_of(self, request: Request) -> Search:
        sampling = request.sampling
        assert sampling.beams is not None
        texts: dict[str, Callable[[Sequence[int]], bool]] = {}
        if sampling.beams.stop:
            assert self._grammars is not None, "`RequestExtras.open_grammar` has checked it"
            texts["ends_in_text"] = ends_in_text(sampling.beams.stop, self._grammars.tokenizer().decode_bytes)
        return Search(
            sampling.beams,
            end_token_ids=self._limits.stop_token_ids(sampling),
            max_tokens=self._limits.room(request, request.num_prompt_tokens),
            **texts,
        )

    def _read(self, step: LaunchedStep, outcomes: Sequence[Outcome]) -> None:
        """Keep the rows of all beams in the step, which stand still from now on."""
        mine = [each for each in outcomes if each.committed and each.item.request.request_id in self._group_of]
        queries = [
            LogprobsQuery(
                rows=outcome.rows,
                token_ids=outcome.committed,
                num_top=self._group_of[outcome.item.request.request_id].search.num_candidates,
            )
            for outcome in mine
        ]
        for outcome, (row,) in zip(mine, token_logprobs(step.logits, queries), strict=True):
            request = outcome.item.request
            self._group_of[request.request_id].rows[request.request_id] = row
            request.stands_until_s = math.inf

    def _choose(self) -> Iterator[RequestOutput]:
        """Choose the next beams of every group whose rows are all here; yield the outputs of those that are over."""
        for group in [group for group in self._groups.values() if len(group.rows) == len(group.requests)]:
            if group.is_broken:
                continue
            group.search.advance([group.rows[request.request_id] for request in group.requests])
            group.rows = {}
            if group.search.is_over:
                yield self._output(group)
                self._forget(group.requests[0])
            else:
                self._go_on(group)

    def _go_on(self, group: _Group) -> None:
        """Let the requests follow the beams: the i-th request the i-th beam, from its parent's KV."""
        before, beams = group.requests, group.search.live
        requests = before[: len(beams)]
        requests += [_fork(before[0], number) for number in range(len(requests), len(beams))]
        self._scheduler.go_on(requests, [before[beam.parent] for beam in beams])
        for request, beam in zip(requests, beams, strict=True):
            request.token_ids[request.num_prompt_tokens :] = beam.token_ids
            request.stands_until_s = None
            self._requests[request.request_id], self._group_of[request.request_id] = request, group
        group.requests = requests
        for dropped in before[len(beams) :]:
            self._forget(dropped)

    def _output(self, group: _Group) -> RequestOutput:
        found = group.search.found
        output = self._ended(group.requests[0], found[0].finish_reason)
        num_top = group.requests[0].sampling.logprobs
        return replace(output, beams=tuple(_told(output, beam, num_top) for beam in found))


def _fork(first: Request, number: int) -> Request:
    """Return a further beam's request, without KV."""
    return replace(
        first,
        request_id=f"{first.request_id}/{number}",
        token_ids=first.token_ids[: first.num_prompt_tokens],
        block_table=[],
        block_hashes=[],
        group_id=None,
        history_key="",
        may_learn=False,
        inter_token_time=None,
        trace_parent=None,
        metrics=SpeculationMetrics(),
        num_seats=0,
    )


def _told(output: RequestOutput, beam: Beam, num_top: int | None) -> RequestOutput:
    """Return a beam as its choice is told of it."""
    logprobs = None if num_top is None else tuple(_with_top(entry, num_top) for entry in beam.logprobs)
    return replace(output, token_ids=tuple(beam.token_ids), logprobs=logprobs, finish_reason=beam.finish_reason)


def _with_top(entry: TokenLogprobs, num_top: int) -> TokenLogprobs:
    return replace(entry, top_token_ids=entry.top_token_ids[:num_top], top_logprobs=entry.top_logprobs[:num_top])
