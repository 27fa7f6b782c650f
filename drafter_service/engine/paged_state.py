"""What a paged drafter keeps of a session between two steps: KV blocks, the ask to answer, the draft in the making."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, Self, TypeVar

from outrider.drafter_service.engine.drafter import Ask
from outrider.drafter_service.engine.tree_growth import Growth


@dataclass(slots=True)
class PagedState(ABC):
    """One session's KV and draft. A forward's own kind of state adds which tokens the KV is of."""

    block_table: list[int] = field(default_factory=list)
    ask: Ask | None = None  # not answered yet; of a trunk: the answered one
    growth: Growth | None = None  # the draft for the ask

    @property
    def draft(self) -> Growth:
        assert self.growth is not None, "no draft in the making"
        return self.growth

    @property
    def asked(self) -> Ask:
        assert self.ask is not None, "nothing was asked for"
        return self.ask

    @property
    def is_complete(self) -> bool:
        return not self.draft.frontier

    @property
    @abstractmethod
    def num_slots(self) -> int:
        """Count the KV slots in use: the first ones of the block table."""

    @abstractmethod
    def num_slots_after(self, share: int) -> int:
        """Count the slots that a forward of `share` pending tokens needs."""

    @property
    @abstractmethod
    def num_pending(self) -> int:
        """Count the tokens to compute before the draft can grow, as far as one forward can compute them."""

    @property
    @abstractmethod
    def num_together(self) -> int:
        """Count the last of the pending tokens that one forward computes together or not at all."""

    @abstractmethod
    def lose_kv(self) -> None:
        """Begin again with no KV: another session has taken the blocks."""

    def settle(self) -> None:
        """Forget the draft; keep the KV that a later ask may go on from."""
        self.ask, self.growth = None, None

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise `AssertionError` if the state contradicts itself."""


StateT = TypeVar("StateT", bound=PagedState)


@dataclass(slots=True)
class Step(Generic[StateT]):
    """One forward: how many pending tokens of each state it computes, and the KV blocks to copy before."""

    states: list[StateT] = field(default_factory=list)
    shares: list[int] = field(default_factory=list)  # tokens of each state, at most its `num_pending`
    copy_sources: list[int] = field(default_factory=list)
    copy_targets: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(self.shares)

    @property
    def parts(self) -> Iterator[tuple[StateT, int]]:
        return zip(self.states, self.shares, strict=True)

    def add(self, state: StateT, share: int) -> None:
        self.states.append(state)
        self.shares.append(share)


class ForkableState(PagedState):
    """A state of a drafter that can run ahead: drafts for several outcomes go on from one state's KV."""

    @abstractmethod
    def fork(self, ask: Ask, num_accepted: int, growth: Growth) -> Self:
        """Return the state of an ask that goes on from `num_accepted` drafted tokens of this one, whose KV it shares.

        The new state has no blocks yet.
        """

    def continues(self, ask: Ask) -> bool:
        """Return whether what an ask brings besides tokens goes on from what this state has taken in."""
        return True

    def adopt(self, ask: Ask) -> None:
        """Answer an ask by the draft that was made before anybody asked."""
        self.ask = ask

    @abstractmethod
    def cut(self) -> None:
        """Follow a draft that was cut short: its last token is always yet to be computed."""
