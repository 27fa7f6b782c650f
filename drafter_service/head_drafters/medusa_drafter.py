"""Draft with Medusa heads (Cai et al. 2024): every position at once, from the target's last hidden state alone.

The heads do not see each other's guesses: at each depth every node has the same candidates. So a chain drawn from
their rows has exactly those rows as its law, and a tree is part of the Cartesian product of the heads' best tokens. Its
best nodes are found one by one with a heap; the product itself is never made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

import torch

from outrider.drafter_service.engine.draft_sampler import Children, launch_children, read_children
from outrider.drafter_service.engine.drafter import Ask, SessionKey
from outrider.drafter_service.engine.product_tree import best_of_product
from outrider.drafter_service.engine.tree_growth import answer_of, chain_growth, result_of
from outrider.drafter_service.head_drafters.last_state import (
    LAST_STATE_NEEDS,
    draft_depth,
    first_within,
    has_state,
    last_states,
)
from outrider.drafter_service.heads.medusa import MedusaHeads
from outrider.verifier_service.gpu.transfers import upload_rows
from outrider.verifier_service.messages.draft import Draft


class MedusaDrafter:
    """A `Drafter` that keeps nothing between two asks."""

    def __init__(
        self,
        heads: MedusaHeads,
        *,
        vocab_size: int,
        max_model_len: int,
        rng: torch.Generator,
        top_n: int = 32,
        branching: int = 10,
    ) -> None:
        """Propose ids below `vocab_size`, the target's; the heads may know fewer or (padding) more.

        Rows on the wire have `top_n` tokens; a node of a tree has at most `branching` children.
        """
        if min(vocab_size, top_n, branching) < 1:
            raise ValueError("vocab_size, top_n and branching must be positive")
        if heads.token_map is not None and int(heads.token_map.min()) >= vocab_size:
            raise ValueError(f"vocab_size: no id of the heads' token_map is below {vocab_size}")
        self._heads = heads
        self._rng = rng
        self.vocab_size, self.max_model_len, self.needs = vocab_size, max_model_len, LAST_STATE_NEEDS
        self._top_n, self._branching = top_n, branching

    def draft(self, asks: Sequence[Ask], *, max_num_tokens: int) -> list[Draft]:
        """Answer as many asks as fit, oldest first, by one forward of the heads over all of them.

        Drafts are no longer than there are heads. An ask without a state gets its forced tokens alone.
        """
        depths = [draft_depth(ask, self._num_guesses(ask)) for ask in asks]
        taken = asks[: first_within(depths, max_num_tokens)]
        guesses = self._guess([ask for ask in taken if self._num_guesses(ask) > len(ask.forced_ids)])
        return [_answer(ask, depth, guesses[ask.ask_id]) for ask, depth in zip(taken, depths, strict=False)]

    def release(self, key: SessionKey) -> None:
        """Do nothing: nothing is kept."""

    def check_integrity(self, keys: Collection[SessionKey]) -> None:
        """Do nothing: nothing is kept."""

    def _num_guesses(self, ask: Ask) -> int:
        return min(ask.length, self._heads.num_heads) if has_state(ask, self._heads.hidden_size) else 0

    @torch.inference_mode()
    def _guess(self, asks: Sequence[Ask]) -> dict[int, list[Children]]:
        """Return the candidates at each depth after the forced tokens, by ask_id."""
        guesses: dict[int, list[Children]] = defaultdict(list)
        if not asks:
            return guesses
        states = last_states(asks, next(self._heads.parameters()))  # [num_asks, hidden_size]
        logits = self._heads(states, max(map(self._num_guesses, asks))).float()  # [num_heads, num_asks, vocab_size]
        for is_tree in (False, True):
            places = [
                (depth, index)
                for index, ask in enumerate(asks)
                if bool(ask.max_nodes) == is_tree
                for depth in range(len(ask.forced_ids), self._num_guesses(ask))
            ]
            if not places:
                continue
            found = launch_children(
                logits[tuple(upload_rows(rows, logits.device) for rows in zip(*places, strict=True))],
                [asks[index].sampling for _, index in places],
                [len(asks[index].token_ids) + depth for depth, index in places],
                self._rng,
                vocab_size=self.vocab_size,
                num_children=self._branching if is_tree else 1,
                top_n=self._top_n,
                sampled=not is_tree,
            )
            for (_, index), children in zip(places, read_children(found), strict=True):
                guesses[asks[index].ask_id].append(children)
        return guesses


def _answer(ask: Ask, depth: int, guesses: Sequence[Children]) -> Draft:
    if ask.max_nodes:
        return result_of(ask, best_of_product(guesses, ask.forced_ids[: ask.length], max_nodes=ask.max_nodes))
    chain = chain_growth(ask, depth)
    for children in guesses:
        chain.grow([children])
    return answer_of(ask, chain)
