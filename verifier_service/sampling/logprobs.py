"""The model's own log probabilities of tokens, before penalties, biases, temperature and truncation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.verifier_service.gpu.transfers import upload
from outrider.verifier_service.messages.request import TokenLogprobs
from outrider.verifier_service.sampling.sampler import top_candidates

_ENTRY_BYTES = 80  # of one token on the wire, its field names included
_ALTERNATIVE_BYTES = 14  # an id of five bytes and a float of nine


def encoded_bytes(num_tokens: int, num_top: int) -> int:
    """Return how many bytes the entries of `num_tokens` tokens take on the wire, at most."""
    return num_tokens * (_ENTRY_BYTES + num_top * _ALTERNATIVE_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsQuery:
    """Tokens whose log probabilities are asked for: the i-th of `rows` predicts the i-th token."""

    rows: Sequence[int]
    token_ids: Sequence[int]
    num_top: int  # how many of the likeliest tokens are asked for, too


def token_logprobs(logits: torch.Tensor, queries: Sequence[LogprobsQuery]) -> list[list[TokenLogprobs]]:
    """Return one entry per token of each query, from the rows that are asked for alone.

    logits float32 [num_rows, vocab_size], the model's own. Equal logits have equal ranks; among the likeliest tokens
    they stand by ascending id.
    """
    assert (logits.dtype, logits.ndim) == (torch.float32, 2), (logits.dtype, logits.shape)
    wanted = [
        (row, token_id, query.num_top)
        for query in queries
        for row, token_id in zip(query.rows, query.token_ids, strict=True)
    ]
    entries = iter(_entries(logits, wanted) if wanted else [])
    return [list(itertools.islice(entries, len(query.token_ids))) for query in queries]


def _entries(logits: torch.Tensor, wanted: Sequence[tuple[int, int, int]]) -> list[TokenLogprobs]:
    """Answer (row, token id, num_top) triples."""
    numbers = np.array([(row, token_id) for row, token_id, _ in wanted], np.int64)
    rows, ids = upload([numbers[:, 0], numbers[:, 1]], logits.device)
    logprobs = torch.log_softmax(logits.index_select(0, rows), dim=1)  # [len(wanted), vocab_size]
    chosen = logprobs.gather(1, ids[:, None])  # [len(wanted), 1]
    ranks = (logprobs > chosen).sum(dim=1, keepdim=True) + 1
    most = min(max(count for _, _, count in wanted), logits.shape[1])
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
