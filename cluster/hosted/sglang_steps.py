"""SGLang's decode batches as steps of the plug-in, and drafts as what its NGRAM path verifies; imports no SGLang.

Every row of a batch has the same width: the request's last token, its draft, and padding. Padding goes on with the
chain: as siblings of one token, padding tokens would add up that token's probability.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from outrider.cluster.hosted.drafting import HostRequest, HostRow
from outrider.cluster.hosted.plugin import HostStep
from outrider.verifier_service.messages.request import GREEDY_TEMPERATURE

PADDING = 0  # a token id; verified as any draft token, so its value changes no law
Propose = Callable[[int, Callable[[], HostStep]], list[list[int]]]


class Given(NamedTuple):
    """What a request had when it was last given a draft."""

    num_tokens: int
    num_draft_tokens: int


class BatchView:
    """A `Host` over the requests of SGLang's batch."""

    def __init__(self, requests: Sequence[Any], began_s: float, *, draft_seeded: bool) -> None:
        self._requests, self._draft_seeded = requests, draft_seeded
        self.began_s = began_s

    def describe(self, row: int) -> HostRequest:
        request = self._requests[row]
        sampling = request.sampling_params
        is_seeded = sampling.sampling_seed is not None and sampling.temperature > GREEDY_TEMPERATURE
        eos = () if sampling.ignore_eos else request.eos_token_ids or ()
        return HostRequest(
            num_prompt_tokens=len(request.origin_input_ids),
            max_tokens=sampling.max_new_tokens or 1 << 30,
            num_speculative_tokens=0 if is_seeded and not self._draft_seeded else None,
            stop_token_ids=frozenset((*eos, *(sampling.stop_token_ids or ()))),
        )

    def token_ids(self, row: int, start: int, stop: int) -> list[int]:
        request = self._requests[row]
        num_prompt = len(request.origin_input_ids)
        output = request.output_ids[max(0, start - num_prompt) : max(0, stop - num_prompt)]
        return [*request.origin_input_ids[start:stop], *output]

    def block_table(self, row: int) -> Sequence[int]:
        raise NotImplementedError("drafters that read states are refused")


class DraftedBatches:
    """Reads one batch after the other, and remembers which drafts it has given.

    SGLang calls for drafts at the beginning of a decode step, when the last step's tokens are in `output_ids`. So what
    a step did is seen at the next call. A request that is absent from a batch has left, or its KV was taken away and it
    begins again.
    """

    def __init__(self, width: int, *, draft_seeded: bool) -> None:
        """`width`: `speculative_num_draft_tokens`, a request's tokens in every step."""
        if width < 2:
            raise ValueError(f"--speculative-num-draft-tokens must be at least 2, not {width}: one token is no draft")
        self._width, self._draft_seeded = width, draft_seeded
        self._given: dict[str, Given] = {}
        self._chain = np.tril(np.ones((width, width), np.uint8)).ravel()

    def request_ids(self) -> Iterable[str]:
        """Return the ids of the last batch; any thread may ask."""
        return tuple(self._given)

    def clear(self) -> None:
        self._given = {}

    def draft(
        self, requests: Sequence[Any], began_s: float, propose: Propose
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        """Return a batch's tokens [num_requests * width] and tree masks [num_requests * width * width].

        `began_s`: when the last step began, by the monotonic clock.
        """
        given = self._given

        def read() -> HostStep:
            rows = [_row_of(request, given.get(request.rid)) for request in requests]
            gone = given.keys() - {request.rid for request in requests}
            return rows, gone, BatchView(requests, began_s, draft_seeded=self._draft_seeded)

        drafts = [draft[: self._width - 1] for draft in propose(len(requests), read)]
        self._given = {
            request.rid: Given(_num_tokens(request), len(draft))
            for request, draft in zip(requests, drafts, strict=True)
        }
        rows = (
            (_last_token(request), *draft, *itertools.repeat(PADDING, self._width - 1 - len(draft)))
            for request, draft in zip(requests, drafts, strict=True)
        )
        tokens = np.fromiter(itertools.chain.from_iterable(rows), np.int64, len(requests) * self._width)
        return tokens, np.tile(self._chain, len(requests))


def _num_tokens(request: Any) -> int:
    return len(request.origin_input_ids) + len(request.output_ids)


def _last_token(request: Any) -> int:
    return int((request.output_ids or request.origin_input_ids)[-1])


def _row_of(request: Any, given: Given | None) -> HostRow:
    """Return what the last step did for a request; `given` None: it computed its prompt."""
    num_tokens = _num_tokens(request)
    if given is None or given.num_tokens > num_tokens:
        num_prompt, num_drafted, num_new = num_tokens - len(request.output_ids), 0, min(1, len(request.output_ids))
        num_scheduled = max(1, num_prompt)
    else:
        num_drafted, num_new = given.num_draft_tokens, num_tokens - given.num_tokens
        num_scheduled = 1 + num_drafted
    return HostRow(
        request_id=request.rid,
        num_tokens=num_tokens,
        num_scheduled_tokens=num_scheduled,
        num_draft_tokens=num_drafted,
        num_new_tokens=num_new,
    )
