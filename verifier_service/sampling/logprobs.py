"""Log probabilities of tokens, in two modes under vLLM's names.

    raw_logprobs        the model's own, before anything else
    processed_logprobs  of the law that a token was drawn from: after biases, bad words, minimum length, penalties and
                        grammar, then temperature, top_k, top_p and min_p

As in vLLM, a greedy request's processed ones are of its edited logits at temperature 1, without truncation. A prompt's
tokens were not drawn: their processed ones are after temperature and truncation alone, since the rest depends on where
the output began. A token that the law cannot draw has LOWEST_LOGPROB. Drafts change nothing: a token's row follows
what was committed before the token, whichever rule accepted it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.verifier_service.gpu.transfers import upload
from outrider.verifier_service.messages.request import (
    LOWEST_LOGPROB,
    LogprobsMode,
    SamplingParams,
    TokenLogprobs,
    VerificationMode,
)
from outrider.verifier_service.sampling.logits_processors import LogitEdits, SentEdits
from outrider.verifier_service.sampling.sampler import SamplingShape, log_laws, top_candidates

_ENTRY_BYTES = 80  # of one token on the wire, its field names included
_ALTERNATIVE_BYTES = 14  # an id of five bytes and a float of nine
_MODELS_OWN = SamplingParams()  # temperature 1, and nothing is truncated


def encoded_bytes(num_tokens: int, num_top: int) -> int:
    """Return how many bytes the entries of `num_tokens` tokens take on the wire, at most."""
    return num_tokens * (_ENTRY_BYTES + num_top * _ALTERNATIVE_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsQuery:
    """Tokens whose log probabilities are asked for: the i-th of `rows` predicts the i-th token."""

    rows: Sequence[int]
    token_ids: Sequence[int]
    num_top: int  # how many of the likeliest tokens are asked for, too
    shape: SamplingShape = _MODELS_OWN  # how the rows become laws
    edits: LogitEdits | None = None  # made to the rows before that: as many rows, in the same order


def shape_of_logprobs(sampling: SamplingParams) -> SamplingShape:
    """Return how the rows behind a request's log probabilities become laws."""
    is_raw = sampling.logprobs_mode is LogprobsMode.RAW or sampling.mode is VerificationMode.GREEDY
    return _MODELS_OWN if is_raw else sampling


def token_logprobs(logits: torch.Tensor, queries: Sequence[LogprobsQuery]) -> list[list[TokenLogprobs]]:
    """Return one entry per token of each query, from the rows that are asked for alone.

    logits float32 [num_rows, vocab_size], the model's own. Tokens of equal log probability have equal ranks; among the
    likeliest tokens they stand by ascending id.
    """
    assert (logits.dtype, logits.ndim) == (torch.float32, 2), (logits.dtype, logits.shape)
    wanted = [
        (row, token_id, query.num_top)
        for query in queries
        for row, token_id in zip(query.rows, query.token_ids, strict=True)
    ]
    if not wanted:
        return [[] for _ in queries]
    numbers = np.array([(row, token_id) for row, token_id, _ in wanted], np.int64)
    rows, ids = upload([numbers[:, 0], numbers[:, 1]], logits.device)
    entries = iter(_entries(_logprobs(logits.index_select(0, rows), queries), ids, wanted))
    return [list(itertools.islice(entries, len(query.token_ids))) for query in queries]


def _logprobs(logits: torch.Tensor, queries: Sequence[LogprobsQuery]) -> torch.Tensor:
    """Return the log probabilities of all rows of the queries, one query's after the other's, as are the logits."""
    starts = itertools.accumulate((len(query.rows) for query in queries), initial=0)
    edits = [(start, query.edits) for start, query in zip(starts, queries, strict=False) if query.edits is not None]
    if edits:
        logits = SentEdits.of(edits, logits.shape[1], logits.device).applied(logits)
    shapes = [query.shape for query in queries for _ in query.rows]
    if not edits and all(shape is _MODELS_OWN for shape in shapes):
        return torch.log_softmax(logits, dim=1)
    return log_laws(logits, shapes).clamp_(min=LOWEST_LOGPROB)


def _entries(logprobs: torch.Tensor, ids: torch.Tensor, wanted: Sequence[tuple[int, int, int]]) -> list[TokenLogprobs]:
    """Answer (row, token id, num_top) triples: logprobs [len(wanted), vocab_size], ids int64 [len(wanted)]."""
    chosen = logprobs.gather(1, ids[:, None])  # [len(wanted), 1]
    ranks = (logprobs > chosen).sum(dim=1, keepdim=True) + 1
    most = min(max(count for _, _, count in wanted), logprobs.shape[1])
    top_logprobs, top_ids = top_candidates(logprobs, most)  # [len(wanted), most]
    # one read for all: doubles hold the floats and, read as integers, stand beside them
    floats = torch.cat([chosen, top_logprobs], dim=1).double().view(torch.int64)
    read = torch.cat([ranks, top_ids, floats], dim=1).cpu()
    integers, found = read[:, : most + 1].tolist(), read[:, most + 1 :].contiguous().view(torch.float64).tolist()
    return [
        TokenLogprobs(
            token_id=token_id,
            logprob=logprob,
            rank=rank,
            top_token_ids=tuple(best_ids[:count]),
            top_logprobs=tuple(best[:count]),
        )
        for (_, token_id, count), (rank, *best_ids), (logprob, *best) in zip(wanted, integers, found, strict=True)
    ]
