"""Beam search over one output: which beams go on, which have ended, and when none can do better.

The rules are those of transformers' `generate(num_beams=...)`, whose tokens and scores it gives. vLLM's differ: its
lengths contain the prompt and no end token, and it never stops before `max_tokens`.

    live    |<- width beams, the likeliest first ->|
    rows    their likeliest next tokens  ->  num_candidates candidates, the likeliest first
    found   those among the first `width` candidates that end here, the best `width` of all steps
    live    the first `width` candidates that do not end
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from outrider.verifier_service.messages.beam_search import BeamSearch
from outrider.verifier_service.messages.request import FinishReason, TokenLogprobs


@dataclass(slots=True)
class Beam:
    """One output, its end token included."""

    token_ids: list[int] = field(default_factory=list)
    logprob: float = 0.0  # sum over the tokens
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of each token, with the likeliest of its row
    parent: int = 0  # its place among the live beams of before
    finish_reason: FinishReason | None = None
    score: float = 0.0  # once it has ended


class Search:
    """The beams of one request."""

    def __init__(
        self,
        beams: BeamSearch,
        *,
        end_token_ids: Collection[int],
        max_tokens: int,
        ends_in_text: Callable[[Sequence[int]], bool] = lambda token_ids: False,
    ) -> None:
        """`ends_in_text`: whether an output ends by a stop text in its last token."""
        self._beams, self._end_token_ids, self._max_tokens = beams, end_token_ids, max_tokens
        self._ends_in_text = ends_in_text
        # as many as leave `width` that go on, if all of the others are followed by an end token
        self.num_candidates = max(2, 1 + len(end_token_ids)) * beams.width
        self.live = [Beam()]
        self.found: list[Beam] = []  # the best first, at most `width`

    def advance(self, rows: Sequence[TokenLogprobs]) -> None:
        """Choose the beams of the next step. `rows`: of each live beam, with its `num_candidates` likeliest tokens."""
        candidates = heapq.nsmallest(
            self.num_candidates,
            (
                (-self.live[parent].logprob - logprob, parent, place)
                for parent, row in enumerate(rows)
                for place, logprob in enumerate(row.top_logprobs)
            ),
        )
        going_on: list[Beam] = []
        for rank, (_, parent, place) in enumerate(candidates):
            beam = self._child(parent, rows[parent], place)
            if beam.finish_reason is None:
                going_on.append(beam)
            elif rank < self._beams.width:
                self.found.append(beam)
        self.live = going_on[: self._beams.width]
        self.found = sorted(self.found, key=lambda beam: -beam.score)[: self._beams.width]

    @property
    def is_over(self) -> bool:
        """Whether no live beam could come before one that was found, by its score as it stands."""
        if not self.live:
            return True
        best = self.live[0]
        return len(self.found) == self._beams.width and self._score(best) <= self.found[-1].score

    def _child(self, parent: int, row: TokenLogprobs, place: int) -> Beam:
        before, logprob = self.live[parent], row.top_logprobs[place]
        token_id = row.top_token_ids[place]
        rank = 1 + sum(other > logprob for other in row.top_logprobs)
        beam = Beam(
            token_ids=[*before.token_ids, token_id],
            logprob=before.logprob + logprob,
            logprobs=[*before.logprobs, replace(row, token_id=token_id, logprob=logprob, rank=rank)],
            parent=parent,
        )
        beam.finish_reason = self._end_of(beam)
        beam.score = self._score(beam)
        return beam

    def _end_of(self, beam: Beam) -> FinishReason | None:
        if beam.token_ids[-1] in self._end_token_ids or self._ends_in_text(beam.token_ids):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(beam.token_ids) == self._max_tokens else None

    def _score(self, beam: Beam) -> float:
        return float(beam.logprob / len(beam.token_ids) ** self._beams.length_penalty)


def ends_in_text(stop: Collection[str], bytes_of: Callable[[list[int]], bytes]) -> Callable[[Sequence[int]], bool]:
    """Return whether an output's last token has the last byte of a stop text; `bytes_of` is its tokens' text."""
    texts = [text.encode() for text in stop]
    longest = max(map(len, texts), default=0)

    def ends(token_ids: Sequence[int]) -> bool:
        last = bytes_of([token_ids[-1]])
        text = bytes_of(list(token_ids[-longest - 1 :]))  # every token but special ones has a byte at least
        return any(each in text[max(0, len(text) - len(last) - len(each) + 1) :] for each in texts)

    return ends
