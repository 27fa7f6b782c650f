"""Share a drafter's KV pool and steps among sessions. A session whose KV is taken computes it again when asked."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from outrider.verifier_service.scheduling.kv_cache import BlockPool

OLDEST_SHARE = 4  # the oldest ask gets up to 1/4 of the token budget before the others


class KvHolder(Protocol):
    """One session's KV."""

    block_table: list[int]


HolderT = TypeVar("HolderT", bound=KvHolder)


def reserve(
    pool: BlockPool,
    holder: HolderT,
    num_tokens: int,
    *,
    all_states: Iterable[HolderT],
    asked: Sequence[HolderT],
    younger: Sequence[HolderT],
    take_kv: Callable[[HolderT], None],
) -> bool:
    """Give a session blocks for `num_tokens` in all, if need be those of other sessions; False: it has to wait.

    Sessions that are not `asked` lose their KV first, in the order of `all_states`, then the `younger` asks from the
    youngest on, which must not be scheduled yet. `take_kv` takes a session's KV away.
    """
    needed = pool.num_blocks_for(num_tokens) - len(holder.block_table)
    if needed > pool.num_free_blocks:
        in_use = {id(state) for state in asked}
        idle = (state for state in all_states if id(state) not in in_use)
        victims = itertools.chain(idle, reversed(younger))
        while needed > pool.num_free_blocks:
            victim = next(victims, None)
            if victim is None:
                return False
            take_kv(victim)
    holder.block_table.extend(pool.allocate(max(0, needed)))
    return True


def share_budget(num_pending: Sequence[int], max_num_tokens: int, num_together: Sequence[int] = ()) -> list[int]:
    """Divide a step's tokens among asks, which come oldest first; return each one's share of its pending tokens.

    The shortest ask is served first, so that drafting never waits for a prefill. But a part of the step is reserved for
    the oldest, so that a stream of short asks cannot starve it. The last `num_together` pending tokens of an ask (at
    most `max_num_tokens`; empty: all zero) are computed in one step or not yet.
    """
    together = num_together or [0] * len(num_pending)

    def usable(index: int, share: int) -> int:
        share = min(share, num_pending[index])
        return share if share == num_pending[index] else min(share, num_pending[index] - together[index])

    shares = [0] * len(num_pending)
    shares[0] = usable(0, max(1, max_num_tokens // OLDEST_SHARE)) or num_pending[0]
    budget = max_num_tokens - shares[0]
    for index in sorted(range(len(num_pending)), key=num_pending.__getitem__):
        more = usable(index, shares[index] + budget) - shares[index]
        shares[index] += more
        budget -= more
    return shares


def num_common(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the common prefix of two lists."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while high - low > 1:  # left[:low] == right[:low], left[:high] != right[:high]
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low
