"""Whether a request can run at all: alone in the pool, with all of its beams."""

from __future__ import annotations

from outrider.verifier_service.messages.request import Request
from outrider.verifier_service.scheduling.kv_cache import BlockPool


def check_fits(request: Request, pool: BlockPool, num_tokens: int, *, max_model_len: int, max_num_seqs: int) -> None:
    """Raise `ValueError` naming what a request cannot have. `num_tokens`: those that it can come to."""
    if not 0 < request.num_prompt_tokens < max_model_len:
        raise ValueError(
            f"prompt_token_ids: a prompt of {request.num_prompt_tokens} tokens; it must have at least 1 "
            f"and leave room for one more within the model's maximum of {max_model_len}"
        )
    if request.num_tokens >= num_tokens:
        raise ValueError(f"output_token_ids: nothing is left to generate after {request.num_output_tokens} tokens")
    if request.is_background and request.num_seats > 1:
        raise ValueError("is_background: not with beam search")
    if request.num_seats > max_num_seqs:
        raise ValueError(f"n: {request.num_seats} beams, and at most {max_num_seqs} requests run at a time")
    num_shared = (request.num_prompt_tokens - 1) // pool.block_size  # by beams, however they part
    # The last token needs no KV: nothing follows it.
    num_blocks = num_shared + request.num_seats * (pool.num_blocks_for(num_tokens - 1) - num_shared)
    if num_blocks > pool.num_blocks:
        raise ValueError(
            f"prompt and max_tokens need {num_blocks} KV blocks of {pool.block_size} tokens, "
            f"the whole pool has {pool.num_blocks}"
        )
