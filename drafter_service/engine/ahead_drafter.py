"""What drafters that can run ahead have in common: sessions' states, the KV pool under them, the speculation cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic

from outrider.drafter_service.engine.engine import Ask, DraftResult
from outrider.drafter_service.engine.outcomes import Pace
from outrider.drafter_service.engine.sessions import SessionKey
from outrider.drafter_service.engine.speculation_cache import SpeculationCache, StateT
from outrider.verifier_service.scheduling.kv_cache import BlockPool


class AheadDrafter(ABC, Generic[StateT]):
    """The part of `RunsAhead` that does not depend on what a state holds."""

    def __init__(self, *, num_blocks: int, block_size: int, max_model_len: int, num_ahead_branches: int) -> None:
        """Outcomes of each draft are prepared for in `num_ahead_branches` branches; 0: in none."""
        self._pool = BlockPool(num_blocks, block_size, enable_prefix_caching=False)
        self._states: dict[SessionKey, StateT] = {}  # least recently asked first
        self.num_forwards = 0
        self._cache: SpeculationCache[StateT] | None = None
        if num_ahead_branches:
            self._cache = SpeculationCache(self._pool, num_branches=num_ahead_branches, max_model_len=max_model_len)

    @property
    def runs_ahead(self) -> bool:
        return self._cache is not None

    def expects(self, key: SessionKey) -> bool:
        return self._cache is not None and self._cache.expects(key)

    @abstractmethod
    def take(self, ask: Ask, pace: Pace | None) -> DraftResult | None:
        """As in `RunsAhead`."""

    @abstractmethod
    def run_ahead(self, *, max_num_tokens: int) -> int:
        """As in `RunsAhead`."""

    def forget_outcomes(self, key: SessionKey) -> None:
        if self._cache is not None:
            self._cache.drop(key)

    @abstractmethod
    def _reserve(self, state: StateT, share: int, *, asked: Sequence[StateT], younger: Sequence[StateT]) -> bool:
        """Give a state blocks for so many tokens more; False: it has to wait. See `kv_budget.reserve`."""

    def _num_following(self, states: Sequence[StateT], asked: Sequence[StateT]) -> list[int]:
        """Return how many tokens after its next one each state's chain is taken further: all, where it has room."""
        lefts: list[int] = []
        for state in states:
            left = max(0, state.growth.chain_left - 1) if state.growth is not None else 0
            lefts.append(left if left and self._reserve(state, left, asked=asked, younger=()) else 0)
        return lefts

    def has_spare_work(self) -> bool:
        return self._cache is not None and self._cache.has_work()

    def release(self, key: SessionKey) -> None:
        self.forget_outcomes(key)
        state = self._states.pop(key, None)
        if state is not None:
            self._pool.release(state.block_table)

    def _adopt(self, ask: Ask, branch: StateT) -> StateT:
        """Let a branch go on as its session's own state."""
        self._pool.release(self._states.pop(ask.key).block_table)
        self._states[ask.key] = branch  # most recently asked
        branch.ask = ask
        return branch
