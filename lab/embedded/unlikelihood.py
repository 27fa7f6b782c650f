"""Teach a small model not to loop: sequence-level unlikelihood training (Welleck et al., 2020).

A small model's greedy text falls into loops, and a loop is trivial to draft: every speed-up measured on it is a lie.
So the model continues a prefix greedily and is then taught that the tokens which completed a repeated 4-gram were
unlikely, beside its ordinary loss on the text itself.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

GRAM = 4
PREFIX = 64
CONTINUATION = 128
ROWS = 16  # penalised in one call
WEIGHT = 3.0  # beside a cross-entropy of weight 1
REFRESH_EVERY = 4  # calls that share one pool of greedy text: generating is dearer than learning from it


@torch.no_grad()
def continue_greedily(model: LlamaForCausalLM, prefix: Tensor, num_tokens: int) -> Tensor:
    """Return the greedy continuations of equally long prefixes: [rows, prefix] -> [rows, num_tokens]."""
    cache, fresh, tokens = DynamicCache(config=model.config), prefix, []
    for _ in range(num_tokens):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=fresh, past_key_values=cache, logits_to_keep=1).logits  # [rows, 1, vocab]
        fresh = logits.argmax(-1)  # [rows, 1]
        tokens.append(fresh)
    return torch.cat(tokens, dim=1)


def completes_repeat(tokens: Tensor) -> Tensor:
    """Mark the tokens that end a 4-gram already seen in their row: [rows, num_tokens] -> bool of the same shape."""
    marks = torch.zeros_like(tokens, dtype=torch.bool)
    for row, ids in enumerate(tokens.tolist()):
        seen: set[tuple[int, ...]] = set()
        for end in range(GRAM, len(ids) + 1):
            gram = tuple(ids[end - GRAM : end])
            marks[row, end - 1] = gram in seen
            seen.add(gram)
    return marks


def unlikelihood(logits: Tensor, tokens: Tensor, marks: Tensor) -> Tensor:
    """Return the mean over all tokens of -log(1 - p) at the marked ones.

    Shapes: logits [rows, num_tokens, vocab], tokens and marks [rows, num_tokens].
    """
    # 1 - p as the share of all other tokens: finite, and with a gradient, where p rounds to 1.
    others = logits.scatter(-1, tokens[..., None], float("-inf"))  # [rows, num_tokens, vocab]
    penalties = logits.logsumexp(-1) - others.logsumexp(-1)  # [rows, num_tokens]
    return (penalties * marks).sum() / marks.numel()


class LoopPenalty:
    """A penalty on the model's own loops, which writes a new pool of greedy text every few calls."""

    def __init__(self) -> None:
        self.pool = torch.empty(0, PREFIX + CONTINUATION, dtype=torch.long)  # [pool_rows, prefix + continuation]
        self.num_calls = 0

    def __call__(self, model: LlamaForCausalLM, batch: Tensor) -> Tensor:
        """Return the unlikelihood of the repeats in some rows of the pool; `batch` lends the prefixes."""
        if self.num_calls % REFRESH_EVERY == 0:
            prefix = batch[:, :-1].reshape(-1, 2 * PREFIX)[:, :PREFIX]
            self.pool = torch.cat([prefix, continue_greedily(model, prefix, CONTINUATION)], dim=1)
        first = self.num_calls * ROWS % len(self.pool)
        text = self.pool[first : first + ROWS]  # [rows, prefix + continuation]
        self.num_calls += 1
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=text[:, :-1], use_cache=False, logits_to_keep=CONTINUATION).logits.float()
        continuation = text[:, PREFIX:]
        return WEIGHT * unlikelihood(logits, continuation, completes_repeat(continuation))
